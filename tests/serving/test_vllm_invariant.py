"""vLLM's layers with tp_invariant: the same bits on one rank and on two, whose outputs vLLM adds up (gloo on the CPU)."""

from __future__ import annotations

from types import SimpleNamespace

import builders
import pytest
import ranks
import torch
from engines import load, load_experts, process, vllm
from served_layers import BF16, CONFIGS, SAVED, SHARDS, dense_of, routed, stored
from vllm_cases import gate_up, made, row, told
from vllm_layers import experts, rank, show

import jitgemm.vllm.config as configs

K, N = 512, 64
GROUP = SimpleNamespace(group_name="of two")
FLOATS = {
    "default, two levels": {},
    "int8, per channel": {"activation": "int8", "group_size": "channel"},
    "groups of 32 with zero points": {"scheme": "int4"},
    "groups of 32, two ranks at most": {"scheme": "int4", "tp_invariant": 2},
    "8 bits": {"bits": 8},
}
FILES = ("packed", "packed-channel", "packed-corrected", "fp8", "awq", "qserve")
OF_SAVED = ("groups of 128", "static", "two levels, rotated", "corrected")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with ranks.two_ranks(tmp_path_factory.mktemp("ranks")) as run:
        yield run


def weights_of(name: str):
    """(a config's checkpoint and options, tensors)."""
    if name in FLOATS:
        return (None, FLOATS[name]), {"weight": torch.randn(N, K, dtype=BF16, generator=builders.generator(3)) / 16}
    if name in SAVED:
        torch.manual_seed(4)
        state = SAVED[name](N, K).state_dict()
        return ({"quant_method": "none"}, {}), state
    tensors, _ = stored(CONFIGS[name], N, K)
    return (CONFIGS[name], {"activation": "int8"} if name == "packed-channel" else {}), tensors


def layer_of(name: str, **options):
    (checkpoint, more), tensors = weights_of(name)
    config = made(checkpoint, {"tp_invariant": True, **more, **options})
    layer = row(told(config, {"m.o_proj": tensors} if checkpoint else {}), K, N, bias=True)
    load(layer, tensors)
    layer.bias.data.copy_(torch.arange(N) / 8)
    process(layer)
    return layer


def inputs(rows: int) -> torch.Tensor:
    return torch.randn((rows, K), dtype=BF16, generator=builders.generator(rows))


def divided(mesh, name: str) -> list[torch.Tensor]:
    show()
    number, found = mesh.get_local_rank(), []
    with rank(number, 2, mesh.get_group()):
        layer = layer_of(name)
        assert layer.jitgemm.in_features == K // 2
        for rows in (1, 5):
            x = inputs(rows).chunk(2, 1)[number].contiguous()
            found.append(layer(x)[0])
        layer.skip_bias_add = True
        out, bias = layer(inputs(2).chunk(2, 1)[number].contiguous())
        assert bias is layer.bias
        torch._dynamo.reset()  # a process compiles a function for eight layers at most
        compiled = torch.compile(lambda x: layer.quant_method.apply(layer, x), backend="aot_eager", fullgraph=True)
        x = inputs(7).chunk(2, 1)[number].contiguous()
        assert builders.same_bits(compiled(x), layer.quant_method.apply(layer, x))
        return [*found, out]


@pytest.mark.parametrize("name", [*FLOATS, *FILES, *OF_SAVED])
def test_a_row_parallel_layer_has_one_ranks_bits(two, name):
    with rank():
        layer = layer_of(name)
        expected = [layer(inputs(rows))[0] for rows in (1, 5)]
        layer.skip_bias_add = True
        expected.append(layer(inputs(2))[0])
        plain = layer_of(name, tp_invariant=False)(inputs(5))[0].float()
    assert (expected[1].float() - plain).norm() < 2**-7 * plain.norm()
    for found in two(divided, name):
        assert all(map(builders.same_bits, found, expected))


def beside_others(mesh, name: str) -> torch.Tensor:
    """Of a layer whose outputs a model adds up later, with a shared expert's or an adapter's."""
    show()
    number = mesh.get_local_rank()
    with rank(number, 2):
        with rank(number, 2, mesh.get_group()):
            layer = layer_of(name)
        x = inputs(5).chunk(2, 1)[number].contiguous()
        out = layer.quant_method.apply(layer, x) + (number + 1)
        torch.distributed.all_reduce(out, group=mesh.get_group())
        return out


def loaded_experts(**options):
    layer = experts(made(None, {"tp_invariant": True, "group_size": 32}), "m.experts", (4, 64, 64), 2, **options)
    g = builders.generator(9)
    tensors = {
        (e, proj): {"weight": torch.randn(64, 64, generator=g).to(BF16) / 8} for e in range(4) for proj in SHARDS
    }
    load_experts(layer, "m.experts", tensors)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def divided_experts(mesh) -> torch.Tensor:
    show()
    number = mesh.get_local_rank()
    with rank(number, 2, mesh.get_group()):
        layer = loaded_experts(ep=(number, 2))
        assert layer.jitgemm.num_experts == 2 and layer.jitgemm.batch_invariant
        out = vllm.run_experts(layer, *routed(4))
        torch.distributed.all_reduce(out, group=mesh.get_group())
        return out


