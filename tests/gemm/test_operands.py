"""What calls write and read: a written operand has memory of its own, or is an operand that it may be in place of.

The same on both devices, and before anything is launched or written.
"""

from __future__ import annotations

from collections.abc import Callable
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


def arguments_of_layer(device: str, **options: Any) -> Arguments:
    """Of `fused_experts`, with all operands, out [8, 64] of x's shape among them."""
    case = Case(TOKENS, 2, EXPERTS, WIDTH, 96, WIDTH, group_size=builders.PER_CHANNEL, device=device)
    given: Arguments = dict(zip(("x", "w13", "w2", "topk_ids", "topk_weights"), case.arguments))
    g = builders.generator(5)
    given |= {"bias13": torch.randn(EXPERTS, 192, generator=g), "bias2": torch.randn(EXPERTS, WIDTH, generator=g)}
    given |= {"addend": torch.randn(TOKENS, WIDTH, generator=g), "expert_map": torch.arange(EXPERTS).int()}
    given = {name: value.to(device) for name, value in given.items()}
    return given | {"out": torch.zeros(TOKENS, WIDTH, device=device), "lhs_dtype": torch.int8} | options


def arguments_of_masked(device: str) -> Arguments:
    given = arguments_of_layer(device)
    x = torch.randn(EXPERTS, MAX_M, WIDTH, generator=builders.generator(1)).to(device)
    masked_m = torch.full((EXPERTS,), 2, dtype=torch.int32, device=device)
    kept = {name: given[name] for name in ("w13", "w2", "bias13", "bias2", "lhs_dtype")}
    return {"x": x, "out": torch.zeros_like(x), "masked_m": masked_m, "expected_m": 2} | kept


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


def raises_and_writes_nothing(call: Callable[..., Any], given: Arguments, name: str, written: str = "out") -> None:
    """The call of `given`, in which what is written overlaps the operand of this name."""
    before = given["out"].view(torch.uint8).clone()
    message = f"^{written}: expected memory of its own, got a tensor that overlaps {name}$"
    for _ in range(2):  # the second time, too
        with pytest.raises(ValueError, match=message):
            call(**given)
    assert torch.equal(given["out"].view(torch.uint8), before)


