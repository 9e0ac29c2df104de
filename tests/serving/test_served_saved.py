"""Models that jitgemm saved, in both engines: linears, output layers and experts hold a rank's part of what the files have."""

from __future__ import annotations

import pytest
import torch
from builders import third, two_thirds
from engines import ENGINES, EXPERTS, SPLITS, TWO, each_engine, in_turn, load, process
from served_layers import BF16, CONFIGS, SAVED, WEIGHTS, assert_held, columns_of, dense_of, packed_module, routed, saved

import jitgemm
from jitgemm.activations.scheme import SILU_MUL, Gate
from jitgemm.nn import W4A8Linear
from jitgemm.nn.layers.experts import packed_experts
from jitgemm.nn.layers.gate import encoded

pytestmark = pytest.mark.filterwarnings("ignore:tp_size")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- linears ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine, kind, place", two_thirds(ENGINES, SAVED, [(0, 2), (1, 2), (3, 4)]))
def test_a_saved_models_joined_layers_hold_the_ranks_rows_of_each(tmp_path, engine, kind, place):
    """Heads of 40 rows, which begin inside of the strips that a packed weight is in; k and v are two ranks' each."""
    layers = {f"m.{each}_proj": saved(kind, rows, 128) for each, rows in (("q", 160), ("k", 80), ("v", 80))}
    parts = {each: layer.state_dict() for each, layer in zip("qkv", layers.values())}
    layer = engine.qkv(engine.of_folder(tmp_path, layers), 128, parts, place, (40, 4, 2))
    number, size = place
    first, kv = number * 2 // size, max(1, 2 // size)
    q, *others = (dense_of(part) for part in layers.values())
    rows = [q.chunk(size)[number], *(each[first * 40 : (first + kv) * 40] for each in others)]
    module, own = process(layer), layers["m.q_proj"]
    assert torch.equal(dense_of(module), torch.cat(rows)) and not list(layer.parameters())
    assert (module.activation, module.weight.rotation) == (own.activation, own.weight.rotation)
    assert (module.input_scale is None) == (kind != "static")


@pytest.mark.parametrize("engine, kind, size", third(ENGINES, SAVED, [1, 2, 4]))
def test_a_saved_models_row_parallel_layers_hold_the_ranks_columns(tmp_path, engine, kind, size):
    """Of 384 / 4 = 96 columns within groups of 128 and blocks, too; whole blocks of what is rotated."""
    k = columns_of(kind)
    whole = saved(kind, 64, k)
    config, parts = engine.of_folder(tmp_path, {"m.o_proj": whole, "m.gate": {"weight": torch.zeros(64, k)}}), []
    for number in range(size):
        layer = engine.row(config, k, 64, whole.state_dict(), (number, size))
        parts.append(dense_of(process(layer)))
        assert layer.jitgemm.weight.rotation == whole.weight.rotation and layer.jitgemm.activation == whole.activation
    assert not engine.serves(config, "m.gate")
    assert torch.equal(torch.cat(parts, 1), dense_of(whole))
    if size == 1:
        x = torch.randn(3, k, dtype=BF16)
        assert torch.equal(engine.run(layer, x), whole(x))


@each_engine
def test_a_saved_models_activation_order_is_kept_with_the_files_joined_rows(tmp_path, engine):
    """As Phi-3's, whose file has both in one layer."""
    q, order = torch.randint(-8, 8, (192, 128), dtype=torch.int8), torch.randperm(128).to(torch.int32)
    whole = W4A8Linear(jitgemm.pack_w4(q, torch.rand(192, 2) + 0.5, group_size=64, permutation=order))
    config = engine.of_folder(tmp_path, {"m.gate_up_proj": whole})
    for place in TWO:
        weight = process(layer := engine.gate_up(config, 128, 96, {None: whole.state_dict()}, place)).weight
        rows = torch.cat([half.chunk(2)[place[0]] for half in dense_of(whole).chunk(2)])
        assert torch.equal(dense_of(layer.jitgemm), rows) and torch.equal(weight.permutation, order)


EVERY = "blocks meta channel_scale activation_type"


@pytest.mark.parametrize("engine, suffix", in_turn(*EVERY.split(), EVERY))
def test_a_saved_layer_that_lacks_a_tensor_is_an_error(tmp_path, engine, suffix):
    layers = {f"m.{each}_proj": saved("per channel", 64, 128) for each in ("gate", "up")}
    gate, up = (layer.state_dict() for layer in layers.values())
    up = {name: each for name, each in up.items() if name not in suffix}
    with pytest.raises(ValueError, match=rf"({suffix.replace(' ', '|')}).*: expected numbers, .*m.up_proj"):
        process(engine.gate_up(engine.of_folder(tmp_path, layers), 128, 64, [gate, up]))


