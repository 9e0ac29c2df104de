"""Graphs of the real vLLM as its backend has them compiled: what jitgemm's quantisers compute of them, and keys.

Needs vLLM on its CPU platform; scripts/vllm_contract.sh makes such an environment. Everything ahead of inductor's code
generator runs as on a GPU: vLLM's IR operators, its passes and inductor's.
"""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: scripts/vllm_contract.sh runs it")

from engines import load, vllm
from served_layers import BF16, CONFIGS, stored
from vllm import ir
from vllm.compilation.backends import VllmBackend
from vllm.compilation.passes.inductor_pass import InductorPass, pass_context
from vllm.config import CompilationConfig, CompilationMode, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.platforms import current_platform

from jitgemm.vllm import fusion

K, INNER, HEADS = 64, 128, 2
KERNELS = {"rsqrt": "norm", "exp": "silu", "sigmoid": "silu", "silu": "silu"}
"""What inductor makes a kernel of, by an operator that each has one of."""
PLAIN, ADD = torch.ops.jitgemm.quantize_activations.default, torch.ops.jitgemm.add_quantize_activations.default


def config_of(mode=CompilationMode.VLLM_COMPILE, **options) -> VllmConfig:
    """As for a GPU, but for the device: vLLM would not let its CPU platform compile so."""
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    config.compilation_config = CompilationConfig(mode=mode, custom_ops=["none"], backend="inductor", **options)
    return config


