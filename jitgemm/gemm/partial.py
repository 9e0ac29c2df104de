"""A GEMM in two steps, for ranks that have a part of k each: sums without their last scales, and the result of them.

    sums = partial_sums(lhs, weight, chunks)     int32 [m, n], or fp32 [chunks, rows, n]: each rank's
    sum_chunks(lhs, weight, chunks, sums)        fp32 [m, n]: a rank's chunks, added up
    out = finish([...], ...)                     what all ranks' parts are together

Integers add up in any order. Of chunks each is added up alone, so that a tree over all ranks' has one order whoever has
which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from jitgemm.dtypes import DTYPES
from jitgemm.gemm.problem import POINTERS, Gemm, lhs_group_of
from jitgemm.kernel.formats import BLOCK_K, ceil_div
from jitgemm.runtime.launch import ArgumentBlock, Call, Launch, Operands, Pointer, prepare, run_prepared, this_thread
from jitgemm.tensors import ALIGNMENT, TYPE_NAMES
from jitgemm.weight.parts import PackedWeight

if TYPE_CHECKING:
    from jitgemm.jit.source import KernelSource
    from jitgemm.kernel.formats import Problem
    from jitgemm.kernel.spec import KernelSpec
    from jitgemm.runtime.loaded import KernelFamily
    from jitgemm.select.devices import DeviceSpec
    from jitgemm.weight.packed import AnyWeight

PARTS = (1, 2, 4, 8)
"""Ranks, and chunks of one, that `finish` adds up."""
TALLEST = 256
"""Rows of the largest tile."""
BAND_BYTES = 32 << 20
"""Of sums of chunks that are stored before they are added up: what an L2 holds of 50 MB, weights besides. They would go
to memory and back, each of the chunks with as many bytes as the whole result in fp32."""


def slab_rows(m: int) -> int:
    """Rows of out for each chunk: as many as whole tiles of any kernel for m rows have, as tiles are stored whole."""
    return min(2 * max(m, 8), m + TALLEST)


def partial_sums(
    lhs: tuple[torch.Tensor, torch.Tensor], weight: AnyWeight, chunks: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sums of a GEMM, of its arguments as `gemm_w4a8_nt` takes them, without zero points of activations.

    Args:
        chunks: 0 for int32 [m, n], the sums of (codes of lhs) * (codes of the weight - zero points), without a scale:
            of int8 with a scale per token, and a weight whose rows have one scale. Else fp32 [chunks, rows, n]: of each
            chunk of k, in `out[chunk, :m]`, what `gemm_w4a8_nt` gives in fp32 for that part of k; k is so many times a
            multiple of 128 and of the weight's group size. A chunk is summed up in the order of k, whatever m and
            `chunks` are.
        out: where to write int32 sums; None for a new tensor.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    x, x_scale = lhs
    m, n = x.shape[0], weight.n
    shape, dtype = ((chunks, slab_rows(m), n), torch.float32) if chunks else ((m, n), torch.int32)
    out = x.new_empty(shape, dtype=dtype) if out is None else out
    key, tensors = ("partial", weight.plan_key, x.numel(), chunks), [x, x_scale, out]
    launch = this_thread.cache.find_plan(key, tensors)
    if launch is None:
        call = _Sums(Gemm(x, x_scale, None, weight, out), chunks)
        call.check()
        launch = prepare(key, tensors, call, call.operands())
    if launch is not None:
        launch.launch_dense(x, x_scale, None, weight, out, None)  # type: ignore[attr-defined]
    return out


def sum_chunks(
    lhs: tuple[torch.Tensor, torch.Tensor], weight: AnyWeight, chunks: int, out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """out [m, n] = what `finish` makes of `partial_sums` in chunks, which cover BAND_BYTES at a time."""
    (x, scale), m = lhs, out.shape[0]
    bands = ceil_div(m, max(TALLEST, BAND_BYTES // (4 * chunks * weight.n)))
    rows = max(1, ceil_div(m, 128 * bands) * 128) if bands > 1 else m
    for first in range(0, m, rows):
        band = slice(first, first + rows)
        sums = partial_sums((x[band], scale if scale.numel() == 1 else scale[band]), weight, chunks)
        finish(sums, out[band], bias=bias)
    return out


def rank_sums(lhs: tuple[torch.Tensor, torch.Tensor], weight: AnyWeight, chunks: int, out: torch.Tensor) -> None:
    """out [m, n] = what a rank sends: int32 `partial_sums` for 0 chunks, else fp32 `sum_chunks`, in one step for 1."""
    if chunks == 1:
        gemm_in_order(lhs, weight, out)
    elif chunks:
        sum_chunks(lhs, weight, chunks, out)
    else:
        partial_sums(lhs, weight, 0, out)


def gemm_in_order(
    lhs: tuple[torch.Tensor, ...], weight: AnyWeight, out: torch.Tensor, bias: torch.Tensor | None = None
) -> None:  # fmt: skip
    """`gemm_w4a8_nt` that adds up k in its order, as `partial_sums` a chunk: the same bits for any m and part of n."""
    x, x_scale, *zeros = lhs
    x_zero = zeros[0] if zeros else None
    tensors = [tensor for tensor in (x, x_scale, out, x_zero, bias) if tensor is not None]
    key = "in order", weight.plan_key, x.numel(), x_zero is None, bias is None
    launch = this_thread.cache.find_plan(key, tensors)
    if launch is None:
        call = _InOrder(x, x_scale, x_zero, weight, out, bias)
        call.check()
        launch = prepare(key, tensors, call, call.operands())
    if launch is not None:
        launch.launch_dense(x, x_scale, x_zero, weight, out, bias)  # type: ignore[attr-defined]


class _InOrder(Gemm):
    """A call of `gemm_in_order`; a `runtime.launch.Call`."""

    __slots__ = ()

    def run_reference(self, operands: Operands) -> None:
        from jitgemm.gemm.exact import write_reference

        write_reference(self)

    def prepare(self, operands: Operands) -> Launch:
        from jitgemm.gemm.launch import GemmLaunch, problem_of
        from jitgemm.runtime.device import device_of
        from jitgemm.select.choose import choose

        problem = replace(problem_of(self), in_order=True)
        return GemmLaunch(self, choose(problem, device_of(self.x.get_device())))


@dataclass(slots=True)
class _Sums(Call):
    """A call of `partial_sums`."""

    gemm: Gemm
    chunks: int
    pointers: ClassVar = POINTERS

    @property
    def empty(self) -> bool:
        return self.gemm.x.shape[0] == 0

    def check(self) -> None:
        x, x_scale, _, weight, out = self.gemm[:5]
        chunks, fmt = self.chunks, weight.format
        self.gemm._replace(out=out[0, : x.shape[0]] if chunks else out.view(torch.float32)).check()
        if fmt.lhs_sums or weight.sums == "f16":
            raise ValueError(
                f"rhs: expected a weight without correction or powers for sums of parts of k, got {fmt.name}"
            )
        unit = max(BLOCK_K, fmt.group_size)
        if chunks and weight.k % (chunks * unit):
            raise ValueError(f"rhs: expected k to be a multiple of {chunks} chunks * {unit}, got {weight.k}")
        if not chunks and (x.dtype != torch.int8 or lhs_group_of(x_scale) or fmt.group_size):
            raise ValueError(
                f"rhs: expected int8 and one scale a row for sums of integers, got {fmt.name} with {x.dtype}"
            )

    def operands(self) -> Operands:
        return self.gemm.operands()

    def run_reference(self, operands: Operands) -> None:
        from jitgemm.gemm.exact import integer_sums, write_reference

        x, x_scale, _, weight, out = self.gemm[:5]
        packed = weight if isinstance(weight, PackedWeight) else weight.packed
        if not self.chunks:
            out.copy_(integer_sums(x, packed))
            return
        k, blocks = weight.k // self.chunks, packed.blocks.chunk(self.chunks, 1)
        for chunk, records in enumerate(blocks):
            columns = slice(chunk * k, (chunk + 1) * k)
            scale = x_scale
            if lhs_group_of(x_scale):
                scale = x_scale[:, columns.start // BLOCK_K : columns.stop // BLOCK_K]
            part = PackedWeight(records.contiguous(), packed.channel_scale, None, weight.n, k, weight.format)
            write_reference(Gemm(x[:, columns], scale, None, part, out[chunk, : x.shape[0]]))

    def prepare(self, operands: Operands) -> Launch:
        from jitgemm.gemm.launch import GemmLaunch, problem_of
        from jitgemm.runtime.device import device_of

        if not self.chunks:
            return GemmLaunch(self.gemm)
        problem = problem_of(self.gemm._replace(out=self.gemm.out[0, : self.gemm.x.shape[0]]))
        return GemmLaunch(self.gemm, kernel_for_chunks(problem, self.chunks, device_of(self.gemm.x.get_device())))


def chunk_problem(problem: Problem, chunks: int) -> Problem:
    """What a kernel for sums of so many equal chunks of k is chosen for: a chunk takes as long as as many rows of n."""
    return replace(problem, n=problem.n * chunks, k=problem.k // chunks, in_order=True)


def kernel_for_chunks(problem: Problem, chunks: int, device: DeviceSpec) -> KernelSpec:
    """The kernel that stores the sums of so many equal chunks of k apart."""
    from jitgemm.select.choose import choose

    return replace(choose(chunk_problem(problem, chunks), device), chunks=True)


# ---- the last step ---------------------------------------------------------------------------------------------------

FINISH_POINTERS = (
    Pointer("parts", "parts", ALIGNMENT),
    Pointer("x_scale", "x_scale"),
    Pointer("channel_scale", "channel_scale", ALIGNMENT),
    Pointer("bias", "bias", ALIGNMENT),
    Pointer("out", "out", ALIGNMENT, written=True),
)
FINISH_ARGUMENTS = ArgumentBlock(
    FINISH_POINTERS, part_bytes="Q", x_scale_stride="Q", m="I", n="I", channel_scale_type="i", bias_type="i"
)
"""`FinishArgs` in include/jitgemm/gemm/finish.cuh."""
FINISH_THREADS = 128


@dataclass(frozen=True, slots=True)
class FinishSpec:
    """Everything that is a compile-time constant of a kernel that makes results of sums."""

    kind, family = "finish", "finish"

    into: str
    of: str
    parts: int

    @property
    def label(self) -> str:
        return f"finish-{self.of}-{self.into}-p{self.parts}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def finish_source(spec: FinishSpec) -> KernelSource:
    """The kernel as the cache keys and compiles it."""
    from jitgemm.jit.source import OPTIONS, KernelSource, function_name, headers

    text = f"""\
