"""A packed weight's state dict: its tensors, and `meta`, nine or ten numbers that describe them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from jitgemm.dtypes import DTYPES, REAL_TYPES
from jitgemm.kernel.codes import CODES, numbered_orders
from jitgemm.kernel.formats import BLOCK_K, CORRECTION_TYPES, WeightFormat
from jitgemm.tensors import PLAIN, check_tensor, describe
from jitgemm.weight import layout
from jitgemm.weight.parts import format_group

TENSORS = ("blocks", "channel_scale", "row_sum", "permutation")
"""The tensors of a state dict next to `meta`. All but the first may be absent."""
_SCALE_TYPES = {DTYPES[name].number: name for name in REAL_TYPES}


class Meta(NamedTuple):
    """What `meta` holds, int64 in this order. Append only."""

    magic: int  # `magic_of`
    layout_version: int
    n: int
    k: int
    group_size: int
    zero_point: int  # 0 or 1; more by 2 where factors in bf16 stand for zero points or offsets, by 4 in fp16
    scale_type: int  # `DType.number`
    order: int  # `Order.number`
    offset: int  # 1 with offsets, 2 for strips' scales, which weights with offsets do not have
    rotation: int = 0  # `Weight.rotation`, left out where it is 0: readers that do not know it refuse ten numbers

    @property
    def bits(self) -> int:
        return (self.magic - magic_of(0)) >> 16

    @property
    def format(self) -> WeightFormat:
        group, (code, order) = format_group(self.k, self.group_size), numbered_orders()[self.bits, self.order]
        strips, scale_type = self.offset == 2 and group == BLOCK_K, _SCALE_TYPES[self.scale_type]
        zero_point, correction = bool(self.zero_point % 2), ("", *CORRECTION_TYPES)[self.zero_point // 2]
        offset = self.offset == 1
        return WeightFormat(group, zero_point, scale_type, order.name, offset, code.name, strips, correction)


def magic_of(bits: int) -> int:
    """Tells `meta` of a weight with codes of so many bits from some other int64 tensor."""
    return 0x4A57305634 + (bits << 16)


def write_meta(
    layout_version: int, n: int, k: int, group_size: int, format: WeightFormat, rotation: int = 0
) -> torch.Tensor:
    """`meta` of a weight, on the CPU."""
    order = CODES[format.code].order(format.order).number
    numbers = DTYPES[format.scale_type].number, order, format.offset + 2 * format.uniform_strip_scale
    zero_point = format.zero_point + 2 * ("", *CORRECTION_TYPES).index(format.correction)
    meta = magic_of(format.bits), layout_version, n, k, group_size, zero_point, *numbers
    return torch.tensor((*meta, rotation) if rotation else meta, dtype=torch.int64, device="cpu")


def read_state(
    tensors: Mapping[str, torch.Tensor], prefix: str, widths: Collection[int]
) -> tuple[Meta, dict[str, Any]]:
    """`meta` of a weight whose codes have one of these widths in bits, and its tensors by name, None if absent.

    Raises as `Weight.from_state_dict`.
    """
    for name in ("blocks", "meta"):
        if tensors.get(prefix + name) is None:
            raise ValueError(f"state dict: expected a tensor {prefix + name!r}, found none")
    for name in ("meta", *TENSORS):
        if tensors.get(prefix + name) is not None:
            check_tensor(f"state dict: {prefix + name!r}", tensors[prefix + name])
    meta = tensors[prefix + "meta"]
    key, counts = f"state dict: {prefix + 'meta'!r}", (len(Meta._fields) - 1, len(Meta._fields))
    if meta.dtype != torch.int64 or meta.dim() != 1 or meta.numel() < 2:
        raise ValueError(f"{key}: expected int64 [{counts[0]}], got {describe(meta)}")
    values = meta.tolist()
    if values[0] not in map(magic_of, widths):
        what = "packed weight" if len(widths) > 1 else f"packed W{next(iter(widths))} weight"
        raise ValueError(f"{key}: expected a {what}, got another tensor (first value {values[0]})")
    if values[1] != layout.LAYOUT_VERSION:
        version = f"layout version {layout.LAYOUT_VERSION}"
        raise ValueError(f"{key}: expected {version}, got {values[1]}; pack the weight again")
    if len(values) not in counts:
        raise ValueError(f"{key}: expected {' or '.join(map(str, counts))} values, got {len(values)}")
    found = Meta(*values)
    known = found.scale_type in _SCALE_TYPES and (found.bits, found.order) in numbered_orders()
    if not 0 <= found.zero_point < 2 + 2 * len(CORRECTION_TYPES) or found.offset not in (0, 1, 2) or not known:
        what = "zero_point 0 to 5, offset 0, 1 or 2, known scale type and codes"
        raise ValueError(f"{key}: expected {what}, got {values[5:]}")
    return found, {name: _aligned(tensors.get(prefix + name)) for name in TENSORS}


def _aligned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy where a tensor read from a file does not start at 16 bytes."""
    if tensor is None or type(tensor) not in PLAIN:
        return tensor
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
