"""What calls write and read: a written operand has memory of its own, or is an operand that it may be in place of.

The same on both devices, and before anything is launched or written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import builders
import pytest
import torch
from moe_cases import Case
from torch.utils._python_dispatch import TorchDispatchMode

import jitgemm
from jitgemm.moe.masked import fused_experts_masked
from jitgemm.moe.route import combine, route

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS, WIDTH, EXPERTS, MAX_M = 8, 64, 4, 4
Arguments = dict[str, Any]
Made = tuple[Callable[..., Any], Arguments]
"""A call, and its legal arguments by name."""


# ---- calls -----------------------------------------------------------------------------------------------------------


def on(device: str, **given: Any) -> Arguments:
    return {name: value.to(device) for name, value in given.items()}


def dense(device: str, zeros: bool = True) -> Made:
    """With a scale a row, so that the weight has all its tensors."""
    x, x_scale, x_zero = builders.affine_lhs(1, 3, 64)
    rhs, out = builders.weight_parts(2, 64, 64, builders.PER_CHANNEL).packed, torch.zeros(3, 64).bfloat16()

    def call(x, x_scale, x_zero, rhs, bias, out) -> None:
        jitgemm.gemm_w4a8_nt((x, x_scale, x_zero)[: 2 + zeros], rhs, out, bias=bias)

    return call, on(device, x=x, x_scale=x_scale, x_zero=x_zero, rhs=rhs, bias=torch.zeros(64), out=out)


def to_int8(device: str) -> Made:
    (x, x_scale, x_zero), rhs = builders.affine_lhs(1, 3, 64), builders.weight_parts(2, 64, 64, 32).packed
    rest = torch.empty(3, device=device), torch.empty(3, dtype=torch.int32, device=device)

    def call(x, x_scale, x_zero, out, **more: Any) -> None:
        jitgemm.gemm_w4a8_int8_nt((x, x_scale, x_zero), **more, out=(out, *rest))

    out = torch.zeros(3, 64, dtype=torch.int8)
    return call, on(device, x=x, x_scale=x_scale.flatten(), x_zero=x_zero, rhs=rhs, bias=torch.zeros(64), out=out)


def grouped(device: str, masked: bool = False, reference: bool = False) -> Made:
    lead = (EXPERTS, MAX_M) if masked else (5,)
    given = on(device, x=torch.zeros(*lead, 96, dtype=torch.int8), x_scale=torch.ones(lead), rhs=weights()[1])
    given |= on(device, bias=torch.zeros(EXPERTS, WIDTH), out=torch.zeros(*lead, WIDTH))
    given |= on(device, sizes=torch.arange(EXPERTS).int() if masked else torch.arange(EXPERTS + 1))
    given |= {} if masked else on(device, row_index=torch.arange(5, dtype=torch.int32))
    calls = jitgemm.m_grouped_gemm_w4a8_nt_contiguous, jitgemm.m_grouped_gemm_w4a8_nt_masked

    def call(x, x_scale, rhs, out, sizes, **more: Any) -> None:
        if reference:
            jitgemm.m_grouped_gemm_w4a8_reference((x, x_scale), rhs, sizes, out=out, **more)
        else:
            calls[masked]((x, x_scale), rhs, out, sizes, *([2] if masked else []), **more)

    return call, given


def quantiser(device: str) -> Made:
    given = {"x": torch.randn(5, WIDTH), "scale": torch.ones(1), "zero": torch.zeros(1, dtype=torch.int32)}
    given |= {"rms_norm": torch.ones(WIDTH), "permutation": torch.arange(WIDTH).int()}
    given |= {"residual": torch.zeros(5, WIDTH), "residual_out": torch.zeros(5, WIDTH)}
    return partial(jitgemm.quantize_activations, dtype=torch.int8, scheme="tensor", affine=True), on(device, **given)


def weights() -> tuple[Any, Any]:
    return Case(TOKENS, 2, EXPERTS, WIDTH, 96, WIDTH, group_size=builders.PER_CHANNEL).arguments[1:3]


def layer(device: str) -> Made:
    """Of `fused_experts`, with all operands, out [8, 64] of x's shape among them."""
    x, _, _, ids, topk_weights = Case(TOKENS, 2, EXPERTS, WIDTH, 96, WIDTH).arguments
    (w13, w2), g = weights(), builders.generator(5)
    given = {"x": x, "w13": w13, "w2": w2, "topk_ids": ids, "topk_weights": topk_weights}
    given |= {"bias13": torch.randn(EXPERTS, 192, generator=g), "bias2": torch.randn(EXPERTS, WIDTH, generator=g)}
    given |= {"addend": torch.randn(TOKENS, WIDTH, generator=g), "expert_map": torch.arange(EXPERTS).int()}
    given |= {"out": torch.zeros(TOKENS, WIDTH)}
    return partial(jitgemm.fused_experts, lhs_dtype=torch.int8), on(device, **given)


