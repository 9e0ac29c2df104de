"""Layers as engines find them in files of each format, and the weights that they stand for."""

from __future__ import annotations

import functools
from typing import Any

import files_qserve as qserve
import files_torchao
import mxfp4
import nvfp4
import torch
from checkpoints import dequantized, words

import jitgemm
from jitgemm.activations.scheme import SILU_MUL
from jitgemm.checkpoint.files import DTYPES
from jitgemm.nn import W4A8Linear, W8A8Linear
from jitgemm.nn.layers.experts import packed_experts
from jitgemm.weight.rotation import rotated

BF16 = torch.bfloat16
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
TWO = [(0, 2), (1, 2)]


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
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "gptq-channel": {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": False},
    "gptq-int8": {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "awq-gemv": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv", "zero_point": True},
    "auto-round": {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
    "auto-round-fp8": {"quant_method": "auto-round", "bits": 8, "group_size": -1, "data_type": "fp", "sym": True},
    "w4afp8": {"quant_method": "w4afp8", "group_size": 32},
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
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
    "qserve": {"quant_method": "qoq", "wbits": 4, "group_size": 32},
    "torchao": {"quant_method": "torchao"},
    "torchao-tiles": {"quant_method": "torchao", "form": "tiles"},
    "torchao-fp8": {"quant_method": "torchao", "form": "fp8"},
    "bitblas": {"quant_method": "bitblas", "bits": 4, "group_size": 32, "zeros_mode": "original", "fast_decoding": False},
    "executorch": {"quant_method": "executorch"},
}  # fmt: skip
OF_MXFP8 = ("mxfp8", "mxfp8-blocks", "modelopt-mxfp8")


def stored(config: dict, n: int, k: int, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer as its format stores it, {suffix: tensor}, and the weight that it stands for."""
    torch.manual_seed(seed)
    method = config["quant_method"]
    ct = method == "compressed-tensors"
    group = config["config_groups"]["group_0"] if ct else {}
    weights = group.get("weights", {})
    if "NVFP4" in (config.get("quant_algo") or "") or weights.get("strategy") == "tensor_group":
        return stored_nvfp4(ct, n, k, seed)
    if method in ("torchao", "bitblas", "executorch"):
        return stored_elsewhere(config, n, k)
    if method == "qoq":
        tensors, by_kernel = qserve.per_group(seed, n, k, 32)
        return tensors, by_kernel.double() * tensors["s1_scales"].double()[:, None]
    if config.get("expert_dtype") == "fp4":
        parts = mxfp4.parts(seed, n, k, shift=-12)
        codes, scales = parts.canonical.view(torch.int8), parts.scales.view(torch.float8_e8m0fnu)
        return {"weight": codes, "weight_scale": scales}, parts.dequantize_fp64()
    floats = config.get("data_type") == "fp"
    of_modelopt = method == "modelopt" and "MXFP4" not in config["quant_algo"]
    if floats or method in ("fp8", "fbgemm_fp8", "mxfp8") or of_modelopt or weights.get("num_bits") == 8:
        return stored_8(config, weights, n, k, seed)
    packed = config.get("format") == "mxfp4-pack-quantized" or config == AUTOROUND
    if packed or method in ("quark", "modelopt"):
        parts = mxfp4.parts(seed, n, k, shift=-12)
        if not packed:
            more = static(seed if method == "modelopt" else None)
            return {"weight": parts.canonical, "weight_scale": parts.scales} | more, parts.dequantize_fp64()
        return {"weight_packed": parts.canonical, "weight_scale": parts.scales}, parts.dequantize_fp64()
    strategy = weights.get("strategy", "group")
    size = weights.get("group_size") if ct else config["group_size"]
    groups = k // size if strategy == "group" and size and size > 0 else 1
    bits = config.get("bits", 4)
    middle = 2 ** (bits - 1)
    q = torch.randint(-middle, middle, (n, k), dtype=torch.int8)
    scale = (torch.rand(1 if strategy == "tensor" else n, groups) + 0.5).to(BF16) / 64
    asymmetric = method == "awq" or config.get("sym") is False or weights.get("symmetric") is False
    zero = torch.randint(-7, 8, (n, groups), dtype=torch.int8) if asymmetric else None
    dense = dequantized(q, scale.expand(n, groups), zero)
    zeros = torch.full((n, groups), middle) if zero is None else zero.long() + 8
    if method in ("gptq", "auto-round"):
        order = torch.arange(k, dtype=torch.int32) * groups // k
        qzeros = words((zeros - 1).T, 1, bits=bits)
        return {
            "qweight": words(q.T.long() + middle, 0, bits=bits),
            "qzeros": qzeros,
            "scales": scale.T,
            "g_idx": order,
        }, dense
    if config.get("version") == "gemv":
        spare = (0, -groups % 8)
        scales, zeros = (torch.nn.functional.pad(each, spare) for each in (scale, zeros))
        return {"qweight": words(q.long() + 8, 1), "qzeros": words(zeros, 1), "scales": scales}, dense
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        codes, qzeros = (words(each.T, 1, order=order) for each in (q + 8, zeros))
        return {"qweight": codes, "qzeros": qzeros, "scales": scale.T}, dense
    if method == "w4afp8":
        return {"weight": words(q, 1, torch.int8), "weight_scale_inv": scale}, dense
    found = {"weight_scale": scale.reshape(1) if strategy == "tensor" else scale}
    if config["format"] == "pack-quantized":
        found |= {"weight_packed": words(q.long() + 8, 1), "weight_shape": torch.tensor([n, k])}
        found |= {} if zero is None else {"weight_zero_point": words(zeros, 0)}
    else:
        found |= {"weight": q} | ({} if zero is None else {"weight_zero_point": zero})
    return found | static(seed if group.get("input_activations") is STATIC else None), dense


def stored_elsewhere(config, n, k):
    """As torchao, BitBLAS and ExecuTorch store a layer, which no engine's own loader cuts."""
    form, method = config.get("form"), config["quant_method"]
    if form == "fp8":
        q, scale = torch.randn(n, k).to(torch.float8_e4m3fn), (torch.rand(n, 1) + 0.5).to(BF16).float()
        return {"_weight_qdata": q, "_weight_scale": scale}, q.double() * scale.double()
    q = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    scale, zero = torch.exp2(torch.randint(-6, 0, (n, k // 32)).float()).to(BF16), torch.randint(-7, 8, (n, k // 32))
    dense = dequantized(q, scale, zero)
    if method == "executorch":
        return {"weight": q, "scales": scale, "zeros": zero.to(torch.int8)}, dense
    if method == "bitblas":
        return {"qweight": words(q.long() + 8, 1, torch.int8), "scales": scale, "zeros": (zero + 8).to(BF16)}, dense
    offset = -zero * scale  # exactly
    if form == "tiles":
        both = torch.stack((scale.T, offset.T), 2)
        return {"_weight_qdata": files_torchao.tiles(q.long() + 8, 2), "_weight_scale_and_zero": both}, dense
    found = {"_weight_qdata": words(q, 1, torch.int8), "_weight_scale": scale.T, "_weight_zero_point": offset.T}
    return found, dense


def stored_nvfp4(ct, n, k, seed):
    """With static scales of inputs of 4 bits, and a scale of the tensor that the inverse's inverse is."""
    parts = nvfp4.parts(seed, n, k)
    whole = torch.tensor([2.0 ** -(seed % 5) / 64])
    dense, more = nvfp4.Parts(parts.codes, parts.scales, whole).dequantize_fp64(), torch.tensor([seed + 1.0])
    if ct:
        found = {"weight_packed": parts.canonical, "weight_global_scale": whole.reciprocal()}
        return found | {"weight_scale": parts.scales, "input_global_scale": more}, dense
    found = {"weight": parts.canonical, "weight_scale": parts.scales, "weight_scale_2": whole.view(())}
    return found | {"input_scale": more.view(())}, dense


def stored_8(config, weights, n, k, seed):
    q = torch.randint(-127, 128, (n, k), dtype=torch.int8) if weights.get("type") == "int" else None
    q = torch.randn(n, k).to(torch.float8_e4m3fn) if q is None else q
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
    found = {"weight": q, "weight_scale": stored if weights else stored.float()}
    return found | static(seed if tensor else None), q.double() * scale.double()


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


SAVED = {
    "4 bits": lambda n, k: W4A8Linear.from_linear(floats(n, k), group_size=64),
    "zero points": lambda n, k: W4A8Linear.from_linear(
        floats(n, k), activation="int8_affine", group_size=32, symmetric=False
    ),
    "groups of 128": lambda n, k: W4A8Linear.from_linear(floats(n, k), group_size=128),
    "per channel": lambda n, k: W4A8Linear.from_linear(floats(n, k), group_size=k),
    "static": lambda n, k: W4A8Linear(
        W4A8Linear.from_linear(floats(n, k), group_size=64).weight, input_scale=torch.tensor([0.5])
    ),
    "mxfp4": lambda n, k: W4A8Linear.from_linear(floats(n, k), scheme="mxfp4"),
    "nvfp4": lambda n, k: W4A8Linear(nvfp4.parts(n, n, k).packed),
    "two levels": lambda n, k: W4A8Linear.from_linear(floats(n, k), scheme="two-level"),
    "two levels, rotated": lambda n, k: W4A8Linear.from_linear(floats(n, k), scheme="two-level", rotation=128),
    "corrected": lambda n, k: W4A8Linear(corrected(n, k), activation="int8"),
    "8 bits": lambda n, k: W8A8Linear.from_linear(floats(n, k), activation="int8"),
    "8 bits in blocks": lambda n, k: W8A8Linear.from_linear(floats(n, k), activation="e4m3_block", block=128),
}


def corrected(n, k):
    q, zero = torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.randint(0, 16, (n, k // 32))
    scale = (torch.rand(n, k // 32) + 0.5).to(BF16) / 64
    return jitgemm.pack_w4(q, scale, zero, group_size=32, k=k, lhs_dtype=torch.int8, correction=True)


def columns_of(kind):
    """That ranks can have parts of."""
    return 512 if "rotated" in kind else 384


def floats(n, k):
    return torch.nn.Linear(k, n, bias=False)


EXPERTS = {
    "4 bits": lambda *size: jitgemm.quantize_w4(torch.randn(size, dtype=BF16), 64),
    "zero points": lambda *size: jitgemm.quantize_w4(torch.randn(size, dtype=BF16), 32, symmetric=False),
    "groups of 128": lambda *size: jitgemm.quantize_w4(torch.randn(size, dtype=BF16), 128),
    "per channel": lambda *size: jitgemm.quantize_w4(torch.randn(size, dtype=BF16), size[-1]),
    "mxfp4": lambda *size: jitgemm.quantize_mxfp4(torch.randn(size, dtype=BF16)),
    "nvfp4": lambda e, n, k: nvfp4.parts(n, n, k, experts=e).packed,
    "two levels": lambda *size: jitgemm.quantize_w4_two_level(torch.randn(size, dtype=BF16)),
    "two levels, rotated": lambda *size: jitgemm.quantize_w4_two_level(torch.randn(size, dtype=BF16), rotation=128),
    "8 bits": lambda *size: jitgemm.quantize_w8(torch.randn(size, dtype=BF16), torch.float8_e4m3fn),
}


@functools.cache
def packed_module(kind="4 bits", activation="e4m3", bias=True, gate=SILU_MUL):
    """Experts of 4 x (hidden 128, intermediate 384, or 512), which no test changes."""
    torch.manual_seed(0)
    inter = columns_of(kind)
    biases = [torch.randn(4, n) for n in (2 * inter, 128)] if bias else []
    weights = EXPERTS[kind](4, 2 * inter, 128), EXPERTS[kind](4, 128, inter)
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


def mixture(x, ids, weights, dense, gate=torch.nn.functional.silu):
    """The layer of experts by its definition, in fp64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for i in range(ids.shape[1]):
            w1, w3, w2 = (dense[int(ids[t, i]), proj] for proj in SHARDS)
            y = x[t].double()
            out[t] += weights[t, i].double() * (w2 @ (gate(w1 @ y) * (w3 @ y)))
    return out


def routed(count, tokens=6, top_k=2):
    torch.manual_seed(5)
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]).to(torch.int32)
    return torch.randn(tokens, 64, dtype=BF16), ids, torch.rand(tokens, top_k)
