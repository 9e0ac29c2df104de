"""DeepGEMM's calls by its names and in its order of arguments (2.6.1's), so that its callers change an import.

`a` is a pair (x, scales) of e4m3 activations [m, k] with scales per token and 128 k, fp32 [m, ceil(k / 128)] or packed
e8m0 int32 [m, ceil(k / 512)] (docs/formats.md), of any strides. `b` is a weight from `pack_w8` or `pack_w4`, or a pair
(w, scales) as DeepGEMM takes it, e4m3 [n, k] with scales [ceil(n / 128), ceil(k / 128)] or [n, ceil(k / 128)], or
packed [n, ceil(k / 512)]. `d` is bfloat16, float16 or float32.

Pack a weight once, when it is loaded: weight = jitgemm.pack_w8(w, scales). A pair is packed in every call, in a CUDA
graph in every replay, so that results are those of the values that it has; a warning says so once. torch.compile breaks
its graph at a pair: fullgraph=True needs a packed weight.

Nothing has to be aligned or laid out in a certain way. `recipe`, or `recipe_a` and `recipe_b`, where they are given,
are what the scales' shapes say; `compiled_dims`, `disable_ue8m0_cast` and `ensure_zero_padding` change nothing here.
Errors name `a` lhs, `b` rhs and `d` out. `_MISSING` has the names that raise NotImplementedError, and what to call
instead.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from jitgemm.gemm.grouped import rows_of_m_indices
from jitgemm.gemm.problem import ANY, experts_of, fp32_scales
from jitgemm.gemm.run import contiguous, gemm, masked
from jitgemm.kernel.formats import LHS_GROUP, ceil_div
from jitgemm.runtime.device import device_of
from jitgemm.tensors import check_dtype, check_int, check_tensor, describe
from jitgemm.weight.pack import pack_w8
from jitgemm.weight.packed import Weight
from jitgemm.weight.parts import check_rotated

Pair = tuple[torch.Tensor, torch.Tensor]
Recipe = tuple[int, int, int]
Part = tuple[int, int]

_RECIPES = {
    "recipe": (None, (1, 128, 128), (1, 1, 128)),
    "recipe_a": (None, (1, 128)),
    "recipe_b": (None, (128, 128), (1, 128)),
}
"""Rows of a, rows of b and k that share a scale; of a alone; of b alone."""
_PACKED_IN_EVERY_CALL = (
    "jitgemm.deep_gemm packs a pair (w, scales) in every call, which is slow: pack it once, when it is loaded, with "
    "weight = jitgemm.pack_w8(w, scales), and pass the weight"
)


def fp8_gemm_nt(
    a: Pair, b: Pair | Weight, d: torch.Tensor, c: torch.Tensor | None = None, recipe: Recipe | None = None,
    recipe_a: Part | None = None, recipe_b: Part | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """d [m, n] = a · bᵀ.

    Raises:
        ValueError: c is given: results are not added to a tensor; another recipe.
        TypeError, ValueError: as `gemm_w8a8_nt` and `pack_w8`.
    """
    if c is not None:
        raise ValueError(f"c: expected None, as results are not added to a tensor, got a {type(c).__name__}")
    gemm(ANY, a, _weight(a, b, recipe, recipe_a, recipe_b), d)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair, b: Pair | Weight, d: torch.Tensor, grouped_layout: torch.Tensor | None = None,
    recipe: Recipe | None = None, recipe_a: Part | None = None, recipe_b: Part | None = None,
    compiled_dims: str = "nk", disable_ue8m0_cast: bool = False, use_psum_layout: bool = False,
    ensure_zero_padding: bool = True, expected_m_for_psum_layout: int | None = None, *,
    m_indices: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """d[i] = a[i] · b[grouped_layout[i]]ᵀ; rows of index -1 are left alone.

    Args:
        b: of E experts, w [E, n, k] with scales [E, ceil(n / 128), ceil(k / 128)].
        grouped_layout: int32 [M]. Each index stands in one run of rows, in any order of experts and at any row; rows of
            -1 stand between runs. DeepGEMM reads one index for each block of rows, so that an expert may have several
            runs (0, 1, 0): here it may not, and its results would be wrong. Asking waits for the device, so that this
            is checked on the CPU, and on a GPU where JITGEMM_DEBUG is set.
        m_indices: its older name.

    Raises:
        ValueError: another recipe; an index in several runs, where it is checked; use_psum_layout, as experts' ends
            alone do not tell where the next one starts.
        TypeError, ValueError: as `m_grouped_gemm_w8a8_nt_contiguous` and `pack_w8`.
    """
    if use_psum_layout or expected_m_for_psum_layout is not None:
        raise ValueError("use_psum_layout: expected False and an index for each row in grouped_layout")
    name, indices = ("grouped_layout", grouped_layout) if m_indices is None else ("m_indices", m_indices)
    if indices is None or (grouped_layout is not None and m_indices is not None):
        raise TypeError("grouped_layout: expected it, or m_indices in its place")
    weight = _weight(a, b, recipe, recipe_a, recipe_b)
    rows = rows_of_m_indices(indices, experts_of(weight), name)
    if indices.shape != check_tensor("d", d).shape[:1]:
        raise ValueError(f"{name}: expected shape {list(d.shape[:1])}, got {list(indices.shape)}")
    contiguous(ANY, a, weight, d, rows)


def m_grouped_fp8_gemm_nt_masked(
    a: Pair, b: Pair | Weight, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int,
    recipe: Recipe | None = None, recipe_a: Part | None = None, recipe_b: Part | None = None,
    compiled_dims: str = "nk", disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """d[e, i] = a[e, i] · b[e]ᵀ for i < masked_m[e].

    Args:
        a: x [E, max_m, k] with scales [E, max_m, ceil(k / 128)].
        b: as for `m_grouped_fp8_gemm_nt_contiguous`.
        d: [E, max_m, n].

    Raises:
        ValueError: another recipe.
        TypeError, ValueError, CacheMissError: as from `m_grouped_gemm_w8a8_nt_masked` and `pack_w8`.
    """
    masked(ANY, a, _weight(a, b, recipe, recipe_a, recipe_b), d, masked_m, expected_m)


def _named(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, as help and tracebacks are to show it."""
    call.__name__ = call.__qualname__ = name
    return call


