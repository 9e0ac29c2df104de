"""humming, QuACK and DeepGEMM as contestants, through their public calls. Each is imported only where it is asked for.

    humming   https://github.com/vllm-project/humming   pip install humming-kernels   (written against 0.1.19 and 0.1.6)
    QuACK     https://github.com/Dao-AILab/quack        pip install quack-kernels     (written against 0.6.5)
    DeepGEMM  https://github.com/deepseek-ai/DeepGEMM   vLLM 0.24.0 has it as vllm.third_party.deep_gemm

All quantise the shared weight themselves. Activations are quantised before the clock runs, as for everybody else.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .contestant import CHANNEL, EXACT, ROUNDED, WIDER, Contestant, Refused, Run, short
from .data import Source, quantise_blocks, quantise_rows

HUMMING_MXFP4 = (
    ("hum_mxfp4", "humming MXFP4 x e4m3, per token", ROUNDED, "float4e2m1", "float8e4m3", 32, False),
    ("hum_mxfp4_b128", "humming MXFP4 x e4m3, per token and 128 k", ROUNDED, "float4e2m1", "float8e4m3", 32, True),
    ("hum_mxfp4_a16", "humming MXFP4 x bf16", EXACT, "float4e2m1", "bfloat16", 32, False),
)
"""Name, label, kind, and what `humming_layer` takes. With 8-bit activations scales are folded into the codes, next to a
base: what does not fit is rounded."""


def other_peers() -> list[Contestant]:
    humming = (
        ("hum_fp8_g128", "humming int4 x e4m3, g128", EXACT, "int4", "float8e4m3", 128, False),
        # humming turns group scales into integers under a channel scale when the activations are int8.
        ("hum_int8_g128", "humming int4 x int8, g128, scales made integers", ROUNDED, "int4", "int8", 128, False),
        ("hum_int8_ch", "humming int4 x int8, per channel", CHANNEL, "int4", "int8", 0, False),
        ("hum_w8_e4m3_ch", "humming e4m3 x e4m3, per channel", WIDER, "float8e4m3", "float8e4m3", 0, False),
        ("hum_w8_int8_ch", "humming int8 x int8, per channel", WIDER, "int8", "int8", 0, False),
        (
            "hum_w8_e4m3_block", "humming e4m3, weight blocks of 128 x 128, activations per token and 128 k", WIDER,
            "float8e4m3", "float8e4m3", 128, True,
        ),
        *HUMMING_MXFP4,
    )  # fmt: skip
    quack = (
        ("quack_exact", "QuACK gemm_w4a8 int4sm, g128, codes -7..7", EXACT, "int4sm"),
        ("quack_fold", "QuACK gemm_w4a8 int4smf, g128 scales folded into e4m3", ROUNDED, "int4smf"),
    )
    return [
        Contestant(name, label, kind, False, "humming-kernels", "humming.layer", partial(_humming, *config))
        for name, label, kind, *config in humming
    ] + [
        Contestant(name, label, kind, False, "quack-kernels", "quack.gemm_w4", partial(_quack, wformat))
        for name, label, kind, wformat in quack
    ] + [
        Contestant(
            "dg_fp8_block", "DeepGEMM e4m3, weight blocks of 128 x 128, activations per token and 128 k", WIDER, False,
            "deep-gemm", None, _deep_gemm, no_deep_gemm,
        )
    ]  # fmt: skip


def _lhs(
    source: Source, m: int, buffers: int, dtype: torch.dtype, quantise: Callable[..., Any] = quantise_rows
) -> tuple[list, list]:
    pairs = [quantise(source.activations(m, i), dtype) for i in range(buffers)]
    outs = [torch.empty(m, source.n, dtype=torch.bfloat16, device=source.device) for _ in range(buffers)]
    return pairs, outs


def _run(source: Source, m: int, calls: list, outs: list, weight_bytes: float) -> Run:
    return Run(
        calls=calls,
        rows=lambda rows: outs[0][rows].float(),
        bytes=weight_bytes + m * source.k + 2.0 * m * source.n,
        poison=lambda: [out.fill_(torch.nan) for out in outs],
    )


def humming_layer(weight: torch.Tensor, codes: str, lhs: str, group: int, block: bool = False) -> Any:
    """humming's layer with this weight, [n, k] or [experts, n, k], quantised by humming: `codes` and `lhs` are its
    names of dtypes, group 0 is one scale per row, `block` one per group x group, with activations per token and group.
    Codes "float4e2m1" are MXFP4, of which `block` says that activations have a scale per token and 128 k.
    """
    from humming.layer import HummingLayer

    *experts, n, k = weight.shape
    mx = codes == "float4e2m1"
    more = {"scale_dtype": "float8e8m0"} if mx else {"group_size_n": group} if block else {}
    layer = HummingLayer(
        shape_n=n,
        shape_k=k,
        weight_config={"dtype": codes, "group_size": group} | more,
        input_config={"dtype": lhs} | ({"group_size": 128} if block else {}),
        torch_dtype=torch.bfloat16,
        **({"num_experts": experts[0]} if experts else {}),
    ).to(weight.device)
    if block and not mx:  # load_from_unquantized of 0.1.6 makes no blocks
        from humming.utils.weight import quantize_weight

        schema = layer.weight_schema
        packed, scale, *_ = quantize_weight(weight, schema.b_dtype, schema.bs_dtype, group, group, pack=True)
        layer.load_from_tensors({"weight": packed, "weight_scale": scale})
    else:
        layer.load_from_unquantized(weight)
    layer.transform()
    return layer


def humming_lhs(x: torch.Tensor, lhs: str, block: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Activations as a layer of humming's takes them, and the argument of their scales."""
    if lhs == "bfloat16":
        return x, {}
    dtype = torch.int8 if lhs == "int8" else torch.float8_e4m3fn
    codes, scale = (quantise_blocks if block else quantise_rows)(x, dtype)
    return codes, {"input_scale": scale.reshape(len(x), -1).contiguous()}


