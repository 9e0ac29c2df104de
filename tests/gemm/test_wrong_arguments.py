"""A wrong value for any argument of any call is an error that names the argument, or it is not wrong.

Each call is made with legal arguments, one of them or an element of one replaced by each of `WRONG`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import builders
import numpy as np
import pytest
import torch
from moe_cases import Case
from torch.utils._python_dispatch import TorchDispatchMode

import jitgemm
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.gemm.grouped import rows_of_m_indices
from jitgemm.moe.route import combine, route

K, N, E, M = 64, 96, 3, 4
HUGE = 10**400


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def weights(bits: int) -> tuple[Any, Any]:
    """w13 and w2 of a layer of E experts."""
    return Case(experts=E, k=K, inter=K, n=K, bits=bits).arguments[1:3]


def dense(bits: int = 4, zeros: bool = True, **more: Any) -> dict[str, Any]:
    lhs = builders.affine_lhs(1, M, K)
    rhs = builders.weight_parts(2, N, K, 32, **({} if bits == 4 else {"bits": 8, "codes": "s8"})).packed
    return {"lhs": lhs if zeros else lhs[:2], "rhs": rhs, "bias": torch.zeros(N)} | more


def gemm(bits: int, out: torch.dtype) -> dict[str, Any]:
    return dense(bits, out=torch.zeros(M, N, dtype=out), batch_invariant=False, kernel=None)


def contiguous(bits: int, out: torch.dtype) -> dict[str, Any]:
    given = {"lhs": builders.affine_lhs(1, M, K), "rhs": weights(bits)[1], "out": torch.zeros(M, K, dtype=out)}
    given |= {"offsets": int32(0, 1, 2, 4), "bias": torch.zeros(E, K), "row_index": int32(0, 1, 2, 3)}
    return given | {"expected_m": 2, "batch_invariant": False, "kernel": None}


def masked(bits: int, out: torch.dtype) -> dict[str, Any]:
    x, scale, zero = builders.affine_lhs(1, E * M, K)
    lhs = x.view(E, M, K), scale.view(E, M), zero.view(E, M)
    given = {"lhs": lhs, "rhs": weights(bits)[1], "out": torch.zeros(E, M, K, dtype=out)}
    given |= {"masked_m": int32(1, 0, 4), "expected_m": 2, "bias": torch.zeros(E, K)}
    return given | {"batch_invariant": False, "kernel": None}


def layer(*missing: str) -> dict[str, Any]:
    w13, w2 = weights(4)
    given = {"x": torch.ones(M, K), "w13": w13, "w2": w2, "topk_ids": torch.zeros(M, 2, dtype=torch.int64)}
    given |= {"topk_weights": torch.ones(M, 2), "activation": "swiglu_oai", "order": "gate_up", "limit": 7.0}
    given |= {"alpha": 1.702, "lhs_dtype": torch.int8, "affine": False, "scheme": "token", "expert_map": int32(0, 1, 2)}
    given |= {"bias13": torch.zeros(E, 2 * K), "bias2": torch.zeros(E, K), "addend": torch.zeros(M, K)}
    given |= {"batch_invariant": False, "out": torch.zeros(M, K), "rotation": 0}
    return {name: value for name, value in given.items() if name not in missing}


def masked_layer() -> dict[str, Any]:
    given = layer("x", "topk_ids", "topk_weights", "expert_map", "addend", "out")
    q, scale = jitgemm.quantize_activations(torch.ones(E, M, K), torch.int8)
    return given | {"x": (q, scale), "out": torch.zeros(E, M, K), "masked_m": int32(1, 0, 4), "expected_m": 2}


def quantiser(**more: Any) -> dict[str, Any]:
    given = {"x": torch.ones(M, K), "dtype": torch.int8, "scheme": "tensor", "affine": True, "scale": torch.ones(1)}
    given |= {"zero": int32(0), "silu_mul": False, "gelu_mul": None, "rms_norm": torch.ones(K), "eps": 1e-6}
    given |= {"permutation": torch.arange(K).int(), "residual": torch.ones(M, K), "residual_out": torch.zeros(M, K)}
    out = torch.zeros(M, 256, dtype=torch.int8), torch.zeros(M), torch.zeros(M, dtype=torch.int32)
    return given | {"correction": ("bf16", 32), "out": out, "rotation": 0} | more


def four_bits() -> dict[str, Any]:
    parts = builders.weight_parts(1, N, K, 32, zero_point=True)
    given = {"q": parts.q, "scale": parts.scale, "zero": parts.zero, "offset": torch.zeros_like(parts.scale)}
    given |= {"permutation": torch.arange(K), "group_size": 32, "k": K, "lhs_dtype": torch.int8, "code": "int4"}
    return given | {"correction": False, "sums": "f32"}


def combined() -> dict[str, Any]:
    given = {"rows": torch.ones(6, 16), "inverse": torch.zeros(M, 2, dtype=torch.int32)}
    return given | {"topk_weights": torch.ones(M, 2), "out": torch.zeros(M, 16), "addend": torch.zeros(M, 16)}


BF16, FP32 = torch.bfloat16, torch.float32
PUBLIC: dict[str, Callable[[], dict[str, Any]]] = {
    f"{grouped}gemm_w{bits}a8{out}_nt{form}": lambda make=make, bits=bits, out=out: make(bits, BF16 if out else FP32)
    for grouped, form, make in (
        ("", "", gemm),
        ("m_grouped_", "_contiguous", contiguous),
        ("m_grouped_", "_masked", masked),
    )
    for bits in (4, 8)
    for out in ("", "_bf16")
}
PUBLIC |= {
    "gemm_w4a8_int8_nt": lambda: dense(
        affine=True, scale=torch.ones(1), zero=int32(0), batch_invariant=False,
        out=(torch.zeros(M, N, dtype=torch.int8), torch.zeros(M), torch.zeros(M, dtype=torch.int32)),
    ),
    "explain": lambda: {name: value for name, value in gemm(4, FP32).items() if name not in ("bias", "kernel")},
    "gemm_w4a8_reference": lambda: dense(out_dtype=FP32),
    "m_grouped_gemm_w4a8_reference": lambda: {
        name: value for name, value in (contiguous(4, FP32) | {"out_dtype": FP32}).items()
        if name not in ("expected_m", "batch_invariant", "kernel")
    },
    "fused_experts": layer,
    "fused_experts_masked": masked_layer,
    "fused_experts_reference": lambda: layer("batch_invariant", "out"),
    "fused_experts_workspace_bytes": lambda: {
        **layer("x", "topk_ids", "topk_weights", "expert_map", "addend", "out", "batch_invariant", "activation",
                "order", "limit", "alpha", "lhs_dtype", "bias13", "bias2", "rotation"),
        "tokens": 5, "top_k": 2, "dtype": BF16,
    },
    "quantize_activations": quantiser,
    "pack_mxfp4": lambda: {
        "codes": torch.zeros(N, K // 2, dtype=torch.uint8), "scales": torch.zeros(N, K // 32, dtype=torch.uint8), "k": K,
        "sums": "f32",
    },
    "quantize_mxfp4": lambda: {"w": torch.ones(N, K), "moments": torch.eye(K), "act_order": True, "lhs_dtype": None, "rotation": 0},
    "pack_w4": four_bits,
    "pack_nvfp4": lambda: {
        "codes": torch.zeros(N, K // 2, dtype=torch.uint8), "scales": torch.ones(N, K // 16).to(torch.float8_e4m3fn),
        "global_scale": torch.ones(1),
    },
    "pack_w4_two_level": lambda: {
        "q": torch.zeros(N, K, dtype=torch.uint8), "group_scale": torch.ones(N, 1, dtype=torch.uint8),
        "group_zero": torch.zeros(N, 1, dtype=torch.uint8), "scale": torch.ones(N, dtype=BF16),
    },
    "pack_w8": lambda: {"q": torch.zeros(N, K, dtype=torch.int8), "scale": torch.ones(N, 2), "group_size": 32},
    "quantize_w4": lambda: {
        "w": torch.ones(N, K), "group_size": 32, "symmetric": True, "scale_dtype": BF16, "full_range": True,
        "positive_scales": False, "clip_steps": 1, "moments": torch.eye(K), "act_order": True, "lhs_dtype": None,
        "rotation": 0,
    },
    "quantize_w4_two_level": lambda: {"w": torch.ones(N, K), "moments": torch.eye(K), "act_order": True, "lhs_dtype": None, "rotation": 0},
    "quantize_w8": lambda: {"w": torch.ones(N, K), "lhs_dtype": torch.int8, "block": None, "moments": torch.eye(K), "rotation": 0},
}  # fmt: skip
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    name: (getattr(jitgemm, name), make) for name, make in PUBLIC.items()
}
CALLS |= {
    "quantize_activations-gate": (
        jitgemm.quantize_activations,
        lambda: {"x": torch.ones(M, 2 * K), "dtype": torch.int8, "scheme": "block", "gelu_mul": "tanh"},
    ),
    "quantize_activations-3d": (
        jitgemm.quantize_activations,
        lambda: {"x": torch.ones(2, 2, K), "dtype": torch.int8, "rms_norm": torch.ones(K), "residual": torch.ones(2, 2, K)},
    ),
    "gemm_w4a8_bound": (gemm_w4a8_bound, lambda: dense(out_dtype=FP32)),
    "route": (route, lambda: {"topk_ids": torch.zeros(M, 2, dtype=torch.int64), "experts": E, "expert_map": int32(0, 1, 2)}),
    "combine": (combine, combined),
    "rows_of_m_indices": (rows_of_m_indices, lambda: {"m_indices": int32(0, 0, 2), "experts": E}),
}  # fmt: skip

WRONG: dict[str, Any] = {
    "None": None, "1": 1, "-2": -2, "1.5": 1.5, "True": True, "NaN": math.nan, "inf": math.inf, "10**400": HUGE,
    "'x'": "x", "()": (), "[1.0]": [1.0], "object": object(), "float64": torch.float64, "array": np.ones(3),
    "scalar": torch.tensor(2.5),
}  # fmt: skip
LIKE: dict[str, Callable[[torch.Tensor], Any]] = {
    "sparse": lambda tensor: torch.sparse_coo_tensor(size=tensor.shape, dtype=tensor.dtype, check_invariants=False),
    "double": torch.Tensor.double,
    "complex": lambda tensor: torch.zeros(tensor.shape, dtype=torch.complex64),
    "bool": torch.Tensor.bool,
    "meta": lambda tensor: tensor.to("meta"),
    "more dimensions": lambda tensor: tensor[None, None],
    "no dimensions": lambda tensor: tensor.flatten()[0],
    "no elements": lambda tensor: tensor[:0],
    "fewer columns": lambda tensor: tensor[..., :-1],
}
"""Of a tensor."""

SHAPES = {"meta", "more dimensions", "no dimensions", "no elements", "fewer columns"}
"""Where two arguments do not fit together, either may be named."""
LEGAL: dict[str, set[str]] = {
    "act_order": {"True"},
    "affine": {"True"},
    "alpha": {"None", "1", "1.5", "inf"},
    "batch_invariant": {"True"},
    "bias": {"None", "double"},
    "block": {"None"},
    "clip_steps": {"1"},
    "correction": {"None"},
    "eps": {"1", "1.5"},
    "expected_m": {"None", "1", "1.5", "10**400"},
    "expert_map": {"None", "fewer columns"},
    "experts": {"1"},
    "full_range": {"True"},
    "gelu_mul": {"None"},
    "global_scale": {"scalar", "more dimensions", "no dimensions"},
    "group_size": {"None", "10**400"},
    "k": {"None", "1", "10**400"},
    "kernel": {"None", "'x'"},
    "lhs": {"scalar", "no dimensions"},
    "lhs_dtype": {"None"},
    "limit": {"None", "1", "1.5", "inf"},
    "m_indices": {"meta", "no elements", "fewer columns"},
    "moments": {"None"},
    "out": {"None", "double"},
    "out_dtype": {"float64"},
    "positive_scales": {"True"},
    "scale": {"None", "scalar", "more dimensions", "no dimensions"},
    "silu_mul": {"True"},
    "swap_ab": {"True"},
    "symmetric": {"True"},
    "tokens": {"1"},
    "top_k": {"1"},
    "topk_ids": {"no elements"},
    "x": {"scalar", "more dimensions", "no dimensions", "no elements"},
    "zero": {"None", "more dimensions", "no dimensions"},
}
for _name in (
    "row_index", "bias13", "bias2", "addend", "rms_norm", "permutation", "offset", "residual", "residual_out",
):  # fmt: skip
    LEGAL[_name] = {"None"}
"""By argument: what is not wrong by itself. A kernel's label means nothing on a CPU."""


