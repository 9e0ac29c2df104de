"""The main job of scripts/quickstart.sh: gate and up projection of a Llama-3-8B, 4-bit weights on 8-bit activations.

With a Hopper GPU the GEMM runs there, is checked against the exact reference and timed. Without one, the kernels of all
the model's layers are compiled, and the GEMM runs through the reference.
"""

import contextlib
import io
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.reference import gemm_w4a8_reference

LLAMA_8B = ("6144,4096", "4096,4096", "28672,4096", "4096,14336")
N, K, GROUP = 28672, 4096, 128
MAX_M = 8192
"""Tokens of a call that kernels are compiled for."""


def make_weight(device: str) -> jitgemm.W4Weight:
    """A random weight, rounded to 4 bits with a bf16 scale per group of 128."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(N, K // GROUP, GROUP, generator=generator, device=device) * K**-0.5
    scale = (weight.abs().amax(-1) / 7).to(torch.bfloat16)
    q = (weight / scale.float().unsqueeze(-1)).round_().clamp_(-8, 7).to(torch.int8)
    return jitgemm.pack_w4(q.view(N, K), scale, group_size=GROUP)


def make_lhs(m: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random activations, quantised with one scale per token: x [m, K] and its scale fp32 [m]."""
    x = torch.randn(m, K, generator=torch.Generator(device).manual_seed(m), device=device)
    largest = 127.0 if dtype == torch.int8 else 448.0
    scale = x.abs().amax(-1) / largest
    x = x / scale.unsqueeze(-1)
    return (x.round_() if dtype == torch.int8 else x).to(dtype), scale


def error_over_bound(out: torch.Tensor, lhs: tuple, rhs: jitgemm.W4Weight) -> float:
    """The largest error as a part of what is allowed; at most 1 is right."""
    ref, bound = gemm_w4a8_bound(lhs, rhs)
    return float(((out.double() - ref).abs() / bound).nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def microseconds(run, calls: int = 20, rounds: int = 5) -> float:
    """Time of one call on the GPU: `calls` of them back to back in a CUDA graph, the best of `rounds`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    times = []
    for _ in range(rounds + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return min(times[1:])


def on_gpu() -> int:
    name = torch.cuda.get_device_name()
    print(f"{name}: out[m, {N}] = lhs[m, {K}] · rhs[{N}, {K}]ᵀ, 4-bit weights, a bf16 scale per {GROUP}")
    rhs = make_weight("cuda")
    print(f"{'lhs':>6} {'m':>6} {'first call':>12} {'time':>12} {'':>16}  error / bound")
    right = True
    for dtype in (torch.float8_e4m3fn, torch.int8):
        for m in (1, 16, 64, 512, 4096):
            lhs = make_lhs(m, dtype, "cuda")
            out = torch.full((m, N), torch.nan, dtype=torch.bfloat16, device="cuda")
            begin = time.perf_counter()
            jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)
            torch.cuda.synchronize()
            first = (time.perf_counter() - begin) * 1e3
            ratio = error_over_bound(out, lhs, rhs)
            us = microseconds(lambda: jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out))
            rate = f"{2 * m * N * K / us / 1e6:.0f} TFLOP/s" if m > 256 else f"{rhs.nbytes / us / 1e3:.0f} GB/s"
            print(
                f"{'e4m3' if dtype != torch.int8 else 'int8':>6} {m:>6} {first:>9.1f} ms {us:>9.1f} us {rate:>16}"
                f"  {ratio:.3f} {'ok' if ratio <= 1 else 'WRONG'}"
            )
            right &= ratio <= 1
    print("The first call compiles the kernel unless the cache has it (`jitgemm warmup` fills it ahead of time).")
    return 0 if right else 1


def without_gpu() -> int:
    from jitgemm.cli import main as jitgemm_command

    def run(*argv: str, rows: int | None = None) -> None:
        """Prints the command and what it prints, of a table only so many rows."""
        print(f"\n$ jitgemm {' '.join(argv)}", flush=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed) if rows is not None else contextlib.nullcontext():
            try:
                jitgemm_command(argv)
            except SystemExit as done:
                if done.code:
                    raise
        lines = printed.getvalue().splitlines()
        print(*lines[: rows and rows + 1], *(["  ..."] if rows and len(lines) > rows + 1 else []), sep="\n")

    print("No Hopper GPU here: compiling the kernels of Llama-3-8B for an H200 instead, which takes a minute or two.")
    shapes = [option for shape in LLAMA_8B for option in ("--shape", shape)]
    options = "--weight", "g128-bf16-e4m3", "--device", "h200"
    run("warmup", *shapes, *options, "--max-m", str(MAX_M), rows=3)
    run("cache", "info")
    run("explain", str(16), str(N), str(K), *options, "--top", "3")

    m = 16
    print(f"\nThe same GEMM through the exact reference: out[{m}, {N}] = lhs[{m}, {K}] · rhs[{N}, {K}]ᵀ")
    rhs = make_weight("cpu")
    lhs = make_lhs(m, torch.float8_e4m3fn, "cpu")
    out = torch.empty(m, N, dtype=torch.bfloat16)
    begin = time.perf_counter()
    jitgemm.gemm_w4a8_bf16_nt(lhs, rhs, out)  # CPU tensors run the reference
    seconds = time.perf_counter() - begin
    same = torch.equal(out, gemm_w4a8_reference(lhs, rhs))
    plain = (lhs[0].float() * lhs[1].unsqueeze(-1)) @ rhs.dequantize().T
    error = float((out.double() - plain.double()).norm() / plain.double().norm())
    print(f"{seconds:.2f} s; relative RMS difference from a plain fp32 matmul {error:.1e} (bf16 rounds by 1.7e-3)")
    return 0 if same and error < 2.5e-3 else 1


def main() -> int:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return on_gpu() if hopper else without_gpu()


if __name__ == "__main__":
    sys.exit(main())
