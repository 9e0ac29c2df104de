"""A GEMM call's arguments, dense or grouped, and their checks: a message names one, what it takes and what came.

Works on real and fake tensors: looks at dtypes, shapes, strides and devices, never at values or addresses.
"""

from __future__ import annotations

import math
import operator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from jitgemm.dtypes import DTYPES, INDEX_TYPES, LHS_TYPES, REAL_TYPES
from jitgemm.kernel.formats import F16_OPERANDS, LHS_GROUP, MAX_ROWS, ceil_div, lhs_columns
from jitgemm.runtime.launch import Pointer
from jitgemm.tensors import ALIGNMENT, check_device, check_dtype, check_exact, check_flag, check_plain, check_rows
from jitgemm.tensors import check_runs, check_tensor, check_vector, check_written, dtype_name, shapes_differ
from jitgemm.tensors import statically_true
from jitgemm.weight.parts import PackedWeight, WeightBase, check_packed, count_experts

if TYPE_CHECKING:
    from jitgemm.weight.packed import AnyWeight, Weight

Lhs = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]

X, X_SCALE, X_ZERO = "lhs[0] (x)", "lhs[1] (x_scale)", "lhs[2] (x_zero)"

_POINTERS = {
    "groups.sizes": Pointer("sizes", "offsets or masked_m"),
    "groups.row_index": Pointer("row_index", "row_index"),
    "x": Pointer("lhs", X, ALIGNMENT),
    "weight.blocks": Pointer("records", "rhs.blocks", ALIGNMENT),
    "weight.channel_scale": Pointer("channel_scale", "rhs.channel_scale", 4),  # copied so many bytes at a time
    "x_scale": Pointer("lhs_scale", X_SCALE),
    "bias": Pointer("bias", "bias"),
    "x_zero": Pointer("lhs_zero", X_ZERO),
    "row_sum": Pointer("row_sum", "rhs.row_sum"),
    "weight.row_sum": Pointer(None, "rhs.row_sum"),  # nothing is written there, whether x_zero needs it or not
    "out": Pointer(None, "out", ALIGNMENT, written=True),
}
"""What a launch has addresses of, by attributes of `Gemm`, in the order of `GroupedArgs` in
include/jitgemm/gemm/types.cuh; a dense one's `Args` start with x. The last two have no field there."""
GROUPED_POINTERS = tuple(_POINTERS.values())
POINTERS = GROUPED_POINTERS[2:]
_grouped_operands, _dense_operands = attrgetter(*_POINTERS), attrgetter(*list(_POINTERS)[2:])


class Groups(NamedTuple):
    """Which rows are which expert's.

    Attributes:
        sizes: [E + 1], first rows and the last one's end; [E, 2], first row and end of each; or [E], rows of each.
        row_index: which row of x each row is, or None for the same.
        rows_of_expert: rows from one expert's first to the next one's where `sizes` are numbers of rows; else 0.
        expected_rows: of all experts together, a hint.
    """

    sizes: torch.Tensor
    row_index: torch.Tensor | None
    rows_of_expert: int
    expected_rows: int

    @property
    def masked(self) -> bool:
        """Whether `sizes` are numbers of rows. A tracer may not know more of `rows_of_expert` than that it is not 0."""
        return not statically_true(self.rows_of_expert == 0)


