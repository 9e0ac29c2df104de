"""fuse_ and unfuse_ on tiny models of transformers: what is fused, that it is the calls by hand, and the way back."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import io
import pickle
import shutil
import sys
import weakref

import builders
import pytest
import torch
from safetensors.torch import save_file
from small_models import same_state
from torch._dynamo.backends.common import aot_autograd

import jitgemm.nn
from jitgemm.activations.call import quantize_activations
from jitgemm.gemm.call import gemm_w4a8_nt, gemm_w8a8_nt
from jitgemm.nn import PackedLinear, W4A8Linear, W8A8Linear, fuse_, load_, unfuse_
from jitgemm.nn.fuse import fuse
from jitgemm.nn.fuse.fused import FusedMLP, FusedNorm, MergedLinear, ProjectionView
from jitgemm.nn.layers.packed import LHS_DTYPES
from jitgemm.nn.warm.warm import kernels

transformers = pytest.importorskip("transformers")
quantize = functools.partial(jitgemm.nn.quantize_, clip_steps=0, group_size=32)

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
FAMILIES = {
    "Llama": "LlamaConfig",
    "Qwen2": "Qwen2Config",
    "Qwen3": "Qwen3Config",
    "Mistral": "MistralConfig",
    "Gemma": "GemmaConfig",
    "Gemma3": "Gemma3TextConfig",
    "Phi3": "Phi3Config",
}
IDS = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(5))
Q, K, V, GATE, UP, DOWN = (
    *(f"self_attn.{name}_proj" for name in "qkv"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def build(family: str = "Llama", device: str = "cpu", seed: int = 3, **sizes) -> torch.nn.Module:
    """A model whose norms and biases are random too."""
    torch.manual_seed(seed)
    config = getattr(transformers, FAMILIES.get(family, f"{family}Config"))(**(SIZES | sizes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape) * 0.2
    return model.to(device)


def quantised(family: str = "Llama", activation: str = "int8", **more) -> torch.nn.Module:
    model = build(family, **more)
    quantize(model, activation=activation)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS.to(model.device)).logits


# ---- by hand ---------------------------------------------------------------------------------------------------------


def merged(layers: list[W4A8Linear]) -> W4A8Linear:
    """One layer of the rows of all, packed anew. On a GPU other rows may make another kernel, which sums otherwise."""
    first, parts = layers[0], [layer.weight.unpack() for layer in layers]
    q, scale = (torch.cat([part[i].view(torch.uint8) if i == 0 else part[i] for part in parts]) for i in (0, 1))
    q, bias = q.view(parts[0][0].dtype), None if first.bias is None else torch.cat([layer.bias for layer in layers])
    if first.weight.bits == 8:
        return W8A8Linear(jitgemm.pack_w8(q, scale), bias, activation=first.activation)
    weight = jitgemm.pack_w4(q, scale, group_size=first.weight.group_size, lhs_dtype=LHS_DTYPES[first.activation])
    return W4A8Linear(weight, bias, activation=first.activation)


def gemms(lhs: tuple, layers: list[W4A8Linear], shape: torch.Size) -> torch.Tensor:
    layers = [merged(layers)] if lhs[0].is_cuda else layers
    out = torch.empty((lhs[0].shape[0], sum(layer.out_features for layer in layers)), dtype=torch.bfloat16)
    out, start = out.to(lhs[0].device), 0
    for layer in layers:
        gemm = gemm_w4a8_nt if layer.weight.bits == 4 else gemm_w8a8_nt
        gemm(lhs, layer.weight, out[:, start : start + layer.out_features], bias=layer.bias)
        start += layer.out_features
    return out.view(*shape[:-1], -1)


def quantise(layer: W4A8Linear, x: torch.Tensor, **front) -> tuple:
    scheme = "block" if layer.activation.endswith("_block") else "token" if layer.input_scale is None else "tensor"
    affine, scale = layer.activation == "int8_affine", layer.input_scale
    rows = x.reshape(-1, x.shape[-1])
    order = layer.weight.permutation
    return quantize_activations(
        rows, LHS_DTYPES[layer.activation], scheme=scheme, affine=affine, scale=scale, permutation=order, **front
    )


def projected(norm: torch.nn.Module, layers: list[W4A8Linear], x: torch.Tensor) -> torch.Tensor:
    """Norm, quantiser and projections: one quantised input, a GEMM for each."""
    gemma = type(norm).__name__.startswith("Gemma")
    gain = 1.0 + norm.weight.float() if gemma else norm.weight
    eps = norm.eps if gemma else norm.variance_epsilon
    return gemms(quantise(layers[0], x, rms_norm=gain.detach(), eps=eps), layers, x.shape)


def by_hand(layer: torch.nn.Module, x: torch.Tensor, attention_mask, position_embeddings=None, **kinds) -> torch.Tensor:
    """A decoder layer, of a model that is not fused: the residual addition and the norm's quantiser are two calls."""
    attention, mlp = layer.self_attn, layer.mlp
    functions = sys.modules[type(layer).__module__]
    merged = hasattr(attention, "qkv_proj")
    layers = [attention.qkv_proj] if merged else [attention.q_proj, attention.k_proj, attention.v_proj]
    dim = attention.head_dim
    heads = SIZES["num_attention_heads"] * dim, SIZES["num_key_value_heads"] * dim
    parts = projected(layer.input_layernorm, layers, x).split([heads[0], heads[1], heads[1]], -1)
    q, k, v = (part.view(*x.shape[:-1], -1, dim).transpose(1, 2) for part in parts)
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    if position_embeddings is None:  # Gemma 3 in transformers 4: of both kinds of layers
        position_embeddings = kinds[f"position_embeddings_{'local' if attention.is_sliding else 'global'}"]
    q, k = functions.apply_rotary_pos_emb(q, k, *position_embeddings)
    y, _ = functions.eager_attention_forward(attention, q, k, v, attention_mask, scaling=attention.scaling)
    y = attention.o_proj(y.reshape(x.shape[:-1] + (-1,)).contiguous())
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    x = x + (layer.post_attention_layernorm(y) if sandwich else y)
    norm = layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm
    both = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
    y = projected(norm, both, x)
    gate = {"gelu_mul": "tanh"} if type(layer).__name__.startswith("Gemma") else {"silu_mul": True}
    y = gemms(quantise(mlp.down_proj, y, **gate), [mlp.down_proj], y.shape)
    return x + (layer.post_feedforward_layernorm(y) if sandwich else y)