@each_engine
def test_what_is_not_read_of_a_saved_model_is_named(tmp_path, engine):
    layers = {"m.gate_proj": saved("4 bits", 64, 128), "m.up_proj": saved("zero points", 64, 128)}
    layers |= {f"{EXPERTS}.0.gate_proj": layers["m.gate_proj"], "m.k_proj": {"weight": torch.zeros(64, 128)}}
    config = engine.of_folder(tmp_path, layers)
    config.packed_modules_mapping["both"] = ["gate_proj", "k_proj"]
    rotated = saved("two levels, rotated", 64, 384)
    with pytest.raises(ValueError, match="multiple of 128, which are rotated together, got columns 192"):
        engine.row(engine.of_folder(tmp_path, {"m.o_proj": rotated}), 384, 64, rotated.state_dict(), (1, 2))
    with pytest.raises(ValueError, match="m.experts: expected packed experts as one module .*, got some .* one by o"):
        engine.experts(config, (2, 64, 64), packed=False)
    with pytest.raises(ValueError, match="m.gate_proj: expected its weight in floats, .* got .*blocks"):
        config.get_quant_method(torch.nn.Embedding(64, 128), "m.gate_proj")
    with pytest.raises(ValueError, match="m.both: expected all or none .*'m.k_proj': False"):
        engine.serves(config, "m.both")
    with pytest.raises(ValueError, match="expected rows in multiples of 8 and columns of 16"):
        engine.row(config, 40, 64, prefix="m.gate_proj")
    with pytest.raises(ValueError, match="activation: expected int8_affine, as m.up_proj was saved, got e4m3"):
        engine.gate_up(config, 128, 64, [layers[f"m.{each}_proj"].state_dict() for each in ("gate", "up")])


# ---- the output layer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine, kind", [(engine, kind) for engine in ENGINES for kind in ("floats", "4 bits", "8 bits")] + in_turn(*SAVED)
)
def test_an_output_layer_holds_the_ranks_rows_and_zeros_as_the_option_or_the_file_says(tmp_path, engine, kind):
    if kind == "floats":
        config, weight = engine.config(CONFIGS["packed"], lm_head="int8"), torch.randn(200, 128).to(BF16)
        tensors, expected, activation = {"weight": weight}, weight.double(), "int8"
    else:
        whole = saved(kind, 200, 128)
        config, tensors = engine.of_folder(tmp_path, {"lm_head": whole}), whole.state_dict()
        expected, activation = dense_of(whole), whole.activation
    parts = []
    for place in TWO:
        head = engine.head(config, 200, 128, place)
        with engine.rank(*place):
            load(head, tensors)
        found, real = dense_of(process(head)), engine.rows_of_head(200, place)
        assert found.shape[0] == 128 and not found[real:].any()
        parts.append(found[:real])
    found = torch.cat(parts)
    assert (found - expected).norm() <= (0.01 if kind == "floats" else 0) * expected.norm()
    assert head.jitgemm.activation == activation


@each_engine
def test_a_saved_output_layer_in_another_activation_is_an_error(tmp_path, engine):
    whole = saved("8 bits", 64, 128)
    config = engine.of_folder(tmp_path, {"lm_head": whole}, activation="e4m3", lm_head="e4m3")
    head, message = (
        engine.head(config, 64, 128),
        "^lm_head: expected int8, as lm_head was saved, got e4m3, as the options s",
    )
    with engine.rank(), pytest.raises(ValueError, match=message):
        load(head, whole.state_dict())


# ---- experts ---------------------------------------------------------------------------------------------------------

SIZES = 4, 128, 384
RANKS = {"tp": 2, "ep": 2, "tp of 4": 4}
OAI = Gate("swiglu_oai", "interleaved", 7.0, 1.702)
WAYS = in_turn(SILU_MUL, SILU_MUL, OAI, OAI)


