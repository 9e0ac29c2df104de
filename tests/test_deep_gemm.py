"""DeepGEMM's names: its order of arguments, pairs that are packed once, and what is refused."""

from __future__ import annotations

import gc
import inspect
import json
import re
from pathlib import Path

import builders
import pytest
import torch
from builders import same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import jitgemm
from jitgemm import deep_gemm
from jitgemm.gemm.e8m0 import fp32_scales
from jitgemm.gemm.grouped import rows_of_m_indices

M, N, K, E = 7, 200, 416, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pair(seed: int, *lead: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """An e4m3 weight [*lead, N, K] with a scale per 128 x 128."""
    g = builders.generator(seed)
    w = torch.randn((*lead, N, K), generator=g).to(torch.float8_e4m3fn)
    return w.to(device), torch.rand((*lead, 2, 4), generator=g).to(device) + 0.5


def exact(a: tuple, b: tuple) -> torch.Tensor:
    x = a[0].float().double() * a[1].double().repeat_interleave(128, -1)[..., :K]
    scale = b[1].double().repeat_interleave(128, -2)[..., :N, :].repeat_interleave(128, -1)[..., :K]
    return x @ (b[0].float().double() * scale).mT


def assert_near(d: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((d.double() - expected).abs().max()) <= 2.0**-7 * float(expected.abs().max())


@pytest.mark.parametrize("device", DEVICES)
def test_a_dense_gemm(device):
    a, b = builders.block_lhs(1, M, K, column_major=True, device=device), pair(2, device=device)
    d, older = (torch.empty(M, N, dtype=torch.bfloat16, device=device) for _ in range(2))
    deep_gemm.fp8_gemm_nt(a, b, d, None, None, (1, 128), (128, 128), "nk", True)
    assert_near(d, exact(a, b))
    deep_gemm.gemm_fp8_fp8_bf16_nt(a, jitgemm.pack_w8(*b), older)
    assert same_bits(d, older)


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_packed_exponents_as_scales_of_both(device, column_major):
    x, words = builders.e8m0_lhs(1, M, K, column_major=column_major, device=device)
    w, of_w = builders.e8m0_lhs(2, N, K, column_major=column_major, device=device)
    d = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    deep_gemm.fp8_gemm_nt((x, deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(words)), (w, of_w), d)
    by_128 = [fp32_scales(scale, K).double().repeat_interleave(128, 1)[:, :K] for scale in (words, of_w)]
    assert_near(d, (x.double() * by_128[0]) @ (w.double() * by_128[1]).T)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_exponents_of_groups(device):
    b, indices = pair(2, E, device=device), torch.arange(E, dtype=torch.int32, device=device).repeat_interleave(4)
    (x, words), masked_m = builders.e8m0_lhs(1, E * 4, K, device=device), torch.full((E,), 4, device=device)
    d, of_masked = (torch.empty(E * 4, N, dtype=torch.bfloat16, device=device) for _ in range(2))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, words), b, d, indices)
    a = x.view(E, 4, K), words.view(E, 4, 1)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, of_masked.view(E, 4, N), masked_m, 4)
    assert_near(d, exact((a[0], fp32_scales(a[1], K)), b).flatten(0, 1))
    assert_near(of_masked, d.double())


@pytest.mark.parametrize("device", DEVICES)
def test_contiguous_groups(device):
    a, b = builders.block_lhs(1, 9, K, device=device), pair(2, E, device=device)
    indices = torch.tensor([0, 0, -1, 2, 2, 2, -1, -1, -1], dtype=torch.int32, device=device)
    d = torch.full((9, N), 3.0, dtype=torch.bfloat16, device=device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, indices)
    older = torch.full_like(d, 3.0)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, older, m_indices=indices, recipe=(1, 128, 128))
    assert same_bits(d, older)
    for e in (0, 2):
        rows = indices == e
        part = a[0].view(torch.uint8)[rows].view(a[0].dtype), a[1][rows]
        assert_near(d[rows], exact(part, (b[0][e], b[1][e])))
    assert bool((d[indices < 0] == 3).all())