def assert_by_hand(fused: torch.nn.Module, before: torch.nn.Module) -> None:
    """Every layer of the fused model gives what `by_hand` makes of its input with the model as it was."""
    seen = []

    def note(layer, inputs, named, output):
        seen.append((layer.self_attn.layer_idx, inputs[0], named, output))

    for layer in fused.model.layers:
        layer.register_forward_hook(note, with_kwargs=True)
    logits(fused)
    for layer in fused.model.layers:
        layer._forward_hooks.clear()
    assert [number for number, *_ in seen] == [0, 1]
    with torch.no_grad():
        for number, x, named, output in seen:
            output = output[0] if isinstance(output, tuple) else output  # Gemma 3 in transformers 4
            assert builders.same_bits(output, by_hand(before.model.layers[number], x, **named))


@pytest.mark.parametrize(("family", "activation"), [("Llama", "e4m3"), *((family, "int8") for family in FAMILIES)])
def test_a_fused_model_is_the_calls_by_hand(family, activation):
    model = quantised(family, activation)
    before, exact = copy.deepcopy(model), logits(model)
    report = fuse_(model)
    assert_by_hand(model, before)
    assert float((logits(model) - exact).float().norm() / exact.float().norm()) < 0.1
    layer = model.model.layers[1]
    norms = [name for name, module in layer.named_modules() if isinstance(module, FusedNorm)]
    assert len(norms) == 2 and all(len(layer.get_submodule(name).joint.runs) == 1 for name in norms)
    assert isinstance(layer.mlp, FusedMLP)
    assert type(layer) is type(before.model.layers[1])
    assert len(report) == 6 and not set(report.skipped) & set(report)


def test_activations_with_zero_points_are_fused_too():
    model = quantised("Qwen2", "int8_affine")
    before = copy.deepcopy(model)
    assert len(fuse_(model)) == 6
    assert_by_hand(model, before)


def test_the_report_says_what_was_fused_and_what_not():
    report = fuse_(quantised(num_hidden_layers=1))
    names = (".mlp", ".input_layernorm", ".post_attention_layernorm")
    assert report == [f"model.layers.0{name}" for name in names]
    assert report.fused == {
        "model.layers.0.input_layernorm": "RMSNorm, quantiser and q_proj + k_proj + v_proj",
        "model.layers.0.post_attention_layernorm": "RMSNorm, quantiser and gate_proj + up_proj",
        "model.layers.0.mlp": "silu * mul, quantiser and down_proj",
    }
    assert report.skipped == {}
    assert repr(report).startswith("fused: 3\n  1 RMSNorm, quantiser and q_proj + k_proj + v_proj: model.layers.0.inp")
    report = fuse_(quantised(hidden_act="relu", num_hidden_layers=1))
    reason = "what its last Linear reads is neither silu(gate) * up nor gelu(gate) * up"
    assert report.skipped == {"model.layers.0.mlp": reason}
    assert "skipped: 1\n  1 what its last" in repr(report)


@pytest.mark.parametrize("act, gate", [("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu"), ("silu", "silu")])
def test_gates_that_are_nearly_equal_for_small_values_are_told_apart(act, gate):
    model = quantised(hidden_act=act)
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.data.fill_(0.01)
    fused = fuse_(model).fused
    assert {fused[f"model.layers.{number}.mlp"] for number in (0, 1)} == {f"{gate} * mul, quantiser and down_proj"}


def test_a_gate_that_is_nearly_gelu_stays_pytorchs():
    model = quantised(hidden_act="quick_gelu", intermediate_size=128)
    reason = "what its last Linear reads is neither silu(gate) * up nor gelu(gate) * up"
    assert fuse_(model).skipped == {f"model.layers.{number}.mlp": reason for number in (0, 1)}
    assert len(fuse_(quantised(hidden_act="gelu_new", intermediate_size=128)).fused) == 6


