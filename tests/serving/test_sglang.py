"""SGLang's plug-in: on SGLang's own Python where it can be imported (scripts/sglang_contract.sh), else on stand-ins."""

from __future__ import annotations

import json
import tomllib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import builders
import gpt_oss_experts
import pytest
import ranks
import torch
from safetensors.torch import save_file
from sglang_cases import GPT_OSS, made, row
from sglang_layers import BF16, REAL, dispatched, experts, running
from vllm_cases import (
    CONFIGS,
    OF_MXFP8,
    SAVED,
    ParallelLMHead,
    columns_of,
    dense_of,
    load,
    packed_module,
    process,
    stored,
)

import jitgemm.sglang
from jitgemm.activations.scheme import Gate

jitgemm.sglang.register()

from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
)
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

from jitgemm.sglang.config import JitGemmConfig, logger
from jitgemm.sglang.experts import JitGemmMoEMethod, cut, gate_of
from jitgemm.sglang.linear import JitGemmLinearMethod

FORMATS = (
    "packed", "packed-static", "packed-corrected", "gptq", "gptq-int8", "awq", "fp8", "fp8-blocks", "mxfp4", "mxfp4-mxfp8",
    "mxfp8", "mxfp8-blocks", "modelopt-mxfp8", "nvfp4", "modelopt-nvfp4", "qserve", "torchao", "torchao-tiles", "torchao-fp8",
    "bitblas", "executorch",
)  # fmt: skip
SIZES = 4, 64, 128
"""Experts, hidden, inter."""


def gate_up(config, k, n, prefix="m.gate_up_proj"):
    return MergedColumnParallelLinear(k, [n, n], bias=False, params_dtype=BF16, quant_config=config, prefix=prefix)


def test_the_plug_in_is_found_registered_once_and_asked_first():
    from sglang.srt.server_args import QUANTIZATION_CHOICES

    jitgemm.sglang.register()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"jitgemm": "jitgemm.sglang:register"}
    assert QUANTIZATION_METHODS["jitgemm"] is JitGemmConfig and next(iter(QUANTIZATION_METHODS)) == "jitgemm"
    assert QUANTIZATION_CHOICES.count("jitgemm") == 1
    take = JitGemmConfig.override_quantization_method
    assert [take({}, user) for user in ("jitgemm", "fp8", None)] == ["jitgemm", None, None]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_has_its_rows_of_joined_layers(name, number):
    tensors, dense = zip(*(stored(CONFIGS[name], 256, 128, seed) for seed in (1, 2)))
    with running(number, 2):
        layer = gate_up(made(CONFIGS[name]), 128, 256)
        assert type(layer.quant_method) is JitGemmLinearMethod
        for part in range(2):
            load(layer, tensors[part], part)
    mine = torch.cat([each.chunk(2)[number] for each in dense])
    assert torch.equal(dense_of(process(layer)), mine) and not dict(layer.named_parameters())


