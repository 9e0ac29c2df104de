"""DeepGEMM's names: its order of arguments, pairs that are packed in every call, and what is not there."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from pathlib import Path

import builders
import pytest
import torch
from builders import same_bits

import jitgemm
from jitgemm import deep_gemm
from jitgemm.gemm.grouped import rows_of_m_indices
from jitgemm.gemm.problem import fp32_scales

M, N, K, E = 7, 200, 400, 3
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
def test_packed_exponents_as_scales_of_both(column_major):
    x, words = builders.e8m0_lhs(1, M, K, column_major=column_major)
    w, of_w = builders.e8m0_lhs(2, N, K, column_major=column_major)
    d = torch.empty(M, N, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt((x, deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(words)), (w, of_w), d)
    by_128 = [fp32_scales(scale, K).double().repeat_interleave(128, 1)[:, :K] for scale in (words, of_w)]
    assert_near(d, (x.double() * by_128[0]) @ (w.double() * by_128[1]).T)


@pytest.mark.parametrize("exponents", [False, True])
def test_groups(exponents):
    (x, scale), b = (builders.e8m0_lhs if exponents else builders.block_lhs)(1, 12, K), pair(2, E)
    expected = exact((x.view(E, 4, K), (fp32_scales(scale, K) if exponents else scale).view(E, 4, 4)), b)
    indices = torch.tensor([0, 0, -1, -1, -1, -1, -1, -1, 2, 2, 2, 2], dtype=torch.int32)
    d, older, of_masked = torch.full((3, 12, N), 3.0, dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, scale), b, d, indices)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, scale), b, older, m_indices=indices, recipe=(1, 128, 128))
    a, masked_m = (x.view(E, 4, K), scale.view(E, 4, -1)), torch.tensor([2, 0, 4], dtype=torch.int32)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, of_masked.view(E, 4, N), masked_m, 2)
    assert same_bits(d, older) and same_bits(d, of_masked)
    assert_near(d[:2], expected[0, :2])
    assert_near(d[8:], expected[2])
    assert bool((d[indices < 0] == 3).all())


def test_four_bit_weights_go_too():
    a, parts = builders.block_lhs(1, M, K), builders.weight_parts(2, N, K)
    d = torch.empty(M, N, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, parts.packed, d)
    assert same_bits(d, jitgemm.gemm_w4a8_reference(a, parts.packed))


SLOW = pytest.mark.filterwarnings("ignore:jitgemm.deep_gemm packs a pair")


@SLOW
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("of", ["w", "scale"])
@pytest.mark.parametrize(
    "write", [lambda t: t.zero_(), lambda t: t.data.zero_(), lambda t: t.view(torch.uint8).zero_()],
    ids=["itself", "data", "bytes"],
)  # fmt: skip
def test_a_call_sees_every_write_to_a_pair(of, write, inference):
    with torch.inference_mode(inference):
        (w, scale), d = pair(2), torch.empty(M, N)
        a = builders.block_lhs(1, M, K)
        deep_gemm.fp8_gemm_nt(a, (w, scale), d)
        assert bool(d.any())
        write({"w": w, "scale": scale}[of])
        deep_gemm.fp8_gemm_nt(a, (w, scale), d)
    assert not d.any()


def test_a_warning_says_once_that_pairs_are_packed_in_every_call():
    deep_gemm._warn_once.cache_clear()
    a, d = builders.block_lhs(1, M, K), torch.empty(M, N)
    with pytest.warns(UserWarning, match="packs a pair .* in every call, which is slow: .* jitgemm.pack_w8") as caught:
        for seed in (2, 3):
            deep_gemm.fp8_gemm_nt(a, pair(seed), d)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.gpu
@SLOW
def test_a_graph_of_a_pair_packs_it_in_every_replay():
    a, b = builders.block_lhs(1, M, K, device="cuda"), pair(2, device="cuda")
    d = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    deep_gemm.fp8_gemm_nt(a, b, d)
    right, graph = d.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.fp8_gemm_nt(a, b, d)
    d.zero_()
    graph.replay()
    assert same_bits(d, right)
    b[0].data.zero_()
    graph.replay()
    assert not d.any()


@SLOW
def test_a_compiled_function_breaks_its_graph_at_a_pair_and_not_at_a_packed_weight():
    a, b = builders.block_lhs(1, M, K), pair(2)

    def call(a, b):
        d = torch.zeros(M, N, dtype=torch.bfloat16)
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
        (rf"b\[0\] \(w\): expected float8_e4m3fn, got int8 \[{N}, {K // 2}\]: packed FP4 codes are not supported", {
            "b": (torch.zeros(N, K // 2, dtype=torch.int8), torch.zeros(N, K // 32))}),
        (r"b\[0\] \(w\): expected float8_e4m3fn, got float32", {"b": (torch.zeros(N, K), torch.zeros(2, 4))}),
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
@SLOW
def test_an_expert_s_rows_are_looked_at_on_a_gpu_when_debugging(monkeypatch):
    monkeypatch.setenv("JITGEMM_DEBUG", "1")
    indices = torch.tensor([0, 1, 0], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="m_indices: expected each expert's rows together, .* got expert 0 in 2"):
        rows_of_m_indices(indices, E)


def test_one_layout_of_groups_and_an_index_for_each_row():
    a, b, d, indices = builders.block_lhs(1, M, K), pair(2, E), torch.empty(M, N), torch.zeros(M, dtype=torch.int32)
    call = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    for name, (wrong, got) in itertools.product(
        ("grouped_layout", "m_indices"),
        [(indices[1:], f"shape \\[{M}\\], got \\[6\\]"), (indices[:, None], r"shape .*, got \[7, 1\]"),
         (indices.float(), "int32, got float32")],
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"{name}: expected {got}"):
            call(a, b, d, **{name: wrong})
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


@pytest.mark.parametrize("name", SIGNATURES[NEWEST]["names"])
def test_each_of_deepgemm_s_names_is_there_or_says_what_to_call(name):
    call = getattr(deep_gemm, name)
    assert call.__doc__
    if name in deep_gemm._MISSING:
        with pytest.raises(NotImplementedError, match=f"^{name}: .*jitgemm|^{name}: call "):
            call(1, option=2)


def test_fp4_s_names_are_the_same_functions():
    for name in SIGNATURES[NEWEST]["names"]:
        if name.startswith(("fp8_fp4_gemm", "m_grouped_fp8_fp4")):
            assert getattr(deep_gemm, name) is getattr(deep_gemm, name.replace("_fp4", ""))


@SLOW
@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
def test_a_transposed_operand_is_the_same_product(layout):
    (x, x_scale), (w, scale), indices = builders.block_lhs(1, E, K), pair(2, E), torch.arange(E).int()
    right, d = torch.empty(E, N), torch.empty(E, N)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, x_scale), (w, scale), right, indices)
    transposed = w.mT.contiguous(), scale.mT
    deep_gemm.m_grouped_fp8_gemm_nn_contiguous((x, x_scale), transposed, d, indices, compiled_dims="nk")
    assert same_bits(d, right)
    (x, x_scale), (w, scale) = builders.block_lhs(1, M, K), pair(2)
    right, d = torch.empty(M, N), torch.empty(M, N)
    deep_gemm.fp8_gemm_nt((x, x_scale), (w, scale), right)
    a = (x.T.contiguous(), x_scale.T) if layout[0] == "t" else (x, x_scale)
    b = (w.T.contiguous(), scale.T.contiguous()) if layout[1] == "n" else (w, scale)
    getattr(deep_gemm, f"fp8_gemm_{layout}")(a, b, d, None, (1, 128, 128))
    assert same_bits(d, right)


def test_a_packed_weight_has_one_layout():
    a, d = builders.block_lhs(1, M, K), torch.empty(M, N)
    with pytest.raises(TypeError, match=r"b: expected a pair, as a packed weight is \[n, k\]: fp8_gemm_nt .* W8Weight"):
        deep_gemm.fp8_gemm_nn(a, jitgemm.pack_w8(*pair(2)), d)


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


def test_callers_need_neither_pad_nor_transpose(monkeypatch):
    scale = torch.ones(3, 4)
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == deep_gemm.get_mk_alignment_for_contiguous_layout() == 1
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout() == 1
    for same in (deep_gemm.get_col_major_tma_aligned_tensor, deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor):
        assert same(scale) is scale
    assert deep_gemm.transform_sf_into_required_layout(scale, 3, 512, (1, 128, 128), is_sfa=True) is scale
    sizes = [deep_gemm.get_tma_aligned_size(*each) for each in ((1, 4), (4, 4), (5, 4), (17, 1))]
    assert sizes == [4, 4, 8, 32]
    monkeypatch.setattr(deep_gemm, "_alignment", 1)
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)
    found = deep_gemm.get_mk_alignment_for_contiguous_layout(), deep_gemm.get_k_alignment_for_contiguous_layout()
    assert found == (128, 128)


@pytest.mark.gpu
def test_fewer_sms_are_warned_of():
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert deep_gemm.get_num_sms() == sms
    deep_gemm.set_num_sms(sms)
    with pytest.warns(UserWarning, match=rf"set_num_sms\({sms - 8}\): kernels of jitgemm may use all {sms} SMs"):
        deep_gemm.set_num_sms(sms - 8)
