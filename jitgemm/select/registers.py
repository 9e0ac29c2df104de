"""How many registers a kernel takes, as far as can be said before it is compiled.

A kernel that spills counts as a failed build (`nvrtc.py`), so what this module lets pass must build with every NVRTC
that is supported. ptxas shares registers in ways that no sum of parts foresees: where the sum is too high by far, a
bound for a whole family of tiles stands instead, found by compiling them (`scripts/register_bound.py`,
docs/notes/selector.md).
"""

from __future__ import annotations

from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import fragment_sets, promote_records, units_in_flight

OVERHEAD_REGISTERS = {"e4m3": 56, "s8": 64}
"""Registers of a consumer thread beside its accumulators: codes, fragments of two records, addresses, loop state; s8
converts too."""
UNPROMOTED_REGISTERS = 16
"""More of them where sums stay in the tensor cores' registers from record to record."""
SPLIT_REGISTERS = 8
"""More of them where k is split."""
FP32_SPLIT_REGISTERS = 4
"""And more of those where a record has two scales in fp32."""
FOUR_REGISTERS = 18
"""Fewer of them with four warpgroups side by side and one group a record: ptxas does with less where it has to."""
SET_REGISTERS = 16
"""Fewer of them with one set of fragments."""
SCATTER_REGISTERS = 8
"""More of them where those scatter their sums."""
MULTICAST_LHS_REGISTERS, MULTICAST_RHS_REGISTERS = 17, 8
"""More of them where groups are promoted and CTAs share an operand."""
CONVERTED_PART = 1 / 3
"""Part of the tokens promoted at a time, where they are 64 or more, for which s8 takes registers for converted sums."""
CHUNK_REGISTERS = {"bf16": 2, "fp16": 2, "fp32": 5}
"""More of them for every group beyond the first within a record of 128 k, by the type of the scales."""
PAIR_REGISTERS = 9
"""More of them where a record has two sums (groups of 64, offsets), and s8 to convert or zero points to take off."""
WIDE_PAIR_REGISTERS = {"any": 11, "s8": 3}
"""And more where s8 converts them for tiles of 64 tokens or more, by codes, and as many again with zero points."""
OFFSET_PAIR_REGISTERS = 18
"""And more of those with offsets to groups of 64, which have four sums a record."""
THIRDS_PAIR_REGISTERS = 11
"""And more of those where splits of 3 scatter their sums."""
NARROW_PAIR_REGISTERS = 26
"""Fewer of them where tiles of 32 tokens or less have groups of 64: their sums are few."""
ZERO_REGISTERS = 8
"""More of them for zero points."""
ZERO_SPLIT_REGISTERS = 1
"""And more of those where CTAs split k."""
OFFSET_REGISTERS = {"e4m3": 24, "s8": 34}
"""More of them for offsets: four ones, two factors for each group of a record."""
FP32_REGISTERS = 16
"""More of them where results are stored in fp32."""
NARROW_REGISTERS = {8: 96, 16: 96, 24: 96, 32: 96, 48: 104}
"""As many suffice for tiles of so few tokens, whatever the sum of the parts: ptxas computes more of them again."""
NARROW_ZERO_REGISTERS = 8
"""More of those with zero points, or with two int8 sums a record to convert, from 32 tokens on."""
NARROW_SIGN_REGISTERS = 8
"""Fewer of those for 48 tokens and codes of sign and magnitude, which decode with the fewest."""
UNPROMOTED_NARROW_REGISTERS = 96
"""As many suffice for tiles of 48 and 64 tokens in int8's own codes per channel."""
TWO_CTAS_REGISTERS = 128
"""As many, which a warpgroup has where two CTAs of one share an SM, suffice for the tiles of `_fits_two_ctas`."""

WIDE_REGISTERS = 232
"""As many, which two warpgroups have, suffice for the wide tiles of `WIDE_TOKENS`."""
WIDE_TOKENS = {
    ("e4m3", 1, False): (192, 192), ("e4m3", 2, False): (192, 176), ("e4m3", 4, False): (192, 176),
    ("e4m3", 1, True): (176, 192), ("e4m3", 2, True): (160, 0), ("e4m3", 4, True): (160, 0),
    ("s8", 1, False): (128, 192), ("s8", 2, False): (0, 192), ("s8", 4, False): (128, 192),
    ("s8", 1, True): (0, 128), ("s8", 2, True): (0, 128), ("s8", 4, True): (0, 160),
}  # fmt: skip
"""Most tokens of those: multiplied at once, in halves; by lhs type, scales of a record's row, zero points."""