@pytest.mark.parametrize("name", ["mxfp4-mxfp8", *OF_MXFP8])
def test_inputs_in_mxfp8_have_a_scale_for_128_k_and_the_log_says_so_once(name, monkeypatch, caplog):
    monkeypatch.setattr(logger, "_said", set())
    tensors, _ = stored(CONFIGS[name], 64, 128)
    for wanted in (None, "e4m3"):
        for prefix in ("m.o_proj", "n.o_proj"):
            with running():
                layer = row(made(CONFIGS[name], activation=wanted), 128, 64, prefix)
                load(layer, tensors)
            assert process(layer).activation == (wanted or "e4m3_block")
    (said,) = [record.getMessage() for record in caplog.records if "MXFP8" in record.getMessage()]
    assert "each token and 128 k, e4m3_block; activation='e4m3_block' says so without" in said
    layer, w13, w2 = loaded_experts(name)
    assert layer.jitgemm.activation == "e4m3_block"
    x, ids, weights = tokens()
    found, expected = layer.quant_method.apply(layer, standard(x, ids, weights)), by_hand(x, ids, weights, w13, w2)
    assert (found.hidden_states.double() - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_of_a_row_parallel_layer_add_up(name):
    tensors, dense = stored(CONFIGS[name], 64, 256)
    x, total = torch.randn(5, 256, dtype=BF16) / 4, torch.zeros(5, 64, dtype=torch.float64)
    for number in range(2):
        with running(number, 2):
            layer = row(made(CONFIGS[name]), 256, 64)
            load(layer, tensors)
        columns = slice(128 * number, 128 * (number + 1))
        assert torch.equal(dense_of(process(layer)), dense[:, columns])
        total += layer.quant_method.apply(layer, x[:, columns].contiguous()).double()
    expected = x.double() @ dense.T
    assert (total - expected).norm() < 0.06 * expected.norm()


def summed_by_ranks(mesh, name):
    tensors, _ = stored(CONFIGS[name], 64, 256)
    number, group = mesh.get_local_rank(), mesh.get_group()
    with running(number, 2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(JitGemmConfig, "group_of", lambda self, layer: group)  # which needs SGLang's processes
        layer = row(made(CONFIGS[name], tp_invariant=True), 256, 64)
        load(layer, tensors)
        process(layer)
    out = layer.quant_method.apply(layer, x_of(5).chunk(2, 1)[number].contiguous())
    torch.distributed.all_reduce(out, group=group)
    return out


def x_of(rows):
    return torch.arange(rows * 256).view(rows, 256).sin().to(BF16)


def test_ranks_of_a_row_parallel_layer_have_one_ranks_bits_with_tp_invariant(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "LIMIT_S", 400 if REAL else ranks.LIMIT_S)  # SGLang takes long to import
    with ranks.two_ranks(tmp_path) as run:
        for name in ("packed", "qserve"):
            tensors, _ = stored(CONFIGS[name], 64, 256)
            with running():
                layer = row(made(CONFIGS[name], tp_invariant=True), 256, 64)
                load(layer, tensors)
            assert process(layer).tp_invariant == "k"
            expected = layer.quant_method.apply(layer, x_of(5))
            assert all(builders.same_bits(found, expected) for found in run(summed_by_ranks, name))


def experts_of_ranks(mesh):
    number, group = mesh.get_local_rank(), mesh.get_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JitGemmConfig, "group_of", lambda self, layer: group)  # which needs SGLang's processes
        layer, *_ = loaded_experts("packed", number, 2, True, {"tp_invariant": True})
    x, ids, weights = tokens()
    mine = ids - number * 2
    mine = torch.where((mine >= 0) & (mine < 2), mine, -1)  # as the standard dispatcher has them
    out = layer.quant_method.apply(layer, standard(x, mine, weights)).hidden_states
    torch.distributed.all_reduce(out, group=group)
    return out


def test_ranks_with_whole_experts_have_one_ranks_bits_with_tp_invariant(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "LIMIT_S", 400 if REAL else ranks.LIMIT_S)
    layer, *_ = loaded_experts("packed", options={"tp_invariant": True})
    expected = layer.quant_method.apply(layer, standard(*tokens())).hidden_states
    with ranks.two_ranks(tmp_path) as run:
        assert all(builders.same_bits(found, expected) for found in run(experts_of_ranks))


def test_layers_without_such_bits_are_refused_by_name_with_tp_invariant():
    words = "expected a linear that jitgemm serves, .* as 2 ranks share it with tp_invariant, got"
    with running(0, 2):
        with pytest.raises(ValueError, match=f"m.o_proj: {words} expected rows in multiples of 8"):
            row(made(None, tp_invariant=True), 48, 64)
        with pytest.raises(ValueError, match=f"m.o_proj: {words} one in floats"):
            row(made(None, tp_invariant=True, ignore=["m.o_proj"]), 256, 64)
        with pytest.raises(ValueError, match=f"m.experts: {words} experts"):
            experts(made(None, tp_invariant=True), SIZES, 2)
    with running(0, 2, ep=True, deepep=True), pytest.raises(ValueError, match=f"m.experts: {words} experts"):
        experts(made(None, tp_invariant=True), SIZES, 2)
    with running(0, 2):
        gate = gate_up(made(None, tp_invariant=True), 256, 64)
        for part in range(2):
            load(gate, {"weight": torch.randn(64, 256)}, part)
        assert process(gate).tp_invariant == "n"


def test_q_k_and_v_are_joined_and_a_bias_is_added_once():
    parts = {each: stored(CONFIGS["packed"], n, 128, n) for each, n in zip("qkv", (128, 64, 64))}
    with running():
        layer = QKVParallelLinear(128, 64, 2, 1, bias=False, params_dtype=BF16, quant_config=made(CONFIGS["packed"]),
                                  prefix="m.qkv_proj")  # fmt: skip
        for each, (tensors, _) in parts.items():
            load(layer, tensors, each)
        half = gate_up(made(CONFIGS["packed"]), 128, 64)
        load(half, parts["k"][0], 0)
    with pytest.raises(ValueError, match="weight_scale.*: expected numbers, found none in the files .layer m.up_proj"):
        process(half)
    dense = torch.cat([dense for _, dense in parts.values()])
    assert torch.equal(dense_of(process(layer)), dense)
    x, bias = torch.randn(3, 128, dtype=BF16), torch.randn(256, dtype=BF16)
    expected = x.double() @ dense.T + bias.double()
    assert (layer.quant_method.apply(layer, x, bias).double() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("checkpoint", [None, "packed"])
def test_a_layer_that_no_rank_can_pack_is_sglang_s_own_or_an_error(checkpoint):
    """Nine columns of a rank; SGLang has no config of a checkpoint with a made-up method."""
    with running(0, 2):
        if checkpoint is None:
            layer = row(made(None), 72, 64)
            assert type(layer.quant_method) is UnquantizedLinearMethod
        else:
            config = made({**CONFIGS["gptq"], "quant_method": "gptq"})
            config._checkpoints_own = lambda: None
            with pytest.raises(ValueError, match="m.o_proj: expected rows in multiples of 8 and columns"):
                row(config, 72, 64)


def test_layers_that_the_user_leaves_out_and_mla_s_absorbed_one_stay_in_floats():
    with running():
        config = made(None, ignore=["mlp.gate"])
        kinds = {}
        for prefix in ("m.mlp.gate", "m.kv_b_proj", "m.o_proj"):
            layer = ReplicatedLinear(64, 64, bias=False, params_dtype=BF16, quant_config=config, prefix=prefix)
            kinds[prefix] = type(layer.quant_method)
        assert config.is_linear_unquantized("m.mlp.gate") and not config.is_linear_unquantized("m.o_proj")
    assert [*kinds.values()] == [UnquantizedLinearMethod] * 2 + [JitGemmLinearMethod]


def test_a_layer_in_floats_is_packed_with_its_last_tensor_and_loaded_again_in_place():
    first, second = (torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(seed)).to(BF16) for seed in (0, 1))
    with running():
        layer = gate_up(made(None, scheme="int4"), 128, 64)
    param = layer.weight
    assert param.nbytes < 64  # files' tensors stay in the host's memory until the last one is there
    param.weight_loader(param, first[0], 0)
    assert "jitgemm" not in layer._modules
    param.weight_loader(param, first[1], 1)
    module = layer.jitgemm
    assert process(layer) is module and "weight" not in layer._parameters
    assert not any(matrix.kept for matrix in layer.quant_method.matrices)
    before = dense_of(module).clone()
    with running():
        layer.quant_method.restore_weights_before_loading(layer)
    assert process(layer) is module and torch.equal(dense_of(module), before)  # nothing was written
    with running():
        layer.quant_method.restore_weights_before_loading(layer)
    where = {name: buffer.data_ptr() for name, buffer in module.named_buffers()}
    for part in range(2):
        load(layer, {"weight": second[part]}, part)
    assert process(layer) is module and {n: b.data_ptr() for n, b in module.named_buffers()} == where
    assert not torch.equal(dense_of(module), before)
    assert (dense_of(module) - second.flatten(0, 1).double()).norm() < 0.15 * second.double().norm()


# ---- experts ---------------------------------------------------------------------------------------------------------


def loaded_experts(name, number=0, size=1, ep=False, options=None, **more):
    """A rank's experts of a format (None: floats), and what the whole ones stand for: [E, 2 inter, hidden], [E, hidden, inter]."""
    count, hidden, inter = SIZES
    options = {} if options is None else options
    with running(number, size, ep, more.pop("deepep", False)):
        layer = experts(made(name and CONFIGS[name], **options), SIZES, 2, **more)
        params, dense = dict(layer.named_parameters()), {}
        for e in range(count):
            for shard, (n, k) in {"w1": (inter, hidden), "w3": (inter, hidden), "w2": (hidden, inter)}.items():
                seed = 10 * e + int(shard[1])
                if name is None:
                    whole = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(BF16) / 8
                    tensors, dense[e, shard] = {"weight": whole}, whole.double()
                else:
                    tensors, dense[e, shard] = stored(CONFIGS[name], n, k, seed)
                for suffix, tensor in tensors.items():
                    full = f"w2_{suffix}" if shard == "w2" else f"w13_{suffix}"
                    param = params[full]
                    param.weight_loader(param, tensor, f"m.experts.{full}", shard_id=shard, expert_id=e)
        process(layer)
    assert type(layer.quant_method) is JitGemmMoEMethod and not dict(layer.named_parameters())
    w13 = torch.stack([torch.cat([dense[e, "w1"], dense[e, "w3"]]) for e in range(count)])
    return layer, w13, torch.stack([dense[e, "w2"] for e in range(count)])


def by_hand(x, ids, weights, w13, w2):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, i in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        g, u = (w13[ids[t, i]] @ x[t].double()).chunk(2)
        out[t] += weights[t, i].double() * (w2[ids[t, i]] @ (torch.nn.functional.silu(g) * u))
    return out


def tokens(m=6):
    torch.manual_seed(3)
    ids = torch.stack([torch.randperm(SIZES[0])[:2] for _ in range(m)]).to(torch.int32)
    return torch.randn(m, SIZES[1], dtype=BF16), ids, torch.rand(m, 2)


def standard(x, ids, weights, scale=None):
    topk = SimpleNamespace(topk_ids=ids, topk_weights=weights)
    return dispatched("standard", hidden_states=x, hidden_states_scale=scale, topk_output=topk)


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("name", [None, "packed", "gptq", "fp8"])
def test_ranks_of_experts_add_up_to_the_layer(name, ep):
    x, ids, weights = tokens()
    total, local = 0, SIZES[0] // 2
    for number in range(2):
        layer, w13, w2 = loaded_experts(name, number, 2, ep, routed_scaling_factor=2.5)
        mine = torch.where(ids // local == number, ids % local, -1) if ep else ids  # as the dispatcher numbers them
        total += layer.quant_method.apply(layer, standard(x, mine, weights)).hidden_states.double()
    expected = 2.5 * by_hand(x, ids, weights, w13, w2)
    assert (total - expected).norm() < (0.25 if name is None else 0.1) * expected.norm()


def test_tokens_of_deepep_are_weighed_here_or_by_its_combine():
    x, ids, weights = tokens()
    layer, w13, w2 = loaded_experts(
        "packed", deepep=True, options={"activation": "e4m3_block"}, routed_scaling_factor=2.5
    )
    assert layer.dispatcher.quant_config["low_latency_dispatcher_output_dtype"] == "fp8" and layer.deprecate_flag
    given = dispatched("deepep_normal", hidden_states=x, hidden_states_scale=None, topk_ids=ids, topk_weights=weights)
    found = layer.quant_method.apply(layer, given)
    expected = by_hand(x, ids, weights, w13, w2)  # the model scales the combined output
    assert (found.hidden_states.double() - expected).norm() < 0.1 * expected.norm() and found.topk_ids is ids

    counts, most = torch.tensor([3, 0, 1, 4], dtype=torch.int32), 4
    rows = torch.randn(SIZES[0], most, SIZES[1], dtype=BF16)
    scale = rows.float().abs().amax(-1, keepdim=True) / 448
    codes = (rows.float() / scale).to(torch.float8_e4m3fn)
    members = dict(hidden_states=codes, hidden_states_scale=scale, topk_ids=ids, topk_weights=weights, masked_m=counts)
    found = layer.quant_method.apply(layer, dispatched("deepep_ll", expected_m=2, **members)).hidden_states
    assert found.dtype == BF16 and found.shape == rows.shape
    for e, count in enumerate(counts.tolist()):
        if count:
            ones = torch.ones(count, 1)
            expected = by_hand(rows[e, :count], torch.full((count, 1), e), ones, w13, w2)
            assert (found[e, :count].double() - expected).norm() < 0.12 * expected.norm()


def test_what_experts_do_not_take_is_named():
    layer, _, _ = loaded_experts("packed")
    apply = layer.quant_method.apply
    with pytest.raises(ValueError, match="moe_a2a_backend: expected a dispatcher of standard.* got flashinfer"):
        apply(layer, dispatched("flashinfer"))
    with pytest.raises(ValueError, match="hidden_states: expected tokens in the model's type"):
        apply(layer, standard(*tokens(), scale=torch.ones(1)))
    with pytest.raises(ValueError, match="topk_output: expected experts and weights of tokens"):
        apply(layer, dispatched("standard", topk_output=object(), hidden_states=None))
    with running(), pytest.raises(ValueError, match="one by one in the files, got a model that has them stacked"):
        experts(made(None), SIZES, 2, use_weight_loader_fused=True)
    with running(runner="deep_gemm"), pytest.raises(ValueError, match="moe_runner_backend: expected auto or triton"):
        experts(made(None), SIZES, 2)
    with running():
        assert type(experts(made(None), SIZES, 2, with_bias=True).quant_method) is UnquantizedFusedMoEMethod


def test_a_missing_expert_is_named():
    with running():
        layer = experts(made(CONFIGS["packed"]), SIZES, 2)
        with pytest.raises(ValueError, match="w13_weight.*: expected numbers.* number 0's gate_proj"):
            process(layer)


@contextmanager
def of_gpt_oss(folder, inter, number=0, size=1, ep=False):
    """A rank's experts as SGLang's gpt-oss makes them, and its config."""
    model = SimpleNamespace(_name_or_path=str(folder), model_type="gpt_oss")
    sizes = gpt_oss_experts.COUNT, gpt_oss_experts.HIDDEN, inter
    with running(number, size, ep):
        config = JitGemmConfig.from_config({**GPT_OSS, "hf_config": model})
        gate = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
        yield experts(config, sizes, 2, with_bias=True, use_weight_loader_fused=False, **gate), config


@pytest.mark.parametrize("split, inter", [("whole", 192), ("tp", 192), ("tp", 160), ("ep", 192)])
def test_gpt_oss_in_its_own_format(tmp_path, split, inter):
    """Also where ranks have 96 and 64 of the 160 columns of w2, as SGLang's model cuts them."""
    whole, (x, ids, weights) = gpt_oss_experts.Layer("weight_bias", inter), gpt_oss_experts.tokens()
    size, ep, total, found = 1 if split == "whole" else 2, split == "ep", 0, []
    for number in range(size):
        with of_gpt_oss(tmp_path, inter, number, size, ep) as (layer, config):
            whole.load(layer, number, size, ep)
            found.append(process(layer))
        assert config.get_name() == "mxfp4" and config.is_static_cfg()  # by which SGLang's model chooses its loader
        local = gpt_oss_experts.COUNT // size
        mine = torch.where(ids // local == number, ids % local, -1) if ep else ids
        total += layer.quant_method.apply(layer, standard(x, mine, weights)).hidden_states.double()
    assert found[0].gate == Gate("swiglu_oai", "interleaved", 7.0, 1.702) and not list(layer.parameters())
    whole.check(found, ep)
    expected = whole.by_hand(x, ids, weights)
    assert (total - expected).norm() < 0.06 * expected.norm()


def test_gpt_oss_s_missing_bias_is_named(tmp_path):
    whole = gpt_oss_experts.Layer("weight_bias")
    whole.tensors.pop("w13_weight_bias")
    with of_gpt_oss(tmp_path, 192) as (layer, _):
        whole.load(layer, 0, 1, False)
        with pytest.raises(ValueError, match="w13_weight_bias: expected numbers for each of this rank's 4 experts"):
            process(layer)


def test_a_rank_that_gpt_oss_leaves_nothing_is_named():
    layer = SimpleNamespace(intermediate_size_per_partition=20, moe_tp_size=8, moe_tp_rank=5)
    with pytest.raises(ValueError, match="tp_size: expected ranks that share 5 groups of columns, got 8"):
        cut(SimpleNamespace(loads_biases=True), layer)


def test_other_models_in_mxfp4_keep_the_name_of_the_plug_in():
    with running():
        assert made(GPT_OSS).get_name() == made(None).get_name() == "jitgemm"
        layer = experts(made(GPT_OSS), (2, 64, 64), 2)
    assert type(layer.quant_method) is JitGemmMoEMethod


@pytest.mark.parametrize(
    "said, gate",
    [
        ({}, ("silu", "gate_up", None, 1.0)),
        ({"swiglu_limit": 10.0}, ("silu", "gate_up", 10.0, 1.0)),
        ({"gemm1_clamp_limit": 7.0}, ("swiglu_step", "gate_up", 7.0, 1.0)),
        ({"gemm1_clamp_limit": 7.0, "gemm1_alpha": 1.702}, ("swiglu_oai", "interleaved", 7.0, 1.702)),
        ({"gemm1_alpha": 1.5, "gate_up_interleaved": False}, ("swiglu_oai", "gate_up", None, 1.5)),
        ({"activation": "gelu_tanh"}, ("gelu_tanh", "gate_up", None, 1.0)),
        ({"activation": "situ", "gemm1_clamp_limit": 8.0}, ("situ", "gate_up", 8.0, 4.0)),
        ({"activation": "relu2", "is_gated": False}, ("relu2", "gate_up", None, 1.0)),
        ({"activation": "silu", "is_gated": False}, "got silu without gates"),
        ({"no_combine": True}, "no_combine: expected False"),
        ({"gemm1_beta": 2.0}, "gemm1_beta: expected 1"),
    ],
)
def test_the_gate_is_that_of_sglang_s_config(said, gate):
    plain = dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit"))
    plain |= {"activation": "silu", "is_gated": True, "gate_up_interleaved": True, "no_combine": False}
    config = SimpleNamespace(**(plain | said))
    if isinstance(gate, str):
        with pytest.raises(ValueError, match=gate):
            gate_of(config)
    else:
        found = gate_of(config)
        assert (found.kind, found.order, found.keywords["limit"], found.alpha) == gate


# ---- models that jitgemm saved, and the output layer -----------------------------------------------------------------


def saved(folder, layers):
    """The config of a model in `folder`, whose file has these layers."""
    parts = {f"{name}.{each}": tensor for name, layer in layers.items() for each, tensor in layer.state_dict().items()}
    save_file(parts, folder / "model.safetensors")
    with running():
        return JitGemmConfig.from_config(
            {"quant_method": "jitgemm", "hf_config": SimpleNamespace(_name_or_path=str(folder))}
        )


@pytest.mark.parametrize("kind", ["4 bits", "static", "corrected", "nvfp4", "8 bits in blocks", "two levels, rotated"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_has_its_part_of_saved_layers(tmp_path, kind, number):
    torch.manual_seed(0)
    layers, k = {f"m.{each}_proj": SAVED[kind](192, 128) for each in ("gate", "up")}, columns_of(kind)
    layers["m.o_proj"] = SAVED[kind](64, k)
    config = saved(tmp_path, layers)
    with running(number, 2):
        joined, cut = gate_up(config, 128, 192), row(config, k, 64)
        for part, name in enumerate(("gate", "up")):
            load(joined, layers[f"m.{name}_proj"].state_dict(), part)
        load(cut, layers["m.o_proj"].state_dict())
    gate, up, o = (dense_of(layer) for layer in layers.values())
    assert torch.equal(dense_of(process(joined)), torch.cat([each.chunk(2)[number] for each in (gate, up)]))
    assert torch.equal(dense_of(process(cut)), o.chunk(2, 1)[number])
    assert cut.jitgemm.activation == layers["m.o_proj"].activation and not dict(cut.named_parameters())


def head_of(config, number):
    """One of two ranks' output layer of 200 rows, which are filled up to 256."""
    if not REAL:
        return ParallelLMHead(config, 200, 128, *((0, 128), (128, 200))[number])
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead as Head

    return Head(200, 128, params_dtype=BF16, quant_config=config, prefix="lm_head")


@pytest.mark.parametrize("kind", ["floats", "4 bits", "8 bits"])
def test_an_output_layer_is_packed_as_the_option_or_the_file_says(tmp_path, kind):
    torch.manual_seed(0)
    if kind == "floats":
        with running():
            config = made(None, lm_head="int8")
        weight = torch.randn(200, 128).to(BF16)
        tensors, expected, activation = {"weight": weight}, weight.double(), "int8"
    else:
        whole = SAVED[kind](200, 128)
        config, tensors = saved(tmp_path, {"lm_head": whole}), whole.state_dict()
        expected, activation = dense_of(whole), whole.activation
    parts = []
    for number in range(2):
        with running(number, 2):
            head = head_of(config, number)
            load(head, tensors)
        parts.append(dense_of(process(head)))
    found = torch.cat(parts)
    assert found.shape[0] == 256 and not found[200:].any() and head.jitgemm.activation == activation
    assert (found[:200] - expected).norm() <= (0.01 if kind == "floats" else 0) * expected.norm()


@pytest.mark.parametrize("ep", [False, True])
def test_ranks_of_saved_experts_with_biases_add_up(tmp_path, ep):
    whole, sizes = packed_module(), (4, 128, 384)
    config = saved(tmp_path, {"m.experts": whole})
    torch.manual_seed(5)
    x, ids = torch.randn(6, 128).to(BF16), torch.stack([torch.randperm(4)[:2] for _ in range(6)]).to(torch.int32)
    weights, total = torch.rand(6, 2), torch.zeros(6, 128)
    for number in range(2):
        with running(number, 2, ep):
            layer = experts(config, sizes, 2, with_bias=True)
            module = process(layer)
        mine = torch.where(ids // 2 == number, ids % 2, -1) if ep else ids
        total += layer.quant_method.apply(layer, standard(x, mine, weights)).hidden_states
        assert (module.w2.bias is None) == (number == 1 and not ep)
    expected = whole(x, ids, weights).float()
    assert (total - expected).norm() < 0.03 * expected.norm()


def test_a_saved_model_is_loaded_again_in_place_and_from_its_files_alone(tmp_path):
    torch.manual_seed(0)
    linear, other, whole = SAVED["4 bits"](64, 128), SAVED["4 bits"](64, 128), packed_module()
    config = saved(tmp_path, {"m.o_proj": linear, "m.experts": whole})
    with running():
        layers = row(config, 128, 64), experts(config, (4, 128, 384), 2)
        load(layers[0], linear.state_dict())
        modules = [process(layer) for layer in layers]
        before = [{name: (each.data_ptr(), each.clone()) for name, each in m.named_buffers()} for m in modules]
        for layer in layers:
            layer.quant_method.restore_weights_before_loading(layer)
        load(layers[0], linear.state_dict())
        assert [process(layer) for layer in layers] == modules
        for module, held in zip(modules, before, strict=True):
            for name, each in module.named_buffers():
                assert each.data_ptr() == held[name][0] and torch.equal(each, held[name][1])
        layers[0].quant_method.restore_weights_before_loading(layers[0])
        with pytest.raises(ValueError, match="got another m.o_proj.blocks than theirs"):
            load(layers[0], other.state_dict())


# ---- the config ------------------------------------------------------------------------------------------------------


def test_headers_of_the_files_and_the_users_options_decide(tmp_path):
    tensors, _ = stored(CONFIGS["packed"], 64, 64)
    dense = {"m.k_proj.weight": torch.zeros(64, 64)}
    save_file({f"m.o_proj.{each}": tensor for each, tensor in tensors.items()} | dense, tmp_path / "model.safetensors")
    model = SimpleNamespace(_name_or_path=str(tmp_path))
    with running(json_model_override_args='{"jitgemm": {"activation": "int8"}}'):
        given = {**CONFIGS["packed"], "hf_config": model, "packed_modules_mapping": {"kv": ["k_proj", "v_proj"]}}
        config = JitGemmConfig.from_config(given)
        assert config.recipe.activation == "int8" and config.packed_modules_mapping["kv"] == ["k_proj", "v_proj"]
        assert config.warmer.tokens == 64 and "hf_config" not in config.checkpoint
        assert type(row(config, 64, 64).quant_method) is JitGemmLinearMethod
        assert type(row(config, 64, 64, "m.k_proj").quant_method) is UnquantizedLinearMethod
        with pytest.raises(ValueError, match="expected the options"):
            made(None, wrong=1)
        index = {"weight_map": {"m.k_proj.weight": "model.safetensors", "m.q_proj.weight": "model.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="expected 'm.q_proj.weight' in .*as the index says, found none"):
            JitGemmConfig.from_config({**CONFIGS["packed"], "hf_config": model})
