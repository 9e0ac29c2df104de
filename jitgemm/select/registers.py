"""About how many registers a kernel takes, so that none is chosen that would spill badly.

A kernel that spills a few bytes runs (and says so once), hence this is a short sum and no bound. It lets pass what
ptxas builds with less than it seems to need, and kernels that spill up to some 200 bytes; it refuses those that spill
more. `scripts/register_bound.py` holds it against the compiler.
"""

from __future__ import annotations

from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import fragment_sets, promote_records, units_in_flight

OVERHEAD_REGISTERS = 40
"""Registers of a consumer thread beside its sums: codes, fragments, addresses, loop state."""
UNPROMOTED_REGISTERS = 24
"""More of them where sums stay in the tensor cores for the whole tile: nothing of theirs is free in between."""
SET_REGISTERS = 16
"""Fewer of them for int8 with a single set of fragments, but for groups of 32, whose factors take as many."""
CONVERTED = 1.5
"""Registers for each of int8's sums in flight: ptxas converts about half of them at a time. In halves, the other half's
registers serve; where rows are tokens, none are needed."""
ZERO_REGISTERS = 10
"""More of them for zero points, but for one group a record in halves, where ptxas finds room: without that exception
28672 x 4096, m = 192 would take 31 % longer in e4m3, 33 % in int8. Twice as many for int8 with scales in fp32."""
BYTE_FACTOR_REGISTERS = 16
"""More of them for four groups a record of 8-bit weights, which have two sets of factors."""
SHARED_REGISTERS = 40
"""Fewer of them for 8-bit weights, which wgmma reads from shared memory: there are no fragments."""
SHARED_TOKENS = 128
"""Most tokens along wgmma's N of a tile that has use of it: counted for wider ones, it lets kernels pass that spill up
to 500 bytes."""
OFFSET_REGISTERS = 26
"""More of them for offsets: multiplies by ones, and a second factor for each group."""

SCALE_REGISTERS = 12
"""More of them for scales of activations per token and group, a few of which are there at a time."""


def registers_needed(spec: KernelSpec) -> int:
    """Registers of a consumer thread: promoted sums, sums in flight in the tensor cores, the rest."""
    fmt, sums = spec.format, spec.wgmma_n / 2
    rest = OVERHEAD_REGISTERS
    if promote_records(spec):
        in_flight = units_in_flight(spec) * spec.wgmma_n / spec.halves / 2
        sums += in_flight * (CONVERTED if spec.lhs == "s8" and spec.halves == 1 and not spec.token_rows else 1)
        rest += SCALE_REGISTERS if spec.lhs_group and not spec.token_rows else 0
        rest -= SET_REGISTERS if spec.lhs == "s8" and fmt.scale_rows < 4 and fragment_sets(spec) == 1 else 0
    else:
        rest += UNPROMOTED_REGISTERS
    if fmt.zero_point and spec.lhs == "s8" and fmt.group_size and fmt.scale_type == "fp32":
        rest += 2 * ZERO_REGISTERS
    elif fmt.zero_point and (spec.halves == 1 or fmt.scale_rows > 1):
        rest += ZERO_REGISTERS
    rest += OFFSET_REGISTERS if fmt.offset else 0
    rest += BYTE_FACTOR_REGISTERS if spec.shared_weights and fmt.scale_rows == 4 else 0
    rest -= SHARED_REGISTERS if spec.shared_weights and (spec.token_rows or spec.block_m <= SHARED_TOKENS) else 0
    return round(sums + rest)
