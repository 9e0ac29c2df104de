"""k a multiple of 16 and not of 32: what is packed, read, cut and computed is what it is for other k."""

from __future__ import annotations

import builders
import checkpoints
import layers
import pytest
import torch
from builders import PER_CHANNEL
from masked_experts import COUNTS, called, expected, sorted_tokens
from moe_cases import Case, by_definition
from small_models import config, stored
from torch._subclasses.fake_tensor import FakeTensorMode

import jitgemm
from jitgemm.checkpoint.canonical import CanonicalWeight
from jitgemm.kernel.formats import GROUP_SIZES, ceil_div
from jitgemm.nn import W4A8Linear, W8A8Linear, load_
from jitgemm.weight.codes import CODE_OPS
from jitgemm.weight.layout import decode_codes

KS = (16, 48, 496, 1040)
SHORT = [(k, group) for k in KS for group in GROUP_SIZES if group < k]
"""Whose last group is short."""


def definition(w: torch.Tensor, lhs: tuple) -> torch.Tensor:
    """lhs · wᵀ in fp64."""
    x, x_scale, x_zero = (*lhs, torch.zeros(1))[:3]
    if x_scale.shape[-1] > 1:
        return (x.double() * x_scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]) @ w.T
    return (x.double() - x_zero.double()) @ w.T * x_scale.double()


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"zero_point": True}, {"offset": True}, {"codes": "e4m3"}, {"codes": "s8"}])
@pytest.mark.parametrize("k, group", [*((k, PER_CHANNEL) for k in KS), *SHORT])
def test_a_4_bit_weight_is_unpacked_and_saved_bit_for_bit(k, group, options):
    parts = builders.weight_parts(1, 72, k, group, **options if group else {**options, "offset": False})
    weight = parts.packed
    q, scale, zero = weight.unpack()
    assert torch.equal(q, parts.q) and builders.same_bits(scale, parts.scale)
    assert zero is None if parts.zero is None else torch.equal(zero, parts.zero)
    assert torch.equal(weight.dequantize(), jitgemm.W4Weight.from_state_dict(weight.state_dict()).dequantize())
    assert torch.allclose(weight.dequantize().double(), parts.dequantize_fp64(), rtol=1e-6)
    assert torch.allclose(weight.row_sum[:72].double(), parts.dequantize_fp64().sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("codes", ["any", "e4m3", "s8"])
def test_records_hold_zeros_behind_k(k, codes):
    weight = builders.weight_parts(1, 64, k, PER_CHANNEL, codes=codes).packed
    words = weight.blocks[:, :, : weight.format.scales_at].contiguous().view(torch.int32)
    assert not decode_codes(words, CODE_OPS["int4"].orders[codes])[:, k:].any()
    if codes != "any":
        parts = builders.weight_parts(1, 64, k, PER_CHANNEL, codes=codes, bits=8)
        assert int((parts.packed.blocks != 0).sum()) == int((parts.q.view(torch.uint8) != 0).sum())


@pytest.mark.parametrize("codes", ["e4m3", "s8"])
@pytest.mark.parametrize("k, group", [*((k, PER_CHANNEL) for k in KS), *SHORT])
def test_an_8_bit_weight_is_unpacked_and_saved_bit_for_bit(k, group, codes):
    parts = builders.weight_parts(1, 72, k, group, codes=codes, bits=8)
    weight = jitgemm.W8Weight.from_state_dict(parts.packed.state_dict())
    q, scale, _ = weight.unpack()
    assert builders.same_bits(q, parts.q) and builders.same_bits(scale, parts.scale)


@pytest.mark.parametrize("k", KS)
def test_canonical_codes_and_experts_pack_to_the_same_bytes(k):
    parts = [builders.weight_parts(seed, 16, k, 64, zero_point=True) for seed in range(2)]
    q, scale, zero = (torch.stack([getattr(each, name) for each in parts]) for name in ("q", "scale", "zero"))
    canonical = torch.stack([builders.canonical(each) for each in q])
    for codes in (q, canonical):
        weight = jitgemm.pack_w4(codes, scale, zero, group_size=parts[0].group_size, k=k)
        assert all(torch.equal(weight[e].blocks, parts[e].packed.blocks) for e in range(2))


def test_codes_that_may_be_packed_or_not_ask_for_k():
    """uint8 [n, 16] beside one scale a row is k = 16 or k = 32."""
    q, scale, zero = torch.full((8, 16), 3, dtype=torch.uint8), torch.ones(8, 1), torch.zeros(8, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="k: expected the argument k to say whether"):
        jitgemm.pack_w4(q, scale, zero, group_size=32)
    assert [jitgemm.pack_w4(q, scale, zero, group_size=32, k=k).k for k in (16, 32)] == [16, 32]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("k, group", [*((k, k) for k in KS), *SHORT])
def test_quantising_to_4_bits_gives_each_group_its_scale(k, group, symmetric):
    w = torch.randn(16, k, generator=builders.generator(1))
    weight = jitgemm.quantize_w4(w, group, symmetric=symmetric)
    assert weight.unpack()[1].shape == (16, ceil_div(k, group))
    tail = ceil_div(k, group) * group - group
    alone = jitgemm.quantize_w4(w[:, tail:], k - tail, symmetric=symmetric)
    assert torch.equal(weight.dequantize()[:, tail:], alone.dequantize())


@pytest.mark.parametrize("lhs_dtype", builders.LHS_DTYPES.values(), ids=str)
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("k", KS)
def test_quantising_to_8_bits(k, block, lhs_dtype):
    w = torch.randn(16, k, generator=builders.generator(1))
    error = (jitgemm.quantize_w8(w, lhs_dtype, block=block).dequantize() - w).norm() / w.norm()
    assert error < (0.04 if lhs_dtype.is_floating_point else 0.01)


# ---- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["e4m3", "s8", "affine", "block"])
@pytest.mark.parametrize("k, group", [*((k, PER_CHANNEL) for k in KS), *SHORT])
def test_a_gemm_is_the_definition(k, group, kind):
    lhs_type = "s8" if kind == "affine" else "e4m3" if kind == "block" else kind
    if kind == "affine":
        lhs = builders.affine_lhs(2, 9, k, mean="positive")
    else:
        lhs = builders.block_lhs(2, 9, k) if kind == "block" else builders.lhs(2, 9, k, kind)
    form = {"zero_point": True, "offset": group > 0}
    for parts, gemm in (
        (builders.weight_parts(1, 72, k, group, **form), jitgemm.gemm_w4a8_nt),
        (builders.weight_parts(1, 72, k, group, codes=lhs_type, bits=8), jitgemm.gemm_w8a8_nt),
    ):
        out = torch.empty(9, 72)
        gemm(lhs, parts.packed, out)
        assert torch.allclose(out.double(), definition(parts.dequantize_fp64(), lhs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"silu_mul": True}, {"rms_norm": True}, {"permutation": True}, {"scheme": "block"}], ids=str
)
@pytest.mark.parametrize("k", KS)
def test_quantised_activations_are_the_values(k, options):
    x = torch.randn(5, 2 * k if "silu_mul" in options else k, generator=builders.generator(k))
    order = torch.randperm(k, generator=builders.generator(k)).int()
    given = {"rms_norm": torch.rand(k) + 0.5} if "rms_norm" in options else {}
    given |= {"permutation": order} if "permutation" in options else {}
    q, scale = jitgemm.quantize_activations(x, torch.int8, **options | given)
    y = torch.nn.functional.silu(x[:, :k]) * x[:, k:] if "silu_mul" in options else x
    y = torch.nn.functional.rms_norm(x, (k,), given["rms_norm"], 1e-6) if "rms_norm" in options else y
    y = y[:, order.long()] if "permutation" in options else y
    scale = scale.repeat_interleave(128, 1)[:, :k] if scale.dim() == 2 else scale[:, None]
    assert q.shape == (5, k) and bool(((q * scale - y).abs() <= 0.51 * scale).all())


