"""pack_mxfp4: a weight from MXFP4's codes and scales, exactly, with the fewest scales that hold them."""

from __future__ import annotations

import torch

from jitgemm.kernel.codes import EXPONENT_GROUP
from jitgemm.kernel.formats import BLOCK_K, K_ALIGNMENT, WeightFormat, ceil_div
from jitgemm.tensors import check_int, check_plain, check_tensor, check_values, dtype_name
from jitgemm.weight import e2m1, layout
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.parts import check_sizes, expert_indices, group_count, row_chunks
from jitgemm.weight.ready import is_captured

_CODE_TYPES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_SCALE_TYPES = (torch.float8_e8m0fnu, torch.uint8)


def pack_mxfp4(codes: torch.Tensor, scales: torch.Tensor, *, k: int | None = None) -> W4Weight:
    """Pack an MXFP4 weight, or one of E experts, into the kernel's order, once, on the device where it is.

    Weight (row, column) is e2m1(code) * 2^(scale - 127), with the scale of its 32 columns, as the OCP Microscaling
    Formats (MX) Specification 1.0 has it (5.3.3, 5.4.1)::

        code   bit 3: sign   bits 2 to 0: 0, 0.5, 1, 1.5, 2, 3, 4, 6      byte i of a row: code 2i     bits 0 to 3
        scale  e8m0, a power of two for 32 k                                               code 2i + 1 bits 4 to 7

    Nothing is rounded. A code times 2^-8 .. 2^6 is an e4m3, so that groups can share a scale if theirs are within 2^14
    of one another; groups of zeros fit any. All scales are looked at, and the weight gets the first of these that holds
    all of it, which `repr` shows:

    - a base for a row: 4.125 bits a weight;
    - a base for a row and 128 k: 4.25 bits;
    - a scale for a row and 32 k, as groups of 32 have: 4.5 bits.

    Args:
        codes: uint8, int8 or float4_e2m1fn_x2 [n, k / 2], two a byte, the even k in the low nibble; or uint8 [n, k], one
            each, 0..15. scales tell which. n a multiple of 8, k of 16. With a first dimension E for experts.
        scales: float8_e8m0fnu, or its bytes as uint8, [n, ceil(k / 32)]. 255, which is NaN, raises ValueError.
        k: only needed where both readings of codes fit scales, as they do with 16 columns.

    Returns:
        The packed weight on codes' device, for e4m3 activations. The CPU and the GPU give the same bytes. Its `unpack`
        gives codes and scales back, bit for bit except the scales of groups of zeros. On a GPU the current stream is
        synchronised.

    Raises:
        TypeError: an argument is no tensor, or of a wrong dtype or layout.
        ValueError: wrong shape or device, values out of range or missing (meta tensors), a CUDA graph is captured, in
            which no scale can be looked at.
    """
    for name, tensor, dtypes in (("codes", codes, _CODE_TYPES), ("scales", scales, _SCALE_TYPES)):
        check_plain(name, check_tensor(name, tensor))
        check_values(name, tensor)
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name}: expected {' or '.join(map(dtype_name, dtypes))}, got {dtype_name(tensor.dtype)}")
    if codes.dim() not in (2, 3) or (codes.dim() == 3 and not codes.shape[0]):
        raise ValueError(f"codes: expected shape [n, k / 2] or [experts, n, k / 2], got {list(codes.shape)}")
    if scales.shape[:-1] != codes.shape[:-1]:
        expected = [*codes.shape[:-1], "ceil(k / 32)"]
        raise ValueError(f"scales: expected shape {expected}, got {list(scales.shape)}".replace("'", ""))
    if scales.device != codes.device:
        raise ValueError(f"scales: expected codes' device {codes.device}, got {scales.device}")
    if is_captured(codes):
        raise ValueError("scales: expected to look at them, got a CUDA graph's capture; pack before it")
    *lead, n, columns = codes.shape
    k = _columns_of(codes, scales, None if k is None else check_int("k", k))
    check_sizes(n, k, "codes")
    canonical = k != columns
    with torch.inference_mode(False), torch.no_grad():
        q, s = codes.view(torch.uint8), scales.view(torch.uint8)
        indices = [*expert_indices(lead[0] if lead else None)]
        used = torch.empty(s.shape, dtype=torch.bool, device=s.device)
        for e in indices:
            at = f"[{e}]" if lead else ""
            if not canonical and int(q[e].max()) > 15:
                raise ValueError(f"codes{at}: expected values 0..15, got {int(q[e].max())}")
            nan = (s[e] == e2m1.NAN).nonzero()
            if len(nan):
                raise ValueError(f"scales{at}: expected numbers, got 255, e8m0's NaN, at {nan[0].tolist()}")
            for first, end in row_chunks(n, k):
                used[e][first:end] = e2m1.nonzero_groups(q[e][first:end], k)
        sizes = [k, *(size for size in (BLOCK_K, EXPONENT_GROUP) if size < k)]
        group_size, format = next(
            (size, format)
            for size, format in ((size, format_of(size, k)) for size in sizes)
            if not format.exponents or all(e2m1.fits(s[e], used[e], format.group_size) for e in indices)
        )
        shape = (*lead, layout.strips_of(n), layout.kblocks_of(k), format.record_bytes)
        blocks = torch.empty(shape, dtype=torch.uint8, device=q.device)
        bases = torch.empty((*lead, n, group_count(k, group_size)), dtype=torch.bfloat16, device=q.device)
        for e in indices:
            exponents = None
            if format.exponents:
                bases[e], exponents = e2m1.with_bases(s[e], used[e], format.group_size)
            else:
                bases[e] = e2m1.power(e2m1.of_zeros(s[e], used[e]).to(torch.int32) - e2m1.BIAS)
            layout.pack_records(
                blocks[e], q[e], bases[e], None, None, k=k, canonical=canonical, format=format, exponents=exponents
            )
        channel_scale = None if format.group_size else layout.pack_channel_scale(bases)
        return W4Weight(blocks, channel_scale, n, k, group_size, format)


def format_of(group_size: int, k: int) -> WeightFormat:
    """Of a weight with a base for so many k."""
    return WeightFormat(0 if group_size >= k else group_size, False, "bf16", "e2m1", code="e2m1")


def _columns_of(codes: torch.Tensor, scales: torch.Tensor, k: int | None) -> int:
    """k of these codes and scales."""
    columns, groups = codes.shape[-1], scales.shape[-1]
    readings = [2 * columns, columns] if codes.dtype == torch.uint8 else [2 * columns]
    fitting = [k for k in readings if ceil_div(k, EXPONENT_GROUP) == groups and k % K_ALIGNMENT == 0]
    if k is not None and k not in fitting:
        raise ValueError(f"k: expected one of {fitting or readings} by codes and scales, got {k}")
    if k is None and len(fitting) > 1:
        raise ValueError(
            f"k: expected the argument k to say whether codes {list(codes.shape)} are k = {columns}, one value each, or "
            f"k = {2 * columns}, two a byte; got None"
        )
    if not fitting:
        check_sizes(codes.shape[-2], readings[0], "codes")
        expected = " or ".join(f"{ceil_div(k, EXPONENT_GROUP)} for k = {k}" for k in readings)
        raise ValueError(f"scales: expected columns for 32 k each, {expected}, got {groups}")
    return k or fitting[0]