class Gemm(NamedTuple):
    """A call's arguments. None for tensors that it does without, and for groups where it is dense."""

    x: torch.Tensor
    x_scale: torch.Tensor
    x_zero: torch.Tensor | None
    weight: AnyWeight
    out: torch.Tensor
    bias: torch.Tensor | None = None
    groups: Groups | None = None
    batch_invariant: bool = False
    kernel: str | None = None

    @property
    def expected_rows(self) -> int:
        """Rows of all experts, as far as the kernel's choice goes."""
        return 0 if self.groups is None or not self.out.dim() else max(1, min(self.groups[3], self.out.shape[0]))

    @property
    def packs_scales(self) -> bool:
        """True if x_scale is an exponent for each 128 k, still to be packed. For others than these the checks raise."""
        scale, k = self.x_scale, self.weight.k
        if scale.dtype is not torch.float8_e8m0fnu:
            return False
        blocks = -(-k // LHS_GROUP)
        return scale.dim() > 1 and scale.size(-1) == blocks and scale.numel() * k == self.x.numel() * blocks

    @property
    def lacks_sums(self) -> bool:
        """Whether the weight has corrections, and x [m, k] no sums for them."""
        weight = self.weight
        most = lhs_columns(weight.k, weight.format.lhs_sums)
        return most > weight.k and statically_true(self.x.shape[-1] == weight.k)

    @property
    def row_sum(self) -> torch.Tensor | None:
        """The weight's, where zero points need it."""
        return None if self.x_zero is None else self.weight.row_sum

    @property
    def pointers(self) -> tuple[Pointer, ...]:
        return POINTERS if self.groups is None else GROUPED_POINTERS

    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """What the pointers point to."""
        return _dense_operands(self) if self.groups is None else _grouped_operands(self)

    @property
    def empty(self) -> bool:
        return self.out.shape[0] == 0 or self.x.shape[0] == 0

    def check(self) -> None:
        """Raises TypeError or ValueError unless dtypes, shapes, strides and devices fit together."""
        check_types(self)
        x, x_scale, x_zero, weight, out, bias, groups, _, kernel = self
        if kernel is not None:
            from jitgemm.kernel.spec import KernelSpec

            KernelSpec.from_label(kernel)
        experts = check_packed(weight, "rhs.", experts=groups is not None)
        n, k, format = weight.n, weight.k, weight.format
        if n > MAX_ROWS:
            raise ValueError(f"rhs: expected at most {MAX_ROWS} rows, got {n}")
        check_plain(X, x)
        lhs_type = check_dtype(X, x.dtype, LHS_TYPES)
        columns = lhs_columns(k, format.lhs_sums)
        if columns > k and statically_true(x.dim() == 2 and x.shape[1] != k):
            _check_matrix(X, x, f"[m, k = {k}], or with sums", columns)
        else:
            _check_matrix(X, x, "[m, k]", k)
        if columns > k and lhs_group_of(x_scale):
            raise ValueError(f"{X_SCALE}: expected a scale per token for a weight with correction, got one per 128 k")
        m, most = x.shape[0], format.max_int8_k
        if lhs_type == "s8" and not lhs_group_of(x_scale) and k > most:
            why = "int8 with scales per channel, whose sums are 32-bit"
            raise ValueError(f"{X}: expected k of at most {most} for {why}, got {k}")
        check_dtype(X, x.dtype, format.lhs_types, format.why_lhs("rhs"))
        check_sums_with(weight, lhs_type, lhs_group_of(x_scale) > 0, "rhs")
        # Those per token and 128 k of masked calls have a dimension for the experts.
        masked = groups is not None and groups.masked
        check_scales(x, x_scale, x_zero, (experts, m // experts) if masked and experts else (m,), k)
        if x_zero is not None and weight.row_sum is None:
            raise ValueError(f"rhs: expected a weight with row_sum, which {X_ZERO} needs, got one without")

        check_plain("out", out)
        check_dtype("out", out.dtype, REAL_TYPES)
        _check_matrix("out", out, "[m, n]", n)
        if (groups is None or groups.row_index is None) and statically_true(out.shape[0] != m):
            raise ValueError(f"out: expected shape [{m}, {n}], got {list(out.shape)}")
        check_written("out", out)
        if bias is not None and experts is None:
            check_vector("bias", bias, ("bf16", "fp32"), n)
        elif bias is not None:
            check_exact("bias", bias, (experts, n), ("bf16", "fp32"))

        check_runs(X, x)
        tensors = {X_SCALE: x_scale, X_ZERO: x_zero, "rhs": weight.blocks, "out": out, "bias": bias}
        for name, tensor in tensors.items():
            if tensor is not None:
                check_device(name, tensor, X, x.device)
        if groups is not None and experts is not None:
            check_groups(groups, experts, out.shape[0], x.device)


def check_types(gemm: Gemm) -> None:
    """Raises TypeError unless everything is of the class that it should be."""
    # Compilers up to torch 2.8 follow no method.
    x, x_scale, x_zero, weight, out, bias, _, batch_invariant, kernel = gemm
    for name, tensor in ((X, x), (X_SCALE, x_scale), ("out", out)):
        check_tensor(name, tensor)
    for name, given in ((X_ZERO, x_zero), ("bias", bias)):
        if given is not None:
            check_tensor(name, given)
    check_weight(weight)
    check_flag("batch_invariant", batch_invariant)
    if kernel is not None and not isinstance(kernel, str):
        got = type(kernel).__name__
        raise TypeError(f"kernel: expected a label as `jitgemm explain` prints it, or None, got {got}")


def split_lhs(lhs: object, name: str = "lhs") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(x, x_scale, x_zero or None) out of the call's first argument."""
    if not isinstance(lhs, (tuple, list)) or len(lhs) not in (2, 3):
        what = f"{type(lhs).__name__} of {len(lhs)}" if isinstance(lhs, (tuple, list)) else type(lhs).__name__
        raise TypeError(f"{name}: expected a pair (x, x_scale), or (x, x_scale, x_zero), got {what}")
    tensors = [check_tensor(name, tensor) for name, tensor in zip((X, X_SCALE, X_ZERO), lhs)]
    return tensors[0], tensors[1], tensors[2] if len(tensors) == 3 else None


def lhs_group_of(x_scale: torch.Tensor) -> int:
    """k that share one of these scales of activations; 0 where a token has one for all its k.

    A column for each `LHS_GROUP` tells them apart, a third dimension, which masked calls have, or e8m0.
    """
    per_block = x_scale.dim() == 3 or (x_scale.dim() == 2 and statically_true(x_scale.shape[1] > 1))
    per_block = per_block or x_scale.dtype in (torch.int32, torch.float8_e8m0fnu)
    return LHS_GROUP if per_block else 0


W4, W8, ANY = 4, 8, 0
"""Bits of the codes that a call takes; 0 for any."""


def check_weight(rhs: object, bits: int = ANY) -> Weight:
    """The call's second argument, if it is a packed weight of such codes; of any also one as an op has it."""
    if not bits and isinstance(rhs, PackedWeight):
        return rhs  # type: ignore[return-value]
    if not isinstance(rhs, WeightBase) or (bits and rhs.bits != bits):
        names = [f"a W{each}Weight from pack_w{each}" for each in ((bits,) if bits else (W4, W8))]
        raise TypeError(f"rhs: expected {' or '.join(names)}, got {type(rhs).__name__}")
    return rhs  # type: ignore[return-value]


def check_sums_with(weight: AnyWeight, lhs: str, block: bool, name: str) -> None:
    """Raises ValueError unless the weight's sums go with activations of this type; block: with a scale per 128 k."""
    got = f"{DTYPES[lhs].torch_name}{' and a scale per 128 k' if block else ''}"
    if weight.sums == "exact" and lhs != "s8":
        raise ValueError(f"{name}.sums: expected 'exact' for int8 activations alone, got it with {got}")
    if weight.sums == "f16" and (lhs != "e4m3" or block):
        raise ValueError(f"{name}.sums: expected 'f32' except for {F16_OPERANDS}, got 'f16' with {got}")


def expected_rows_of(experts: int, expected_m: Any) -> int:
    """Rows of all experts, of a call's hint; TypeError for what is no number."""
    numbers = int, float, torch.SymInt, torch.SymFloat
    if not isinstance(expected_m, numbers):
        try:
            expected_m = operator.index(expected_m)
        except TypeError:
            pass
    if isinstance(expected_m, bool) or not isinstance(expected_m, numbers) or not 0 <= expected_m < math.inf:
        raise TypeError(f"expected_m: expected a number of rows, got {expected_m!r}")
    rows: Any = experts * expected_m  # type: ignore[operator]
    rows = min(rows, MAX_ROWS) if isinstance(rows, (int, float)) else rows
    return math.trunc(rows + 0.5)  # torch.export saves no `round`


def experts_of(rhs: AnyWeight, bits: int = ANY) -> int:
    """How many experts the call's second argument has; TypeError or ValueError for what is no weight of experts."""
    count = count_experts(check_weight(rhs, bits).blocks)
    if count is None:
        takes = f"gemm_w{rhs.format.bits}a8_nt takes"
        raise ValueError(f"rhs: expected a weight of experts, got a dense one, which {takes}")
    return count


def as_rows(name: str, tensor: torch.Tensor, experts: int, max_m: int, columns: str) -> torch.Tensor:
    """[E, max_m, columns] as [E * max_m, columns], or [E, max_m] as [E * max_m], without a copy."""
    if not columns and (tensor.dim() == 3 or (statically_true(tensor.numel() == 1) and tensor.dim() <= 2)):
        return tensor  # scales per token and group keep the dimension of the experts: their strides are free
    if tensor.dim() != 2 + bool(columns) or shapes_differ(tensor.shape[:2], (experts, max_m)):
        shape = f"[{experts}, {max_m}{', ' + columns if columns else ''}]"  # here, as a compiler fixes what it prints
        raise ValueError(f"{name}: expected shape {shape}, got {list(tensor.shape)}")
    try:
        return tensor.view(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:])
    except RuntimeError:
        expected = f"strides of a view of all rows, one expert {max_m} row strides behind the other"
        raise ValueError(f"{name}: expected {expected}, got {tuple(tensor.stride())}") from None


def _check_matrix(name: str, tensor: torch.Tensor, shape: str, columns: int) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"{name}: expected shape {shape}, got {list(tensor.shape)}")
    if statically_true(tensor.shape[1] != columns):
        raise ValueError(f"{name}: expected shape {shape} with {columns} columns, got {list(tensor.shape)}")
    check_rows(name, tensor)


def check_scales(
    x: torch.Tensor, x_scale: torch.Tensor, x_zero: torch.Tensor | None, rows: tuple[int, ...], k: int
) -> None:
    """Raises TypeError or ValueError unless these are scales and zero points of x [m, k]; rows: (m,), or the experts
    and each one's rows, which scales per block have."""
    m = x.shape[0]
    if group := lhs_group_of(x_scale):
        _check_per_block(x_scale, rows, k)
        if x_zero is not None:
            raise ValueError(f"{X_ZERO}: expected None with a scale per token and {group} k, got a tensor")
    else:
        _check_per_token(X_SCALE, x_scale, m, "fp32")
    if x_zero is not None:
        if x.dtype != torch.int8:
            raise TypeError(f"{X}: expected int8 with {X_ZERO}, got {dtype_name(x.dtype)}")
        _check_per_token(X_ZERO, x_zero, m, "s32")


def _check_per_token(name: str, tensor: torch.Tensor, m: int, type: str) -> None:
    """One value per token, or one for all."""
    check_plain(name, tensor)
    check_dtype(name, tensor.dtype, (type,))
    other = shapes_differ(tensor.shape, (m,)) and shapes_differ(tensor.shape, (m, 1))
    if other and not (statically_true(tensor.numel() == 1) and tensor.dim() <= 2):
        raise ValueError(f"{name}: expected shape [{m}], [{m}, 1] or one element, got {list(tensor.shape)}")


def _check_per_block(x_scale: torch.Tensor, rows: tuple[int, ...], k: int) -> None:
    """One value per token and `LHS_GROUP` of k, or four of them in an int32, with any strides."""
    check_plain(X_SCALE, x_scale)
    type = check_dtype(X_SCALE, x_scale.dtype, ("fp32", "s32", "e8m0"))
    shape = [*rows, ceil_div(k, LHS_GROUP * (4 if type == "s32" else 1))]
    if shapes_differ(x_scale.shape, shape):
        one = f"{list(rows)}{f', {[*rows, 1]}' if len(rows) == 1 else ''} or one element, or "
        of = "the exponents of a token and four times" if type == "s32" else "a scale per token and"
        expected = f"{one if type == 'fp32' else ''}{shape} for {of} {LHS_GROUP} k"
        raise ValueError(f"{X_SCALE}: expected shape {expected}, got {list(x_scale.shape)}")


def check_groups(groups: Groups, experts: int, rows: int, device: torch.device) -> None:
    """Raises TypeError or ValueError unless the groups are of this many experts and rows, on x's device."""
    sizes, row_index, _, _ = groups
    name, shapes = ("masked_m", [[experts]]) if groups.masked else ("offsets", [[experts + 1], [experts, 2]])
    check_plain(name, sizes)
    check_dtype(name, sizes.dtype, INDEX_TYPES)
    if all(shapes_differ(sizes.shape, shape) for shape in shapes) or not sizes.is_contiguous():
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{name}: expected a contiguous tensor of shape {expected}, got {list(sizes.shape)}")
    check_device(name, sizes, X, device)
    if row_index is not None:
        check_exact("row_index", row_index, (rows,), ("s32",))
        check_device("row_index", row_index, X, device)


# ---- scales in e8m0 --------------------------------------------------------------------------------------------------
#
# Per token and 128 k, eight bits e that stand for 2^(e - 127), or NaN where e is 255. Kernels read them packed, as
# DeepGEMM makes them: int32 [..., ceil(k / 512)] of any strides. A word holds the exponents of four consecutive blocks
# of 128 k, the first in its lowest byte; of bytes past the last block it does not matter what they hold.


def pack_e8m0(x_scale: torch.Tensor) -> torch.Tensor:
    """float8_e8m0fnu [..., blocks] as packed words: its own memory where rows are whole words, else a copy."""
    bits = x_scale.view(torch.uint8)
    *rows, blocks = bits.shape
    steps = blocks, bits.storage_offset(), *bits.stride()[:-1]
    if bits.stride(-1) != 1 or any(step % 4 for step in steps):
        padded = bits.new_empty(*rows, 4 * ceil_div(blocks, 4))
        padded[..., :blocks] = bits
        bits = padded
    return bits.view(torch.int32)


def fp32_scales(scale: torch.Tensor, k: int) -> torch.Tensor:
    """Scales per 128 k as fp32, exactly: packed ones, float8_e8m0fnu, or others, which are returned as they are."""
    if scale.dtype == torch.int32:
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scale.device)
        bits = (scale[..., None] >> shifts & 255).flatten(-2).to(torch.uint8)
        blocks = ceil_div(k, LHS_GROUP)
        bits = bits[..., :blocks] if ceil_div(blocks, 4) == scale.shape[-1] else bits
        scale = bits.contiguous().view(torch.float8_e8m0fnu)
    return scale.float() if scale.dtype == torch.float8_e8m0fnu else scale
