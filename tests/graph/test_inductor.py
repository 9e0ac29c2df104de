"""What inductor's pass over compiled graphs makes quantisers compute, and what it leaves alone.

Graphs go through all of inductor's passes and run in PyTorch, unfused, so that all else rounds as in eager mode; one
model is compiled to the end.
"""

from __future__ import annotations

import copy
import re
import shutil
import sys
from functools import partial

import builders
import pytest
import torch
from compiled_graphs import Graphs, K, compiled, inputs
from fresh_python import fresh_python

import jitgemm
import jitgemm.nn

E4M3 = torch.float8_e4m3fn
OPS = "quantize_activations", "add_quantize_activations", "gemm_w4a8_nt"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    with torch.inference_mode():
        yield


def norm(x, w, eps=1e-5):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gemma(x, w, eps=1e-5):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w.float())).type_as(x)


def quantised(x, dtype=E4M3, **options):
    return jitgemm.quantize_activations(x.reshape(-1, x.shape[-1]), dtype, **options)


def same(a, b) -> bool:
    return len(a) == len(b) and all(map(builders.same_bits, a, b))


# ---- norms -----------------------------------------------------------------------------------------------------------


NORMS = {
    "bf16": (torch.bfloat16, norm, lambda w: w),
    "fp16": (torch.float16, norm, lambda w: w),
    "fp32": (torch.float32, norm, lambda w: w),
    "1 + weight": (torch.bfloat16, gemma, lambda w: w.float() + 1),
    "1 + weight, fp32": (torch.float32, gemma, lambda w: w + 1),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_computed_by_its_quantiser(name):
    dtype, normed, gain = NORMS[name]
    x, w = inputs(dtype)
    found, graphs = compiled(lambda x, w: quantised(normed(x, w), torch.int8, affine=True), x, w)
    assert same(found, quantised(x, torch.int8, affine=True, rms_norm=gain(w), eps=1e-5))
    assert graphs.quantisers == {"norm": 1} and graphs.count(torch.ops.aten.rsqrt.default) == 0


def test_a_norm_in_fp32_is_computed_by_the_quantisers_of_its_conversions():
    x, w = inputs(torch.float32)

    def call(x, w):
        normed = norm(x, w)
        return *quantised(normed.bfloat16()), *quantised(normed.bfloat16()), *quantised(normed)

    found, graphs = compiled(call, x, w)
    assert same(found, 3 * quantised(x, rms_norm=w, eps=1e-5)) and graphs.quantisers["norm"] == 3 - 1
    assert graphs.count(torch.ops.aten.rsqrt.default) == 0


def test_quantisers_of_different_conversions_stay_apart():
    x = torch.randn(3, K)

    def call(x):
        return *quantised(x.bfloat16()), *quantised(x.bfloat16()), *quantised(x), *quantised(x.half())

    found, graphs = compiled(call, x)
    assert same(found, call(x)) and graphs.quantisers == {"plain": 3}


@pytest.mark.parametrize("op", ["rms_norm", "_fused_rms_norm"])
def test_or_that_in_one_operator(op):
    if not hasattr(torch.ops.aten, op):
        pytest.skip(f"this PyTorch has no aten::{op}")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from jitgemm.graph.inductor import fuse

    graph, fake = torch.fx.Graph(), FakeTensorMode()
    x, w = (graph.placeholder(name) for name in "xw")
    with fake:
        x.meta["val"], w.meta["val"] = torch.empty(3, K), torch.empty(K)
    made = graph.call_function(getattr(torch.ops.aten, op).default, (x, [K], w, 1e-5))
    normed = made if op == "rms_norm" else graph.call_function(__import__("operator").getitem, (made, 0))
    made.meta["val"] = normed.meta["val"] = x.meta["val"]
    last = (False, False, None, None, False, None, 1e-6, None)
    quantiser = graph.call_function(torch.ops.jitgemm.quantize_activations.default, (normed, E4M3, *last))
    with fake:
        quantiser.meta["val"] = quantiser.target(x.meta["val"], *quantiser.args[1:])
    graph.output(quantiser)
    fuse(quantiser)
    (_, _, new, _) = graph.nodes
    assert new.args == (x, E4M3, False, False, None, None, False, w, 1e-5, None, *new.args[10:])


def test_quantisers_of_one_norm_become_one_and_others_compute_it_again():
    x, w = inputs()

    def call(x, w):
        normed = norm(x, w)
        return *quantised(normed), *quantised(normed), *quantised(normed, torch.int8), *quantised(normed)

    found, graphs = compiled(call, x, w)
    e4m3, int8 = (quantised(x, dtype, rms_norm=w, eps=1e-5) for dtype in (E4M3, torch.int8))
    assert same(found, (*e4m3, *e4m3, *int8, *e4m3))
    assert graphs.quantisers == {"norm": 2} and graphs.count(torch.ops.aten.rsqrt.default) == 0


def test_a_norm_that_a_router_reads_stays_and_its_quantisers_become_one():
    x, w = inputs()

    def call(x, w):
        normed = norm(x, w)
        return *quantised(normed), *quantised(normed), normed.sum(-1)

    found, graphs = compiled(call, x, w)
    assert same(found, call(x, w)) and graphs.quantisers == {"plain": 1}


def root(x, eps=1e-5, axis=-1):
    return torch.rsqrt(x.mean(axis, keepdim=True) + eps)


UNUSUAL = {
    "eps is a tensor": lambda x, w, wide: w * (wide * root(wide.pow(2), w[:1].float().abs())).to(x.dtype),
    "the mean is of half a row": lambda x, w, wide: w * (wide * root(wide[..., : K // 2].pow(2))).to(x.dtype),
    "the mean is of a column": lambda x, w, wide: w * (wide * root(wide.pow(2), axis=1)).to(x.dtype),
    "a cube": lambda x, w, wide: w * (wide * root(wide.pow(3))).to(x.dtype),
    "the square in bf16": lambda x, w, wide: w * (wide * root(x.pow(2).float())).to(x.dtype),
    "another row's mean": lambda x, w, wide: w * (wide * root(wide.flip(1).pow(2))).to(x.dtype),
    "rounded to 8 bits": lambda x, w, wide: w * (wide * root(wide.pow(2))).to(E4M3).to(x.dtype),
    "a weight for each row": lambda x, w, wide: w[:3, None] * (wide * root(wide.pow(2))).to(x.dtype),
    "eps behind the root": lambda x, w, wide: w * (wide * (root(wide.pow(2), 0.0) + 1e-5)).to(x.dtype),
    "eps below 0": lambda x, w, wide: norm(x, w, -1e-5),
    "added to": lambda x, w, wide: norm(x, w) + 1,
    "none of these": lambda x, w, wide: w * (wide * root(wide.pow(2))).to(x.dtype),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_is_no_rms_norm_is_left_alone(kind):
    (x, w), unusual = inputs(), UNUSUAL[kind]
    found, graphs = compiled(lambda x, w: quantised(unusual(x, w, x.float())), x, w)
    assert graphs.quantisers == {"norm" if kind == "none of these" else "plain": 1}
    assert kind == "none of these" or same(found, quantised(unusual(x, w, x.float())))


def test_rows_that_the_op_cannot_read_are_left_alone():
    x, w = inputs()
    apart = torch.empty(2, 3, K + 4, dtype=x.dtype)[..., :K].copy_(x)  # rows a stride apart that is no multiple of 16
    found, graphs = compiled(lambda x, w: quantised(norm(x, w)), apart, w)
    assert graphs.quantisers == {"plain": 1} and same(found, quantised(norm(x, w)))


def test_an_input_written_behind_the_norm_is_read_ahead_of_that():
    x, w = inputs()

    def call(x, w):
        normed = norm(x, w)
        x.zero_()
        return quantised(normed)

    assert same(compiled(call, x.clone(), w)[0], quantised(x, rms_norm=w, eps=1e-5))


# ---- residuals -------------------------------------------------------------------------------------------------------


INT8 = {"dtype": torch.int8}
BEHIND = {
    "two types": (torch.bfloat16, [{}, INT8]),
    "two types of fp32": (torch.float32, [{}, INT8]),
    "a rotation": (torch.bfloat16, [INT8 | {"rotation": 128}, INT8]),
    "sums": (torch.bfloat16, [INT8 | {"correction": ("bf16", size)} for size in (32, 128, 32)]),
}
"""The type of x, and what each quantiser is given; of the last kind two are one."""


@pytest.mark.parametrize("name", BEHIND)
def test_a_residual_is_added_by_the_quantiser_behind_it_and_the_sum_read_by_all_others(name):
    dtype, options = BEHIND[name]
    x, other, w = torch.randn(2, 3, 256).to(dtype), torch.randn(2, 3, 256).to(dtype), torch.randn(256).to(dtype)

    def call(x, other, w):
        total = x + other
        normed = norm(total, w)
        each = [quantised(normed, **given) for given in options]
        return *(part for lhs in each for part in lhs), total.view(-1), total * 2

    found, graphs = compiled(call, x, other, w)
    total = x + other
    hands = [part for given in options for part in quantised(total, rms_norm=w, eps=1e-5, **given)]
    assert same(found, (*hands, total.view(-1), total * 2))
    assert graphs.quantisers == {"add": 1, "norm": 1} and graphs.count(torch.ops.aten.add.Tensor) == 0


def test_additions_that_are_part_of_another_kernel_or_of_another_kind_stay():
    x, w = inputs()
    calls = (
        lambda x, y, w: x + y.exp(),  # in one kernel with exp
        lambda x, y, w: x + y[:1],
        lambda x, y, w: x + y.float(),
        lambda x, y, w: torch.add(x, y, alpha=2),
        lambda x, y, w: x + 1,
        lambda x, y, w: x + x,
    )
    for call in calls:
        torch._dynamo.reset()
        y = x.flip(0)
        found, graphs = compiled(lambda x, y, w: quantised(norm(call(x, y, w), w)), x, y, w)
        assert graphs.quantisers == {"norm": 1}
        assert same(found, quantised(call(x, y, w), rms_norm=w, eps=1e-5))


def test_a_sum_that_is_read_ahead_of_its_quantiser_is_added_ahead_of_it():
    x, w = inputs()

    def call(x, y, w):
        total = x + y
        first = jitgemm.quantize_activations(total.view(-1, K), torch.int8)
        return *quantised(norm(total, w * first[1][0])), *first

    y = x.flip(0)
    found, graphs = compiled(call, x, y, w)
    assert graphs.quantisers == {"norm": 1, "plain": 1}
    assert same(found[2:], quantised(x + y, torch.int8))


# ---- gates -----------------------------------------------------------------------------------------------------------


def silu_mul(x, width=K):
    gate, up = x.split(width, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", ["split", "chunk", "slices"])
def test_a_gate_is_computed_by_its_quantiser(dtype, how):
    x, _ = inputs(dtype, 2 * K)

    def call(x):
        parts = {"split": lambda: x.split(K, -1), "chunk": lambda: x.chunk(2, -1)}
        gate, up = parts.get(how, lambda: (x[..., :K], x[..., K:]))()
        return quantised(up * torch.nn.functional.silu(gate))

    found, graphs = compiled(call, x)
    assert same(found, quantised(x, silu_mul=True)) and graphs.quantisers == {"silu": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_so_is_gelu_of_a_tensor_s_half_and_of_two_gemms(approximate, dtype):
    x, _ = inputs(dtype, 2 * K)

    def gelu(gate, up):
        return torch.nn.functional.gelu(gate, approximate=approximate) * up

    found, graphs = compiled(lambda x: quantised(gelu(*x.chunk(2, -1))), x)
    assert same(found, quantised(x, gelu_mul=approximate)) and graphs.quantisers == {approximate: 1}
    found, graphs = compiled(lambda x: quantised(gelu(x[..., K:], x[..., :K])), x)
    assert graphs.quantisers == {"plain": 1}

    mlp, x = MLP(), inputs()[0]
    found, graphs = compiled(lambda x: mlp.down(gelu(mlp.gate(x), mlp.up(x))), x)
    assert builders.same_bits(found.view(-1, K), by_hand(mlp, x.view(-1, K), gate={"gelu_mul": approximate}))
    assert graphs.quantisers == {"plain": 1, approximate: 1} and graphs.count(torch.ops.aten.clone.default) == 0


@pytest.mark.parametrize("tanh, square, half, slope, scale", [
    (True, 3, 0.5, 0.044715, 0.79), (True, 3, 0.5, 0.04, 0.7978845608028654), (True, 2, 0.5, 0.044715, 0.7978845608028654),
    (True, 3, 0.6, 0.044715, 0.7978845608028654), (False, 3, 0.5, 0.0, 0.7), (False, 3, 0.6, 0.0, 0.7071067811865476),
])  # fmt: skip
def test_what_is_nearly_gelu_is_left_alone(tanh, square, half, slope, scale):
    x, _ = inputs(torch.float32, 2 * K)

    def call(x):
        gate, up = x.chunk(2, -1)
        cube = gate * gate * gate if square == 3 else gate * gate
        curve = torch.tanh((gate + cube * slope) * scale) if tanh else torch.erf(gate * scale)
        return quantised(gate * half * (curve + 1) * up)

    found, graphs = compiled(call, x)
    assert graphs.quantisers == {"plain": 1} and same(found, call(x))


def test_other_halves_and_other_gates_are_left_alone():
    x, _ = inputs(columns=2 * K)
    silu = torch.nn.functional.silu
    calls = (
        lambda x: quantised(silu(x[..., K:]) * x[..., :K]),
        lambda x: quantised(silu(x[..., :K]) * x[..., :K]),
        lambda x: quantised(silu(x[..., : K - 32]) * x[..., K - 32 : 2 * K - 64]),
        lambda x: quantised(silu(x[..., ::2]) * x[..., 1::2]),
        lambda x: quantised(torch.nn.functional.gelu(x[..., K:]) * x[..., :K]),
        lambda x: quantised(torch.relu(x[..., :K]) * x[..., K:]),
        lambda x: quantised(torch.sigmoid(x[..., :K]) * x[..., K:]),
        lambda x: quantised(silu(x[:1, :, :K]) * x[:1].flip(1)[..., K:]),
    )
    for call in calls:
        found, graphs = compiled(call, x)
        assert graphs.quantisers == {"plain": 1} and same(found, call(x))


class MLP(torch.nn.Module):
    def __init__(self, read=None, inner=128):
        super().__init__()
        torch.manual_seed(1)
        linears = [torch.nn.Linear(K, inner), torch.nn.Linear(K, inner), torch.nn.Linear(inner, K)]
        self.gate, self.up, self.down = (jitgemm.nn.W4A8Linear.from_linear(each.bfloat16()) for each in linears)
        self.read = read

    def forward(self, x):
        gate, up = self.gate(x), self.up(x)
        y = self.down(torch.nn.functional.silu(gate) * up)
        return y if self.read is None else (y, (gate if self.read == "gate" else up) + 1)


def by_hand(mlp, x, gate={"silu_mul": True}, **front):  # noqa: B006
    """An MLP's result with the gate computed by the quantiser, and what `front` says ahead of it."""
    q = mlp.gate.quantise(x, **front)
    both, y = torch.empty(len(x), 256, dtype=x.dtype, device=x.device), torch.empty_like(x)
    mlp.gate.multiply(q, both[:, :128])
    mlp.up.multiply(q, both[:, 128:])
    mlp.down.multiply(mlp.down.quantise(both, **gate), y)
    return y


@pytest.mark.parametrize("swapped", [False, True])
def test_gate_and_up_of_two_gemms_are_written_side_by_side(swapped):
    x, _ = inputs()
    mlp = MLP()

    def call(x):
        if not swapped:
            return mlp(x)
        up = mlp.up(x)
        return mlp.down(torch.nn.functional.silu(mlp.gate(x)) * up)

    found, graphs = compiled(call, x)
    assert builders.same_bits(found.view(-1, K), by_hand(mlp, x.view(-1, K)))
    assert graphs.quantisers == {"plain": 1, "silu": 1}
    assert graphs.count(torch.ops.aten.empty.memory_format) == 2 and graphs.count(torch.ops.aten.clone.default) == 0


@pytest.mark.parametrize("read", ["gate", "up"])
def test_a_gate_or_up_that_anything_else_reads_stays_where_it_is(read):
    x, _ = inputs()
    mlp = MLP(read)
    found, graphs = compiled(mlp, x)
    assert same(found, mlp(x)) and graphs.quantisers == {"plain": 2}


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_one_graph_serves_every_m():
    mlp, graphs = MLP(), Graphs()
    _, w = inputs()

    def layer(x):
        total = x + x.flip(1)
        return mlp(torch.nn.functional.rms_norm(total, (K,), w, 1e-5)) + total

    call = torch.compile(layer, backend=graphs, fullgraph=True)
    for m in (3, 8, 21):
        x = torch.randn(m, K).bfloat16()
        torch._dynamo.mark_dynamic(x, 0, min=2, max=4096)  # raises if anything guards on it
        total = x + x.flip(1)
        assert builders.same_bits(call(x), by_hand(mlp, total, rms_norm=w, eps=1e-5) + total)
    assert graphs.quantisers == {"norm": 1, "silu": 1}


def test_a_size_that_only_the_values_tell_is_fused_too():
    x, w = torch.randn(9, K).bfloat16(), inputs()[1]
    keep = torch.arange(9) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found, graphs = compiled(lambda x, w, keep: quantised(norm(x[keep], w)), x, w, keep)
    assert same(found, quantised(x[keep], rms_norm=w, eps=1e-5)) and graphs.quantisers == {"norm": 1}


# ---- models ----------------------------------------------------------------------------------------------------------

SILU, TANH = {"silu_mul": True}, {"gelu_mul": "tanh"}
MODELS = {
    "Llama": ({}, SILU), "Qwen3": ({"bits": 8}, SILU), "Phi3": ({"activation": "int8_affine"}, SILU),
    "Gemma3Text": ({}, TANH),
}  # fmt: skip
"""What `quantize_` is given of each kind, and its gate."""


def tiny(name: str):
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        hidden_size=K, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=96, head_dim=32, pad_token_id=0,
    )  # fmt: skip
    if name == "Phi3":
        del sizes["head_dim"]
    torch.manual_seed(4)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for weight in (parameter for key, parameter in model.named_parameters() if "norm" in key):
        weight.copy_(weight + torch.randn_like(weight) / 8)
    jitgemm.nn.quantize_(model, **MODELS[name][0])
    return model


def with_prologues(model, gate):
    """A copy whose quantisers are told by hand to compute norms and gates."""

    def call(linear, x, **prologue):
        lhs = linear.quantise(x.reshape(-1, x.shape[-1]), **prologue)
        out = torch.empty((len(lhs[0]), linear.out_features), dtype=x.dtype)
        linear.multiply(lhs, out)
        return out.view(*x.shape[:-1], -1)

    def gated(mlp, x):
        both = [linear(x) for name, linear in mlp.named_children() if name in ("gate_proj", "up_proj", "gate_up_proj")]
        return call(mlp.down_proj, torch.cat(both, -1), **gate)

    model = copy.deepcopy(model)
    for layer in model.model.layers:
        mlp_norm = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        for norm, part in ((layer.input_layernorm, layer.self_attn), (mlp_norm, layer.mlp)):
            gain = norm.weight.float() + 1 if gate is TANH else norm.weight
            norm.forward = lambda x: x
            for name, linear in part.named_children():
                if isinstance(linear, jitgemm.nn.PackedLinear) and name not in ("o_proj", "down_proj"):
                    eps = norm.eps if gate is TANH else norm.variance_epsilon
                    linear.forward = partial(call, linear, rms_norm=gain, eps=eps)
        layer.mlp.forward = partial(gated, layer.mlp)
    return model


@pytest.mark.parametrize("name", [name for name in MODELS if name != "Llama"])
def test_a_model_of_plain_layers_gives_what_calls_with_prologues_give(name):
    model, gate = tiny(name), MODELS[name][1]
    ids = torch.arange(10)[None]
    found, graphs = compiled(lambda ids: model(ids, use_cache=False).logits, ids)
    assert builders.same_bits(found, with_prologues(model, gate)(ids, use_cache=False).logits)
    rest = {"plain": 1, "tanh" if gate is TANH else "silu": 1}
    # Gemma 3 has a norm ahead of the addition, too, in whose kernel that is.
    assert graphs.quantisers == ({"norm": 2} if name == "Gemma3Text" else {"norm": 1, "add": 1}) | rest


def test_generation_has_a_graph_for_prompts_and_one_for_tokens():
    """The first prompt has one of its own. eps is a constant if floats are."""
    transformers = pytest.importorskip("transformers")
    model, graphs = tiny("Llama").float(), Graphs()  # fp32: hardly any ties
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)

    def generated(m):
        cache.reset()
        given = {"past_key_values": cache, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        return model.generate(torch.arange(3, 3 + m)[None], **given, disable_compile=True)

    lengths = 3, 8, 15
    eager = [generated(m) for m in lengths]
    model.compile(backend=graphs, fullgraph=True)
    with torch._dynamo.config.patch(specialize_float=True):
        for m, tokens, count in zip(lengths, eager, (2, 3, 3)):
            assert torch.equal(generated(m), tokens) and tokens.shape == (1, m + 5)
            assert len(graphs.graphs) == count
    for graph in [*graphs.graphs]:
        graphs.graphs = [graph]
        assert graphs.quantisers == {"norm": 1, "add": 1, "plain": 1, "silu": 1}


# ---- inductor --------------------------------------------------------------------------------------------------------

UNLOADED = """
import sys, torch
import jitgemm
from torch._subclasses.fake_tensor import FakeTensorMode
jitgemm.quantize_activations(torch.ones(2, 64), torch.int8)
loaded = [name for name in sys.modules if name.startswith("torch._inductor")]
with FakeTensorMode():
    jitgemm.quantize_activations(torch.ones(2, 64), torch.int8)
print(loaded, "torch._inductor.fx_passes.post_grad" in sys.modules)
"""


def test_eager_and_fake_calls_load_no_passes_of_inductor():
    done = fresh_python(UNLOADED)
    assert (done.stdout.strip(), done.returncode) == ("[] False", 0), done.stderr


def forget(graph) -> None:
    for node in graph.nodes:
        if node.target is torch.ops.aten.rsqrt.default:
            del node.meta["val"]


seen: list[torch.fx.Graph] = []
SETTINGS = {
    "eager numerics leave no rounding out": ({"emulate_precision_casts": True}, "plain"),
    "the pattern matcher's switch": ({"pattern_matcher": False}, "plain"),
    "a custom pass that leaves nodes without shapes": ({"post_grad_custom_pre_pass": forget}, "plain"),
    "a custom pass ahead of ours": ({"post_grad_custom_pre_pass": lambda graph: seen.append(graph)}, "norm"),
}
"""Inductor's, and what quantisers compute."""


@pytest.mark.parametrize("name", SETTINGS)
def test_inductor_s_settings_and_custom_passes_are_kept_to(name):
    import torch._inductor.config as config

    settings, kind = SETTINGS[name]
    x, w = inputs()
    seen.clear()
    with config.patch(**settings):
        found, graphs = compiled(lambda x, w: (*quantised(norm(x, w)), *quantised(norm(x, w).flip(0))), x, w)
    assert graphs.quantisers[kind] == graphs.quantisers.total() - (kind == "norm") and len(seen) == ("ahead" in name)
    assert kind == "norm" or same(found[:2], quantised(norm(x, w)))


def test_a_size_as_a_factor_is_no_weight():
    graphs = Graphs()
    call = torch.compile(lambda x: quantised(x * x.shape[0]), backend=graphs, fullgraph=True, dynamic=True)
    for m in (3, 8):
        x = torch.randn(m, K).bfloat16()
        assert same(call(x), quantised(x * m))
    assert graphs.quantisers == {"plain": 1}


def key() -> str:
    """What inductor's keys hold of the pass."""
    import torch._inductor.config as config

    return config.save_config_portable()["unsafe_marked_cacheable_functions"]["jitgemm.graph.inductor"]


def test_a_producer_can_be_added_and_changes_the_keys_of_inductor_s_caches(monkeypatch):
    from jitgemm.graph import inductor, producers

    monkeypatch.setattr(inductor, "PRODUCERS", {target: list(all) for target, all in inductor.PRODUCERS.items()})
    x, w = inputs()
    call = lambda x, w: quantised(norm(x, w).flip(1).flip(1))
    _, graphs = compiled(call, x, w)
    assert graphs.quantisers == {"plain": 1}
    ours = key()

    def flipped(value):
        (once,) = value.args[:1]
        return producers.norm(once.args[0])

    inductor.add_producer(torch.ops.prims.rev.default, flipped)
    torch._dynamo.reset()
    found, graphs = compiled(call, x, w)
    assert graphs.quantisers == {"norm": 1} and same(found, quantised(x, rms_norm=w, eps=1e-5))
    assert key() != ours


def test_a_program_that_is_loaded_in_a_new_process_is_compiled_with_the_pass(tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, x, w):
            return quantised(norm(x, w))

    torch.export.save(torch.export.export(Layer(), inputs()), tmp_path / "program.pt2")
    code = f"""
import sys, torch
sys.path[:0] = {sys.path}
import jitgemm
layer = torch.export.load({str(tmp_path / "program.pt2")!r}).module()
from compiled_graphs import compiled, inputs
print(compiled(layer, *inputs())[1].quantisers)
"""
    done = fresh_python(code)
    assert done.stdout.strip() == "Counter({'norm': 1})", done.stderr


COMPILER = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler")


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=COMPILER), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layer_compiled_to_the_end_runs_no_kernels_but_ours(device):
    from torch._inductor.utils import run_and_get_code

    x, y = torch.randn(2, 5, K, device=device).bfloat16()
    w, mlp = inputs()[1].to(device), MLP().to(device)

    def call(x, y):
        total = x + y
        return mlp(torch.nn.functional.rms_norm(total, (K,), w, 1e-5)), total

    found, (code,) = run_and_get_code(torch.compile(call, fullgraph=True), x, y)
    assert same(found, (by_hand(mlp, x + y, rms_norm=w, eps=1e-5), x + y))
    assert sum(f"torch.ops.jitgemm.{op}.default(" in line for line in code.splitlines() for op in OPS) == 5
    assert not re.search(r"(cpp_fused|triton_(poi|red|per))_", code)


def test_warmup_knows_the_quantisers_of_a_compiled_model():
    from jitgemm.nn.warm.warm import kernels

    def quantisers(compiled: bool) -> set[tuple[bool, str]]:
        specs = [spec for spec, *_ in kernels(MLP(), 4, [torch.bfloat16], "h200", compiled)]
        return {(spec.rms_norm, spec.gate) for spec in specs if hasattr(spec, "rms_norm")}

    assert quantisers(False) == {(False, "")}
    assert quantisers(True) == {(False, ""), (True, ""), (False, "silu"), (False, "gelu"), (False, "gelu_tanh")}
