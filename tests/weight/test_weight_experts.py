"""Weights of E experts: the same bytes as each expert packed on its own, views, files, memory and refusals."""

from __future__ import annotations

import copy
import itertools
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
from jitgemm.kernel.codes import CODES
from jitgemm.kernel.formats import WeightFormat
from jitgemm.nn import W4A8Linear
from jitgemm.weight import layout
from jitgemm.weight.pack import pack_w4
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.parts import check_packed
from jitgemm.weight.quantize import quantize_w4

GROUPED = "m_grouped_gemm_w4a8_nt_contiguous"


def expert_parts(experts: int, n: int, k: int, group_size: int = 128, **arguments) -> list[builders.WeightParts]:
    return [builders.weight_parts(100 + e, n, k, group_size, **arguments) for e in range(experts)]


def stack(parts: list[builders.WeightParts], name: str) -> torch.Tensor | None:
    tensors = [getattr(each, name) for each in parts]
    return None if tensors[0] is None else torch.stack(tensors)


def pack_experts(parts: list[builders.WeightParts], canonical: bool = False, **changes) -> W4Weight:
    q = stack(parts, "q")
    arguments = {name: stack(parts, name) for name in ("scale", "zero", "offset")}
    arguments |= {"group_size": parts[0].group_size, "k": q.shape[2], "lhs_dtype": parts[0].lhs_dtype} | changes
    return pack_w4(torch.stack([builders.canonical(each.q) for each in parts]) if canonical else q, **arguments)


def same_experts(weight: W4Weight, dense: list[W4Weight]) -> bool:
    """Both ways: views are the dense weights, and the whole's tensors are theirs stacked."""

    def stacked(name: str) -> bool:
        whole, parts = getattr(weight, name), [getattr(each, name) for each in dense]
        return whole is None if parts[0] is None else builders.same_bits(whole, torch.stack(parts))

    views = weight.experts == len(dense) and all(map(same_weight, weight, dense))
    return views and all(map(stacked, TENSORS))


# --- packing ---


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("group_size, zero_point, scale_type", builders.ALL_FORMATS)
def test_experts_pack_to_the_same_bytes_as_each_on_its_own(group_size, zero_point, scale_type, canonical):
    """n = 72 ends within a strip; k = 400 within a block and a group."""
    parts = expert_parts(
        3, 72, 400, group_size, zero_point=zero_point, scale_type=scale_type, scales="mixed", max_zero=16
    )
    weight = pack_experts(parts, canonical)
    assert same_experts(weight, [each.packed for each in parts])
    for got, name in zip(weight.unpack(), ("q", "scale", "zero"), strict=True):
        given = stack(parts, name)
        assert got is None if given is None else builders.same_bits(got, given)
    assert builders.same_bits(weight.dequantize(), torch.stack([each.packed.dequantize() for each in parts]))


ORDERS = [
    (g, z, c) for g in (32, 64, 128, 256) for z, c in ((True, "any"), *((False, c.name) for c in CODES["int4"].orders))
]


@pytest.mark.parametrize("group_size, zero_point, codes", ORDERS)
def test_experts_with_offsets_in_every_order(group_size, zero_point, codes):
    parts = expert_parts(3, 72, 400, group_size, zero_point=zero_point, codes=codes, offset=True)
    weight = pack_experts(parts)
    assert weight.format == WeightFormat(group_size, zero_point, "bf16", codes, True)
    assert same_experts(weight, [each.packed for each in parts])
    assert builders.same_bits(weight.unpack().offset, stack(parts, "offset"))
    assert builders.same_bits(weight.dequantize(), torch.stack([each.packed.dequantize() for each in parts]))


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("holder", [0, 1, 2])
def test_one_order_for_all_e4m3s_only_where_no_expert_holds_minus_8(holder, canonical):
    parts = expert_parts(3, 16, 96, 32, codes="e4m3")
    assert pack_experts(parts, canonical).format.order == "e4m3"
    parts[holder].q[15, 95] = -8
    any_order = [replace(each, lhs_dtype=None).packed for each in parts]
    assert same_experts(pack_experts(parts, canonical), any_order)


def test_one_expert_is_still_a_weight_of_experts():
    parts = expert_parts(1, 8, 32, 32)
    weight = pack_experts(parts)
    assert weight.experts == len(weight) == 1 and weight.shape == (1, 8, 32)
    assert parts[0].packed.experts is None and same_experts(weight, [parts[0].packed])


