"""Weights of every code and form whose scales are 0, subnormal and the largest, with codes that are not 0 beside them,
and what they are by definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import builders
import mxfp4
import nvfp4
import torch
import two_level

import jitgemm
from jitgemm.dtypes import torch_dtype

N, K = 72, 416
_SIZES = {"fp16": 65504.0, "bf16": 2.0**100, "fp32": 2.0**100}
"""The largest whose sums fp32 holds."""


def _by_row(values: torch.Tensor, groups: int) -> torch.Tensor:
    """[N, groups]: row r has the r-th value in all groups; every fourth row has all values in turn."""
    row, group = torch.arange(N)[:, None], torch.arange(groups)
    return values[torch.where(row % 4 == 3, row + group, row).expand(N, groups) % len(values)]


def _scales(scale_type: str, groups: int) -> torch.Tensor:
    dtype, large = torch_dtype(scale_type), _SIZES[scale_type]
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.tiny * info.eps, info.tiny / 2, -info.tiny, 1.0, large, -large]
    return _by_row(torch.tensor(values, dtype=torch.float64).to(dtype), groups)


def _int4(group: int, scale_type: str, device: str, **form: Any) -> builders.WeightParts:
    made = builders.weight_parts(1, N, K, group, scale_type=scale_type, device=device, **form)
    scale = _scales(scale_type, made.scale.shape[1])
    if form.get("correction"):  # factors of zero points are as many bits as fp16 has
        scale = _by_row(torch.tensor([2.0**-12, 1.0, -1.9921875, 100.0], dtype=scale.dtype), scale.shape[1])
    parts = {"scale": scale} | ({} if made.offset is None else {"offset": scale.flip(0)})
    return replace(made, **{name: each.to(device) for name, each in parts.items()})


def _mxfp4(tier: str, device: str) -> mxfp4.Parts:
    """Groups of zeros with any scale, beside such as the tier has; rows of 2^-127 and up."""
    made, g = mxfp4.parts(1, N, K, tier), builders.generator(2)
    scales = made.scales.int() - made.scales.int().amin(1, keepdim=True) + _by_row(torch.tensor([0, 1, 90, 180]), 1)
    zeros = torch.rand(scales.shape, generator=g) < 0.3
    codes = torch.where(zeros.repeat_interleave(32, 1)[:, :K], made.codes & 8, made.codes)
    any_scale = torch.randint(0, 255, scales.shape, generator=g).masked_fill_(
        torch.rand(scales.shape, generator=g) < 0.3, 254
    )
    return mxfp4.Parts(codes.to(device), torch.where(zeros, any_scale, scales).to(torch.uint8).to(device))


def _nvfp4(bytes: tuple[int, ...], device: str, whole: float = 1.0) -> nvfp4.Parts:
    made = nvfp4.parts(1, N, K)
    scales = nvfp4.scales_of(_by_row(torch.tensor(bytes), K // 16))
    return nvfp4.Parts(made.codes.to(device), scales.to(device), torch.tensor([whole], device=device))


def _two_level(dtype: torch.dtype, device: str) -> two_level.Parts:
    made = two_level.parts(1, N, K, dtype=dtype, device=device)
    scale_type = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    return two_level.Parts(made.q, made.factor, made.zero, _scales(scale_type, 1)[:, 0].to(device))


EDGES: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "int4": (partial(_int4, 32, "bf16"), "e4m3", "token"),
    "int4 for e4m3": (partial(_int4, 128, "fp16", codes="e4m3"), "e4m3", "e8m0"),
    "int4 for int8": (partial(_int4, 128, "bf16", codes="s8"), "s8", "token"),
    "int4, a scale a row": (partial(_int4, 0, "fp32"), "s8", "affine"),
    "zero points": (partial(_int4, 64, "fp32", zero_point=True, max_zero=16), "e4m3", "block"),
    "zero points for int8": (partial(_int4, 128, "bf16", zero_point=True, max_zero=16), "s8", "token"),
    "offsets": (partial(_int4, 64, "bf16", offset=True), "e4m3", "token"),
    "corrections": (partial(_int4, 128, "bf16", zero_point=True, correction=True), "s8", "token"),
    "e4m3, a scale a row": (partial(_int4, 0, "fp16", bits=8, codes="e4m3"), "e4m3", "token"),
    "e4m3 in groups": (partial(_int4, 128, "fp32", bits=8, codes="e4m3"), "e4m3", "block"),
    "int8 in groups": (partial(_int4, 128, "bf16", bits=8, codes="s8"), "s8", "token"),
    **{f"mxfp4, {tier}": (partial(_mxfp4, tier), "e4m3", "e8m0") for tier in mxfp4.TIERS},
    "nvfp4, near": (partial(_nvfp4, (0, 0x38, 1, 0, 7, 0x7E)), "e4m3", "token"),
    "nvfp4, near, zeros alone": (partial(_nvfp4, (0,), whole=0.5), "e4m3", "token"),
    "nvfp4, far": (partial(_nvfp4, (0, 1, 0x7E)), "e4m3", "e8m0"),
    "two levels": (partial(_two_level, torch.float16), "s8", "token"),
    "two levels, bf16": (partial(_two_level, torch.bfloat16), "s8", "affine"),
}  # fmt: skip
"""By name: the weight of a device, and the type and scheme of activations."""


def lhs_of(lhs: str, scheme: str, m: int = 9, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    if scheme == "affine":
        return builders.affine_lhs(1, m, K, device=device)
    if scheme == "e8m0":
        x, words = builders.e8m0_lhs(1, m, K, lhs)
        bytes = words.view(torch.uint8)
        bytes[bytes < 255] += 12  # times 2^127 an infinity
        return x.to(device), words.to(device)
    make = {"token": builders.lhs, "block": builders.block_lhs}[scheme]
    return make(1, m, K, lhs, device=device)


def call_of(weight: Any) -> Callable[..., None]:
    return jitgemm.gemm_w4a8_nt if weight.bits == 4 else jitgemm.gemm_w8a8_nt


def by_definition(lhs: tuple[torch.Tensor, ...], parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 [m, n], without code of the package, and what adding up in fp64 may lose of it."""
    x, scale, *zero = (each.cpu() for each in lhs)
    if scale.dtype == torch.int32:  # four exponents a word
        scale = torch.exp2(scale.contiguous().view(torch.uint8).double() - 127)
    scale = scale.double().reshape(len(x), scale.numel() // max(len(x), 1) or 1)
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 1)[:, :K]
    tokens, weight = (
        (x.double() - (zero[0].double().view(-1, 1) if zero else 0)) * scale,
        parts.dequantize_fp64().cpu().T,
    )
    return tokens @ weight, (tokens.abs() @ weight.abs()) * (K * 2.0**-52)


def assert_near(out: torch.Tensor, lhs: tuple[torch.Tensor, ...], parts: Any, bound: torch.Tensor) -> None:
    """Within the bound of what is so by definition, but for fp32's subnormals."""
    out, (expected, lost) = out.cpu().double(), by_definition(lhs, parts)
    assert bool(out.isfinite().all())
    assert bool(((out - expected).abs() <= bound.cpu() + lost + 2.0**-120).all())
