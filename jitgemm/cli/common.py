"""What the commands share: output, exit codes, and the options that describe a layer. Knows no single command."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Optional

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jitgemm.dtypes import REAL_TYPES
from jitgemm.errors import JitGemmError
from jitgemm.kernel.codes import CODES, typed_code
from jitgemm.kernel.formats import BLOCK_K, CORRECTION_TYPES, GROUP_SIZES, K_ALIGNMENT, SUMS, WeightFormat, tuned_order

FOUND, USAGE, FAILED = 1, 2, 3
"""Exit codes other than 0: a check found something, wrong arguments, the work failed."""

LHS_TYPES = {"fp8": "e4m3", "e4m3": "e4m3", "int8": "s8"}
"""Types of activations: the names that people use, and the package's."""
Lhs = Enum("Lhs", {name: name for name in LHS_TYPES}, type=str)
RealType = Enum("RealType", {name: name for name in REAL_TYPES}, type=str)
"""Types of scales, results and unquantised activations. Each is part of a kernel."""
Correction = Enum("Correction", {name: name for name in CORRECTION_TYPES}, type=str)
Sums = Enum("Sums", {name: name for name in SUMS}, type=str)
Codes = Enum("Codes", {name: name for name in ("any", "tuned")}, type=str)
"""Order of a weight's codes, by how it is asked for: `lhs_dtype` of `pack_w4` left out, or given."""
NVFP4_ORDERS = {"any": "nvfp4", "tuned": "near"}
"""Those of NVFP4, which its scales decide: any scales, or such as are near one another in every row."""

_GROUPS = ", ".join(map(str, GROUP_SIZES))
HELP = {
    "--lhs": "Activations: fp8 (or e4m3), int8.",
    "--group-size": f"k per scale: {_GROUPS}; channel (or -1).",
    "--zero-point": "Codes 0..15 with integer zero points.",
    "--offset": "A float offset per group.",
    "--correction": "fp16 or bf16: pack_w4(correction=True).",
    "--bits": "4 or 8.",
    "--scale-dtype": "Of scales: bf16, fp16, fp32.",
    "--codes": "Their order: any, or tuned as jitgemm.nn packs.",
    "--mxfp4": "MXFP4 with --group-size channel, 128, 32.",
    "--nvfp4": "NVFP4, without --group-size.",
    "--two-level": "Two levels (QServe), for --lhs int8.",
    "--out": "Of results: bf16, fp16, fp32.",
    "--sums": "f32, f16 (e4m3), exact (int8).",
    "--block-scales": "A scale per token and 128 k.",
    "--e8m0": "The same as powers of two, packed.",
}
"""Options that mean the same to every command."""


def layer_option(flag: str, more: str = "", metavar: str | None = "TYPE", **options: Any) -> Any:
    """One of HELP's options; more: help that is the command's own, the default in it, which saves a line."""
    return typer.Option(flag, help=f"{HELP[flag]} {more}".strip(), metavar=metavar, show_default=False, **options)


BatchInvariant = Annotated[bool, typer.Option("--batch-invariant", help="Calls are batch_invariant=True.")]
_DEVICE_HELP = "Its kernels: h100-sxm, h20, 'h200,sms=66'. Default: the GPU at hand, else h200."
Device = Annotated[Optional[str], typer.Option("--device", metavar="NAME", help=_DEVICE_HELP)]
_JSON_HELP = "Print JSON with all columns."
Json = Annotated[bool, typer.Option("--json", help=_JSON_HELP)]


def command_line(**options: Any) -> typer.Typer:
    """A `typer.Typer` as the commands and scripts are."""
    help_names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=help_names, **options)


def out() -> Console:
    """Console for data. Piped output is not cut to a terminal's width."""
    return Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)


def err() -> Console:
    """Console for progress and notes."""
    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str, allow_nan=False) + "\n")


