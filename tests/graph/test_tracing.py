"""What PyTorch's tracers make of the layers and the calls: one graph for every number of tokens m, no guard on it, and
the bits of eager calls.

A row of the matrix is a kind of call, a test is a kind of tracer. Those marked `gpu` need a GPU; what only its tensors
have (addresses, streams) is asked for on fake ones, too, which every machine has.
"""

from __future__ import annotations

import copy
import functools
import io
import shutil
from collections.abc import Callable, Iterable

import builders
import pytest
import torch
import torch._functorch.config
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import silu

import jitgemm
import jitgemm.nn
from jitgemm.gemm.grouped import rows_of_m_indices
from jitgemm.gemm.int8_out import gemm_w4a8_int8_nt
from jitgemm.moe.masked import fused_experts_masked

E, K, N = 4, 128, 256
"""Experts, and widths of the calls, which m takes in turn: a comparison of m with one of them must put no guard on
it."""
E4M3 = torch.float8_e4m3fn


# ---- the calls -------------------------------------------------------------------------------------------------------


def linear(n: int = N, k: int = K, kind: type = jitgemm.nn.W4A8Linear, **options) -> jitgemm.nn.PackedLinear:
    return kind.from_linear(torch.nn.Linear(k, n, dtype=torch.bfloat16), **options)


def permuted() -> jitgemm.nn.PackedLinear:
    parts = builders.weight_parts(1, N, K, 32, zero_point=True)
    order = torch.randperm(K, generator=builders.generator(1))
    weight = jitgemm.pack_w4(parts.q, parts.scale, parts.zero, permutation=order, group_size=32)
    return jitgemm.nn.W4A8Linear(weight, input_scale=torch.tensor([0.01]))


def corrected() -> jitgemm.nn.W4A8Linear:
    parts = builders.weight_parts(1, N, K, 32, zero_point=True)
    form = {"group_size": 32, "lhs_dtype": torch.int8, "correction": True}
    return jitgemm.nn.W4A8Linear(jitgemm.pack_w4(parts.q, parts.scale, parts.zero, **form), activation="int8")


def in_f16(layer: torch.nn.Module) -> torch.nn.Module:
    layer.sums = "f16"
    return layer


class MLP(torch.nn.Module):
    def __init__(self, make: Callable[[int, int], torch.nn.Module] = linear):
        super().__init__()
        self.gate, self.up, self.down = make(N, K), make(N, K), make(K, N)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


def stacked(n: int, k: int, kind: type = jitgemm.W4Weight, **form) -> jitgemm.W4Weight | jitgemm.W8Weight:
    return kind.stacked(E, lambda e: builders.weight_parts(e, n, k, **form).packed)


class Experts(torch.nn.Module):
    """A router and a layer of experts."""

    def __init__(self, bits: int = 4, activation: str = "e4m3", sums: str = "f32", **form):
        super().__init__()
        form |= {} if bits == 4 else {"kind": jitgemm.W8Weight, "bits": 8, "codes": "e4m3"}
        kind = jitgemm.nn.W4A8Experts if bits == 4 else jitgemm.nn.W8A8Experts
        self.experts = kind(stacked(2 * N, K, **form), stacked(K, N, **form), activation=activation)
        self.experts.sums = sums
        self.router = linear(2 * E)  # choices of the other half are skipped

    def forward(self, x):
        weights, ids = self.router(x).float().softmax(-1).topk(2)
        return self.experts(x, ids, weights)


class Call(torch.nn.Module):
    """call(x, *parts), of weights and other tensors."""

    def __init__(self, call: Callable[..., object], *parts: jitgemm.W4Weight | torch.Tensor):
        super().__init__()
        self.call, self.parts = call, parts

    def forward(self, x):
        return self.call(x, *self.parts)

    def _apply(self, fn, recurse=True):
        self.parts = tuple(
            part.with_tensors(*(None if each is None else fn(each) for each in tensors(part)))
            if isinstance(part, jitgemm.W4Weight) else fn(part)
            for part in self.parts
        )  # fmt: skip
        return self


def tensors(weight: jitgemm.W4Weight) -> tuple[torch.Tensor | None, ...]:
    return weight.blocks, weight.channel_scale, weight.row_sum, weight.permutation


def new(x: torch.Tensor, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=x.device)


def gemm(x, weight, bias):
    out = new(x, x.shape[0], N)
    jitgemm.gemm_w4a8_bf16_nt(jitgemm.quantize_activations(x, E4M3), weight, out, bias=bias)
    return out