def test_projections_through_a_low_rank_are_fused_too():
    ranks = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    ranks |= {"head_dim": 16}  # of the rotary embedding
    model = quantised("DeepseekV3", **ranks, first_k_dense_replace=2, num_key_value_heads=4)
    exact = logits(model)
    report = fuse_(model)
    assert report.fused["model.layers.1.self_attn.q_a_layernorm"] == "RMSNorm, quantiser and q_b_proj"
    assert report.fused["model.layers.1.input_layernorm"] == "RMSNorm, quantiser and q_a_proj + kv_a_proj_with_mqa"
    assert float((logits(model) - exact).float().norm() / exact.float().norm()) < 0.1
    unfuse_(model)
    assert builders.same_bits(logits(model), exact)


def test_the_shared_expert_of_a_mixture_has_its_own_quantiser():
    model = quantised("Qwen2Moe", **MOE)
    mlp = model.model.layers[0].mlp.shared_expert
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    expected = gemms(quantise(gate, x), [gate, up], x.shape)
    expected = gemms(quantise(down, expected, silu_mul=True), [down], x.shape)
    before = logits(model)
    report = fuse_(model)
    assert report.fused["model.layers.0.mlp.shared_expert"] == (
        "quantiser and gate_proj + up_proj; silu * mul, quantiser and down_proj"
    )
    assert "model.layers.0.post_attention_layernorm" not in report
    with torch.no_grad():
        assert builders.same_bits(model.model.layers[0].mlp.shared_expert(x), expected)
    unfuse_(model)
    assert builders.same_bits(logits(model), before)


# ---- formats that differ ---------------------------------------------------------------------------------------------


def set_layer(model: torch.nn.Module, name: str, **options) -> None:
    """One Linear of layer 0 quantised in another way."""
    plain = build()
    kind = {"activation": "int8", "group_size": 32, "clip_steps": 0} | options
    parent, _, child = f"model.layers.0.{name}".rpartition(".")
    linear = plain.get_submodule(f"{parent}.{child}")
    setattr(model.get_submodule(parent), child, W4A8Linear.from_linear(linear, **kind))


