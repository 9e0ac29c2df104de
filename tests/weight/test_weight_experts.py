"""Weights of E experts: the same bytes as each expert packed on its own, views, files, memory and refusals."""

from __future__ import annotations

import copy
import re
import weakref
from dataclasses import replace

import builders
import pytest
import torch
from same_weights import TENSORS, same_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jitgemm import gemm_w4a8_bf16_nt, gemm_w4a8_int8_nt, gemm_w4a8_reference
from jitgemm.gemm.problem import Gemm
from jitgemm.gemm.run import call_op
from jitgemm.nn import W4A8Linear
from jitgemm.weight import layout
from jitgemm.weight.pack import pack_w4
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.quantize import quantize_w4

GROUPED = "m_grouped_gemm_w4a8_nt_contiguous"


def expert_parts(experts: int, n: int, k: int, group_size: int = 128, **arguments) -> list[builders.WeightParts]:
    return [builders.weight_parts(100 + e, n, k, group_size, **arguments) for e in range(experts)]


def pack_experts(parts: list[builders.WeightParts], canonical: bool = False) -> W4Weight:
    return packing(parts, canonical)()


def packing(parts: list[builders.WeightParts], canonical: bool = False):
    """`pack_w4` of what is there already."""
    whole = builders.stacked(parts)
    q = builders.canonical(whole.q) if canonical else whole.q
    options = dict(offset=whole.offset, group_size=whole.group_size, k=whole.q.shape[2], lhs_dtype=whole.lhs_dtype)
    return lambda: pack_w4(q, whole.scale, whole.zero, **options)


def same_experts(weight: W4Weight, dense: list[W4Weight]) -> bool:
    """Both ways: views are the dense weights, and the whole's tensors are theirs stacked."""

    def stacked(name: str) -> bool:
        whole, parts = getattr(weight, name), [getattr(each, name) for each in dense]
        return whole is None if parts[0] is None else builders.same_bits(whole, torch.stack(parts))

    views = weight.experts == len(dense) and all(map(same_weight, weight, dense))
    return views and all(map(stacked, TENSORS))


# --- packing ---


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("holder", [0, 1, 2])
def test_one_order_for_all_e4m3s_only_where_no_expert_holds_minus_8(holder, canonical):
    parts = expert_parts(3, 16, 96, 32, codes="e4m3")
    assert pack_experts(parts, canonical).format.order == "e4m3"
    parts[holder].q[15, 95] = -8
    any_order = [replace(each, lhs_dtype=None).packed for each in parts]
    assert same_experts(pack_experts(parts, canonical), any_order)


def test_experts_in_canonical_form_and_of_any_strides():
    parts = expert_parts(4, 24, 160, 32, zero_point=True, offset=True)
    each, whole = [one.packed for one in parts], builders.stacked(parts)
    assert same_experts(pack_experts(parts, canonical=True), each)
    q = torch.stack([one.q for one in parts], dim=1)  # [n, E, k]
    scale, zero, offset = (
        tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0) for tensor in (whole.scale, whole.zero, whole.offset)
    )
    assert same_experts(pack_w4(q.transpose(0, 1), scale, zero, offset=offset, group_size=32), each)


@pytest.mark.parametrize("experts", [None, 5])
def test_packing_waits_for_the_stream_once_after_all_work(monkeypatch, experts):
    wait, waits = W4Weight._wait, []
    monkeypatch.setattr(W4Weight, "_wait", lambda self: waits.append(self.row_sum is not None) or wait(self))
    order = torch.randperm(32, generator=builders.generator(8))
    weight = (
        pack_experts(expert_parts(5, 8, 32, 32))
        if experts
        else replace(expert_parts(1, 8, 32)[0], permutation=order).packed
    )
    assert weight.ready and waits == [True] and (not experts or all(each.ready for each in weight))


BF16, U8 = torch.bfloat16, torch.uint8