def gemm_into_columns(x, weight):
    out = new(x, x.shape[0], 2 * N)
    jitgemm.gemm_w4a8_bf16_nt(jitgemm.quantize_activations(x, E4M3, scheme="block"), weight, out[:, N:])
    return out


def gemm_to_fp32(x, weight):
    out = new(x, x.shape[0], N, dtype=torch.float32)
    lhs = jitgemm.quantize_activations(x, torch.int8, affine=True)
    jitgemm.gemm_w4a8_nt(lhs, weight, out, batch_invariant=True)
    return out


def to_int8(x, weight):
    return gemm_w4a8_int8_nt(jitgemm.quantize_activations(x, torch.int8, affine=True), weight)


def quantise_into(x):
    m = x.shape[0]
    columns = torch.empty_strided((m, 1), (1, 4 * ((m + 3) // 4)), dtype=torch.float32, device=x.device)
    out = new(x, m, K, dtype=torch.int8), columns
    gates = x.repeat(1, 2)
    gated = jitgemm.quantize_activations(gates, torch.int8, gelu_mul="tanh")
    rotated = tuple(jitgemm.quantize_activations(x, torch.int8, affine=True, rotation=128))
    return jitgemm.quantize_activations(x, torch.int8, scheme="block", out=out), gated, rotated


def quantise_with_sums(x, weight):
    correction = "bf16", 32
    first = jitgemm.quantize_activations(x, torch.int8, correction=correction)
    return first, jitgemm.quantize_activations(x, torch.int8, rms_norm=weight, residual=x + 1, correction=correction)


def add_and_normalise(x, weight):
    total = x + 1
    *lhs, total = jitgemm.quantize_activations(x, E4M3, rms_norm=weight, residual=total, residual_out=total)
    return lhs, total


def contiguous(x, weight, offsets):
    out, order = new(x, x.shape[0], N), torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    lhs = jitgemm.quantize_activations(x, torch.int8)
    jitgemm.m_grouped_gemm_w4a8_nt_contiguous(lhs, weight, out, offsets, row_index=order)
    return out


def deep_gemm_s_rows(x, weight):
    of = torch.arange(x.shape[0], dtype=torch.int32, device=x.device) // 100
    out, lhs = new(x, x.shape[0], N), jitgemm.quantize_activations(x, torch.int8)
    hint = 2 * x.shape[0] / E
    jitgemm.m_grouped_gemm_w4a8_nt_contiguous(lhs, weight, out, rows_of_m_indices(of, E), expected_m=hint)
    return out


def masked(x, weight, masked_m):
    out, lhs = new(x, *x.shape[:2], N), jitgemm.quantize_activations(x, torch.int8)
    jitgemm.m_grouped_gemm_w4a8_nt_masked(lhs, weight, out, masked_m, x.shape[1])
    return out


def experts(x, w13, w2, expert_map):
    tokens = x.shape[0]
    ids = torch.arange(2 * tokens, device=x.device).view(tokens, 2) % 8
    out, weights = new(x, tokens, K), new(x, tokens, 2) + 0.5
    gate = {"activation": "swiglu_oai", "order": "interleaved", "limit": 7.0}
    return jitgemm.fused_experts(x, w13, w2, ids, weights, expert_map=expert_map, addend=x, out=out, **gate)


def masked_experts(x, w13, w2, masked_m):
    out = new(x, *x.shape)
    fused_experts_masked(x, w13, w2, out, masked_m, x.shape[1] / 2, activation="gelu")
    return out


def quantised_masked_experts(x, w13, w2, masked_m):
    out, lhs = new(x, *x.shape), jitgemm.quantize_activations(x, E4M3, scheme="block")
    fused_experts_masked(lhs, w13, w2, out, masked_m, 2.5)
    return out


def offsets() -> torch.Tensor:
    return torch.tensor([0, 2, 2, 5, 7])


def counts() -> torch.Tensor:
    return torch.tensor([3, 0, 5, 1], dtype=torch.int32)


def dense(**form) -> jitgemm.W4Weight:
    return builders.weight_parts(1, N, K, **form).packed


def both() -> tuple[jitgemm.W4Weight, jitgemm.W4Weight]:
    return stacked(2 * N, K), stacked(K, N)


M = -1
ROWS, TOKENS, BATCH = (M, K), (E, M, K), (2, M, K)
"""Shapes of x with m in it."""

CALLS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "W4A8Linear": (linear, ROWS),
    "W4A8Linear, 3 dimensions": (linear, BATCH),
    "W4A8Linear, affine": (lambda: linear(activation="int8_affine", group_size=32, symmetric=False), ROWS),
    "W4A8Linear, permuted": (permuted, ROWS),
    "W4A8Linear, zero points": (lambda: linear(group_size=32, symmetric=False), ROWS),
    "W4A8Linear, corrected": (corrected, ROWS),
    "W4A8Linear, sums in f16": (lambda: in_f16(linear(group_size=32)), ROWS),
    "W4A8Linear, two levels": (
        lambda: jitgemm.nn.W4A8Linear.from_linear(torch.nn.Linear(K, N, dtype=torch.bfloat16), scheme="two-level"), ROWS
    ),
    "W8A8Linear": (lambda: linear(kind=jitgemm.nn.W8A8Linear), ROWS),
    "W8A8Linear, blocks": (lambda: linear(kind=jitgemm.nn.W8A8Linear, activation="e4m3_block", block=128), ROWS),
    "gated MLP": (MLP, ROWS),
    "W4A8Experts": (Experts, ROWS),
    "W4A8Experts, sums in f16": (lambda: Experts(sums="f16", group_size=32), ROWS),
    "W8A8Experts": (lambda: Experts(8, "e4m3_block"), ROWS),
    "gemm": (lambda: Call(gemm, dense(), builders.bias(1, N)), ROWS),
    "gemm into columns": (lambda: Call(gemm_into_columns, dense(group_size=32)), ROWS),
    "gemm to fp32": (lambda: Call(gemm_to_fp32, dense(group_size=0, offset=False, zero_point=True)), ROWS),
    "gemm to int8": (lambda: Call(to_int8, dense()), ROWS),
    "quantise into": (lambda: Call(quantise_into), ROWS),
    "quantise with sums": (lambda: Call(quantise_with_sums, torch.ones(K)), ROWS),
    "add and normalise": (lambda: Call(add_and_normalise, torch.ones(K)), ROWS),
    "contiguous": (lambda: Call(contiguous, stacked(N, K), offsets()), ROWS),
    "DeepGEMM's rows": (lambda: Call(deep_gemm_s_rows, stacked(N, K)), ROWS),
    "masked": (lambda: Call(masked, stacked(N, K), counts()), TOKENS),
    "fused_experts": (lambda: Call(experts, *both(), torch.tensor([0, -1, 1, 2, 3, -1, -1, 9], dtype=torch.int32)), ROWS),
    "fused_experts_masked": (lambda: Call(masked_experts, *both(), counts()), TOKENS),
    "fused_experts_masked, quantised": (lambda: Call(quantised_masked_experts, *both(), counts()), TOKENS),
}  # fmt: skip


@functools.cache
def made(name: str, device: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return CALLS[name][0]().eval().requires_grad_(False).to(device)


def inputs(name: str, m: int, device: str) -> torch.Tensor:
    shape = [m if size == M else size for size in CALLS[name][1]]
    return torch.randn(shape, generator=builders.generator(m)).to(torch.bfloat16).to(device)


def dim(name: str) -> int:
    return CALLS[name][1].index(M)


def leaves(result: object) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(result)


def assert_same(found: object, expected: object) -> None:
    pairs = list(zip(leaves(found), leaves(expected), strict=True))
    assert pairs and all(builders.same_bits(*pair) for pair in pairs)


@pytest.fixture(autouse=True)
def without_gradients():
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


SOME = ("W4A8Linear", "gated MLP", "W4A8Experts", "masked")


def calls(names: Iterable[str]) -> pytest.MarkDecorator:
    """Of these names on the CPU, and of some on a GPU: a tracer runs the same Python for both."""
    on_gpu = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in names if name in SOME]
    return pytest.mark.parametrize(("name", "device"), [*((name, "cpu") for name in names), *on_gpu])


every_call, some_calls = calls(CALLS), calls(SOME)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def graphs_of(
    name: str, device: str, *sizes: int, backend: str, mark: Callable = lambda x, dim: None, **options
) -> int:
    """How many graphs a compiler makes for these m; each call has the eager bits."""
    module = made(name, device)
    compiled = torch.compile(module, backend=backend, fullgraph=True, **options)
    for m in sizes:
        x = inputs(name, m, device)
        expected = module(x)
        mark(x, dim(name))
        assert_same(compiled(x), expected)
    return counters["stats"]["unique_graphs"]


@some_calls
def test_a_second_m_makes_the_last_graph(name, device):
    assert graphs_of(name, device, 7, N, K, backend="eager") == 2


@every_call
def test_the_graph_is_for_all_m_within_bounds(name, device):
    """Dynamo raises if anything guards on a size with bounds."""
    bounds = functools.partial(torch._dynamo.mark_dynamic, min=2, max=2**40)
    assert graphs_of(name, device, 7, N, 2, 1030, backend="aot_eager", mark=bounds) == 1


@every_call
def test_one_graph_serves_an_m_that_no_tracer_knows(name, device):
    """Dynamo raises if anything asks about a size that it has no number for."""
    assert graphs_of(name, device, 7, 1, N, backend="aot_eager", mark=torch._dynamo.decorators.mark_unbacked) == 1


INDUCTOR = ("gated MLP", "W4A8Experts")


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler")
@calls(INDUCTOR)
def test_inductor_and_the_pass_over_its_graphs_put_no_guard_on_m(name, device):
    module = made(name, device)
    compiled = torch.compile(module, fullgraph=True)
    for m in (7, N, K, 2, 1030):
        x = inputs(name, m, device)
        expected = module(x).float()
        torch._dynamo.mark_dynamic(x, dim(name), min=2, max=4096)
        assert (compiled(x).float() - expected).norm() <= 0.05 * expected.norm()
    assert counters["stats"]["unique_graphs"] == 1


# ---- torch.export ----------------------------------------------------------------------------------------------------


@every_call
def test_an_exported_program_takes_every_m(name, device):
    assert_exports(name, device, strict=False)


@some_calls
def test_so_does_one_that_dynamo_exported(name, device):
    assert_exports(name, device, strict=True)


def assert_exports(name: str, device: str, strict: bool) -> None:
    module, sizes = made(name, device), {dim(name): torch.export.Dim("m", min=2)}
    program = torch.export.export(module, (inputs(name, 8, device),), dynamic_shapes=(sizes,), strict=strict)
    assert [(each.lower, each.upper > 2**62) for each in program.range_constraints.values()] == [(2, True)]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for each in (program, program.run_decompositions(), torch.export.load(file)):
        run = each.module()
        for m in (2, N):
            x = inputs(name, m, device)
            assert_same(run(x), module(x))
    assert_same(module(x), copy.deepcopy(module)(x))  # the module itself is what it was


# ---- make_fx and fake tensors ----------------------------------------------------------------------------------------


@every_call
def test_make_fx_takes_every_m(name, device):
    module, x = made(name, device), inputs(name, 7, device)
    graph = make_fx(lambda x: module(x), tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    for m in (7, N):
        x = inputs(name, m, device)
        assert_same(graph(x), module(x))
    (placeholder,) = graph.graph.find_nodes(op="placeholder")
    m = placeholder.meta["val"].shape[dim(name)].node.expr
    assert not [guard.expr for guard in graph.shape_env.guards if m in guard.expr.free_symbols]


def test_vmap_names_the_op_that_it_cannot_batch():
    with pytest.raises(RuntimeError, match="jitgemm::gemm_w4a8_nt"):
        torch.vmap(made("W4A8Linear", "cpu"))(inputs("W4A8Linear, 3 dimensions", 5, "cpu"))


NEED_A_DRIVER = (
    "gemm into columns", "quantise into", "add and normalise", "DeepGEMM's rows", "fused_experts",
)  # fmt: skip
"""PyTorch indexes and copies a GPU's tensors, fake ones too, where it finds a GPU."""


@pytest.mark.parametrize("how", ["called", "exported"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gpu] if name in NEED_A_DRIVER else []) for name in CALLS]
)
def test_fake_tensors_of_a_gpu_are_asked_for_no_address(name, how):
    """As torch.export forbids it. A model that is moved there has buffers that are fake, too."""
    real, forbid = copy.deepcopy(made(name, "cpu")), {"fake_tensor_allow_unsafe_data_ptr_access": False}
    with torch._functorch.config.patch(forbid), FakeTensorMode(allow_non_fake_inputs=True):
        module = real._apply(lambda tensor: torch.empty_like(tensor, device="cuda"))
        x = torch.empty_like(inputs(name, 7, "cpu"), device="cuda")
        found = module(x)
    if how == "exported":
        sizes = {dim(name): torch.export.Dim("m", min=2)}
        program = torch.export.export(module, (x,), dynamic_shapes=(sizes,), strict=False)
        found = [node.meta["val"] for node in program.graph.output_node().args[0]]
    assert all(each.device == x.device for each in leaves(found))
