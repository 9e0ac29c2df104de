"""Operands of a kernel that the emulator runs, and whether its result is right."""

from __future__ import annotations

from dataclasses import replace

import builders
import mxfp4
import nvfp4
import torch
import two_level

from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.problem import Gemm
from jitgemm.kernel.spec import KernelSpec
from jitgemm.tensors import TYPE_NAMES
from jitgemm.weight.correction import with_sums
from jitgemm.weight.packed import W4Weight

TIERS = {size: tier for tier, size in mxfp4.TIERS.items()}
BY_ORDER = {"near": nvfp4.parts, "nvfp4": nvfp4.far, "two_level": two_level.parts}


def problem(spec: KernelSpec, m: int, n: int, k: int, seed: int = 1) -> Gemm:
    """Random operands of a dense kernel, out between rows and columns of other tensors."""
    f = spec.format
    if f.powers or f.order in BY_ORDER:
        parts = mxfp4.parts(seed, n, k, TIERS[f.group_size]) if f.powers else BY_ORDER[f.order](seed, n, k)
        return _with_operands(spec, m, parts.packed, seed)
    parts = builders.weight_parts(
        seed, n, k, f.group_size, zero_point=f.zero_point or f.correction == "fp16", scale_type=f.scale_type,
        offset=f.offset or f.correction == "bf16", codes=f.order, bits=f.bits, uniform_strip_scale=spec.tokens_as_m,
        correction=bool(f.correction),
    )  # fmt: skip
    if spec.sums == "f16" and f.scale_type == "fp32":
        parts = replace(parts, scale=parts.scale.bfloat16().float())  # which f16 holds
    if f.correction and f.scale_type == "fp32":  # which no 16 bits hold the factors of
        rounded = {name: getattr(parts, name) for name in ("scale", "offset") if getattr(parts, name) is not None}
        parts = replace(parts, **{name: values.bfloat16().float() for name, values in rounded.items()})
    return _with_operands(spec, m, parts.packed.with_sums("f16" if spec.sums == "f16" else "f32"), seed)


def _with_operands(spec: KernelSpec, m: int, weight: W4Weight, seed: int) -> Gemm:
    f, (n, k), zero = spec.format, (weight.n, weight.k), None
    if spec.lhs_group:
        x, scale = (builders.e8m0_lhs if spec.lhs_e8m0 else builders.block_lhs)(seed, m, k, spec.lhs)
    elif spec.lhs == "s8":
        x, scale, zero = builders.affine_lhs(seed, m, k)
        x = with_sums(x, f.lhs_sums) if f.correction else x
    else:
        x, scale = builders.lhs(seed, m, k, spec.lhs)
    out_type = {name: dtype for dtype, name in TYPE_NAMES.items()}[spec.out]
    out = torch.full((m + 2, n + 32), 3.0, dtype=out_type)[1 : m + 1, 16 : n + 16]
    return Gemm(x, scale, zero, weight, out, builders.bias(seed, n))


def share_of_bound(operands: Gemm) -> float:
    """How much of its error bound out takes up where it takes up most; above 1 the kernel is wrong."""
    x, scale, zero, weight, out, bias = operands[:6]
    lhs = (x, scale) if zero is None else (x, scale, zero)
    ref, bound = gemm_w4a8_bound(lhs, weight, bias=bias, out_dtype=out.dtype)
    share = (out.double() - ref).abs() / bound
    return float(torch.where(out.double() == ref, 0.0, share).nan_to_num(torch.inf).max())


def assert_within_the_bound(operands: Gemm) -> None:
    assert share_of_bound(operands) <= 1, "outside of the bound"
    assert_outside_untouched(operands.out)


def assert_outside_untouched(out: torch.Tensor) -> None:
    """Of the tensors that out, made by `problem`, lies in."""
    whole = out.as_strided((out.shape[0] + 2, out.stride(0)), out.stride(), out.storage_offset() - out.stride(0) - 16)
    assert bool((whole[[0, -1]] == 3).all()) and bool((whole[:, :16] == 3).all())
    assert bool((whole[:, -16:] == 3).all())
