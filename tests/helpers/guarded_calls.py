"""GEMMs on a GPU between guard bytes, and what their results must be."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import builders
import pytest
import torch
import w8

import jitgemm
from jitgemm.dtypes import LHS_TYPES, REAL_TYPES, torch_dtype
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Gemm
from jitgemm.kernel.codes import typed_code
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.spec import KernelSpec
from jitgemm.weight.packed import W4Weight

RMS_LIMIT = 2.2e-3
RMS_ELEMENTS = 1000
"""Outputs with fewer elements have no meaningful RMS."""
POISON = 0x7FC5
"""Bits of a bf16 NaN that no arithmetic makes; fp16 reads a NaN too, and fp32 does from two of them."""
OUTPUTS = {name: torch_dtype(name) for name in REAL_TYPES}
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""The largest relative error of rounding to nearest."""
GROUP_128 = (128, False, "bf16")


@dataclass
class Worst:
    """What the session's last line reports.

    Rounding all but uses up its share of the bound; `beyond` is how much of the rest, the share of the sums, the
    largest error took up.
    """

    outputs: int = 0
    elements: int = 0
    ratio: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LHS_TYPES, 0.0))
    beyond: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LHS_TYPES, 0.0))
    rms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LHS_TYPES, 0.0))

    def line(self) -> str:
        ratio = ", ".join(f"{lhs} {self.ratio[lhs]:.3f}" for lhs in LHS_TYPES)
        beyond = ", ".join(f"{lhs} {self.beyond[lhs]:.3f}" for lhs in LHS_TYPES)
        rms = ", ".join(f"{lhs} {self.rms[lhs]:.3e}" for lhs in LHS_TYPES)
        return (
            f"GPU numbers: {self.outputs} outputs, {self.elements} elements compared; "
            f"worst error / bound: {ratio}; "
            f"worst error beyond rounding / the bound's share for sums: {beyond}; worst relative RMS: {rms}"
        )


WORST = Worst()


def lhs_type(x: torch.Tensor) -> str:
    return "s8" if x.dtype == torch.int8 else "e4m3"


def assert_right(
    out: torch.Tensor, lhs: tuple, rhs: W4Weight, bias: torch.Tensor | None = None, *, has_rms: bool = True
) -> None:
    """Every element within its bound, and the RMS where there is one: outliers by themselves have none."""
    kind = lhs_type(lhs[0])
    assert out.shape == (lhs[0].shape[0], rhs.n)
    if out.numel() == 0:
        return
    ref, bound = gemm_w4a8_bound(lhs, rhs, bias=bias, out_dtype=out.dtype)
    error = (out.double() - ref).abs()
    wrong = ~(error <= bound)  # NaN is wrong
    if bool(wrong.any()):
        i, j = wrong.nonzero()[0].tolist()
        pytest.fail(
            f"{int(wrong.sum())} of {wrong.numel()} elements are out of bounds; first at [{i}, {j}]: "
            f"got {out[i, j].item()}, expected {ref[i, j].item()}, bound {bound[i, j].item()}; "
            f"rows {wrong.any(1).nonzero().flatten().tolist()[:20]}, "
            f"columns {wrong.any(0).nonzero().flatten().tolist()[:20]}"
        )
    WORST.outputs += 1
    WORST.elements += out.numel()
    WORST.ratio[kind] = max(WORST.ratio[kind], float((error / bound.clamp(min=1e-300)).max()))
    rounding = ref.abs() * ROUNDING[out.dtype]
    beyond = (error - rounding).clamp(min=0) / (bound - rounding).clamp(min=1e-300)
    WORST.beyond[kind] = max(WORST.beyond[kind], float(beyond.max()))
    size = float(ref.abs().max())
    normal = 2**10 * torch.finfo(out.dtype).tiny  # smaller results have no relative error of the type's
    if has_rms and out.numel() >= RMS_ELEMENTS and size > normal:
        rms = float(((error / size).square().mean() / (ref / size).square().mean()).sqrt())
        WORST.rms[kind] = max(WORST.rms[kind], rms)
        if kind == "e4m3":
            assert rms <= RMS_LIMIT


class Guarded:
    """An output full of NaN with guard bands on all sides; `check` says whether anything else was written.

    Contiguous: bands before and after. Else a column slice of a wider tensor: bands between the rows too.
    """

    def __init__(
        self, m: int, n: int, *, contiguous: bool = False, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ):
        words = dtype.itemsize // 2  # of 16 bits
        if contiguous:
            flat = torch.full((m * n * words + 1024,), POISON, dtype=torch.int16, device=device)
            self._whole, self._inside = flat, flat[512 : 512 + m * n * words].view(m, n * words)
        else:
            whole = torch.full((m + 4, (n + 80) * words), POISON, dtype=torch.int16, device=device)
            self._whole, self._inside = whole, whole[2 : 2 + m, 72 * words : (72 + n) * words]
        self.out = self._inside.view(dtype)

    def check(self) -> None:
        copy = self._inside.clone()
        self._inside.fill_(POISON)
        untouched = bool((self._whole == POISON).all())
        self._inside.copy_(copy)
        assert untouched, "the kernel wrote beside its output"


