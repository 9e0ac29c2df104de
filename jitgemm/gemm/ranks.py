"""Sums over a host's GPUs by kernels: the largest scales of tokens, and the last step of a GEMM whose k ranks share.

The ranks' buffers and the GPUs that reach them are the caller's; here they are addresses. See
`include/jitgemm/gemm/ranks.cuh` for what lies where and who waits for whom.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from jitgemm import settings
from jitgemm.dtypes import DTYPES
from jitgemm.gemm.partial import FINISH_THREADS
from jitgemm.kernel.formats import ceil_div
from jitgemm.runtime.launch import ArgumentBlock, Call, Launch, Operands, Pointer, run_prepared
from jitgemm.tensors import ALIGNMENT, TYPE_NAMES

if TYPE_CHECKING:
    from jitgemm.jit.source import KernelSource
    from jitgemm.runtime.loaded import KernelFamily

HEAD_BYTES, MAX_RANKS = 256, 8
"""`SumHead` and `kMaxRanks` in include/jitgemm/gemm/ranks.cuh."""
MOST_ROWS = 16384
"""Tokens of a call."""
MOST_BYTES = 64 << 20
"""Of a rank's sums."""
ALONE_BYTES = 2 << 20
"""Sums of a rank up to which each rank finishes all rows: one meeting of the ranks instead of two, and world times the
bytes."""
_WORDS = 2 * MAX_RANKS * MOST_ROWS * 8
OFFSETS = {"words": HEAD_BYTES, "sums": HEAD_BYTES + _WORDS, "rows": HEAD_BYTES + _WORDS + MOST_BYTES}
BUFFER_BYTES = OFFSETS["rows"] + MOST_BYTES // 2