THREE_REGISTERS = 152
"""As many, which three warpgroups have, suffice for the tiles of 192 rows of `THREE_TOKENS`."""
THREE_TOKENS = {
    ("e4m3", 1, False): ((112, 112), (96, 96)), ("e4m3", 2, False): ((112, 112), (96, 96)),
    ("e4m3", 4, False): ((112, 112), (96, 96)), ("e4m3", 1, True): ((96, 96), (80, 96)),
    ("e4m3", 4, True): ((96, 96), (96, 96)), ("s8", 1, False): ((80, 96), (0, 0)),
    ("s8", 2, False): ((64, 96), (0, 0)), ("s8", 4, False): ((80, 96), (80, 96)),
    ("s8", 1, True): ((80, 0), (64, 96)), ("s8", 4, True): ((80, 0), (64, 0)),
}  # fmt: skip
"""Most tokens of those: multiplied at once, in halves, and the same where k is split; by the same."""
FOUR_REGISTERS_64 = 104
"""As many, which four warpgroups have, suffice for their tiles of 64 tokens (`_fits_four_warpgroups`)."""


def registers_needed(spec: KernelSpec) -> int:
    """Registers of a consumer thread, for which a kernel certainly builds without spilling."""
    needed = _sum_of_registers(spec)
    if spec.format.offset or spec.out == "fp32":
        return needed
    families = (
        (TWO_CTAS_REGISTERS, _fits_two_ctas),
        (WIDE_REGISTERS, _fits_two_warpgroups),
        (THREE_REGISTERS, _fits_three_warpgroups),
        (FOUR_REGISTERS_64, _fits_four_warpgroups),
        (UNPROMOTED_NARROW_REGISTERS, _fits_unpromoted),
    )
    suffices = (registers for registers, fits in families if fits(spec))
    return min(needed, _narrow_registers(spec, needed), *suffices)


def _fits_two_ctas(spec: KernelSpec) -> bool:
    """Whether this is a tile of 64 tokens that builds although its parts sum up to more.

    Not with int8's zero points: NVRTC 13.5 spills.
    """
    return spec.block_m == 64 and spec.format.scale_rows <= 1 and not (spec.lhs == "s8" and spec.format.zero_point)


def _fits_two_warpgroups(spec: KernelSpec) -> bool:
    """Whether this is a wide tile that builds although its parts sum up to more.

    Codes and factors of a record lie where sums were, and int8's sums are converted where they lie.
    """
    rows = max(1, spec.format.scale_rows)
    if promote_records(spec) == 0 or spec.block_m < 64:
        return False
    most = WIDE_TOKENS[spec.lhs, rows, spec.format.zero_point][spec.halves - 1]
    if spec.format.codes == "any" and not spec.format.zero_point:
        if spec.lhs == "e4m3" and spec.halves == 1 and rows > 1 and spec.format.scale_type == "fp32":
            most = 176
        elif spec.lhs == "s8" and rows == spec.halves:
            most = 160
    split = spec.split_k * spec.warpgroups_k > 1
    if split or spec.multicast > 1:
        if spec.lhs == "e4m3" or rows == 2 or (split and spec.halves == 1):
            return False
        if split:
            third = spec.scatter and spec.split_k == 3
            own = spec.format.codes == "s8" and rows == 1
            crowded = own and spec.split_k * spec.warpgroups_k > 2
            most = min(most, 128 if third or crowded else 144 if own and spec.split_k > 1 and spec.scatter else 160)
        if spec.format.zero_point:
            most = min(most, 128)
    return spec.block_m <= most


def _fits_three_warpgroups(spec: KernelSpec) -> bool:
    """Whether this is a tile of 192 rows that builds although its parts sum up to more."""
    if spec.warpgroups_n != 3 or spec.ctas_per_sm > 1 or spec.multicast > 1 or spec.block_m < 64:
        return False
    if promote_records(spec) == 0:
        return spec.block_m <= 160
    rows = max(1, spec.format.scale_rows)
    if rows > 1 and spec.format.scale_type == "fp32":
        return False
    whole, split = THREE_TOKENS.get((spec.lhs, rows, spec.format.zero_point), ((0, 0), (0, 0)))
    if (spec.lhs, spec.format.codes) in (("e4m3", "e4m3"), ("s8", "any")) and rows == 1 and not spec.format.zero_point:
        split = whole
    elif spec.lhs == "s8" and spec.format.zero_point and spec.format.scale_type == "fp32":
        whole = min(whole[0], 64), whole[1]
    elif spec.lhs == "s8" and rows <= 2 and not spec.format.zero_point and spec.split_k == 2 and not spec.scatter:
        split = 80, 96 if rows == 2 else 80
    return spec.block_m <= (split if spec.split_k > 1 else whole)[spec.halves - 1]