@pytest.mark.parametrize("device", DEVICES)
def test_masked_groups(device):
    x, scale = builders.block_lhs(1, E * 4, K, device=device)
    a, b = (x.view(E, 4, K), scale.view(E, 4, 4)), pair(2, E, device=device)
    d = torch.full((E, 4, N), 3.0, dtype=torch.bfloat16, device=device)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, torch.tensor([2, 0, 4], dtype=torch.int32, device=device), 2)
    expected = exact(a, b)
    for e, count in enumerate((2, 0, 4)):
        assert bool((d[e, count:] == 3).all())
        if count:
            assert_near(d[e, :count], expected[e, :count])


def test_four_bit_weights_go_too():
    a, parts = builders.block_lhs(1, M, K), builders.weight_parts(2, N, K)
    d = torch.empty(M, N, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, parts.packed, d)
    assert same_bits(d, jitgemm.gemm_w4a8_reference(a, parts.packed))


@pytest.fixture
def packs(monkeypatch):
    """What was packed so far; nothing is remembered, and every warning comes."""
    deep_gemm.forget()
    deep_gemm._warn_once.cache_clear()
    packed: list = []
    monkeypatch.setattr(deep_gemm, "pack_w8", lambda *b: packed.append(b) or jitgemm.pack_w8(*b))
    yield packed
    deep_gemm.forget()
    deep_gemm._warn_once.cache_clear()


remembered = deep_gemm._remembered  # of pairs on a GPU; it looks at no device
REMEMBERS = pytest.mark.filterwarnings("ignore:jitgemm.deep_gemm packs a pair")
PACKS_AGAIN = pytest.mark.filterwarnings("ignore:.*was packed 3 times")


def same_weight(weight: jitgemm.W8Weight, w: torch.Tensor, scale: torch.Tensor) -> bool:
    return torch.equal(weight.blocks, jitgemm.pack_w8(w, scale).blocks)


@REMEMBERS
@PACKS_AGAIN
def test_a_pair_is_packed_once_until_it_is_written_to_or_gone(packs):
    w, scale = pair(2)
    assert remembered(w, scale) is remembered(w, scale) and len(packs) == 1
    scale.mul_(2)
    assert same_weight(remembered(w, scale), w, scale) and len(packs) == 2
    w.copy_(pair(3)[0])
    assert same_weight(remembered(w, scale), w, scale) and len(packs) == 3
    packs.clear()
    del w
    gc.collect()
    assert len(deep_gemm._packed) == 0


@REMEMBERS
@PACKS_AGAIN
def test_each_of_a_weight_s_scales_is_remembered_while_it_lives(packs):
    w, first = pair(2)
    second = first * 2
    for _ in range(3):
        assert same_weight(remembered(w, first), w, first) and same_weight(remembered(w, second), w, second)
    assert len(packs) == 2
    packs.clear()
    del second
    gc.collect()
    remembered(w, first * 3)
    assert len(deep_gemm._packed[w]) == 2


@REMEMBERS
def test_views_made_anew_are_the_same_pair(packs):
    w, scale = pair(2, E)
    for _ in range(3):
        for e in range(E):
            assert same_weight(remembered(w[e], scale[e]), w[e], scale[e])
    assert len(packs) == E
    w[1].zero_()
    assert same_weight(remembered(w[1], scale[1]), w[1], scale[1])


@REMEMBERS
def test_other_memory_behind_a_parameter_is_another_weight_at_the_same_address_too(packs):
    (w, scale), (other, _) = pair(2), pair(3)
    buffer = bytearray(w.numel())
    parameter = torch.nn.Parameter(torch.frombuffer(buffer, dtype=w.dtype).view(N, K).copy_(w), requires_grad=False)
    remembered(parameter, scale)
    address, version = parameter.data_ptr(), parameter._version
    parameter.data = torch.frombuffer(buffer, dtype=w.dtype).view(N, K).copy_(other)
    assert (parameter.data_ptr(), parameter._version) == (address, version)
    assert same_weight(remembered(parameter, scale), other, scale)


@REMEMBERS
@pytest.mark.parametrize("of", ["w", "scale"])
@pytest.mark.parametrize("alias", [lambda tensor: tensor, lambda tensor: tensor.data], ids=["itself", "data"])
def test_a_write_that_no_counter_tells_is_told_by_forget(packs, of, alias):
    both = dict(zip(("w", "scale"), pair(2)))
    kept = pair(3)
    remembered(*both.values()), remembered(*kept)
    both[of].data.zero_()
    deep_gemm.forget(alias(both[of]))
    assert same_weight(remembered(*both.values()), *both.values())
    packs.clear()
    assert remembered(*kept) and not packs  # others stay
    deep_gemm.forget()
    assert remembered(*kept) and len(packs) == 1