def _older(name: str, call: Callable[..., None]) -> Callable[..., None]:
    def by_older_names(lhs: Pair, rhs: Pair | Weight, out: torch.Tensor, *groups: Any, **options: Any) -> None:
        """The same call by the names that it and its operands had first."""
        call(lhs, rhs, out, *groups, **options)

    return _named(name, by_older_names)


gemm_fp8_fp8_bf16_nt = _older("gemm_fp8_fp8_bf16_nt", fp8_gemm_nt)
m_grouped_gemm_fp8_fp8_bf16_nt_contiguous = _older(
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", m_grouped_fp8_gemm_nt_contiguous
)
m_grouped_gemm_fp8_fp8_bf16_nt_masked = _older("m_grouped_gemm_fp8_fp8_bf16_nt_masked", m_grouped_fp8_gemm_nt_masked)
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked


def _with_transposed(name: str, call: Callable[..., None], *names: str) -> Callable[..., None]:
    def transposed(a: Pair, b: Pair | Weight, d: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """The _nt call's product. An n in the name: w is [k, n] and its scales [ceil(k / 128), ceil(n / 128)], with E
        first where it is grouped. A leading t: x is [k, m] and its scales [ceil(k / 128), m]; x is copied, as values
        along k have to lie next to one another.
        """
        if "a" in names:
            x, scale = _transposed("a", a)
            a = x.contiguous(), scale
        call(a, _transposed("b", b) if "b" in names else b, d, *arguments, **options)

    return _named(name, transposed)


fp8_gemm_nn = fp8_fp4_gemm_nn = _with_transposed("fp8_gemm_nn", fp8_gemm_nt, "b")
fp8_gemm_tn = fp8_fp4_gemm_tn = _with_transposed("fp8_gemm_tn", fp8_gemm_nt, "a", "b")
fp8_gemm_tt = fp8_fp4_gemm_tt = _with_transposed("fp8_gemm_tt", fp8_gemm_nt, "a")
m_grouped_fp8_gemm_nn_contiguous = _with_transposed(
    "m_grouped_fp8_gemm_nn_contiguous", m_grouped_fp8_gemm_nt_contiguous, "b"
)
fp8_fp4_gemm_nt = fp8_gemm_nt
m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous
m_grouped_fp8_fp4_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
"""DeepGEMM calls them so, too. Pairs of packed FP4 codes raise TypeError."""

_MISSING = {
    name: reason
    for reason, names in {
        "jitgemm has no GEMM for the gradients of weights": (
            "k_grouped_fp8_gemm_nt_contiguous k_grouped_fp8_gemm_tn_contiguous "
            "k_grouped_bf16_gemm_tn_contiguous k_grouped_wgrad_gemm_fp8_fp8_fp32_nt "
            "wgrad_gemm_fp8_fp8_fp32_nt get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"
        ),
        "call fp8_gemm_nt with a d of its own, and copy the heads' parts out of it": "fp8_gemm_nt_skip_head_mid",
        "jitgemm multiplies 8-bit activations: torch.matmul takes bf16, jitgemm.quantize_activations makes 8 bits": (
            "bf16_gemm_nt bf16_gemm_nn bf16_gemm_tn bf16_gemm_tt m_grouped_bf16_gemm_nt_contiguous "
            "m_grouped_bf16_gemm_nn_contiguous m_grouped_bf16_gemm_nt_masked bf16_m_grouped_gemm_nt_masked "
            "bf16_mega_moe"
        ),
        "call torch.matmul, or torch._scaled_mm for FP8": (
            "cublaslt_gemm_nt cublaslt_gemm_nn cublaslt_gemm_tn cublaslt_gemm_tt"
        ),
        "call torch.einsum": "einsum",
        "call fp8_gemm_nt for each matrix of the batch, or m_grouped_fp8_gemm_nt_masked for all": "fp8_einsum",
        "jitgemm has no attention kernels": (
            "fp8_fp4_mqa_logits fp8_mqa_logits fp8_fp4_paged_mqa_logits fp8_paged_mqa_logits "
            "get_paged_mqa_logits_metadata"
        ),
        "jitgemm has no TF32 kernels": "tf32_hc_prenorm_gemm",
        "jitgemm.fused_experts is a layer of experts; jitgemm.nn.ExpertParallel divides it": "fp8_fp4_mega_moe",
        "jitgemm.fused_experts needs no buffer of its caller's": "get_symm_buffer_for_mega_moe",
        "jitgemm.pack_w8 packs the weights of experts": "transform_weights_for_mega_moe",
    }.items()
    for name in names.split()
}
"""DeepGEMM's names that jitgemm does not have -> the reason, or what to call instead."""
_FIXED: dict[str, tuple[object, str]] = {
    "get_theoretical_mk_alignment_for_contiguous_layout": (1, "1: no alignment is faster than another."),
    "get_pdl": (True, "True: a kernel starts before the kernel before it ends where that is safe."),
    "get_tc_util": (100, "100: kernels use the tensor cores as much as they can."),
    "set_pdl": (None, "Changes nothing: each call decides whether its kernel may start early."),
    "set_tc_util": (None, "Changes nothing."),
    "set_ignore_compile_dims": (None, "Changes nothing: kernels are not compiled for shapes."),
    "set_block_size_multiple_of": (
        None,
        "Changes nothing: the selector chooses tiles, and results do not depend on it.",
    ),
}
"""Settings that change no result -> what they return, whatever they are given, and why."""


def _stub(name: str) -> Callable[..., Any]:
    def call(*arguments: object, **options: object) -> object:
        if name in _MISSING:
            raise NotImplementedError(f"{name}: {_MISSING[name]}")
        return _FIXED[name][0]

    call.__doc__ = f"NotImplementedError: {_MISSING[name]}." if name in _MISSING else _FIXED[name][1]
    return _named(name, call)


globals().update({name: _stub(name) for name in (*_MISSING, *_FIXED)})
if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]: ...


