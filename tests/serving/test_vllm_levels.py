"""NVFP4, QServe and zero points as corrections in vLLM: what they have that other formats have not."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from vllm_cases import (
    CONFIGS,
    OF_MXFP8,
    dense_of,
    gate_up,
    kind,
    load,
    load_experts,
    made,
    process,
    row,
    scheme,
    stored,
    told,
)
from vllm_cases import vllm_is_there as vllm_is_there
from vllm_layers import experts, rank
from vllm_mxfp4_cases import AUTOROUND, QUARK, with_headers

import jitgemm
from jitgemm.checkpoint.compressed_tensors import FORMAT
from jitgemm.checkpoint.compressed_tensors_config import written_config, written_group
from jitgemm.nn.layers.shard_weight import unpacked
from jitgemm.vllm import config as configs
from jitgemm.vllm.linear import JitGemmLinearMethod


@pytest.fixture
def said(monkeypatch):
    found = []
    monkeypatch.setattr(configs.logger, "warning_once", lambda text, *given: found.append(text % given))
    return found


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nvfp4", "modelopt-nvfp4"])
@pytest.mark.parametrize("known", [True, False], ids=["with headers", "without"])
def test_joined_layers_keep_scales_of_the_tensor_of_their_own(tmp_path, name, known):
    parts = [stored(CONFIGS[name], 64, 128, seed) for seed in (1, 2)]
    scale = next(each for each in parts[0][0] if each in ("weight_global_scale", "weight_scale_2"))
    assert float(parts[0][0][scale]) != float(parts[1][0][scale])
    layers = dict(zip(("m.gate_proj", "m.up_proj"), (tensors for tensors, _ in parts)))
    config = with_headers(tmp_path, CONFIGS[name], layers) if known else made(CONFIGS[name])
    with rank():
        layer = gate_up(config, 128, 64)
        for part, (tensors, _) in enumerate(parts):
            load(layer, tensors, part)
        module = process(layer)
    assert torch.equal(dense_of(module), torch.cat([dense for _, dense in parts]))
    assert module.weight.format.code == "nvfp4" and module.activation == "e4m3" and module.input_scale is None


def test_columns_are_cut_in_multiples_of_16():
    tensors, dense = stored(CONFIGS["nvfp4"], 64, 224)
    found = []
    for number in range(2):
        with rank(number, 2):
            layer = row(CONFIGS["nvfp4"], 224, 64)
            load(layer, tensors)
        found.append(dense_of(process(layer)))
    assert torch.equal(torch.cat(found, 1), dense)


def of(config, like, options=None):
    """The config, told of the headers of two layers that have these tensors."""
    return told(config, dict.fromkeys(("m.a", "m.b"), stored(CONFIGS[like], 64, 64)[0]), options)


def test_inputs_of_4_bits_have_8_and_the_log_says_so(said):
    assert kind(of(CONFIGS["nvfp4"], "nvfp4"), "m.a") is JitGemmLinearMethod
    assert said == [
        "jitgemm: the checkpoint's inputs of 4 bits are quantised to 8 bits for each token, e4m3; activation='e4m3' says so "
        "without this warning"
    ]
    said.clear()
    weights_alone = scheme("tensor_group", 16, format="nvfp4-pack-quantized", type="float")
    assert kind(of(weights_alone, "nvfp4"), "m.a") is JitGemmLinearMethod and not said
    own = of(CONFIGS["nvfp4"], "nvfp4", {"activation": "e4m3_block"})
    assert kind(own, "m.a") is JitGemmLinearMethod and not said


ACT_8 = {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "is_dynamic": True, "scale_format": "e8m0"}
OF_MX = {name: (CONFIGS[name], name) for name in ("mxfp4-mxfp8", *OF_MXFP8)} | {
    "auto-round": (AUTOROUND | {"act_bits": 8, "act_data_type": "mx_fp_rceil"}, "mxfp4"),
    "quark": ({"quant_method": "quark", "global_quant_config": QUARK["global_quant_config"] | {"input_tensors": ACT_8}}, "quark"),
}  # fmt: skip
"""Configs, and what has the same tensors."""


@pytest.mark.parametrize("config, like", OF_MX.values(), ids=OF_MX)
def test_inputs_in_mxfp8_have_a_scale_for_128_k_and_the_log_says_so_once(said, config, like):
    own = of(config, like)
    assert kind(own, "m.a") is kind(own, "m.b") is JitGemmLinearMethod
    assert {*said} == {
        "jitgemm: the checkpoint's MXFP8 inputs are quantised to 8 bits for each token and 128 k, e4m3_block; "
        "activation='e4m3_block' says so without this warning"
    }
    said.clear()
    tensors, _ = stored(CONFIGS[like], 64, 128)
    for wanted in ("e4m3", None):
        with rank():
            layer = row(made(config, {"activation": wanted}), 128, 64)
            load(layer, tensors)
        assert process(layer).activation == (wanted or "e4m3_block") and bool(said) == (wanted is None)


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4"])
def test_the_names_that_vllm_has_for_modelopts_methods_mean_the_same(method):
    assert kind(made({"quant_method": method, "quant_algo": "NVFP4"}), "m.a") is JitGemmLinearMethod


def test_a_mixed_checkpoint_of_modelopt_is_told_by_its_tensors(tmp_path):
    tensors, dense = stored(CONFIGS["modelopt-nvfp4"], 64, 128)
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}}
    with rank():
        layer = row(with_headers(tmp_path, mixed, {"m.o_proj": tensors}), 128, 64)
        load(layer, tensors)
    assert torch.equal(dense_of(process(layer)), dense)


def test_a_global_scale_that_is_no_number_is_named():
    tensors, _ = stored(CONFIGS["nvfp4"], 64, 128)
    with rank():
        layer = row(CONFIGS["nvfp4"], 128, 64)
        load(layer, tensors | {"weight_global_scale": torch.zeros(1)})
    with pytest.raises(ValueError, match="weight_global_scale: expected a positive, finite number, got 0.0.*m.o_proj"):
        process(layer)


# ---- QServe ----------------------------------------------------------------------------------------------------------

WIDE = CONFIGS["qserve"] | {"group_size": 128}


def test_groups_of_128_are_served_in_two_levels(monkeypatch):
    import files_qserve

    found = [files_qserve.per_group(seed, 64, 512) for seed in (1, 2)]
    with rank():
        layer = gate_up(WIDE, 512, 64)
        for part, (tensors, _) in enumerate(found):
            load(layer, tensors, part)
        module = process(layer)
    expected = torch.cat([q.double() * tensors["s1_scales"].double()[:, None] for tensors, q in found])
    assert (
        module.weight.format.code == "two_level"
        and module.activation == "int8"
        and torch.equal(dense_of(module), expected)
    )


def test_scales_per_channel_are_told_by_the_group_size():
    import files_qserve

    tensors, expected = files_qserve.per_channel(3, torch.arange(64) % 16)
    with rank():
        layer = row(CONFIGS["qserve"] | {"group_size": -1}, 256, 64)
        load(layer, tensors)
    assert torch.equal(dense_of(process(layer)), expected)


@pytest.mark.filterwarnings("ignore:tp_size")
def test_tiles_are_cut_along_both_dimensions_through_groups():
    import files_qserve

    tensors, q = files_qserve.per_group(5, 64, 384)
    found = []
    for number in range(2):
        with rank(number, 2):
            layer = row(WIDE, 384, 64)
            load(layer, tensors)
        found.append(dense_of(process(layer)))
    assert torch.equal(torch.cat(found, 1), q.double() * tensors["s1_scales"].double()[:, None])


def test_a_rank_has_parts_of_tiles():
    """8 of 32 rows, and columns from the middle of a tile."""
    import files_qserve

    tensors, dense = files_qserve.per_channel(3, torch.arange(64) % 16, 64, 192)
    config = CONFIGS["qserve"] | {"group_size": -1}
    for number in range(8):
        with rank(number, 8):
            layer = gate_up(config, 192, 64)
            for part in (0, 1):
                load(layer, tensors, part)
        mine = dense[8 * number : 8 * (number + 1)]
        assert torch.equal(dense_of(process(layer)), torch.cat([mine, mine]))
    for number in range(4):
        with rank(number, 4):
            layer = row(config, 192, 64)
            load(layer, tensors)
        assert torch.equal(dense_of(process(layer)), dense[:, 48 * number : 48 * (number + 1)])


# ---- corrections -----------------------------------------------------------------------------------------------------


def renewed(layer, params):
    """The layer as vLLM has it before it loads weights again."""
    for each in (*layer._parameters, *layer._buffers):
        delattr(layer, each)
    for each, param in params.items():
        layer.register_parameter(each, param)


@pytest.mark.parametrize("activation, corrected", [(None, "fp16"), ("int8_block", ""), ("e4m3", "")])
def test_zero_points_are_corrections_where_int8_has_a_scale_per_token(activation, corrected):
    tensors, dense = stored(CONFIGS["packed-corrected"], 64, 128)
    with rank():
        layer = row(made(CONFIGS["packed-corrected"], {"activation": activation}), 128, 64)
        load(layer, tensors)
        module = process(layer)
        assert module.weight.format.correction == corrected and torch.equal(dense_of(module), dense)
        x = torch.randn(3, 128).bfloat16()
        expected = x.double() @ dense.T
        assert (layer.quant_method.apply(layer, x).double() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("first", [True, False], ids=["with", "without"])
def test_weights_that_are_loaded_again_are_corrected_as_the_first_were(first):
    """Of a scale of zero no factor tells a zero point."""
    tensors, dense = stored(CONFIGS["packed-corrected"], 64, 128)
    none = tensors | {"weight_scale": tensors["weight_scale"].clone()}
    none["weight_scale"][3, 1] = 0
    with rank():
        layer = row(CONFIGS["packed-corrected"], 128, 64)
        params = dict(layer.named_parameters())
        load(layer, tensors if first else none)
        module = process(layer)
        address = module.blocks.data_ptr()
        assert bool(module.weight.format.correction) == first
        renewed(layer, params)
        load(layer, none if first else tensors)
        if first:
            with pytest.raises(ValueError, match="correction: expected scales times zero points.*m.o_proj"):
                process(layer)
        else:
            assert process(layer).blocks.data_ptr() == address and torch.equal(dense_of(module), dense)


# ---- rotated layers in files -----------------------------------------------------------------------------------------

ROTATED = written_config([written_group(["Linear"], 4, "int", scheme="two-level")], [], 128)
"""What `jitgemm quantize --rotation 128 --scheme two-level` says."""


def rotated_layer(seed, n, k):
    """Tensors of a file, and the weight, turned back."""
    torch.manual_seed(seed)
    weight = jitgemm.quantize_w4_two_level(torch.randn(n, k), rotation=128)
    return FORMAT.write(unpacked(weight), FORMAT.written(ROTATED, "")), dense_of(SimpleNamespace(weight=weight))


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_has_its_blocks_of_rotated_layers_in_two_levels(size, tmp_path):
    gate, up, o = (rotated_layer(seed, n, k) for seed, n, k in ((1, 128, 128), (2, 128, 128), (3, 64, 512)))
    config = with_headers(tmp_path, ROTATED, {"m.gate_proj": gate[0], "m.up_proj": up[0], "m.o_proj": o[0]})
    for number in range(size):
        with rank(number, size):
            joined, cut = gate_up(config, 128, 128), row(config, 512, 64)
            for part, (tensors, _) in enumerate((gate, up)):
                load(joined, tensors, part)
            load(cut, o[0])
        joined, cut = process(joined), process(cut)
        for layer in (joined, cut):
            assert (layer.weight.rotation, layer.weight.format.code, layer.activation) == (128, "two_level", "int8")
        assert torch.equal(dense_of(joined), torch.cat([dense.chunk(size)[number] for _, dense in (gate, up)]))
        assert torch.equal(dense_of(cut), o[1].chunk(size, 1)[number])


@pytest.mark.parametrize("split", ["tp", "ep"])
def test_a_rank_has_its_part_of_rotated_experts_in_two_levels(split, tmp_path):
    shapes = {"gate_proj": (256, 128), "up_proj": (256, 128), "down_proj": (128, 256)}
    found = {(e, proj): rotated_layer(10 * e, *shape) for e in range(4) for proj, shape in shapes.items()}
    config = with_headers(tmp_path, ROTATED, {f"m.experts.{e}.{proj}": each[0] for (e, proj), each in found.items()})
    dense, parts = {key: each[1] for key, each in found.items()}, []
    for number in range(2):
        with rank():
            layer = experts(config, "m.experts", (4, 128, 256), 2, **{split: (number, 2)})
            load_experts(layer, "m.experts", {key: each[0] for key, each in found.items()})
            parts.append(process(layer))
        assert parts[-1].w13.weight.rotation == parts[-1].w2.weight.rotation == 128
        assert parts[-1].w13.weight.format.code == parts[-1].w2.weight.format.code == "two_level"
    w13, w2 = ([dense_of(getattr(part, name)) for part in parts] for name in ("w13", "w2"))
    for e in range(4):
        gate, up, down = (dense[e, proj] for proj in shapes)
        if split == "ep":
            held = parts[e // 2]
            assert torch.equal(dense_of(held.w13)[e % 2], torch.cat((gate, up)))
            assert torch.equal(dense_of(held.w2)[e % 2], down)
        else:
            assert torch.equal(torch.cat([each[e][:128] for each in w13]), gate)
            assert torch.equal(torch.cat([each[e][128:] for each in w13]), up)
            assert torch.equal(torch.cat([each[e] for each in w2], 1), down)


def test_rotated_layers_whose_blocks_ranks_cut_and_other_transforms_are_left_to_vllm(said):
    """Whose own config says what it makes of them; the stand-in has none, and the error says why."""
    (group,) = ROTATED["transform_config"]["config_groups"].values()
    others = {"transform_config": {"config_groups": {"R4": group | {"head_dim": 64}}}}
    for config, k, size, reason in (
        (ROTATED, 384, 2, "expected rows in multiples of 8 and columns of 128 on each rank, got 64 and 192"),
        (
            ROTATED | others,
            256,
            1,
            "transform R4 .hadamard. of blocks of 64 at the input; kernels rotate blocks of 128",
        ),
    ):
        config = told(config, {"m.o_proj": rotated_layer(1, 64, k)[0]})
        with rank(0, size):
            try:
                row(config, k, 64)
            except Exception as error:  # of vLLM's, of any kind
                said.append(str(error))
        assert any(re.search(reason, text) for text in said), said
        said.clear()
