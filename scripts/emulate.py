#!/usr/bin/env python3
"""Runs a kernel on the CPU, in tests/emulator: `python scripts/emulate.py --help`, docs/emulator.md."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

import pytest
import torch
import typer
from emulator import cuda, launch
from emulator.problems import problem, share_of_bound

from jitgemm.cli import common
from jitgemm.errors import CompileError
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.kernel.spec import KernelSpec

SHOWN = 8
"""Values of a buffer that are printed."""
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

app = common.command_line(help="Run a CUDA kernel on the CPU, without a GPU, and see what it does wrong.")
Seeds = Annotated[
    int,
    typer.Option(
        "--seeds", min=1, help="Runs, each with another order of warps and arrival of copies; all must agree."
    ),
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(BYTES[tensor.element_size()])


def runs(seeds: int, run: Callable[[int], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What the first seed's run wrote; ends the command with exit code 1 at a fault, or where another run differs."""
    first: dict[str, torch.Tensor] = {}
    for seed in range(1, seeds + 1):
        try:
            results = run(seed)
        except launch.Fault as fault:
            common.fail(f"seed {seed}: {fault}", common.FOUND)
        first = first or results
        for name, values in results.items():
            apart = int((bits(values) != bits(first[name])).sum())
            if apart:
                common.fail(
                    f"seed {seed}: {apart} of {values.numel()} values of {name} differ from seed 1's: the result "
                    f"depends on which warp runs first, or on when a copy arrives",
                    common.FOUND,
                )
    common.note(f"{seeds} of {seeds} runs ended, with the same bits")
    return first


def ready() -> None:
    """Ends the command with exit code 3 where there is no NVRTC or no C++ compiler."""
    from jitgemm.jit.nvrtc import nvrtc_info

    nvrtc_info()
    if launch.COMPILER is None:
        raise CompileError("no C++ compiler: expected g++ or clang++ on the path, which builds the emulator")


@app.command("cuda")
@common.guarded
def run_cuda(
    file: Annotated[Path, typer.Argument(metavar="FILE.cu", help="CUDA source with one __global__ function.")],
    arguments: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="NAME=...", help="An argument of the kernel, in the order of its parameters."),
    ] = None,
    grid: Annotated[int, typer.Option("--grid", min=1, help="CTAs.")] = 1,
    block: Annotated[int, typer.Option("--block", min=32, help="Threads of a CTA, a multiple of 32.")] = 32,
    smem: Annotated[int, typer.Option("--smem", min=0, help="Bytes of dynamic shared memory.")] = 0,
    include: Annotated[
        Path | None, typer.Option("--include", metavar="FOLDER", help="Headers, included by their path in this folder.")
    ] = None,
    seeds: Seeds = 3,
) -> None:
    """Run the kernel of a CUDA file.

    \b
    NVRTC compiles it for sm_90a, and the emulator runs its PTX. The kernel
    may read and write its buffers, to the byte, and nothing else. Each run
    starts from the same values. Printed: the start of every buffer that the
    kernel changed.

    \b
    Arguments, one --arg for each parameter:
      n=i32:100            a value
      x=f32[100]:random    a buffer; the kernel gets its address
    Types are f32 f16 bf16 e4m3 f64 i8 u8 i16 i32 i64. A buffer is filled
    with zeros (the default), ones, arange, random, nan, or a number.

    \b
    Examples:
      python scripts/emulate.py cuda scale.cu --grid 4 --block 128 \\
          --arg out=f32[500] --arg x=f32[500]:arange --arg n=i32:500
      python scripts/emulate.py cuda ring.cu --include include --smem 65536 --arg out=f32[64]

    \b
    Exit codes:
      0  every run ended, all with the same bits
      1  the emulator reports something, or runs differ
      2  wrong arguments
      3  NVRTC or the C++ compiler is missing, or the source does not compile
    """
    if block % 32:
        raise ValueError(f"--block: expected a multiple of 32, got {block}")
    headers = {}
    if include is not None:
        if not include.is_dir():
            raise ValueError(f"--include: expected a folder, got {str(include)!r}")
        found = (path for path in sorted(include.rglob("*")) if path.suffix in (".h", ".hpp", ".cuh", ".inl"))
        headers = {path.relative_to(include).as_posix(): path.read_text() for path in found}
    given = [cuda.argument_of(text) for text in arguments or ()]
    ready()
    try:
        kernel = cuda.load(file.read_text(), headers, file.name)
    except launch.Fault as fault:
        common.fail(str(fault), common.FOUND)

    def run(seed: int) -> dict[str, torch.Tensor]:
        own = [cuda.Argument(each.name, each.values.clone()) for each in given]
        cuda.run(kernel, own, grid, (block, 1), smem, seed)
        return {each.name: each.values for each in own if each.is_buffer}

    written = runs(seeds, run)
    for each in given:
        if each.is_buffer and not torch.equal(bits(each.values), bits(written[each.name])):
            values = written[each.name]
            shown = ", ".join(f"{value:g}" for value in values[:SHOWN].double().tolist())
            typer.echo(f"{each.name}: {shown}{', ...' if values.numel() > SHOWN else ''}")


@app.command("gemm")
@common.guarded
def run_gemm(
    label: Annotated[str, typer.Argument(metavar="LABEL", help="A dense kernel, as `jitgemm explain` names it.")],
    m: Annotated[int, typer.Argument(metavar="M", min=1)],
    n: Annotated[int, typer.Argument(metavar="N", min=8)],
    k: Annotated[int, typer.Argument(metavar="K", min=16)],
    plant: Annotated[
        tuple[str, str, str] | None,
        typer.Option("--plant", metavar="HEADER OLD NEW", help="A fault: the header has NEW where OLD stands, once."),
    ] = None,
    seeds: Seeds = 3,
) -> None:
    """Run one of jitgemm's GEMMs on random operands.

    \b
    The result is held against the exact one and its error bound
    (gemm_w4a8_bound). --plant puts a fault into a header first, to see
    whether and how it shows. 64 x 200 x 544 takes about a second.

    \b
    Examples:
      python scripts/emulate.py gemm e4m3-g128-bf16-m8n64-k1x2-s12 5 200 544
      python scripts/emulate.py gemm s8fast-g128-bf16-m16n64-s3 30 200 1056 --plant \\
          gemm/loop "if (position.lane == 0) barrier_arrive(shared.empty(stage));" ""

    \b
    Exit codes:
      0  every run is within the bound, and all have the same bits
      1  one is not, runs differ, or the emulator reports something
      2  wrong arguments
      3  NVRTC or the C++ compiler is missing, or the kernel does not compile
    """
    spec = KernelSpec.from_label(label)
    if spec.experts:
        raise ValueError(f"LABEL: expected a dense kernel, got {label}, of grouped GEMMs")
    ready()
    operands = problem(spec, m, n, k)
    with pytest.MonkeyPatch.context() as patch:
        emulator = launch.emulate(patch)
        if plant is not None:
            launch.plant(patch, *plant)

        def run(seed: int) -> dict[str, torch.Tensor]:
            emulator.seed = seed
            operands.out.fill_(3.0)
            GemmLaunch(operands, spec).launch(operands)
            return {"out": operands.out.clone()}

        runs(seeds, run)
    share = share_of_bound(operands)
    if share > 1:
        common.fail(f"out is wrong: {share:.3g} times as far from the exact result as its bound allows", common.FOUND)
    typer.echo(f"{label}: {m} x {n} x {k}, at most {share:.2g} of its bound from the exact result")


if __name__ == "__main__":
    app()