def masked_layer(device: str, quantised: bool = False) -> Made:
    _, given = layer(device)
    given = {name: given[name] for name in ("w13", "w2", "bias13", "bias2")}
    x = torch.randn(EXPERTS, MAX_M, WIDTH, generator=builders.generator(1))
    given |= on(device, x=x, out=torch.zeros_like(x), masked_m=torch.full((EXPERTS,), 2, dtype=torch.int32))
    call = partial(fused_experts_masked, expected_m=2, lhs_dtype=torch.int8)
    if not quantised:
        return call, given
    q, given["x_scale"] = jitgemm.quantize_activations(given.pop("x"), torch.int8)
    return lambda x_scale, **more: call((q, x_scale), **more), given


def combined(device: str) -> Made:
    given = {"rows": torch.randn(6, 16), "inverse": torch.tensor([[0, 4], [-1, -1], [3, 1]]).int()}
    given |= {"topk_weights": torch.rand(3, 2), "addend": torch.randn(3, 16), "out": torch.zeros(3, 16)}
    return combine, on(device, **given)


def routing(device: str) -> Made:
    given = on(device, topk_ids=torch.zeros(4, 2, dtype=torch.int64), expert_map=torch.arange(EXPERTS).int())
    return partial(route, experts=EXPERTS), given


# ---- overlaps --------------------------------------------------------------------------------------------------------


def over(operand: torch.Tensor, out: torch.Tensor, step: int = 0) -> torch.Tensor:
    """A tensor like out whose memory begins in the operand's, so many bytes behind its first."""
    whole = torch.empty(0, dtype=torch.uint8, device=out.device).set_(operand.untyped_storage())
    start = operand.data_ptr() - whole.data_ptr() + step
    return whole[start:][: out.nbytes].view(out.dtype).view(out.shape)