class Layer(torch.nn.Module):
    """A decoder layer from behind its attention to ahead of the next one, of vLLM's layers."""

    def __init__(self, checkpoint: dict):
        super().__init__()
        config, options = vllm.config(checkpoint), {"bias": False, "params_dtype": BF16}

        def given(name):
            return options | {"quant_config": config, "prefix": f"m.{name}"}

        self.o = RowParallelLinear(K, K, **given("o_proj"))
        self.gate_up = MergedColumnParallelLinear(K, [INNER, INNER], **given("gate_up_proj"))
        self.down = RowParallelLinear(INNER, K, **given("down_proj"))
        self.qkv = QKVParallelLinear(K, K // HEADS, HEADS, HEADS, **given("qkv_proj"))
        self.act, self.norms = SiluAndMul(), torch.nn.ModuleList(RMSNorm(K, dtype=BF16) for _ in range(3))
        alone, gates, heads = [()], [(0,), (1,)], [("q",), ("k",), ("v",)]
        for number, (layer, parts) in enumerate(
            zip((self.o, self.gate_up, self.down, self.qkv), (alone, gates, alone, heads))
        ):
            for part in parts:
                load(layer, stored(checkpoint, layer.output_size // len(parts), layer.input_size, number)[0], *part)
            layer.quant_method.process_weights_after_loading(layer)
        for norm in self.norms:
            norm.weight.data.copy_(torch.rand(K) + 0.5)

    def forward(self, attention, residual):
        x, residual = self.norms[0](self.o(attention)[0], residual)
        x = self.down(self.act(self.gate_up(x)[0]))[0]
        x, residual = self.norms[1](x, residual)
        return self.qkv(x)[0], residual

    def first(self, tokens):
        """What is ahead of the first attention: a norm without a residual."""
        return self.qkv(self.norms[2](tokens))[0], tokens


class Backend:
    """vLLM's backend with its passes and inductor's; without inductor's code, or with it."""

    def __init__(self, config: VllmConfig, codegen: bool = False) -> None:
        self.config, self.codegen, self.before, self.after = config, codegen, [], []

    def __call__(self, gm, inputs):
        from torch._inductor.compile_fx import compile_fx

        with set_current_vllm_config(self.config), pass_context(Range(1, 64)):
            backend = VllmBackend(self.config)
            backend.configure_post_pass()
            backend.pass_manager.fix_functionalization = lambda graph: None  # asks for operators of vLLM's library
            options = dict(backend.inductor_config)
            options["pre_grad_custom_pass"](gm.graph)  # which not every PyTorch calls by that key
            return compile_fx(gm, inputs, inner_compile=self.passed, config_patches={
                "enable_auto_functionalized_v2": False, current_platform.pass_key: options[current_platform.pass_key],
            })  # fmt: skip

    def passed(self, gm, inputs, **options):
        from torch._dynamo.utils import detect_fake_mode
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
        from torch._inductor.virtualized import V

        self.before.append(counted(gm.graph))
        if self.codegen:
            with pass_context(Range(1, 64)), torch._inductor.config.patch(force_disable_caches=True):
                made = compile_fx_inner(gm, inputs, **options)
            self.after.append(counted(gm.graph))
            return made
        with V.set_fake_mode(detect_fake_mode(inputs)), pass_context(Range(1, 64)):
            view_to_reshape(gm)
            post_grad_passes(gm, True)
        gm.recompile()
        self.after.append(counted(gm.graph))
        return make_boxed_func(gm.forward)


def counted(graph) -> Counter:
    """Of what computes norms, gates and quantises, how many of each there are."""
    found = Counter()
    for node in graph.find_nodes(op="call_function", target=PLAIN) + graph.find_nodes(op="call_function", target=ADD):
        parts = ["add"] * (node.target is ADD) + ["norm"] * (node.args[7] is not None) + ["silu"] * bool(node.args[6])
        found["-".join([*parts, "quantise"])] += 1
    for node in graph.nodes:
        name = getattr(node.target, "_opname", "")
        if getattr(node.target, "namespace", "") == "vllm_ir" or name in KERNELS:
            found[KERNELS.get(name, name)] += 1
    return found


def compiled(config, call, *inputs, **options):
    """(what it gives, what is counted ahead of the passes, and behind them), of a graph for any number of tokens."""
    backend = Backend(config, **options)
    torch._dynamo.reset()
    for each in inputs:
        torch._dynamo.mark_dynamic(each, 0)
    with torch.no_grad(), set_current_vllm_config(config), ir.enable_torch_wrap(True):
        graph = torch.compile(call, backend=backend, fullgraph=True, dynamic=False)
        found = graph(*inputs)
        fewer = graph(*(each[:2] for each in inputs))
    assert all(torch.equal(each[:2], row) for each, row in zip(found, fewer))
    [before], [after] = backend.before, backend.after
    return found, before, after


def layer_under(config, name="packed"):
    with vllm.rank(), set_current_vllm_config(config):
        return Layer(CONFIGS[name])


def inputs():
    torch.manual_seed(3)
    return torch.randn(5, K, dtype=BF16), torch.randn(5, K, dtype=BF16)


@torch.no_grad()
def by_hand(layer, attention, residual):
    """The same by jitgemm's own calls."""

    def linear(each, lhs, m):
        module = each.jitgemm
        out = torch.empty(m, module.out_features, dtype=BF16)
        module.multiply(lhs, out)
        return out

    def norm(x, residual, norm, each):
        total = x + residual
        return each.jitgemm.quantise(total, rms_norm=norm.weight, eps=norm.variance_epsilon), total

    m = len(attention)
    x = linear(layer.o, layer.o.jitgemm.quantise(attention), m)
    lhs, residual = norm(x, residual, layer.norms[0], layer.gate_up)
    both = linear(layer.gate_up, lhs, m)
    x = linear(layer.down, layer.down.jitgemm.quantise(both, silu_mul=True), m)
    lhs, residual = norm(x, residual, layer.norms[1], layer.qkv)
    return linear(layer.qkv, lhs, m), residual


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.parametrize("name, codegen", [
    *((name, False) for name in ("packed", "packed-int8", "fp8", "float-quantized")),
    pytest.param("packed", True, marks=needs_compiler),
])  # fmt: skip
def test_norms_with_their_residuals_and_gates_are_computed_by_quantisers(name, codegen):
    """Inductor's code gives the same bits."""
    config = config_of()
    layer = layer_under(config, name)
    found, before, after = compiled(config, layer, *inputs(), codegen=codegen)
    assert before == {"quantise": 4, "fused_add_rms_norm": 2, "silu": 1} or codegen
    assert after == {"quantise": 1, "add-norm-quantise": 2, "silu-quantise": 1}
    expected = by_hand(layer, *inputs())
    assert all(map(torch.equal, found, expected))
    with torch.no_grad(), set_current_vllm_config(config):
        eager = layer(*inputs())
    for each, other in zip(found, eager):
        assert (each.double() - other.double()).norm() < 0.05 * other.double().norm()


def test_a_norm_without_a_residual_is_too():
    config = config_of()
    layer = layer_under(config)
    tokens, _ = inputs()
    found, before, after = compiled(config, layer.first, tokens)
    assert (before, after) == ({"quantise": 1, "rms_norm": 1}, {"norm-quantise": 1})
    norm = layer.norms[2]
    lhs = layer.qkv.jitgemm.quantise(tokens, rms_norm=norm.weight.detach(), eps=norm.variance_epsilon)
    out = torch.empty_like(found[0])
    layer.qkv.jitgemm.multiply(lhs, out)
    assert torch.equal(found[0], out)


def test_a_norm_that_something_else_reads_stays_vllms():
    config = config_of()
    layer = layer_under(config)

    def call(attention, residual):
        x, residual = layer.norms[0](attention, residual)
        return layer.qkv(x)[0], x.sum(-1), residual

    found, before, after = compiled(config, call, *inputs())
    assert before == {"quantise": 1, "fused_add_rms_norm": 1} and after == {"quantise": 1, "norm": 1}
    with torch.no_grad(), set_current_vllm_config(config):
        assert all(map(torch.equal, found, call(*inputs())))


def test_a_norm_that_vllm_sums_over_ranks_is_left_to_it(monkeypatch):
    class Reduced:
        target = torch.ops.vllm.all_reduce.default

    node = type("", (), {"args": (Reduced, "weight", 1e-6)})
    assert fusion._norm(node) is not None
    config = config_of()
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    monkeypatch.setattr(fusion, "_reduced", False)
    assert fusion.install(config.compilation_config) and fusion._norm(node) is None


def test_vllms_key_tells_versions_of_the_pass_apart(monkeypatch):
    def key():
        config = config_of()
        made_before = config.compilation_config.compute_hash()
        layer_under(config)
        return made_before, config.compilation_config.compute_hash()

    (without, mine), again = key(), key()
    assert without != mine and again == (without, mine)
    monkeypatch.setattr(fusion.QuantiserPass, "uuid", lambda self: "another version")
    assert key()[1] not in (without, mine)


def test_a_pass_of_the_users_still_runs():
    seen = []

    class Mine(InductorPass):
        def __call__(self, graph):
            seen.append(counted(graph))

    config = config_of(inductor_compile_config={current_platform.pass_key: Mine()})
    layer = layer_under(config)
    _, _, after = compiled(config, layer, *inputs())
    assert after["add-norm-quantise"] == 2 and [each["add-norm-quantise"] for each in seen] == [2]
    found = config.compilation_config.inductor_compile_config[current_platform.pass_key]
    assert Mine().uuid() in found.uuid()


def test_a_model_that_vllm_does_not_compile_is_left_alone():
    config = config_of(CompilationMode.NONE)
    layer = layer_under(config)
    assert current_platform.pass_key not in config.compilation_config.inductor_compile_config
    assert not layer.qkv.quant_method.config.warmer.compiled
    other = config_of()
    assert layer_under(other).qkv.quant_method.config.warmer.compiled
