"""Random problems by seed, for CPU and GPU tests alike.

Everything is drawn on the CPU and then moved, so that a seed means the same problem on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jitgemm.dtypes import LHS_TYPES, REAL_TYPES, torch_dtype
from jitgemm.kernel.formats import GROUP_SIZES, STRIP_ROWS, ceil_div
from jitgemm.weight.pack import pack_w4, pack_w8
from jitgemm.weight.packed import W4Weight, W8Weight

PER_CHANNEL = 0
"""As a group size: one scale per row, whatever k is."""

ALL_FORMATS = tuple(itertools.product((*GROUP_SIZES, PER_CHANNEL), (False, True), REAL_TYPES))
"""(group_size, zero_point, scale_type) of every weight format."""

LHS_DTYPES = {name: torch_dtype(name) for name in LHS_TYPES}
LHS_MEANS = ("zero", "positive")
SCALE_KINDS = ("plain", "negative", "tiny", "huge", "mixed")


def two_thirds(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Two thirds of the product of three or more, in which every pair of values of two of them still occurs."""
    return _by_sum_of_positions(lambda total: total % 3 > 0, *values)


def third(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """A third of the product, in which every value occurs with every third one of another at least."""
    return _by_sum_of_positions(lambda total: total % 3 == 0, *values)


def _by_sum_of_positions(wanted: Callable[[int], bool], *values: Iterable[Any]) -> list[tuple[Any, ...]]:
    numbered = itertools.product(*(list(enumerate(each)) for each in values))
    return [tuple(value for _, value in drawn) for drawn in numbered if wanted(sum(number for number, _ in drawn))]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class WeightParts:
    """What `pack_w4` is given; `packed` is what it makes of it."""

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    group_size: int
    offset: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    lhs_dtype: torch.dtype | None = None
    bits: int = 4
    correction: bool = False
    sums: str = "f32"

    @property
    def packed(self) -> W4Weight | W8Weight:
        if self.bits == 8:
            return pack_w8(self.q, self.scale, group_size=self.group_size)
        weight = pack_w4(
            self.q, self.scale, self.zero, offset=self.offset, permutation=self.permutation,
            group_size=self.group_size, k=self.q.shape[-1], lhs_dtype=self.lhs_dtype, correction=self.correction,
        )  # fmt: skip
        return weight if self.sums == "f32" else weight.with_sums(self.sums)

    def dequantize_fp64(self) -> torch.Tensor:
        """The definition, element by element: (q - zero) * scale + offset in fp64 [n, k], or of experts."""
        group = torch.arange(self.q.shape[-1], device=self.q.device) // self.group_size
        d = self.q.double()
        if self.zero is not None:
            d = d - self.zero.double()[..., group]
        d = d * self.scale.double()[..., group]
        return d if self.offset is None else d + self.offset.double()[..., group]


def weight_parts(
    seed: int,
    n: int,
    k: int,
    group_size: int = 128,
    *,
    zero_point: bool = False,
    scale_type: str = "bf16",
    scales: str = "plain",
    max_zero: int = 15,
    offset: bool = False,
    codes: str = "any",
    bits: int = 4,
    uniform_strip_scale: bool = False,
    correction: bool = False,
    device: str = "cpu",
) -> WeightParts:
    """A random weight [n, k] with all codes, which are sixteen but for "e4m3", and zero points 0..max_zero.

    Args:
        bits: 8 for all bytes of the type `codes` but NaN.
        uniform_strip_scale: the rows of a strip share scales.
        correction: zero points or offsets as factors, for int8.
        offset: with offsets of both signs, as large as the scaled codes.
        codes: the order to pack for, as `WeightFormat.order`; "e4m3" has no code -8.
        scales: "plain" near 0.01, "negative" of both signs, "tiny" and "huge" near the ends of the scale type (but far
            enough for a result to stay finite), "mixed" all of them.
    """
    g = generator(seed)
    group_size = group_size or k
    groups = ceil_div(k, group_size)
    zero = None
    if bits == 8:
        q = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
        q = q if codes == "s8" else torch.where((q & 127) == 127, 0x7E, q).to(torch.int8).view(torch.float8_e4m3fn)
    elif zero_point:
        q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
        zero = torch.randint(0, max_zero + 1, (n, groups), generator=g, dtype=torch.uint8)
    else:
        q = torch.randint(-7 if codes == "e4m3" else -8, 8, (n, k), generator=g, dtype=torch.int8)
    scale = (0.5 + torch.rand((n, groups), generator=g)) * 0.01
    sign = torch.randint(0, 2, (n, groups), generator=g) * 2.0 - 1
    small, big = (1e-6, 1e2) if scale_type == "fp16" else (1e-20, 1e20)
    size = {"tiny": small, "huge": big}.get(scales, 1.0)
    if scales == "mixed":
        size = torch.tensor([1.0, small, big])[torch.randint(0, 3, (n, groups), generator=g)]
    if scales in ("negative", "mixed"):
        scale = scale * sign
    scale = (scale * size).to(torch_dtype(scale_type))
    if uniform_strip_scale:
        scale = scale[::STRIP_ROWS].repeat_interleave(STRIP_ROWS, 0)[:n]
    added = (scale.double() * (torch.rand((n, groups), generator=g) * 16 - 8)).to(scale.dtype) if offset else None
    q, scale, zero, added = (None if tensor is None else tensor.to(device) for tensor in (q, scale, zero, added))
    lhs_dtype = torch.int8 if correction else None if codes == "any" else LHS_DTYPES[codes]
    return WeightParts(q, scale, zero, group_size, added, lhs_dtype=lhs_dtype, bits=bits, correction=correction)


def stacked(each: Sequence[WeightParts]) -> WeightParts:
    """Those of a weight of experts, from each expert's."""
    tensors = {name: [getattr(parts, name) for parts in each] for name in ("q", "scale", "zero", "offset")}
    given = {name: torch.stack(of) for name, of in tensors.items() if of[0] is not None}
    return replace(each[0], **given)


def weight_of_experts(experts: int = 5, n: int = 72, k: int = 256, group_size: int = 128, **options: Any) -> W4Weight:
    """Random weights of experts, the seed of each its number; options as `weight_parts`."""
    return stacked([weight_parts(seed, n, k, group_size, **options) for seed in range(experts)]).packed


def lhs(
    seed: int,
    m: int,
    k: int,
    dtype: str = "e4m3",
    *,
    mean: str = "zero",
    outliers: bool = True,
    last_step: float = 1.0,
    per_token: bool = True,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations quantised as a serving engine does: (x [m, k], x_scale [m, 1] or one element).

    Args:
        mean: "zero", or "positive": as after an activation function, mean well above the deviation's half.
        outliers: a few columns fifty times as big, as language models have.
        last_step: one of the last 32 activations of each token, another in each, is so many times as big.
    """
    g = generator(seed)
    x = torch.randn((m, k), generator=g)
    if mean == "positive":
        x = x.abs() + 0.5
    if outliers:
        columns = torch.randperm(k, generator=g)[: max(1, k // 512)]
        x[:, columns] *= 50
    tokens = torch.arange(m)
    x[tokens, k - 1 - tokens % 32] *= last_step
    largest = 448.0 if dtype == "e4m3" else 127.0
    amax = x.abs().amax(dim=1, keepdim=True) if per_token else x.abs().max().reshape(1) if m else torch.ones(1)
    x_scale = (amax / largest).clamp(min=1e-12)
    x = (x / x_scale).clamp(-largest, largest)
    x = x.to(LHS_DTYPES[dtype]) if dtype == "e4m3" else x.round().to(torch.int8)
    return x.to(device), x_scale.to(device)


def block_lhs(
    seed: int, m: int, k: int, dtype: str = "e4m3", *, column_major: bool = False, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations with a scale per token and 128 k: (x [m, k], x_scale [m, ceil(k / 128)]), some blocks much larger."""
    g = generator(seed)
    blocks = ceil_div(k, 128)
    size = torch.exp2(torch.randint(-6, 7, (m, blocks), generator=g).float())
    x = torch.randn((m, k), generator=g) * size.repeat_interleave(128, 1)[:, :k]
    largest = 448.0 if dtype == "e4m3" else 127.0
    padded = torch.nn.functional.pad(x, (0, blocks * 128 - k))
    x_scale = (padded.view(m, blocks, 128).abs().amax(2) / largest).clamp(min=1e-12)
    x = (x / x_scale.repeat_interleave(128, 1)[:, :k]).clamp(-largest, largest)
    x = x.to(LHS_DTYPES[dtype]) if dtype == "e4m3" else x.round().to(torch.int8)
    if column_major:
        x_scale = torch.nn.functional.pad(x_scale.T.contiguous(), (0, 3))[:, :m].T
    return x.to(device), x_scale.to(device)


def e8m0_lhs(
    seed: int, m: int, k: int, dtype: str = "e4m3", *, column_major: bool = False, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`block_lhs` with powers of two, packed as DeepGEMM packs them: x_scale int32 [m, ceil(k / 512)].

    Bytes behind the last block are NaN, which no call reads.
    """
    x, x_scale = block_lhs(seed, m, k, dtype, device=device)
    bits = (torch.frexp(x_scale).exponent + 127).to(torch.uint8)
    words = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 4), value=255).view(torch.int32)
    return x, torch.nn.functional.pad(words.T.contiguous(), (0, -m % 4))[:, :m].T if column_major else words


def affine_lhs(
    seed: int, m: int, k: int, *, mean: str = "zero", per_token: bool = True, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int8 activations with a zero point: (x [m, k], x_scale, x_zero), the last two [m, 1] or one element.

    x_scale * (x - x_zero) is the real value; -128..127 span the least to the largest of a token, zero included.
    """
    g = generator(seed)
    x = torch.randn((m, k), generator=g)
    if mean == "positive":
        x = x.abs() + 0.5
    low, high = (x.amin(1, keepdim=True), x.amax(1, keepdim=True)) if per_token else (x.min()[None], x.max()[None])
    x_scale = (high.clamp(min=0) - low.clamp(max=0)) / 255
    x_zero = (-128 - low.clamp(max=0) / x_scale).round().clamp(-128, 127).to(torch.int32)
    x = ((x / x_scale).round() + x_zero).clamp(-128, 127).to(torch.int8)
    return x.to(device), x_scale.to(device), x_zero.to(device)


def bias(seed: int, n: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.randn(n, generator=generator(seed)).to(dtype).to(device)


def canonical(q: torch.Tensor) -> torch.Tensor:
    """One value each [..., n, k] -> canonical uint8 [..., n, k / 2], even k in the low nibble."""
    nibbles = q.to(torch.int16) & 0xF
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits: NaNs equal themselves, -0.0 is not 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # Of strides of its own: a dimension of size 1 may have any.
    a, b = (torch.empty(each.numel(), dtype=each.dtype, device=each.device).copy_(each.flatten()) for each in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
