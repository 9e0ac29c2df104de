"""pack_nvfp4: a weight from NVFP4's codes and scales, exactly."""

from __future__ import annotations

from dataclasses import replace

import torch

from jitgemm.kernel.codes import SCALE_GROUP
from jitgemm.kernel.formats import WeightFormat
from jitgemm.tensors import check_plain, check_tensor, check_values, describe, dtype_name
from jitgemm.weight import e2m1, layout, terms
from jitgemm.weight.packed import W4Weight
from jitgemm.weight.parts import check_finite, check_sizes, expert_indices, row_chunks
from jitgemm.weight.ready import is_captured

FORMAT = WeightFormat(0, False, "fp32", "nvfp4", code="nvfp4")
"""Of any scales."""
NEAR = replace(FORMAT, order="near")
"""Of rows whose scales are near one another."""
_TYPES = {
    "codes": (torch.uint8, torch.int8, torch.float4_e2m1fn_x2),
    "scales": (torch.float8_e4m3fn,),
    "global_scale": (torch.float32,),
}


def pack_nvfp4(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> W4Weight:
    """Pack an NVFP4 weight, or one of E experts, into the kernel's order, once, on the device where it is.

    Weight (row, column) is e2m1(code) * scale * global_scale, with the scale of its 16 columns::

        code   bit 3: sign   bits 2 to 0: 0, 0.5, 1, 1.5, 2, 3, 4, 6      byte i of a row: code 2i     bits 0 to 3
        scale  e4m3                                                                        code 2i + 1 bits 4 to 7

    Nothing is rounded: kernels multiply by two FP8 numbers, whose sum code * scale is, and by global_scale in fp32 behind
    the sums. 4.5 bits a weight, and twice the multiplies of other 4-bit weights. Where the largest scale of each row is
    less than 2^10 times its least, groups of zeros left out, the two are e4m3s next to a power of two of the row, which
    kernels decode faster; else they are e5m2s. `repr` shows which.

    Args:
        codes: uint8, int8 or float4_e2m1fn_x2 [n, k / 2], two a byte, the even k in the low nibble; n a multiple of 8, k
            of 16. With a first dimension E for experts.
        scales: float8_e4m3fn [n, k / 16], of at least 0. Those of rows far below the tensor's largest value are 0 in files,
            with any codes beside them.
        global_scale: fp32, finite, one element, or [n] for each row, as joined layers have them; of experts one element,
            [E] or [E, n]. ModelOpt's `weight_scale_2`; of compressed-tensors 1 / `weight_global_scale`.

    Returns:
        The packed weight on codes' device, for e4m3 activations. The CPU and the GPU give the same bytes. Its `unpack`
        gives codes, scales and the global scale of each row back: with e5m2s bit for bit, with e4m3s 0 for -0 and for codes
        whose scale is 0, and a power of two may have moved from a row's scales to its global scale. On a GPU the current
        stream is synchronised.

    Raises:
        TypeError: an argument is no tensor, or of a wrong dtype or layout.
        ValueError: wrong shape or device, a scale that is negative, NaN or infinite, values missing (meta tensors), a CUDA
            graph is captured, in which no scale can be looked at.
    """
    for name, tensor in (("codes", codes), ("scales", scales), ("global_scale", global_scale)):
        check_plain(name, check_tensor(name, tensor))
        check_values(name, tensor)
        if tensor.dtype not in _TYPES[name]:
            expected = " or ".join(map(dtype_name, _TYPES[name]))
            raise TypeError(f"{name}: expected {expected}, got {dtype_name(tensor.dtype)}")
        if tensor.device != codes.device:
            raise ValueError(f"{name}: expected codes' device {codes.device}, got {tensor.device}")
    if codes.dim() not in (2, 3) or (codes.dim() == 3 and not codes.shape[0]):
        raise ValueError(f"codes: expected shape [n, k / 2] or [experts, n, k / 2], got {list(codes.shape)}")
    *lead, n, half = codes.shape
    k = 2 * half
    check_sizes(n, k, "codes")
    if tuple(scales.shape) != (*lead, n, k // SCALE_GROUP):
        raise ValueError(f"scales: expected shape {[*lead, n, k // SCALE_GROUP]}, got {list(scales.shape)}")
    if is_captured(codes):
        raise ValueError("scales: expected to look at them, got a CUDA graph's capture; pack before it")
    with torch.inference_mode(False), torch.no_grad():
        q, s = codes.view(torch.uint8), scales.view(torch.uint8)
        indices = [*expert_indices(lead[0] if lead else None)]
        for e in indices:
            wrong = (s[e] >= terms.NAN).nonzero()
            if len(wrong):
                row, group = wrong[0].tolist()
                name, got = f"scales[{e}]" if lead else "scales", float(scales[e][row, group])
                raise ValueError(f"{name}: expected numbers of at least 0, got {got} at {[row, group]}")
        check_finite("global_scale", global_scale)
        rows = _of_rows(global_scale, lead, n)
        inner, shifts = torch.empty_like(s), torch.empty((*lead, n, 1), dtype=torch.int32, device=s.device)
        for e in indices:
            for first, end in row_chunks(n, k):
                used = e2m1.nonzero_groups(q[e][first:end], k, SCALE_GROUP) & (s[e][first:end] > 0)
                inner[e][first:end], shifts[e][first:end] = terms.near(s[e][first:end], used)
        moved = rows * e2m1.power(-shifts).float()
        normal = (moved.abs() >= torch.finfo(torch.float32).tiny) & moved.isfinite() | (rows == 0)
        if bool(((shifts != terms.FAR) & normal).all()):
            format, rows = NEAR, moved
        else:
            format, inner = FORMAT, s
        shape = (*lead, layout.strips_of(n), layout.kblocks_of(k), format.record_bytes)
        blocks = torch.empty(shape, dtype=torch.uint8, device=q.device)
        for e in indices:
            codes_of = q[e]
            if format.near and bool((empty := s[e] == 0).any()):  # there is no byte of half of 0: codes say so
                codes_of = codes_of.masked_fill(empty.repeat_interleave(SCALE_GROUP // 2, 1), 0)
            layout.pack_records(
                blocks[e], codes_of, s[e], None, None, k=k, canonical=True, format=format, inner_scales=inner[e]
            )
        return W4Weight(blocks, layout.pack_channel_scale(rows), n, k, k, format)


def _of_rows(global_scale: torch.Tensor, lead: list[int], n: int) -> torch.Tensor:
    """[..., n, 1]."""
    shape = tuple(global_scale.shape)
    if global_scale.numel() == 1:
        return global_scale.reshape(1).expand(*lead, n, 1)
    if lead and shape in ((*lead,), (*lead, 1)):
        return global_scale.reshape(*lead, 1, 1).expand(*lead, n, 1)
    if shape not in ((*lead, n), (*lead, n, 1)):
        expected = f"one element{f', [{lead[0]}]' if lead else ''} or {[*lead, n]}"
        raise ValueError(f"global_scale: expected {expected}, got {describe(global_scale)}")
    return global_scale.reshape(*lead, n, 1)
