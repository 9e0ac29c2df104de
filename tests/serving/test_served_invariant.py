"""Layers of both engines with tp_invariant: the same bits on one rank and on two, whose outputs are added up (gloo on the CPU)."""

from __future__ import annotations

from types import SimpleNamespace

import builders
import engines
import pytest
import torch
from engines import EXPERTS, each_engine, in_turn, load, process, vllm
from served_layers import BF16, CONFIGS, SAVED, SHARDS, dense_of, routed, saved, stored
from vllm_layers import show

K, N = 512, 64
GROUP = SimpleNamespace(group_name="of two")
FLOATS = {
    "default, two levels": {},
    "int8, per channel": {"activation": "int8", "group_size": "channel"},
    "groups of 32 with zero points": {"scheme": "int4"},
    "groups of 32, two ranks at most": {"scheme": "int4", "tp_invariant": 2},
    "8 bits": {"bits": 8},
}
FILES = {name: {} for name in ("packed", "packed-corrected", "fp8", "awq", "qserve")} | {
    "packed-channel": {"activation": "int8"}
}
OF_SAVED = ("groups of 128", "static", "two levels, rotated", "corrected")


def layer_of(engine, name, at=(0, 1), **options):
    checkpoint, more = CONFIGS.get(name), FLOATS.get(name) or FILES.get(name) or {}
    if name in FLOATS:
        tensors = {"weight": torch.randn(N, K, dtype=BF16, generator=builders.generator(3)) / 16}
    elif name in SAVED:
        torch.manual_seed(4)
        checkpoint, tensors = {"quant_method": "none"}, saved(name, N, K).state_dict()
    else:
        tensors, _ = stored(checkpoint, N, K)
    layers = {"m.o_proj": tensors} if checkpoint else {}
    config = engine.told(checkpoint, layers, **{"tp_invariant": True, **more, **options})
    layer = engine.row(config, K, N, tensors, at, bias=True)
    layer.bias.data.copy_(torch.arange(N) / 8)
    process(layer)
    return layer


def inputs(rows):
    return torch.randn((rows, K), dtype=BF16, generator=builders.generator(rows))


def outputs(engine, layer, number=0, size=1, group=None):
    """Of 1, 5 and 2 tokens, summed over ranks; the last without the layer's bias."""
    found = []
    for rows in (1, 5, 2):
        layer.skip_bias_add = rows == 2
        x = inputs(rows).chunk(size, 1)[number].contiguous()
        if engine is vllm:
            out, bias = layer(x)
            assert (bias is layer.bias) == (rows == 2)
        else:  # whose forward needs SGLang's processes
            out = engine.run(layer, x, None if layer.skip_bias_add or number else layer.bias)
            if size > 1:
                torch.distributed.all_reduce(out, group=group)
        found.append(out)
    return found


def divided(mesh, engine, name):
    show()
    engine, number, group = vars(engines)[engine], mesh.get_local_rank(), mesh.get_group()
    with engine.rank(number, 2, group):
        layer = layer_of(engine, name, (number, 2))
        assert layer.jitgemm.in_features == K // 2
        found = outputs(engine, layer, number, 2, group)
        torch._dynamo.reset()  # a process compiles a function for eight layers at most
        compiled = torch.compile(lambda x: engine.run(layer, x), backend="aot_eager", fullgraph=True)
        x = inputs(7).chunk(2, 1)[number].contiguous()
        assert builders.same_bits(compiled(x), engine.run(layer, x))
    return found


@pytest.mark.parametrize("engine, name", in_turn(*FLOATS, *FILES, *OF_SAVED))
def test_a_row_parallel_layer_has_one_ranks_bits(two, engine, name):
    layer = layer_of(engine, name)
    assert layer.jitgemm.tp_invariant == "k"
    expected, plain = outputs(engine, layer), outputs(engine, layer_of(engine, name, tp_invariant=False))[1].float()
    assert (expected[1].float() - plain).norm() < 2**-7 * plain.norm()
    for found in two(divided, str(engine), name):
        assert all(map(builders.same_bits, found, expected))