@pytest.mark.parametrize("k, inter", [(16, 48), (496, 16), (48, 144)])
@pytest.mark.parametrize("mode, scheme", [("e4m3", "token"), ("s8z", "token"), ("s8", "block")])
@pytest.mark.parametrize("bits", [4, 8])
def test_experts_are_the_definition(bits, mode, scheme, k, inter):
    case = Case(k=k, inter=inter, mode=mode, bits=bits, group_size=32, options={"scheme": scheme})
    out = jitgemm.fused_experts(*case.arguments, **case.options)
    expected = by_definition(case)
    assert float((out.double() - expected).norm()) <= 0.02 * float(expected.norm())


@pytest.mark.parametrize("scheme", ["token", "block"])
@pytest.mark.parametrize("bits", [4, 8])
def test_masked_experts_are_the_definition(bits, scheme):
    case = Case(experts=4, k=144, inter=48, bits=bits, group_size=32, options={"scheme": scheme})
    x, masked_m = sorted_tokens(case, 6, COUNTS)
    for out, count, wanted in zip(called(case, x, masked_m), COUNTS, expected(case, x)):
        assert (out[:count].double() - wanted).norm() <= 0.01 * wanted.norm() and bool((out[count:] == 7).all())


def test_an_8_bit_result_goes_into_the_next_gemm():
    first, second = (builders.weight_parts(1, n, k, 32).packed for n, k in ((48, 80), (72, 48)))
    lhs, out = jitgemm.gemm_w4a8_int8_nt(builders.lhs(1, 5, 80, "s8"), first), torch.empty(5, 72)
    jitgemm.gemm_w4a8_nt(lhs, second, out)
    assert torch.allclose(out.double(), definition(second.dequantize().double(), [x.view(5, -1) for x in lhs]))