_WHOLE = ("", "key", "status")
"""Columns of text that are never folded."""


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], left: Sequence[str] = ("kernel",), drop: Sequence[str] = ()
) -> Table:
    """A borderless table that fits the terminal and cuts no text. Columns are left out first, and a line below names
    them; text that is still too wide is folded. None is -.

    Args:
        left: columns of text, to the left; the others are numbers, to the right, and never folded.
        drop: columns that may be left out, the first to go first.
    """
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    folds = {column: column in left and column not in _WHOLE for column in columns}
    widths = {column: max(map(cell_len, texts)) for column, *texts in zip(columns, columns, *cells)}
    shown = list(columns)
    for column in drop:
        if sum(widths[name] + 2 for name in shown) - 2 <= out().width:
            break
        shown.remove(column)
    missing = [column for column in columns if column not in shown]
    caption = f"left out in {out().width} columns: {', '.join(missing)}; --json has all" if missing else None
    made = Table(box=None, pad_edge=False, header_style="bold", caption=caption, caption_justify="left")
    for column in shown:
        justify = "left" if column in left else "right"
        made.add_column(column, justify=justify, no_wrap=not folds[column], overflow="fold")
    for row in cells:
        made.add_row(*(Text(cell) for column, cell in zip(columns, row) if column in shown))  # no markup
    return made


def print_facts(facts: Mapping[str, object]) -> None:
    """Names and values, one pair a line, nothing cut."""
    width = max(map(len, facts), default=0)
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in facts.items()))


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the package's errors into a line on stderr and an exit code; all else is a bug and keeps its traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:  # the reader of our stdout has seen enough, as in `jitgemm cache ls | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except ValueError as error:
            fail(str(error), USAGE)
        except (JitGemmError, OSError) as error:
            fail(str(error), FAILED)

    return run


def note(message: str, style: str = "dim") -> None:
    err().print(message, style=style, markup=False, soft_wrap=True)


def fail(message: str, code: int) -> None:
    note(f"error: {message}", "red")
    raise typer.Exit(code)


def recipe_of(said: Mapping[str, Any], calibrated: bool = False) -> Any:
    """`Recipe.of` what options say; a ValueError names the option."""
    from jitgemm.nn.recipe import Recipe  # with torch

    try:
        return Recipe.of(said, calibrated=calibrated)
    except (TypeError, ValueError) as error:
        name, _, problem = str(error).partition(":")
        flag = {"symmetric": "zero-point"}.get(name, name.replace("_", "-"))
        problem = re.sub(r"\b(scheme|bits)='?([\w-]+)'?", r"--\1 \2", problem)
        raise ValueError(f"--{flag}:{problem}") from error


def weight_format(
    codes: Codes, lhs: str, group_size: int, zero_point: bool, scale_type: str, offset: bool, k: int, bits: int = 4,
    mxfp4: bool = False, nvfp4: bool = False, two_level: bool = False, correction: str = "",
) -> WeightFormat:  # fmt: skip
    """The format of a weight of k columns that is packed so; e4m3's tuned order takes it to hold no code -8, NVFP4's to
    have scales near one another, and groups of 128 with 8 bits to be blocks, whose rows share scales.

    Raises:
        ValueError: offsets per channel; zero points or offsets of 8 bits; neither 4 nor 8 bits; no group size; MXFP4
            with another group size, 8 bits, zero points, offsets or int8 activations; NVFP4 with a group size or one of
            these; two levels with these or e4m3 activations; several of the three. A
            correction of other weights than of 4 bits in groups, for int8.
    """
    if two_level:
        if group_size or zero_point or offset or bits != 4 or lhs != "s8" or mxfp4 or nvfp4:
            expected = "--lhs int8, without --group-size, --zero-point, --offset, --bits, --mxfp4, --nvfp4"
            raise ValueError(
                f"--two-level: expected {expected}, got --group-size {group_size or 'channel'}, --lhs {lhs}"
            )
        return WeightFormat(0, False, scale_type, "two_level", code="two_level")
    if correction:
        group = 0 if group_size >= k else group_size
        if lhs != "s8" or bits != 4 or not group or mxfp4 or nvfp4 or two_level or (zero_point and offset):
            expected = "--lhs int8, a --group-size below k and not both of --zero-point and --offset"
            raise ValueError(f"--correction: expected {expected}, got --group-size {group or 'channel'}, --lhs {lhs}")
        return WeightFormat(group, zero_point, scale_type, "s8", offset, correction=correction)
    if nvfp4:
        if group_size or zero_point or offset or bits != 4 or lhs != "e4m3" or mxfp4:
            expected = "e4m3 activations, without --group-size, --zero-point, --offset, --bits, --mxfp4"
            raise ValueError(f"--nvfp4: expected {expected}, got --group-size {group_size or 'channel'}, --lhs {lhs}")
        return WeightFormat(0, False, "fp32", NVFP4_ORDERS[codes.value], code="nvfp4")
    if mxfp4:
        size = 0 if group_size >= k else group_size
        if size not in CODES["e2m1"].group_sizes or zero_point or offset or bits != 4 or lhs != "e4m3":
            expected = "--group-size channel, 128 or 32 and e4m3 activations, without --zero-point, --offset, --bits"
            raise ValueError(f"--mxfp4: expected {expected}, got --group-size {group_size or 'channel'}, --lhs {lhs}")
        return WeightFormat(size, False, "bf16", "e2m1", code="e2m1")
    code = {code.bits: code for code in (CODES["int4"], CODES[typed_code(lhs)])}.get(bits)
    if code is None or (zero_point and not code.orders[0].zero_decoders) or (offset and not code.offsets):
        raise ValueError(f"--bits: expected 4, or 8 without --zero-point and --offset, got {bits}")
    group = 0 if group_size >= k else group_size
    if offset and not group:
        raise ValueError(f"--offset: expected a --group-size below k, got {group_size or 'channel'} and k = {k}")
    orders = {"any": code.orders[0].name, "tuned": tuned_order(lhs, group, zero_point, k, code.name)}
    strips = code.uniform_strip_scale and group == BLOCK_K
    return WeightFormat(group, zero_point, scale_type, orders[codes.value], offset, code.name, strips)


