"""A layer of every codec in the words of every tool that writes it: docs/formats.md's table, with tensors and config.

Codes are turned into numbers by tables and torch's own types, so that no reader is held against itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import builders
import checkpoints
import files_awq
import files_gptq
import files_qserve
import layers
import torch

N, K = 160, 256
LAYER = layers.PREFIX
E2M1 = torch.tensor([*(values := (0, 0.5, 1, 1.5, 2, 3, 4, 6)), *(-each for each in values)], dtype=torch.float64)
_G = builders.generator(54)
CODES = torch.randint(0, 16, (N, K), generator=_G)
PAIRS = (CODES[:, 0::2] | CODES[:, 1::2] << 4).to(torch.uint8)
"""Of 4 bits, two to a byte, the even k low."""
E8M0 = torch.randint(110, 128, (N, K // 32), generator=_G, dtype=torch.uint8)
E4M3_SCALES = (torch.rand(N, K // 16, generator=_G) * 100 + 8).to(torch.float8_e4m3fn)
FP8 = torch.randn(N, K, generator=_G).to(torch.float8_e4m3fn)
INT8 = torch.randint(-128, 128, (N, K), generator=_G, dtype=torch.int8)
ROWS = torch.rand(N, 1, generator=_G) / 50 + 1e-3
GROUPS = (torch.rand(N, K // 64, generator=_G) / 50 + 1e-3).bfloat16()
ONE = torch.tensor([0.25])
ZEROS = layers.layer(3, N, K, 64, zeros=(1, 15))
ZEROS_8 = layers.layer(4, N, K, 64, zeros=(128, 128), bits=8)


def blocks(size: int) -> torch.Tensor:
    return torch.rand(-(-N // size), K // size, generator=_G) / 50 + 1e-3


def over(scales: torch.Tensor) -> torch.Tensor:
    """[N, K] of a scale for the whole, a row, a group or a block."""
    wide = scales.double() if scales.dtype != torch.uint8 else torch.exp2(scales.double() - 127)
    for dim, size in enumerate((N, K)):
        count = wide.shape[dim]
        per = -(-size // count)
        per = size if count == 1 else 128 if per > 64 else per
        wide = wide.repeat_interleave(per, dim)
    return wide[:N, :K]


@dataclass(frozen=True)
class Case:
    """A layer's tensors by suffix, the config that they stand beside, and its weight in fp64."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any] | None
    weight: torch.Tensor

    @property
    def source(self) -> dict[str, torch.Tensor]:
        return {f"{LAYER}.{suffix}": tensor for suffix, tensor in self.tensors.items()}


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "symmetric": True, "dynamic": False} | weights
    inputs = {
        "num_bits": 8,
        "type": "int" if weights["type"] == "int" else "float",
        "strategy": "token",
        "dynamic": True,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs | {"symmetric": True}}
    folded = {"location": "weight_output", "targets": ["Linear"], "ignore": ["re:.*lm_head"]}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "version": "0.20.1",
        "quantization_status": "compressed", "ignore": ["lm_head", "re:.*down_proj"], "sparsity_config": {"format": "dense"},
        "transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": [folded]}}},
    }  # fmt: skip


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_quant_algo": "FP8", **more}


def _autoround(data_type: str, bits: int, group_size: Any, packing: str = "auto_round:llm_compressor", **more: Any):
    said = {"bits": bits, "group_size": group_size, "data_type": data_type, "packing_format": packing, "sym": True}
    others = {"extra_config": {"lm_head": {"bits": 16}, r".*down\\.proj.*": {"bits": 8}}}
    return {"quant_method": "auto-round", "act_bits": 16, "act_data_type": None, **said, **others, **more}