def humming_bytes(n: int, k: int, codes: str, group: int, block: bool = False) -> float:
    """Bytes of one weight in humming's formats: scales are bf16, those of blocks fp32, MXFP4's of a byte."""
    if codes == "float4e2m1":
        return n * k * (0.5 + 1 / 32)
    scales = 4.0 * (n // group) * (k // group) if block else 2.0 * n * (k // group if group else 1)
    return n * k * (0.5 if codes == "int4" else 1) + scales


def _humming(
    codes: str, lhs: str, group: int, block: bool, source: Source, copies: int | None
) -> Callable[[int, int], Run]:
    layer = humming_layer(source.weight, codes, lhs, group, block)
    weight_bytes = humming_bytes(source.n, source.k, codes, group, block)
    layers = [layer] + [copy.deepcopy(layer) for _ in range(source.copies(weight_bytes, copies) - 1)]

    def start(m: int, buffers: int) -> Run:
        pairs = [humming_lhs(source.activations(m, i), lhs, block) for i in range(buffers)]
        outs = [torch.empty(m, source.n, dtype=torch.bfloat16, device=source.device) for _ in range(buffers)]
        calls = []
        for i, each in enumerate(layers):
            x, scale = pairs[i % buffers]
            calls.append(partial(each, x, outputs=outs[i % buffers], **scale))
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


def import_deep_gemm() -> Any:
    """DeepGEMM itself, or vLLM's copy of it."""
    try:
        return importlib.import_module("deep_gemm")
    except ModuleNotFoundError as error:
        if error.name != "deep_gemm":
            raise
        return importlib.import_module("vllm.third_party.deep_gemm")


def no_deep_gemm() -> str | None:
    """Why DeepGEMM cannot take part, or None."""
    try:
        import_deep_gemm()
    except Exception as error:
        return f"cannot import deep_gemm or vllm.third_party.deep_gemm: {short(error)}"
    return None


def _deep_gemm(source: Source, copies: int | None) -> Callable[[int, int], Run]:
    if source.n % 128 or source.k % 128:
        raise Refused("fp8_gemm_nt: n and k must be multiples of 128")
    deep_gemm = import_deep_gemm()
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