def call(
    lhs, rhs, bias=None, *, contiguous: bool = False, out: str = "bf16", batch_invariant: bool = False
) -> torch.Tensor:
    """The public call into a guarded output."""
    guarded = Guarded(lhs[0].shape[0], rhs.n, contiguous=contiguous, dtype=OUTPUTS[out])
    bits = 8 if isinstance(rhs, jitgemm.W8Weight) else 4
    gemm = getattr(jitgemm, f"gemm_w{bits}a8_bf16_nt" if out == "bf16" else f"gemm_w{bits}a8_nt")
    gemm(lhs, rhs, guarded.out, bias=bias, batch_invariant=batch_invariant)
    guarded.check()
    return guarded.out


def launched(spec: KernelSpec, lhs: tuple, rhs, bias=None, *, out: str = "bf16", times: int = 1) -> torch.Tensor:
    """What this kernel makes of a guarded output."""
    guarded = Guarded(lhs[0].shape[0], rhs.n, dtype=OUTPUTS[out])
    operands = Gemm(lhs[0], lhs[1], lhs[2] if len(lhs) > 2 else None, rhs, guarded.out, bias)
    plan = GemmLaunch(operands, spec)
    for _ in range(times):
        plan.launch(operands)
    guarded.check()
    return guarded.out.contiguous()


@dataclass(frozen=True)
class Case:
    """A problem by what it is drawn from."""

    m: int
    n: int
    k: int
    lhs: str
    format: tuple[int, bool, str] = GROUP_128
    mean: str = "zero"
    scales: str = "plain"
    bias: str = "none"
    per_token: bool = True
    strided: bool = True
    seed: int = 1
    offset: bool = False
    codes: str = "any"
    affine: bool = False
    out: str = "bf16"
    bits: int = 4

    def __str__(self) -> str:
        group, zero, scale = self.format
        rest = [self.mean, self.scales, f"bias {self.bias}", "token" if self.per_token else "tensor"]
        rest += ["offset"] * self.offset + ["affine"] * self.affine + [f"to {self.out}"] * (self.out != "bf16")
        rest += [f"codes {self.codes}"] * (self.codes != "any")
        name = f"{self.lhs}{'w8' * (self.bits == 8)}-{self.m}x{self.n}x{self.k}"
        return f"{name}-g{group}{'z' if zero else ''}-{scale}-" + "-".join(rest)

    @property
    def problem(self) -> Problem:
        format = WeightFormat(*self.format, self.codes, self.offset) if self.bits == 4 else self._format_of_8_bits
        return Problem(max(1, self.m), self.n, self.k, self.lhs, format, self.out)

    @property
    def _format_of_8_bits(self) -> WeightFormat:
        group, _, scale_type = self.format
        size = 128 if group == w8.BLOCK else group
        size = size if size < self.k else 0  # one group is per channel
        shared = group == w8.BLOCK and size > 0
        return WeightFormat(size, False, scale_type, self.lhs, code=typed_code(self.lhs), uniform_strip_scale=shared)

    def run(self) -> None:
        if self.bits == 8:
            rhs = w8.weight(self.n, self.k, self.lhs, self.format[0], self.format[2], self.scales)
            assert rhs.format == self.problem.format
        else:
            rhs = weight(self.n, self.k, self.format, self.scales, self.seed, self.offset, self.codes)
            assert rhs.format == self.problem.format or rhs.k <= rhs.group_size  # one group is per channel
        lhs = activations(self.m, self.k, self.lhs, self.mean, self.per_token, self.seed, self.affine)
        if self.strided:
            whole = torch.zeros(self.m, self.k + 48, dtype=torch.uint8, device="cuda").view(lhs[0].dtype)
            x = whole[:, 16 : 16 + self.k]
            x.copy_(lhs[0])
            lhs = (x, *lhs[1:])
        bias = None
        if self.bias != "none":
            bias = builders.bias(self.seed, self.n, {"bf16": torch.bfloat16, "fp32": torch.float32}[self.bias], "cuda")
        assert_right(call(lhs, rhs, bias, contiguous=not self.strided, out=self.out), lhs, rhs, bias)


@lru_cache(maxsize=24)
def weight(
    n: int, k: int, format=GROUP_128, scales: str = "plain", seed: int = 1, offset: bool = False, codes: str = "any"
) -> W4Weight:
    group_size, zero_point, scale_type = format
    return builders.weight_parts(
        seed, n, k, group_size, zero_point=zero_point, scale_type=scale_type, scales=scales, max_zero=16,
        offset=offset, codes=codes, device="cuda",
    ).packed  # fmt: skip


@lru_cache(maxsize=4)
def activations(
    m: int, k: int, lhs: str, mean: str = "zero", per_token: bool = True, seed: int = 1, affine: bool = False
) -> tuple:
    if affine:
        return builders.affine_lhs(seed, m, k, mean=mean, per_token=per_token, device="cuda")
    return builders.lhs(seed, m, k, lhs, mean=mean, per_token=per_token, device="cuda")


def device_figures():
    from jitgemm.runtime.device import device_of

    return device_of(0)
