"""Layers as engines find them in files of each format, and the weights that they stand for."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import files_awq
import files_gptq
import files_qserve
import files_torchao
import layers
import mxfp4
import nvfp4
import torch
from checkpoints import words
from moe_cases import activated

import jitgemm
from jitgemm.activations.scheme import SILU_MUL
from jitgemm.checkpoint.compressed_tensors import FORMAT
from jitgemm.checkpoint.compressed_tensors_config import written_config, written_group
from jitgemm.checkpoint.files import DTYPES
from jitgemm.nn.layers.experts import packed_experts
from jitgemm.nn.layers.linear import LINEARS
from jitgemm.nn.layers.shard_weight import unpacked
from jitgemm.weight.rotation import rotated

BF16 = torch.bfloat16


def scheme(strategy="group", size=32, symmetric=True, inputs=None, format="pack-quantized", actorder=None, **more):
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}
    group = {"targets": ["Linear"], "weights": weights | {"actorder": actorder} | more, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
MXFP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": True}
QUARK: dict[str, Any] = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}}
AUTOROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp", "act_bits": 16,
    "packing_format": "auto_round:llm_compressor",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "packed": scheme(),
    "packed-asymmetric": scheme(symmetric=False),
    "packed-channel": scheme("channel", None),
    "packed-tensor": scheme("tensor", None),
    "packed-static": scheme(inputs=STATIC),
    "packed-int8": scheme(inputs=INT8),
    "int-quantized": scheme(format="int-quantized"),
    "mxfp4": scheme(format="mxfp4-pack-quantized", type="float"),
    "mxfp4-mxfp8": scheme(format="mxfp4-pack-quantized", type="float", inputs=MXFP8),
    "mxfp8": scheme(format="mxfp8-quantized", num_bits=8, type="float", inputs=MXFP8),
    "mxfp8-blocks": {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]},
    "modelopt-mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "nvfp4": scheme("tensor_group", 16, format="nvfp4-pack-quantized", type="float", inputs=FP4),
    "packed-corrected": scheme(symmetric=False, inputs=INT8),
    "rotated": written_config([written_group(["Linear"], 4, "int", scheme="two-level")], [], 128),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "gptq-channel": {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": False},
    "gptq-int8": {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "awq-gemv": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv", "zero_point": True},
    "auto-round": {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
    "auto-round-fp8": {"quant_method": "auto-round", "bits": 8, "group_size": -1, "data_type": "fp", "sym": True},
    "w4afp8": {"quant_method": "w4afp8", "group_size": 32},
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-names": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    "fp8-blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8-blocks-32": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 32]},
    "float-quantized": scheme("channel", None, format="float-quantized", num_bits=8, type="float", inputs=E4M3),
    "int8-quantized": scheme("channel", None, format="int-quantized", num_bits=8, inputs=INT8),
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": {}, "ignore": ["lm_head"]},
    "modelopt-channel": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "modelopt-mxfp4": {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"},
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "quark": QUARK,
    "quark-mixed": {
        "quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
        "layer_quant_config": {"m.*": QUARK["global_quant_config"]},
    },
    "auto-round-mxfp4": AUTOROUND,
    "deepseek-v4": {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128], "expert_dtype": "fp4",
    },
    **{name: {"quant_method": "qoq", "wbits": 4, "group_size": size} for name, size in (
        ("qserve", 32), ("qserve-128", 128), ("qserve-channel", -1)
    )},
    "torchao": {"quant_method": "torchao"},
    "torchao-tiles": {"quant_method": "torchao", "form": "tiles"},
    "torchao-fp8": {"quant_method": "torchao", "form": "fp8"},
    "bitblas": {"quant_method": "bitblas", "bits": 4, "group_size": 32, "zeros_mode": "original", "fast_decoding": False},
    "executorch": {"quant_method": "executorch"},
}  # fmt: skip
"""Quantization configs; "rotated" is what `jitgemm quantize --rotation 128 --scheme two-level` says."""
SPELT = {"weight": "weight", "weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
"""transformers' names of FP8 per tensor."""
WIDE = {
    "packed": scheme(size=128),
    "packed-asymmetric": scheme(size=128, symmetric=False),
    "int-quantized": scheme(size=128, format="int-quantized"),
    "gptq": CONFIGS["gptq"] | {"group_size": 128, "sym": False},
    "awq": CONFIGS["awq"] | {"group_size": 128},
    "fp8-blocks": CONFIGS["fp8-blocks"],
    "qserve": CONFIGS["qserve-128"],
}
"""Formats with groups of 128."""
OF_QSERVE = ("qserve", "qserve-128", "qserve-channel")
OF_MXFP8 = ("mxfp8", "mxfp8-blocks", "modelopt-mxfp8")