@dataclass(frozen=True)
class SumBuffer:
    """A rank's buffer, and where the others' are.

    Attributes:
        own: uint8 [BUFFER_BYTES], aligned to 256 bytes; zeros before the first call.
        peers: int64 [world] on the device: addresses of all ranks' buffers.
        keep: whatever has to live as long.
    """

    rank: int
    world: int
    own: torch.Tensor
    peers: torch.Tensor
    keep: object = None

    def sums(self, m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Where this rank's sums [m, n] of a call go, behind `agree`."""
        return self.own[OFFSETS["sums"] : OFFSETS["sums"] + 4 * m * n].view(dtype).view(m, n)


RANKS_POINTERS = (
    Pointer("peers", "peers"),
    Pointer("scales", "scales", written=True),
    Pointer("x_scale", "x_scale"),
    Pointer("channel_scale", "channel_scale", ALIGNMENT),
    Pointer("bias", "bias", ALIGNMENT),
    Pointer("out", "out", ALIGNMENT, written=True),
)
RANKS_ARGUMENTS = ArgumentBlock(
    RANKS_POINTERS, words_at="Q", sums_at="Q", rows_at="Q", x_scale_stride="Q", m="I", n="I", channel_scale_type="i",
    bias_type="i", rank="I", world="I", most_rows="I", each="I", limit_s="I", unused="I",
)  # fmt: skip
"""`RanksArgs` in include/jitgemm/gemm/ranks.cuh."""


@dataclass(frozen=True, slots=True)
class RanksSpec:
    """The compile-time constants of such a kernel: its function, types of sums and results, and ranks."""

    kind, family = "finish", "ranks"

    function: str
    of: str = "s32"
    into: str = "bf16"
    ranks: int = 2

    @property
    def label(self) -> str:
        return f"ranks-{self.function}-{self.of}-{self.into}-r{self.ranks}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ranks_source(spec: RanksSpec) -> KernelSource:
    """The kernel as the cache keys and compiles it."""
    from jitgemm.jit.source import OPTIONS, KernelSource, function_name, headers

    text = f"""\
// jitgemm {spec.label}
#include <jitgemm/gemm/ranks.cuh>

namespace jitgemm {{
struct Config {{
    static constexpr RealType kIn = {DTYPES[spec.of].cpp_name}, kOut = {DTYPES[spec.into].cpp_name};
    static constexpr u32 kParts = {spec.ranks};
}};
}}

extern "C" __global__ void __launch_bounds__({FINISH_THREADS})
{function_name(spec.label)}(const __grid_constant__ jitgemm::RanksArgs args) {{
    jitgemm::{spec.function}<jitgemm::Config>(args);
}}
"""
    return KernelSource(spec.label, spec.to_dict(), text, headers("gemm/ranks"), OPTIONS)


@lru_cache(maxsize=1)
def ranks_kernels() -> KernelFamily[RanksSpec]:
    from jitgemm.runtime.loaded import KernelFamily

    return KernelFamily(ranks_source, lambda spec: 0, "the layer once with these shapes")


def agree(buffer: SumBuffer, scales: torch.Tensor | None) -> None:
    """scales fp32 [m], not negative or NaN, become all ranks' largest; NaN where one is. Opens a call: each has one."""
    m = 0 if scales is None else scales.shape[0]
    _run(_Ranks("agree", buffer, scales, None, None, None, None, m, 0, "s32", 0))


def total(
    buffer: SumBuffer, of: torch.dtype, out: torch.Tensor, x_scale: torch.Tensor, channel_scale: torch.Tensor | None,
    bias: torch.Tensor | None, own: bool = False,
) -> None:  # fmt: skip
    """out [m, n] = what all ranks' `sums` are together, as `finish` has it; unchecked. Closes the call.

    own: this rank's part of the rows alone, ceil(m / world) for each rank in its turn.
    """
    m, n = out.shape
    per_rank = 0 if 4 * m * n <= ALONE_BYTES and not own else ceil_div(m, buffer.world)
    by_token, by_row = (x_scale, channel_scale) if of == torch.int32 else (None, None)
    call = _Ranks("total", buffer, None, by_token, by_row, bias, out, m, n, TYPE_NAMES[of], per_rank)
    _run(call)
    if per_rank and not own:
        _run(replace(call, function="gather"))


def _run(call: _Ranks) -> None:
    tensors = [tensor for tensor in (call.buffer.peers, *call.operands()[1:]) if tensor is not None]
    key = call.function, call.of, call.m, call.n, call.each, call.bias is None, call.buffer.rank
    run_prepared(key, tensors, call)


@dataclass(slots=True)
class _Ranks(Call):
    """A call of one of the kernels. Also without tokens others wait for it."""

    function: str
    buffer: SumBuffer
    scales: torch.Tensor | None
    x_scale: torch.Tensor | None
    channel_scale: torch.Tensor | None
    bias: torch.Tensor | None
    out: torch.Tensor | None
    m: int
    n: int
    of: str
    each: int
    pointers: ClassVar = RANKS_POINTERS

    def operands(self) -> Operands:
        return self.buffer.peers, self.scales, self.x_scale, self.channel_scale, self.bias, self.out

    def prepare(self, operands: Operands) -> Launch:
        from jitgemm.runtime.loaded import resident

        buffer, device = self.buffer, self.buffer.peers.get_device()
        spec = RanksSpec(self.function, ranks=buffer.world)
        work = max(self.m, 1)
        if self.out is not None:
            spec = replace(spec, of=self.of, into=TYPE_NAMES[self.out.dtype])
            work = (self.each or self.m) * (self.n // 8)
        kernel = ranks_kernels().load(spec, device)
        scale, bias = self.channel_scale, self.bias
        values = {
            **{f"{name}_at": at for name, at in OFFSETS.items()},
            "x_scale_stride": 0 if self.x_scale is None or self.x_scale.numel() == 1 else 1,
            "m": self.m,
            "n": self.n,
            "channel_scale_type": 0 if scale is None else DTYPES[TYPE_NAMES[scale.dtype]].number,
            "bias_type": 0 if bias is None else DTYPES[TYPE_NAMES[bias.dtype]].number,
            "rank": buffer.rank,
            "world": buffer.world,
            "most_rows": MOST_ROWS,
            "each": self.each,
            "limit_s": settings.exchange_timeout_s(),
            "unused": 0,
        }
        grid = max(1, min(ceil_div(work, FINISH_THREADS), resident(kernel, device, FINISH_THREADS)))
        return Launch(kernel, RANKS_ARGUMENTS, values, grid=grid, threads=(FINISH_THREADS, 1), smem_bytes=0)