def zeros(*shape: int, dtype: torch.dtype = torch.int8, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize("q, scale, options, message", [
    (zeros(0, 8, 32), zeros(0, 8, 1, dtype=BF16), {}, "q: expected shape [n, k] or [n, k / 2], or [experts, ...]"),
    (zeros(1, 2, 8, 32), zeros(1, 2, 8, 1, dtype=BF16), {}, "or [experts, ...] of these, got [1, 2, 8, 32]"),
    (zeros(4, 8, 32), zeros(3, 8, 1, dtype=BF16), {}, "with experts = 4, n = 8, got [3, 8, 1]"),
    (zeros(4, 8, 64), zeros(4, 8, 1, dtype=BF16), {},
     "scale: expected shape [4, 8, 2] for k = 64 and group_size 32, got [4, 8, 1]"),
    (zeros(4, 8, 32), zeros(4, 8, 1, dtype=BF16), {"zero": zeros(8, 1, dtype=U8)},
     "zero: expected scale's shape [4, 8, 1], got [8, 1]"),
    (zeros(4, 8, 64), zeros(4, 8, 2, dtype=BF16), {"offset": zeros(4, 8, 1, dtype=BF16)},
     "offset: expected scale's shape [4, 8, 2], got [4, 8, 1]"),
    (zeros(4, 8, 32), zeros(4, 8, 1, dtype=BF16), {"permutation": torch.arange(32)},
     "permutation: expected none for a weight of experts, got one"),
    (zeros(4, 12, 32), zeros(4, 12, 1, dtype=BF16), {}, "q: expected n, its rows, to be a positive multiple of 8"),
])  # fmt: skip
def test_wrong_shapes_of_experts(q, scale, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pack_w4(q, scale, group_size=32, **options)


# --- memory ---


def tensors_of(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made in it that were alive at once, by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.users: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, kwargs))}
        for tensor in tensors_of(out):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.users:
                if key in given:
                    continue  # a view of what was there
                self.users[key] = 0
                self.bytes += size
                self.peak = max(self.peak, self.bytes)
            self.users[key] += 1
            weakref.finalize(tensor, self.drop, key, size)
        return out

    def drop(self, key: int, size: int) -> None:
        self.users[key] -= 1
        if not self.users[key]:
            del self.users[key]
            self.bytes -= size


def pack_all(canonical: bool, **arguments):
    def prepared(experts: int):
        parts = expert_parts(experts, 128, 1024, **arguments)
        return packing(
            [replace(each, zero=each.zero if each.zero is None else each.zero.long()) for each in parts], canonical
        )

    return prepared


def stack_all(experts: int):
    """The last of them brings all into another order."""
    parts = expert_parts(experts, 128, 1024, 64, codes="e4m3")
    parts[-1].q[0, 0] = -8
    return lambda: W4Weight.stacked(experts, lambda e: parts[e].packed)


def quantize_all(experts: int):
    w = torch.randn(experts, 128, 1024, generator=builders.generator(1)).bfloat16()
    return lambda: quantize_w4(w, 64, clip_steps=2)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(pack_all(True, group_size=32, zero_point=True, offset=True), id="canonical, zero points, offsets"),
        pytest.param(pack_all(False, group_size=32, zero_point=True), id="one value each, zero points"),
        pytest.param(pack_all(True, group_size=128, codes="e4m3"), id="canonical for e4m3"),
        pytest.param(pack_all(False, group_size=0, codes="s8"), id="per channel for int8"),
        pytest.param(stack_all, id="stacked"),
        pytest.param(quantize_all, id="quantised"),
    ],
)
def test_memory_grows_by_the_packed_experts_and_nothing_else(work):
    """What is alive at once with 12 experts beside the packed weight is what is with two."""
    beside = []
    for experts in (2, 12):
        call = work(experts)
        with LiveBytes() as live:
            weight = call()
        assert weight.experts == experts and live.bytes >= weight.nbytes
        beside.append(live.peak - weight.nbytes)
    sums = 12 * 128 * 4  # of rows, before they are padded
    assert beside[1] <= beside[0] + 2 * sums, (beside, weight.nbytes)


# --- one expert of it ---


