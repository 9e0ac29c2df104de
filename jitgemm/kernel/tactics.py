"""How a kernel does its work where measurement decides: every rule that is not forced by the format or the hardware.

Pure functions of a KernelSpec. Each says what was measured.
"""

from __future__ import annotations

import math
from dataclasses import replace

from jitgemm.jit.sass import Yields
from jitgemm.kernel.formats import BLOCK_K, ceil_div
from jitgemm.kernel.spec import KernelSpec, stage_weight_bytes, wgmma_shapes

MIN_PREFETCH_STAGES = 5
PREFETCH_BYTES = {1: 54_000, 2: 40_000}
"""Bytes of weights that a CTA asks for before it waits for the grid before, and MIN_PREFETCH_STAGES at least: about
what memory delivers in that time. More would delay the activations; less where CTAs of few tokens share an
SM (docs/notes/decode.md)."""
IN_FLIGHT_REGISTERS = 16
"""Registers for sums of a narrow tile's multiplies, where groups shorter than a record would wait for one another."""

F16_AHEAD = 128
"""Tokens of a tile of one or two warpgroups up to which there are registers for two units' sums in f16. 16 fewer with
zero points and several groups a record; and with these, or MXFP4's, where splits of k meet experts' tables: else 56 to
360 bytes spill."""


def promote_records(spec: KernelSpec) -> int:
    """Records of 128 k summed in the tensor cores before they are promoted to fp32; 0 means the whole tile.

    int8 sums are exact in int32. e4m3 sums lose more as they grow: the tensor cores cut every product off 13 bits below
    the sum (docs/notes/e4m3-accuracy.md). `jitgemm.gemm.bound` counts on at most 128 k, and on 256 where MXFP4 has a
    base a row: prefill takes 0.91 to 0.94 of what it takes with 128, as decoding and promoting are what it waits for
    (docs/notes/mxfp4.md).
    """
    fmt = spec.format
    if fmt.long_runs and not spec.lhs_group and spec.warpgroups_k == 1:
        return 2
    if spec.lhs == "e4m3" or fmt.offset or spec.lhs_group:
        return 1
    if fmt.group_size == 0:
        return 0
    # Two warpgroups along k take alternate records, so neither sees both halves of a group of 256.
    return 2 if fmt.group_size == 256 and spec.warpgroups_k == 1 else 1


def split_blocks(spec: KernelSpec, blocks: int) -> int:
    """Blocks of k that each split of k but the last takes, whole groups of 256 for promotion (scheduler.cuh)."""
    unit = max(1, promote_records(spec))
    return min(blocks, unit * ceil_div(blocks, unit * spec.split_k))


def units_in_flight(spec: KernelSpec) -> int:
    """How many of a record's sums have registers at a time; there is one for each half of the tokens, group and factor.

    Each is promoted apart. Wide tiles have registers for one a half: the next group multiplies when one is promoted.
    Where tokens are wgmma's rows, the halves share those of one.
    """
    factors = max(1, spec.format.scale_rows) * (2 if spec.format.offset else 1)
    if spec.tokens_as_m:
        return 1
    if spec.sums == "f16":  # over the ends of records, where registers are left
        several, zeros = spec.format.scale_rows > 1, spec.format.zero_point
        crowded = (zeros or spec.format.powers) and spec.experts > 0 and spec.split_k > 1
        ahead = F16_AHEAD - 16 * several * (zeros + crowded)
        return 2 if spec.wgmma_n <= ahead and spec.warpgroups <= 2 else 1
    if factors == 1:
        return spec.token_halves
    fit = IN_FLIGHT_REGISTERS // sum_registers(spec) // spec.token_halves
    return spec.token_halves * max(1, min(factors, fit))


def sum_registers(spec: KernelSpec) -> int:
    """Registers for one of those sums: of a half's tokens, one group and one factor."""
    return spec.wgmma_n // spec.token_halves // (4 if spec.sums == "f16" else 2)


def fragment_sets(spec: KernelSpec) -> int:
    """Sets of registers that hold decoded records: 2, which alternate, or 1, which is copied into.

    Two make the loop two records long. That is too much code with groups of 32, which unroll to four times as much, and
    too many registers for four warpgroups, or two CTAs, with wide tiles that convert int8's sums; with narrow tiles, or
    codes for any activations, ptxas serialises the multiplies of a single set. Those of 8-bit weights hold addresses
    and factors only. With f16 sums there are registers and, half as many promotions, space for code.
    """
    if spec.shared_weights or spec.sums != "f32":
        return 2
    if spec.format.scale_rows == 4:
        return 1
    if spec.format.lhs_types != ("s8",) or spec.format.group_size == 0:
        return 2
    four = spec.warpgroups == 4 and spec.block_m >= 48
    crowded = spec.ctas_per_sm == 2 and spec.block_m >= 64 and spec.format.scale_rows == 1
    return 1 if four or crowded else 2


def spares_fragments(spec: KernelSpec) -> bool:
    """Whether a kernel that spills with two sets is built with one instead.

    It takes 0.90 to 0.96 of the time where 192 tokens in halves convert int8's sums, 0.96 to 1.03 with block scales or
    192 rows, and as long with zero points. Where nothing spills, two sets are up to 7 % faster
    (docs/notes/selector.md): so the compiler decides, kernel by kernel.
    """
    return spec.sums == "f32" and not spec.shared_weights and fragment_sets(spec) == 2


