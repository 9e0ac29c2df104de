"""What Hopper's tensor cores make of e4m3 products, bit by bit: what the error bound is held against on the CPU.

The model of "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores" (Xie et al., arXiv:2511.10909),
whose authors found an H100's bits equal to it. A wgmma of e4m3 adds 32 products to the accumulator:

1. A product has the exponent that its factors' bytes state. Subnormal factors have exponent -6, whatever they hold.
2. Products and accumulator are cut off, towards zero, 13 bits below the largest exponent of those that are not zero.
3. Their sum, exact from there, is cut off towards zero 13 bits below its leading one.

Codes are integers here. The kernels decode them to unit * codes * 2^-9: subnormals, or just above. `unit` is 2 for
signed codes in the order for any activations, else 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jitgemm.gemm.exact import round_fp64

STEP = 32
RUN = 128
"""k after which a sum is promoted to fp32, where its group is not shorter."""


@dataclass(frozen=True)
class TensorCore:
    """A Hopper's, or one that differs in a point.

    Args:
        bits: what is kept below the largest exponent.
        sign_fill: cuts off towards minus infinity, as shifts of two's complement do.
        normal: products have the exponents of their values.
    """

    bits: int = 13
    sign_fill: bool = False
    normal: bool = False

    def step(self, acc: torch.Tensor, x: torch.Tensor, d: torch.Tensor, unit: int = 1) -> torch.Tensor:
        """acc [m, n] + x [m, 32] · d [n, 32]ᵀ, all fp64; unit * d are e4m3's bytes times 2^9."""
        terms = x[:, None, :] * d
        if self.normal:
            exponents = exponent(terms)
        else:
            exponents = exponent(x).clamp(min=-6)[:, None, :] + exponent(unit * d).clamp(min=3)
            exponents = exponents - (unit - 1)  # log2 of a unit of 1 or 2
            exponents = exponents.where(terms != 0, -torch.inf)
        last = self.last_bit(torch.maximum(exponents.amax(-1), exponent(acc)))
        total = self.cut(terms, last[..., None]).sum(-1) + self.cut(acc, last)
        return self.cut(total, self.last_bit(exponent(total)))

    def run(self, x: torch.Tensor, d: torch.Tensor, unit: int) -> torch.Tensor:
        """x [m, k] · d [n, k]ᵀ in steps of 32 k."""
        acc = x.new_zeros(x.shape[0], d.shape[0])
        for part, codes in zip(x.split(STEP, 1), d.split(STEP, 1), strict=True):
            acc = self.step(acc, part, codes, unit)
        return acc

    def gemm_in_f16(self, lhs: tuple, parts, out_dtype: torch.dtype = torch.float32, first: int = 8) -> torch.Tensor:
        """The same with sums in f16 of at most eight records, the first of so many.

        A step's sum, cut off as in fp32, is rounded to f16; so is each sum of scaled ones. Kernels' units are 2^-9 /
        unit.
        """
        unit, codes = 2 if parts.lhs_dtype is None and parts.zero is None else 1, parts.q.double()
        if parts.zero is not None:
            codes = codes - parts.zero.double().repeat_interleave(parts.group_size, 1)[:, : codes.shape[1]]
        scale = parts.scale.double()
        power = torch.exp2(torch.frexp(scale.abs().amax(1)).exponent.double())
        return self._in_f16(lhs, codes, unit, parts.group_size, scale, power, 1.0, out_dtype, first)

    def mxfp4_gemm_in_f16(
        self, lhs: tuple, weight, out_dtype: torch.dtype = torch.float32, first: int = 8
    ) -> torch.Tensor:
        """The same of an MXFP4 weight: e4m3s that are 2^-8 of codes times exponents, an eighth of whose sums goes to a
        run."""
        values, scale, _, _ = weight.rows(0, weight.blocks.shape[0])
        scale = scale.double()
        power = torch.exp2(torch.frexp(scale.abs().amax(1)).exponent.double())
        return self._in_f16(lhs, 2 * values.double(), 1, weight.group_size, scale, power, 0.125, out_dtype, first)

    def mxfp4_gemm(self, lhs: tuple, weight, run: int, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`gemm` of an MXFP4 weight with a base a row: e4m3s of codes times exponents, in runs of so many k."""
        values, scale, _, _ = weight.rows(0, weight.blocks.shape[0])
        x, x_scale = lhs
        acc = torch.zeros(x.shape[0], values.shape[0], device=x.device)
        for part, d in zip(x.double().split(run, 1), values.double().split(run, 1), strict=True):
            acc = (acc + self.run(part, 512 * d, 1) / 512).float()
        return (acc * scale[:, 0].float() * x_scale.reshape(-1, 1)).to(out_dtype)

    def _in_f16(
        self, lhs: tuple, codes: torch.Tensor, unit: int, group_size: int, scale: torch.Tensor, power: torch.Tensor,
        run_scale: float, out_dtype: torch.dtype, first: int,
    ) -> torch.Tensor:  # fmt: skip
        """codes: in units of 2^-9 / unit of what wgmma reads."""
        x, x_scale = lhs
        size = min(group_size, RUN)
        acc = torch.zeros(x.shape[0], codes.shape[0])
        run, end = torch.zeros_like(acc, dtype=torch.float64), first * RUN
        for start in range(0, x.shape[1], size):
            if start == end:
                acc, run, end = (acc + run).float(), torch.zeros_like(run), end + 8 * RUN
            part, of_group = x[:, start : start + size].double(), codes[:, start : start + size]
            partial = torch.zeros_like(run)
            for step, d in zip(part.split(STEP, 1), of_group.split(STEP, 1), strict=True):
                partial = _half(self.step(partial * (512 / unit), step, d, unit) * (unit / 512))
            run = _half(partial * (scale[:, start // group_size] / power * run_scale) + run)
            assert bool(run.isfinite().all()), "an f16 sum overflowed"
        acc = (acc + run).float() * power.float()
        # MXFP4's codes are doubled.
        output = 512 / unit if run_scale == 1 else 256 / run_scale
        return (acc * (x_scale.reshape(-1, 1) * output)).to(out_dtype)

    def gemm(self, lhs: tuple, parts, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The kernel's arithmetic for e4m3 without splits of k: runs promoted in order, then x_scale and rounding."""
        x, x_scale = lhs[0].double(), lhs[1]
        per_block = x_scale.dim() == 2 and x_scale.shape[1] > 1
        size = min(parts.group_size, RUN)
        unit = 2 if parts.zero is None and parts.lhs_dtype is None else 1
        acc = torch.zeros(x.shape[0], parts.q.shape[0], device=x.device)
        for first in range(0, x.shape[1], size):
            part, group = x[:, first : first + size], first // parts.group_size
            d = parts.q[:, first : first + size].double()
            if parts.zero is not None:
                d = d - parts.zero[:, group, None].double()
            token = x_scale[:, first // RUN, None] if per_block else x_scale.new_ones(1, 1)
            scale = parts.scale[:, group].float() * token
            acc = (acc + self.run(part, d, unit) * scale.double()).float()
            if parts.offset is not None:
                offset = parts.offset[:, group].float() * token
                acc = (acc + self.run(part, torch.ones_like(d), unit) * offset.double()).float()
        if per_block:
            return acc.to(out_dtype)
        return (acc * x_scale.reshape(-1, 1)).to(out_dtype)

    def last_bit(self, exponents: torch.Tensor) -> torch.Tensor:
        return torch.exp2(exponents.clamp(min=-1000) - self.bits)

    def cut(self, value: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return (torch.floor if self.sign_fill else torch.trunc)(value / last) * last


class OfEmulator(TensorCore):
    """tests/emulator's, which rounds a step's exact sum to fp32."""

    def step(self, acc: torch.Tensor, x: torch.Tensor, d: torch.Tensor, unit: int = 1) -> torch.Tensor:
        return (acc + x @ d.T).float().double()


def _half(value: torch.Tensor) -> torch.Tensor:
    """fp64 rounded to f16, once."""
    return round_fp64(value, torch.float16).double()


def exponent(value: torch.Tensor) -> torch.Tensor:
    """Of the leading one, as fp64; -inf for 0."""
    return (torch.frexp(value)[1].double() - 1).where(value != 0, -torch.inf)
