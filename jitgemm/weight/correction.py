"""A weight with zero points or offsets as a symmetric one and a correction of small rank.

Weight (row, column) is (q - zero) * scale + offset = (q - 8) * scale + factor of its row and group, and factors multiply the
sums of a token's groups alone: a GEMM with as many columns as there are groups. The kernel takes it for more blocks of k
(include/jitgemm/gemm/correction.cuh): this module appends their records to those of the codes, and the sums of activations
to their rows.
"""

from __future__ import annotations

import torch

from jitgemm.dtypes import torch_dtype
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, ceil_div
from jitgemm.weight.pack import pack_w4
from jitgemm.weight.packed import W4Weight

GROUPS = 32
"""Groups of a block of corrections."""
SHIFT = 8
"""What codes of 0..15 are less in two's complement."""
E4M3_SUMS = 2.0**-8
"""By which sums of e4m3 are multiplied, so that factors are no subnormal numbers of fp16."""
TIMES = {"s8": 16, "e4m3": 2.0**-9 / E4M3_SUMS, "any": 2.0**-8 / E4M3_SUMS}
"""1 / kOutputScale of the orders' codecs, "any" with e4m3; over E4M3_SUMS."""


def correction_blocks(k: int, group_size: int) -> int:
    """Blocks that a weight of this k has behind its codes'."""
    return ceil_div(ceil_div(k, group_size), GROUPS)


def corrected(
    q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    offset: torch.Tensor | None,
    lhs: torch.dtype,
    group_size: int,
) -> tuple[W4Weight, str] | None:
    """The weight of codes q [n, k] in groups, with its corrections as more columns, and the
    type that holds its factors; None if neither does."""
    n, k = q.shape
    factor = torch.zeros(scale.shape, dtype=torch.float64, device=q.device)
    if offset is not None:
        factor += offset.double()
    if zero is not None:
        factor -= scale.double() * (zero.double() - SHIFT)
        q = (q.to(torch.int16) - SHIFT).to(torch.int8)
    symmetric = pack_w4(q, scale, group_size=group_size, lhs_dtype=lhs)
    factor *= TIMES[symmetric.format.order]  # in the accumulators' units
    for type in ("bf16", "fp16"):
        held = factor.to(torch_dtype(type))
        if bool((held.double() == factor).all()):
            break
    else:
        return None
    records = _records(held, symmetric.blocks.shape[-1])
    blocks = torch.cat([symmetric.blocks, records], 1)
    sizes = n, BLOCK_K * blocks.shape[1], group_size, symmetric.format
    return W4Weight(blocks, None, *sizes, row_sum=symmetric.row_sum), type


def _records(factor: torch.Tensor, record_bytes: int) -> torch.Tensor:
    """Records of factors [n, groups], in the order of wgmma's A fragments."""
    n, groups = factor.shape
    strips, blocks = ceil_div(n, STRIP_ROWS), ceil_div(groups, GROUPS)
    padded = factor.new_zeros(strips * STRIP_ROWS, blocks * GROUPS)
    padded[:n, :groups] = factor
    # [strip][warp][row + 8?][row] x [block][step][group + 8?][pair][of a pair]
    parts = padded.view(strips, 4, 2, 8, blocks, 2, 2, 4, 2)
    ordered = parts.permute(0, 4, 5, 1, 3, 7, 6, 2, 8).contiguous().view(strips, blocks, -1).view(torch.uint8)
    records = ordered.new_zeros(strips, blocks, record_bytes)
    records[..., : ordered.shape[-1]] = ordered
    return records


def with_sums(x: torch.Tensor, type: str, group_size: int) -> torch.Tensor:
    """Activations [m, k] with their groups' sums behind them, [m, 128 * (blocks + correction blocks)]."""
    m, k = x.shape
    blocks, more = ceil_div(k, BLOCK_K), correction_blocks(k, group_size)
    wide = torch.zeros(m, (blocks + more) * BLOCK_K, dtype=torch.int8, device=x.device)
    wide[:, :k] = x.view(torch.int8)
    sums = torch.nn.functional.pad(x.float(), (0, more * GROUPS * group_size - k)).view(m, -1, group_size).sum(-1)
    sums = sums * (1 if x.dtype == torch.int8 else E4M3_SUMS)
    high = sums.to(torch_dtype(type))
    low = (sums - high.float()).to(high.dtype)
    digits = torch.stack([high.view(m, more, GROUPS), low.view(m, more, GROUPS)], 2)
    wide[:, blocks * BLOCK_K :] = digits.view(m, -1).view(torch.int8)
    return wide.view(x.dtype)
