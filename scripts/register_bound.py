#!/usr/bin/env python3
"""Holds jitgemm/select/legal.py against the compiler: `python scripts/register_bound.py --help` teaches."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import typer
from benchmark_lib.cells import Format, parse_format

from jitgemm.cli import common
from jitgemm.dtypes import REAL_TYPES
from jitgemm.jit.entry import MAX_SPILL_BYTES
from jitgemm.kernel.formats import BLOCK_K, WeightFormat, tuned_order
from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import with_k_rules
from jitgemm.select.devices import DeviceSpec, device_spec
from jitgemm.select.legal import illegal_kernels, legal_kernels, registers_needed

FORMATS = (
    "e4m3_g128", "int8_g128", "e4m3_ch", "int8_ch", "e4m3_g128_any", "int8_g128_any", "e4m3_g128z", "int8_g128z",
    "e4m3_chz", "int8_chz", "e4m3_g64z", "int8_g64z", "e4m3_g32", "int8_g32", "e4m3_g32z", "int8_g32z",
)  # fmt: skip
LONG_K = 16384
"""k for which a kernel takes `direct` where it can."""


@dataclass(frozen=True)
class Built:
    """What the compiler made of a kernel.

    Attributes:
        kernel: its label.
        legal: whether the sum lets it pass.
        needed, available: registers of a consumer thread, by the sum and by the launch.
        spill_bytes: stored and loaded.
        serialised: what ptxas says of wgmma that it serialised, or "".
    """

    kernel: str
    legal: bool
    needed: int
    available: int
    spill_bytes: int
    serialised: str

    @property
    def badly(self) -> bool:
        return self.spill_bytes > MAX_SPILL_BYTES or self.serialised != ""


def sample(
    fmt: Format, scale_type: str, out: str, device: DeviceSpec, within: int, count: int, seed: int
) -> dict[KernelSpec, bool]:
    """Kernels with at most `within` registers to spare or too few, and whether they are legal; half of them direct."""
    codes = "any" if fmt.any_codes else tuned_order(fmt.lhs, fmt.group_size, fmt.zero_point, BLOCK_K)
    weight = WeightFormat(fmt.group_size, fmt.zero_point, scale_type, codes)
    rng, found = random.Random(seed), {}
    for legal, kernels in ((True, legal_kernels), (False, illegal_kernels)):
        some = [
            with_k_rules(spec, LONG_K) if rng.random() < 0.5 else spec
            for spec in kernels(fmt.lhs, weight, device, out)
            if abs(spec.consumer_registers - registers_needed(spec)) <= within
        ]
        found |= dict.fromkeys(rng.sample(some, min(count, len(some))), legal)
    return found


def build_all(legal: dict[KernelSpec, bool], threads: int) -> Iterator[Built]:
    """Compiles kernels in threads and yields them as they are done; leaves the kernel cache alone."""
    from jitgemm.jit.cache import KernelCache
    from jitgemm.jit.compile_many import compile_all, look_up
    from jitgemm.kernel.render import kernel_source

    with TemporaryDirectory() as folder:
        cache = KernelCache([Path(folder)])
        specs = {spec.label: spec for spec in legal}
        for job in compile_all(cache, [look_up(cache, kernel_source(spec)) for spec in legal], threads, common.err()):
            if job.error:
                raise job.error
            spec, metadata = specs[job.source.label], job.entry.metadata
            needed, available = registers_needed(spec), spec.consumer_registers
            spills, serialised = metadata["spill_bytes"], metadata.get("serialised", "")
            yield Built(spec.label, legal[spec], needed, available, spills, serialised)


app = common.command_line()


@app.command()
@common.guarded
def register_bound(
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="A format as scripts/benchmark.py names them, such as int8_g64z; may be repeated.",
            show_default=" ".join(FORMATS),
        ),
    ] = None,
    scales: Annotated[
        list[str] | None,
        typer.Option("--scale", metavar="|".join(REAL_TYPES), help="May be repeated.", show_default="bf16 fp32"),
    ] = None,
    out: Annotated[str, typer.Option("--out", metavar="|".join(REAL_TYPES), help="Type of the result.")] = "bf16",
    within: Annotated[
        int, typer.Option("--within", min=0, help="Compile kernels this many registers around the limit.")
    ] = 12,
    count: Annotated[
        int, typer.Option("--sample", min=1, help="Kernels of a format and scale on each side of the limit.")
    ] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Of the sample.")] = 1,
    only: Annotated[
        str, typer.Option("--only", metavar="TEXT", help="Compile the kernels whose labels hold this, such as n192.")
    ] = "",
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="Device to compile for.")] = "h200",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Compilations at a time.", show_default="one a core")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write every kernel to this file, - for stdout and no table."),
    ] = None,
) -> None:
    """Compile a sample of kernels near the limit on registers: which of them spill?

    \b
    jitgemm/select/legal.py adds up what a kernel needs, so that the
    selector leaves out what would spill badly. This command asks the NVRTC at
    hand. It needs no GPU and leaves the kernel cache alone. Run it when
    headers or shapes of tiles change, and with a new NVRTC.

    \b
    The table has the kernels that spill, and the kernels that the sum leaves out and
    that do not. A format takes half a minute on two cores.

    \b
    Examples:
      python scripts/register_bound.py --format int8_g128
      python scripts/register_bound.py --format e4m3_g128z --scale fp32 --only n192 --sample 1000

    \b
    Exit codes:
      0  no legal kernel spills more than 200 bytes or serialises its wgmma
      1  one does
      2  wrong arguments
      3  NVRTC is missing
    """
    for name, value in (("--out", out), *(("--scale", scale) for scale in scales or ())):
        if value not in REAL_TYPES:
            raise ValueError(f"{name}: expected one of {', '.join(REAL_TYPES)}, got {value!r}")
    figures = device_spec(device)
    jobs: dict[KernelSpec, bool] = {}
    for fmt in dict.fromkeys(parse_format(text) for text in formats or FORMATS):
        for scale in (scales or ("bf16", "fp32")) if fmt.group_size else ("fp32",):
            jobs |= sample(fmt, scale, out, figures, within, count, seed)
    jobs = {spec: legal for spec, legal in jobs.items() if only in spec.label}

    from jitgemm.jit.nvrtc import nvrtc_info

    version = nvrtc_info().build
    found = sorted(build_all(jobs, threads or os.cpu_count() or 1), key=lambda each: each.kernel)
    if json_file is not None:
        document = {
            "tool": "jitgemm scripts/register_bound.py",
            "nvrtc": version,
            "kernels": [asdict(each) for each in found],
        }
        if json_file == Path("-"):
            common.print_json(document)
        else:
            from benchmark_lib.results import write_document

            write_document(json_file, document)
    if json_file != Path("-"):
        rows = [
            (each.kernel, "legal" if each.legal else "illegal", each.needed, each.available, each.spill_bytes,
             "serialised" if each.serialised else "")
            for each in found
            if each.legal == bool(each.spill_bytes or each.serialised)
        ]  # fmt: skip
        columns = ("kernel", "the sum says", "needed", "available", "spilled bytes", "wgmma")
        common.out().print(common.table(columns, rows))
    for legal, name in ((True, "legal"), (False, "illegal")):
        some = [each for each in found if each.legal == legal]
        spill, badly = sum(each.spill_bytes > 0 for each in some), sum(each.badly for each in some)
        common.note(f"NVRTC {version}: {len(some)} {name}, {spill} spill, {badly} badly")
    if any(each.legal and each.badly for each in found):
        raise typer.Exit(common.FOUND)


if __name__ == "__main__":
    app()
