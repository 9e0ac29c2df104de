"""humming, QuACK and DeepGEMM as contestants, through their public calls. Each is imported only where it is asked for.

    humming   https://github.com/vllm-project/humming   pip install humming-kernels   (written against 0.1.19)
    QuACK     https://github.com/Dao-AILab/quack        pip install quack-kernels     (written against 0.6.5)
    DeepGEMM  https://github.com/deepseek-ai/DeepGEMM   vLLM 0.24.0 has it as vllm.third_party.deep_gemm

All quantise the shared weight themselves. Activations are quantised before the clock runs, as for everybody else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch

from .contestant import CHANNEL, EXACT, ROUNDED, WIDER, Contestant, Refused, Run
from .data import Source, quantise_rows


def other_peers() -> list[Contestant]:
    humming = (
        ("hum_fp8_g128", "humming int4 x e4m3, g128", EXACT, "float8e4m3", 128),
        # humming turns group scales into integers under a channel scale when the activations are int8.
        ("hum_int8_g128", "humming int4 x int8, g128, scales made integers", ROUNDED, "int8", 128),
        ("hum_int8_ch", "humming int4 x int8, per channel", CHANNEL, "int8", 0),
    )
    quack = (
        ("quack_exact", "QuACK gemm_w4a8 int4sm, g128, codes -7..7", EXACT, "int4sm"),
        ("quack_fold", "QuACK gemm_w4a8 int4smf, g128 scales folded into e4m3", ROUNDED, "int4smf"),
    )
    return [
        Contestant(name, label, kind, False, "humming-kernels", "humming.layer", partial(_humming, lhs, group))
        for name, label, kind, lhs, group in humming
    ] + [
        Contestant(name, label, kind, False, "quack-kernels", "quack.gemm_w4", partial(_quack, wformat))
        for name, label, kind, wformat in quack
    ] + [
        Contestant(
            "dg_fp8_block", "DeepGEMM e4m3, weight blocks of 128 x 128, activations per token and 128 k", WIDER, False,
            "deep-gemm", "deep_gemm", _deep_gemm,
        )
    ]  # fmt: skip


def _lhs(source: Source, m: int, buffers: int, dtype: torch.dtype) -> tuple[list, list]:
    pairs = [quantise_rows(source.activations(m, i), dtype) for i in range(buffers)]
    outs = [torch.empty(m, source.n, dtype=torch.bfloat16, device=source.device) for _ in range(buffers)]
    return pairs, outs


def _run(source: Source, m: int, calls: list, outs: list, weight_bytes: float) -> Run:
    return Run(
        calls=calls,
        rows=lambda rows: outs[0][rows].float(),
        bytes=weight_bytes + m * source.k + 2.0 * m * source.n,
        poison=lambda: [out.fill_(torch.nan) for out in outs],
    )


def _humming(lhs: str, group: int, source: Source, copies: int | None) -> Callable[[int, int], Run]:
    from humming.layer import HummingLayer

    layer = HummingLayer(
        shape_n=source.n,
        shape_k=source.k,
        weight_config={"dtype": "int4", "group_size": group},
        input_config={"dtype": lhs},
        torch_dtype=torch.bfloat16,
    ).to(source.device)
    layer.load_from_unquantized(source.weight)
    layer.transform()
    weight_bytes = source.n * source.k / 2 + 2.0 * source.n * (source.k // group if group else 1)
    layers = [layer] + [copy.deepcopy(layer) for _ in range(source.copies(weight_bytes, copies) - 1)]

    def start(m: int, buffers: int) -> Run:
        pairs, outs = _lhs(source, m, buffers, torch.int8 if lhs == "int8" else torch.float8_e4m3fn)
        calls = [
            partial(
                each, pairs[i % buffers][0], outputs=outs[i % buffers], input_scale=pairs[i % buffers][1].view(-1, 1)
            )
            for i, each in enumerate(layers)
        ]
        return _run(source, m, calls, outs, weight_bytes)

    return start


def _quack(wformat: str, source: Source, copies: int | None) -> Callable[[int, int], Run]:
    if source.n % 128 or source.k % 128:
        raise Refused("gemm_w4a8 into a given output: n and k must be multiples of 128")
    from quack.gemm_w4 import gemm_w4a8
    from quack.operand_transform.formats import decode_format

    fmt = decode_format(wformat)
    codes, scales = fmt.quantize_reference(source.weight)
    blob, strip = fmt.prepare(codes, scales)
    channel = scales[1] if wformat == "int4smf" else None
    weight_bytes = float(blob.nbytes + strip.nbytes)
    weights = [(blob, strip)] + [(blob.clone(), strip.clone()) for _ in range(source.copies(weight_bytes, copies) - 1)]

    def start(m: int, buffers: int) -> Run:
        pairs, outs = _lhs(source, m, buffers, torch.float8_e4m3fn)
        calls = []
        for i, (codes, scales) in enumerate(weights):
            x, x_scale = pairs[i % buffers]
            calls.append(
                partial(
                    gemm_w4a8,
                    x,
                    codes,
                    scales,
                    act_scale=x_scale,
                    chan_scale=channel,
                    out=outs[i % buffers],
                    wformat=wformat,
                )
            )
        return _run(source, m, calls, outs, weight_bytes)

    return start


def _deep_gemm(source: Source, copies: int | None) -> Callable[[int, int], Run]:
    if source.n % 128 or source.k % 128:
        raise Refused("fp8_gemm_nt: n and k must be multiples of 128")
    import deep_gemm

    codes, scales = deep_gemm.utils.per_block_cast_to_fp8(source.weight, use_ue8m0=False)
    weight_bytes = float(codes.nbytes + scales.nbytes)
    weights = [codes] + [codes.clone() for _ in range(source.copies(weight_bytes, copies) - 1)]

    def start(m: int, buffers: int) -> Run:
        # Scales in the layout that it would bring them to in each call.
        casts = [
            deep_gemm.utils.per_token_cast_to_fp8(source.activations(m, i), use_ue8m0=False) for i in range(buffers)
        ]
        pairs = [(x, deep_gemm.get_mn_major_tma_aligned_tensor(scale)) for x, scale in casts]
        outs = [torch.empty(m, source.n, dtype=torch.bfloat16, device=source.device) for _ in range(buffers)]
        calls = [
            partial(
                deep_gemm.fp8_gemm_nt, pairs[i % buffers], (each, scales), outs[i % buffers], disable_ue8m0_cast=True
            )
            for i, each in enumerate(weights)
        ]
        return _run(source, m, calls, outs, weight_bytes)

    return start
