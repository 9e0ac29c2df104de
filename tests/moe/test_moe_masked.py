"""fused_experts_masked, the layer over tokens sorted by expert: by its definition, its checks, its kernels, on a
GPU."""

from __future__ import annotations

from dataclasses import replace

import builders
import pytest
import torch
from moe_cases import MODES, Case, by_definition

import jitgemm
from jitgemm.activations.arguments import activation_of
from jitgemm.activations.kernel import QuantizeSpec, quantize_source, quantize_spec
from jitgemm.activations.run import QuantizeCall, quantize
from jitgemm.activations.scheme import SILU_MUL, Prologue
from jitgemm.jit.cache import KernelCache
from jitgemm.moe.kernel import layer_specs
from jitgemm.moe.masked import fused_experts_masked

E4M3 = torch.float8_e4m3fn
COUNTS = (3, 0, 5, 1)


def sorted_tokens(case: Case, max_m: int, counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """x [experts, max_m, k] with NaN in rows of nobody, and masked_m."""
    x = torch.full((case.experts, max_m, case.k), float("nan"), dtype=case.dtype)
    for e, count in enumerate(counts):
        x[e, :count] = torch.randn((count, case.k), generator=builders.generator(e)).to(case.dtype) * case.scale
    return x.to(case.device), torch.tensor(counts, dtype=torch.int32, device=case.device)


def called(case: Case, x, masked_m: torch.Tensor, **options) -> torch.Tensor:
    """The call's result, 7 in rows that it left alone."""
    tokens = x[0] if isinstance(x, tuple) else x
    out = torch.full((*tokens.shape[:2], case.n), 7.0, dtype=case.dtype, device=case.device)
    _, w13, w2, *_ = case.arguments
    fused_experts_masked(x, w13, w2, out, masked_m, 2, **case.options, **options)
    return out


def expected(case: Case, x: torch.Tensor) -> list[torch.Tensor]:
    """What each expert makes of its live rows, one token after the other."""
    found = []
    for e, count in enumerate(COUNTS):
        ids, ones = torch.full((count, 1), e), torch.ones(count, 1)
        found.append(by_definition(case, x=x[e, :count], topk_ids=ids, topk_weights=ones))
    return found


GATES = {
    "gpt-oss": {"activation": "swiglu_oai", "order": "interleaved", "limit": 7.0},
    "relu2": {"activation": "relu2"},
    "situ": {"activation": "situ", "alpha": 4.0, "limit": 2.0},
}


@pytest.mark.parametrize(
    "mode, scheme, bits, gate",
    [
        each
        for each in builders.third(MODES, ["token", "block", "rotated"], [4, 8], GATES)
        if each[:2] != ("s8z", "block")
    ],
)
def test_each_expert_gets_its_live_rows_and_no_others(mode, scheme, bits, gate):
    options = GATES[gate] | ({"rotation": 128} if scheme == "rotated" else {"scheme": scheme})
    options |= {"bias13": torch.randn(4, 128 if gate == "relu2" else 256), "bias2": torch.randn(4, 72)}
    scale = 4.0 if bits == 4 else 0.1  # weights of 8 bits are some sixteen times as large
    sizes = dict(experts=4, k=256 if scheme == "rotated" else 208, inter=128, group_size=32)
    case = Case(**sizes, mode=mode, bits=bits, scale=scale, options=options)
    x, masked_m = sorted_tokens(case, 6, COUNTS)
    out = called(case, x, masked_m)
    for e, wanted in enumerate(expected(case, x)):
        live = out[e, : COUNTS[e]].double()
        assert (live - wanted).abs().max() <= 2e-3 * wanted.abs().max() if len(wanted) else True
        assert bool((out[e, COUNTS[e] :] == 7).all())


def test_quantised_tokens_have_been_rotated_before():
    case = Case(experts=4, k=256, inter=128, options={"rotation": 128})
    x, masked_m = sorted_tokens(case, 6, COUNTS)
    lhs = jitgemm.quantize_activations(x, torch.int8, rotation=128)
    assert builders.same_bits(called(case, lhs, masked_m), called(case, x, masked_m))


@pytest.mark.parametrize("scheme", ["token", "block"])
def test_quantised_tokens_are_taken_as_they_come(scheme):
    """DeepEP sends e4m3 with a scale for each token and 128 k, columns of scales first."""
    case = Case(experts=4, k=256, inter=128, mode="e4m3", dtype=torch.bfloat16, options={"scheme": scheme})
    x, masked_m = sorted_tokens(case, 6, COUNTS)
    q, scale = jitgemm.quantize_activations(x.nan_to_num(), E4M3, scheme=scheme)
    found = called(case, (q, scale), masked_m)
    values = q.float() * (scale[..., None] if scheme == "token" else scale.repeat_interleave(128, 2))
    assert torch.equal(found, called(case, values, masked_m))  # codes of what codes stand for are the same codes
    for e, wanted in enumerate(expected(case, x)):
        assert (found[e, : COUNTS[e]].double() - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.parametrize("max_m, experts", [(0, 3), (4, 1)])
def test_the_smallest_sizes(max_m, experts):
    case = Case(experts=experts)
    x, masked_m = sorted_tokens(case, max_m, (min(max_m, 2),) * experts)
    out = called(case, x, masked_m)
    assert out.shape == (experts, max_m, case.n) and not bool((out[:, :2] == 7).any())


@pytest.mark.parametrize("name, change, message", [
    ("x", lambda x: x[:, :, :32], r"x: expected shape \[rows, 64\], got \[30, 32\]"),
    ("x", lambda x: x[:3], r"x: expected shape \[5, 6, 64\], got \[3, 6, 64\]"),
    ("x", lambda x: (x, x[..., 0]), "x: expected int8, got float32"),
    ("x", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "x: expected strides of a view of all rows"),
    ("masked_m", lambda m: m.long(), "masked_m: expected int32, got int64"),
    ("masked_m", lambda m: m[:4], r"masked_m: expected .*5"),
    ("x", lambda x: x.clone().requires_grad_(), "x: expected a tensor that does not require grad"),
    ("out", lambda out: out[:, :5], r"out: expected shape \[5, 6, 72\], got \[5, 5, 72\]"),
    ("out", lambda out: out.double(), "out: expected .*float64"),
    ("out", lambda out: out.clone().requires_grad_(), "out: expected a tensor that does not require grad"),
])  # fmt: skip
def test_what_is_wrong_is_named_before_anything_is_written(name, change, message):
    case = Case()
    x, masked_m = sorted_tokens(case, 6, (1, 2, 3, 4, 5))
    _, w13, w2, *_ = case.arguments
    given = {"x": x.nan_to_num(), "w13": w13, "w2": w2, "out": torch.full((5, 6, 72), 7.0), "masked_m": masked_m}
    given[name] = change(given[name])
    with pytest.raises((TypeError, ValueError), match=message):
        fused_experts_masked(*given.values(), 2, **case.options)
    assert bool((given["out"] == 7).all())


# ---- kernels --------------------------------------------------------------------------------------------------------


def masked_specs(k: int, inter: int, **options) -> list[QuantizeSpec]:
    found = layer_specs(k, inter, "bf16", "e4m3", SILU_MUL, masked=True, **options)
    return [spec for spec in found if isinstance(spec, QuantizeSpec) and spec.masked]


def test_the_kernels_of_a_layer_are_listed():
    assert masked_specs(4096, 1536) == [
        quantize_spec(4096, "bf16", "e4m3", masked=True),
        quantize_spec(1536, "bf16", "e4m3", masked=True, gate=SILU_MUL),
    ]
    assert {spec.label for spec in masked_specs(4096, 1536, block=True)} == {
        "quantize-bf16-e4m3-block-masked-v4", "quantize-bf16-e4m3-silumul-block-masked-v2",
    }  # fmt: skip
    plain = layer_specs(4096, 1536, "bf16", "e4m3", SILU_MUL)
    assert not any(isinstance(spec, QuantizeSpec) and spec.masked for spec in plain)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> KernelCache:
    return KernelCache([tmp_path_factory.mktemp("kernels")])


@pytest.mark.nvrtc
@pytest.mark.parametrize("block", [False, True])
def test_compiles_for_sm_90a_without_spills(cache, block):
    for k, inter in ((256, 256), (7168, 2048), (40960, 20480)):
        for spec in masked_specs(k, inter, block=block):
            entry, compiled = cache.get_or_compile(quantize_source(spec))
            assert compiled and " 0 bytes spill" in entry.metadata["log"], spec.label


WAYS = [(mode, scheme) for mode in MODES for scheme in ("token", "block") if (mode, scheme) != ("s8z", "block")]


@pytest.mark.gpu
@pytest.mark.parametrize("way, sizes, bits", builders.third(WAYS, [(272, 48), (2048, 768), (7168, 2048)], [4, 8]))
def test_a_gpu_agrees_with_the_cpu(way, sizes, bits):
    (mode, scheme), (k, inter) = way, sizes
    experts, max_m = 9, 300
    counts = (0, 300, 1, 17, 128, 299, 0, 64, 5)
    sizes = dict(experts=experts, k=k, inter=inter, n=256, mode=mode, group_size=32, bits=bits, dtype=torch.bfloat16)
    case = Case(**sizes)
    case.options["scheme"] = scheme
    x, masked_m = sorted_tokens(case, max_m, counts)
    wanted = called(case, x, masked_m)
    gpu = Case(**sizes, device="cuda")
    gpu.options["scheme"] = scheme
    x, masked_m = x.cuda(), masked_m.cuda()
    out = called(gpu, x, masked_m).cpu()
    for e, count in enumerate(counts):
        assert bool((out[e, count:] == 7).all())
        if count:
            difference = (out[e, :count].double() - wanted[e, :count].double()).norm()
            assert difference < 0.01 * wanted[e, :count].double().norm(), e


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes, block, gate",
    builders.third(
        [(48, 0), (512, 0), (4096, 0), (40960, 0), (384, 128), (4096, 128)], [False, True], [None, SILU_MUL]
    ),
)
def test_the_masked_quantiser_writes_live_rows_alone_with_the_bits_of_the_plain_one(sizes, block, gate):
    k, rotation = sizes
    counts, max_m = (0, 7, 1, 40, 39, 3), 40
    x = torch.randn(len(counts) * max_m, k * (2 if gate else 1), dtype=torch.bfloat16, device="cuda")
    activation = activation_of(E4M3, "block" if block else "token", False, rotation=rotation)
    inputs = QuantizeCall(x, activation, Prologue(gate=gate))
    q, scale, _ = quantize(inputs)
    outputs = inputs.new_outputs()
    outputs[0].view(torch.uint8).fill_(0x5B)
    outputs[1].fill_(-1)
    quantize(replace(inputs, row_count=torch.tensor(counts, dtype=torch.int32, device="cuda"), out=outputs))
    for e, count in enumerate(counts):
        live = slice(e * max_m, e * max_m + count)
        dead = slice(e * max_m + count, (e + 1) * max_m)
        assert torch.equal(outputs[0][live].view(torch.uint8), q[live].view(torch.uint8))
        assert torch.equal(outputs[1][live], scale[live])
        assert bool((outputs[0][dead].view(torch.uint8) == 0x5B).all()) and bool((outputs[1][dead] == -1).all())


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_numbers_of_rows():
    case = Case(experts=4, k=256, inter=128, n=256, mode="e4m3", dtype=torch.bfloat16, device="cuda")
    x, masked_m = sorted_tokens(case, 32, (32,) * 4)
    called(case, x, masked_m)  # compiles and loads
    out = torch.full((4, 32, 256), 7.0, dtype=torch.bfloat16, device="cuda")
    _, w13, w2, *_ = case.arguments
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_experts_masked(x, w13, w2, out, masked_m, 2, **case.options)
    for counts in ((1, 0, 32, 7), (32, 31, 0, 0)):
        out.fill_(7)
        masked_m.copy_(torch.tensor(counts))
        graph.replay()
        whole = called(case, x, masked_m)
        assert torch.equal(out, whole) and bool((out[0, counts[0] :] == 7).all())
