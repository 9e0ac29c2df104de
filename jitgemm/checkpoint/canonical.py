"""What every importer makes of a layer. Knows no format, no file and no kernel.

A format's module reads its tensors into a `CanonicalWeight`, exactly. Cutting, joining and packing are shared.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jitgemm.dtypes import REAL_TYPES
from jitgemm.kernel.codes import CODES
from jitgemm.kernel.formats import GROUP_SIZES, K_ALIGNMENT, ceil_div
from jitgemm.tensors import TYPE_NAMES, describe, dtype_name, one_of
from jitgemm.weight.codes import CODE_OPS, CodeOps
from jitgemm.weight.given import activation_order
from jitgemm.weight.packed import W4Weight, W8Weight, Weight
from jitgemm.weight.parts import INTEGERS, check_rotation, dequantize_groups
from jitgemm.weight.rotation import folded, rotated

PART_MULTIPLES = {"n": 8, "k": K_ALIGNMENT}
"""What a rank's rows and columns must be multiples of, as `pack_w4` asks for."""


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of a tensor; `kind` is the class of a tensor subclass that was given in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = ""

    def dim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True, eq=False)
class CanonicalWeight:
    """A linear layer's weight before packing: weight(row, col) = (q - zero) * scale + offset, by group.

    Attributes:
        q: int8 [n, k] of -8..7 without zero points, uint8 [n, k] of 0..15 with them; of 8 bits int8 or float8_e4m3fn,
            or uint8 with zero points, which can be dequantised and not packed.
        scale: fp32, bf16 or fp16 [n, G], G = ceil(k / group_size), or [n, 1] per channel; as the checkpoint has it. Of
            "e2m1" the bytes of e8m0s, uint8, of "nvfp4" those of e4m3s.
        zero: integers 0..16 (of 8 bits 0..256) [n, G], or None.
        offset: [n, G] in scale's dtype, added after scaling (a float zero point), or None.
        group_size: consecutive columns of q that share a scale; k or more: per channel.
        permutation: int32 [k] or None. Column j of q is column permutation[j] of the layer's input (activation order).
        input_scale: the checkpoint's static activation scale for the whole tensor, fp32 [1], or None.
        bias: float [n] or None.
        code: name of the `Code`: "int4", "int8", "e4m3", or "e2m1" for MXFP4, "nvfp4" for NVFP4, whose q
            are uint8 of 0..15.
        note: what the checkpoint contradicts itself in, for a warning; None for nothing.
        row_scale: fp32 [n] of "nvfp4", by which code * scale is multiplied: the tensor's. bf16 or fp16 [n] of "int4"
            whose scales are integers times it, so that int8 activations can have the weight in two levels; else None.
        rotation: 128 where q is the weight times `weight.rotation`'s matrix, for inputs that are rotated, too; else 0.
        turned: ("input" or "output", matrix fp32 [s, s]): by which the layer multiplies blocks of its input or result.
            Such a weight can be dequantised, and neither packed, cut nor joined.
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    group_size: int = 128
    permutation: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    code: str = "int4"
    note: str | None = None
    row_scale: torch.Tensor | None = None
    rotation: int = 0
    turned: tuple[tuple[str, torch.Tensor], ...] = ()

    def __post_init__(self) -> None:
        q_type, given_scales = self.ops.given(self.zero is not None), self.ops.given_scales
        if self.offset is not None and not CODES[self.code].offsets:
            raise ValueError(f"offset: expected none with {self.bits} bits, got one")
        if self.q.dim() != 2 or self.q.dtype != q_type:
            raise ValueError(f"q: expected {dtype_name(q_type)} [n, k], got {describe(self.q)}")
        if self.group_size < 1:
            raise ValueError(f"group_size: expected a positive number of columns, got {self.group_size}")
        by_group = (self.n, 1 if self.group_size >= self.k else ceil_div(self.k, self.group_size))
        scale = self.scale.dtype
        if given_scales is not None:
            size = CODES[self.code].inner.group  # type: ignore[union-attr]
            if (self.group_size, scale, self.zero) != (size, torch.uint8, None):
                expected = f"the bytes of {TYPE_NAMES[given_scales]}s, uint8, for groups of {size} without zero points"
                raise ValueError(f"scale: expected {expected}, got {dtype_name(scale)} for {self.group_size}")
        row_types, has_rows = self.ops.row_scales, self.row_scale is not None
        wrong = has_rows and (not row_types or self.offset is not None)
        if wrong or (self.ops.needs_row_scale and not has_rows):
            raise ValueError(
                f"row_scale: expected one with nvfp4, or perhaps with int4 without offsets, got {self.code!r}"
            )
        for name, shape, wanted, fits in (
            ("scale", by_group, one_of(REAL_TYPES), lambda dtype: given_scales or TYPE_NAMES.get(dtype) in REAL_TYPES),
            ("zero", by_group, "integers", lambda dtype: dtype in INTEGERS),
            ("offset", by_group, f"scale's {dtype_name(scale)}", lambda dtype: dtype == scale),
            ("permutation", (self.k,), "int32", lambda dtype: dtype == torch.int32),
            ("input_scale", (1,), "float32", lambda dtype: dtype == torch.float32),
            ("bias", (self.n,), "floats", lambda dtype: dtype.is_floating_point),
            ("row_scale", (self.n,), row_types and one_of(row_types), lambda dtype: TYPE_NAMES.get(dtype) in row_types),
        ):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
            if tensor.device != self.q.device:
                raise ValueError(f"{name}: expected q's device {self.q.device}, got {tensor.device}")
            if not fits(tensor.dtype):
                raise ValueError(f"{name}: expected {wanted}, got {dtype_name(tensor.dtype)}")
        if self.permutation is not None:
            if not torch.equal(self.permutation.sort().values.long(), torch.arange(self.k, device=self.q.device)):
                raise ValueError(f"permutation: expected every column 0..{self.k - 1} once")
        if check_rotation(self.rotation, self.k, "k") and self.permutation is not None:
            raise ValueError(f"rotation: expected 0 with an activation order, got {self.rotation}")

    @property
    def bits(self) -> int:
        return CODES[self.code].bits

    @property
    def ops(self) -> CodeOps:
        """What its code is to torch."""
        return CODE_OPS[self.code]

    @property
    def n(self) -> int:
        return self.q.shape[0]

    @property
    def k(self) -> int:
        return self.q.shape[1]

    def parameters(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """scale, zero and offset, changed where the weight has them: fields for `replace`."""
        tensors = {"scale": self.scale, "zero": self.zero, "offset": self.offset}
        return {name: None if values is None else change(values) for name, values in tensors.items()}

    def dequantize(self) -> torch.Tensor:
        """fp32 [n, k], the layer's weight with columns in its order: scale and offset widened to fp32, one rounding an
        operation. A rotation is turned back, which rounds: 2^-20 of 2^-3.5 times 128 columns' absolute sum."""
        weight, scale = self.ops.values(self.q), self.scale
        scale = scale if self.ops.given_scales is None else scale.view(self.ops.given_scales)
        dequantize_groups(weight, self.group_size, scale, self.zero, self.offset)
        if self.ops.needs_row_scale:
            weight *= self.row_scale[:, None]  # type: ignore[index]
        if self.permutation is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.permutation.long(), weight)
        for location, matrix in self.turned:
            weight = folded(weight, location, matrix)
        return rotated(weight) if self.rotation else weight

    def ordered(self, g_idx: torch.Tensor) -> CanonicalWeight:
        """The weight whose q stands in the order of the input, and whose columns belong to the groups of g_idx: the
        columns of a group put together."""
        permutation = activation_order(g_idx, self.group_size)
        return self if permutation is None else replace(self, q=self.q[:, permutation.long()], permutation=permutation)

    def shard(self, dim: str, rank: int, world: int) -> CanonicalWeight:
        """This rank's part of a layer cut for tensor parallelism, before packing.

        Args:
            dim: "n" cuts rows (column-parallel): n / world must be a multiple of 8. "k" cuts columns (row-parallel) at
                multiples of 16, and of 32 inside groups: the rank's input is columns rank * k / world onwards. `bias`
                then stays with rank 0, as the ranks' results are added up.
            rank: 0..world - 1.
            world: number of ranks.

        A cut through groups repeats their scales over smaller groups, see `columns`. A permutation along "n" is kept.
        Along "k" it must keep every rank's input columns among themselves, in whole groups: otherwise a rank holds
        parts of groups, which no grouped weight can express.

        Raises:
            ValueError: the layer cannot be cut so; the message says where the borders would be.
        """
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"tp_rank, tp_size: expected 0 <= rank < size, got rank {rank} of {world}")
        if dim not in PART_MULTIPLES:
            raise ValueError(f"tp_dim: expected 'n' or 'k', got {dim!r}")
        if world == 1:
            return self
        size, multiple = (self.n if dim == "n" else self.k), PART_MULTIPLES[dim]
        if size % (world * multiple):
            got = f"{size} / {world} = {size / world:g}"
            raise ValueError(f"tp_size: expected {dim} / tp_size to be a multiple of {multiple}, got {got}")
        start, stop = rank * size // world, (rank + 1) * size // world
        if dim == "n":
            return self.rows(slice(start, stop))
        return replace(self.columns(start, stop), bias=self.bias if rank == 0 else None)

    def rows(self, rows: slice | torch.Tensor) -> CanonicalWeight:
        """The layer of some of its rows, with their bias; rows: a slice or indices."""
        self._check_turned()
        bias, row_scale = (None if each is None else each[rows] for each in (self.bias, self.row_scale))
        return replace(
            self, q=self.q[rows], bias=bias, row_scale=row_scale, **self.parameters(lambda values: values[rows])
        )

    def columns(self, start: int, stop: int) -> CanonicalWeight:
        """The layer for columns start..stop - 1 of its input, with its bias.

        Where a border lies inside a group, scales, zero points and offsets are repeated over the largest smaller groups
        that have borders there: the same values, with a warning.

        Raises:
            ValueError: an activation order mixes these columns with others in one group.
        """
        self._check_turned()
        if self.rotation and (start % self.rotation or stop % self.rotation):
            expected = f"a rank's columns to be a multiple of {self.rotation}, which are rotated together"
            raise ValueError(f"tp_size: expected {expected}, got columns {start}..{stop - 1}")
        if per_channel := self.group_size >= self.k:
            size = stop - start
        elif (size := math.gcd(self.group_size, start, stop)) % min(GROUP_SIZES) and size != self.group_size:
            raise ValueError(
                f"tp_size: expected a rank's columns to be a multiple of {min(GROUP_SIZES)} in groups of "
                f"{self.group_size}, got columns {start}..{stop - 1}"
            )
        elif size != self.group_size:
            warnings.warn(
                f"tp_size: a rank's columns end inside groups of {self.group_size}: scales are repeated over groups of "
                f"{size}, exactly; the GEMM applies them {self.group_size // size} times as often, which takes longer",
                stacklevel=2,
            )
        permutation = None
        picked: slice | torch.Tensor = slice(start, stop)
        groups: slice | torch.Tensor = slice(start // size, stop // size)
        if self.permutation is not None:
            # The groups that hold this rank's columns, wherever the permutation has put them.
            mine = (self.permutation >= start) & (self.permutation < stop)
            by_group = mine.unflatten(0, (-1, 1 if per_channel else size))
            if not bool((by_group.all(1) == by_group.any(1)).all()):
                raise ValueError(
                    f"tp_dim: activation order cannot be cut along k here: its groups mix input columns {start}.."
                    f"{stop - 1} of a rank with those of other ranks; cut along n, or give every rank the whole layer"
                )
            picked, groups = mine.nonzero().flatten(), by_group.all(1).nonzero().flatten()
            permutation = self.permutation[picked] - start
        parameters: dict[str, Any] = (
            {} if per_channel else self.regrouped(size).parameters(lambda values: values[:, groups])
        )
        return replace(self, q=self.q[:, picked], **parameters, group_size=size, permutation=permutation)

    def regrouped(self, size: int) -> CanonicalWeight:
        """The same values with groups of `size` columns, which divides the group size, or k's one group."""
        if size == self.group_size:
            return self
        groups = torch.arange(ceil_div(self.k, size), device=self.q.device) * size // min(self.group_size, self.k)
        return replace(self, group_size=size, **self.parameters(lambda values: values[:, groups]))

    def with_zero_points(self) -> CanonicalWeight:
        """The same values with codes 0..15 (0..255) and zero points; itself if it has them, or codes of floats."""
        if self.zero is not None or self.q.is_floating_point():
            return self
        middle = 1 << self.bits - 1
        zero = torch.full(self.scale.shape, middle, dtype=torch.uint8, device=self.q.device)
        return replace(self, q=self.q.view(torch.uint8) + middle, zero=zero)  # which wraps

    def pack(self, lhs_dtype: torch.dtype | None = None, correction: bool | None = False) -> W4Weight | W8Weight:
        """Packs for the kernel, on q's device. Group sizes that the kernel lacks are repeated as smaller ones.

        Args:
            lhs_dtype: as `pack_w4` takes it: the only activations that the weight will meet, or None. Those of 8-bit
                weights are of their own type.
            correction: as `pack_w4` takes it; None for wherever it can be had.

        Raises:
            ValueError: sizes that the kernel cannot have, codes or zero points out of range, or zero points of 8 bits.
        """
        self._check_turned()
        packed: W4Weight | W8Weight = self.ops.pack(self, lhs_dtype, correction)
        if self.rotation:
            return replace(packed, rotation=self.rotation)
        if self.permutation is None or packed.permutation is not None:
            return packed
        return packed.with_tensors(packed.blocks, packed.channel_scale, packed.row_sum, self.permutation)

    def _check_turned(self) -> None:
        """Raises ValueError for a weight that can be dequantised alone."""
        if self.turned:
            got = " and ".join(f"one of {len(matrix)} at the {location}" for location, matrix in self.turned)
            raise ValueError(f"transform_config: expected no matrix that kernels do not multiply inputs by, got {got}")


def concat(weights: Sequence[CanonicalWeight]) -> CanonicalWeight:
    """Layers with the same input as one, rows one below another (qkv_proj, gate_up_proj).

    If one layer has a bias or zero points, the layers without a bias get zeros, and all get zero points.

    Raises:
        ValueError: the layers differ in something that one weight has once: k, group size, scale dtype, offsets,
            permutation, rotation, input scale.
    """

    def only(name: str, value: Callable[[CanonicalWeight], Any]) -> None:
        values = [value(weight) for weight in weights]
        if any(value != values[0] for value in values):
            raise ValueError(f"prefix: layers to be joined along n must have one {name}, got {values}")

    only("width", lambda w: w.bits)
    if any(w.zero is not None for w in weights):
        weights = [w.with_zero_points() for w in weights]
    first, biases = weights[0], [w.bias for w in weights if w.bias is not None]
    if len(weights) == 1:
        return first
    for weight in weights:
        weight._check_turned()
    only("type of codes", lambda w: dtype_name(w.q.dtype))
    only("k", lambda w: w.k)
    only("code", lambda w: w.code)
    only("rotation", lambda w: w.rotation)
    only("group size", lambda w: min(w.group_size, w.k))
    only("scale dtype", lambda w: dtype_name(w.scale.dtype))
    for name in ("offset", "permutation", "input_scale"):
        only(f"kind of {name}", lambda w: "none" if getattr(w, name) is None else "given")
        values = [getattr(w, name) for w in weights]
        if name != "offset" and values[0] is not None and not all(torch.equal(values[0], each) for each in values):
            raise ValueError(
                f"prefix: layers to be joined along n must have one {name}, got different ones; load them one by one"
            )
    if len({bias.dtype for bias in biases}) > 1:
        only("bias dtype", lambda w: w.bias if w.bias is None else dtype_name(w.bias.dtype))
    bias = [w.q.new_zeros(w.n, dtype=biases[0].dtype) if w.bias is None else w.bias for w in weights if biases]
    joined: dict[str, Any] = {
        name: None if getattr(first, name) is None else torch.cat([getattr(w, name) for w in weights])
        for name in ("scale", "zero", "offset")
    }
    rows = [w.row_scale for w in weights if w.row_scale is not None]
    same_type = len(rows) == len(weights) and len({each.dtype for each in rows}) == 1
    # As bytes: PyTorch does not join 8-bit floats everywhere.
    q = torch.cat([w.q.view(torch.uint8) for w in weights]).view(first.q.dtype)
    return replace(
        first, q=q, **joined, row_scale=torch.cat(rows) if same_type else None, bias=torch.cat(bias) if bias else None
    )


class _Mixed(Exception):
    """Some experts have zero points, and one that was packed has none."""


def pack_experts(
    count: int, read: Callable[[int], CanonicalWeight], lhs_dtype: torch.dtype | None = None, bits: int = 4,
    together: int = 1,
) -> Weight:  # fmt: skip
    """One packed weight of several experts, read and packed one by one: the memory of the weight and of one expert.
    If some experts have zero points, all get zero points.

    Args:
        count: how many experts.
        read: gives expert 0, 1, ... before packing; it may be called twice for each. With `together`, as in
            `Weight.stacked`, the rows of experts e to e + together - 1.
        lhs_dtype: as in `CanonicalWeight.pack`.
        bits: of all experts' codes.

    Raises:
        ValueError: an expert has an activation order, which its quantised input cannot have together with the others',
            or the experts differ in sizes or format; the message names the expert.
    """
    weight_class: type[Weight] = {4: W4Weight, 8: W8Weight}[bits]
    unsigned = False

    def make(e: int) -> Weight:
        weight = read(e)
        check_order(weight, e)
        weight = weight.with_zero_points() if unsigned else weight
        kinds.add(weight.zero is not None)
        if len(kinds) > 1:
            raise _Mixed
        return weight.pack(lhs_dtype)

    while True:
        kinds: set[bool] = set()
        try:
            return weight_class.stacked(count, make, together)
        except _Mixed:
            unsigned = True


def check_order(weight: CanonicalWeight, expert: int) -> None:
    """Raises ValueError for an expert with an activation order."""
    if weight.permutation is not None:
        raise ValueError(
            f"expert {expert}: expected columns in the input's order, got an activation order (g_idx): experts that "
            "are packed in one weight share their quantised input"
        )