def changes(
    given: dict[str, Any], others: dict[str, Any] = WRONG, like: dict[str, Callable[[torch.Tensor], Any]] = LIKE
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(argument, what it is now, the arguments)."""
    for name, value in given.items():
        for kind, wrong in others.items():
            yield name, kind, given | {name: wrong}
        parts = value if isinstance(value, tuple) else (value,)
        for i, part in enumerate(parts):
            replaced: dict[str, Any] = {} if parts == (value,) else dict(others)
            if isinstance(part, torch.Tensor):
                replaced |= {kind: make(part) for kind, make in like.items()}
            for kind, wrong in replaced.items():
                whole = (*parts[:i], wrong, *parts[i + 1 :]) if isinstance(value, tuple) else wrong
                yield name, f"{kind} at {i}" if isinstance(value, tuple) else kind, given | {name: whole}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_is_wrong_is_named(name):
    call, make = CALLS[name]
    call(**make())
    wrong = []
    for argument, kind, given in changes(make()):
        try:
            call(**given)
        except (TypeError, ValueError) as error:
            free = kind.partition(" at ")[0] in SHAPES | LEGAL.get(argument, set())
            names = [*given, "lhs"] if free else [argument, "lhs"] if argument == "x" else [argument]
            if not re.search(rf"\b({'|'.join(names)})\b.*: expected", str(error)):
                wrong.append(f"{argument} = {kind}: {type(error).__name__}: {error}")
        except Exception as error:
            wrong.append(f"{argument} = {kind}: {type(error).__name__}: {error}")
        else:
            if kind.partition(" at ")[0] not in LEGAL.get(argument, ()):
                wrong.append(f"{argument} = {kind}: no error")
    assert not wrong, "\n".join(wrong)


class Watched(TorchDispatchMode):
    """Under which calls go through their ops."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


GRADIENTS = ("quantize_activations", "fused_experts", "fused_experts_masked", "combine", "gemm_w4a8_reference")


@pytest.mark.parametrize("name", GRADIENTS)
def test_what_a_gradient_is_expected_for_is_refused(name):
    """In a first call, in a second one, and through the op; under no_grad it is not, which makes no later call legal."""
    call, make = CALLS[name]
    like = {"gradient": lambda tensor: tensor.clone().requires_grad_(tensor.is_floating_point())}
    for argument, _, given in changes(make(), {}, like):
        parts = given[argument] if isinstance(given[argument], tuple) else (given[argument],)
        if argument == "out" or not any(part.requires_grad for part in parts):
            continue
        for mode in (contextlib.nullcontext(), contextlib.nullcontext(), Watched()):
            with torch.no_grad():
                call(**given)
            if argument == "residual_out" and isinstance(mode, Watched):  # PyTorch's own error
                continue
            message = rf"\b({argument}|lhs)\b.*: expected a tensor that does not require grad.*no_grad"
            with mode, pytest.raises(ValueError, match=message):
                call(**given)


def test_all_arguments_of_all_public_calls_are_tried():
    functions = {name for name in jitgemm.__all__ if inspect.isfunction(getattr(jitgemm, name))}
    assert functions - set(PUBLIC) == {"load"}
    for name, make in PUBLIC.items():
        assert set(make()) == set(inspect.signature(getattr(jitgemm, name)).parameters), name
