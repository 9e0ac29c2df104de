"""Who takes part in the benchmark of grouped GEMMs: jitgemm, torch and humming. Packing follows the dense contestants'.

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

import jitgemm

from .cells import Format
from .contestant import CHANNEL, EXACT, WIDER, Contestant, Refused, Run
from .data import GroupedSource, quantise_rows
from .ours import error_over_bound, kernel_label, lhs_of, ours, weight_of

Start = Callable[[int, int], Run]


def moe_contestants(formats: Sequence[Format]) -> list[Contestant]:
    """Our formats, then every peer there is."""
    mine = [replace(ours(fmt), load=partial(_load, fmt)) for fmt in formats]
    humming = (
        ("hum_fp8_g128", "humming int4 x e4m3, g128, grouped", EXACT, "float8e4m3", 128),
        ("hum_int8_ch", "humming int4 x int8, per channel, grouped", CHANNEL, "int8", 0),
    )
    return [
        *mine,
        Contestant("bf16", "torch._grouped_mm bf16", WIDER, False, "torch", None, _bf16),
        Contestant("fp8row", "torch._scaled_grouped_mm e4m3, row-wise scales", WIDER, False, "torch", None, _fp8),
        *(
            Contestant(name, label, kind, False, "humming-kernels", "humming.layer", partial(_humming, lhs, group))
            for name, label, kind, lhs, group in humming
        ),
    ]


def _run(source: GroupedSource, tokens: int, calls: list, out: torch.Tensor, weight_bytes: float, **more: Any) -> Run:
    """A run whose calls write to `out` [rows, n]. Of the last call's bits those that belong to a routing's rows."""
    return Run(
        calls=calls,
        rows=lambda rows: out[rows].float(),
        bytes=source.cell(tokens).bytes_of(weight_bytes),
        poison=lambda: out.fill_(torch.nan),
        snapshot=lambda: out[: sum(source.cell(tokens).loads[-1])].clone(),
        **more,
    )


def _out(source: GroupedSource, tokens: int) -> torch.Tensor:
    return torch.empty(source.cell(tokens).most_rows, source.n, dtype=torch.bfloat16, device=source.device)


# ---- jitgemm ---------------------------------------------------------------------------------------------------------


def _load(fmt: Format, source: GroupedSource, copies: int | None) -> Start:
    packed = [weight_of(fmt, each) for each in source.distinct]
    first = type(packed[0]).stacked(source.experts.count, lambda index: packed[index % len(packed)])
    weights = [first] + [copy.deepcopy(first) for _ in range(source.copies(first.nbytes, copies) - 1)]
    experts = source.experts

    def start(tokens: int, buffers: int) -> Run:
        expected_m = tokens * experts.top_k / experts.of
        switches = {"batch_invariant": fmt.batch_invariant, "expected_m": expected_m}
        lhs, out = lhs_of(fmt, source.activations(tokens)), _out(source, tokens)
        gemm = getattr(jitgemm, f"m_grouped_gemm_w{fmt.bits}a8_bf16_nt_contiguous")
        calls = [
            partial(gemm, lhs, weights[i % len(weights)], out, offsets, **switches)
            for i, offsets in enumerate(source.offsets(tokens))
        ]

        def exact_check(rows: torch.Tensor, call: int) -> float:
            mine = source.by_expert(tokens, rows, call)
            return max(error_over_bound(out, lhs, first[index], rows[those]) for index, those in mine)

        weight_bytes = fmt.weight_bytes(source.n, source.k)
        label = lambda: kernel_label(fmt, first, min(max(1, round(expected_m * experts.count)), len(out)))
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


def _bf16(source: GroupedSource, copies: int | None) -> Start:
    weight = torch.stack([source.expert(index).weight for index in range(source.experts.count)]).transpose(1, 2)

    def start(tokens: int, buffers: int) -> Run:
        x = source.activations(tokens)
        calls = [partial(torch._grouped_mm, x[:rows], weight, offs=ends) for rows, ends in _ends(source, tokens)]
        return _returning(source, tokens, calls, 2.0 * source.n * source.k)

    return start


def _fp8(source: GroupedSource, copies: int | None) -> Start:
    if source.n % 16 or source.k % 16:
        raise Refused("_scaled_grouped_mm: n and k must be multiples of 16")
    quantised = [quantise_rows(each.weight, torch.float8_e4m3fn) for each in source.distinct]
    picked = [quantised[index % len(quantised)] for index in range(source.experts.count)]
    weight = torch.stack([codes.view(torch.uint8) for codes, _ in picked]).view(torch.float8_e4m3fn).transpose(1, 2)
    scale = torch.stack([scale for _, scale in picked])

    def start(tokens: int, buffers: int) -> Run:
        x, x_scale = quantise_rows(source.activations(tokens), torch.float8_e4m3fn)
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        calls = [
            partial(torch._scaled_grouped_mm, x[:rows], weight, x_scale[:rows], scale, offs=ends, **options)
            for rows, ends in _ends(source, tokens)
        ]
        return _returning(source, tokens, calls, 1.0 * source.n * source.k)

    return start


# ---- humming ---------------------------------------------------------------------------------------------------------


def _humming(lhs: str, group: int, source: GroupedSource, copies: int | None) -> Start:
    from humming.layer import HummingLayer

    layer = HummingLayer(
        shape_n=source.n,
        shape_k=source.k,
        weight_config={"dtype": "int4", "group_size": group},
        input_config={"dtype": lhs},
        num_experts=source.experts.count,
        torch_dtype=torch.bfloat16,
    ).to(source.device)
    layer.load_from_unquantized(torch.stack([source.expert(i).weight for i in range(source.experts.count)]))
    layer.transform()
    weight_bytes = source.n * source.k / 2 + 2.0 * source.n * (source.k // group if group else 1)

    def start(tokens: int, buffers: int) -> Run:
        dtype = torch.int8 if lhs == "int8" else torch.float8_e4m3fn
        (x, x_scale), out = quantise_rows(source.activations(tokens), dtype), _out(source, tokens)
        calls = [
            partial(
                layer,
                x,
                outputs=out,
                input_scale=x_scale.view(-1, 1),
                expert_layout=offsets.long(),
                valid_shape_m=len(out),
                compute_config={"gemm_type": "grouped_contiguous"},
            )
            for offsets in source.offsets(tokens)
        ]
        # Stream-K may add up in another order in each run.
        return replace(_run(source, tokens, calls, out, weight_bytes), snapshot=None)

    return start