def test_fake_tensors_have_the_shapes():
    rhs = builders.weight_parts(1, 72, 496, 64).packed
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, out = torch.empty(5, 496), torch.empty(5, 72)
        q, scale = jitgemm.quantize_activations(x, torch.int8, scheme="block")
        assert q.shape == (5, 496) and scale.shape == (5, 4)
        assert jitgemm.gemm_w4a8_nt((q, scale), rhs, out) is None


# ---- layers and checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", jitgemm.nn.ACTIVATIONS)
@pytest.mark.parametrize("k", KS)
def test_linears(activation, k):
    linear, x = torch.nn.Linear(k, 72).requires_grad_(False), torch.randn(9, k, generator=builders.generator(k))
    kinds = [W4A8Linear] if activation == "int8_affine" else [W4A8Linear, W8A8Linear]
    for kind in kinds:
        layer = kind.from_linear(linear, activation=activation)
        saved = kind.from_state_dict(layer.state_dict())
        expected = x @ layer.weight.dequantize().T + linear.bias
        assert float((saved(x) - expected).norm()) <= 0.04 * float(expected.norm())


def test_a_model_is_quantised_and_compiled():
    model = torch.nn.Sequential(torch.nn.Linear(48, 80), torch.nn.SiLU(), torch.nn.Linear(80, 72))
    assert jitgemm.nn.quantize_(model, group_size=64) == ["0", "2"]
    x = torch.randn(5, 48)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("k, group", [*((k, k) for k in KS), *SHORT])
def test_a_gptq_file(tmp_path, k, group, act_order):
    layer = layers.layer(k, k=k, group_size=group, act_order=act_order)
    said = {
        "quant_method": "gptq",
        "bits": 4,
        "checkpoint_format": "gptq_v2",
        "group_size": group,
        "desc_act": act_order,
    }
    tensors = {
        "qweight": checkpoints.words(layer.q.T, 0), "qzeros": checkpoints.words(layer.zero.T, 1),
        "scales": layer.scale.T.contiguous(), "g_idx": layer.group.int(),
    }  # fmt: skip
    weight = layers.load(tmp_path, tensors, said)
    layers.assert_exactly(weight, layer.weight)
    packed = weight.pack()
    order = slice(None) if packed.permutation is None else packed.permutation.long()
    assert torch.equal(packed.dequantize(), weight.dequantize()[:, order])


def test_an_awq_file(tmp_path):
    layer = layers.layer(1, k=496, group_size=128)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, qzeros = (checkpoints.words(each.T, 1, order=order) for each in (layer.q, layer.zero))
    said = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    weight = layers.load(tmp_path, {"qweight": codes, "scales": layer.scale.T, "qzeros": qzeros}, said)
    layers.assert_exactly(weight, layer.weight)
    assert torch.equal(weight.pack().dequantize(), weight.dequantize())


def test_an_fp8_file_in_blocks_of_which_the_last_is_short(tmp_path):
    q = torch.randn(72, 496).to(torch.float8_e4m3fn)
    scale = torch.rand(1, 4) + 0.5
    weight = layers.load(tmp_path, {"weight": q, "weight_scale_inv": scale}, {"quant_method": "fp8"})
    expected = q.float() * scale.repeat_interleave(128, 1)[:, :496]
    assert torch.equal(weight.pack().dequantize(), expected)


@pytest.mark.parametrize("k", KS)
def test_a_model_is_loaded_and_not_dequantised(k):
    model = torch.nn.Sequential(torch.nn.Linear(k, 32, bias=False))
    tensors, dense = stored(torch.randn(32, k))
    assert load_(model, {f"0.{name}": each for name, each in tensors.items()}, config=config()) == ["0"]
    assert torch.equal(model[0].weight.dequantize(), dense)


def test_a_weight_per_channel_is_cut_along_k_at_multiples_of_16():
    parts = builders.weight_parts(1, 32, 96, PER_CHANNEL)
    whole = CanonicalWeight(parts.q, parts.scale, group_size=96)
    cuts = [whole.shard("k", rank, 6).pack() for rank in range(6)]
    assert [cut.k for cut in cuts] == [16] * 6
    assert torch.equal(torch.cat([cut.dequantize() for cut in cuts], 1), parts.packed.dequantize())
