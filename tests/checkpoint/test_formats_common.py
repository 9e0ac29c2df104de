"""What all formats share: nibbles, the canonical weight, and the registry."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from pathlib import Path

import builders
import checkpoints
import files_awq
import files_gptq
import layers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jitgemm.checkpoint import Checkpoint, formats, read_layer
from jitgemm.checkpoint.bits import AWQ_ORDER, WORD_DTYPES, unpack_nibbles
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo, concat
from jitgemm.checkpoint.format import Format
from jitgemm.weight.given import activation_order

# --- nibbles ---


@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    dim=st.integers(-3, 2),
    dtype=st.sampled_from(WORD_DTYPES),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_words_in_any_order_and_direction_unpack_to_what_the_definition_packed(seed, shape, dim, dtype, data):
    per_word = 2 * dtype.itemsize
    order = data.draw(st.none() | st.permutations(range(per_word)))
    sizes = list(shape)
    sizes[dim] *= per_word
    values = torch.randint(0, 16, sizes, generator=builders.generator(seed), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(checkpoints.words(values, dim, dtype, order), dim, order=order), values)


def test_strided_words_unpack_and_no_words_to_no_values():
    packed = torch.tensor([[0x76543210, 0], [0x0FEDCBA9, 0]], dtype=torch.int32)[:, :1].expand(2, 3)
    assert unpack_nibbles(packed, 0)[:8, 2].tolist() == list(range(8))
    for order in (None, AWQ_ORDER):
        assert unpack_nibbles(torch.empty((0, 3), dtype=torch.int32), 1, order=order).shape == (0, 24)
        assert unpack_nibbles(torch.empty((3, 0), dtype=torch.int32), 1, order=order).shape == (3, 0)


def test_other_word_dtypes_and_orders_are_refused():
    with pytest.raises(TypeError, match="words: expected one of uint8, .*got float32"):
        unpack_nibbles(torch.zeros(2))
    for order in ((0, 0), (0, 1, 2), (1, 2)):
        with pytest.raises(ValueError, match=r"order: expected a permutation of 0\.\.1"):
            unpack_nibbles(torch.zeros(2, dtype=torch.uint8), order=order)


# --- the canonical weight ---


def canonical(seed=0, n=32, k=256, group_size=64, *, offset=False, permuted=False, bias=False, **kwargs):
    parts = builders.weight_parts(seed, n, k, group_size, **kwargs)
    g = builders.generator(seed + 1)
    return CanonicalWeight(
        q=parts.q,
        scale=parts.scale,
        zero=parts.zero,
        offset=torch.randn(parts.scale.shape, generator=g).to(parts.scale.dtype) if offset else None,
        group_size=parts.group_size,
        permutation=torch.randperm(k, generator=g).int() if permuted else None,
        bias=torch.randn(n, generator=g) if bias else None,
    )


def in_fp64(w: CanonicalWeight) -> torch.Tensor:
    """The definition, column by column, in the layer's order."""
    out = torch.zeros((w.n, w.k), dtype=torch.float64)
    for column in range(w.k):
        group = column // w.group_size
        value = w.q[:, column].double()
        if w.zero is not None:
            value = value - w.zero[:, group].double()
        value = value * w.scale[:, group].double()
        if w.offset is not None:
            value = value.float().double() + w.offset[:, group].double()
        out[:, column if w.permutation is None else int(w.permutation[column])] = value
    return out