def stored(config: dict, n: int, k: int, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer as its format stores it, {suffix: tensor}, and the weight that it stands for."""
    torch.manual_seed(seed)
    method, algorithm = config["quant_method"], config.get("quant_algo") or ""
    if config is CONFIGS["rotated"]:
        weight = jitgemm.quantize_w4_two_level(torch.randn(n, k), rotation=128)
        return FORMAT.write(unpacked(weight), FORMAT.written(config, "")), rotated(weight.dequantize()).double()
    if config is CONFIGS["fp8-names"]:
        tensors, dense = stored(CONFIGS["fp8"], n, k, seed)
        return {SPELT[suffix]: tensor for suffix, tensor in tensors.items()}, dense
    ct = method == "compressed-tensors"
    group = config["config_groups"]["group_0"] if ct else {}
    said, form = group.get("weights", {}), config.get("format", "")
    if "NVFP4" in algorithm or "nvfp4" in form:
        return stored_nvfp4(ct, n, k, seed)
    if method == "qoq":
        if config["group_size"] < 0:
            return files_qserve.per_channel(seed, torch.arange(n) % 16, n, k)
        tensors, by_kernel = files_qserve.per_group(seed, n, k, config["group_size"])
        return tensors, by_kernel.double() * tensors["s1_scales"].double()[:, None]
    if (
        config.get("expert_dtype") == "fp4"
        or "mxfp4" in form
        or config == AUTOROUND
        or "MXFP4" in algorithm
        or method == "quark"
    ):
        parts = mxfp4.parts(seed, n, k, shift=-12)
        codes, scales = parts.canonical, parts.scales
        if "expert_dtype" in config:
            codes, scales = codes.view(torch.int8), scales.view(torch.float8_e8m0fnu)
        tensors = {"weight_packed" if ct or config == AUTOROUND else "weight": codes, "weight_scale": scales}
        return tensors | static(seed if method == "modelopt" else None), parts.dequantize_fp64()
    floats = config.get("data_type") == "fp" or config.get("form") == "fp8"
    if floats or method in ("fp8", "fbgemm_fp8", "mxfp8", "modelopt") or said.get("num_bits") == 8:
        return stored_8(config, said, n, k, seed)
    strategy, size, bits = (
        said.get("strategy", "group"),
        said.get("group_size", config.get("group_size")),
        config.get("bits", 4),
    )
    size = 32 if method in ("torchao", "executorch") else size if strategy == "group" and size > 0 else k
    asymmetric = method in ("awq", "torchao", "bitblas", "executorch") or False in (
        config.get("sym"),
        said.get("symmetric"),
    )
    layer = layers.layer(
        seed, n, k, size, zeros=(1, 15) if asymmetric else (2 ** (bits - 1),) * 2, dtype=BF16, bits=bits
    )
    if strategy == "tensor":
        layer = replace(layer, scale=layer.scale[:1].expand(n, 1))
    tensors = stored_integers(config, method, layer, asymmetric)
    if strategy == "tensor":
        tensors["weight_scale"] = layer.scale[0]
    return tensors | static(seed if group.get("input_activations") is STATIC else None), layer.weight


def stored_integers(config, method, layer, asymmetric):
    q, zero, scale, form = (
        (layer.q - 8).to(torch.int8),
        (layer.zero - 8).to(torch.int8),
        layer.scale,
        config.get("form"),
    )
    if method in ("gptq", "auto-round"):
        return files_gptq.packed(layer, minus_one=True, bits=config["bits"])
    if method == "awq":
        gemv = config["version"] == "gemv"
        return files_awq.gemv(layer, -(-scale.shape[1] // 8)) if gemv else files_awq.gemm(layer)
    if method == "w4afp8":
        return {"weight": words(q, 1, torch.int8), "weight_scale_inv": scale}
    if method == "executorch":
        return {"weight": q, "scales": scale, "zeros": zero}
    if method == "bitblas":
        return {"qweight": words(layer.q, 1, torch.int8), "scales": scale, "zeros": layer.zero.to(BF16)}
    if method == "torchao":
        scale.copy_(torch.exp2(scale.float().log2().round()))  # so that offsets are exact
        both = torch.stack((scale.T, (-zero * scale).T), 2)
        if form == "tiles":
            return {"_weight_qdata": files_torchao.tiles(layer.q, 2), "_weight_scale_and_zero": both}
        return {"_weight_qdata": words(q, 1, torch.int8), "_weight_scale": scale.T, "_weight_zero_point": both[..., 1]}
    if config["format"] == "pack-quantized":
        found = {"weight_packed": words(layer.q, 1), "weight_shape": torch.tensor([layer.n, layer.k])}
        return found | {"weight_scale": scale} | ({"weight_zero_point": words(layer.zero, 0)} if asymmetric else {})
    return {"weight": q, "weight_scale": scale} | ({"weight_zero_point": zero} if asymmetric else {})


def stored_nvfp4(ct, n, k, seed):
    """With static scales of inputs of 4 bits, and a scale of the tensor that the inverse's inverse is."""
    parts = replace(nvfp4.parts(seed, n, k), whole=torch.tensor([2.0 ** -(seed % 5) / 64]))
    found, more = (
        {"weight_packed" if ct else "weight": parts.canonical, "weight_scale": parts.scales},
        torch.tensor([seed + 1.0]),
    )
    if ct:
        found |= {"weight_global_scale": parts.whole.reciprocal(), "input_global_scale": more}
    else:
        found |= {"weight_scale_2": parts.whole.view(()), "input_scale": more.view(())}
    return found, parts.dequantize_fp64()


def stored_8(config, said, n, k, seed):
    q = (
        torch.randint(-127, 128, (n, k), dtype=torch.int8)
        if said.get("type") == "int"
        else torch.randn(n, k).to(torch.float8_e4m3fn)
    )
    if config in map(CONFIGS.get, OF_MXFP8):
        exponents = torch.randint(110, 126, (n, -(-k // 32)), dtype=torch.uint8)
        by_32 = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)[:, :k]
        name = "weight_scale_inv" if "weight_block_size" in config else "weight_scale"
        return {"weight": q, name: exponents}, q.double() * by_32
    if "weight_block_size" in config:
        rows, columns = config["weight_block_size"]
        scale = (torch.rand(-(-n // rows), -(-k // columns)) + 0.5).to(BF16).float()
        by_row = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        return {"weight": q, "weight_scale_inv": scale}, q.double() * by_row.double()
    algorithm = config.get("quant_algo")
    tensor = config["quant_method"] == "fp8" or algorithm == "FP8"
    scale = (torch.rand(1 if tensor else n, 1) + 0.5).to(BF16)
    stored = scale.reshape(()) if tensor else scale[:, 0] if algorithm or "data_type" in config else scale
    start = "_weight_" if "form" in config else "weight_"
    found = {"_weight_qdata" if "form" in config else "weight": q, f"{start}scale": stored if said else stored.float()}
    return found | static(seed if tensor else None), q.double() * scale.double()


def without_least(tensors):
    """A packed layer without -8, which other kernels take: its tensors, and its weight."""
    words, scale = tensors["weight_packed"] | 0x11111111, tensors["weight_scale"].double()
    q = torch.stack([(words >> 4 * i & 15) - 8 for i in range(8)], -1).flatten(1)
    return tensors | {"weight_packed": words}, q * scale.repeat_interleave(q.shape[1] // scale.shape[1], 1)


def static(seed):
    return {} if seed is None else {"input_scale": torch.tensor([0.01 * (seed + 1)])}


def dense_of(module) -> torch.Tensor:
    """The weight that a module holds: exactly, or, of a rotated one, turned back."""
    weight = module.weight.dequantize()
    return (rotated(weight) if module.weight.rotation else weight).double()


def header(tensor):
    """Of a tensor, or of one of no size and safetensors' type, as vLLM has it."""
    if isinstance(tensor, str):
        return {"dtype": tensor, "shape": []}
    return {"dtype": {dtype: name for name, dtype in DTYPES.items()}[tensor.dtype], "shape": [*tensor.shape]}


def corrected(x):
    layer = layers.layer(len(x), *x.shape, 32, dtype=BF16)
    q, zero = layer.q.to(torch.uint8), layer.zero
    return jitgemm.pack_w4(q, layer.scale, zero, group_size=32, k=layer.k, lhs_dtype=torch.int8, correction=True)


WEIGHTS = {
    "4 bits": (lambda x: jitgemm.quantize_w4(x, 64), "e4m3"),
    "zero points": (lambda x: jitgemm.quantize_w4(x, 32, symmetric=False), "int8_affine"),
    "groups of 128": (lambda x: jitgemm.quantize_w4(x, 128), "e4m3"),
    "per channel": (lambda x: jitgemm.quantize_w4(x, x.shape[-1]), "e4m3"),
    "mxfp4": (jitgemm.quantize_mxfp4, "e4m3"),
    "nvfp4": (lambda x: nvfp4.parts(x.shape[-2], *x.shape[-2:], experts=len(x) if x.dim() == 3 else None).packed, "e4m3"),
    "two levels": (jitgemm.quantize_w4_two_level, "int8"),
    "two levels, rotated": (lambda x: jitgemm.quantize_w4_two_level(x, rotation=128), "int8"),
    "8 bits": (lambda x: jitgemm.quantize_w8(x, torch.int8), "int8"),
}  # fmt: skip
"""What quantises a weight, and what activations a linear of it has."""
SAVED = WEIGHTS | {
    "static": WEIGHTS["4 bits"], "corrected": (corrected, "int8"),
    "8 bits in blocks": (lambda x: jitgemm.quantize_w8(x, torch.float8_e4m3fn, block=128), "e4m3_block"),
}  # fmt: skip


def saved(kind, n, k):
    """A linear as jitgemm saves it."""
    quantise, activation = SAVED[kind]
    scale = torch.tensor([0.5]) if kind == "static" else None
    weight = quantise(torch.randn(n, k, dtype=BF16) / 16)
    return LINEARS[weight.bits](weight, activation=activation, input_scale=scale)


def columns_of(kind):
    """That ranks can have parts of."""
    return 512 if "rotated" in kind else 384


@functools.cache
def packed_module(kind="4 bits", bias=True, gate=SILU_MUL):
    """Experts of 4 x (hidden 128, intermediate 384, or 512), which no test changes."""
    torch.manual_seed(0)
    quantise, activation = WEIGHTS[kind]
    inter, activation = columns_of(kind), activation.removesuffix("_affine")
    biases = [torch.randn(4, n) for n in (2 * inter, 128)] if bias else []
    weights = (quantise(torch.randn(4, *size, dtype=BF16)) for size in ((2 * inter, 128), (128, inter)))
    return packed_experts(*weights, *biases, activation=activation, gate=gate)


SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def expert_tensors(config, count, hidden, inter):
    """{(expert, proj): tensors by suffix}, and the weights that they stand for."""
    found, dense = {}, {}
    for expert in range(count):
        for number, proj in enumerate(SHARDS):
            n, k = (hidden, inter) if proj == "down_proj" else (inter, hidden)
            found[expert, proj], dense[expert, proj] = stored(config, n, k, 10 * expert + number)
    return found, dense


def assert_held(modules, dense, split):
    """That the ranks' packed experts together hold these weights, bit for bit."""
    experts, projs = range(1 + max(e for e, _ in dense)), list(dict.fromkeys(proj for _, proj in dense))
    *gates, down = (torch.stack([dense[e, proj] for e in experts]) for proj in projs)
    first, second = ([dense_of(getattr(module, part)) for module in modules] for part in ("w13", "w2"))
    if split == "tp":
        halves = [torch.cat([each.chunk(len(gates), 1)[half] for each in first], 1) for half in range(len(gates))]
        assert torch.equal(torch.cat(halves, 1), torch.cat(gates, 1)) and torch.equal(torch.cat(second, 2), down)
    else:
        assert torch.equal(torch.cat(first), torch.cat(gates, 1)) and torch.equal(torch.cat(second), down)


def mixture(x, ids, weights, dense, options=None):
    """The layer of experts by its definition, in fp64; options: of the gate."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for e, weight in zip(ids[t].tolist(), weights[t].double()):
            *gates, down = (dense[e, proj] for proj in SHARDS if (e, proj) in dense)
            out[t] += weight * (down @ activated(torch.cat(gates) @ x[t].double(), options or {}))
    return out


def assert_mixture(engine, layers, dense, within=0.06, options=None):
    """That the ranks' results add up to it."""
    x, ids, weights = routed(1 + max(e for e, _ in dense))
    x = x[:, : len(dense[0, "down_proj"])].contiguous()
    total = sum(engine.run_experts(layer, x, ids, weights).double() for layer in layers)
    expected = mixture(x, ids, weights, dense, options)
    assert (total - expected).norm() < within * expected.norm()


def routed(count, tokens=6, top_k=2):
    torch.manual_seed(5)
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]).to(torch.int32)
    return torch.randn(tokens, 64, dtype=BF16), ids, torch.rand(tokens, top_k)
