"""Weights that want rotated inputs: what they are packed from, that they say so, and that layers and experts give them such."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial

import builders
import pytest
import torch
from safetensors.torch import save_model

import jitgemm
from jitgemm.moe.exchange import exchange_specs
from jitgemm.moe.kernel import layer_specs
from jitgemm.nn.layers.by_width import LINEARS, W4A8Linear
from jitgemm.nn.layers.experts import PackedExperts, packed_experts
from jitgemm.nn.layers.packed import LHS_DTYPES
from jitgemm.nn.layers.shard_weight import part_of_weight, unpacked
from jitgemm.nn.layers.sharding import ExpertSharding
from jitgemm.nn.quantize.quantize import quantised, quantize_
from jitgemm.nn.quantize.replaceable import Replaceable
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.warm.warm import kernels
from jitgemm.weight.packed import Weight
from jitgemm.weight.rotation import rotated, rotated_moments

QUANTISERS = {
    "groups": partial(jitgemm.quantize_w4, group_size=128),
    "zero points": partial(jitgemm.quantize_w4, group_size=32, symmetric=False),
    "wide groups": partial(jitgemm.quantize_w4, group_size=256),
    "channel": partial(jitgemm.quantize_w4, group_size="channel"),
    "int8": partial(jitgemm.quantize_w8, lhs_dtype=torch.int8),
    "e4m3": partial(jitgemm.quantize_w8, lhs_dtype=torch.float8_e4m3fn),
    "blocks": partial(jitgemm.quantize_w8, lhs_dtype=torch.float8_e4m3fn, block=128),
    "mxfp4": jitgemm.quantize_mxfp4,
    "two levels": jitgemm.quantize_w4_two_level,
}
ACTIVATIONS = {
    **dict.fromkeys(("groups", "wide groups", "channel"), ("e4m3", "int8", "int8_affine", "int8_block")),
    "zero points": ("e4m3_block", "int8"),
    "int8": ("int8", "int8_affine"), "e4m3": ("e4m3",), "blocks": ("e4m3_block",), "mxfp4": ("e4m3",),
    "two levels": ("int8", "int8_affine"),
}  # fmt: skip
SHAPES = ((8, 128), (72, 384))


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=builders.generator(seed))


def inputs(k: int, rows: int = 16) -> torch.Tensor:
    """With a few columns that are many times as large as the others."""
    x = normal(rows, k, seed=2)
    x[:, 5::96] *= 60
    return x


def lost(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def made(rotation: int = 128, n: int = 64, k: int = 256, name: str = "two levels", seed: int = 1) -> Weight:
    return QUANTISERS[name](normal(n, k, seed=seed), rotation=rotation)


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("name", QUANTISERS)
def test_layers_give_the_product_that_is_not_rotated(name, n, k):
    """Off by what the weight lost, as without a rotation, and by what 8 bits lose of inputs without outliers."""
    w, x = normal(n, k), inputs(k)
    product = x.double() @ w.double().T
    for activation in ACTIVATIONS[name]:
        plain, turned = (LINEARS[each.bits](each, activation=activation) for each in made_both(name, w))
        back = rotated(turned.weight.dequantize()).double()
        assert lost(back, w) < 1.2 * lost(plain.weight.dequantize(), w.double()) + 1e-3
        of_inputs = 0.011 if activation.startswith("int8") else 0.035
        assert lost(turned(x), x.double() @ back.T) < of_inputs, activation
        if activation in ("int8", "int8_affine"):
            dense = plain.weight.dequantize().double()
            assert lost(turned(x), x.double() @ back.T) < 0.6 * lost(plain(x), x.double() @ dense.T), activation
            if plain.weight.bits == 8:
                assert lost(turned(x), product) < 0.7 * lost(plain(x), product)


def made_both(name: str, w: torch.Tensor) -> tuple[Weight, Weight]:
    plain, turned = (QUANTISERS[name](w, rotation=rotation) for rotation in (0, 128))
    assert (plain.rotation, turned.rotation) == (0, 128)
    assert plain.format.for_any_values == turned.format.for_any_values or name == "mxfp4"
    return plain, turned


@pytest.mark.parametrize("experts", [None, 2])
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("name", QUANTISERS)
def test_what_is_packed_is_the_rotated_weight(name, calibrated, experts):
    if calibrated and name == "blocks":
        pytest.skip("blocks are not calibrated")
    w, x = normal(*([] if experts is None else [experts]), 16, 256), inputs(256, 400)
    moments = {"moments": (x.T @ x).expand(*w.shape[:-2], -1, -1).contiguous()} if calibrated else {}
    turned = {"moments": rotated_moments(moments["moments"])} if calibrated else {}
    found, expected = QUANTISERS[name](w, rotation=128, **moments), QUANTISERS[name](rotated(w), **turned)
    assert (found.rotation, expected.rotation) == (128, 0) and builders.same_bits(found.blocks, expected.blocks)


def test_moments_are_those_of_rotated_inputs():
    x = inputs(384, 50)
    expected = rotated(x).double().T @ rotated(x).double()
    assert lost(rotated_moments(x.T @ x), expected) < 1e-5


@pytest.mark.parametrize("name", QUANTISERS)
@pytest.mark.parametrize(
    ("message", "w", "rotation"),
    [
        ("rotation: expected 0 or 128, got 64", normal(8, 128), 64),
        ("rotation: expected 0 or 128, got True", normal(8, 128), True),
        ("w: expected k to be a multiple of 128 with a rotation, got 192", normal(8, 192), 128),
        (r"w: expected finite values, got inf at \[2, 3\]", normal(8, 128).index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(torch.inf)), 128),
        ("w: expected values whose sums of 128 fp32 holds, which a rotation needs", torch.full((8, 128), 3e38), 128),
    ],
    ids=["64", "True", "192 columns", "inf", "huge"],
)  # fmt: skip
def test_what_cannot_be_rotated_is_named(name, message, w, rotation):
    with pytest.raises(ValueError, match=message):
        QUANTISERS[name](w, rotation=rotation)


# ---- the weight ------------------------------------------------------------------------------------------------------


def test_copies_views_and_moves_say_it():
    weight = made()
    stacked = jitgemm.W4Weight.stacked(3, lambda e: made(seed=e))
    mxfp4 = made(name="mxfp4")
    smaller = {each: mxfp4.regrouped(each) for each in (32, 128) if mxfp4.group_size >= each}
    states = weight.state_dict("a.")
    for each in (
        copy.copy(weight), copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), weight.to("meta"), stacked,
        stacked[1], *smaller.values(), jitgemm.W4Weight.from_state_dict(states, "a."), Weight.from_state_dict(states, "a."),
        weight.with_tensors(weight.blocks.clone(), weight.channel_scale, weight.row_sum, None),
    ):  # fmt: skip
        assert each.rotation == 128 and "rotated" in repr(each)
    assert smaller and "rotated" not in repr(made(0))


def test_a_state_dict_has_a_tenth_number_only_where_there_is_a_rotation():
    assert len(made(0).state_dict()["meta"]) == 9 and made().state_dict()["meta"].tolist()[9:] == [128]
    state = made().state_dict()
    assert Weight.from_state_dict(state | {"meta": state["meta"][:9]}).rotation == 0
    for number, message in ((64, "rotation: expected 0 or 128, got 64"), (-1, "rotation: expected 0 or 128, got -1")):
        with pytest.raises(ValueError, match=message):
            Weight.from_state_dict(state | {"meta": torch.cat((state["meta"][:9], torch.tensor([number])))})
    with pytest.raises(ValueError, match="expected 9 or 10 values, got 11"):
        Weight.from_state_dict(state | {"meta": torch.cat((state["meta"], torch.tensor([1])))})


def test_what_does_not_go_with_a_rotation_is_named():
    plain = jitgemm.quantize_w4(normal(64, 256), 128)
    ordered = replace(plain, permutation=torch.arange(256, dtype=torch.int32))
    for weight, message in (
        (ordered, "rotation: expected 0 for a weight with a permutation, got 128"),
        (jitgemm.quantize_w4(normal(8, 192), 64), "k: expected a multiple of 128 with a rotation, got 192"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(weight, rotation=128)
    with pytest.raises(ValueError, match=r"make\(1\): expected rotation 128, as make\(0\) has, got 0"):
        Weight.stacked(2, lambda e: made(0 if e else 128))


@pytest.mark.parametrize("name", QUANTISERS)
def test_parts_of_ranks_are_rotated_and_cut_between_blocks(name):
    weight = made(n=64, k=384, name=name)
    weight.named("up_proj")
    lhs = LHS_DTYPES[ACTIVATIONS[name][0]]
    part = part_of_weight(weight, "k", 1, 3, lhs)
    assert part.rotation == 128 and torch.equal(part.dequantize(), weight.dequantize()[:, 128:256])
    with pytest.raises(ValueError, match=r"up_proj: expected k to be a multiple of 2 \* 128, for a rotated .*, got"):
        part_of_weight(weight, "k", 0, 2, lhs)


def test_what_a_rotated_weight_was_before_packing_is_packed_again():
    weight = made()
    whole = unpacked(weight)
    assert whole.rotation == 128 and torch.equal(whole.dequantize(), rotated(weight.dequantize()))
    assert builders.same_bits(whole.pack(torch.int8).blocks, weight.blocks)


# ---- calls -----------------------------------------------------------------------------------------------------------


def grouped(call):
    def of_one_expert(lhs, weight, out):
        stacked = type(weight).stacked(1, lambda e: weight)
        if "contiguous" in call.__name__ or "reference" in call.__name__:
            rows = torch.tensor([0, len(out)], dtype=torch.int32)
            more = {"out": out} if "reference" in call.__name__ else {}
            return call(lhs, stacked, rows, **more) if more else call(lhs, stacked, out, rows)
        lhs = type(lhs)(each[None] for each in lhs)
        call(lhs, stacked, out[None], torch.tensor([len(out)], dtype=torch.int32), len(out))

    return of_one_expert


CALLS = {
    name: grouped(getattr(jitgemm, name)) if "grouped" in name else getattr(jitgemm, name)
    for name in jitgemm.__all__
    if "gemm_w" in name and "int8" not in name
} | {
    "gemm_w4a8_reference": lambda lhs, weight, out: out.copy_(jitgemm.gemm_w4a8_reference(lhs, weight, out_dtype=out.dtype)),
    "gemm_w4a8_int8_nt": lambda lhs, weight, out: jitgemm.gemm_w4a8_int8_nt(lhs, weight),
    "compiled": torch.compile(lambda *given: jitgemm.gemm_w4a8_nt(*given), backend="aot_eager", fullgraph=True),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_call_takes_rotated_activations_with_a_rotated_weight_and_no_others(call):
    """However often it is asked: what was checked before is no excuse."""
    bits, x = 8 if "w8" in call else 4, inputs(256)
    weights = {size: made(size, name="two levels" if bits == 4 else "int8") for size in (0, 128)}
    lhs = {size: jitgemm.quantize_activations(x, torch.int8, rotation=size) for size in weights}
    assert type(lhs[128]) is jitgemm.Rotated and type(lhs[0]) is tuple
    for _ in range(2):
        for size, weight in weights.items():
            out = torch.zeros(len(x), 64, dtype=torch.bfloat16 if "bf16" in call else torch.float32)
            CALLS[call](lhs[size], weight, out)
            dense = weight.dequantize()
            if "int8" not in call:  # plain int8 loses much of inputs with outliers
                expected = x.double() @ (rotated(dense) if size else dense).double().T
                assert lost(out, expected) < (0.012 if size else 0.05)
            message = "jitgemm.Rotated for a" if size else "activations that are not"
            for other in (tuple(lhs[128]), list(lhs[128]), lhs[0]) if size else (lhs[128],):
                with pytest.raises(Exception, match=f"lhs: expected {message}"):
                    CALLS[call](other, weight, out)
    torch._dynamo.reset()


def test_a_residual_s_sum_is_taken_off_and_deep_gemm_asks_as_other_calls_do():
    x, weight = inputs(256), made(name="e4m3")
    norm = torch.ones(256)
    *lhs, total = jitgemm.quantize_activations(x, torch.float8_e4m3fn, rms_norm=norm, residual=x, rotation=128)
    out = torch.empty(len(x), 64)
    jitgemm.gemm_w8a8_nt(jitgemm.Rotated(lhs), weight, out)
    normed = torch.nn.functional.rms_norm(total.double(), (256,), norm.double(), 1e-6)
    assert lost(out, normed @ rotated(weight.dequantize()).double().T) < 0.05
    codes = jitgemm.quantize_activations(x, torch.float8_e4m3fn, scheme="block", rotation=128)
    jitgemm.deep_gemm.fp8_gemm_nt(codes, weight, out)
    assert lost(out, x.double() @ rotated(weight.dequantize()).double().T) < 0.05
    with pytest.raises(ValueError, match="a: expected jitgemm.Rotated for a rotated weight, .*, got a tuple"):
        jitgemm.deep_gemm.fp8_gemm_nt(tuple(codes), weight, out)
    with pytest.raises(ValueError, match="a: expected activations that are not rotated"):
        jitgemm.deep_gemm.fp8_gemm_nt(codes, made(0, name="e4m3"), out)


# ---- layers ----------------------------------------------------------------------------------------------------------


def test_a_layer_takes_only_weights_of_its_rotation():
    layers = [W4A8Linear.from_linear(torch.nn.Linear(256, 64), rotation=each) for each in (128, None)]
    for mine, others in (layers, layers[::-1]):
        with pytest.raises(ValueError, match="weight: expected rotation .*, as before, got W4Weight"):
            mine.take(others.parts)


def model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(256, 384), torch.nn.ReLU(), torch.nn.Linear(384, 48), torch.nn.Linear(48, 16)
    )


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(
    "options", [{"scheme": "two-level"}, {"scheme": "mxfp4"}, {"bits": 8, "activation": "int8"}, {"scheme": "int4"}]
)
def test_a_models_layers_are_rotated_saved_and_loaded(tmp_path, options, calibrated):
    turned, x = model(), inputs(256, 300)
    calibration = {"calibration": [x]} if calibrated else {}
    report = quantize_(turned, rotation=128, **options, **calibration)
    assert report == ["0", "2"] and "in_features a multiple of 128, got 16 and 48" in report.skipped["3"]
    assert all(turned.get_submodule(name).weight.rotation == 128 for name in report)
    assert all(0 < error < 0.02 for error in report.errors.values())  # of the weight turned back
    if options == {"scheme": "two-level"} and not calibrated:
        expected = jitgemm.quantize_w4_two_level(model()[0].weight.detach(), rotation=128)
        assert torch.equal(turned[0].weight.dequantize(), expected.dequantize())
    save_model(turned, str(tmp_path / "model.safetensors"))
    again = model(seed=1)
    jitgemm.nn.load_(again, tmp_path)
    assert torch.equal(again(x), turned(x))


def test_layers_that_lose_too_much_are_rotated_in_8_bits():
    turned, x = model(), inputs(256, 300)
    report = quantize_(turned, rotation=128, scheme="two-level", calibration=[x], keep_8bit=0.0)
    assert set(report.kept_8bit) == {"0", "2"} and turned[0].weight.bits == 8 and turned[0].weight.rotation == 128


def test_recipes_and_their_models_refuse_what_cannot_be_rotated():
    with pytest.raises(ValueError, match="3: expected .* in_features a multiple of 128, got 16 and 48"):
        quantize_(model(), lambda name, module: True, rotation=128, scheme="int4")
    assert Recipe(rotation=128, lm_head="int8").head.rotation == 128


@pytest.mark.parametrize("kind, head_dim", [("hadamard", 128), ("hadamard", 64), ("random-hadamard", None)])
def test_a_model_that_the_library_of_transforms_wrote_is_read_by_load_and_by_hf(tmp_path, kind, head_dim):
    """SpinQuant's R4 and QuIP's u by compressed-tensors itself: transformed, quantised, compressed, saved."""
    transformers = pytest.importorskip("transformers", minversion="5")
    transform, hf = pytest.importorskip("compressed_tensors.transform"), pytest.importorskip("jitgemm.hf")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(hidden_size=128, intermediate_size=256, **sizes)
    torch.manual_seed(0)
    theirs, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(20)[None]
    parts = {"R4": ("down", "input", "weight_input"), "u": ("up", "weight_output", "output")}
    groups = {
        name: {"type": kind, "head_dim": head_dim, "apply": [
            {"targets": [f"re:.*{target}_proj$"], "location": place, "inverse": place == places[1]} for place in places]}
        for name, (target, *places) in parts.items() if name == "R4" or head_dim != 128
    }  # fmt: skip
    transform.apply_transform_config(theirs, transform.TransformConfig(config_groups=groups))
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    said = {"config_groups": {"g": scheme}, "ignore": ["lm_head"], "format": "int-quantized"}
    apply_quantization_config(theirs, QuantizationConfig(**said))
    for each in theirs.modules():
        if hasattr(each, "weight_scale"):
            each.weight_scale.data.copy_(each.weight.abs().amax(1, keepdim=True) / 127)
            each.quantization_status = QuantizationStatus.FROZEN
    with torch.no_grad():
        expected = theirs(ids).logits
        compressor = ModelCompressor.from_pretrained_model(theirs, "int-quantized")
        compressor.compress_model(theirs)
        theirs.save_pretrained(tmp_path)
        compressor.update_config(tmp_path)
        torch.manual_seed(9)
        model = transformers.LlamaForCausalLM(config).eval()
        if head_dim == 128:
            jitgemm.nn.load_(model, tmp_path)
        else:
            with pytest.warns(UserWarning, match="4 quantised layers are dequantised"):
                jitgemm.nn.load_(model, tmp_path)
        assert lost(model(ids).logits, expected.double()) < 0.03
        by_hf = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, config=hf.config(tmp_path)
        )
        assert torch.equal(by_hf(ids).logits, model(ids).logits)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert lost(plain(ids).logits, expected.double()) > 0.2  # it drops transforms


# ---- the default -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said, activation",
    [
        ({}, "int8"), ({"bits": 4, "activation": "int8", "lm_head": "int8", "ignore": ["o_proj"]}, "int8"),
        ({"rotation": 128, "act_order": False}, "int8"), ({"sums": "exact"}, "int8"), ({"symmetric": None}, "int8"),
        ({"scheme": "int4"}, "e4m3"), ({"group_size": 128}, "e4m3"), ({"symmetric": True}, "e4m3"),
        ({"activation": "e4m3"}, "e4m3"), ({"activation": "int8_affine"}, "int8_affine"), ({"sums": "f16"}, "e4m3"),
        ({"scale_dtype": "float16"}, "e4m3"), ({"clip_steps": 0}, "e4m3"), ({"bits": 8}, "e4m3"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("calibrated", [False, True])
def test_two_levels_rotated_are_what_nothing_said_means(said, activation, calibrated):
    recipe = Recipe.of(said, calibrated=calibrated)
    default = activation == "int8"
    assert (recipe.code, recipe.rotation) == (
        ("two-level", 128) if default else ("e4m3" if said.get("bits") == 8 else "int4", None)
    )
    assert recipe.inputs == activation and recipe.k_alignment == 16
    groups = recipe.for_columns(128, 320)
    assert (groups is recipe) != default and recipe.for_columns(128, 384) is recipe
    if default:
        expected = Recipe.of(said | {"scheme": "int4", "rotation": None}, calibrated=calibrated)
        assert replace(groups, scheme="int4", activation=said.get("activation")) == expected
        assert groups.inputs == ("int8" if said.keys() & {"activation", "sums"} else "e4m3")
    if "lm_head" in said:
        assert recipe.head == Recipe(bits=8, activation="int8")


@pytest.mark.parametrize("calibrated", [False, True])
def test_layers_of_other_columns_get_groups_and_the_report_names_them(calibrated):
    mixed, x = model(), inputs(256, 300)
    report = quantize_(mixed, **{"calibration": [x]} if calibrated else {})
    size = 128 if calibrated else 32
    how = f"int4 in groups of {size}, e4m3 activations, as columns are no multiple of 128"
    assert report == ["0", "2", "3"] and report.otherwise == {"3": how} and how in repr(report)
    assert [mixed[i].weight.rotation for i in (0, 2, 3)] == [128, 128, 0]
    assert [mixed[i].activation for i in (0, 2, 3)] == ["int8", "int8", "e4m3"]
    by_name = model()
    assert not quantize_(by_name, scheme="int4", **{"calibration": [x]} if calibrated else {}).otherwise
    assert mixed[3].weight.format == by_name[3].weight.format
    if calibrated:
        kept = quantize_(model(), calibration=[x], keep_8bit=0.0)
        assert kept.kept_8bit.keys() == {*kept} and not kept.otherwise


def test_a_layer_that_ranks_are_to_share_is_rotated_only_if_each_has_whole_blocks():
    floats = model()
    made = [quantised(Replaceable(floats), "2", floats[2], Recipe.of({}), ranks=ranks).weight for ranks in (1, 2, 3)]
    assert [weight.rotation for weight in made] == [128, 0, 128]


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts(rotation: int | None) -> PackedExperts:
    recipe = Recipe(bits=8, activation="int8", rotation=rotation)
    w13, w2 = normal(3, 2 * 128, 256, seed=3) / 16, normal(3, 256, 128, seed=4) / 16
    return packed_experts(recipe.apply(w13), recipe.apply(w2), activation="int8")


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs(256, 20), torch.arange(40).view(20, 2) % 3, torch.full((20, 2), 0.5)


def test_experts_rotate_what_both_gemms_read():
    layer, (x, ids, weights) = experts(128), routed()
    given = layer.w13.weight, layer.w2.weight
    expected = jitgemm.fused_experts(x, *given, ids, weights, lhs_dtype=torch.int8, rotation=128)
    for each in (layer, copy.deepcopy(layer), type(layer).from_state_dict(layer.state_dict())):
        assert torch.equal(each(x, ids, weights), expected)


def masked(x: torch.Tensor | tuple, w13: Weight, w2: Weight, *_, **options) -> None:
    """Of 18 tokens, six for each expert."""
    x = x[:18].view(3, 6, 256) if isinstance(x, torch.Tensor) else x
    out, rows = torch.zeros(3, 6, 256), torch.full((3,), 6, dtype=torch.int32)
    jitgemm.fused_experts_masked(x, w13, w2, out, rows, 6, **options)


def test_sorted_tokens_that_come_quantised_say_that_they_are_rotated():
    layer, sent = experts(128), jitgemm.quantize_activations(inputs(256, 18).view(3, 6, 256), torch.int8)
    with pytest.raises(ValueError, match="x: expected jitgemm.Rotated for a rotated weight, .*, got a tuple"):
        masked(sent, layer.w13.weight, layer.w2.weight, rotation=128)


COMPILED = torch.compile(jitgemm.fused_experts, backend="eager")


@pytest.mark.parametrize("call", [jitgemm.fused_experts, jitgemm.fused_experts_reference, COMPILED, masked])
def test_experts_of_another_rotation_than_the_call_s_are_refused(call):
    x, ids, weights = routed()
    for rotation in (0, 128, 0):  # what was checked before is no excuse
        mine, other = (experts(each or None) for each in (rotation, 128 - rotation))
        given = mine.w13.weight, mine.w2.weight
        call(x, *given, ids, weights, lhs_dtype=torch.int8, rotation=rotation)
        for name, pair in (("w13", (other.w13.weight, given[1])), ("w2", (given[0], other.w2.weight))):
            with pytest.raises(Exception, match=f"rotation: expected {128 - rotation}, as {name} has, got {rotation}"):
                call(x, *pair, ids, weights, lhs_dtype=torch.int8, rotation=rotation)
    torch._dynamo.reset()


def test_a_layer_s_experts_are_all_rotated_or_none():
    turned, plain = experts(128), experts(None)
    with pytest.raises(ValueError, match="w2: expected rotation 128, as w13 has, got 0"):
        packed_experts(turned.w13.weight, plain.w2.weight, activation="int8")


# ---- warm-up ---------------------------------------------------------------------------------------------------------


def specs(layer: torch.nn.Module) -> list:
    return [spec for spec, *_ in kernels(layer, 64, [torch.bfloat16], "h200", True) if spec.kind != "gemm"]


def test_the_warm_up_has_the_quantisers_that_rotate():
    turned, plain = model(), model()
    for each, rotation in ((turned, 128), (plain, None)):
        quantize_(each, rotation=rotation, scheme="two-level")
    assert specs(turned) and all(spec.rotated for spec in specs(turned))
    assert not any(spec.rotated for spec in specs(plain))
    layer = experts(128)
    layer.split = ExpertSharding(None, 0, 2, 3, exchanges=True, max_tokens=8, nvlink=True)
    layer.batched = True
    needed = (
        *layer_specs(256, 128, "bf16", "s8", layer.gate, masked=True, rotated=True),
        *exchange_specs(256, "bf16", "s8", rotated=True),
    )
    assert {*specs(layer)} == {*needed} and {*needed} - {*layer_specs(256, 128, "bf16", "s8", layer.gate, masked=True)}