VARIANTS = [
    {},
    {"zero_point": True},
    {"group_size": 0},
    {"scale_type": "fp32", "permuted": True},
    {"scale_type": "fp16", "zero_point": True, "offset": True},
    {"offset": True, "permuted": True, "k": 288},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_dequantize_is_the_definition_with_one_rounding_an_operation_and_packing_keeps_every_weight(variant):
    w = canonical(3, **variant)
    assert torch.equal(w.dequantize(), in_fp64(w).float())
    packed = w.pack()
    columns = torch.arange(w.k) if w.permutation is None else w.permutation.long()
    assert builders.same_bits(packed.dequantize(), w.dequantize()[:, columns])
    assert w.permutation is None or torch.equal(packed.permutation, w.permutation)


@pytest.mark.parametrize("group_size, packed_as", [(512, 256), (384, 128), (96, 32), (1024, 256)])
def test_group_sizes_that_the_kernel_lacks_are_packed_as_smaller_ones(group_size, packed_as):
    k = 3 * group_size if group_size != 1024 else 2048
    parts = builders.weight_parts(5, 16, k, 32)
    w = CanonicalWeight(q=parts.q, scale=parts.scale[:, : k // group_size], group_size=group_size)
    packed = w.pack()
    assert packed.group_size == packed_as
    assert builders.same_bits(packed.dequantize(), w.dequantize())
    with pytest.raises(ValueError, match="group_size: expected a multiple of one of .*got 48"):
        CanonicalWeight(q=torch.zeros((8, 96), dtype=torch.int8), scale=torch.ones((8, 2)), group_size=48).pack()


@pytest.mark.parametrize("k, packed_as", [(256, 128), (128, 64), (96, 64), (64, 32)])
def test_a_per_channel_offset_is_packed_in_groups(k, packed_as):
    w = canonical(6, k=k, group_size=0, offset=True)
    packed = w.pack()
    assert packed.group_size == packed_as
    assert builders.same_bits(packed.dequantize(), w.dequantize())


@pytest.mark.parametrize(
    "variant", [*VARIANTS, {"group_size": 0, "offset": True}, {"group_size": 0, "permuted": True}], ids=str
)
@pytest.mark.parametrize("dim, world", [("n", 1), ("n", 4), ("k", 2), ("k", 4)])
def test_shards_are_the_rows_or_columns_of_the_layer_and_rank_0_has_the_bias_of_all(variant, dim, world):
    w = canonical(7, bias=True, **variant)
    if dim == "k" and w.permutation is not None and w.group_size < w.k:
        with pytest.raises(ValueError, match="tp_dim: .* its groups mix" if w.k == 256 else "tp_size: expected"):
            w.shard("k", 0, world)
        return
    shards = [w.shard(dim, rank, world) for rank in range(world)]
    assert torch.equal(torch.cat([s.dequantize() for s in shards], "nk".index(dim)), w.dequantize())
    if dim == "n":
        assert torch.equal(torch.cat([s.bias for s in shards]), w.bias)
    else:
        assert shards[0].bias is w.bias and all(s.bias is None for s in shards[1:])


@pytest.mark.parametrize(
    "offset, zero_point, bits", [(False, False, 4), (False, True, 4), (True, False, 4), (False, False, 8)]
)
@pytest.mark.parametrize("k, world, groups", [(896, 2, 64), (384, 4, 32), (320, 2, 32), (768, 4, 64), (768, 2, 128)])
def test_a_cut_through_groups_repeats_their_scales(k, world, groups, offset, zero_point, bits):
    """The parts side by side are the layer; a group size that the kernel has, and a warning that says which."""
    w = canonical(14, k=k, group_size=128, offset=offset, zero_point=zero_point)
    if bits == 8:
        w = dataclasses.replace(w, code="int8")
    parts = []
    for rank in range(world):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            parts.append(w.shard("k", rank, world).pack())
        note = f"inside groups of 128: scales are repeated over groups of {groups}"
        assert [note in str(each.message) for each in said] == [True] * (groups != 128)
    assert {part.group_size for part in parts} == {groups}
    assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), w.dequantize())


def test_activation_order_within_each_rank_is_cut_along_k():
    w = canonical(9, k=256, group_size=64)
    halves = [torch.randperm(128, generator=builders.generator(rank)) + 128 * rank for rank in range(2)]
    # Groups of both ranks by turns, so that a rank's groups are no neighbours.
    permutation = torch.stack([half.reshape(2, 64) for half in halves], 1).flatten().int()
    w = CanonicalWeight(q=w.q, scale=w.scale, group_size=64, permutation=permutation)
    shards = [w.shard("k", rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([s.dequantize() for s in shards], 1), w.dequantize())


@pytest.mark.parametrize("arguments, message", [
    (("n", 0, 3), "tp_size: expected n / tp_size to be a multiple of 8, got 32 / 3"),
    (("n", 0, 8), "tp_size: expected n / tp_size to be a multiple of 8, got 32 / 8 = 4"),
    (("k", 0, 32), "tp_size: expected k / tp_size to be a multiple of 16, got 256 / 32 = 8"),
    (("k", 0, 16), r"tp_size: expected a rank's columns to be a multiple of 32 in groups of 64, got columns"),
    (("m", 0, 2), "tp_dim: expected 'n' or 'k', got 'm'"),
    (("n", 2, 2), "tp_rank, tp_size: expected 0 <= rank < size, got rank 2 of 2"),
    (("n", 0, 0), "tp_rank, tp_size: expected 0 <= rank < size, got rank 0 of 0"),
])  # fmt: skip
def test_cuts_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        canonical().shard(*arguments)


@pytest.mark.parametrize("a, b", [
    (canonical(12, n=16, zero_point=True), canonical(13, n=48, zero_point=True, bias=True)),
    (canonical(12), canonical(13, zero_point=True)), (canonical(14, permuted=True), canonical(14, permuted=True)),
])  # fmt: skip
def test_layers_are_joined_along_n(a, b):
    joined = concat([a, b])
    assert torch.equal(joined.dequantize(), torch.cat([a.dequantize(), b.dequantize()]))
    assert (joined.zero is None) == (b.zero is None)
    assert joined.bias is b.bias is None or torch.equal(joined.bias, torch.cat([torch.zeros(16), b.bias]))


@pytest.mark.parametrize("other, message", [
    ({"k": 128}, r"must have one k, got \[256, 128\]"),
    ({"group_size": 32}, r"must have one group size, got \[64, 32\]"),
    ({"scale_type": "fp32"}, "must have one scale dtype"),
    ({"permuted": True}, "must have one kind of permutation"),
    ({"seed": 15}, "must have one permutation, got different ones"),
    ({"offset": True}, "must have one kind of offset"),
])  # fmt: skip
def test_layers_that_differ_are_not_joined(other, message):
    with pytest.raises(ValueError, match=message):
        concat([canonical(permuted="seed" in other), canonical(**{"permuted": "seed" in other} | other)])


@pytest.mark.parametrize("change, message", [
    ({"q": torch.zeros((32, 256), dtype=torch.uint8)}, r"q: expected int8 \[n, k\], got uint8"),
    ({"scale": torch.ones((32, 3))}, r"scale: expected shape \[32, 4\], got \[32, 3\]"),
    ({"scale": torch.ones((32, 4), dtype=torch.float64)}, "scale: expected bfloat16, float16 or float32, got"),
    ({"offset": torch.ones((32, 4))}, "offset: expected scale's bfloat16, got float32"),
    ({"group_size": 0}, "group_size: expected a positive number"),
    ({"permutation": torch.arange(256)}, "permutation: expected int32, got int64"),
    ({"permutation": torch.zeros(256, dtype=torch.int32)}, r"permutation: expected every column 0\.\.255 once"),
    ({"input_scale": torch.ones(1, dtype=torch.bfloat16)}, "input_scale: expected float32, got bfloat16"),
    ({"scale": torch.ones((32, 4), device="meta")}, "scale: expected q's device cpu, got meta"),
    ({"bias": torch.ones(31)}, r"bias: expected shape \[32\], got \[31\]"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(change, message):
    parts = builders.weight_parts(0, 32, 256, 64)
    fields = {"q": parts.q, "scale": parts.scale, "group_size": 64} | change
    with pytest.raises(ValueError, match=message):
        CanonicalWeight(**fields)


# --- activation order ---


@given(seed=st.integers(0, 2**31), groups=st.integers(1, 6), group_size=st.sampled_from([1, 3, 32]), tail=st.booleans())
@settings(max_examples=40, deadline=None)
def test_activation_order_makes_groups_contiguous_and_keeps_the_order_within(seed, groups, group_size, tail):
    g_idx = torch.arange(groups).repeat_interleave(group_size)
    if tail and group_size > 1:
        g_idx = g_idx[:-1]
    g_idx = g_idx[torch.randperm(len(g_idx), generator=builders.generator(seed))].int()
    permutation = activation_order(g_idx, group_size)
    columns = torch.arange(len(g_idx)) if permutation is None else permutation.long()
    assert torch.equal(g_idx[columns], g_idx.sort().values)
    for group in range(groups):
        mine = columns[g_idx[columns] == group]
        assert torch.equal(mine, mine.sort().values)


@pytest.mark.parametrize("g_idx, message", [
    ([0, 0, 0, 1], "g_idx: expected 2 columns in group 0, got 3: activation order with groups of unequal sizes"),
    ([0, 0, 2, 2], r"g_idx: expected groups 0\.\.1 for k = 4, group size 2, got 0\.\.2"),
    ([-1, 0, 1, 1], r"g_idx: expected groups 0\.\.1 .*got -1\.\.1"),
])  # fmt: skip
def test_activation_order_without_full_groups_is_refused(g_idx, message):
    with pytest.raises(ValueError, match=message):
        activation_order(torch.tensor(g_idx), 2)


# --- the registry ---


def test_format_names_are_unique_and_found():
    names = [format.name for format in formats.FORMATS]
    assert len(set(names)) == len(names) and all(formats.by_name(name).name == name for name in names)


def test_a_layer_of_no_known_format_is_named_with_its_tensors():
    names = {"weight": TensorInfo((8, 32), torch.bfloat16)}
    with pytest.raises(ValueError, match=r"layer 'lm_head' is of no format.*it has weight bfloat16 \[8, 32\]"):
        formats.find(names, {"quant_method": "bitsandbytes"}, "lm_head")
    with pytest.raises(ValueError, match="quant_method is 'modelopt', and quant_algo is 'W4A16_AWQ'"):
        formats.find(names, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"})


def test_a_layer_that_fits_two_formats_asks_which(monkeypatch):
    same = {"detect": lambda self, names, config: True}
    twins = tuple(type(name, (Format,), {"name": name, **same})() for name in ("one", "two"))
    monkeypatch.setattr(formats, "FORMATS", twins)
    with pytest.raises(ValueError, match=r"fits one and two: say which with format="):
        formats.find({}, None)


def test_a_format_is_registered_under_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(formats, "FORMATS", [*formats.FORMATS])
    later = type("Later", (Format,), {"name": "later", "suffixes": ("later_weight",)})()
    formats.register(later)
    assert formats.by_name("later") is later and "later_weight" in formats.suffixes()
    with pytest.raises(ValueError, match="name: expected one that no format has, got 'later'"):
        formats.register(later)


# --- settings of quantization_config ---


def _settings() -> dict[str, list[str]]:
    """The table of docs/formats.md: {format: [read, ignored, raises]}."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.partition("## Settings of a config")[2].splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 4}


def _settings_of(column: int) -> list[tuple[str, str]]:
    return [(name, each) for name in SAMPLES for each in re.findall("`([^`]+)`", _settings()[name][column])]


def _tensors(name: str) -> dict[str, torch.Tensor]:
    tensors = files_awq.gemm(SAMPLE) if name == "AWQ" else files_gptq.packed(SAMPLE, minus_one=True)
    return {f"{layers.PREFIX}.{suffix}": tensor for suffix, tensor in tensors.items() if suffix != "g_idx"}


def _read(name: str, **said):
    return read_layer(_tensors(name), layers.PREFIX, device="cpu", config=SAMPLES[name] | said)


SAMPLES = {"GPTQ": files_gptq.V1, "AWQ": files_awq.GEMM, "AutoRound": files_gptq.AUTOROUND}
"""Rows of the table that are tested, and a config of each."""
SAMPLE = layers.layer(0, zeros=(1, 15))


class Asked(dict):
    """A config that notes which settings it was asked for."""

    asked: set[str]

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_settings_that_a_reader_asks_for_are_those_of_the_table(name):
    method = SAMPLES[name]["quant_method"]
    config = Asked(quant_method=method)
    config.asked = set()
    checkpoint = Checkpoint(_tensors(name), config)
    config.asked.clear()  # where a config.json may have it
    read_layer(checkpoint, layers.PREFIX, device="cpu", format="awq" if method == "awq" else "gptq")
    assert config.asked - {"quant_method"} == {each for of, each in _settings_of(0) if of == name}


@pytest.mark.parametrize("name, setting", _settings_of(1))
def test_a_setting_that_is_ignored_changes_no_weight(name, setting):
    for value in (True, 8, "anything", ["model.layers.0"]):
        layers.assert_exactly(_read(name, **{setting: value}), SAMPLE.weight)


@pytest.mark.parametrize("name, example", [each for each in _settings_of(2) if ": " in each[1]])
def test_a_setting_that_cannot_be_read_raises_by_name(name, example):
    setting, _, value = example.partition(": ")
    try:
        value = json.loads(value)
    except ValueError:
        pass  # a word
    with pytest.raises(ValueError, match=f"^{setting}: expected"):
        _read(name, **{setting: value})


@pytest.mark.parametrize("name", SAMPLES)
def test_a_setting_that_nobody_knows_is_ignored(name):
    layers.assert_exactly(_read(name, of_a_later_release={"a": 1}), SAMPLE.weight)