// jitgemm {spec.label}
#include <jitgemm/gemm/finish.cuh>

namespace jitgemm {{
struct Config {{
    static constexpr RealType kIn = {DTYPES[spec.of].cpp_name}, kOut = {DTYPES[spec.into].cpp_name};
    static constexpr u32 kParts = {spec.parts};
}};
}}

extern "C" __global__ void __launch_bounds__({FINISH_THREADS})
{function_name(spec.label)}(const __grid_constant__ jitgemm::FinishArgs args) {{
    jitgemm::finish<jitgemm::Config>(args);
}}
"""
    return KernelSource(spec.label, spec.to_dict(), text, headers("gemm/finish"), OPTIONS)


@lru_cache(maxsize=1)
def finish_kernels() -> KernelFamily[FinishSpec]:
    from jitgemm.runtime.loaded import KernelFamily

    return KernelFamily(finish_source, lambda spec: 0, "the layer once with these shapes")


def finish(
    parts: torch.Tensor, out: torch.Tensor, x_scale: torch.Tensor | None = None, weight: AnyWeight | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """out [m, n] = what parts [1, 2, 4 or 8, rows, n] are together, of their first m rows; unchecked.

    ::

        int32   float(p[0] + p[1] + ..) * channel_scale * x_scale + bias
        fp32    ((p[0] + p[1]) + (p[2] + p[3])) + .. + bias

    in fp32, each operation rounded, products and sums from left to right; then out's type.

    Args:
        x_scale, weight: of int32: fp32 [m] or one element, and what its rows' scales are of.
        bias: bf16 or fp32 [n], or None.
    """
    scale = None if parts.dtype != torch.int32 or weight is None else weight.channel_scale
    key = "finish", parts.shape[0], bias is None, scale is None
    tensors = [tensor for tensor in (parts, out, x_scale, scale, bias) if tensor is not None]
    run_prepared(key, tensors, _Finish(parts, x_scale, scale, bias, out))
    return out


@dataclass(slots=True)
class _Finish(Call):
    """A call of `finish`."""

    parts: torch.Tensor
    x_scale: torch.Tensor | None
    channel_scale: torch.Tensor | None
    bias: torch.Tensor | None
    out: torch.Tensor
    pointers: ClassVar = FINISH_POINTERS

    @property
    def empty(self) -> bool:
        return self.out.shape[0] == 0

    def operands(self) -> Operands:
        return self.parts, self.x_scale, self.channel_scale, self.bias, self.out

    def run_reference(self, operands: Operands) -> None:
        parts, x_scale, channel_scale, bias, out = self.parts, self.x_scale, self.channel_scale, self.bias, self.out
        m, n = out.shape
        y = tree([part[:m] for part in parts])
        if x_scale is not None and channel_scale is not None:
            y = y.float() * channel_scale[:n].float() * x_scale.reshape(-1, 1)
        out.copy_(y if bias is None else y + bias.float())

    def prepare(self, operands: Operands) -> Launch:
        from jitgemm.runtime.loaded import resident

        parts, x_scale, channel_scale, bias, out = self.parts, self.x_scale, self.channel_scale, self.bias, self.out
        (m, n), device = out.shape, out.get_device()
        spec = FinishSpec(TYPE_NAMES[out.dtype], TYPE_NAMES[parts.dtype], parts.shape[0])
        kernel = finish_kernels().load(spec, device)
        values = {
            "part_bytes": 4 * parts.stride(0),
            "x_scale_stride": 0 if x_scale is None or x_scale.numel() == 1 else 1,
            "m": m,
            "n": n,
            "channel_scale_type": 0 if channel_scale is None else DTYPES[TYPE_NAMES[channel_scale.dtype]].number,
            "bias_type": 0 if bias is None else DTYPES[TYPE_NAMES[bias.dtype]].number,
        }
        grid = min(ceil_div(m * (n // 8), FINISH_THREADS), resident(kernel, device, FINISH_THREADS))
        return Launch(kernel, FINISH_ARGUMENTS, values, grid=grid, threads=(FINISH_THREADS, 1), smem_bytes=0)


def tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """((p[0] + p[1]) + (p[2] + p[3])) + .., of a power of two of them."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