def test_experts_of_any_strides():
    parts = expert_parts(4, 24, 160, 32, zero_point=True, offset=True)
    q = torch.stack([each.q for each in parts], dim=1)  # [n, E, k]
    scale, zero, offset = (
        stack(parts, name).permute(2, 0, 1).contiguous().permute(1, 2, 0) for name in ("scale", "zero", "offset")
    )
    packed = pack_w4(q.transpose(0, 1), scale, zero, offset=offset, group_size=32)
    assert same_experts(packed, [each.packed for each in parts])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16, torch.uint64])
def test_zero_points_of_experts_of_any_integer_width(dtype):
    parts = expert_parts(2, 16, 128, 64, zero_point=True, max_zero=16)
    assert same_experts(pack_experts(parts, zero=stack(parts, "zero").to(dtype)), [each.packed for each in parts])


def test_chunks_do_not_change_the_bytes(monkeypatch):
    parts = expert_parts(2, 200, 288, 64, zero_point=True, offset=True)
    whole = pack_experts(parts)
    dequantized = whole.dequantize()
    monkeypatch.setattr(layout, "CHUNK_CODES", 64 * 128)
    chunked = pack_experts(parts)
    assert same_weight(chunked, whole) and torch.equal(chunked.dequantize(), dequantized)


def test_packing_experts_waits_for_the_stream_once(monkeypatch):
    wait, waits = W4Weight._wait, []
    monkeypatch.setattr(W4Weight, "_wait", lambda self: waits.append(self.experts) or wait(self))
    weight = pack_experts(expert_parts(5, 8, 32, 32))
    assert [each.ready for each in weight] == [True] * 5 and waits == [5]


def test_packing_experts_under_inference_mode():
    with torch.inference_mode():
        weight = pack_experts(expert_parts(2, 16, 128, 64, zero_point=True))
        view = weight[1]
        assert view.ready and not view.blocks.is_inference()
    assert weight.ready and not weight.blocks.is_inference()


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


def test_values_out_of_range_are_refused_with_their_expert():
    q, scale, zero = zeros(4, 8, 64), zeros(4, 8, 2, dtype=BF16), zeros(4, 8, 2, dtype=U8)
    q[2, 3, 4] = 8
    with pytest.raises(ValueError, match=re.escape("q[2]: expected values -8..7, got 0..8")):
        pack_w4(q, scale, group_size=32)
    q[2, 3, 4], zero[3, 7, 1] = 0, 17
    with pytest.raises(ValueError, match=re.escape("zero[3]: expected values 0..16, got 0..17")):
        pack_w4(q, scale, zero, group_size=32)


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


def test_live_bytes_counts_what_is_alive():
    with LiveBytes() as live:
        first = torch.zeros(1000, dtype=U8)
        view = first[10:]
        del first
        assert live.bytes == 1000
        second = view + 1
        assert live.bytes == 1990
        del view
        assert live.bytes == 990 and live.peak == 1990
        del second
    assert live.bytes == 0


def pack_all(canonical: bool, **arguments):
    def prepared(experts: int):
        parts = expert_parts(experts, 128, 1024, **arguments)
        q = stack(parts, "q")
        q = torch.stack([builders.canonical(each.q) for each in parts]) if canonical else q
        rest = {name: stack(parts, name) for name in ("scale", "zero", "offset")}
        if rest["zero"] is not None:
            rest["zero"] = rest["zero"].to(torch.int64)
        size, lhs = parts[0].group_size, parts[0].lhs_dtype
        return lambda: pack_w4(q, **rest, group_size=size, k=1024, lhs_dtype=lhs)

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


def test_experts_are_counted_and_iterated():
    parts = expert_parts(3, 8, 64, 32)
    weight = pack_experts(parts)
    assert len(weight) == 3 and bool(weight)
    assert all(same_weight(view, each.packed) for view, each in zip(weight, parts, strict=True))
    assert same_weight(weight[torch.tensor(2)], parts[2].packed)


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


def test_an_experts_view_computes_what_its_dense_weight_does():
    parts = expert_parts(3, 72, 160, 32, zero_point=True)
    weight, lhs = pack_experts(parts), builders.lhs(1, 5, 160, "s8")
    for view, each in zip(weight, parts, strict=True):
        outs = [torch.empty(5, 72, dtype=torch.bfloat16) for _ in range(2)]
        for out, rhs in zip(outs, (view, each.packed), strict=True):
            gemm_w4a8_bf16_nt(lhs, rhs, out)
        assert builders.same_bits(*outs)
        assert builders.same_bits(view.unpack()[0], each.q) and same_weight(copy.copy(view), each.packed)