def beside_others(mesh, engine):
    """Of a layer whose outputs a model adds up later, with a shared expert's or an adapter's."""
    show()
    engine, number, group = vars(engines)[engine], mesh.get_local_rank(), mesh.get_group()
    with engine.rank(number, 2, group):
        layer = layer_of(engine, "8 bits", (number, 2))
        out = engine.run(layer, inputs(5).chunk(2, 1)[number].contiguous()) + (number + 1)
    torch.distributed.all_reduce(out, group=group)
    return out


@each_engine
def test_what_is_added_before_the_ranks_sum_is_kept(two, engine):
    expected = outputs(engine, layer_of(engine, "8 bits"))[1] + 1 + 2
    found = two(beside_others, str(engine))
    assert torch.equal(*found) and (found[0].float() - expected.float()).abs().max() <= 2**-7 * expected.abs().max()


def of_experts(engine, at):
    g, config = builders.generator(9), engine.config(None, tp_invariant=True, group_size=32)
    tensors = {
        (e, proj): {"weight": torch.randn(64, 64, generator=g).to(BF16) / 8} for e in range(4) for proj in SHARDS
    }
    layer = engine.experts(config, (4, 64, 64), tensors, at)
    assert layer.jitgemm.batch_invariant and layer.jitgemm.num_experts == 4 // at[2]
    return engine.run_experts(layer, *routed(4))


def divided_experts(mesh, engine):
    show()
    engine, number, group = vars(engines)[engine], mesh.get_local_rank(), mesh.get_group()
    with engine.rank(number, 2, group):
        out = of_experts(engine, ("ep", number, 2))
    torch.distributed.all_reduce(out, group=group)
    return out


@each_engine
def test_experts_that_are_whole_on_a_rank_have_one_ranks_bits(two, engine):
    expected = of_experts(engine, ("tp", 0, 1))
    assert expected.abs().max() > 0
    assert all(builders.same_bits(found, expected) for found in two(divided_experts, str(engine)))


@each_engine
def test_other_layers_add_up_k_in_its_order(engine):
    parts = [{"weight": torch.randn(2 * N, K)} for _ in range(2)]
    layer = engine.gate_up(engine.config(None, tp_invariant=True), K, 2 * N, parts, (1, 2))
    assert process(layer).tp_invariant == "n" and layer.jitgemm.split is None
    x = inputs(3)
    assert builders.same_bits(engine.run(layer, x)[:1], engine.run(layer, x[:1]))


@each_engine
def test_weights_that_are_loaded_again_are_cut_as_the_first(engine):
    first, second = (torch.randn(N, K, dtype=BF16) for _ in range(2))
    with engine.rank(1, 2, GROUP):
        layer = engine.row(engine.config(None, tp_invariant=True), K, N, None, (1, 2))
        params = dict(layer.named_parameters())
        load(layer, {"weight": first})
        address = process(layer).blocks.data_ptr()
        engine.renewed(layer, params)
        load(layer, {"weight": second})
        assert process(layer).blocks.data_ptr() == address
    columns = second.double()[:, K // 2 :]
    assert (dense_of(layer.jitgemm) - columns).norm() < 0.12 * columns.norm()


@each_engine
def test_layers_without_such_bits_are_refused_by_name(engine):
    words = (
        "expected a linear that jitgemm serves, or experts that are whole .* as 2 ranks share it with tp_invariant, got"
    )
    for options, k, weight, message in (
        ({"ignore": ["m.o_proj"]}, K, {}, f"{words} one in floats"),
        ({}, 48, {}, f"{words} expected rows in multiples of 8 and columns of 16"),
        ({"activation": "int8_affine"}, K, {"weight": torch.randn(N, K)}, "expected activations without zero points for tp_inv"),
    ):  # fmt: skip
        with engine.rank(0, 2, GROUP), pytest.raises(ValueError, match=f"m.o_proj: {message}"):
            engine.row(engine.config(None, tp_invariant=True, **options), k, N, weight, (0, 2))
    config = engine.config(None, tp_invariant=True)
    for at, more in ((("tp", 0, 2), {}), (("ep", 0, 2), engine.low_latency)):
        with pytest.raises(ValueError, match=f"{EXPERTS}: {words} experts"):
            engine.experts(config, (4, 64, 64), None, at, packed=False, **more)
    engine.experts(config, (4, 64, 64), packed=False)