def roomy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with as much memory behind it as an out needs."""
    memory = torch.zeros(tensor.nbytes + (1 << 14), dtype=torch.uint8, device=tensor.device)
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def with_room(given: Arguments, name: str) -> torch.Tensor:
    """The operand of this name, such as "w13.blocks", of the arguments, where it is now one with room behind it."""
    argument, _, part = name.partition(".")
    if not part:
        given[argument] = roomy(given[argument])
        return given[argument]
    weight = given[argument]
    parts = {each: getattr(weight, each) for each in ("blocks", "channel_scale", "row_sum")}
    parts[part] = roomy(parts[part])
    given[argument] = weight.with_tensors(*parts.values(), None)
    return getattr(given[argument], part)


NAMES = {"x": r"lhs\[0\] \(x\)", "x_scale": r"lhs\[1\] \(x_scale\)", "x_zero": r"lhs\[2\] \(x_zero\)"}
NAMES |= {"sizes": "offsets or masked_m"}
PARTS = ("blocks", "channel_scale", "row_sum")
WEIGHTS = [f"{name}.{part}" for name in ("w13", "w2") for part in PARTS]
READ: dict[str, tuple[Callable[[str], Made], list[str], dict[str, int]]] = {
    "dense": (dense, ["x", "x_scale", "x_zero", "bias", *(f"rhs.{part}" for part in PARTS)], {}),
    "dense, without zero points": (partial(dense, zeros=False), ["rhs.row_sum"], {}),
    "to int8": (to_int8, ["rhs.blocks", "rhs.row_sum", "bias", "x_scale"], {}),
    "contiguous": (grouped, ["rhs.blocks", "bias", "sizes"], {}),
    "masked": (partial(grouped, masked=True), ["rhs.blocks", "bias", "sizes"], {}),
    "the reference": (partial(grouped, reference=True), ["rhs.blocks"], {}),
    "layer": (layer, [*WEIGHTS, "topk_ids", "topk_weights", "expert_map", "bias13", "bias2"], {"x": 16, "addend": 16}),
    "masked layer": (masked_layer, [*WEIGHTS, "masked_m", "bias13", "bias2"], {"x": 256}),
    "masked layer, quantised": (partial(masked_layer, quantised=True), ["x_scale"], {}),
    "combine": (combined, ["rows", "inverse", "topk_weights"], {"addend": 16}),
}
"""Operands that out may not overlap, and operands whose place it may take, if it does not begin so many bytes behind."""
OVERLAPS = [
    *((call, name, "cpu") for call, (_, names, parts) in READ.items() for name in (*names, *parts)),
    *(pytest.param(call, names[0], "cuda", marks=pytest.mark.gpu) for call, (_, names, _) in READ.items()),
]


@pytest.mark.parametrize("name, operand, device", OVERLAPS)
def test_a_call_writes_to_nothing_that_it_reads(name, operand, device):
    make, _, parts = READ[name]
    call, given = make(device)
    call(**given)  # a legal call of the same shapes lets nothing through
    given["out"] = over(with_room(given, operand), given["out"], parts.get(operand, 0))
    before = given["out"].view(torch.uint8).clone()
    read = operand if name.endswith("layer") else NAMES.get(operand, operand)
    written = r"out\[0\]" if name == "to int8" else "out"
    for _ in range(2):  # the second time, too
        with pytest.raises(
            ValueError, match=f"^{written}: expected memory of its own, got a tensor that overlaps {read}$"
        ):
            call(**given)
    assert torch.equal(given["out"].view(torch.uint8), before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pad", [0, 8])
@pytest.mark.parametrize("name", ["x", "addend"])
def test_a_layer_may_write_in_place_of_its_tokens_or_addend(name, pad, device):
    call, given = layer(device)
    wide = torch.zeros(TOKENS, WIDTH + pad, device=device)
    wide[:, :WIDTH] = given[name]
    expected = call(**given).clone()
    given[name] = given["out"] = wide[:, :WIDTH]
    assert call(**given) is given["out"]
    assert builders.same_bits(given["out"].contiguous().cpu(), expected.cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make, name", [(combined, "addend"), (masked_layer, "x")])
def test_other_results_may_be_in_place_of_what_they_are_made_of(make, name, device):
    call, given = make(device)
    call(**given)
    expected, given["out"] = given["out"].clone(), given[name]
    call(**given)
    live = (slice(None), slice(2)) if make is masked_layer else slice(None)
    assert builders.same_bits(given["out"][live].cpu(), expected[live].cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_an_8_bit_result_may_be_written_in_place_of_the_activations(device):
    x, x_scale, x_zero = (tensor.to(device) for tensor in builders.affine_lhs(1, 3, 64))
    lhs, rhs = (x, x_scale.flatten(), x_zero.flatten()), builders.weight_parts(2, 64, 64, 32).packed.to(device)
    expected = jitgemm.gemm_w4a8_int8_nt(lhs, rhs)
    assert all(map(torch.equal, jitgemm.gemm_w4a8_int8_nt(lhs, rhs, out=lhs), expected))


# ---- memory ---------------------------------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor that holds another, as DTensor and torchao's do, and has no memory."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        strides = inner.stride()
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=strides, dtype=inner.dtype, device=inner.device
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        unwrapped = [each.inner if isinstance(each, cls) else each for each in args]
        return func(*unwrapped, **(kwargs or {}))


CALLS = (dense, grouped, quantiser, layer, masked_layer, routing)
OTHERS = ("x", "rhs", "w13", "w2", "residual", "out", "topk_ids")
OPERANDS = [
    (make, name)
    for make in CALLS
    for name in make("cpu")[1]
    if name not in OTHERS or (make, name) == (layer, "topk_ids")
]


@pytest.mark.parametrize("make, name", OPERANDS, ids=[f"{make.__name__}-{name}" for make, name in OPERANDS])
def test_a_wrapped_tensor_next_to_a_plain_x_is_named(make, name):
    """A kernel would be given address 0, which stands for what the call does without."""
    call, given = make("cpu")
    call(**given)
    said = "offsets" if name == "sizes" else name
    with pytest.raises(TypeError, match=rf"\b{said}\b.*: expected a tensor with memory of its own, got a Wrapper"):
        call(**given | {name: Wrapper(given[name])})


def test_a_tensor_whose_memory_was_freed_is_named():
    call, given = dense("cpu")
    given["bias"].untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="bias: expected a tensor with memory of its own, got a Tensor without"):
        call(**given)


def test_a_wrapped_x_or_residual_goes_through_the_op():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    call, given = dense("cpu")
    with Watch():
        call(**given)
    assert torch.ops.jitgemm.gemm_w4a8_nt.default in seen
    call(**given | {"x": Wrapper(given["x"])})
    call, given = quantiser("cpu")
    call(**given | {"residual": Wrapper(given["residual"])})