# --- what a weight does ---


def test_what_a_weight_of_experts_says_of_itself():
    weight = pack_experts(expert_parts(4, 72, 400, 32, zero_point=True, scale_type="fp16"))
    assert weight.shape == (4, 72, 400) and weight.groups == 13 and weight.scale_dtype == torch.float16
    assert weight.nbytes == 4 * (2 * 4 * weight.format.record_bytes + 128 * 4)
    assert weight.to("cpu") is weight and weight == weight and weight != copy.copy(weight)
    assert repr(weight) == (
        "W4Weight(experts=4, n=72, k=400, group_size=32, unsigned with zero points, fp16 scales, device='cpu')"
    )
    keys = {pack_experts(expert_parts(experts, 8, 64, 32)).plan_key for experts in (1, 2, 3)}
    assert len(keys | {builders.weight_parts(1, 8, 64, 32).packed.plan_key}) == 4
    assert weight.packed.plan_key == weight.plan_key and weight.packed.experts == 4


def test_experts_without_row_sums():
    weight = pack_experts(expert_parts(3, 24, 160, 32))
    state = weight.state_dict()
    del state["row_sum"]
    loaded = W4Weight.from_state_dict(state)
    assert loaded.row_sum is None and loaded[2].row_sum is None and loaded.plan_key != weight.plan_key
    assert W4Weight.stacked(3, loaded.__getitem__).row_sum is None


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


def test_rows_are_a_dense_weights():
    weight = pack_experts(expert_parts(3, 24, 160, 32))
    with pytest.raises(ValueError, match=r"rows: expected a dense weight, got one of 3 experts; take weight\[e\]"):
        weight.rows(0, 1)


def test_a_call_says_which_weight_it_takes():
    dense, experts = builders.weight_parts(1, 8, 64, 32).packed, pack_experts(expert_parts(3, 8, 64, 32))
    for each in (dense, dense.packed, experts, experts.packed):
        check_packed(each)
    check_packed(dense, experts=False)
    check_packed(experts.packed, experts=True)
    with pytest.raises(ValueError, match="rhs: expected a weight of experts, got a dense one, which gemm_w4a8_nt"):
        check_packed(dense, "rhs.", experts=True)
    with pytest.raises(ValueError, match=rf"weight: expected a dense .*, got one of 3 experts, which {GROUPED} takes"):
        check_packed(experts.packed, experts=False)


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
    with pytest.raises(ValueError, match="weight: expected a dense weight .*, got one of 3 experts"):
        W4A8Linear(weight)


# --- stacked ---


def test_stacked_dense_weights_are_the_packed_experts():
    for group_size, (zero_point, codes) in itertools.product((0, 64), ((True, "any"), (False, "e4m3"), (False, "s8"))):
        parts = expert_parts(3, 72, 160, group_size, zero_point=zero_point, codes=codes)
        weight, packed = W4Weight.stacked(3, lambda e: parts[e].packed), pack_experts(parts)
        assert same_weight(weight, packed) and weight.ready and weight.plan_key == packed.plan_key


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