def _fits_four_warpgroups(spec: KernelSpec) -> bool:
    """Whether this is a tile of 64 tokens, some warpgroups along k, that builds although its parts sum up to more."""
    if spec.warpgroups != 4 or spec.warpgroups_k == 1 or spec.block_m != 64 or spec.format.zero_point:
        return False
    if spec.format.codes == "any" and spec.warpgroups_n == 2 and spec.split_k > 1 and not spec.scatter:
        return False  # 4 bytes spill with NVRTC 12.6 and 13.0
    return spec.format.scale_rows <= 1 and (spec.format.codes != "any" or (spec.lhs == "s8" and spec.format.group_size > 0))


def _fits_unpromoted(spec: KernelSpec) -> bool:
    """Whether this is a tile of 48 or 64 tokens in int8's own codes per channel."""
    return promote_records(spec) == 0 and spec.format.codes == "s8" and spec.block_m in (48, 64)


def _narrow_registers(spec: KernelSpec, needed: int) -> int:
    """What suffices for a tile of few tokens, else `needed`."""
    if spec.block_m not in NARROW_REGISTERS:
        return needed
    short_groups = spec.lhs == "s8" and spec.format.scale_rows > 1
    if short_groups and spec.block_m == 48 and spec.split_k > 4:
        return needed  # up to 40 bytes spill with NVRTC 13.5, 8 with 12.6
    pair = spec.block_n == 128 and spec.warpgroups == 2 and spec.split_k == 2 and spec.scatter
    if pair and spec.block_m == 32 and spec.format.codes == "s8" and spec.format.scale_rows == 1:
        return needed  # 4 bytes spill with NVRTC 13.0 where threads copy activations
    narrow = NARROW_REGISTERS[spec.block_m]
    converts_pairs = short_groups and spec.format.scale_rows == 2
    narrow += NARROW_ZERO_REGISTERS if (spec.format.zero_point or converts_pairs) and spec.block_m >= 32 else 0
    narrow -= NARROW_SIGN_REGISTERS if spec.format.codes == "e4m3" and spec.block_m == 48 else 0
    return narrow


def _sum_of_registers(spec: KernelSpec) -> int:
    """The tensor cores' sums, the promoted ones where groups are promoted, the rest."""
    rest = OVERHEAD_REGISTERS[spec.lhs]
    rest += SPLIT_REGISTERS if spec.warpgroups_k * spec.split_k > 1 else 0
    if spec.split_k > 1 and spec.format.scale_type == "fp32" and spec.format.scale_rows == 2:
        rest += FP32_SPLIT_REGISTERS
    rest += SCATTER_REGISTERS if spec.scatter else 0
    rest += CHUNK_REGISTERS[spec.format.scale_type] * max(0, spec.format.scale_rows - 1)
    if spec.format.zero_point:
        rest += ZERO_REGISTERS + (ZERO_SPLIT_REGISTERS if spec.split_k > 1 else 0)
    rest += OFFSET_REGISTERS[spec.lhs] if spec.format.offset else 0
    rest += FP32_REGISTERS if spec.out == "fp32" else 0
    rest -= FOUR_REGISTERS if spec.warpgroups_n == 4 and spec.format.scale_rows <= 1 else 0
    if promote_records(spec) == 0:
        return spec.block_m // 2 + rest + UNPROMOTED_REGISTERS
    rest += MULTICAST_LHS_REGISTERS if spec.multicast_lhs > 1 else 0
    rest += MULTICAST_RHS_REGISTERS if spec.multicast_rhs > 1 else 0
    if (spec.lhs == "s8" or spec.format.zero_point) and (spec.format.offset or spec.format.scale_rows == 2):
        rest += PAIR_REGISTERS
        if spec.lhs == "s8" and spec.block_m >= 64:
            rest += WIDE_PAIR_REGISTERS[spec.format.codes] * (1 + spec.format.zero_point)
            rest += OFFSET_PAIR_REGISTERS if spec.format.offset and spec.format.scale_rows == 2 else 0
            rest += THIRDS_PAIR_REGISTERS if spec.scatter and spec.split_k == 3 else 0
    if spec.block_m <= 32 and spec.format.scale_rows == 2 and not spec.format.offset:
        rest -= NARROW_PAIR_REGISTERS
    tokens = spec.block_m // spec.halves
    if spec.lhs == "s8" and spec.format.scale_rows < 4 and fragment_sets(spec) == 1:
        rest -= SET_REGISTERS
    elif spec.lhs == "s8" and tokens >= 64:
        rest += int(CONVERTED_PART * tokens)
    return spec.block_m // 2 + units_in_flight(spec) * (tokens // 2) + rest