@pytest.mark.parametrize("group_size", [0, 64])
def test_an_expert_is_a_view(group_size):
    weight = pack_experts(expert_parts(4, 72, 160, group_size, zero_point=True))
    weight.named("mlp.experts")
    for e in (0, 3, -1, -4):
        view = weight[e]
        for name in TENSORS:
            whole, part = getattr(weight, name), getattr(view, name)
            assert (whole is None) == (part is None)
            if whole is not None:
                assert part.data_ptr() == whole[e].data_ptr() and part.shape == whole.shape[1:]
        assert view.experts is None and view.shape == (72, 160) and view.format == weight.format
        assert view.layer == "mlp.experts" and view.group_size == weight.group_size
    dense = builders.weight_parts(100, 72, 160, group_size, zero_point=True).packed
    assert weight[0].plan_key == dense.plan_key != weight.plan_key


def test_an_expert_is_ready_as_its_whole_is(monkeypatch):
    weight = pack_experts(expert_parts(2, 8, 64, 32))
    monkeypatch.setattr(W4Weight, "mark_ready", lambda self: pytest.fail("waited for the stream"))
    view = weight[1]
    assert view.ready
    monkeypatch.undo()
    weight.blocks[0].add_(0)  # one counter of versions for all views
    assert not weight.ready and not view.ready and not weight[1].ready
    assert view.mark_ready() and view.ready and not weight.ready
    assert weight.mark_ready() and weight[0].ready


def test_an_index_of_no_expert_is_refused_as_a_list_does():
    weight = pack_experts(expert_parts(3, 8, 64, 32))
    for index in (3, -4, 100):
        with pytest.raises(IndexError, match=re.escape(f"expert: expected -3..2, got {index}")):
            weight[index]
    for index in (slice(0, 2), "0", None, 1.0, (0, 1), True):
        with pytest.raises(TypeError, match=f"expert: expected an int, got {type(index).__name__}"):
            weight[index]


def test_a_dense_weight_has_no_experts():
    weight = builders.weight_parts(1, 8, 64, 32).packed
    assert bool(weight) and weight.experts is None
    for use, name in ((len, r"len\(\)"), (iter, r"len\(\)"), (lambda w: w[0], r"\[\.\.\.\]")):
        with pytest.raises(TypeError, match=f"weight: expected a tensor for {name}, got a packed 4-bit weight"):
            use(weight)


# --- what a weight does ---


def test_what_a_weight_of_experts_says_of_itself():
    weight = pack_experts(expert_parts(4, 72, 400, 32, zero_point=True, scale_type="fp16"))
    assert (
        len(weight) == 4
        and weight.shape == (4, 72, 400)
        and weight.groups == 13
        and weight.scale_dtype == torch.float16
    )
    assert weight.nbytes == 4 * (2 * 4 * weight.format.record_bytes + 128 * 4)
    assert weight.to("cpu") is weight and weight == weight and weight != copy.copy(weight)
    assert repr(weight).startswith("W4Weight(experts=4, n=72, k=400, group_size=32, ")
    assert same_weight(weight[torch.tensor(2)], weight[2])
    keys = {pack_experts(expert_parts(experts, 8, 64, 32)).plan_key for experts in (1, 2, 3)}
    assert len(keys | {builders.weight_parts(1, 8, 64, 32).packed.plan_key}) == 4
    assert weight.packed.plan_key == weight.plan_key and weight.packed.experts == 4


