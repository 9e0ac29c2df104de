#!/usr/bin/env python3
"""Holds jitgemm/select/legal.py against the compiler: `python scripts/register_bound.py --help` teaches."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import typer
from benchmark_lib.cells import Format, parse_format

from jitgemm.cli import common
from jitgemm.jit.entry import MAX_SPILL_BYTES
from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import with_k_rules
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import illegal_kernels, legal_kernels, registers_needed

FORMATS = (
    "e4m3_g128", "int8_g128", "e4m3_ch", "int8_ch", "e4m3_g128_any", "int8_g128_any", "e4m3_g128z", "int8_g128z",
    "e4m3_chz", "int8_chz", "e4m3_g64z", "int8_g64z", "e4m3_g32", "int8_g32", "e4m3_g32z", "int8_g32z",
)  # fmt: skip
DEVICE = DEVICES["h200"]
WITHIN = 12
"""Registers to spare, or too few, of the kernels that are compiled."""
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


def sample(fmt: Format, scale_type: str, count: int) -> dict[KernelSpec, bool]:
    """Some kernels near the limit, and whether they are legal: `count` on each side, half of them direct."""
    weight = replace(fmt.problem(16, 4096, LONG_K).format, scale_type=scale_type)
    rng, found = random.Random(1), {}
    for legal, kernels in ((True, legal_kernels), (False, illegal_kernels)):
        some = [
            with_k_rules(spec, LONG_K) if rng.random() < 0.5 else spec
            for spec in kernels(fmt.lhs, weight, DEVICE, "bf16")
            if abs(spec.consumer_registers - registers_needed(spec)) <= WITHIN
        ]
        found |= dict.fromkeys(rng.sample(some, min(count, len(some))), legal)
    return found


def build_all(legal: dict[KernelSpec, bool]) -> Iterator[Built]:
    """Compiles kernels in threads and yields them as they are done; leaves the kernel cache alone."""
    from jitgemm.jit.cache import KernelCache
    from jitgemm.jit.compile_many import compile_all, look_up
    from jitgemm.kernel.render import kernel_source

    with TemporaryDirectory() as folder:
        cache = KernelCache([Path(folder)])
        specs = {spec.label: spec for spec in legal}
        jobs = [look_up(cache, kernel_source(spec)) for spec in legal]
        for job in compile_all(cache, jobs, os.cpu_count() or 1, common.err()):
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
    count: Annotated[
        int, typer.Option("--sample", min=1, help="Kernels of a format and scale on each side of the limit.")
    ] = 20,
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
    Exit codes:
      0  no legal kernel spills more than 200 bytes or serialises its wgmma
      1  one does
      2  wrong arguments
      3  NVRTC is missing
    """
    jobs: dict[KernelSpec, bool] = {}
    for fmt in dict.fromkeys(parse_format(text) for text in formats or FORMATS):
        for scale in ("bf16", "fp32") if fmt.group_size else ("fp32",):
            jobs |= sample(fmt, scale, count)

    from jitgemm.jit.nvrtc import nvrtc_info

    found = sorted(build_all(jobs), key=lambda each: each.kernel)
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
        common.note(f"NVRTC {nvrtc_info().build}: {len(some)} {name}, {spill} spill, {badly} badly")
    if any(each.legal and each.badly for each in found):
        raise typer.Exit(common.FOUND)


if __name__ == "__main__":
    app()
