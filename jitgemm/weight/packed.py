"""W4Weight and W8Weight, weights in the kernel's order: their tensors, what they hold, and back to codes and scales.

The order of the bytes is `layout.py`'s business, making a weight `pack.py`'s. Knows nothing of kernels or the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch

from jitgemm.dtypes import torch_dtype
from jitgemm.kernel.formats import BLOCK_K, Correction, WeightFormat, check_sums
from jitgemm.tensors import PLAIN, check_int
from jitgemm.weight import layout
from jitgemm.weight.codes import CODE_OPS, CodeOps, RowParts, Unpacked
from jitgemm.weight.f16_sums import powers_of
from jitgemm.weight.no_tensor import NoTensor
from jitgemm.weight.parts import PackedWeight, WeightBase, check_packed, check_part, check_permutation, check_rotation
from jitgemm.weight.parts import check_sizes, count_experts, dequantize_groups, format_group, group_count
from jitgemm.weight.stack import regrouped, stack
from jitgemm.weight.state import TENSORS, read_state, write_meta
from jitgemm.weight.ready import ReadyAt, is_captured, note, now, wait


@dataclass(frozen=True, eq=False, repr=False)
class Weight(NoTensor, WeightBase):
    """A weight [n, k], or one of E experts [E, n, k], packed for the kernel.

    Weight (row, column) is (q - zero) * scale + offset, with the scale, zero point and offset of its group of
    `group_size` columns; those of 8 bits have no zero points and offsets.

    A weight of experts holds E of them in one format, whose tensors have a first dimension E. It has a length and can
    be iterated; `weight[e]` is expert e's dense weight, a view over the same memory that is ready if its whole is.

    Attributes:
        blocks: uint8 [ceil(n / 64), format.kblocks(k), format.record_bytes], contiguous, in the order `layout.py`
            draws: ceil(k / 128) records of codes for a strip, and those of its corrections.
        channel_scale: [64 * ceil(n / 64)] in the scale's own type when the weight is per channel; else None, or the
            rows' powers of two in fp32 with sums in f16.
        row_sum: fp32 [64 * ceil(n / 64)], each row's sum of weights, which zero points of activations need; or None.
        permutation: int32 [k], or None. Column j of the packed weight is column permutation[j] of the layer's input, so
            that activations go in as x[:, permutation]. Never with experts.
        rotation: 128 for a weight of `rotated` values, which is multiplied by activations that are rotated, too; else
            0. Not with a permutation; k is a multiple of 128. No GEMM reads it: layers and experts do.
        n, k: rows and columns of the weight, an expert's where it has experts.
        experts: E, or None for a dense weight.
        group_size: columns of a group; at least k means one scale per row.
        format: the layout of a record.
        sums: what kernels may add up in, see `with_sums`: "f32", "f16" or "exact".
        layout_version: version of the packed order that `blocks` follows.
        ready_at: address and version of `blocks` when the weight was last marked ready, or None.
        plan_key: number of what decides which calls are legal and which kernel runs, see `PackedWeight`.
        layer: name of the layer that holds the weight, for messages; "" where `named` was not called.

    On CUDA, kernels read a weight before they wait for the kernel before them, if the weight is `ready`: what wrote
    it has ended. Making a weight marks it ready. After a write that moves the version counter of `blocks` it is not
    ready, and calls wait again: any operation in place on it or on its views, in inference mode too. Not seen are
    writes past the counter: by `.data`, `numpy()`, DLPack, the storage or a raw pointer, and by a view of another dtype
    that was made in inference mode, `blocks.view(torch.int32)`. After such a write call
    `mark_ready()`, before the next GEMM.

    Hashed and compared by identity. Copies, deep copies and pickles; a pickle names this class, so that files meant to
    last are better written from `state_dict()`.
    """

    blocks: torch.Tensor
    channel_scale: torch.Tensor | None
    n: int
    k: int
    group_size: int
    format: WeightFormat
    layout_version: int = layout.LAYOUT_VERSION
    row_sum: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    rotation: int = 0
    sums: str = "f32"
    plan_key: int = field(init=False)
    layer: ClassVar[str] = ""
    ready_at: ReadyAt | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if (version := self.layout_version) != layout.LAYOUT_VERSION:
            raise ValueError(f"layout_version: expected {layout.LAYOUT_VERSION}, got {version}; pack the weight again")
        check_sizes(self.n, self.k)
        fmt, group = self.format, format_group(self.k, self.group_size)
        strips = fmt.uniform_strip_scale and group == BLOCK_K
        if fmt != (expected := replace(fmt, group_size=group, uniform_strip_scale=strips)) or type(self) is not kind_of(
            fmt
        ):
            raise ValueError(
                f"format: expected {expected} of {self.bits} bits for group_size {self.group_size}, got {fmt}"
            )
        check_sums(self.sums)
        check_packed(self)
        if type(self.blocks) in PLAIN and not self.blocks.is_meta and not is_captured(self.blocks):
            object.__setattr__(self, "blocks", self.ops.mended(self.blocks, fmt))
        if self.permutation is not None:
            if self.experts is not None:
                raise ValueError(f"permutation: expected None for {self.experts} experts, got a tensor")
            check_part(self, "", "permutation", (self.k,), torch.int32)
        if check_rotation(self.rotation, self.k, "k") and self.permutation is not None:
            raise ValueError(f"rotation: expected 0 for a weight with a permutation, got {self.rotation}")
        for name, tensor in self._tensors.items():
            if tensor.is_cuda and type(tensor) in PLAIN and tensor.data_ptr() % 16:
                address = f"{tensor.data_ptr():#x}"
                raise ValueError(f"{name}: expected an address that is a multiple of 16 bytes, got {address}")
        object.__setattr__(self, "plan_key", self.packed.plan_key)
        self._wait()

    def _wait(self) -> None:
        object.__setattr__(self, "ready_at", wait(self.blocks))

    def mark_ready(self) -> bool:
        """Waits for what the current stream still writes; kernels then read the weight before the one before them ends.

        With sums in f16 the rows' powers of two are made again, in their memory.

        Returns:
            Whether the weight is ready now: not while a CUDA graph is being captured, where nothing can be waited
            for, nor for inference tensors, which do not tell when they are written, nor for fake ones, which have no
            address.

        Raises:
            ValueError: sums in f16 do not hold the scales as they are now, or wait while a CUDA graph is captured.
        """
        if self.sums == "f16" and self.channel_scale is not None:
            with torch.no_grad():
                self.channel_scale.copy_(powers_of(self.packed, self))
        self._wait()
        return self.ready_at is not None

    def follow_writes(self) -> None:
        """Marks the weight ready again if it was written since, and makes its powers of two from the new scales."""
        if self.ready_at is not None and not self.ready:
            self.mark_ready()

    @property
    def ready(self) -> bool:
        """True if no kernel in flight writes the weight: it was marked ready, and not written or replaced since."""
        return self.ready_at is not None and self.ready_at == now(self.blocks)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, so that a copy is checked and marked ready too.
        return type(self), tuple(getattr(self, field.name) for field in fields(self) if field.init)

    def __repr__(self) -> str:
        group, codes, reals = self.ops.words(self.format, self.group_size)
        order = ", permuted" if self.permutation is not None else ", rotated" if self.rotation else ""
        order += f", sums={self.sums!r}" if self.sums != "f32" else ""
        experts = "" if self.experts is None else f"experts={self.experts}, "
        name = type(self).__name__
        return f"{name}({experts}n={self.n}, k={self.k}, {group}, {codes}, {reals}{order}, device='{self.device}')"

    @property
    def ops(self) -> CodeOps:
        """The `CodeOps` of its code."""
        return CODE_OPS[self.format.code]

    @property
    def packed(self) -> PackedWeight:
        """The part of it that a GEMM reads."""
        return PackedWeight(self.blocks, self.channel_scale, self.row_sum, self.n, self.k, self.format, self.sums)

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in TENSORS if getattr(self, name) is not None}

    @property
    def experts(self) -> int | None:
        return count_experts(self.blocks)

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, k), or (experts, n, k)."""
        return *self.blocks.shape[:-3], self.n, self.k

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def groups(self) -> int:
        """Groups of k per row: columns of the scale."""
        return group_count(self.k, self.group_size)

    @property
    def scale_dtype(self) -> torch.dtype:
        """torch.float32, torch.bfloat16 or torch.float16."""
        return torch_dtype(self.format.scale_type)

    @property
    def correction(self) -> Correction | None:
        """What activations' rows hold sums for, as `quantize_activations` takes it: the type of the digits, "bf16" or
        "fp16", and the group size. None for a weight that was not packed with correction=True."""
        return self.format.lhs_sums

    @property
    def dtype(self) -> torch.dtype:
        """`scale_dtype`: what models that cast their input to `layer.weight.dtype` cast it to."""
        return self.scale_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, padding included."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def to(self, device: torch.device | str | int) -> Self:
        """The same weight on another device; itself when it is there already."""
        device = torch.empty(0, device=device).device  # "cuda" -> the current one's index
        if device == self.device:
            return self
        with torch.inference_mode(False):
            moved = {name: tensor.to(device) for name, tensor in self._tensors.items()}
            return self.with_tensors(moved["blocks"], *(moved.get(name) for name in TENSORS[1:]))

    def with_tensors(
        self, blocks: torch.Tensor, channel_scale: torch.Tensor | None, row_sum: torch.Tensor | None,
        permutation: torch.Tensor | None,
    ) -> Self:  # fmt: skip
        """The same weight over other tensors, such as copies on another device; checked and marked ready."""
        sizes = (self.n, self.k, self.group_size, self.format, self.layout_version)
        weight = type(self)(blocks, channel_scale, *sizes, row_sum, permutation, self.rotation, self.sums)
        weight.named(self.layer)
        return weight

    def with_f16_sums(self) -> Self:
        """`with_sums("f16")`."""
        return self.with_sums("f16")

    def with_sums(self, sums: str) -> Self:
        """The same weight over the same records, whose kernels may add up in something else. Not in a state dict.

        Args:
            sums: "f32", as packers make weights; or "f16": kernels may add up e4m3's runs in f16, eight records of 128
                k at a time: faster in calls of about 128 rows and more, less exact (docs/notes/f16-sums.md), never an
                overflow. For e4m3 with a scale per token, and MXFP4 or int4 in groups without offsets, whose scales f16
                holds as parts of their row's largest: bf16 ones down to 2^-17. The rows' powers of two are made now,
                which waits for the device, and again by `mark_ready` and by the first call after a write that moves the
                version counter. Or "exact", for int8 activations: groups are never added up by parts
                (`jitgemm.gemm.bound`).

        Raises:
            TypeError, ValueError: sums is none of these, or not the weight's; "f16" while a CUDA graph is captured.
        """
        if check_sums(sums) == self.sums:
            return self
        if sums == "exact" and "s8" not in self.format.lhs_types:
            raise ValueError(f"sums: expected 'exact' for weights that meet int8 activations, got it for {self!r}")
        channel_scale = (
            powers_of(self.packed, self) if sums == "f16" else None if self.sums == "f16" else self.channel_scale
        )
        packed = self.packed._replace(channel_scale=channel_scale, sums=sums)
        weight = object.__new__(type(self))  # not through the constructor, which would wait for the stream again
        weight.__dict__.update(self.__dict__, channel_scale=channel_scale, sums=sums, plan_key=packed.plan_key)
        return weight

    @classmethod
    def stacked(cls, count: int, make: Callable[[int], Self], together: int = 1) -> Self:
        """Stacks dense weights to a weight of experts. Copies each as it comes, so memory for one more is enough.

        Args:
            count: how many experts, a multiple of `together`.
            make: gives the weight of expert 0, 1, ... in this order. All have n, k, group size, format and rotation of
                the first, and no permutation; its `sums` are the result's. Where their codes stand in different orders,
                as of e4m3 weights if one holds a -8, all are brought into the order "any", which holds them.
            together: of how many experts each dense weight has the rows, one below another: make(0), make(together),
                ... Their n is then a multiple of 64.

        Raises:
            TypeError, ValueError: something else came from make; the message names the expert.
        """
        return stack(cls, count, make, together)

    def regrouped(self, group_size: int) -> Self:
        """The same MXFP4 weight with a scale for fewer k, 128 or 32, as `pack_mxfp4` chooses for scales that are
        further apart; itself where it has such. ValueError for other sizes and weights."""
        if group_size == self.group_size:
            return self
        if group_size != self.ops.common_group(self.group_size, group_size):
            raise ValueError(f"group_size: expected fewer k than the MXFP4 weight's, got {group_size} for {self!r}")
        with torch.inference_mode(False), torch.no_grad():
            parts: Any = {**regrouped(self._tensors, self.format, group_size), "channel_scale": None}
            format = replace(self.format, group_size=group_size)
            weight = replace(self, **parts, group_size=group_size, format=format, sums="f32")
        weight.named(self.layer)
        return weight.with_sums(self.sums)

    def named(self, layer: str) -> None:
        """Sets the name of the layer that holds the weight."""
        object.__setattr__(self, "layer", layer)

    def __getitem__(self, index: Any) -> Self:
        if (experts := self.experts) is None:
            raise TypeError(self.no_tensor("[...]"))
        if not -experts <= (e := check_int("expert", index)) < experts:
            raise IndexError(f"expert: expected -{experts}..{experts - 1}, got {e}")
        part = self.packed.expert(e)
        views: dict[str, Any] = {"blocks": part.blocks, "channel_scale": part.channel_scale, "row_sum": part.row_sum}
        # Not through the constructor, which would wait for the stream.
        expert = object.__new__(type(self))
        views |= {"ready_at": note(part.blocks, self.ready)}
        expert.__dict__.update(self.__dict__, **views, plan_key=part.plan_key)
        return expert

    def __len__(self) -> int:
        if self.experts is None:
            raise TypeError(self.no_tensor("len()"))
        return self.experts

    def __iter__(self) -> Iterator[Self]:
        return map(self.__getitem__, range(len(self)))

    def __bool__(self) -> bool:
        return True  # a dense one too, which has no length

    def rows(self, first_strip: int, end_strip: int) -> RowParts:
        """Unpack some strips of 64 rows: rows 64 * first_strip up to min(64 * end_strip, n)."""
        return self.packed.rows(first_strip, end_strip)

    def unpack(self) -> Unpacked:
        """What was packed, bit for bit, as (q, scale, zero), which has two more attributes, offset and row_scale.

        Of MXFP4 the scale of a group of zeros may be another. Of NVFP4 whose terms are e4m3s, 0 stands for -0 and for
        codes whose scale is 0, and a power of two may have moved from a row's scales to its global scale.
        """
        unpacked: list[torch.Tensor | None] = []
        for rows, parts in self.packed.chunks(PackedWeight.unpacked):
            if not unpacked:
                lead = self.shape[:-1]
                unpacked = [None if part is None else part.new_empty((*lead, part.shape[-1])) for part in parts.parts]
            for target, part in zip(unpacked, parts.parts):
                if target is not None and part is not None:
                    bits = layout.bits_dtype(part.dtype)
                    target.view(bits).flatten(0, -2)[rows] = part.view(bits)
        return Unpacked(*unpacked)  # type: ignore[arg-type]

    def dequantize(self) -> torch.Tensor:
        """(q - zero) * scale + offset as fp32 [n, k] or [experts, n, k], in the packed order of columns.

        With a permutation, column j is column permutation[j] of the layer's input; a checkpoint's layer before packing
        (`jitgemm.checkpoint.read_layer(...).dequantize()`) has its columns in the input's order. With a rotation it is
        the rotated weight; `jitgemm.weight.rotation.rotated` of it the layer's, except for rounding.

        Scale and offset are widened to fp32; one rounding for the product, one for the sum.
        """
        out = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        for rows, (q, scale, zero, offset) in self.packed.chunks(PackedWeight.rows):
            part = out.flatten(0, -2)[rows].copy_(q)
            dequantize_groups(part, self.group_size, scale, zero, offset)
        return out

    def state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Plain contiguous tensors for torch.save or safetensors; they share memory with the weight. Nothing of `sums`.

        Returns:
            `prefix` + "blocks", "channel_scale" (per channel only), "row_sum" and "permutation" (where there are such)
            and "meta", a small int64 tensor on the CPU with the layout version and sizes.
        """
        meta = write_meta(self.layout_version, self.n, self.k, self.group_size, self.format, self.rotation)
        tensors = self.with_sums("f32")._tensors | {"meta": meta}
        return {prefix + name: tensor for name, tensor in tensors.items()}

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> Self:
        """The weight whose `state_dict(prefix)` is among `tensors`, on the device of its blocks; memory is shared.

        `Weight.from_state_dict` takes one of either width.

        Raises:
            TypeError: something among `tensors` is no tensor.
            ValueError: a tensor is missing, has the wrong shape or type, or was written with another layout version.
        """
        meta, parts = read_state(tensors, prefix, [cls.bits] if cls.bits else [*_KINDS])
        weight_class: Any = cls if cls.bits else _KINDS[meta.bits]
        sizes = {name: getattr(meta, name) for name in ("n", "k", "group_size", "layout_version", "rotation")}
        try:
            weight: Self = weight_class(format=meta.format, **sizes, **parts)
            if type(permutation := parts["permutation"]) in PLAIN and not permutation.is_meta:
                check_permutation(permutation, meta.k)
            return weight
        except ValueError as error:
            raise ValueError(f"state dict: {prefix}{error}") from None


class W4Weight(Weight):
    """A 4-bit `Weight`; made by `pack_w4`."""

    bits = 4


class W8Weight(Weight):
    """A `Weight` of 8 bits, e4m3 or int8; made by `pack_w8`."""

    bits = 8


AnyWeight = Weight | PackedWeight
"""What the calls take: a weight, or the tensors that an op was given."""

_KINDS: dict[int, type[Weight]] = {4: W4Weight, 8: W8Weight}


def kind_of(format: WeightFormat) -> type[Weight]:
    """The class of weights of this format."""
    return _KINDS[format.bits]
