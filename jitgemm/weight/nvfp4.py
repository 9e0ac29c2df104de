"""NVFP4 as the sum of two terms that tensor cores multiply: the numbers, a packed order, and the way back.

NVFP4 has e2m1 codes, an e4m3 scale for 16 k and an fp32 one for the tensor. A code times a scale has up to six
significant bits, which no FP8 number holds; two e5m2s do, for every pair::

    code * scale    V * 2^q, V an integer of at most 6 bits: 1 or 3, times a mantissa of at most 15
    high            the upper three bits of V: e5m2 has three
    low             the rest: three again, or 0

e5m2 reaches from 2^-16 to 57344 and the terms from 2^-10 to 2560, so that no base is needed. Two e4m3s hold the
products of scales within 2^11 of one another, next to a base.

A record is a strip of 64 rows and 128 k, as `layout.py` has them: 4096 bytes of e2m1 codes in MXFP4's order, and 512 of
scales, from which a thread takes one vector of 16, those of its two rows::

    scales [warp: 4][row: 8][row or row + 8: 2][group of 16 k: 8]

No kernel takes the records yet; docs/notes/nvfp4.md says how one would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, ceil_div
from jitgemm.tensors import check_dtype, check_plain, check_tensor
from jitgemm.weight import e2m1
from jitgemm.weight.codes import E2M1
from jitgemm.weight.layout import decode_codes, encode_codes, kblocks_of, strips_of
from jitgemm.weight.parts import check_sizes

GROUP = 16
"""k that share an e4m3 scale."""
NAN = 0x7F
_CODE_BYTES = STRIP_ROWS * BLOCK_K // 2
_GROUPS = BLOCK_K // GROUP
RECORD_BYTES = _CODE_BYTES + STRIP_ROWS * _GROUPS


def terms(dtype: torch.dtype = torch.float8_e5m2, base: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low), both of dtype [127, 8]: e4m3 scale (the byte's value) times e2m1's magnitude times 2^-base.

    high is the product with as many significant bits as dtype has, the rest cut off; low is what is left, as near as
    dtype has it. Of e5m2 without a base their sum is the product, always.
    """
    scales = torch.arange(NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    products = scales[:, None] * torch.tensor(e2m1.MAGNITUDES, dtype=torch.float64) * 2.0**-base
    bits = {torch.float8_e5m2: 3, torch.float8_e4m3fn: 4}[dtype]
    mantissa, exponent = torch.frexp(products)
    high = torch.ldexp((mantissa * 2**bits).floor(), exponent - bits)
    largest = torch.finfo(dtype).max
    high = high.clamp(max=largest).to(dtype)
    return high, (products - high.double()).clamp(max=largest).to(dtype)


@dataclass(frozen=True, eq=False)
class Nvfp4Weight:
    """A packed NVFP4 weight.

    Attributes:
        blocks: uint8 [ceil(n / 64), ceil(k / 128), RECORD_BYTES].
        channel_scale: fp32 [64 * strips], the tensor's scale for each of its rows, 0 where there is none.
        n, k: sizes.
    """

    blocks: torch.Tensor
    channel_scale: torch.Tensor
    n: int
    k: int

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes uint8 [n, k], scales float8_e4m3fn [n, ceil(k / 16)] and the tensor's scale fp32 [n], bit for bit."""
        strips, kblocks, _ = self.blocks.shape
        words = self.blocks[..., :_CODE_BYTES].contiguous().view(torch.int32)
        scales = self.blocks[..., _CODE_BYTES:].reshape(strips, kblocks, 4, 8, 2, _GROUPS)
        scales = scales.permute(0, 2, 4, 3, 1, 5).reshape(strips * STRIP_ROWS, -1)[: self.n, : ceil_div(self.k, GROUP)]
        codes = decode_codes(words, E2M1)[: self.n, : self.k].contiguous()
        return codes, scales.contiguous().view(torch.float8_e4m3fn), self.channel_scale[: self.n].clone()

    def split(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two terms, float8_e5m2 [n, k]: (high + low) * channel_scale is the weight."""
        codes, scales, _ = self.unpack()
        index = scales.view(torch.uint8).repeat_interleave(GROUP, 1)[:, : self.k].to(torch.int32) << 3 | codes & 7
        signs = (codes & 8) << 4
        both = (each.to(codes.device).view(torch.uint8).flatten()[index.long()] | signs for each in terms())
        high, low = (each.view(torch.float8_e5m2) for each in both)
        return high, low

    def dequantize(self) -> torch.Tensor:
        """fp32 [n, k]: code * scale, which is exact, times the tensor's scale, rounded once."""
        high, low = self.split()
        return (high.float() + low.float()) * self.channel_scale[: self.n, None]


def pack_nvfp4(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> Nvfp4Weight:
    """Pack an NVFP4 weight: w = e2m1(code) * scale * global_scale, nothing rounded.

    Args:
        codes: uint8 or float4_e2m1fn_x2 [n, k / 2], two a byte, the even k in the low nibble; n a multiple of 8, k of 16.
        scales: float8_e4m3fn [n, k / 16], not negative.
        global_scale: fp32, one element, or [n] for each row, as joined layers have them. ModelOpt's `weight_scale_2`; of
            compressed-tensors 1 / `weight_global_scale`.

    Returns:
        The packed weight on codes' device.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device, or a scale that is negative or NaN.
    """
    for name, tensor in (("codes", codes), ("scales", scales), ("global_scale", global_scale)):
        check_plain(name, check_tensor(name, tensor))
        if tensor.device != codes.device:
            raise ValueError(f"{name}: expected codes' device {codes.device}, got {tensor.device}")
    if codes.dtype not in (torch.uint8, torch.float4_e2m1fn_x2):
        raise TypeError(f"codes: expected uint8 or float4_e2m1fn_x2, got {codes.dtype}")
    check_dtype("scales", scales.dtype, ("e4m3",))
    check_dtype("global_scale", global_scale.dtype, ("fp32",))
    if codes.dim() != 2:
        raise ValueError(f"codes: expected shape [n, k / 2], got {list(codes.shape)}")
    n, k = codes.shape[0], 2 * codes.shape[1]
    check_sizes(n, k, "codes")
    if list(scales.shape) != [n, k // GROUP]:
        raise ValueError(f"scales: expected shape {[n, k // GROUP]}, got {list(scales.shape)}")
    if global_scale.numel() not in (1, n):
        raise ValueError(f"global_scale: expected 1 or {n} elements, got {global_scale.numel()}")
    given = scales.view(torch.uint8)
    if (wrong := (given >= NAN).nonzero()).numel():
        row, group = wrong[0].tolist()
        raise ValueError(f"scales: expected numbers of at least 0, got {float(scales[row, group])} at {[row, group]}")
    strips, kblocks = strips_of(n), kblocks_of(k)
    rows, columns = strips * STRIP_ROWS, kblocks * BLOCK_K
    whole, padded = given.new_zeros(rows, columns), given.new_zeros(rows, columns // GROUP)
    packed = codes.view(torch.uint8)
    whole[:n, 0:k:2], whole[:n, 1:k:2], padded[:n, : k // GROUP] = packed & 15, packed >> 4, given
    blocks = given.new_empty(strips, kblocks, RECORD_BYTES)
    blocks[..., :_CODE_BYTES] = encode_codes(whole, E2M1).view(torch.uint8).view(strips, kblocks, _CODE_BYTES)
    # strip, warp, row or row + 8, row, block, group
    ordered = padded.view(strips, 4, 2, 8, kblocks, _GROUPS).permute(0, 4, 1, 3, 2, 5)
    blocks[..., _CODE_BYTES:] = ordered.reshape(strips, kblocks, -1)
    channel_scale = global_scale.new_zeros(rows)
    channel_scale[:n] = global_scale.flatten()
    return Nvfp4Weight(blocks, channel_scale, n, k)
