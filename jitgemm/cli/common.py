"""What the commands share: output, exit codes, and the options that describe a layer. Knows no single command."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from jitgemm.dtypes import REAL_TYPES
from jitgemm.errors import JitGemmError
from jitgemm.kernel.formats import K_ALIGNMENT, SUMS, WeightFormat, format_named

FOUND, USAGE, FAILED = 1, 2, 3
"""Exit codes other than 0: a check found something, wrong arguments, the work failed."""

LHS_TYPES = {"fp8": "e4m3", "e4m3": "e4m3", "int8": "s8"}
"""Types of activations: the names that people use, and the package's."""
# Members come from tables, so defaults are looked up by value: Sums("f32").
Lhs = Enum("Lhs", {name: name for name in LHS_TYPES}, type=str)  # type: ignore[misc]
RealType = Enum("RealType", {name: name for name in REAL_TYPES}, type=str)  # type: ignore[misc]
"""Types of scales, results and unquantised activations. Each is part of a kernel."""
Sums = Enum("Sums", {name: name for name in SUMS}, type=str)  # type: ignore[misc]
HELP = {
    "--lhs": "Activations: e4m3 (or fp8), int8.",
    "--weight": "Its format's name, such as g128-bf16-z.",
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
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help=_DEVICE_HELP)]
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
        made.add_column(
            column, justify="left" if column in left else "right", no_wrap=not folds[column], overflow="fold"
        )
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


def recipe_of(said: Mapping[str, Any], calibrated: bool = False, option: str = "") -> Any:
    """`Recipe.of` what one option, or options by these names, say; a ValueError names the option."""
    from jitgemm.nn.recipe import Recipe  # with torch

    try:
        return Recipe.of(said, calibrated=calibrated)
    except (TypeError, ValueError) as error:
        if option:
            raise ValueError(f"{option}: {error}") from error
        name, _, problem = str(error).partition(":")
        flag = {"symmetric": "zero-point"}.get(name, name.replace("_", "-"))
        problem = re.sub(r"\b(scheme|bits)='?([\w-]+)'?", r"--\1 \2", problem)
        raise ValueError(f"--{flag}:{problem}") from error


def weight_format(name: str, k: int | None = None) -> WeightFormat:
    """The format of this name, of a weight of k columns: groups of as many or more are one scale per row.

    Raises:
        ValueError: there is no such format, or it needs shorter groups.
    """
    try:
        format = format_named(name)
        if k is None or format.group_size < k:
            return format
        return replace(format, group_size=0, uniform_strip_scale=False)
    except ValueError as error:
        of_k = "" if k is None else f" with k = {k}"
        raise ValueError(f"--weight {name}{of_k}: {str(error).partition(';')[0]}") from None


_VALUED = ("--group-size", "--bits", "--codes", "--scale-dtype", "--correction")
_FLAGS = ("--zero-point", "--offset", "--mxfp4", "--nvfp4", "--two-level")


class OfWeights(TyperCommand):
    """A command that had ten options of a weight before it had --weight."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if wanted := named_instead(args):
            fail(wanted, USAGE)
        return super().parse_args(ctx, args)


def named_instead(args: Sequence[str]) -> str:
    """What to write instead of options that are gone; "" where there are none."""
    split = [(name, value or (*args, "")[i + 1]) for i, (name, _, value) in enumerate(a.partition("=") for a in args)]
    said = {name: value for name, value in split if name in (*_VALUED, *_FLAGS)}
    if not said:
        return ""
    size, scale = said.get("--group-size", ""), said.get("--scale-dtype", "bf16")
    group = "channel" if size in ("channel", "k", "0", "-1") else f"g{size or 128}"
    if "--model" in dict(split):
        names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        recipe: dict[str, Any] = {"bits": 8} if said.get("--bits") == "8" else {}
        recipe |= {"group_size": int(size) if size.isdecimal() else -1} if size else {}
        recipe |= {"symmetric": False} if "--zero-point" in said else {}
        recipe |= {"scale_dtype": names.get(scale, scale)} if "--scale-dtype" in said else {}
        return f"{', '.join(said)}: expected --recipe '{json.dumps(recipe)}' instead"
    code = "s8" if dict(split).get("--lhs") == "int8" else "e4m3"
    order = code if said.get("--codes") in ("tuned", "both") else "any"
    if "--mxfp4" in said:
        name = f"mx-{group if size else 'channel'}-bf16-e2m1"
    elif "--nvfp4" in said:
        name = f"nv-channel-fp32-{'nvfp4' if said.get('--codes') == 'any' else 'near'}"
    elif "--two-level" in said:
        name = f"tl-channel-{scale}-two_level"
    elif said.get("--bits") == "8":
        name = f"w8-{group}-{scale}{'-b' if group == 'g128' else ''}-{code}"
    else:
        zero, corrects = "--zero-point" in said, said.get("--correction")
        parts = [group, scale, *["z"] * zero, *["o"] * ("--offset" in said), *([f"x{corrects}"] if corrects else [])]
        name = "-".join(parts if zero else [*parts, "s8" if corrects else order])
    return f"{', '.join(said)}: expected --weight {name} instead"


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
