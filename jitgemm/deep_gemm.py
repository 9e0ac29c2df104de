"""DeepGEMM's calls by its names and in its order of arguments (2.6.1's), so that its callers change an import.

`a` is a pair (x, scales) of e4m3 activations [m, k] with scales per token and 128 k, fp32 [m, ceil(k / 128)] or packed
e8m0 int32 [m, ceil(k / 512)] (docs/formats.md), of any strides. `b` is a weight from `pack_w8` or `pack_w4`, or a pair
(w, scales) as DeepGEMM takes it, e4m3 [n, k] with scales [ceil(n / 128), ceil(k / 128)] or [n, ceil(k / 128)], or
packed [n, ceil(k / 512)]. `d` is bfloat16, float16 or float32.

A packed weight is the fast and safe way: weight = jitgemm.pack_w8(w, scales), once, when both are loaded. A pair is
packed when it first comes to a GPU, into memory of its own, and remembered while both tensors live:

- It is packed again when a version counter tells of a write, or `w.data = ...` gives it other memory. No counter tells
  what is written through `w.data`, as vLLM's weight loaders write, nor to w where the pair has `w.data`, nor by a
  kernel of one's own: call `forget` after it, or results are those of the old values. A warning says so where the first
  pair is packed.
- Views of one tensor (w[e], w.view(...)) may be made anew in each call. `w.data` and `w.detach()` made anew, and
  tensors made in inference mode, are packed in every call, with a warning.
- A CUDA graph reads what was packed: call once before the capture, keep both tensors, and capture again after a write.
- torch.compile breaks its graph at a pair: fullgraph=True needs a packed weight.

On the CPU a pair is packed in every call.

Nothing has to be aligned or laid out in a certain way. `recipe`, or `recipe_a` and `recipe_b`, where they are given,
are what the scales' shapes say; `compiled_dims`, `disable_ue8m0_cast` and `ensure_zero_padding` change nothing here.
Errors name `a` lhs, `b` rhs and `d` out.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple, NoReturn
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jitgemm.gemm.call import gemm
from jitgemm.gemm.e8m0 import fp32_scales
from jitgemm.gemm.grouped import contiguous, masked, rows_of_m_indices
from jitgemm.gemm.groups import experts_of
from jitgemm.kernel.formats import LHS_GROUP, ceil_div
from jitgemm.tensors import check_tensor, describe
from jitgemm.weight.pack8 import pack_w8
from jitgemm.weight.packed import Weight
from jitgemm.weight.settled import capturing

Pair = tuple[torch.Tensor, torch.Tensor]
Recipe = tuple[int, int, int]
Part = tuple[int, int]

_RECIPES = {
    "recipe": (None, (1, 128, 128), (1, 1, 128)),
    "recipe_a": (None, (1, 128)),
    "recipe_b": (None, (128, 128), (1, 128)),
}
"""Rows of a, rows of b and k that share a scale; of a alone; of b alone."""
_NO_COUNTER = (
    "jitgemm.deep_gemm packs a pair (w, scales) when it first comes and remembers it: call deep_gemm.forget(w) after "
    "writing to either through .data, which no version counter tells, or pass a weight from pack_w8"
)
_MANY = 3
"""Times that a weight is packed with nothing written to it before a warning names it."""


class _Packed(NamedTuple):
    """A pair's weight, and what it was packed from: the scales' owner, both storages, and their versions."""

    parts: tuple[ReferenceType[object], ...]
    versions: tuple[int, int]
    weight: Weight


_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The tensor that w is, or is a view of -> what of it, with which scales -> _Packed."""
_counts: WeakKeyDictionary[torch.UntypedStorage, dict[object, tuple[int | None, int]]] = WeakKeyDictionary()
"""w's storage -> what of it -> (its version, times packed)."""


