#!/usr/bin/env python3
"""What the GPU's counters say of a GEMM of each contestant: `python scripts/counters.py --help`."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import typer
from benchmark_lib.cells import make_cells, parse_format
from benchmark_lib.contestants import pick
from rich.table import Table

from jitgemm.cli import common

app = common.command_line()

SECTIONS = (
    "SpeedOfLight", "InstructionStats", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables", "LaunchStats",
)  # fmt: skip
ROWS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "SM cycles, thousands": ("sm__cycles_active.avg", 1e-3),
    "clock, GHz": ("gpc__cycles_elapsed.max.per_second", 1e-9),
    "tensor cores busy, %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "warp instructions, M": ("smsp__inst_executed.sum", 1e-6),
    "shared memory busy, %": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed", 1),
    "L2 to SMs, MB": ("lts__t_sectors_srcunit_tex_op_read.sum", 32e-6),
    "HBM read, MB": ("dram__bytes_read.sum", 1e-6),
    "registers a thread": ("launch__registers_per_thread", 1),
    "threads a CTA": ("launch__block_size", 1),
    "CTAs": ("launch__grid_size", 1),
    "CTAs a cluster": ("launch__cluster_size", 1),
}
"""Of the table: counter, and what it is multiplied by."""


@app.command()
@common.guarded
def counters(
    formats: Annotated[
        Optional[list[str]], typer.Option("--format", metavar="NAME", help="As benchmark.py's; may be repeated.")
    ] = None,
    peer: Annotated[
        Optional[list[str]], typer.Option("--peer", metavar="NAME", help="As benchmark.py's; may be repeated.")
    ] = None,
    shape: Annotated[str, typer.Option("--shape", metavar="N,K")] = "4096,4096",
    m: Annotated[int, typer.Option("--m", min=1)] = 4096,
    csv_file: Annotated[
        Optional[Path], typer.Option("--csv", metavar="FILE", help="Write all that Nsight Compute said.")
    ] = None,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    """Profile one call of each contestant with Nsight Compute, and print its counters side by side.

    Needs a Hopper GPU and `ncu` (CUDA toolkit); NCU=/path/to/ncu says where it is. Every call is replayed once for each
    few counters; the time is one replay's, `benchmark.py --sustained` has watts and times at the power limit.

    \b
    Example:
      python scripts/counters.py --format w8_e4m3_ch --format w8_int8_ch --peer fp8row --peer fp8ten --shape 28672,4096
    """
    chosen = pick([parse_format(name) for name in formats or ["w8_e4m3_ch"]], peer or ["fp8row", "fp8ten"])
    if child:
        _call_each(chosen, shape, m)
        return
    ncu = os.environ.get("NCU") or shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    sections = [part for section in SECTIONS for part in ("--section", section)]
    command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw", *sections]
    command += ["--print-units", "base", sys.executable, *sys.argv, "--child"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if csv_file is not None:
        csv_file.write_text(said.stdout)
    if said.returncode:
        raise OSError(f"{ncu}: exit status {said.returncode}: {said.stdout[-2000:]}")
    start = said.stdout.index('"ID"')
    kernels = [
        line for line in csv.DictReader(io.StringIO(said.stdout[start:])) if line["ID"]
    ]  # behind a line of units
    if len(kernels) != len(chosen):
        raise OSError(f"expected {len(chosen)} kernels, one a contestant, got {[k['Kernel Name'] for k in kernels]}")
    table = Table(title=f"{shape}, m = {m}", box=None)
    table.add_column()
    for each in chosen:
        table.add_column(each.name, justify="right")
    for row, (counter, factor) in ROWS.items():
        texts = [kernel.get(counter, "").replace(",", "") for kernel in kernels]
        table.add_row(row, *(f"{float(text) * factor:,.4g}" if text else "-" for text in texts))
    common.out().print(table)
    for each, kernel in zip(chosen, kernels, strict=True):
        common.out().print(f"{each.name}: {kernel['Kernel Name']}", soft_wrap=True)


def _call_each(chosen: list, shape: str, m: int) -> None:
    """Calls every contestant, profiled the third time."""
    import torch
    from benchmark_lib.data import source_of

    (cell,) = make_cells([shape], None, (), 1, (m,))
    source = source_of(cell)
    for each in chosen:
        run = each.load(source, 2)(m, 1)
        for call in run.calls:
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        run.calls[0]()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    app()