def test_experts_that_are_whole_on_a_rank_have_one_ranks_bits(two):
    with rank():
        expected = vllm.run_experts(loaded_experts(), *routed(4))
    assert expected.abs().max() > 0
    assert all(builders.same_bits(found, expected) for found in two(divided_experts))


def test_what_is_added_before_the_ranks_sum_is_kept(two):
    with rank():
        expected = layer_of("8 bits")(inputs(5))[0] + 1 + 2
    found = two(beside_others, "8 bits")
    assert torch.equal(*found) and (found[0].float() - expected.float()).abs().max() <= 2**-7 * expected.abs().max()


def test_other_layers_add_up_k_in_its_order():
    with rank(1, 2):
        layer = gate_up(made(None, {"tp_invariant": True}), K, 2 * N)
        for part in range(2):
            load(layer, weights_of("8 bits")[1] | {"weight": torch.randn(2 * N, K)}, part)
        assert process(layer).tp_invariant == "n" and layer.jitgemm.split is None
    x = inputs(3)
    assert builders.same_bits(layer.quant_method.apply(layer, x)[:1], layer.quant_method.apply(layer, x[:1]))


def test_weights_that_are_loaded_again_are_cut_as_the_first():
    with rank(1, 2), pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: SimpleNamespace(device_group=GROUP))
        layer = row(made(None, {"tp_invariant": True}), K, N)
        params = dict(layer.named_parameters())
        first, second = (torch.randn(N, K, dtype=BF16) for _ in range(2))
        load(layer, {"weight": first})
        address = process(layer).blocks.data_ptr()
        for each in (*layer._parameters, *layer._buffers):  # as vLLM does
            delattr(layer, each)
        for each, param in params.items():
            layer.register_parameter(each, param)
        load(layer, {"weight": second})
        assert process(layer).blocks.data_ptr() == address
    columns = second.double()[:, K // 2 :]
    assert (dense_of(layer.jitgemm) - columns).norm() < 0.12 * columns.norm()


REFUSED = {
    "unknown": ({"tp_invarient": True}, "expected the options .*, exchange, tp_invariant, got tp_invarient"),
    "options": ({"tp_invariant": 1}, "jitgemm: tp_invariant: expected a bool, or 2, 4 or 8, the most ranks, got 1"),
    "exchanges": ({"tp_invariant": True, "exchange": "ib"}, r"jitgemm: exchange: expected one of \('coll.*, got 'ib'"),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED)
def test_an_option_that_is_wrong_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        made(None, options)


def test_layers_without_such_bits_are_refused_by_name():
    def config(**options):
        return made(None, {"tp_invariant": True, **options})

    with rank(0, 2):
        words = "m.o_proj: expected a linear that jitgemm serves, .* as 2 ranks share it with tp_invariant, got"
        with pytest.raises(ValueError, match=f"{words} one in floats"):
            row(config(ignore=["m.o_proj"]), K, N)
        with pytest.raises(ValueError, match=f"{words} expected rows in multiples of 8 and columns of 16"):
            row(config(), 48, N)
        layer = row(config(activation="int8_affine"), K, N)
        with pytest.raises(ValueError, match="m.o_proj: expected activations without zero points for tp_invariant"):
            load(layer, {"weight": torch.randn(N, K)})
        for place in ({"tp": (0, 2)}, {"ep": (0, 2), "all2all": "deepep_low_latency"}):
            with pytest.raises(
                ValueError, match="m.experts: .* experts that are whole .* as 2 ranks share it .* got exp"
            ):
                experts(config(), "m.experts", (4, 64, 64), 2, **place)
    with rank():
        experts(config(), "m.experts", (4, 64, 64), 2)


def test_kernels_of_vllms_with_other_bits_are_named(monkeypatch):
    said = []
    config = SimpleNamespace(compilation_config=SimpleNamespace(pass_config=SimpleNamespace(fuse_allreduce_rms=True)))
    monkeypatch.setattr(configs.logger, "warning_once", said.append)
    with rank():
        monkeypatch.setattr(configs, "get_current_vllm_config_or_none", lambda: config)
        made(None, {"tp_invariant": True}).warn_of_others()
        monkeypatch.setattr(configs, "get_current_vllm_config_or_none", lambda: None)
        row(made(None, {"tp_invariant": True}), K, N)
        monkeypatch.setattr(configs.JitGemmConfig, "batch_invariant", True)
        row(made(None, {"tp_invariant": True}), K, N)
    assert [text.rpartition("; set ")[2] for text in said] == [
        "pass_config.fuse_allreduce_rms to false in --compilation-config", "VLLM_BATCH_INVARIANT=1",
        "VLLM_BATCH_INVARIANT=1",
    ]  # fmt: skip