WEIGHTS = [f"{name}.{part}" for name in ("w13", "w2") for part in ("blocks", "channel_scale", "row_sum")]
READ = [*WEIGHTS, "topk_ids", "topk_weights", "expert_map", "bias13", "bias2"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", READ)
def test_a_layer_writes_to_nothing_that_it_reads(name, device):
    given = arguments_of_layer(device)
    jitgemm.fused_experts(**given)  # a legal call of the same shapes lets nothing through
    given["out"] = over(with_room(given, name), given["out"])
    raises_and_writes_nothing(jitgemm.fused_experts, given, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["x", "addend"])
def test_a_layer_writes_to_no_part_of_its_tokens_or_addend(name, device):
    given = arguments_of_layer(device)
    given["out"] = over(with_room(given, name), given["out"], step=16)
    raises_and_writes_nothing(jitgemm.fused_experts, given, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pad", [0, 8])
@pytest.mark.parametrize("name", ["x", "addend"])
def test_a_layer_may_write_in_place_of_its_tokens_or_addend(name, pad, device):
    given = arguments_of_layer(device, out=None)
    wide = torch.zeros(TOKENS, WIDTH + pad, device=device)
    wide[:, :WIDTH] = given[name]
    expected = jitgemm.fused_experts(**given)
    given[name] = given["out"] = wide[:, :WIDTH]
    assert jitgemm.fused_experts(**given) is given["out"]
    assert builders.same_bits(given["out"].contiguous().cpu(), expected.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_be_combined_in_place_of_the_addend(device):
    g = builders.generator(1)
    rows, addend = (torch.randn(n, 16, generator=g).to(device) for n in (6, 3))
    inverse = torch.tensor([[0, 4], [-1, -1], [3, 1]], dtype=torch.int32, device=device)
    weights, expected = torch.rand(3, 2, generator=g).to(device), torch.empty(3, 16, device=device)
    combine(rows, inverse, weights, expected, addend=addend)
    combine(rows, inverse, weights, addend, addend=addend)
    assert torch.equal(addend, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["rows", "inverse", "topk_weights", "addend"])
def test_combined_rows_are_written_to_nothing_that_is_read(name, device):
    given = {"rows": torch.zeros(6, 16), "inverse": torch.zeros(3, 2, dtype=torch.int32)}
    given |= {"topk_weights": torch.ones(3, 2), "addend": torch.zeros(3, 16), "out": torch.zeros(3, 16)}
    given = {each: value.to(device) for each, value in given.items()}
    given["out"] = over(with_room(given, name), given["out"], step=16 if name == "addend" else 0)
    raises_and_writes_nothing(combine, given, name)


MASKED = [*WEIGHTS, "masked_m", "bias13", "bias2"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MASKED)
def test_a_masked_layer_writes_to_nothing_that_it_reads(name, device):
    given = arguments_of_masked(device)
    fused_experts_masked(**given)
    given["out"] = over(with_room(given, name), given["out"])
    raises_and_writes_nothing(fused_experts_masked, given, name)


@pytest.mark.parametrize("device", DEVICES)
def test_a_masked_layer_may_write_in_place_of_its_tokens_and_to_no_part_of_them(device):
    given = arguments_of_masked(device)
    x = with_room(given, "x")
    fused_experts_masked(**given)
    part = given | {"out": over(x, x, step=256)}
    raises_and_writes_nothing(fused_experts_masked, part, "x")
    expected, given["out"] = given["out"], x
    fused_experts_masked(**given)
    assert builders.same_bits(x[:, :2].contiguous().cpu(), expected[:, :2].contiguous().cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_a_masked_layer_writes_to_no_scales_of_its_tokens(device):
    given = arguments_of_masked(device)
    q, scale = jitgemm.quantize_activations(given["x"], torch.int8)
    given |= {"x": (q, roomy(scale))}
    given["out"] = over(given["x"][1], given["out"])
    message = r"lhs\[1\] \(x_scale\)"
    raises_and_writes_nothing(fused_experts_masked, given, message)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["rhs.blocks", "rhs.row_sum", "bias", r"lhs\[1\] \(x_scale\)"])
def test_an_8_bit_result_is_written_to_nothing_that_is_read(name, device):
    lhs = tuple(tensor.to(device) for tensor in builders.affine_lhs(1, 3, 64))
    lhs = (lhs[0], roomy(lhs[1].flatten()), lhs[2])
    given: Arguments = {"lhs": lhs, "rhs": builders.weight_parts(2, 64, 64, 32).packed.to(device)}
    given["bias"] = torch.zeros(64, device=device)
    q = torch.zeros(3, 64, dtype=torch.int8, device=device)
    q = over(lhs[1] if "lhs" in name else with_room(given, name), q)
    out = q, torch.empty(3, device=device), torch.empty(3, dtype=torch.int32, device=device)

    def call(out: torch.Tensor, **rest: Any) -> None:
        jitgemm.gemm_w4a8_int8_nt(**rest, out=(out, *others))

    others = out[1:]
    raises_and_writes_nothing(call, given | {"out": q}, name, r"out\[0\]")


@pytest.mark.parametrize("device", DEVICES)
def test_an_8_bit_result_may_be_written_in_place_of_the_activations(device):
    lhs = tuple(tensor.to(device) for tensor in builders.affine_lhs(1, 3, 64))
    lhs = (lhs[0], lhs[1].flatten(), lhs[2].flatten())
    rhs = builders.weight_parts(2, 64, 64, 32).packed.to(device)
    expected = jitgemm.gemm_w4a8_int8_nt(lhs, rhs)
    assert all(map(torch.equal, jitgemm.gemm_w4a8_int8_nt(lhs, rhs, out=lhs), expected))


OF_GEMM = [
    ("x", 32, True), ("x_scale", 32, True), ("x_zero", 32, True), ("bias", 32, True), ("rhs.blocks", 32, True),
    ("rhs.channel_scale", builders.PER_CHANNEL, True), ("rhs.row_sum", 32, True), ("rhs.row_sum", 32, False),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, group_size, zeros", OF_GEMM)
def test_a_gemm_writes_to_nothing_that_it_reads_nor_to_row_sums(name, group_size, zeros, device):
    given: Arguments = dict(zip(("x", "x_scale", "x_zero"), builders.affine_lhs(1, 3, 64), strict=True))
    given = {each: value.to(device) for each, value in given.items()} | {"bias": torch.zeros(64, device=device)}
    given["rhs"] = builders.weight_parts(2, 64, 64, group_size).packed.to(device)
    given["out"] = torch.zeros(3, 64, dtype=torch.bfloat16, device=device)

    def call(x, x_scale, x_zero, rhs, bias, out) -> None:
        jitgemm.gemm_w4a8_nt((x, x_scale, x_zero) if zeros else (x, x_scale), rhs, out, bias=bias)

    call(**given)  # a legal call of the same shapes lets nothing through
    given["out"] = over(with_room(given, name), given["out"])
    place = {"x": r"lhs\[0\] \(x\)", "x_scale": r"lhs\[1\] \(x_scale\)", "x_zero": r"lhs\[2\] \(x_zero\)"}
    raises_and_writes_nothing(call, given, place.get(name, name))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["rhs.blocks", "bias", "sizes"])
def test_a_grouped_gemm_writes_to_nothing_that_it_reads(name, device, masked):
    given: Arguments = {"rhs": arguments_of_layer(device)["w2"], "bias": torch.zeros(EXPERTS, WIDTH, device=device)}
    x = torch.zeros(EXPERTS, MAX_M, 96, dtype=torch.int8, device=device)
    out, sizes = torch.zeros(EXPERTS, MAX_M, WIDTH, device=device), torch.arange(EXPERTS, dtype=torch.int32)
    given |= {"x": x, "out": out, "sizes": sizes.to(device), "rest": [2]}
    if not masked:
        given |= {"x": x.flatten(0, 1), "out": out.flatten(0, 1), "rest": [], "sizes": torch.arange(5).to(device)}
    given["out"] = over(with_room(given, name), given["out"])

    def call(x, rhs, out, sizes, rest, bias) -> None:
        form = "masked" if masked else "contiguous"
        scale = torch.ones(x.shape[:-1], device=device)
        getattr(jitgemm, f"m_grouped_gemm_w4a8_nt_{form}")((x, scale), rhs, out, sizes, *rest, bias=bias)

    raises_and_writes_nothing(call, given, "offsets or masked_m" if name == "sizes" else name)


def test_a_reference_that_is_given_out_writes_to_nothing_that_it_reads():
    given: Arguments = {"rhs": arguments_of_layer("cpu")["w2"]}
    lhs = torch.zeros(5, 96, dtype=torch.int8), torch.ones(5)
    given["out"] = torch.zeros(5, WIDTH)
    given |= {
        "lhs": lhs,
        "offsets": torch.arange(EXPERTS + 1),
        "out": over(with_room(given, "rhs.blocks"), given["out"]),
    }
    raises_and_writes_nothing(jitgemm.m_grouped_gemm_w4a8_reference, given, "rhs.blocks")


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


def dense(device: str) -> tuple[Callable[..., Any], Arguments]:
    lhs = [tensor.to(device) for tensor in builders.affine_lhs(1, 3, 64)]
    given: Arguments = dict(zip(("x", "x_scale", "x_zero"), lhs))
    given |= {"rhs": builders.weight_parts(2, 64, 64, 32).packed.to(device), "bias": torch.zeros(64, device=device)}

    def call(x, x_scale, x_zero, rhs, bias) -> None:
        jitgemm.gemm_w4a8_nt((x, x_scale, x_zero), rhs, torch.empty(3, 64, device=device), bias=bias)

    return call, given


def grouped(device: str) -> tuple[Callable[..., Any], Arguments]:
    rhs = arguments_of_layer(device)["w2"]
    given: Arguments = {"x_scale": torch.ones(5), "bias": torch.zeros(EXPERTS, WIDTH)}
    given |= {"offsets": torch.arange(EXPERTS + 1), "row_index": torch.arange(5, dtype=torch.int32)}
    x, out = torch.zeros(5, 96, dtype=torch.int8, device=device), torch.empty(5, WIDTH, device=device)

    def call(x_scale, **rest: Any) -> None:
        jitgemm.m_grouped_gemm_w4a8_nt_contiguous((x, x_scale), rhs, out, **rest)

    return call, {name: value.to(device) for name, value in given.items()}


def quantiser(device: str) -> tuple[Callable[..., Any], Arguments]:
    x = torch.randn(5, WIDTH, device=device)
    given: Arguments = {
        "scale": torch.ones(1),
        "zero": torch.zeros(1, dtype=torch.int32),
        "rms_norm": torch.ones(WIDTH),
    }
    given |= {"permutation": torch.arange(WIDTH).int(), "residual": torch.zeros(5, WIDTH)}
    given |= {"residual_out": torch.zeros(5, WIDTH)}

    def call(**rest: Any) -> None:
        jitgemm.quantize_activations(x, torch.int8, scheme="tensor", affine=True, **rest)

    return call, {name: value.to(device) for name, value in given.items()}


def layer(device: str) -> tuple[Callable[..., Any], Arguments]:
    given = arguments_of_layer(device)
    fixed = {name: given.pop(name) for name in ("x", "w13", "w2", "lhs_dtype", "out")}
    return lambda **rest: jitgemm.fused_experts(**fixed, **rest), given


def masked_layer(device: str) -> tuple[Callable[..., Any], Arguments]:
    given = arguments_of_masked(device)
    fixed = {name: given.pop(name) for name in ("x", "w13", "w2", "out", "lhs_dtype", "expected_m")}
    return lambda **rest: fused_experts_masked(**fixed, **rest), given


def routing(device: str) -> tuple[Callable[..., Any], Arguments]:
    ids, given = torch.zeros(4, 2, dtype=torch.int64), {"expert_map": torch.arange(EXPERTS).int().to(device)}
    return lambda expert_map: route(ids.to(device), EXPERTS, expert_map=expert_map), given


CALLS = (dense, grouped, quantiser, layer, masked_layer, routing)
OPERANDS = [(make, name) for make in CALLS for name in make("cpu")[1] if name not in ("x", "rhs", "residual")]


@pytest.mark.parametrize("make, name", OPERANDS, ids=[f"{make.__name__}-{name}" for make, name in OPERANDS])
def test_a_wrapped_tensor_next_to_a_plain_x_is_named(make, name):
    """A kernel would be given address 0, which stands for what the call does without."""
    call, given = make("cpu")
    call(**given)
    with pytest.raises(TypeError, match=rf"\b{name}\b.*: expected a tensor with memory of its own, got a Wrapper"):
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
