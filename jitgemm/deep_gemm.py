"""DeepGEMM's calls by its names and in its order of arguments (2.6.1's), so that its callers change an import.

`a` is a pair (x, scales) of e4m3 activations [m, k] with scales per token and 128 k, fp32 [m, ceil(k / 128)] or packed
e8m0 int32 [m, ceil(k / 512)] (docs/formats.md), of any strides. `b` is a weight from `pack_w8` or `pack_w4`, or a pair
(w, scales) as DeepGEMM takes it, e4m3 [n, k] with scales [ceil(n / 128), ceil(k / 128)] or [n, ceil(k / 128)], or
packed [n, ceil(k / 512)]. A pair is packed when it first comes, into memory of its own, and remembered as long as the
tensor w lives and neither is written to, which tensors made in inference mode do not tell. Pass a packed weight to hold
it once, and where w is another view in each call. `d` is bfloat16, float16 or float32.

Nothing has to be aligned or laid out in a certain way. `recipe`, or `recipe_a` and `recipe_b`, where they are given,
are what the scales' shapes say; `compiled_dims`, `disable_ue8m0_cast` and `ensure_zero_padding` change nothing here.
Errors name `a` lhs, `b` rhs and `d` out.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jitgemm.gemm.call import gemm
from jitgemm.gemm.e8m0 import fp32_scales
from jitgemm.gemm.grouped import contiguous, masked, rows_of_m_indices
from jitgemm.gemm.groups import experts_of
from jitgemm.tensors import check_tensor
from jitgemm.weight.pack8 import pack_w8
from jitgemm.weight.packed import Weight

Pair = tuple[torch.Tensor, torch.Tensor]
Recipe = tuple[int, int, int]
Part = tuple[int, int]

_RECIPES = {
    "recipe": (None, (1, 128, 128), (1, 1, 128)),
    "recipe_a": (None, (1, 128)),
    "recipe_b": (None, (128, 128), (1, 128)),
}
"""Rows of a, rows of b and k that share a scale; of a alone; of b alone."""
_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""w -> (what tells both tensors from others, the scales, so that nothing else gets their memory, weight)."""


def fp8_gemm_nt(
    a: Pair,
    b: Pair | Weight,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: Part | None = None,
    recipe_b: Part | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """d [m, n] = a · bᵀ.

    Raises:
        ValueError: c is given: results are not added to a tensor; another recipe.
        Else as `gemm_w8a8_nt` and `pack_w8`.
    """
    if c is not None:
        raise ValueError(f"c: expected None, as results are not added to a tensor, got a {type(c).__name__}")
    gemm(Weight, a, _weight(b, recipe, recipe_a, recipe_b), d)


def gemm_fp8_fp8_bf16_nt(lhs: Pair, rhs: Pair | Weight, out: torch.Tensor) -> None:
    """`fp8_gemm_nt` by its older name."""
    fp8_gemm_nt(lhs, rhs, out)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair | Weight,
    d: torch.Tensor,
    grouped_layout: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: Part | None = None,
    recipe_b: Part | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    *,
    m_indices: torch.Tensor | None = None,
) -> None:
    """d[i] = a[i] · b[grouped_layout[i]]ᵀ; rows of index -1 are left alone, the others stand together by index.

    Args:
        b: of E experts, w [E, n, k] with scales [E, ceil(n / 128), ceil(k / 128)].
        grouped_layout: int32 [M].
        m_indices: its older name.

    Raises:
        ValueError: another recipe; use_psum_layout, as experts' ends alone do not tell where the next one starts.
        Else as `m_grouped_gemm_w8a8_nt_contiguous` and `pack_w8`.
    """
    if use_psum_layout or expected_m_for_psum_layout is not None:
        raise ValueError("use_psum_layout: expected False and an index for each row in grouped_layout")
    name, indices = ("grouped_layout", grouped_layout) if m_indices is None else ("m_indices", m_indices)
    if indices is None or (grouped_layout is not None and m_indices is not None):
        raise TypeError("grouped_layout: expected it, or m_indices in its place")
    weight = _weight(b, recipe, recipe_a, recipe_b)
    rows = rows_of_m_indices(indices, experts_of(weight))
    if indices.shape != check_tensor("d", d).shape[:1]:
        raise ValueError(f"{name}: expected shape {list(d.shape[:1])}, got {list(indices.shape)}")
    contiguous(Weight, a, weight, d, rows)


def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair | Weight,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Recipe | None = None,
    recipe_a: Part | None = None,
    recipe_b: Part | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """d[e, i] = a[e, i] · b[e]ᵀ for i < masked_m[e].

    Args:
        a: x [E, max_m, k] with scales [E, max_m, ceil(k / 128)].
        b: as for `m_grouped_fp8_gemm_nt_contiguous`.
        d: [E, max_m, n].

    Raises:
        As `m_grouped_gemm_w8a8_nt_masked` and `pack_w8`; ValueError for another recipe.
    """
    masked(Weight, a, _weight(b, recipe, recipe_a, recipe_b), d, masked_m, expected_m)


def k_grouped_fp8_gemm_nt_contiguous(*arguments: object, **options: object) -> NoReturn:
    """NotImplementedError: there is no GEMM for the gradients of weights."""
    raise NotImplementedError("k_grouped_fp8_gemm_nt_contiguous: jitgemm has no GEMM for the gradients of weights")


def k_grouped_fp8_gemm_tn_contiguous(*arguments: object, **options: object) -> NoReturn:
    """NotImplementedError: there is no GEMM for the gradients of weights."""
    raise NotImplementedError("k_grouped_fp8_gemm_tn_contiguous: jitgemm has no GEMM for the gradients of weights")


def get_mk_alignment_for_contiguous_layout() -> int:
    """1: an expert's rows may start and end anywhere."""
    return 1


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_mn_major_tma_aligned_tensor(x: torch.Tensor) -> torch.Tensor:
    """x itself: scales may have any strides, and fp32 ones need no packing."""
    return x


get_col_major_tma_aligned_tensor = get_mn_major_tma_aligned_tensor
get_mn_major_tma_aligned_packed_ue8m0_tensor = get_mn_major_tma_aligned_tensor


def _weight(b: object, *recipes: object) -> Weight:
    """b itself, or the weight that the pair b was packed into; recipes are those of _RECIPES, in its order."""
    for (name, known_ones), given in zip(_RECIPES.items(), recipes):
        if (tuple(given) if isinstance(given, (tuple, list)) else given) not in known_ones:
            raise ValueError(f"{name}: expected one of {known_ones}, got {given!r}")
    whole, *parts = (given is not None for given in recipes)
    if parts[0] != parts[1] or (whole and parts[0]):
        raise ValueError("recipe: expected it alone, recipe_a and recipe_b together, or none of the three")
    if isinstance(b, Weight):
        return b
    if not isinstance(b, (tuple, list)) or len(b) != 2:
        raise TypeError(f"b: expected a packed weight or a pair (w, scales), got {type(b).__name__}")
    w, scale = (check_tensor(name, tensor) for name, tensor in zip(("b[0] (w)", "b[1] (scales)"), b))
    state = _state(w), _state(scale)
    known, _, weight = _packed.get(w, (None, None, None))
    if known != state:
        weight = pack_w8(w, fp32_scales(scale, w.shape[-1]) if scale.dtype == torch.int32 else scale)
        _packed[w] = state, scale, weight
    return weight


def _state(tensor: torch.Tensor) -> tuple[object, ...]:
    """What tells whether this is the tensor and the values that were packed."""
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.shape, tensor.stride(), tensor.dtype