@pytest.mark.parametrize("way, kind, ranks", third(WAYS, WEIGHTS, RANKS))
def test_a_saved_models_experts_hold_the_ranks_part(tmp_path, way, kind, ranks):
    """Of 384 / 4 = 96 rows and columns, within strips and groups of 128, too."""
    (engine, gate), split, size = way, ranks[:2], RANKS[ranks]
    more = {} if gate is SILU_MUL else {k: v for k, v in engine.gpt_oss.items() if k not in engine.biased}
    whole, sizes = packed_module(kind, gate=gate), (4, 128, columns_of(kind))
    config = engine.of_folder(tmp_path, {EXPERTS: whole})
    layers = [
        engine.experts(config, sizes, None, (split, number, size), **more, **engine.biased) for number in range(size)
    ]
    found = [layer.jitgemm for layer in layers]
    for layer, module in zip(layers, found):
        assert (module.gate, module.activation) == (gate, whole.activation) and not list(layer.parameters())
        assert module.w13.weight.rotation == module.w2.weight.rotation == whole.w2.weight.rotation
    x, (_, ids, weights) = torch.randn(6, 128).to(BF16), routed(4)
    total = sum(engine.run_experts(layer, x, ids, weights).double() for layer in layers)
    expected = whole(x, ids, weights).double()
    assert (total - expected).norm() < 0.03 * expected.norm()

    def rows(of_ranks):
        if split == "ep" or gate.order == "interleaved":
            return torch.cat(of_ranks, 0 if split == "ep" else 1)
        return torch.cat([each.chunk(2, 1)[half] for half in (0, 1) for each in of_ranks], 1)

    assert torch.equal(rows([dense_of(m.w13) for m in found]), dense_of(whole.w13))
    assert torch.equal(torch.cat([dense_of(m.w2) for m in found], 0 if split == "ep" else 2), dense_of(whole.w2))
    assert torch.equal(rows([m.w13.bias for m in found]), whole.w13.bias)
    of_w2 = [m.w2.bias for m in found]
    if split == "ep":
        assert torch.equal(torch.cat(of_w2), whole.w2.bias)
    else:
        assert torch.equal(of_w2[0], whole.w2.bias) and of_w2[1:] == [None] * (size - 1)  # ranks' results are summed


@pytest.mark.parametrize("engine, split", [(engine, split) for engine in ENGINES for split in SPLITS])
def test_saved_experts_without_gates_hold_the_ranks_part(tmp_path, engine, split):
    w13, w2 = (jitgemm.quantize_w4(torch.randn(4, *size, dtype=BF16), 64) for size in ((384, 128), (128, 384)))
    config = engine.of_folder(tmp_path, {EXPERTS: packed_experts(w13, w2, gate=Gate("relu2"))})
    found = [engine.experts(config, SIZES, None, at, **engine.gates["relu2"]).jitgemm for at in SPLITS[split]]
    dense = {(e, part): each[e].dequantize().double() for part, each in (("w13", w13), ("w2", w2)) for e in range(4)}
    assert_held(found, dense, split)


CHANGES = [
    ({"w2.activation_type": None}, SIZES, {}, "m.experts.w2.activation_type"),
    ({"w13.bias": torch.zeros(4, 8)}, SIZES, {}, "bias"),
    ({"gate": encoded(Gate("gelu", "gate_up"))}, SIZES, {}, "m.experts.gate: expected .*silu.*, got .*gelu"),
    ({}, (8, 128, 384), {}, "m.experts.w13.blocks: expected 8 experts, as the model has, got 4"),
    ({}, (4, 128, 256), {}, r"m.experts.w13.blocks: expected n, k = \(512, 128\), got \(768, 128\)"),
    ({}, SIZES, {"activation": "int8"}, "activation: expected e4m3, as m.experts.w13 was saved, got int8, as the o"),
]
"""What is changed in the files, the model's sizes, options, and what the message says."""


@pytest.mark.parametrize("engine, case", in_turn(*CHANGES))
def test_saved_experts_that_are_not_whole_or_in_another_activation_or_not_the_models_are_named(tmp_path, engine, case):
    change, sizes, options, message = case
    tensors = {name: each for name, each in (packed_module().state_dict() | change).items() if each is not None}
    with pytest.raises(ValueError, match=message):
        engine.experts(engine.of_folder(tmp_path, {EXPERTS: tensors}, **options), sizes, **engine.biased)


@pytest.mark.parametrize("engine, case", in_turn(("4 bits", "f16"), ("per channel", "f32")))
def test_experts_are_added_up_as_the_option_says(tmp_path, engine, case):
    kind, sums = case
    config = engine.of_folder(tmp_path, {EXPERTS: packed_module(kind)}, sums="f16")
    module = engine.experts(config, SIZES, **engine.biased).jitgemm
    assert (module.w13.call_sums, module.w2.call_sums) == (sums, sums)
