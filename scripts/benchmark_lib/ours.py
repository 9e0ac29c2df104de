"""jitgemm as a contestant, one for each weight format."""

from __future__ import annotations

import copy
from functools import partial

import torch

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.kernel.formats import Problem, lhs_columns
from jitgemm.select.choose import choose
from jitgemm.weight.correction import with_sums

from .cells import Format
from .contestant import CHANNEL, EXACT, WIDER, Contestant, Refused, Run, Start
from .data import Source, quantise_blocks, quantise_e8m0, quantise_groups, quantise_nvfp4, quantise_rows

LHS_DTYPES = {"e4m3": torch.float8_e4m3fn, "s8": torch.int8}


def ours(fmt: Format) -> Contestant:
    group = f"group {fmt.group_size}" if fmt.group_size else "per channel"
    weights = "MXFP4" if fmt.mxfp4 else "NVFP4" if fmt.nvfp4 else "int4"
    group = "groups of 16" if fmt.nvfp4 else "two levels" if fmt.two_level else group
    if fmt.bits == 8:
        weights, group = "8-bit weights", "blocks of 128 x 128" if fmt.group_size else "per channel"
    zero = ", zero points" if fmt.zero_point else ", offsets" if fmt.offset else ""
    zero += " as corrections" if fmt.corrects else ""
    invariant = ", batch-invariant" if fmt.batch_invariant else ""
    codes = ", codes of any activations" if fmt.any_codes else ""
    blocks = ", activations per token and 128 k" if fmt.lhs_blocks else ""
    blocks += " in packed e8m0" if fmt.lhs_e8m0 else ""
    f16 = ", sums in f16" if fmt.f16_sums else ""
    label = f"jitgemm {weights} x {'int8' if fmt.lhs == 's8' else 'e4m3'}, {group}{zero}{codes}{f16}{blocks}{invariant}"
    kind = WIDER if fmt.bits == 8 else EXACT if fmt.group_size or fmt.nvfp4 or fmt.two_level else CHANNEL
    return Contestant(fmt.name, label, kind, True, "jitgemm", None, partial(_load, fmt), floor_bits=fmt.bits)


def lhs_of(fmt: Format, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if fmt.lhs_e8m0:
        return quantise_e8m0(x, LHS_DTYPES[fmt.lhs])
    q, scale = (quantise_blocks if fmt.lhs_blocks else quantise_rows)(x, LHS_DTYPES[fmt.lhs])
    return (q if fmt.correction is None else with_sums(q, fmt.correction)), scale


def weight_of(fmt: Format, source: Source) -> jitgemm.W4Weight | jitgemm.W8Weight:
    if fmt.group_size and source.k <= fmt.group_size:
        raise Refused(f"k = {source.k} is one group of {fmt.group_size}: that is per channel")
    if fmt.mxfp4:
        return jitgemm.quantize_mxfp4(source.weight).regrouped(fmt.group_size or source.k).with_sums(fmt.sums)
    if fmt.nvfp4:
        return jitgemm.pack_nvfp4(*quantise_nvfp4(source.weight))
    if fmt.two_level:
        return jitgemm.quantize_w4_two_level(source.weight)
    if fmt.bits == 8:
        return jitgemm.quantize_w8(source.weight, LHS_DTYPES[fmt.lhs], block=fmt.group_size or None)
    q, scale, zero = quantise_groups(source.weight, fmt.group_size, fmt.zero_point)
    lhs_dtype = None if fmt.any_codes else LHS_DTYPES[fmt.lhs]
    offset = None
    if fmt.offset:
        draw = torch.Generator(scale.device).manual_seed(1)
        offset = ((torch.rand(scale.shape, generator=draw, device=scale.device) - 0.5) * scale).to(scale.dtype)
    group_size = fmt.group_size or source.k
    weight = jitgemm.pack_w4(
        q,
        scale,
        zero,
        offset=offset,
        group_size=group_size,
        lhs_dtype=lhs_dtype,
        correction=fmt.corrects,
        sums=fmt.sums,
    )
    if weight.correction != fmt.correction:
        raise Refused(f"factors of {weight.correction}, not of {fmt.correction}")
    return weight


def kernel_label(fmt: Format, weight: jitgemm.W4Weight | jitgemm.W8Weight, m: int, rows_vary: bool = False) -> str:
    """What the selector chooses here, for m rows."""
    from jitgemm.runtime.device import device_of

    device = device_of(torch.cuda.current_device())
    experts = weight.experts or 0
    problem = Problem(
        m, weight.n, weight.k, fmt.lhs, weight.format, "bf16", fmt.batch_invariant, experts, 128 * fmt.lhs_blocks,
        fmt.lhs_e8m0, fmt.sums, rows_vary,
    )  # fmt: skip
    return choose(problem, device).label


def _load(fmt: Format, source: Source) -> Start:
    first = weight_of(fmt, source)
    weights = [first] + [copy.deepcopy(first) for _ in range(source.copies(first.nbytes) - 1)]
    switches = {"batch_invariant": True} if fmt.batch_invariant else {}

    def start(m: int) -> Run:
        lhs, out = lhs_of(fmt, source.activations(m)), source.out(m)
        gemm = jitgemm.gemm_w8a8_bf16_nt if fmt.bits == 8 else jitgemm.gemm_w4a8_bf16_nt
        return Run.writing(
            out,
            [partial(gemm, lhs, weight, out, **switches) for weight in weights],
            fmt.weight_bytes(source.n, source.k) + m * lhs_columns(source.k, fmt.correction) + 2 * m * source.n,
            exact_check=lambda rows, call: error_over_bound(out, lhs, first, rows),
            snapshot=out.clone,
            kernel=lambda: kernel_label(fmt, first, m),
        )

    return start


def error_over_bound(
    out: torch.Tensor, lhs: tuple, weight: jitgemm.W4Weight | jitgemm.W8Weight, rows: torch.Tensor
) -> float:
    """The largest error over what is allowed, on some rows of the output; infinite where a NaN was left standing."""
    x, x_scale = lhs
    # Rows are taken from the bytes: indexing e4m3 is not implemented everywhere.
    picked = x.view(torch.uint8)[rows].view(x.dtype)
    ref, bound = gemm_w4a8_bound((picked, x_scale[rows]), weight)
    over = (out[rows].double() - ref).abs() / bound.clamp_(min=1e-300)
    return float(over.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