def with_minus_8(model: torch.nn.Module) -> None:
    """A k_proj in layer 0 that the order of codes for e4m3 does not hold."""
    codes = torch.randint(-8, 8, (64, 128), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    weight = jitgemm.pack_w4(codes, torch.full((64, 4), 0.01).bfloat16(), group_size=32)
    model.model.layers[0].self_attn.k_proj = W4A8Linear(weight)


def test_orders_of_codes_that_differ_merge_and_come_back():
    model = build()
    jitgemm.nn.quantize_(model, activation="e4m3", group_size=32, clip_steps=0, full_range=False)
    with_minus_8(model)
    attention = model.model.layers[0].self_attn
    assert [getattr(attention, f"{n}_proj").weight.format.order for n in "qkv"] == ["e4m3", "any", "e4m3"]
    before = copy.deepcopy(model)
    fuse_(model)
    (run,) = model.model.layers[0].input_layernorm.joint.runs
    assert run.weight.format.order == "any"
    assert_by_hand(model, before)
    # A state dict is right either way, of the fused model and into it.
    other = copy.deepcopy(before)
    other.load_state_dict(model.state_dict())
    assert builders.same_bits(logits(other), logits(before))
    exact = logits(model)
    attention.q_proj.blocks.zero_()
    assert not torch.equal(logits(model), exact)
    model.load_state_dict(before.state_dict())
    assert builders.same_bits(logits(model), exact)
    unfuse_(model)
    assert same_state(model, before)


def test_codes_that_the_merged_order_does_not_hold_are_refused():
    model = build()
    jitgemm.nn.quantize_(model, activation="e4m3", group_size=32, clip_steps=0, full_range=False)
    other = copy.deepcopy(model)
    with_minus_8(other)
    fuse_(model)
    exact = logits(model)
    with pytest.raises(
        RuntimeError, match="k_proj.meta: expected codes in the order 'e4m3', got 'any'; call .*unfuse_"
    ):
        model.load_state_dict({n: x for n, x in other.state_dict().items() if "layers.0.self_attn.k_proj" in n}, False)
    assert builders.same_bits(logits(model), exact)


def test_scales_that_the_merged_strips_do_not_share_are_refused():
    model = build(hidden_size=256)
    jitgemm.nn.quantize_(model, bits=8, activation="e4m3", block=128)
    q = torch.randn((192, 256), generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    rows = W8A8Linear(jitgemm.pack_w8(q, 0.01 * (1 + torch.arange(384).reshape(192, 2))))
    fuse_(model)
    (run,) = model.model.layers[0].post_attention_layernorm.joint.runs
    assert run.weight.format.uniform_strip_scale
    exact = logits(model)
    with pytest.raises(RuntimeError, match="gate_proj.meta: expected one scale for every 64 rows, .*; call .*unfuse_"):
        model.load_state_dict({f"model.layers.0.{GATE}.{name}": x for name, x in rows.state_dict().items()}, False)
    assert builders.same_bits(logits(model), exact)


@pytest.mark.parametrize("activation", ["int8", "e4m3", "e4m3_block"])
def test_layers_of_8_bits_are_merged_and_come_back(activation):
    model = build("Qwen2")
    jitgemm.nn.quantize_(model, bits=8, activation=activation)
    before = copy.deepcopy(model)
    report = fuse_(model)
    assert report.fused["model.layers.0.input_layernorm"] == "RMSNorm, quantiser and q_proj + k_proj + v_proj"
    assert_by_hand(model, before)
    assert_by_hand(pickle.loads(pickle.dumps(model)), before)
    state = model.state_dict()
    assert all(builders.same_bits(state[name], value) for name, value in before.state_dict().items())
    unfuse_(model)
    assert same_state(model, before) and type(model.get_submodule(f"model.layers.0.{Q}")) is W8A8Linear


def test_widths_that_differ_share_the_quantiser():
    model = quantised()
    for number, block in enumerate(build().model.layers):
        model.set_submodule(
            f"model.layers.{number}.{V}", W8A8Linear.from_linear(block.get_submodule(V), activation="int8")
        )
    before = copy.deepcopy(model)
    assert fuse_(model).fused["model.layers.0.input_layernorm"] == "RMSNorm, quantiser and q_proj + k_proj, v_proj"
    assert_by_hand(model, before)


def test_formats_that_differ_share_the_quantiser():
    model = quantised()
    set_layer(model, V, group_size=64)
    set_layer(model, UP, symmetric=False)
    before = copy.deepcopy(model)
    report = fuse_(model)
    assert report.fused["model.layers.0.input_layernorm"] == "RMSNorm, quantiser and q_proj + k_proj, v_proj"
    assert report.fused["model.layers.0.post_attention_layernorm"] == "RMSNorm, quantiser and gate_proj, up_proj"
    assert_by_hand(model, before)
    unfuse_(model)
    assert same_state(model, before)


def test_rows_that_end_within_a_strip_share_the_quantiser():
    model = quantised(head_dim=16, num_attention_heads=8)
    report = fuse_(model)
    assert report.fused["model.layers.0.input_layernorm"] == "RMSNorm, quantiser and q_proj + k_proj, v_proj"
    assert report.fused["model.layers.0.post_attention_layernorm"] == "RMSNorm, quantiser and gate_proj + up_proj"


@pytest.mark.parametrize("scales", ["equal", "different", "one"])
def test_static_scales_must_agree(scales):
    model = quantised(activation="e4m3")
    values = {"equal": (0.05, 0.05, 0.05), "different": (0.05, 0.05, 0.04), "one": (0.05, None, None)}[scales]
    attention = model.model.layers[0].self_attn
    for name, value in zip(("q_proj", "k_proj", "v_proj"), values):
        old = getattr(attention, name)
        scale = None if value is None else torch.tensor([value])
        setattr(attention, name, W4A8Linear(old.weight, activation="e4m3", input_scale=scale))
    before = copy.deepcopy(model)
    report = fuse_(model)
    if scales == "equal":
        assert_by_hand(model, before)
        unfuse_(model)
        assert same_state(model, before)
    else:
        assert report.skipped == {"model.layers.0.input_layernorm": "input scales differ"}


@pytest.mark.parametrize("same", [True, False])
def test_orders_of_the_input_must_agree(same):
    model = quantised()
    attention = model.model.layers[0].self_attn
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        weight = getattr(attention, name).weight
        order = torch.randperm(128, generator=torch.Generator().manual_seed(0 if same else i)).int()
        weight = weight.with_tensors(weight.blocks, weight.channel_scale, weight.row_sum, order)
        setattr(attention, name, W4A8Linear(weight, activation="int8"))
    before = copy.deepcopy(model)
    report = fuse_(model)
    if same:
        assert_by_hand(model, before)
        unfuse_(model)
        assert same_state(model, before)
    else:
        assert report.skipped == {"model.layers.0.input_layernorm": "permutations differ"}


# ---- what stays ------------------------------------------------------------------------------------------------------


def test_activations_that_differ_leave_the_norm():
    model = quantised()
    set_layer(model, V, activation="e4m3")
    before = logits(model)
    report = fuse_(model)
    assert report.skipped == {"model.layers.0.input_layernorm": "activations differ: int8 and e4m3"}
    assert not isinstance(model.model.layers[0].self_attn.q_proj, ProjectionView)
    unfuse_(model)
    assert builders.same_bits(logits(model), before)


def test_a_linear_that_is_not_quantised_leaves_the_norm():
    model = build(num_hidden_layers=1)
    quantize(model, lambda name, _: not name.endswith(("v_proj", "lm_head")))
    assert fuse_(model).skipped == {"model.layers.0.input_layernorm": "self_attn.v_proj (Linear) reads it too"}


def test_what_has_hooks_or_another_forward_stays():
    model = quantised()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    model.model.layers[1].mlp.forward = model.model.layers[1].mlp.forward
    report = fuse_(model)
    assert report.skipped == {
        "model.layers.0.input_layernorm": "self_attn.q_proj has hooks, which would see other tensors",
        "model.layers.1": "the block does not run by itself: a forward was replaced, as accelerate's hooks do",
    }


class Attention(torch.nn.Module):
    """Reads its input beside its Linear, or as plain attention does."""

    def __init__(self, extra: str):
        super().__init__()
        self.extra, self.qkv = extra, torch.nn.Linear(128, 3 * 128)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.extra == "adds its input":
            v = v + x
        elif self.extra == "reads some of its input":
            v = v * x[..., :1]
        return torch.sigmoid(q) * k + v


class OwnBlock(torch.nn.Module):
    def __init__(self, extra: str):
        super().__init__()
        self.outside = extra == "outside"
        self.norm = torch.nn.LayerNorm(128) if extra == "LayerNorm" else torch.nn.RMSNorm(128, eps=1e-5)
        self.attention = Attention(extra)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y) + (0.5 * y if self.outside else 0)


class Own(torch.nn.Module):
    def __init__(self, extra: str = ""):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList([OwnBlock(extra)])

    def forward(self, x):
        return self.blocks[0](x)


@pytest.mark.parametrize("extra", ["", "adds its input", "reads some of its input", "outside", "LayerNorm"])
def test_a_norm_that_something_else_reads_stays(extra):
    model, x = Own(extra).to(torch.bfloat16), torch.randn(2, 4, 128, dtype=torch.bfloat16)
    quantize(model, activation="int8")
    before = copy.deepcopy(model)
    if not extra:
        assert fuse_(model) == ["blocks.0.norm"]
    else:
        with pytest.warns(UserWarning, match="fuse_ fused nothing"):
            report = fuse_(model)
        reason = "with it fused the block" if extra != "LayerNorm" else "LayerNorm is no RMSNorm"
        assert list(report.skipped) == ["blocks.0.norm"] and reason in report.skipped["blocks.0.norm"]
        assert same_state(model, before)
        with torch.no_grad():
            assert torch.equal(model(x), before(x))


def test_a_norm_behind_its_attention_is_not_taken_for_the_mlps():
    model = quantised("Olmo2")
    before = logits(model)
    report = fuse_(model)
    names = [f"model.layers.{number}.post_attention_layernorm" for number in (0, 1)]
    assert list(report.skipped) == names and "with it fused the block fails" in report.skipped[names[0]]
    assert report == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert float((logits(model) - before).float().norm() / before.float().norm()) < 0.1


def test_a_block_whose_names_no_recipe_has_is_named():
    model = Own().to(torch.bfloat16)
    model.blocks[0].attention = torch.nn.Sequential(torch.nn.Linear(128, 384), torch.nn.Linear(384, 128)).bfloat16()
    quantize(model)
    with pytest.warns(UserWarning, match="fuse_ fused nothing"):
        assert "no recipe fits" in fuse_(model).skipped["blocks.0"]


def test_a_list_of_blocks_without_a_model_around_it_is_fused():
    blocks = torch.nn.ModuleList([OwnBlock("")]).to(torch.bfloat16)
    quantize(blocks)
    assert fuse_(blocks) == ["0.norm"]


def test_projections_that_a_call_by_itself_could_be_mistaken_for_stay():
    model = Own().to(torch.bfloat16)
    model.blocks[0].attention = torch.nn.Sequential(collections.OrderedDict(qkv=torch.nn.Linear(128, 128).bfloat16()))
    quantize(model)
    with pytest.warns(UserWarning, match="give as many columns as they take"):
        fuse_(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_are_fused_too(dtype):
    model = build().to(dtype)
    quantize(model)
    assert len(fuse_(model)) == 6
    assert logits(model).dtype == dtype


def test_eps_is_that_of_the_norm():
    model = Own().to(torch.bfloat16)
    quantize(model)
    model.blocks[0].norm.eps = None  # which follows the input's type
    with pytest.warns(UserWarning, match="fuse_ fused nothing"):
        fuse_(model)
    model.blocks[0].norm.eps = 0.25
    fuse_(model)
    assert model.blocks[0].norm.eps == 0.25


# ---- layers ----------------------------------------------------------------------------------------------


def test_a_residual_that_is_multiplied_stays_pytorch_s():
    model = quantised("Granite", residual_multiplier=0.3)
    before = logits(model)
    report = fuse_(model)
    assert len(report) == 6 and report.skipped == {}
    assert float((logits(model) - before).float().norm() / before.float().norm()) < 0.1


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj, self.o_proj = torch.nn.Linear(128, 3 * 128), torch.nn.Linear(128, 128)

    def forward(self, x, shift):
        q, k, v = self.qkv_proj(x).chunk(3, -1)
        return self.o_proj(torch.sigmoid(q) * k + v + shift)


class Needs(torch.nn.Module):
    """A layer that its model tells apart by an attribute, to give it what it cannot run without."""

    kind = "shifted"

    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = torch.nn.RMSNorm(128, eps=1e-5), Scaled()

    def forward(self, hidden, shift):
        return hidden + self.self_attn(self.input_layernorm(hidden), shift)


class Tells(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Needs()])

    def forward(self, inputs_embeds, use_cache=None):
        return self.layers[0](inputs_embeds, {"shifted": 0.5}[self.layers[0].kind])


def test_a_model_may_read_its_layers_attributes():
    torch.manual_seed(1)
    model = Tells().to(torch.bfloat16).eval()
    quantize(model, activation="int8")
    x = torch.randn(2, 3, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        before = model(x)
        report = fuse_(model)
        assert report == ["layers.0.input_layernorm"]
        assert float((model(x) - before).float().norm() / before.float().norm()) < 0.03


def test_a_layer_of_fused_parts_is_what_it_was_to_everything_else():
    model = quantised()
    layer = model.model.layers[0]
    kind, index, seen = type(layer), layer.self_attn.layer_idx, []
    layer.attention_type = "full_attention"
    layer.register_forward_hook(lambda module, inputs, output: seen.append((module, output)))
    fuse_(model)
    assert model.model.layers[0] is layer and type(layer) is kind
    assert layer.attention_type == "full_attention" and layer.self_attn.layer_idx == index
    with torch.no_grad():
        states = model(IDS, output_hidden_states=True).hidden_states
    assert len(states) == 3 and len(seen) == 1 and seen[0][0] is layer
    assert builders.same_bits(seen[0][1], states[1]) and not torch.equal(states[0], states[1])


def test_a_fused_layer_checkpoints_as_it_did():
    model = quantised()
    fuse_(model)
    exact = logits(model)
    model.gradient_checkpointing_enable()
    assert model.model.layers[0].gradient_checkpointing
    assert builders.same_bits(logits(model), exact)
    with torch.no_grad():
        found = model.train()(IDS).logits
    assert builders.same_bits(found, exact)  # on a CPU the addition's and the norm's calls are one, bit for bit


EDITS = ("none", "its input", "its output")


@pytest.mark.parametrize("everywhere", [False, True], ids=["its own", "of all modules"])
@pytest.mark.parametrize("edit", EDITS)
def test_hooks_of_a_norm_behind_an_addition_are_given_the_sum(edit, everywhere):
    """As the unfused layer's norm is, whose projections follow: what a hook gives back is what they compute of."""
    plain, fused = quantised(), quantised()
    fuse_(fused)
    seen: dict[bool, list[torch.Tensor]] = {}
    results = {}
    for model in (plain, fused):
        norm = model.model.layers[0].post_attention_layernorm
        inputs = seen.setdefault(model is fused, [])

        def before(module, args, norm=norm, inputs=inputs):
            if module is norm:
                inputs.append(args[0].clone())
                assert len(args) == 1
                return (args[0] * 2,) if edit == "its input" else None

        def behind(module, args, output, norm=norm):
            return output * 2 if module is norm and edit == "its output" else None

        hooks = torch.nn.modules.module
        handles = (
            [hooks.register_module_forward_pre_hook(before), hooks.register_module_forward_hook(behind)]
            if everywhere
            else [norm.register_forward_pre_hook(before), norm.register_forward_hook(behind)]
        )
        results[model is fused] = logits(model)
        for handle in handles:
            handle.remove()
    assert len(seen[False]) == len(seen[True]) == 1
    exact = seen[False][0].float()
    # The first norm of the fused layer rounds elsewhere: a step of bf16 or two.
    assert (seen[True][0].float() - exact).norm() < 0.02 * exact.norm()
    assert (results[True] - results[False]).norm() < 0.05 * results[False].norm()
    if edit == "none":
        assert builders.same_bits(results[True], logits(fused))
    elif edit == "its output":
        assert (results[False] - logits(plain)).norm() > 0.1 * results[False].norm()


# ---- back ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "Gemma", "Phi3"])
def test_unfuse_goes_back_bit_for_bit(family):
    model = quantised(family)
    before, exact = copy.deepcopy(model), logits(model)
    modules = dict(model.named_modules())
    report = fuse_(model)
    assert unfuse_(model) == report
    assert same_state(model, before) and list(model.state_dict()) == list(before.state_dict())
    assert builders.same_bits(logits(model), exact)
    for name, module in model.named_modules():
        assert type(module) is type(modules[name])
        assert isinstance(module, PackedLinear) or module is modules[name]
        if isinstance(module, PackedLinear):
            assert module.blocks.untyped_storage().nbytes() == module.blocks.nbytes
    assert "prologues" not in vars(model.model.layers[0].mlp.down_proj)
    assert unfuse_(model) == []
    assert fuse_(model) == report  # and again


def test_a_fused_shared_expert_keeps_none_of_its_linears():
    model = quantised("Qwen2Moe", **MOE)
    gate = weakref.ref(model.model.layers[0].mlp.shared_expert.gate_proj)
    fuse_(model)
    gc.collect()
    assert gate() is None


def test_nothing_is_resident_twice():
    model = quantised()
    fuse_(model)
    for model in (model, copy.deepcopy(model), model.to(torch.float16)):
        storages = {x.untyped_storage().data_ptr() for name, x in model.named_buffers() if name.endswith("blocks")}
        assert len(storages) == 2 * 4  # qkv, o, gate and up, down
        for layer in model.model.layers:
            (run,) = layer.input_layernorm.joint.runs
            assert run.slices == tuple(getattr(layer.self_attn, f"{n}_proj") for n in "qkv")
            assert all(part.weight.blocks is part.blocks for part in run.slices)


# ---- copies, files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "fp16 and back"])
@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_copies_compute_the_same_and_go_back(family, way):
    model = quantised(family, "e4m3")
    before = copy.deepcopy(model)
    fuse_(model)
    exact = logits(model)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = model.to(torch.float32).to(torch.bfloat16)
    assert builders.same_bits(logits(other), exact)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.blocks.zero_()
    assert not torch.equal(logits(other), exact)  # the slices' tensors are those that run
    other.load_state_dict(before.state_dict())
    assert builders.same_bits(logits(other), exact)
    unfuse_(other)
    assert same_state(other, before)


@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_a_state_dict_has_the_same_names_and_loads_either_way(family, tmp_path):
    model = quantised(family)
    before = copy.deepcopy(model)
    fuse_(model)
    assert same_state(model, before) and list(model.state_dict()) == list(before.state_dict())
    other = quantised(family, seed=4)
    fuse_(other)
    assert not torch.equal(logits(other), logits(model))
    other.load_state_dict(before.state_dict())
    assert builders.same_bits(logits(other), logits(model))
    unfuse_(other)
    assert same_state(other, before)
    save_file(model.state_dict() | {"lm_head.weight": model.lm_head.weight.clone()}, tmp_path / "model.safetensors")
    plain = build(family, seed=4)
    load_(plain, tmp_path / "model.safetensors")
    assert same_state(plain, before)
    model.save_pretrained(tmp_path)
    plain = build(family, seed=5)
    load_(plain, tmp_path)
    assert same_state(plain, before)


def test_a_model_from_pretrained_is_fused_saved_and_read_again(tmp_path):
    hf = pytest.importorskip("jitgemm.hf")
    build().save_pretrained(tmp_path / "floats")
    options = {"attn_implementation": "eager", "dtype": torch.bfloat16}
    quantising = hf.JitGemmConfig(bits=4, activation="e4m3", group_size=32)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "floats", quantization_config=quantising, **options)
    before = copy.deepcopy(model)
    assert len(fuse_(model)) == 6
    assert_by_hand(model, before)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", config=hf.config(tmp_path / "saved"), **options)
    assert same_state(again, before)
    fuse_(again)
    assert builders.same_bits(logits(again), logits(model))


def test_what_would_untie_the_slices_is_refused():
    model = quantised()
    before = copy.deepcopy(model)
    fuse_(model)
    exact = logits(model)
    with pytest.raises(RuntimeError, match="q_proj.blocks: expected assign=False for a fused layer, got True"):
        model.load_state_dict(before.state_dict(), assign=True)
    with pytest.raises(
        ValueError, match=r"expected no fused modules, got model.layers.0.self_attn.q_proj; call .*unfuse_"
    ):
        load_(model, before.state_dict())
    assert builders.same_bits(logits(model), exact)


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_generate_with_a_static_cache():
    model = quantised()
    before = copy.deepcopy(model)
    fuse_(model)
    inputs = {"input_ids": IDS, "max_new_tokens": 5, "do_sample": False}
    with torch.no_grad():
        tokens = model.generate(**inputs, cache_implementation="static", disable_compile=True)
        again = model.generate(**inputs)
    assert tokens.shape == (2, 12) and torch.equal(tokens, again)
    assert_by_hand(model, before)


@pytest.mark.parametrize("family, activation", [("Llama", "int8"), ("Gemma3", "e4m3"), ("Phi3", "e4m3")])
def test_one_graph_of_a_compiler_gives_the_same_bits(family, activation):
    model = quantised(family, activation)
    set_layer(model, K, activation=activation, group_size=64) if family == "Llama" else None
    fuse_(model)
    exact = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert builders.same_bits(compiled(IDS).logits, exact)
        assert builders.same_bits(compiled(IDS[:1, :5]).logits, model(IDS[:1, :5]).logits)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler")
def test_inductor_computes_a_fused_block():
    model = quantised(num_hidden_layers=1)
    set_layer(model, K, group_size=64)  # two GEMMs into one tensor
    fuse_(model)
    exact = logits(model)
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True)(IDS).logits
    assert float((found - exact).float().norm() / exact.float().norm()) < 0.02  # attention is Inductor's