_alignment = 1


def get_mk_alignment_for_contiguous_layout() -> int:
    """1, unless it was set: an expert's rows may start and end anywhere."""
    return _alignment


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Sets what `get_mk_alignment_for_contiguous_layout` returns, for callers that pad by it. No kernel needs it."""
    global _alignment
    _alignment = check_int("new_value", new_value)


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """x elements of element_size bytes, rounded up to whole 16 bytes, in elements."""
    return ceil_div(x, 16 // element_size) * (16 // element_size)


def get_mn_major_tma_aligned_tensor(x: torch.Tensor) -> torch.Tensor:
    """x itself: scales may have any strides."""
    return x


def transform_sf_into_required_layout(sf: torch.Tensor, *layout: object, **options: object) -> torch.Tensor:
    """sf itself: the calls take scales as they are, fp32 or packed, and check them."""
    return check_tensor("sf", sf)


get_col_major_tma_aligned_tensor = get_mn_major_tma_aligned_tensor
get_mn_major_tma_aligned_packed_ue8m0_tensor = transform_sf_into_required_layout


def get_num_sms() -> int:
    """The SMs of the current GPU: kernels may use all of them."""
    return device_of(torch.cuda.current_device()).num_sms


def set_num_sms(new_num_sms: int) -> None:
    """Warns where it is fewer than `get_num_sms()`: kernels use as many SMs as their tiles fill."""
    if check_int("new_num_sms", new_num_sms) < get_num_sms():
        _warn_once(f"set_num_sms({new_num_sms}): kernels of jitgemm may use all {get_num_sms()} SMs")


def _weight(a: object, b: object, *recipes: object) -> Weight:
    """b itself, or the weight that the pair b was packed into, for activations that are rotated as it is.

    recipes: those of _RECIPES, in its order.
    """
    for (name, known_ones), recipe in zip(_RECIPES.items(), recipes):
        if (tuple(recipe) if isinstance(recipe, (tuple, list)) else recipe) not in known_ones:
            raise ValueError(f"{name}: expected one of {known_ones}, got {recipe!r}")
    one, *parts = (recipe is not None for recipe in recipes)
    if parts[0] != parts[1] or (one and parts[0]):
        raise ValueError("recipe: expected it alone, recipe_a and recipe_b together, or none of the three")
    check_rotated(a, getattr(b, "rotation", 0), "a")
    if isinstance(b, Weight):
        return b
    w, scale = _pair("b", b, "a packed weight or a pair (w, scales)")
    if w.dtype in (torch.int8, torch.uint8, getattr(torch, "float4_e2m1fn_x2", None)):
        raise TypeError(f"b[0] (w): expected float8_e4m3fn, got {describe(w)}: packed FP4 codes are not supported")
    check_dtype("b[0] (w)", w.dtype, ("e4m3",))
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="b: expected a packed weight (jitgemm.pack_w8) under torch.compile, got a pair")
    return _pack(w, scale)


def _pair(name: str, pair: object, expected: str) -> Pair:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name}: expected {expected}, got {type(pair).__name__}")
    values = "w" if name == "b" else "x"
    return check_tensor(f"{name}[0] ({values})", pair[0]), check_tensor(f"{name}[1] (scales)", pair[1])


def _transposed(name: str, pair: object) -> Pair:
    values, scale = _pair(name, pair, "a pair, as a packed weight is [n, k]: fp8_gemm_nt and fp8_gemm_tt take one")
    if min(values.dim(), scale.dim()) < 2:
        raise ValueError(f"{name}: expected two dimensions and more, got {describe(values)} and {describe(scale)}")
    return values.mT, scale.mT


@torch.compiler.disable
def _pack(w: torch.Tensor, scale: torch.Tensor) -> Weight:
    _warn_once(_PACKED_IN_EVERY_CALL, 6)
    if scale.dtype == torch.int32 and w.dim() > 1:
        expected = [*w.shape[:-1], ceil_div(w.shape[-1], 4 * LHS_GROUP)]
        if scale.dim() != w.dim() or scale.shape[-1] != expected[-1]:
            raise ValueError(f"b[1] (scales): expected int32 {expected}, four exponents each, got {describe(scale)}")
        scale = fp32_scales(scale, w.shape[-1])
    return pack_w8(w, scale)


@functools.cache
def _warn_once(text: str, stacklevel: int = 3) -> None:
    warnings.warn(text, stacklevel=stacklevel)