def parse_group_size(text: str) -> int:
    """A group size, 0 for per channel; one that is above all is for layers of at most so many k."""
    if text in ("channel", "k", "0", "-1"):
        return 0
    if text.isdecimal() and (int(text) in GROUP_SIZES or int(text) > GROUP_SIZES[-1]):
        return int(text)
    raise ValueError(f"--group-size: expected one of {_GROUPS} or 'channel', got {text!r}")


def parse_shape(text: str) -> tuple[int, int]:
    """(n, k) from "N,K" or "NxK"."""
    match = re.fullmatch(r"\s*(\d+)\s*[,x]\s*(\d+)\s*", text)
    if not match:
        raise ValueError(f"--shape: expected N,K such as 4096,14336, got {text!r}")
    n, k = int(match[1]), int(match[2])
    for name, size, step in (("n", n, 8), ("k", k, K_ALIGNMENT)):
        if size < step or size % step:
            raise ValueError(f"--shape {text}: {name}: expected a positive multiple of {step}, got {size}")
    return n, k


_SIZES = {"t": 1 << 40, "g": 1 << 30, "m": 1 << 20, "k": 1 << 10, "": 1}
_AGES = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_size(text: str) -> int:
    """Bytes from "500M", "2GiB" or a plain number; units are powers of 1024."""
    return int(_amount(text, r"([kmgt]?)(?:i?b)?", _SIZES, "--max-size: expected a size such as 500M or 2G"))


def parse_age(text: str) -> float:
    """Seconds from "30d", "12h", "90m", "2w" or "45s"."""
    return _amount(text, r"([smhdw])", _AGES, "--older-than: expected an age such as 30d, 12h or 90m")


def _amount(text: str, unit: str, units: Mapping[str, int], expected: str) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*{unit}", text.strip().lower())
    if not match:
        raise ValueError(f"{expected}, got {text!r}")
    return float(match[1]) * units[match[2]]


def show_spills(spill_bytes: int | None, serialised: str | None) -> int | str | None:
    """What slows a build down, for a table: bytes of spills, and whether ptxas serialised its wgmma. None: no build."""
    return f"{spill_bytes} serialised" if serialised else spill_bytes


def show_size(size: int) -> str:
    """Bytes for people."""
    unit = next((unit for unit, bytes in _SIZES.items() if size >= bytes), "")
    value = size / _SIZES[unit]
    return f"{value:.{0 if not unit or value >= 100 else 1}f} {unit.upper() + 'iB' if unit else 'B'}"


def show_age(stamp: float | None, now: float | None = None) -> str:
    """How long ago a unix time was, for people."""
    if not stamp:
        return "-"
    age = max(0.0, (now or time.time()) - stamp)
    unit = next((unit for unit, seconds in _AGES.items() if age >= 2 * seconds), "s")
    return f"{age / _AGES[unit]:.0f}{unit}"