def operations(model: torch.nn.Module) -> collections.Counter[str]:
    """What a compiler is given of a model to make kernels of; calls of ours by the op's name."""
    found: collections.Counter[str] = collections.Counter()

    def compiler(graph, inputs):
        for node in graph.graph.nodes:
            # An op that writes into an argument stands in another, which takes it.
            op = node.args[0] if "auto_functionalized" in str(node.target) else node.target
            found[getattr(op, "name", lambda: "")().partition("::")[2].removesuffix(".default")] += 1
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))(IDS)
    return found


def test_a_compiler_is_given_the_fused_ops_and_no_norms_of_blocks():
    """Whatever its backend; inductor's own fusions are tests/graph/test_inductor.py's."""
    model = quantised()
    plain = operations(model)
    fuse_(model)
    fused, blocks = operations(model), SIZES["num_hidden_layers"]
    names = ("quantize_activations", "gemm_w4a8_nt", "rsqrt", "silu")
    assert [plain[name] for name in names] == [7 * blocks, 7 * blocks, 2 * blocks + 1, blocks]
    # q, k and v are one GEMM, gate and up another; the model's last norm stays.
    assert [fused[name] for name in names] == [4 * blocks, 4 * blocks, 1, 0]


def test_autocast_gives_its_type():
    model = quantised().float()
    fuse_(model)
    x = torch.randn(2, 128)
    norm = model.model.layers[0].input_layernorm
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert norm(x).dtype == torch.float32


