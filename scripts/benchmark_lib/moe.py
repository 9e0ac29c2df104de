"""Who takes part in the benchmark of grouped GEMMs: jitgemm, torch, humming and DeepGEMM, packed as for dense ones.

Call i of a run multiplies by routing i's offsets, which are on the device; all calls share activations and results,
which are as long as the routing with the most rows needs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

import jitgemm

from .cells import Format
from .contestant import CHANNEL, EXACT, WIDER, Contestant, Refused, Run, Start
from .data import GroupedSource, quantise_rows
from .other_peers import HUMMING_MXFP4, humming_bytes, humming_layer, humming_lhs, import_deep_gemm, no_deep_gemm
from .ours import error_over_bound, kernel_label, lhs_of, ours, weight_of


def moe_contestants(formats: Sequence[Format]) -> list[Contestant]:
    """Our formats, then every peer there is."""
    mine = [replace(ours(fmt), load=partial(_load, fmt)) for fmt in formats]
    humming = (
        ("hum_fp8_g128", "humming int4 x e4m3, g128, grouped", EXACT, "int4", "float8e4m3", 128, False),
        ("hum_int8_ch", "humming int4 x int8, per channel, grouped", CHANNEL, "int4", "int8", 0, False),
    )
    mxfp4 = [(name, f"{label}, grouped", *rest) for name, label, *rest in HUMMING_MXFP4]
    deep_gemm = (
        ("dg_fp8_block", "DeepGEMM e4m3, blocks of 128 x 128, experts' rows padded to 128", False),
        ("dg_fp8_block_masked", "DeepGEMM e4m3, blocks of 128 x 128, as many rows for each expert, masked", True),
    )
    return [
        *mine,
        Contestant("bf16", "torch._grouped_mm bf16", WIDER, False, "torch", None, _bf16),
        Contestant("fp8row", "torch._scaled_grouped_mm e4m3, row-wise scales", WIDER, False, "torch", None, _fp8),
        *(
            Contestant(name, label, kind, False, "humming-kernels", "humming.layer", partial(_humming, *config))
            for name, label, kind, *config in [*humming, *mxfp4]
        ),
        *(
            Contestant(name, label, WIDER, False, "deep-gemm", None, partial(_deep_gemm, masked), no_deep_gemm)
            for name, label, masked in deep_gemm
        ),
    ]


def _run(source: GroupedSource, tokens: int, calls: list, out: torch.Tensor, weight_bytes: float, **more: Any) -> Run:
    """A run whose calls write to `out` [rows, n]. Of the last call's bits those that belong to a routing's rows."""
    more["snapshot"] = lambda: out[: sum(source.cell(tokens).loads[-1])].clone()
    return Run.writing(out, calls, source.bytes_of(tokens, weight_bytes), **more)


# ---- jitgemm ---------------------------------------------------------------------------------------------------------


def _load(fmt: Format, source: GroupedSource) -> Start:
    packed = [weight_of(fmt, each) for each in source.distinct]
    first = type(packed[0]).stacked(source.experts.count, lambda index: packed[index % len(packed)])
    weights = [first] + [copy.deepcopy(first) for _ in range(source.copies(first.nbytes) - 1)]
    experts = source.experts

    def start(tokens: int) -> Run:
        expected_m = tokens * experts.top_k / experts.of
        switches = {"batch_invariant": fmt.batch_invariant, "expected_m": expected_m}
        lhs, out = lhs_of(fmt, source.activations(tokens)), source.out(tokens)
        gemm = getattr(jitgemm, f"m_grouped_gemm_w{fmt.bits}a8_bf16_nt_contiguous")
        calls = [
            partial(gemm, lhs, weights[i % len(weights)], out, offsets, **switches)
            for i, offsets in enumerate(source.offsets(tokens))
        ]

        def exact_check(rows: torch.Tensor, call: int) -> float:
            mine = source.by_expert(tokens, rows, call)
            return max(error_over_bound(out, lhs, first[index], rows[those]) for index, those in mine)

        weight_bytes = fmt.weight_bytes(source.n, source.k)
        rows = min(max(1, round(expected_m * experts.count)), len(out))
        label = lambda: kernel_label(fmt, first, rows, rows < len(out))
        return _run(source, tokens, calls, out, weight_bytes, exact_check=exact_check, kernel=label)

    return start


# ---- torch -----------------------------------------------------------------------------------------------------------
#
# Its grouped GEMMs return their results: every call writes to memory of its own, and the last call's is looked at.


def _returning(source: GroupedSource, tokens: int, calls: list[Callable[[], torch.Tensor]], weight_bytes: float) -> Run:
    last: list[torch.Tensor] = []

    def keep(call: Callable[[], torch.Tensor]) -> None:
        last[:] = [call()]

    run = _run(source, tokens, [partial(keep, call) for call in calls], torch.empty(0), weight_bytes)
    return replace(run, rows=lambda rows: last[0][rows].float(), poison=last.clear, snapshot=None)


def _ends(source: GroupedSource, tokens: int) -> list[tuple[int, torch.Tensor]]:
    """Rows of each routing, and where each expert's end."""
    return [(sum(load), at[1:]) for load, at in zip(source.cell(tokens).loads, source.offsets(tokens), strict=True)]


def _bf16(source: GroupedSource) -> Start:
    weight = torch.stack([source.expert(index).weight for index in range(source.experts.count)]).transpose(1, 2)

    def start(tokens: int) -> Run:
        x = source.activations(tokens)
        calls = [partial(torch._grouped_mm, x[:rows], weight, offs=ends) for rows, ends in _ends(source, tokens)]
        return _returning(source, tokens, calls, 2.0 * source.n * source.k)

    return start


