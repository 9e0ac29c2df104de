#!/usr/bin/env python3
"""Holds jitgemm/registers.py against the compiler: `python scripts/register_bound.py --help` teaches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import typer
from benchmark_lib.cells import Format, parse_format

from jitgemm.cli import common
from jitgemm.dtypes import REAL_TYPES
from jitgemm.errors import JitGemmError
from jitgemm.kernel.formats import BLOCK_K, WeightFormat, tuned_codes
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.devices import DeviceSpec, device_spec
from jitgemm.select.registers import registers_needed

FORMATS = ("e4m3_g128", "int8_g128", "int8_ch", "e4m3_g128_any", "e4m3_g128z", "int8_g128z", "e4m3_g32", "int8_g32")
WITHIN = 16


@dataclass(frozen=True)
class Built:
    """What the compiler made of a kernel.

    Attributes:
        kernel: its label.
        legal: whether the bound lets it pass.
        bound: registers a thread that the bound says suffice.
        available: those that a consumer thread has.
        problem: why it counts as a failed build, or None.
    """

    kernel: str
    legal: bool
    bound: int
    available: int
    problem: str | None

    @property
    def surprise(self) -> bool:
        """Legal and failed, or refused and built."""
        return self.legal == (self.problem is not None)


def near_the_bound(
    fmt: Format, scale_type: str, out: str, device: DeviceSpec, within: int
) -> tuple[list[KernelSpec], list[KernelSpec]]:
    """(legal kernels with at most `within` registers to spare by the bound, kernels that only the bound refuses)."""
    from jitgemm.select.choose import legal_kernels, refused_kernels

    codes = "any" if fmt.any_codes else tuned_codes(fmt.lhs, fmt.group_size, fmt.zero_point, BLOCK_K)
    weight = WeightFormat(fmt.group_size, fmt.zero_point, scale_type, codes)
    legal = [
        spec
        for spec in legal_kernels(fmt.lhs, weight, device, out)
        if spec.consumer_registers - registers_needed(spec) <= within
    ]
    return legal, list(refused_kernels(fmt.lhs, weight, device, out))


def build_all(jobs: Mapping[KernelSpec, bool], threads: int) -> Iterator[Built]:
    """Compiles kernels, each with whether the bound lets it pass, in threads; yields them as they are done."""
    from jitgemm.jit.cache import KernelCache
    from jitgemm.jit.compile_many import compile_all
    from jitgemm.kernel.render import kernel_source

    specs = list(jobs)
    with TemporaryDirectory() as folder:
        cache = KernelCache([Path(folder)])
        for index, result in compile_all(cache, [kernel_source(spec) for spec in specs], threads, common.err()):
            spec = specs[index]
            if isinstance(result, JitGemmError):
                raise result
            problem = result[0].slow_because or None
            yield Built(spec.label, jobs[spec], registers_needed(spec), spec.consumer_registers, problem)


app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.command()
@common.guarded
def register_bound(
    formats: Annotated[
        Optional[list[str]],
        typer.Option(
            "--format",
            metavar="NAME",
            help="A format as scripts/benchmark.py names them, such as int8_g64z; may be repeated.",
            show_default=" ".join(FORMATS),
        ),
    ] = None,
    scale: Annotated[str, typer.Option("--scale", metavar="|".join(REAL_TYPES), help="Type of the scales.")] = "bf16",
    out: Annotated[str, typer.Option("--out", metavar="|".join(REAL_TYPES), help="Type of the result.")] = "bf16",
    within: Annotated[
        int, typer.Option("--within", min=0, help="Compile legal kernels with at most so many registers to spare.")
    ] = WITHIN,
    only: Annotated[
        str, typer.Option("--only", metavar="TEXT", help="Compile the kernels whose labels hold this, such as n192.")
    ] = "",
    refused: Annotated[
        bool, typer.Option("--refused/--no-refused", help="Compile what only the bound refuses, too.")
    ] = True,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="Device to compile for.")] = "h200",
    threads: Annotated[
        Optional[int], typer.Option("--threads", min=1, help="Compilations at a time.", show_default="one a core")
    ] = None,
    json_file: Annotated[
        Optional[Path],
        typer.Option("--json", metavar="FILE", help="Write every kernel to this file, - for stdout and no table."),
    ] = None,
) -> None:
    """Compile the kernels near the bound on registers: which that it lets pass fail, which that it refuses build?

    \b
    A kernel that spills counts as a failed build, so that the selector must
    know before it compiles. jitgemm/registers.py adds up what a kernel
    needs; this command asks the NVRTC at hand. It needs no GPU and leaves
    the kernel cache alone. Run it when headers or shapes of tiles change, and
    with every NVRTC that is to be supported: what builds with one may spill
    with another.

    \b
    The table has the surprises alone: legal kernels that fail, and refused
    ones that build. A format takes a minute or two on two cores.

    \b
    Examples:
      python scripts/register_bound.py --format int8_g128
      python scripts/register_bound.py --no-refused --within 40 --json bound.json
      python scripts/register_bound.py --format e4m3_g128z --scale fp32 --only n192

    \b
    Exit codes:
      0  every legal kernel that was compiled builds
      1  one does not
      2  wrong arguments
      3  NVRTC is missing
    """
    if scale not in REAL_TYPES:
        raise ValueError(f"--scale: expected one of {', '.join(REAL_TYPES)}, got {scale!r}")
    if out not in REAL_TYPES:
        raise ValueError(f"--out: expected one of {', '.join(REAL_TYPES)}, got {out!r}")
    figures = device_spec(device)
    jobs: dict[KernelSpec, bool] = {}
    for fmt in dict.fromkeys(parse_format(text) for text in formats or FORMATS):
        legal, others = near_the_bound(fmt, scale, out, figures, within)
        jobs |= dict.fromkeys(legal, True) | (dict.fromkeys(others, False) if refused else {})
    jobs = {spec: legal for spec, legal in jobs.items() if only in spec.label}

    from jitgemm.jit.nvrtc import nvrtc_info

    version = nvrtc_info().build
    found = sorted(build_all(jobs, threads or os.cpu_count() or 1), key=lambda each: each.kernel)
    document: dict[str, Any] = {
        "tool": "jitgemm scripts/register_bound.py",
        "nvrtc": version,
        "kernels": [asdict(each) for each in found],
    }
    if json_file == Path("-"):
        common.print_json(document)
    else:
        if json_file is not None:
            from benchmark_lib.results import write_document

            write_document(json_file, document)
        rows = [
            (each.kernel, "legal" if each.legal else "refused", each.bound, each.available, each.problem or "builds")
            for each in found
            if each.surprise
        ]
        common.out().print(common.table(("kernel", "bound says", "registers", "available", "compiler says"), rows))
    for legal, name in ((True, "legal near the bound"), (False, "refused by the bound alone")):
        some = [each for each in found if each.legal == legal]
        if some:
            common.note(f"NVRTC {version}: {len(some)} {name}, {sum(each.problem is None for each in some)} build")
    if any(each.legal and each.problem for each in found):
        raise typer.Exit(common.FOUND)


if __name__ == "__main__":
    app()