def test_warmup_knows_the_merged_kernels():
    model = quantised(num_hidden_layers=1)
    fuse_(model)
    specs = [spec for spec, *_ in kernels(model, 4, [torch.bfloat16], "h200")]
    quantisers = {(spec.rms_norm, spec.residual, spec.gate) for spec in specs if hasattr(spec, "rms_norm")}
    assert quantisers == {(True, False, ""), (False, False, "silu"), (False, False, "")}
    runs = [module for module in model.modules() if isinstance(module, MergedLinear)]
    assert [run.out_features for run in runs] == [256, 384]


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_layer_by_itself_is_refused():
    with pytest.raises(ValueError, match="model: expected a module that holds packed Linears, got a W4A8Linear"):
        fuse_(W4A8Linear.empty(64, 64))


def test_a_model_without_such_layers_is_warned_of():
    with pytest.warns(UserWarning, match="fuse_ fused nothing"):
        assert fuse_(build()) == []


def test_a_fused_model_is_not_fused_again():
    model = quantised()
    fuse_(model)
    before = logits(model)
    with pytest.warns(UserWarning, match="fused nothing.*\n.*2 is fused already"):
        fuse_(model)
    assert builders.same_bits(logits(model), before)


class Interrupted(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


@contextlib.contextmanager
def interrupted_behind(monkeypatch, name: str, at: int):
    """Behind the at-th call of this name by `fuse_`."""
    real, calls = getattr(fuse, name), iter(range(1, 99))

    def call(*args, **options):
        result = real(*args, **options)
        if next(calls) == at:
            raise Interrupted
        return result

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(fuse, name, call)
        yield


POINTS = [*(("put_module", at) for at in range(1, 9)), ("FusedNorm", 1), ("FusedNorm", 2), ("FusedMLP", 1)]


def test_an_interrupted_block_is_as_it_was(monkeypatch):
    model = quantised(num_hidden_layers=1)
    modules, before = [*model.modules()], logits(model)

    def state() -> list[dict]:
        return [{key: dict(v) if isinstance(v, dict) else v for key, v in vars(each).items()} for each in modules]

    expected = state()
    for name, at in POINTS:
        with interrupted_behind(monkeypatch, name, at):
            fuse_(model)
        assert all(found is module for found, module in zip(model.modules(), modules, strict=True)), (name, at)
        assert state() == expected, (name, at)
    assert builders.same_bits(logits(model), before)


@pytest.mark.parametrize("at", [1, 5, 9, 12, 16])
def test_fuse_after_an_interrupted_fuse_fuses_the_rest(at, monkeypatch):
    model, whole = quantised(), quantised()
    expected = fuse_(whole)
    with interrupted_behind(monkeypatch, "put_module", at):
        fuse_(model)
    first = [] if at < 9 else [name for name in expected if ".0" in name]
    assert fuse_(model) == [name for name in expected if name not in first]
    assert builders.same_bits(logits(model), logits(whole))
    assert [type(each) for each in model.modules()] == [type(each) for each in whole.modules()]


def test_parts_called_by_themselves_say_what_they_take():
    model = quantised(num_hidden_layers=1)
    fuse_(model)
    layer, x = model.model.layers[0], torch.randn(2, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"x: expected shape \[..., 256\], what the preceding fused module.*unfuse_"):
        layer.self_attn.q_proj(x)
    with pytest.raises(ValueError, match=r"x: expected shape \[..., 384\], what the preceding fused norm.*unfuse_"):
        layer.mlp(x)
    with pytest.raises(ValueError, match=r"x: expected shape \[..., 128\], got \[2, 64\]"):
        layer.input_layernorm(x[:, :64])
    with pytest.raises(ValueError, match="x: expected a tensor that does not require grad"):
        layer.input_layernorm(x.requires_grad_())


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["int8", "e4m3"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Phi3"])
def test_a_fused_model_is_the_calls_by_hand_on_a_gpu(family, activation):
    model = quantised(family, activation, device="cuda")
    before = copy.deepcopy(model)
    fuse_(model)
    assert_by_hand(model, before)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["int8", "e4m3", "e4m3_block"])
def test_a_fused_model_of_8_bits_is_the_calls_by_hand_on_a_gpu(activation):
    model = build("Llama", "cuda")
    jitgemm.nn.quantize_(model, bits=8, activation=activation)
    before = copy.deepcopy(model)
    fuse_(model)
    assert_by_hand(model, before)


@pytest.mark.gpu
def test_a_model_fused_on_the_cpu_moves_to_a_gpu():
    model = quantised("Qwen3", "int8")
    fuse_(model)
    model.cuda()
    exact, fresh = logits(model), quantised("Qwen3", "int8").cuda()
    fuse_(fresh)
    assert builders.same_bits(exact, logits(fresh))
    storages = {x.untyped_storage().data_ptr() for name, x in model.named_buffers() if name.endswith("blocks")}
    assert len(storages) == 2 * 4


@pytest.mark.gpu
def test_a_fused_model_replays_in_a_graph():
    model = quantised("Llama", "e4m3", device="cuda")
    fuse_(model)
    ids, length = IDS.cuda(), IDS.shape[1]
    # Given as it is added to the scores: transformers 5.17 makes one from a number on the host, which no graph captures.
    mask = torch.full((length, length), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16, device="cuda").triu(1)
    options = {"attention_mask": mask.expand(len(IDS), 1, -1, -1), "use_cache": False}
    others = [ids.clone(), ids.flip(0), (ids + 11) % 96]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        expected = [model(each, **options).logits for each in others]
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = model(ids, **options).logits
    for each, wanted in zip(others, expected):
        ids.copy_(each)
        out.fill_(float("nan"))
        graph.replay()
        assert builders.same_bits(out, wanted), f"furthest {float((out - wanted).abs().max()):.4g}"