def _fp8(source: GroupedSource) -> Start:
    if source.n % 16 or source.k % 16:
        raise Refused("_scaled_grouped_mm: n and k must be multiples of 16")
    quantised = [quantise_rows(each.weight, torch.float8_e4m3fn) for each in source.distinct]
    picked = [quantised[index % len(quantised)] for index in range(source.experts.count)]
    weight = torch.stack([codes.view(torch.uint8) for codes, _ in picked]).view(torch.float8_e4m3fn).transpose(1, 2)
    scale = torch.stack([scale for _, scale in picked])

    def start(tokens: int) -> Run:
        x, x_scale = quantise_rows(source.activations(tokens), torch.float8_e4m3fn)
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        calls = [
            partial(torch._scaled_grouped_mm, x[:rows], weight, x_scale[:rows], scale, offs=ends, **options)
            for rows, ends in _ends(source, tokens)
        ]
        return _returning(source, tokens, calls, 1.0 * source.n * source.k)

    return start


# ---- humming ---------------------------------------------------------------------------------------------------------


HUMMING_K = 128
"""Some of humming's MXFP4 kernels take multiples of it. Columns are filled up with zeros, as engines do for gpt-oss."""


def _humming(codes: str, lhs: str, group: int, block: bool, source: GroupedSource) -> Start:
    zeros = -source.k % HUMMING_K if codes == "float4e2m1" else 0
    weight = torch.stack([pad(source.expert(i).weight, (0, zeros)) for i in range(source.experts.count)])
    layer = humming_layer(weight, codes, lhs, group, block)
    weight_bytes = humming_bytes(source.n, source.k + zeros, codes, group)

    def start(tokens: int) -> Run:
        x, out = pad(source.activations(tokens), (0, zeros)), source.out(tokens)
        x, scale = humming_lhs(x, lhs, block)
        calls = [
            partial(
                layer,
                x,
                outputs=out,
                **scale,
                expert_layout=offsets.long(),
                valid_shape_m=len(out),
                compute_config={"gemm_type": "grouped_contiguous"},
            )
            for offsets in source.offsets(tokens)
        ]
        # Stream-K may add up in another order in each run.
        return replace(_run(source, tokens, calls, out, weight_bytes), snapshot=None)

    return start


# ---- DeepGEMM --------------------------------------------------------------------------------------------------------
#
# Its experts' rows begin at multiples of 128 (contiguous) or of the most rows that an expert has (masked). Rows are
# brought there before the clock runs.

LARGEST_PADDED = 20e9
"""Bytes that padded activations of all routings may take."""


def places(loads: Sequence[int], room: Sequence[int]) -> torch.Tensor:
    """Where each row lies: rows sorted by expert, loads[i] of expert i, of which each has room[i] rows."""
    starts = torch.tensor([0, *room]).cumsum(0).tolist()
    return torch.cat([torch.arange(load) + start for load, start in zip(loads, starts, strict=False)])


def _deep_gemm(masked: bool, source: GroupedSource) -> Start:
    if source.n % 128 or source.k % 128:
        raise Refused("m_grouped_fp8_gemm_nt: n and k must be multiples of 128")
    deep_gemm, count = import_deep_gemm(), source.experts.count
    quantised = [deep_gemm.utils.per_block_cast_to_fp8(each.weight, use_ue8m0=False) for each in source.distinct]
    picked = [quantised[index % len(quantised)] for index in range(count)]
    codes = torch.stack([codes.view(torch.uint8) for codes, _ in picked]).view(torch.float8_e4m3fn)
    weight = (codes, torch.stack([scale for _, scale in picked]))

    def start(tokens: int) -> Run:
        x, loads = source.activations(tokens), source.cell(tokens).loads
        expected_m = max(1, round(tokens * source.experts.top_k / source.experts.of))
        most = max(-(-load // 128) * 128 for each in loads for load in each) or 128
        rooms = [[most if masked else -(-load // 128) * 128 for load in each] for each in loads]
        longest = max(map(sum, rooms)) or 128
        if len(rooms) * longest * source.k > LARGEST_PADDED:
            raise Refused(f"{longest} padded rows in each of {len(rooms)} routings take too much memory")
        out = torch.empty(longest, source.n, dtype=torch.bfloat16, device=source.device)
        last: list[torch.Tensor] = []

        def call(at: torch.Tensor, gemm: Callable[[], None]) -> None:
            last[:] = [at]
            gemm()

        calls = []
        for load, room in zip(loads, rooms, strict=True):
            at = places(load, room).to(source.device)
            padded = x.new_zeros(sum(room), source.k)
            padded[at] = x[: sum(load)]
            y, scale = deep_gemm.utils.per_token_cast_to_fp8(padded, use_ue8m0=False)
            mine, options = out[: sum(room)], {"disable_ue8m0_cast": True}
            if masked:
                rows = torch.tensor(load, dtype=torch.int32, device=source.device)
                y, scale, mine = (each.view(count, most, -1) for each in (y, scale, mine))
                gemm = partial(deep_gemm.m_grouped_fp8_gemm_nt_masked, expected_m=expected_m)
            else:
                rows = torch.full((sum(room),), -1, dtype=torch.int32, device=source.device)
                rows[at] = torch.arange(count, dtype=torch.int32).repeat_interleave(torch.tensor(load)).to(rows.device)
                gemm = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
            lhs = (y, deep_gemm.get_mn_major_tma_aligned_tensor(scale))
            calls.append(partial(call, at, partial(gemm, lhs, weight, mine, rows, **options)))
        weight_bytes = source.n * source.k + 4.0 * (source.n // 128) * (source.k // 128)
        run = _run(source, tokens, calls, out, weight_bytes)
        return replace(run, rows=lambda rows: out[last[0][rows]].float(), snapshot=None)  # rows between are not written

    return start