def multiply_widths(spec: KernelSpec) -> tuple[int, ...]:
    """wgmma's N in the loops that a kernel has, one for all its halves: a tile takes the narrowest that its tokens fit.

    A grouped GEMM's tiles end with their experts, so that most of them are not full: multiplies as wide as needed are 2
    to 12 % faster where tensor cores or conversions bind (docs/moe.md). With several factors a record, or zero points,
    a loop takes ptxas seconds, and registers run short.
    """
    full, fmt = spec.wgmma_n, spec.format
    cuts = spec.experts > 0 and full >= 64 and not spec.tokens_as_m and spec.warpgroups_k == spec.split_k == 1
    cuts = cuts and fmt.scale_rows <= 1 and not (fmt.offset or fmt.zero_point)
    # Sums that stay in the tensor cores for the whole tile lie by halves of the full width.
    if not cuts or (spec.token_halves > 1 and not promote_records(spec)):
        return (full,)
    rounded = (16 * ceil_div(full, 16 * parts) for parts in (4, 2))
    legal = {
        width for width in (*rounded, full - 32, full - 16) if width // spec.token_halves in wgmma_shapes(spec.lhs)
    }
    return (*sorted(width for width in legal if 16 <= width < full), full)


def token_widths(spec: KernelSpec) -> tuple[int, ...]:
    """Tokens that a tile can multiply. If tokens are wgmma's rows, a warpgroup without any of a tile leaves it out."""
    if spec.tokens_as_m and spec.experts:
        tokens = spec.block_m // spec.warpgroups_m
        return tuple(range(tokens, spec.block_m + 1, tokens))
    return multiply_widths(spec)


def pins_shared_base(spec: KernelSpec) -> bool:
    """Whether the address of shared memory stays in a register, which ptxas cannot recompute in each iteration.

    By measurement (docs/notes/main-loop.md): up to 6 % for tiles of few tokens, and 1 to 3.5 % for wider e4m3 tiles of
    two warpgroups along k.
    """
    if spec.block_m <= 32:
        return True
    return spec.lhs == "e4m3" and spec.warpgroups_k > 1 and spec.ctas_per_sm == 1 and not spec.format.zero_point


# ---- who brings the activations of the prefetched stages (docs/notes/decode.md) --------------------------------------
#
# The copy engine does, or the consumers themselves: for a few tokens the engine takes twice as long from the wait to
# the first byte. Up to DIRECT_LHS_TOKENS the consumers always do. Wider tiles and four warpgroups along k gain by it
# only where weights still to be asked for would keep the engine busy, which k decides: `with_k_rules` sets `direct`.

DIRECT_LHS_TOKENS = 16
"""Up to so many tokens consumers copy the first activations of every kernel that can."""
DIRECT_TOKENS = {(1, 2): (64, 300), (2, 1): (48, 128), (2, 2): (32, 64), (4, 1): (32, 64)}
"""Where `direct` may be set: most tokens of a tile, times warpgroups along n, and tokens of all stages together; by
warpgroups along k and CTAs of an SM."""


def direct_lhs(spec: KernelSpec) -> bool:
    """Whether the consumers of a tile copy the first stages' activations themselves instead of the copy engine."""
    return spec.consumers_copy_lhs or _always_direct(spec)


def _always_direct(spec: KernelSpec) -> bool:
    return spec.block_m <= DIRECT_LHS_TOKENS and spec.warpgroups_k <= 2 and spec.multicast_lhs == 1 and not spec.experts


def engine_stages(spec: KernelSpec) -> float:
    """Stages of a tile up to which the copy engine brings the first activations; with more the consumers do."""
    if _always_direct(spec):
        return 0
    widest, _ = DIRECT_TOKENS.get((spec.warpgroups_k, spec.ctas_per_sm), (0, 0))
    if spec.block_m * spec.warpgroups_n > widest or spec.multicast_lhs > 1 or spec.experts:
        return math.inf
    return min(spec.stages, PREFETCH_BYTES[1] // stage_weight_bytes(spec))


def with_k_rules(spec: KernelSpec, k: int) -> KernelSpec:
    """The kernel as it serves a weight of this k best."""
    stages = ceil_div(split_blocks(spec, ceil_div(k, BLOCK_K)), spec.warpgroups_k)
    copies = not _always_direct(spec) and stages > engine_stages(spec)
    return spec if copies == spec.consumers_copy_lhs else replace(spec, consumers_copy_lhs=copies)


def prefetch_stages(spec: KernelSpec) -> int:
    """Stages of the first tile whose weights a CTA asks for before it waits for the grid before.

    None of a grouped kernel, which does not know its first tile before.
    """
    if spec.experts:
        return 0
    budget = PREFETCH_BYTES[min(2, spec.ctas_per_sm) if spec.block_m <= DIRECT_LHS_TOKENS else 1]
    stages = min(spec.stages, max(MIN_PREFETCH_STAGES, budget // stage_weight_bytes(spec)))
    if spec.consumers_copy_lhs:
        _, tokens = DIRECT_TOKENS[spec.warpgroups_k, spec.ctas_per_sm]
        stages = min(stages, ceil_div(tokens, spec.block_m))
    return stages


# ---- machine code ----------------------------------------------------------------------------------------------------


def yields(spec: KernelSpec) -> Yields:
    """Which instructions of a kernel's machine code yield; by measurement (docs/notes/yields.md)."""
    rows = spec.format.scale_rows
    if spec.sums == "parts":
        return Yields()
    if spec.lhs == "s8" and rows == 4:
        return Yields(conversions=False)
    if spec.format.lhs_types == ("s8",) and rows == 1 and not spec.format.offset:
        return Yields(every=2 if spec.block_m <= 64 else 4, conversions=False)
    return Yields()