@pytest.mark.parametrize("experts", [None, 3])
def test_a_state_dict_without_row_sums_is_a_weight_without(experts):
    parts = expert_parts(experts or 1, 24, 160, 32)
    weight = pack_experts(parts) if experts else parts[0].packed
    state = weight.state_dict()
    del state["row_sum"]
    loaded = W4Weight.from_state_dict(state)
    assert (
        loaded.row_sum is None and set(loaded.state_dict()) == {"blocks", "meta"} and loaded.plan_key != weight.plan_key
    )
    assert torch.equal(loaded.dequantize(), weight.dequantize())
    if experts:
        assert loaded[2].row_sum is None is W4Weight.stacked(3, loaded.__getitem__).row_sum


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.update(blocks=s["blocks"][:2]), "channel_scale: expected bfloat16 [2, 64], got bfloat16 [3, 64]"),
        (lambda s: s.update(blocks=s["blocks"][0]), "channel_scale: expected bfloat16 [64], got bfloat16 [3, 64]"),
        (lambda s: s.update(row_sum=s["row_sum"][0]), "row_sum: expected float32 [3, 64], got float32 [64]"),
        (lambda s: s.update(blocks=s["blocks"][:0]), "blocks: expected at least one expert, got uint8 [0, 1, 2, 4096]"),
        (lambda s: s.update(blocks=s["blocks"][None]), "blocks: expected uint8 [1, 2, 4096], got uint8 [1, 3, 1, 2, 4"),
        (
            lambda s: s.update(permutation=torch.arange(160, dtype=torch.int32)),
            "permutation: expected None for 3 experts, got a tensor",
        ),
    ],
)
def test_a_state_dict_whose_experts_do_not_match_is_refused(change, message):
    state = pack_experts(expert_parts(3, 24, 160, 0)).state_dict()
    change(state)
    with pytest.raises(ValueError, match=re.escape(f"state dict: {message}")):
        W4Weight.from_state_dict(state)