@pytest.mark.parametrize(
    "n, together, message",
    [
        (64, 3, "together: expected a divisor of 4 experts, got 3"),
        (64, 2, "make(0): expected the rows of 2 experts, 64 or a multiple each, got n = 64"),
    ],
)
def test_rows_that_cannot_be_cut_into_experts_are_refused(n, together, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        W4Weight.stacked(4, lambda e: builders.weight_parts(e, n, 128).packed, together)


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
])  # fmt: skip
def test_dense_weights_that_make_no_weight_of_experts(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        W4Weight.stacked(3, make)


@pytest.mark.parametrize("count, error", [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_count_of_no_experts_is_refused(count, error):
    with pytest.raises(error, match="count: expected a"):
        W4Weight.stacked(count, lambda e: pytest.fail("was called"))


# --- quantize_w4 ---


@pytest.mark.parametrize(
    "group_size, symmetric, lhs_dtype", [(32, True, torch.int8), (64, False, None), (10_000, True, None)]
)
def test_experts_quantise_as_each_on_its_own(group_size, symmetric, lhs_dtype):
    w = torch.randn(3, 16, 160, generator=builders.generator(2)) * torch.tensor([0.1, 1.0, 10.0])[:, None, None]
    options = {"symmetric": symmetric, "clip_steps": 4, "scale_dtype": torch.float16, "lhs_dtype": lhs_dtype}
    weight = quantize_w4(w, group_size, **options)
    assert same_experts(weight, [quantize_w4(each, group_size, **options) for each in w])


@pytest.mark.parametrize("full_range, codes", [(True, "any"), (False, "e4m3")])
def test_quantised_experts_have_one_order_of_codes(full_range, codes):
    """Of the two experts only the second needs -8."""
    w = torch.arange(-8.0, 8.0).repeat(2, 8, 4)
    w[0].clamp_(min=-7)
    weight = quantize_w4(w, 64, full_range=full_range, lhs_dtype=torch.float8_e4m3fn)
    dense = [quantize_w4(each, 64, full_range=full_range, lhs_dtype=torch.float8_e4m3fn) for each in w]
    assert [each.format.order for each in dense] == ["e4m3", codes] and weight.format.order == codes
    assert builders.same_bits(weight.dequantize(), torch.stack([each.dequantize() for each in dense]))


def test_an_experts_values_that_cannot_be_quantised_are_refused_with_their_place():
    w = torch.zeros(4, 8, 64)
    w[3, 5, 6] = float("nan")
    with pytest.raises(ValueError, match=re.escape("w[3]: expected finite values, got nan at [5, 6]")):
        quantize_w4(w, 32)
    w[3, 5, 6] = 1e6
    with pytest.raises(ValueError, match=re.escape("w[3]: expected scales within float16's 65504")):
        quantize_w4(w, 32, scale_dtype=torch.float16)
    for shape in ((0, 8, 64), (1, 1, 8, 64)):
        message = f"w: expected shape [n, k] or [experts, n, k], got {list(shape)}"
        with pytest.raises(ValueError, match=re.escape(message)):
            quantize_w4(torch.zeros(shape), 32)
    with pytest.raises(ValueError, match="w: expected n, its rows, to be a positive multiple of 8, got 12"):
        quantize_w4(torch.zeros(2, 12, 64), 32)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("codes", ["e4m3", "s8"])
def test_a_gpu_packs_experts_with_offsets_in_every_order_to_the_same_bytes(codes):
    cpu = pack_experts(expert_parts(3, 200, 1120, 64, codes=codes, offset=True))
    parts = expert_parts(3, 200, 1120, 64, codes=codes, offset=True, device="cuda")
    gpu = pack_experts(parts)
    assert gpu.format == cpu.format and builders.same_bits(gpu.blocks.cpu(), cpu.blocks)
    parts[1].q[3, 4] = -8
    mixed = W4Weight.stacked(3, lambda e: parts[e].packed)
    assert same_weight(mixed, pack_experts(parts)) and mixed.format.order == ("any" if codes == "e4m3" else "s8")


@pytest.mark.gpu
def test_packing_experts_on_a_gpu_takes_the_memory_of_one_more():
    experts, n, k = 16, 2048, 2048
    q = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.ones((experts, n, k // 128), dtype=torch.bfloat16, device="cuda")

    def beside(count: int) -> int:
        torch.cuda.empty_cache()  # what other tests left may be larger than what is asked for
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        weight = pack_w4(q[:count], scale[:count], group_size=128, lhs_dtype=torch.float8_e4m3fn)
        return torch.cuda.max_memory_allocated() - start - weight.nbytes

    # A MiB for the tables of experts, and one that the allocator leaves at the end of what it takes from the GPU.
    assert beside(experts) <= beside(2) + (2 << 20)


@pytest.mark.gpu
def test_experts_packed_during_capture_are_not_ready():
    parts = expert_parts(3, 64, 256, 64, codes="e4m3", device="cuda")
    expected = [replace(each, lhs_dtype=None).packed for each in parts]
    q, scale = stack(parts, "q"), stack(parts, "scale")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = pack_w4(q, scale, group_size=64, lhs_dtype=torch.float8_e4m3fn)
        view = captured[1]
    graph.replay()
    torch.cuda.synchronize()
    assert not captured.ready and not view.ready and same_experts(captured, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("lhs", builders.LHS_DTYPES)
@pytest.mark.parametrize("group_size", [0, 128])
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
