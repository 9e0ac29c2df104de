"""What SGLang alone has: how it finds the plug-in, DeepEP's tokens, its gates and factors. What it has in common with vLLM,
test_served*.py ask.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import gpt_oss_experts
import pytest
import torch
from engines import SPLITS, sglang
from served_layers import BF16, CONFIGS, expert_tensors, mixture, routed, stored
from sglang_layers import dispatched, experts, running

import jitgemm.sglang
from jitgemm.sglang.experts import cut, gate_of

# isort: split
from sglang.srt.layers.quantization import QUANTIZATION_METHODS

JitGemmConfig, SIZES = sglang.Config, (4, 64, 128)


def test_the_plug_in_is_found_registered_once_and_asked_first():
    from sglang.srt.server_args import QUANTIZATION_CHOICES

    jitgemm.sglang.register()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"jitgemm": "jitgemm.sglang:register"}
    assert QUANTIZATION_METHODS["jitgemm"] is JitGemmConfig and next(iter(QUANTIZATION_METHODS)) == "jitgemm"
    assert QUANTIZATION_CHOICES.count("jitgemm") == 1


def test_what_sglang_says_of_a_model_reaches_the_config(tmp_path):
    tensors, _ = stored(CONFIGS["packed"], 64, 64)
    sglang.of_folder(tmp_path, {"m.o_proj": tensors, "m.k_proj": {"weight": torch.zeros(64, 64)}}, CONFIGS["packed"])
    joined, model = {"kv": ["k_proj", "v_proj"]}, SimpleNamespace(_name_or_path=str(tmp_path))
    with running():
        config = JitGemmConfig.from_config({**CONFIGS["packed"], "hf_config": model, "packed_modules_mapping": joined})
    assert (
        config.packed_modules_mapping["kv"] == ["k_proj", "v_proj"] and "gate_up_proj" in config.packed_modules_mapping
    )
    assert config.warmer.tokens == 64 and "hf_config" not in config.checkpoint
    assert config.is_linear_unquantized("m.k_proj") and not config.is_linear_unquantized("m.o_proj")


def test_mlas_absorbed_layer_stays_in_floats():
    assert not sglang.serves(sglang.config(None), "m.kv_b_proj") and sglang.serves(sglang.config(None), "m.o_proj")


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_of_experts_are_scaled_by_the_models_factor(split):
    tensors, dense = expert_tensors(CONFIGS["packed"], *SIZES)
    x, ids, weights = routed(4)
    layers = [sglang.experts(CONFIGS["packed"], SIZES, tensors, at, routed_scaling_factor=2.5) for at in SPLITS[split]]
    total = sum(sglang.run_experts(layer, x, ids, weights).double() for layer in layers)
    expected = 2.5 * mixture(x, ids, weights, dense)
    assert (total - expected).norm() < 0.1 * expected.norm()


# ---- what dispatchers give, gates ------------------------------------------------------------------------------------


def test_tokens_of_deepep_are_weighed_here_or_by_its_combine():
    tensors, dense = expert_tensors(CONFIGS["packed"], *SIZES)
    x, ids, weights = routed(4)
    config = sglang.config(CONFIGS["packed"], activation="e4m3_block")
    layer = sglang.experts(config, SIZES, tensors, deepep=True, routed_scaling_factor=2.5)
    assert layer.dispatcher.quant_config["low_latency_dispatcher_output_dtype"] == "fp8" and layer.deprecate_flag
    given = dispatched("deepep_normal", hidden_states=x, hidden_states_scale=None, topk_ids=ids, topk_weights=weights)
    found = layer.quant_method.apply(layer, given)
    expected = mixture(x, ids, weights, dense)  # the model scales the combined output
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
            expected = mixture(rows[e, :count], torch.full((count, 1), e), ones, dense)
            assert (found[e, :count].double() - expected).norm() < 0.12 * expected.norm()


def test_what_experts_do_not_take_is_named():
    layer = sglang.experts(CONFIGS["packed"], SIZES, expert_tensors(CONFIGS["packed"], *SIZES)[0])
    apply, (x, ids, weights) = layer.quant_method.apply, routed(4)
    topk = SimpleNamespace(topk_ids=ids, topk_weights=weights)
    with pytest.raises(ValueError, match="moe_a2a_backend: expected a dispatcher of standard.* got flashinfer"):
        apply(layer, dispatched("flashinfer"))
    with pytest.raises(ValueError, match="hidden_states: expected tokens in the model's type"):
        apply(layer, dispatched("standard", hidden_states=x, hidden_states_scale=torch.ones(1), topk_output=topk))
    with pytest.raises(ValueError, match="topk_output: expected experts and weights of tokens"):
        apply(layer, dispatched("standard", topk_output=object(), hidden_states=None))
    config = sglang.config(None)
    for arguments, more, message in (
        ({}, {"use_weight_loader_fused": True}, "one by one in the files, got a model that has them stacked"),
        ({"runner": "deep_gemm"}, {}, "moe_runner_backend: expected auto or triton"),
    ):
        with running(**arguments), pytest.raises(ValueError, match=message):
            experts(config, SIZES, 2, **more)


def test_a_rank_that_gpt_oss_leaves_nothing_is_named():
    layer = SimpleNamespace(intermediate_size_per_partition=20, moe_tp_size=8, moe_tp_rank=5)
    with pytest.raises(ValueError, match="tp_size: expected ranks that share 5 groups of columns, got 8"):
        cut(SimpleNamespace(loads_biases=True), layer)


def test_gpt_oss_alone_has_sglangs_name_for_its_format(tmp_path):
    """By which SGLang's model chooses its loader."""
    config = sglang.read(tmp_path, dict(gpt_oss_experts.CONFIG), {}, "gpt_oss")
    assert config.get_name() == "mxfp4" and config.is_static_cfg()
    config = sglang.config(gpt_oss_experts.CONFIG)
    assert config.get_name() == sglang.config(None).get_name() == "jitgemm"
    assert isinstance(sglang.experts(config, (2, 64, 64), packed=False).quant_method, sglang.Experts)


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