@pytest.mark.parametrize("of", ["w", "scale"])
def test_on_the_cpu_no_write_is_missed(of):
    a, (w, scale), d = builders.block_lhs(1, M, K), pair(2), torch.empty(M, N)
    parameter = torch.nn.Parameter(w, requires_grad=False)
    deep_gemm.fp8_gemm_nt(a, (parameter, scale), d)
    assert bool(d.any())
    {"w": parameter, "scale": scale}[of].data.zero_()
    deep_gemm.fp8_gemm_nt(a, (parameter, scale), d)
    assert not d.any()


def test_the_first_pair_that_is_remembered_is_warned_of(packs):
    with pytest.warns(UserWarning, match=r"call deep_gemm.forget\(w\) after writing to either through .data") as caught:
        remembered(*pair(2)), remembered(*pair(3))
    assert len(caught) == 1


@REMEMBERS
@pytest.mark.parametrize("change", ["data", "detach", "inference"])
def test_a_pair_that_is_packed_in_every_call_is_warned_of(packs, change):
    w, scale = pair(2)
    if change == "inference":
        with torch.inference_mode():
            w, scale = w.clone(), scale.clone()
    anew = {"data": lambda: w.data, "detach": lambda: w.detach(), "inference": lambda: w}[change]
    said = rf"b\[0\] \(w\): float8_e4m3fn \[{N}, {K}\] was packed 3 times with nothing written to it, which is slow"
    with pytest.warns(UserWarning, match=said) as caught:
        for times in range(1, 6):
            assert same_weight(remembered(anew(), scale), w, scale) and len(packs) == times
    assert len([each for each in caught if "3 times" in str(each.message)]) == 1


def test_a_pair_that_first_comes_in_a_capture_is_refused(packs, monkeypatch):
    monkeypatch.setattr(deep_gemm, "capturing", lambda device: True)
    with FakeTensorMode(allow_non_fake_inputs=True):  # on a machine without a GPU too
        b = torch.empty(N, K, dtype=torch.float8_e4m3fn, device="cuda"), torch.empty(2, 4, device="cuda")
        with pytest.raises(ValueError, match="b: .* captured: call once before the capture, or pack first"):
            deep_gemm._weight(b, None, None, None)
    assert not packs


@pytest.mark.gpu
@REMEMBERS
def test_a_graph_of_a_pair_that_was_packed_before(packs):
    a, b = builders.block_lhs(1, M, K, device="cuda"), pair(2, device="cuda")
    d = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="b: .* call once before the capture"):
        with torch.cuda.graph(graph):
            deep_gemm.fp8_gemm_nt(a, b, d)
    deep_gemm.fp8_gemm_nt(a, b, d)
    right, graph = d.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.fp8_gemm_nt(a, b, d)
    d.zero_()
    graph.replay()
    assert same_bits(d, right) and len(packs) == 1
    assert b[0].is_cuda and deep_gemm._packed[b[0]]
    b[0].data.zero_()
    deep_gemm.forget(b[0])
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert not d.any()


@REMEMBERS
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_function_breaks_its_graph_at_a_pair_and_not_at_a_packed_weight(device):
    a, b = builders.block_lhs(1, M, K, device=device), pair(2, device=device)

    def call(a, b):
        d = torch.zeros(M, N, dtype=torch.bfloat16, device=device)
        deep_gemm.fp8_gemm_nt(a, b, d)
        return d + 1

    torch._dynamo.reset()  # a function compiled without fullgraph serves one with it
    right, whole = call(a, b), torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"b: expected a packed weight \(jitgemm.pack_w8\)"):
        whole(a, b)
    assert same_bits(whole(a, jitgemm.pack_w8(*b)), right)
    assert same_bits(torch.compile(call, backend="eager")(a, b), right)


