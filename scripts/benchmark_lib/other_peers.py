"""humming and DeepGEMM as contestants, through their public calls. Each is imported only where it is asked for.

    humming   https://github.com/vllm-project/humming   pip install humming-kernels   (written against 0.1.19)
    DeepGEMM  https://github.com/deepseek-ai/DeepGEMM   vLLM 0.24.0 has it as vllm.third_party.deep_gemm

Both quantise the shared weight themselves. Activations are quantised before the clock runs, as for everybody else.
"""

from __future__ import annotations

import copy
import importlib
from functools import partial
from typing import Any

import torch

from .contestant import CHANNEL, EXACT, ROUNDED, WIDER, Contestant, Refused, Run, Start, short
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
        *HUMMING_MXFP4,
    )  # fmt: skip
    return [
        Contestant(name, label, kind, False, "humming-kernels", "humming.layer", partial(_humming, *config))
        for name, label, kind, *config in humming
    ] + [
        Contestant(
            "dg_fp8_block", "DeepGEMM e4m3, weight blocks of 128 x 128, activations per token and 128 k", WIDER, False,
            "deep-gemm", None, _deep_gemm, no_deep_gemm,
        )
    ]  # fmt: skip


def humming_layer(weight: torch.Tensor, codes: str, lhs: str, group: int, block: bool = False) -> Any:
    """humming's layer with this weight, [n, k] or [experts, n, k], quantised by humming: `codes` and `lhs` are its
    names of dtypes, "float4e2m1" for MXFP4. Group 0 is one scale per row. With `block` activations have a scale per
    token and 128 k.
    """
    from humming.layer import HummingLayer

    *experts, n, k = weight.shape
    more = {"scale_dtype": "float8e8m0"} if codes == "float4e2m1" else {}
    layer = HummingLayer(
        shape_n=n,
        shape_k=k,
        weight_config={"dtype": codes, "group_size": group} | more,
        input_config={"dtype": lhs} | ({"group_size": 128} if block else {}),
        torch_dtype=torch.bfloat16,
        **({"num_experts": experts[0]} if experts else {}),
    ).to(weight.device)
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


def humming_bytes(n: int, k: int, codes: str, group: int) -> float:
    """Bytes of one weight of 4 bits in humming's formats: scales are bf16, MXFP4's of a byte."""
    return n * k * (0.5 + 1 / 32) if codes == "float4e2m1" else n * k * 0.5 + 2.0 * n * (k // group if group else 1)


def _humming(codes: str, lhs: str, group: int, block: bool, source: Source) -> Start:
    layer = humming_layer(source.weight, codes, lhs, group, block)
    weight_bytes = humming_bytes(source.n, source.k, codes, group)
    layers = [layer] + [copy.deepcopy(layer) for _ in range(source.copies(weight_bytes) - 1)]

    def start(m: int) -> Run:
        (x, scale), out = humming_lhs(source.activations(m), lhs, block), source.out(m)
        calls = [partial(each, x, outputs=out, **scale) for each in layers]
        return Run.writing(out, calls, source.bytes_of(m, weight_bytes))

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


def _deep_gemm(source: Source) -> Start:
    if source.n % 128 or source.k % 128:
        raise Refused("fp8_gemm_nt: n and k must be multiples of 128")
    deep_gemm = import_deep_gemm()
    codes, scales = deep_gemm.utils.per_block_cast_to_fp8(source.weight, use_ue8m0=False)
    weight_bytes = float(codes.nbytes + scales.nbytes)
    weights = [codes] + [codes.clone() for _ in range(source.copies(weight_bytes) - 1)]

    def start(m: int) -> Run:
        x, scale = deep_gemm.utils.per_token_cast_to_fp8(source.activations(m), use_ue8m0=False)
        lhs = x, deep_gemm.get_mn_major_tma_aligned_tensor(scale)  # as it would bring them to in each call
        out = source.out(m)
        calls = [partial(deep_gemm.fp8_gemm_nt, lhs, (each, scales), out, disable_ue8m0_cast=True) for each in weights]
        return Run.writing(out, calls, source.bytes_of(m, weight_bytes))

    return start
