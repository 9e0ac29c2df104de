"""scheme="block" on the CPU: one scale for every 128 codes, in the quantiser and in the layer of experts."""

from __future__ import annotations

import builders
import pytest
import torch
from builders import same_bits
from moe_cases import Case, by_definition
from quantize_cases import X_DTYPES, activations, assert_same_bits, parameters

import jitgemm
from jitgemm.activations.arguments import activation_of
from jitgemm.activations.kernel import block_dims, quantize_source, quantize_spec, smem_bytes
from jitgemm.activations.reference import LARGEST
from jitgemm.activations.run import QuantizeCall
from jitgemm.activations.scheme import SILU_MUL, Gate
from jitgemm.jit.cache import KernelCache
from jitgemm.moe.kernel import layer_specs, route_quantize_spec, source_of

DTYPES = list(LARGEST)
K = 400


def quantize(x, dtype, **arguments):
    return jitgemm.quantize_activations(x, dtype, scheme="block", **arguments)


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x_dtype", X_DTYPES, ids=str)
def test_every_block_is_quantised_as_a_row_of_its_own(x_dtype, dtype):
    x = activations(1, 17, K, x_dtype)
    q, scale = quantize(x, dtype)
    assert q.shape == x.shape and scale.shape == (17, 4) and scale.stride() == (1, 20)
    for block in range(4):
        columns = slice(128 * block, min(128 * block + 128, K))
        part_q, part_scale = jitgemm.quantize_activations(x[:, columns].contiguous(), dtype)
        assert_same_bits((q[:, columns].contiguous(), scale[:, block]), (part_q, part_scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_those_of_the_permuted_columns(dtype):
    x, order = activations(1, 9, K), parameters(2, K)["permutation"]
    assert_same_bits(quantize(x, dtype, permutation=order), quantize(x[:, order.long()], dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_and_norms_come_first(dtype):
    x, norm = activations(1, 9, K, torch.float32), parameters(2, K)["rms_norm"]
    gated = torch.nn.functional.silu(x[:, :192]) * x[:, 192:384]
    for got, y in (
        (quantize(x[:, :384].contiguous(), dtype, silu_mul=True), gated),
        (
            quantize(x[:5], dtype, rms_norm=norm, eps=1e-5),
            torch.nn.functional.rms_norm(x[:5], (K,), norm.float(), 1e-5),
        ),
    ):
        assert torch.allclose(got[1], quantize(y, dtype)[1], rtol=1e-4, atol=1e-37, equal_nan=True)


def test_a_nan_spoils_its_block_s_scale_alone():
    x = activations(1, 3, K)
    x[1, 200] = float("nan")
    x[2, 0] = float("inf")
    scale = quantize(x, torch.int8)[1]
    assert scale.isnan().nonzero().tolist() == [[1, 1], [2, 0]]
    norm = torch.ones(K, dtype=torch.bfloat16)
    assert quantize(x, torch.int8, rms_norm=norm)[1].isnan().all(1).tolist() == [False, True, True]


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_out_takes_scales_of_any_strides():
    x = activations(1, 6, K)
    expected = quantize(x, torch.int8)
    for scale in (torch.empty(6, 4), torch.empty(4, 9).T[:6], torch.empty(12, 8)[::2, ::2]):
        out = torch.empty(6, K, dtype=torch.int8), scale
        assert quantize(x, torch.int8, out=out)[1] is scale
        assert_same_bits(out, expected)


@pytest.mark.parametrize(
    "message, arguments",
    [
        ("affine: expected False for scheme 'block', got True", {"affine": True}),
        ("scale: expected None unless for scheme 'tensor'", {"scale": torch.ones(1)}),
        (r"out\[1\]: expected shape \[5, 4\], got \[5\]", {"out": (torch.empty(5, K, dtype=torch.int8), torch.ones(5))}),
        (r"out\[1\]: expected elements that do not overlap", {
            "out": (torch.empty(5, K, dtype=torch.int8), torch.ones(5, 1).expand(5, 4))}),
        ("scheme: expected one of", {"scheme": "blocks"}),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(message, arguments):
    with pytest.raises(ValueError, match=message):
        jitgemm.quantize_activations(activations(1, 5, K), torch.int8, **{"scheme": "block", **arguments})


def test_a_permuted_row_is_shorter():
    permutation = torch.arange(2**15 + 32, dtype=torch.int32)
    with pytest.raises(ValueError, match="from 16 to 32768 with a permutation"):
        quantize(torch.zeros(1, 2**15 + 32), torch.int8, permutation=permutation)


# ---- kernels --------------------------------------------------------------------------------------------------------


SPECS = [
    (k, quantize_spec(k, x, q, block=True, **arguments))
    for k, x, q in ((512, "bf16", "e4m3"), (7168, "bf16", "e4m3"), (8192, "fp32", "s8"), (40960, "fp16", "s8"))
    for arguments in (
        {}, {"gate": SILU_MUL}, {"rms_norm": True}, {"permuted": True}, {"rms_norm": True, "permuted": True},
        {"rms_norm": True, "residual": True}, {"rms_norm": True, "residual": True, "permuted": True},
    )
    if k <= 2**15 or "permuted" not in arguments
]  # fmt: skip


def test_labels_tell_them_from_other_kernels():
    labels = {spec.label for _, spec in SPECS}
    assert len(labels) == len({quantize_source(spec).source for _, spec in SPECS}) == len(set(SPECS))
    assert all("-block-" in label for label in labels)
    for k, spec in SPECS:
        assert smem_bytes(spec, k) == (4 * k * block_dims(spec, k)[1] if spec.permuted else 0) <= 131072
    with pytest.raises(ValueError, match="block: cannot be combined with a static scale or a zero point"):
        quantize_spec(512, "bf16", "s8", block=True, affine=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> KernelCache:
    return KernelCache([tmp_path_factory.mktemp("kernels")])


LAYER = layer_specs(7168, 2048, "bf16", "e4m3", Gate("gelu", "interleaved", 7.0), block=True)


@pytest.mark.nvrtc
@pytest.mark.parametrize("spec", [*dict.fromkeys(spec for _, spec in SPECS), *LAYER][::3], ids=lambda spec: spec.label)
def test_compiles_for_sm_90a_without_spills_or_warnings(cache, compiles_without_warnings, spec):
    compiles_without_warnings(cache.get_or_compile(source_of(spec))[0])


# ---- experts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["e4m3", "s8"])
def test_the_layer_is_its_definition(mode):
    case = Case(k=400, inter=144, mode=mode, options={"scheme": "block"})
    out, expected = jitgemm.fused_experts(*case.arguments, **case.options), by_definition(case)
    assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    token = jitgemm.fused_experts(*case.arguments, **{**case.options, "scheme": "token"})
    assert not same_bits(out, token)


def test_a_layer_has_no_zero_points_by_block_and_no_other_schemes():
    case = Case(mode="s8z")
    with pytest.raises(ValueError, match="affine: expected False for scheme 'block', got True"):
        jitgemm.fused_experts(*case.arguments, **case.options, scheme="block")
    with pytest.raises(ValueError, match=r"scheme: expected one of \('token', 'block'\), got 'tensor'"):
        jitgemm.fused_experts(*Case().arguments, scheme="tensor")


def test_a_layer_s_workspace_holds_its_scales():
    w13, w2 = (
        jitgemm.W4Weight.stacked(127, lambda e, one=builders.weight_parts(1, n, 512).packed: one) for n in (1024, 512)
    )
    m = 128 * 2
    token, block = (jitgemm.fused_experts_workspace_bytes(128, 2, w13, w2, scheme=s) for s in ("token", "block"))
    assert block - token == 4 * (4 * (m + 128)) - 4 * (m + 128)


def test_few_tokens_are_routed_and_quantised_at_once():
    spec = route_quantize_spec(64, 7168, "bf16", "e4m3", False, True)
    assert spec in LAYER and spec.quantizer.block
    scale = QuantizeCall(torch.zeros(5, 400), activation_of(torch.int8, "block", False))
    assert scale.new_outputs()[1].stride() == (1, 8)  # as `prepare_route_and_quantize` takes it to be