@pytest.mark.parametrize(
    "message, change",
    [
        ("c: expected None, as results are not added to a tensor, got a Tensor", {"c": torch.zeros(M, N)}),
        ("recipe: expected one of", {"recipe": (1, 1, 32)}),
        ("recipe_a: expected one of .* got 'nk'", {"recipe_a": "nk"}),
        ("recipe_b: expected one of", {"recipe_a": (1, 128), "recipe_b": (1, 32)}),
        ("recipe: expected it alone, recipe_a and recipe_b together, or none", {"recipe_b": (1, 128)}),
        ("recipe: expected it alone", {"recipe": (1, 128, 128), "recipe_a": (1, 128), "recipe_b": (128, 128)}),
        ("b: expected a packed weight or a pair", {"b": torch.zeros(N, K)}),
        (r"b\[1\] \(scales\): expected a torch.Tensor, got None", {"b": (torch.zeros(N, K), None)}),
        (r"lhs\[1\] \(x_scale\): expected shape \[7, 1\] for the exponents of a token and four times 128 k, got \[7, 4\]", {
            "a": (torch.zeros(M, K).to(torch.float8_e4m3fn), torch.zeros(M, 4, dtype=torch.int32))}),
        *((rf"b\[1\] \(scales\): expected int32 \[{N}, 1\], four exponents each, got int32 {re.escape(str(shape))}", {
            "b": (torch.zeros(N, K).to(torch.float8_e4m3fn), torch.zeros(shape, dtype=torch.int32))})
          for shape in ([], [N], [N, 2])),
        (r"q: expected shape \[n, k\] or \[experts, n, k\], got \[\]", {
            "b": (torch.tensor(1.0).to(torch.float8_e4m3fn), torch.tensor(127, dtype=torch.int32))}),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named(message, change):
    arguments = {"a": builders.block_lhs(1, M, K), "b": pair(2), "d": torch.empty(M, N), **change}
    with pytest.raises((TypeError, ValueError), match=message):
        deep_gemm.fp8_gemm_nt(**arguments)


@pytest.mark.parametrize("name", ["grouped_layout", "m_indices"])
@pytest.mark.parametrize("count", [M - 1, M + 1])
def test_every_row_has_an_index(count, name):
    a, d = builders.block_lhs(1, M, K), torch.empty(M, N)
    with pytest.raises(ValueError, match=rf"{name}: expected shape \[{M}\], got \[{count}\]"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, pair(2, E), d, **{name: torch.zeros(count, dtype=torch.int32)})


@pytest.mark.parametrize("name", ["grouped_layout", "m_indices"])
@pytest.mark.parametrize(
    "indices, expert, places",
    [([0, 0, -1, 0, 1, -1, -1], 0, 2), ([0, 1, 0, 1, 2, 0, 2], 0, 3), ([0, 1, 1, 2, 2, 1, 1], 1, 2)],
)
def test_an_expert_s_rows_stand_together(indices, expert, places, name):
    a, d = builders.block_lhs(1, M, K), torch.full((M, N), 3.0)
    said = f"{name}: expected each expert's rows together, .* got expert {expert} in {places} places"
    with pytest.raises(ValueError, match=said):
        layout = {name: torch.tensor(indices, dtype=torch.int32)}
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, pair(2, E), d, **layout)
    assert bool((d == 3).all())


@pytest.mark.gpu
@REMEMBERS
def test_an_expert_s_rows_are_looked_at_on_a_gpu_when_debugging(monkeypatch):
    monkeypatch.setenv("JITGEMM_DEBUG", "1")
    indices = torch.tensor([0, 1, 0], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="m_indices: expected each expert's rows together, .* got expert 0 in 2"):
        rows_of_m_indices(indices, E)


@pytest.mark.parametrize("indices, message", [
    (torch.zeros(M), "grouped_layout: expected int32, got float32"),
    (torch.zeros(M, 1, dtype=torch.int32), r"grouped_layout: expected shape \[M\], got \[7, 1\]"),
])  # fmt: skip
def test_a_wrong_layout_is_named_as_it_was_given(indices, message):
    with pytest.raises((TypeError, ValueError), match=message):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(builders.block_lhs(1, M, K), pair(2, E), torch.empty(M, N), indices)


def test_one_layout_of_groups_and_an_index_for_each_row():
    a, b, d, indices = builders.block_lhs(1, M, K), pair(2, E), torch.empty(M, N), torch.zeros(M, dtype=torch.int32)
    call = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    for options in ({}, {"grouped_layout": indices, "m_indices": indices}):
        with pytest.raises(TypeError, match="grouped_layout: expected it, or m_indices in its place"):
            call(a, b, d, **options)
    for options in ({"use_psum_layout": True}, {"expected_m_for_psum_layout": 4}):
        with pytest.raises(ValueError, match="use_psum_layout: expected False and an index for each row"):
            call(a, b, d, indices, **options)
    call(a, b, d, indices, ensure_zero_padding=False)


SIGNATURES = json.loads((Path(__file__).parent / "deep_gemm_signatures.json").read_text())
NEWEST, *OLDER = sorted(SIGNATURES.keys() - {"source"}, reverse=True)
CALLS = ["fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"]
GRADIENTS = ["k_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_tn_contiguous"]
OLDEST_GRADIENTS = {
    "wgrad_gemm_fp8_fp8_fp32_nt": ["lhs", "rhs", "out"],
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt": ["lhs", "rhs", "out", "batch_sizes"],
}
"""As of 1.0, deep_gemm/jit_kernels/wgrad_gemm.py."""


def theirs(version: str, name: str) -> dict[str, object]:
    """DeepGEMM's arguments in their order, each with its default."""
    scope: dict = {}
    exec(f"def call({SIGNATURES[version][name]}): ...", scope)
    return {each.name: each.default for each in inspect.signature(scope["call"]).parameters.values()}


def ours(name: str) -> dict[str, object]:
    return {each.name: each.default for each in inspect.signature(getattr(deep_gemm, name)).parameters.values()}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_have_the_names_order_and_defaults_of_deepgemm_s_newest(name):
    layout = {"grouped_layout", "m_indices"}  # either, so that neither is required
    assert [each for each in ours(name) if each != "m_indices"] == list(theirs(NEWEST, name))
    assert all(ours(name)[each] == default for each, default in theirs(NEWEST, name).items() if each not in layout)


@pytest.mark.parametrize("version", OLDER)
@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_older_versions_are_taken_by_name_and_in_order_up_to_what_is_new(name, version):
    older = theirs(version, name)
    assert older.keys() <= ours(name).keys()
    positional = [each for each in older if each != "m_indices"]
    assert [each for each in ours(name) if each in positional and each != "expected_m_for_psum_layout"] == [
        each for each in positional if each != "expected_m_for_psum_layout"  # 2.6.1 has an argument before it
    ]  # fmt: skip


@pytest.mark.parametrize("version", [NEWEST, *OLDER])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_weights_are_not_there(name, version):
    with pytest.raises(NotImplementedError, match=f"{name}: jitgemm has no GEMM for the gradients of weights"):
        getattr(deep_gemm, name)(*theirs(version, name))
    with pytest.raises(NotImplementedError, match=name):
        getattr(deep_gemm, name)(**theirs(version, name))


@pytest.mark.parametrize("name", OLDEST_GRADIENTS)
def test_gradients_of_weights_are_not_there_by_their_oldest_names(name):
    call, arguments = getattr(deep_gemm, name), OLDEST_GRADIENTS[name]
    assert call.__name__ == name
    for given, options in ((arguments, {}), ((), dict.fromkeys(arguments))):
        with pytest.raises(NotImplementedError, match=f"^{name}: jitgemm has no GEMM for the gradients of weights"):
            call(*given, **options)


def test_grouped_calls_by_their_older_names():
    (x, scale), b = builders.block_lhs(1, E * 4, K), pair(2, E)
    indices, counts = torch.arange(E, dtype=torch.int32).repeat_interleave(4), torch.full((E,), 4)
    right, older, by_name = (torch.zeros(E * 4, N, dtype=torch.bfloat16) for _ in range(3))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, scale), b, right, indices)
    deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous((x, scale), b, older, indices)
    deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(lhs=(x, scale), rhs=b, out=by_name, m_indices=indices)
    assert same_bits(older, right) and same_bits(by_name, right)

    a, blocks = (x.view(E, 4, K), scale.view(E, 4, 4)), lambda d: d.zero_().view(E, 4, N)
    deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_masked(a, b, blocks(older), counts, 4)
    call = deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_masked
    call(lhs=a, rhs=b, out=blocks(by_name), masked_m=counts, expected_m=4)
    assert same_bits(older, right) and same_bits(by_name, right)
    deep_gemm.fp8_m_grouped_gemm_nt_masked(a, b, blocks(older), counts, 4, disable_ue8m0_cast=True)  # as vLLM calls it
    assert same_bits(older, right)


def test_callers_need_neither_pad_nor_transpose():
    scale = torch.ones(3, 4)
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == deep_gemm.get_mk_alignment_for_contiguous_layout() == 1
    assert deep_gemm.get_col_major_tma_aligned_tensor(scale) is scale