def test_a_dense_gemm_refuses_experts_and_names_the_call_that_takes_them():
    weight, (x, x_scale) = pack_experts(expert_parts(3, 32, 64, 32)), builders.lhs(1, 4, 64, "s8")
    out = torch.empty(4, 32, dtype=torch.bfloat16)
    message = rf"rhs: expected a dense weight \[n, k\], got one of 3 experts, which {GROUPED} takes; rhs\[e\] is"
    for call in (
        lambda: gemm_w4a8_bf16_nt((x, x_scale), weight, out),
        lambda: gemm_w4a8_reference((x, x_scale), weight),
        lambda: gemm_w4a8_int8_nt((x, x_scale), weight),
        lambda: call_op(Gemm(x, x_scale, None, weight, out)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"rows: expected a dense weight, got one of 3 experts; take weight\[e\]"):
        weight.rows(0, 1)
    with pytest.raises(ValueError, match="weight: expected a dense weight .*, got one of 3 experts"):
        W4A8Linear(weight)


# --- stacked ---


@pytest.mark.parametrize("holders", [(), (0,), (3,)])
def test_dense_weights_of_several_experts_rows_are_stacked_as_the_experts(holders):
    for group_size in (0, 64):
        parts = expert_parts(4, 128, 160, group_size, codes="e4m3")
        for e in holders:
            parts[e].q[100, 9] = -8

        def two(e: int) -> W4Weight:
            rows = {name: torch.cat([getattr(parts[i], name) for i in (e, e + 1)]) for name in ("q", "scale")}
            return replace(parts[e], **rows).packed

        weight = W4Weight.stacked(4, two, 2)
        assert weight.n == 128 and weight.format.order == ("any" if holders else "e4m3")
        assert same_weight(weight, pack_experts(parts))


@pytest.mark.parametrize("holders", [(0,), (1,), (3,), (0, 2), (1, 2, 3)])
def test_stacked_weights_of_different_orders_come_into_the_one_that_holds_any(holders, monkeypatch):
    monkeypatch.setattr(layout, "CHUNK_CODES", 64 * 128 * 2)
    parts = expert_parts(4, 72, 400, 64, codes="e4m3", offset=True)
    for e in holders:
        parts[e].q[7, 9] = -8
    weight = W4Weight.stacked(4, lambda e: parts[e].packed)
    assert weight.format.order == "any"
    assert same_experts(weight, [replace(each, lhs_dtype=None).packed for each in parts])


def test_experts_are_made_once_each_in_order_and_dropped_before_the_next():
    parts, made, alive = expert_parts(4, 8, 64, 32), [], []

    def make(e: int) -> W4Weight:
        alive.append(sum(each() is not None for each in made))
        weight = parts[e].packed
        made.append(weakref.ref(weight.blocks))
        return weight

    W4Weight.stacked(4, make)
    assert alive == [0] * 4


def other(**changes):
    """Weights of which only the last is another."""
    usual = {"n": 16, "k": 128, "group_size": 64}
    return lambda e: builders.weight_parts(e, **(usual | (changes if e == 2 else {}))).packed


OTHER_FORMAT = "make(2): expected format WeightFormat(group_size=64"
DENSE = "make(0): expected a dense W4Weight without a permutation, got "


@pytest.mark.parametrize("make, error, message", [
    (other(n=24), ValueError, "make(2): expected n 16, as make(0) has, got 24"),
    (other(k=160), ValueError, "make(2): expected k 128, as make(0) has, got 160"),
    (other(group_size=32), ValueError, "make(2): expected group_size 64, as make(0) has, got 32"),
    (other(zero_point=True), ValueError, f"{OTHER_FORMAT}, zero_point=False"),
    (other(scale_type="fp32"), ValueError, OTHER_FORMAT),
    (other(offset=True), ValueError, OTHER_FORMAT),
    (lambda e: other()(e).to("meta" if e else "cpu"), ValueError, "make(1): expected device cpu, as make(0) has, got meta"),
    (lambda e: other()(e) if e < 1 else other()(e).with_tensors(other()(e).blocks, None, None, None), ValueError,
     "make(1): expected tensors ['blocks', 'row_sum'], as make(0) has, got ['blocks']"),
    (lambda e: replace(builders.weight_parts(e, 16, 128), permutation=torch.arange(128)).packed, ValueError,
     f"{DENSE}W4Weight(n=16, k=128, per channel"),
    (lambda e: pack_experts(expert_parts(2, 8, 64, 32)), ValueError, f"{DENSE}W4Weight(experts=2"),
    (lambda e: None, TypeError, f"{DENSE}NoneType"),
    ((0, None), ValueError, "count: expected a"),
    ((-1, None), ValueError, "count: expected a"),
    ((2.0, None), TypeError, "count: expected a"),
    ((True, None), TypeError, "count: expected a"),
    ((4, other(), 3), ValueError, "together: expected a divisor of 4 experts, got 3"),
    ((4, other(n=64), 2), ValueError, "make(0): expected the rows of 2 experts, 64 or a multiple each, got n = 16"),
])  # fmt: skip
def test_dense_weights_that_make_no_weight_of_experts(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        W4Weight.stacked(*(make if isinstance(make, tuple) else (3, make)))


# --- quantize_w4 ---


@pytest.mark.parametrize("full_range, codes", [(True, "any"), (False, "e4m3")])
def test_quantised_experts_have_one_order_of_codes(full_range, codes):
    """Of the two experts only the second needs -8."""
    w = torch.arange(-8.0, 8.0).repeat(2, 8, 4)
    w[0].clamp_(min=-7)
    weight = quantize_w4(w, 64, full_range=full_range, lhs_dtype=torch.float8_e4m3fn)
    dense = [quantize_w4(each, 64, full_range=full_range, lhs_dtype=torch.float8_e4m3fn) for each in w]
    assert [each.format.order for each in dense] == ["e4m3", codes] and weight.format.order == codes
    assert builders.same_bits(weight.dequantize(), torch.stack([each.dequantize() for each in dense]))


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("lhs, group_size", [("e4m3", 128), ("s8", 0)])
def test_a_kernel_reads_an_experts_view_as_it_reads_its_dense_weight(lhs, group_size):
    parts = expert_parts(3, 200, 1120, group_size, device="cuda")
    weight, x = pack_experts(parts), builders.lhs(1, 33, 1120, lhs, device="cuda")
    for view, each in zip(weight, parts, strict=True):
        outs = [torch.empty(33, 200, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        for out, rhs in zip(outs, (view, each.packed), strict=True):
            gemm_w4a8_bf16_nt(x, rhs, out)
        assert builders.same_bits(*outs)
    with pytest.raises(ValueError, match=GROUPED):
        gemm_w4a8_bf16_nt(x, weight, outs[0])