def _quark(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    other = {"weight": {"dtype": "fp6_e2m3", "qscheme": "per_group", "group_size": 32}, "input_tensors": None}
    inputs = {"dtype": "int8" if dtype == "int8" else "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True}
    own = {"weight": {"dtype": dtype, "qscheme": qscheme, **more}, "input_tensors": inputs}
    layers = {"*down_proj": other, "*.mlp.*": own, "*up_proj": other}
    return {
        "quant_method": "quark", "global_quant_config": other, "layer_quant_config": layers, "exclude": ["lm_head"],
        "layer_type_quant_config": {}, "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }  # fmt: skip


@cache
def cases() -> dict[tuple[str, str, str], Case]:
    """By codec, tool and what else tells one form from another."""
    mxfp4, nvfp4 = E2M1[CODES] * over(E8M0), E2M1[CODES] * over(E4M3_SCALES)
    fp8, int8, int4 = FP8.double(), INT8.double(), CODES.double() - 8
    signed = checkpoints.words(CODES - 8, 1, torch.int8)  # two's complement, even k low
    wide, square, e32 = blocks(128), blocks(32), torch.randint(110, 128, (N // 32, K // 32), dtype=torch.uint8)
    as_e8m0 = lambda scales: scales.view(torch.float8_e8m0fnu)  # noqa: E731
    of_groups = {
        "weight_packed": checkpoints.words(CODES, 1),
        "weight_shape": torch.tensor([N, K]),
        "weight_scale": GROUPS,
    }
    of_mxfp4 = {"weight_packed": PAIRS, "weight_scale": E8M0}
    of_nvfp4 = {"weight_packed": PAIRS, "weight_scale": E4M3_SCALES, "weight_global_scale": 1 / ONE}
    of_gptq, of_gptq_v2 = (
        {suffix: each for suffix, each in files_gptq.packed(ZEROS, minus_one=v1).items() if suffix != "g_idx"}
        for v1 in (True, False)
    )
    of_gptq_8 = files_gptq.packed(ZEROS_8, minus_one=True, bits=8)
    two_levels, by_kernel = files_qserve.per_group(5, N, K)
    by_rows, of_rows = files_qserve.per_channel(6, torch.zeros(N, dtype=torch.int64), N, K)
    mx, nv = {"group_size": 32}, {"group_size": 16, "strategy": "tensor_group"}
    in_8, mx_8 = {"num_bits": 8}, {"num_bits": 8, "group_size": 32}
    ints, ints_8 = {"type": "int", "group_size": 64}, {"type": "int", "num_bits": 8, "strategy": "channel"}
    deepseek = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    more = {
        "dynamic": {"+:.*down_proj": {"bits": 8}},
        "meta": {"quantizer": ["x:1.0"]},
        "desc_act": False,
        "sym": False,
    }
    plain = (CODES - 8).to(torch.int8)
    of_bitblas = {
        "qweight": checkpoints.words(ZEROS.q, 1, torch.int8),
        "scales": ZEROS.scale,
        "zeros": ZEROS.zero.half(),
    }
    both = torch.stack((GROUPS.T, GROUPS.T * 0), -1)
    high_first = checkpoints.words(CODES, 1, torch.uint8, order=(1, 0))
    found = {
        ("MXFP4", "compressed-tensors", ""): (of_mxfp4, _compressed("mxfp4-pack-quantized", **mx), mxfp4),
        ("MXFP4", "compressed-tensors", "0.13.0"): (
            of_mxfp4 | {"weight_scale": E8M0 - 2}, _compressed("mxfp4-pack-quantized", **mx) | {"version": "0.13.0"}, mxfp4
        ),
        ("MXFP4", "ModelOpt", ""): ({"weight": PAIRS, "weight_scale": E8M0}, _modelopt("W4A8_MXFP4_FP8"), mxfp4),
        ("MXFP4", "AutoRound", ""): (of_mxfp4, _autoround("mx_fp", 4, 32), mxfp4),
        ("MXFP4", "AutoRound", "as compressed-tensors 0.13.0"): (
            of_mxfp4, _compressed("mxfp4-pack-quantized", **mx) | {"version": "0.13.0", "provider": "auto-round"}, mxfp4
        ),
        ("MXFP4", "Quark", ""): ({"weight": PAIRS, "weight_scale": E8M0}, _quark("fp4", "per_group", group_size=32), mxfp4),
        ("MXFP4", "DeepSeek", "scale"): (
            {"weight": PAIRS.view(torch.int8), "scale": as_e8m0(E8M0)}, deepseek | {"expert_dtype": "fp4"}, mxfp4
        ),
        ("MXFP4", "DeepSeek", "weight_scale_inv"): (
            {"weight": PAIRS.view(torch.int8), "weight_scale_inv": as_e8m0(E8M0)}, deepseek | {"expert_dtype": "fp4"}, mxfp4
        ),
        ("MXFP4", "gpt-oss", ""): ({"blocks": PAIRS.unflatten(1, (-1, 16)), "scales": E8M0}, {"quant_method": "mxfp4"}, mxfp4),
        ("NVFP4", "compressed-tensors", ""): (of_nvfp4, _compressed("nvfp4-pack-quantized", **nv), nvfp4 * 0.25),
        ("NVFP4", "ModelOpt", ""): (
            {"weight": PAIRS, "weight_scale": E4M3_SCALES, "weight_scale_2": ONE}, _modelopt("NVFP4"), nvfp4 * 0.25
        ),
        ("NVFP4", "AutoRound", ""): (of_nvfp4 | {"input_global_scale": ONE}, _autoround("nv_fp", 4, 16), nvfp4 * 0.25),
        ("MXFP8", "compressed-tensors", ""): (
            {"weight": FP8, "weight_scale": E8M0}, _compressed("mxfp8-quantized", **mx_8), fp8 * over(E8M0)
        ),
        ("MXFP8", "ModelOpt", ""): ({"weight": FP8, "weight_scale": E8M0}, _modelopt("MXFP8"), fp8 * over(E8M0)),
        ("MXFP8", "AutoRound", ""): ({"weight": FP8, "weight_scale": E8M0}, _autoround("mx_fp", 8, 32), fp8 * over(E8M0)),
        ("MXFP8", "Quark", ""): (
            {"weight": FP8, "weight_scale": E8M0}, _quark("fp8_e4m3", "per_group", group_size=32), fp8 * over(E8M0)
        ),
        ("MXFP8", "DeepSeek", ""): (
            {"weight": FP8, "weight_scale_inv": E8M0}, deepseek | {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
            fp8 * over(E8M0),
        ),
        ("FP8", "compressed-tensors", "rows"): (
            {"weight": FP8, "weight_scale": ROWS}, _compressed("float-quantized", **in_8, strategy="channel"), fp8 * over(ROWS)
        ),
        ("FP8", "compressed-tensors", "tensor"): (
            {"weight": FP8, "weight_scale": ONE}, _compressed("float-quantized", **in_8, strategy="tensor"), fp8 * 0.25
        ),
        ("FP8", "compressed-tensors", "blocks"): (
            {"weight": FP8, "weight_scale": wide},
            _compressed("float-quantized", **in_8, strategy="block", block_structure=[128, 128]), fp8 * over(wide),
        ),
        ("FP8", "ModelOpt", "tensor"): (
            {"weight": FP8, "weight_scale": ONE[0], "input_scale": ONE[0]}, _modelopt("FP8"), fp8 * 0.25
        ),
        ("FP8", "ModelOpt", "rows"): (
            {"weight": FP8, "weight_scale": ROWS[:, 0]}, _modelopt("FP8_PER_CHANNEL_PER_TOKEN"), fp8 * over(ROWS)
        ),
        ("FP8", "ModelOpt", "blocks"): (
            {"weight": FP8, "weight_scale": wide[:, None, :, None]}, _modelopt("FP8_PB_WO"), fp8 * over(wide)
        ),
        ("FP8", "AutoRound", "rows"): (
            {"weight": FP8, "weight_scale": ROWS[:, 0]}, _autoround("fp", 8, -1, "auto_round:fp8"), fp8 * over(ROWS)
        ),
        ("FP8", "AutoRound", "tensor"): ({"weight": FP8, "weight_scale": ONE}, _autoround("fp", 8, 0, "auto_round:fp8"), fp8 / 4),
        ("FP8", "AutoRound", "blocks"): (
            {"weight": FP8, "weight_scale_inv": wide}, _autoround("fp", 8, [128, 128], "auto_round:fp8"), fp8 * over(wide)
        ),
        ("FP8", "Quark", "tensor"): ({"weight": FP8, "weight_scale": ONE[0]}, _quark("fp8_e4m3", "per_tensor"), fp8 * 0.25),
        ("FP8", "Quark", "rows"): (
            {"weight": FP8, "weight_scale": ROWS[:, 0]}, _quark("fp8_e4m3", "per_channel", ch_axis=0), fp8 * over(ROWS)
        ),
        ("FP8", "Quark", "blocks"): (
            {"weight": FP8, "weight_scale": wide}, _quark("fp8_e4m3", "per_block", block_size=[128, 128]), fp8 * over(wide)
        ),
        ("FP8", "Quark", "blocks of 32"): (
            {"weight": FP8, "weight_scale": square}, _quark("fp8_e4m3", "per_block", block_size=[32, 32]), fp8 * over(square)
        ),
        ("FP8", "Quark", "blocks of 32, e8m0"): (
            {"weight": FP8, "weight_scale": as_e8m0(e32)}, _quark("fp8_e4m3", "per_block", block_size=[32, 32]), fp8 * over(e32)
        ),
        ("FP8", "DeepSeek", "blocks"): ({"weight": FP8, "weight_scale_inv": wide}, deepseek, fp8 * over(wide)),
        ("FP8", "DeepSeek", "blocks, e8m0"): (
            {"weight": FP8, "scale": as_e8m0(E8M0[:2, :2].contiguous())}, deepseek | {"scale_fmt": "ue8m0"},
            fp8 * over(E8M0[:2, :2]),
        ),
        ("INT4", "compressed-tensors", "packed"): (of_groups, _compressed("pack-quantized", **ints), int4 * over(GROUPS)),
        ("INT4", "compressed-tensors", "plain"): (
            {"weight": plain, "weight_scale": GROUPS}, _compressed("int-quantized", **ints), int4 * over(GROUPS)
        ),
        ("INT4", "compressed-tensors", "zero points"): (
            of_groups | {"weight_packed": checkpoints.words(ZEROS.q, 1), "weight_scale": ZEROS.scale,
                         "weight_zero_point": checkpoints.words(ZEROS.zero, 0)},
            _compressed("pack-quantized", **ints, symmetric=False), ZEROS.weight,
        ),
        ("INT4", "compressed-tensors", "zero points in bytes"): (
            {"weight": (ZEROS.q - 8).to(torch.int8), "weight_scale": ZEROS.scale,
             "weight_zero_point": (ZEROS.zero - 8).to(torch.int8)},
            _compressed("int-quantized", **ints, symmetric=False), ZEROS.weight,
        ),
        ("INT4", "AutoRound", "as GPTQ"): (of_gptq, _autoround("int", 4, 64, "auto_round:auto_gptq", sym=False), ZEROS.weight),
        ("INT4", "AutoRound", "as GPTQ v2"): (of_gptq_v2, _autoround("int", 4, 64, "auto_round", sym=False), ZEROS.weight),
        ("INT4", "AutoRound", "as AWQ"): (
            files_awq.gemm(ZEROS), _autoround("int", 4, 64, "auto_round:auto_awq", sym=False), ZEROS.weight
        ),
        ("INT4", "Quark", "int4"): (
            {"weight": checkpoints.words((ZEROS.q - 8).T, 1, order=files_awq.ORDER), "weight_scale": ZEROS.scale.T,
             "weight_zero_point": checkpoints.words((ZEROS.zero - 8).T, 1, order=files_awq.ORDER)},
            _quark("int4", "per_group", group_size=64, symmetric=False), ZEROS.weight,
        ),
        ("INT4", "Quark", "uint4, in order"): (
            {"weight": checkpoints.words(ZEROS.q.T, 1), "weight_scale": ZEROS.scale.T,
             "weight_zero_point": checkpoints.words(ZEROS.zero.T, 1)},
            _quark("uint4", "per_group", group_size=64) | {"export": {"pack_method": "order"}}, ZEROS.weight,
        ),
        ("INT4", "Quark", "symmetric"): (
            {"weight": checkpoints.words((CODES - 8).T, 1, order=files_awq.ORDER), "weight_scale": GROUPS.T},
            _quark("int4", "per_group", group_size=64), int4 * over(GROUPS),
        ),
        ("INT4", "GPTQ", "v1"): (of_gptq, files_gptq.V1 | more | {"group_size": 64}, ZEROS.weight),
        ("INT4", "GPTQ", "v2"): (of_gptq_v2, files_gptq.V2 | {"group_size": 64}, ZEROS.weight),
        ("INT4", "GPTQ", "AWQ gemm"): (files_awq.gemm(ZEROS), files_awq.GEMM | {"group_size": 64}, ZEROS.weight),
        ("INT4", "GPTQ", "AWQ gemv"): (files_awq.gemv(ZEROS, 2), files_awq.GEMV | {"group_size": 64}, ZEROS.weight),
        ("INT4", "DeepSeek", "W4AFP8"): (
            {"weight": signed, "weight_scale_inv": GROUPS}, {"quant_method": "w4afp8", "group_size": 64}, int4 * over(GROUPS)
        ),
        ("INT4", "QServe", "two levels"): (
            two_levels, {"quant_method": "qoq", "bits": 4, "group_size": 128},
            by_kernel.double() * two_levels["s1_scales"].double()[:, None],
        ),
        ("INT4", "QServe", "rows"): (by_rows, {"quant_method": "qoq", "bits": 4, "group_size": -1}, of_rows),
        ("INT8", "compressed-tensors", "plain"): (
            {"weight": INT8, "weight_scale": ROWS}, _compressed("int-quantized", **ints_8), int8 * over(ROWS)
        ),
        ("INT8", "compressed-tensors", "packed"): (
            {"weight_packed": checkpoints.words(INT8.long() + 128, 1, bits=8), "weight_shape": torch.tensor([N, K]), "weight_scale": ROWS},
            _compressed("pack-quantized", **ints_8), int8 * over(ROWS),
        ),
        ("INT8", "compressed-tensors", "groups"): (
            {"weight": INT8, "weight_scale": GROUPS}, _compressed("int-quantized", **ints | in_8), int8 * over(GROUPS)
        ),
        ("INT8", "ModelOpt", ""): ({"weight": INT8, "weight_scale": ROWS[:, 0]}, _modelopt("W8A8_SQ_PER_CHANNEL"), int8 * over(ROWS)),
        ("INT8", "AutoRound", "as GPTQ"): (of_gptq_8, _autoround("int", 8, 64, "auto_round:auto_gptq"), ZEROS_8.weight),
        ("INT8", "Quark", "rows"): ({"weight": INT8, "weight_scale": ROWS[:, 0]}, _quark("int8", "per_channel"), int8 * over(ROWS)),
        ("INT8", "GPTQ", "v1"): (of_gptq_8, files_gptq.V1 | {"group_size": 64, "bits": 8, "sym": True}, ZEROS_8.weight),
        ("INT8", "DeepSeek", "SGLang's blocks"): (
            {"weight": INT8, "weight_scale_inv": wide}, {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]},
            int8 * over(wide),
        ),
        ("INT8", "DeepSeek", "SGLang's rows"): ({"weight": INT8, "weight_scale": ROWS}, {"quant_method": "w8a8_int8"}, int8 * over(ROWS)),
        ("INT4", "torchao", "tinygemm"): (
            {"weight": high_first, "scales_and_zeros": both}, {"group_size": 64, "shape": [N, K]}, int4 * over(GROUPS)
        ),
        ("INT4", "torchao", "Int4Tensor"): (
            {"_weight_qdata": signed, "_weight_scale": GROUPS.T, "_weight_zero_point": GROUPS.T * 0},
            {"quant_method": "torchao", "class": "Int4Tensor"}, int4 * over(GROUPS),
        ),
        ("INT4", "torchao", "IntxUnpackedToInt8Tensor"): (
            {"_weight_qdata": plain, "_weight_scale": GROUPS, "_weight_zero_point": (GROUPS * 0).to(torch.int8)},
            {"quant_method": "torchao", "class": "IntxUnpackedToInt8Tensor"}, int4 * over(GROUPS),
        ),
        ("INT8", "torchao", "Int8Tensor"): (
            {"_weight_qdata": INT8, "_weight_scale": ROWS, "_weight_act_quant_scale": ONE},
            {"quant_method": "torchao", "class": "Int8Tensor"}, int8 * over(ROWS),
        ),
        ("FP8", "torchao", "Float8Tensor"): (
            {"_weight_qdata": FP8, "_weight_scale": ROWS}, {"quant_method": "torchao", "class": "Float8Tensor"}, fp8 * over(ROWS)
        ),
        ("INT4", "ExecuTorch", "linear_qga4w"): (
            {"weight": high_first, "weight_scales_and_zeros": both}, None, int4 * over(GROUPS)
        ),
        ("INT4", "ExecuTorch", "linear_qta8a_qga4w"): (
            {"weight": high_first, "weight_scales": GROUPS.T, "weight_zeros": torch.zeros(K // 64, N, dtype=torch.int32)},
            None, int4 * over(GROUPS),
        ),
        ("INT4", "ExecuTorch", "8da4w"): ({"weight": plain, "scales": GROUPS}, None, int4 * over(GROUPS)),
        ("INT4", "BitBLAS", ""): (
            of_bitblas, {"quant_method": "bitblas", "bits": 4, "zeros_mode": "original", "fast_decoding": False}, ZEROS.weight
        ),
    }  # fmt: skip
    return {key: Case(*each) for key, each in found.items()}