def forget(tensor: torch.Tensor | None = None) -> None:
    """Lets go of what was packed from pairs of which this tensor, or one that shares its memory, is w or the scales.

    Call it after a write that no version counter tells (`w.data.copy_(...)`). None: of all pairs.
    """
    storage = None if tensor is None else check_tensor("tensor", tensor).untyped_storage()
    for entries in list(_packed.values()):
        for key, entry in list(entries.items()):
            if storage is None or any(part() is storage for part in entry.parts):
                del entries[key]
    _counts.clear()


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
        Else as `m_grouped_gemm_w8a8_nt_contiguous` and `pack_w8`.
    """
    if use_psum_layout or expected_m_for_psum_layout is not None:
        raise ValueError("use_psum_layout: expected False and an index for each row in grouped_layout")
    name, indices = ("grouped_layout", grouped_layout) if m_indices is None else ("m_indices", m_indices)
    if indices is None or (grouped_layout is not None and m_indices is not None):
        raise TypeError("grouped_layout: expected it, or m_indices in its place")
    weight = _weight(b, recipe, recipe_a, recipe_b)
    rows = rows_of_m_indices(indices, experts_of(weight), name)
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


fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked


def m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(
    lhs: Pair, rhs: Pair | Weight, out: torch.Tensor, m_indices: torch.Tensor
) -> None:
    """`m_grouped_fp8_gemm_nt_contiguous` by its older name."""
    m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, m_indices=m_indices)


def m_grouped_gemm_fp8_fp8_bf16_nt_masked(
    lhs: Pair, rhs: Pair | Weight, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:
    """`m_grouped_fp8_gemm_nt_masked` by its older name."""
    m_grouped_fp8_gemm_nt_masked(lhs, rhs, out, masked_m, expected_m)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        """NotImplementedError: there is no GEMM for the gradients of weights."""
        raise NotImplementedError(f"{name}: jitgemm has no GEMM for the gradients of weights")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


k_grouped_fp8_gemm_nt_contiguous = _refused("k_grouped_fp8_gemm_nt_contiguous")
k_grouped_fp8_gemm_tn_contiguous = _refused("k_grouped_fp8_gemm_tn_contiguous")
wgrad_gemm_fp8_fp8_fp32_nt = _refused("wgrad_gemm_fp8_fp8_fp32_nt")
k_grouped_wgrad_gemm_fp8_fp8_fp32_nt = _refused("k_grouped_wgrad_gemm_fp8_fp8_fp32_nt")


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
    weight_of = _remembered if w.is_cuda else _pack
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="b: expected a packed weight (jitgemm.pack_w8) under torch.compile, got a pair")
        weight_of = torch.compiler.disable(weight_of)
    return weight_of(w, scale)


def _pack(w: torch.Tensor, scale: torch.Tensor) -> Weight:
    if scale.dtype == torch.int32 and w.dim() > 1:
        expected = [*w.shape[:-1], ceil_div(w.shape[-1], 4 * LHS_GROUP)]
        if scale.dim() != w.dim() or scale.shape[-1] != expected[-1]:
            raise ValueError(f"b[1] (scales): expected int32 {expected}, four exponents each, got {describe(scale)}")
        scale = fp32_scales(scale, w.shape[-1])
    return pack_w8(w, scale)


def _remembered(w: torch.Tensor, scale: torch.Tensor) -> Weight:
    """The weight of a pair on a GPU, packed unless it is known."""
    owner, owner_of_scale = _owner(w), _owner(scale)
    key = id(owner_of_scale), _view(w), _view(scale)
    parts = owner_of_scale, w.untyped_storage(), scale.untyped_storage()
    counted = not (w.is_inference() or scale.is_inference())
    versions = (w._version, scale._version) if counted else None
    entries: dict[object, _Packed] = _packed.get(owner, {})
    entry = entries.get(key)
    if entry and entry.versions == versions and all(known() is part for known, part in zip(entry.parts, parts)):
        return entry.weight
    if w.is_cuda and capturing(w.device):
        raise ValueError(
            "b: expected a packed weight, or a pair that an earlier call has packed, while a CUDA graph is being "
            "captured: call once before the capture, or pack first (jitgemm.pack_w8)"
        )
    dead = {other for other, each in entries.items() if any(part() is None for part in each.parts)}
    entries = {other: each for other, each in entries.items() if other not in dead | {key}}
    if counted:
        _packed[owner] = entries
    del entry  # the old weight's memory goes before the new one's comes
    if _times_packed(w) == _MANY:
        _warn_once(
            f"b[0] (w): {describe(w)} was packed {_MANY} times with nothing written to it, which is slow: pass the "
            "same two tensors in each call, not .data, .detach() or ones made in inference mode, or a weight from "
            "jitgemm.pack_w8"
        )
    weight = _pack(w, scale)
    if versions:
        entries[key] = _Packed(tuple(map(ref, parts)), versions, weight)
        _warn_once(_NO_COUNTER)
    return weight


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose version counter this one has: itself, or what it is a view of."""
    return tensor._base if tensor._base is not None else tensor


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _times_packed(w: torch.Tensor) -> int:
    """How often w's values have been packed, this time with them."""
    counts, view = _counts.setdefault(w.untyped_storage(), {}), _view(w)
    version = None if w.is_inference() else w._version
    known, times = counts.get(view, (version, 0))
    counts[view] = version, times + 1 if known == version else 1
    return counts[view][1]


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=5)  # where fp8_gemm_nt is called
