"""Which kernels exist: the tiles, splits and clusters that a device can hold, each with its stages.

Nothing here depends on a predicted time or on a fitted constant: a new fit changes which kernel is chosen, and never
which kernels there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from jitgemm.kernel.formats import F16_OPERANDS, LHS_GROUP, STRIP_ROWS, WeightFormat, ceil_div
from jitgemm.kernel.spec import KernelSpec, smem_bytes, stage_bytes, wgmma_shapes
from jitgemm.kernel.tactics import fragment_sets, promote_records, sum_registers, units_in_flight
from jitgemm.select.devices import DeviceSpec

BLOCK_MS = (8, 16, 24, 32, 48, 64, 80, 96, 104, 112, 120, 128, 144, 160, 168, 176, 192, 224, 256)
FINER_MS = {104: 1, 120: 1, 168: 1, 224: 2}
"""Heights between the others, with their halves: of dense tiles that have all of k, for a last round that is less empty
(docs/notes/main-loop.md)."""
FINER_GROUPED = {("e4m3", 104): [{"block_n": 192}], ("s8", 224): [{"block_n": 128, "multicast_lhs": 2}]}
"""Those of experts' kernels of 4-bit weights, one shape for each lhs type (docs/notes/grouped.md)."""
FINER_GROUPED_K = 1024
"""Columns from which int8 codes that decode fast pay for theirs: with 768 they took 1.06 and 1.13 of the time."""
MIN_STAGES = 3
"""Two stages hide nothing."""
MAX_STAGES = 12
SYSTEM_SMEM = 1024
"""Bytes of shared memory that the system takes from an SM for each resident CTA."""
F16_TOKENS, F16_GROUPED_TOKENS = 112, 80
"""Least tokens of a tile that adds up in f16: memory bounds narrow ones, and not promotion. The latter with experts,
whose tiles are not full, and several groups a record."""
NARROW_TOKENS = 64
"""Most tokens of a narrow tile. Narrow tiles fill the GPU by splitting k, wide ones share operands."""

NARROW_SPLITS = {
    (1, 1): (1, 2, 3), (2, 1): (1, 2, 3, 4, 6), (3, 1): (1, 2), (4, 1): (1,),
    (1, 2): (1, 2, 3, 4), (2, 2): (1, 2), (1, 4): (1, 2, 3),
}  # fmt: skip
"""CTAs that split k for narrow tiles, by warpgroups along n and k; here and below without what five sweeps never found
best, or by less than 1.5 % (docs/notes/selector.md)."""
WIDE_SPLITS = {(1, 2): (1, 2, 3), (2, 1): (2, 3), (3, 1): (2,)}
"""The same for tiles of 80 to 160 tokens."""
PAIRED_SPLITS = {1: (1, 2), 2: (1, 2, 4)}
"""Splits of NARROW_SPLITS that also exist with two CTAs on an SM, by consumer warpgroups. The second CTA's place lets
the next kernel prefetch its weights. Clusters of three appear to put two of their own CTAs on one SM
(docs/notes/selector.md)."""
FEW_STAGE_TOKENS = 32
FEW_STAGE_BYTES = {(4, False): 187_000, (4, True): 172_000, (1, True): 130_000}
"""Most bytes of stages that a CTA alone on its SM takes where three or four warpgroups share a tile of at most
FEW_STAGE_TOKENS tokens, by warpgroups along k and `_decodes_slowly`. More cost up to 9 % (docs/notes/decode.md)."""


def illegal(spec: KernelSpec, device: DeviceSpec) -> str | None:
    """Why this kernel cannot run on the device, or would spill badly; None when it can be chosen."""
    if spec.wgmma_n % spec.token_halves or spec.wgmma_n // spec.token_halves not in wgmma_shapes(spec.lhs):
        return f"wgmma has no N of {spec.wgmma_n}/{spec.token_halves} for {spec.lhs}"
    if spec.tokens_as_m and (spec.block_m % (STRIP_ROWS * spec.token_halves) or spec.warpgroups_k * spec.split_k > 1):
        return "with tokens as wgmma's rows a warpgroup has 64 of them in each half, and all of k"
    if spec.tokens_as_m and not (spec.shared_weights and spec.format.group_size == spec.lhs_group == LHS_GROUP):
        return "tokens are wgmma's rows only with 8-bit weights in blocks and a scale per 128 k"
    if spec.sums == "f16" and (not spec.format.f16_sums or spec.lhs != "e4m3" or spec.lhs_group):
        return f"sums in f16 are of {F16_OPERANDS}"
    if spec.sums == "f16" and (spec.warpgroups_k > 1 or spec.token_halves > 1):
        return "with sums in f16 a warpgroup has whole tiles, and records that follow one another"
    parts = spec.lhs == "s8" and spec.format.sums_by_parts and not spec.lhs_group and promote_records(spec) == 1
    if spec.sums == "parts" and not parts:
        return (
            "sums by parts are of int8 with a scale per token, and 4-bit weights of its own order or with zero points"
        )
    if spec.sums == "parts" and spec.token_halves > 1:
        return "sums by parts are of all of a tile's tokens at once"
    if spec.block_n % STRIP_ROWS or not 1 <= spec.warpgroups <= 4:
        return f"{spec.warpgroups} warpgroups"
    if spec.experts and (spec.consumers_copy_lhs or spec.ctas_per_sm > 1 or spec.reduce_scatter):
        return "a grouped kernel's consumers copy no activations, its CTAs share no SM, and one of them stores a tile"
    if spec.multicast_lhs > 1 and spec.split_k > 1:
        return "a cluster either splits k or shares activations"
    if spec.block_m % (8 * spec.multicast_lhs):
        return "multicast shares must be whole swizzle rows"
    if spec.cluster_size > min(8, device.num_sms):
        return f"clusters of more than {min(8, device.num_sms)} do not fit"
    if spec.stages < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit"
    if smem_bytes(spec) > _smem_limit(spec, device):
        return f"{smem_bytes(spec)} bytes of shared memory, {_smem_limit(spec, device)} available"
    if registers_needed(spec) > spec.consumer_registers:
        return f"about {registers_needed(spec)} registers a thread, {spec.consumer_registers} available"
    return None


def _smem_limit(spec: KernelSpec, device: DeviceSpec) -> int:
    """Bytes of shared memory that a CTA of this kernel may take."""
    return min(device.smem_per_block, device.smem_per_sm // spec.ctas_per_sm - SYSTEM_SMEM)


def most_stages(spec: KernelSpec, device: DeviceSpec) -> int:
    """How many stages fit in shared memory."""
    return min(MAX_STAGES, spec.stages + (_smem_limit(spec, device) - smem_bytes(spec)) // stage_bytes(spec))


def _stages(spec: KernelSpec, device: DeviceSpec) -> int:
    """The stages a kernel gets: all that fit, or the fewer that FEW_STAGE_BYTES allows."""
    most = most_stages(spec, device)
    if spec.ctas_per_sm > 1 or spec.block_m > FEW_STAGE_TOKENS or spec.warpgroups < 3:
        return most
    budget = FEW_STAGE_BYTES.get((spec.warpgroups_k, _decodes_slowly(spec)), device.smem_per_sm)
    return max(MIN_STAGES, min(most, budget // stage_bytes(spec)))


def _decodes_slowly(spec: KernelSpec) -> bool:
    """Returns True if decoding and promoting a record takes about as long as memory takes to bring it."""
    fmt = spec.format
    return fmt.decodes_slowly or fmt.offset or fmt.scale_rows * spec.block_m >= 64


@lru_cache(maxsize=4096)
def kernels(
    lhs: str, fmt: WeightFormat, device: DeviceSpec, out: str, block_m: int, experts: int = 0, lhs_group: int = 0,
    sums: str = "f32",
) -> tuple[KernelSpec, ...]:  # fmt: skip
    """The legal kernels with tiles of `block_m` tokens and a table of so many experts; sums "f16": of both kinds."""
    every = _enumerate(lhs, fmt, device, out, block_m, experts, lhs_group, sums)
    return tuple(spec for spec in every if illegal(spec, device) is None)


def legal_kernels(
    lhs: str, fmt: WeightFormat, device: DeviceSpec, out: str = "bf16", experts: int = 0, lhs_group: int = 0,
    sums: str = "f32",
) -> tuple[KernelSpec, ...]:  # fmt: skip
    """Every kernel the selector considers for these formats on this device."""
    formats = lhs, fmt, device, out
    return tuple(s for block_m in BLOCK_MS for s in kernels(*formats, block_m, experts, lhs_group, sums))


def illegal_kernels(lhs: str, fmt: WeightFormat, device: DeviceSpec, out: str = "bf16") -> tuple[KernelSpec, ...]:
    """Every kernel that only the bound on registers keeps out, for `scripts/register_bound.py`."""
    every = (spec for block_m in BLOCK_MS for spec in _enumerate(lhs, fmt, device, out, block_m))
    return tuple(spec for spec in every if "registers" in (illegal(spec, device) or ""))


def _enumerate(
    lhs: str, fmt: WeightFormat, device: DeviceSpec, out: str, block_m: int, experts: int = 0, lhs_group: int = 0,
    sums: str = "f32",
) -> Iterator[KernelSpec]:  # fmt: skip
    """Kernels with tiles of `block_m` tokens, with the stages they get."""
    strips, fmt, narrow = fmt.uniform_strip_scale and lhs_group, fmt.kernel_format, block_m <= NARROW_TOKENS
    every = [*_shapes(block_m), *(_grouped_shapes(block_m) if experts else ())]
    every += _token_row_shapes(block_m) if strips else ()
    if experts and block_m in FINER_MS:
        every = [] if fmt.typed else FINER_GROUPED.get((lhs, block_m), [])
    for shape in every:
        spec = KernelSpec(lhs, fmt, block_m, stages=MIN_STAGES, out=out, experts=experts, lhs_group=lhs_group, **shape)
        spec = replace(spec, stages=_stages(spec, device))
        yield spec
        least = F16_GROUPED_TOKENS if experts and fmt.scale_rows > 1 else F16_TOKENS
        if sums == "f16" and block_m >= least and spec.warpgroups_k == spec.token_halves == 1:
            yield replace(spec, sums=sums)
        by_parts = lhs == "s8" and sums == "f32" and fmt.sums_by_parts and not lhs_group
        if by_parts and not narrow and spec.token_halves == 1:
            yield replace(spec, sums="parts")


def _shapes(block_m: int) -> Iterator[dict[str, Any]]:
    """The fields of a kernel that the selector is free to choose, apart from its stages."""
    narrow = block_m <= NARROW_TOKENS
    if block_m in FINER_MS:
        yield from (dict(block_n=block_n, token_halves=FINER_MS[block_m]) for block_n in (128, 192))
        return
    if block_m <= 160:
        for (warpgroups_n, warpgroups_k), splits in (NARROW_SPLITS if narrow else WIDE_SPLITS).items():
            paired = PAIRED_SPLITS.get(warpgroups_n * warpgroups_k, ()) if narrow else ()
            for split_k, halves in itertools.product(splits, (1,) if narrow else (1, 2)):
                ways = _ways_to_sum(block_m, warpgroups_k, split_k)
                for scatter, ctas in itertools.product(ways, (1, 2) if split_k in paired else (1,)):
                    yield dict(
                        block_n=64 * warpgroups_n, token_halves=halves, warpgroups_k=warpgroups_k, split_k=split_k,
                        reduce_scatter=scatter, ctas_per_sm=ctas,
                    )  # fmt: skip
    if NARROW_TOKENS < block_m <= 96:
        yield dict(block_n=256)
    if not narrow:
        for halves in (1, 2) if block_m <= 192 else (2,):
            yield dict(block_n=128, token_halves=halves)
            yield dict(block_n=192, token_halves=halves)
        # In one piece, a promotion leaves nothing to multiply while the other CTA is waited for: up to 20 %.
        yield dict(block_n=128, token_halves=2, multicast_lhs=2)


def _token_row_shapes(block_m: int) -> Iterator[dict[str, Any]]:
    """Those of kernels with tokens as wgmma's rows."""
    for block_n in {64: (256,), 128: (64, 128, 192), 192: (128,), 256: (128,)}.get(block_m, ()):
        yield dict(block_n=block_n, token_halves=2 if block_m == 256 else 1, tokens_as_m=True)


def _grouped_shapes(block_m: int) -> Iterator[dict[str, Any]]:
    """More of them for grouped GEMMs, where few tiles share activations: clusters that do, in one piece too."""
    if block_m > NARROW_TOKENS:
        for block_n in (128, 192):
            yield dict(block_n=block_n, multicast_lhs=2)


def _ways_to_sum(block_m: int, warpgroups_k: int, split_k: int) -> tuple[bool, ...]:
    """Values of `scatter`. One CTA that sums many tokens of many splits would keep all others waiting."""
    if warpgroups_k * split_k == 1 or block_m <= 8:
        return (False,)
    return (False, True) if split_k <= 2 or block_m <= 16 else (True,)


# ---- registers -------------------------------------------------------------------------------------------------------
#
# About how many a kernel takes, so that none is chosen that would spill badly. A kernel that spills a few bytes runs
# (and says so once), hence this is a short sum and no bound. It lets pass what ptxas builds with less than it seems to
# need, and kernels that spill up to some 200 bytes, no more. `scripts/register_bound.py` holds it against the compiler.

OVERHEAD_REGISTERS = 40
"""Registers of a consumer thread besides sums: codes, fragments, addresses, loop state."""
UNPROMOTED_REGISTERS = 24
"""More of them where sums stay in the tensor cores for the whole tile: nothing of theirs is free in between."""
SET_REGISTERS = 16
"""Fewer of them for int8 with a single set of fragments, except with groups of 32, whose factors take as many."""
CONVERTED = 1.5
"""Registers for each of int8's sums in flight: ptxas converts about half of them at a time. In halves, the other half's
registers serve; where rows are tokens, or four warpgroups have two sets of fragments, none are needed."""
BYTE_FACTOR_REGISTERS = 16
"""More of them for four groups a record of 8-bit weights, which have two sets of factors."""
SHARED_REGISTERS = 22
"""Fewer of them for 8-bit weights, which wgmma reads from shared memory: there are no fragments."""
TOKEN_ROW_REGISTERS = 18
"""Yet fewer where tokens are wgmma's rows: a strip has one scale, and no loads for each of its rows."""
SHARED_TOKENS = 128
"""Most tokens along wgmma's N of a tile that has use of it: counted for wider ones, it lets kernels pass that spill up
to 500 bytes."""
OFFSET_REGISTERS = 26
"""More of them for offsets: multiplies by ones, and a second factor for each group."""
SCALE_REGISTERS = 12
"""More of them for scales of activations per token and group, a few are there at a time."""


F16_FACTOR_REGISTERS = 8
"""More of them for f16 sums with four groups a record, for three warpgroups, and for grouped kernels that split k, or
have several groups a record: without them, tiles of 192 x 128 and 96 x 192 spill. Three times as many where k is split
for four groups a record with zero points, or for tables of exponents and of experts: else tiles of 160 x 128 spill."""
PARTS_REGISTERS = 8
"""More of them for sums by parts, which need the next record's scales as well; as many more for three warpgroups or
four, and where splits of k meet experts' tables."""
CROWDED_REGISTERS = 8
"""More of them for 4-bit codes in halves with offsets, with activations' scales per token and 128 k, or with split k.
Half as many for grouped kernels of `TALL_TOKENS` or more, for 64 tokens whose k warpgroups share, and for halves with
corrections: else 192 x 128 spills."""
TALL_TOKENS = 176
GROUPED_REGISTERS, GROUPED_TOKENS = {False: 10, True: 24}, 48
"""More of them for 4-bit codes and experts' tables where CTAs split k, without and with zero points, from so many
tokens on: a fifth of the kernels it leaves out spill with one set of fragments, too; none was the best of its
problem."""
FOUR_ZEROS_REGISTERS = 6
"""More of them for zero points of four groups a record: without them, tiles of 192 x 128 in halves spill 88 bytes in
e4m3 and 380 in int8."""


def registers_needed(spec: KernelSpec) -> int:
    """Registers of a consumer thread: promoted sums, sums in flight in the tensor cores, the rest."""
    fmt, sums = spec.format, spec.wgmma_n / 2
    others = OVERHEAD_REGISTERS
    if promote_records(spec):
        in_flight = units_in_flight(spec) * sum_registers(spec)
        if spec.sums == "f16":
            sums += sum_registers(spec)  # of the run
            grouped = (spec.experts > 0) * ((spec.split_k > 1) + (fmt.scale_rows > 1))
            zeros = fmt.zero_point and fmt.scale_rows == 4
            tables = fmt.table_bytes and spec.experts and units_in_flight(spec) == 1
            crowded = 3 * (spec.split_k > 1 and (zeros or tables))
            others += F16_FACTOR_REGISTERS * ((fmt.scale_rows == 4) + (spec.warpgroups > 2) + grouped + crowded)
        if spec.sums == "parts":
            crowded = 1 + (spec.warpgroups > 2) + (spec.experts > 0 and spec.split_k > 1)
            others += PARTS_REGISTERS * crowded
        converts = spec.lhs == "s8" and spec.sums == "f32" and spec.token_halves == 1 and not spec.tokens_as_m
        converts = converts and (spec.warpgroups < 4 or fragment_sets(spec) == 1)
        sums += in_flight * (CONVERTED if converts else 1)
        others += SCALE_REGISTERS if spec.lhs_group and not spec.tokens_as_m else 0
        others -= SET_REGISTERS if spec.lhs == "s8" and fmt.scale_rows < 4 and fragment_sets(spec) == 1 else 0
    else:
        others += UNPROMOTED_REGISTERS
    if spec.sums == "f32" and not spec.shared_weights:
        halves = spec.token_halves > 1 and (fmt.offset or spec.lhs_group > 0 or spec.split_k > 1)
        tall = spec.experts > 0 and spec.block_m >= TALL_TOKENS
        shared_k = spec.warpgroups_k > 1 and spec.block_m == 64
        corrected = bool(fmt.correction) and spec.token_halves > 1
        others += CROWDED_REGISTERS * halves + CROWDED_REGISTERS // 2 * (tall + shared_k + corrected)
        crowded = spec.experts > 0 and spec.split_k > 1
        others += GROUPED_REGISTERS[fmt.zero_point] if crowded and spec.block_m >= GROUPED_TOKENS else 0
    others += OFFSET_REGISTERS if fmt.offset else 0
    others += fmt.decoder(spec.lhs).registers
    others += FOUR_ZEROS_REGISTERS if fmt.zero_point and fmt.scale_rows == 4 and spec.sums == "f32" else 0
    others += BYTE_FACTOR_REGISTERS if spec.shared_weights and fmt.scale_rows == 4 else 0
    others -= SHARED_REGISTERS if spec.shared_weights and (spec.tokens_as_m or spec.block_m <= SHARED_TOKENS) else 0
    others -= TOKEN_ROW_REGISTERS if spec.tokens_as_m else 0
    return round(sums + others)


# ---- the grid --------------------------------------------------------------------------------------------------------


def cluster_tiles(spec: KernelSpec, m: int, n: int) -> int:
    """Tiles that a problem has, counted in clusters that compute one each, or one for each CTA of a multicast."""
    return ceil_div(m, spec.block_m) * cluster_tiles_along_n(spec, n)


def cluster_tiles_along_n(spec: KernelSpec, n: int) -> int:
    return ceil_div(n, spec.block_n * spec.multicast_lhs)


def max_cluster_tiles(spec: KernelSpec, experts: int, rows: int, n: int) -> int:
    """The most tiles that any routing of so many rows to so many experts has; all but one row of an expert's fill
    whole tiles then."""
    hit = min(experts, rows)
    return (hit + (rows - hit) // spec.block_m) * cluster_tiles_along_n(spec, n)


def launched_clusters(spec: KernelSpec, tiles: int, num_sms: int, resident: int) -> int:
    """Clusters of a launch: about one CTA an SM, which take the other tiles in persistent strides.

    A second CTA on an SM belongs to the next kernel, except where clusters would leave SMs empty otherwise.

    Args:
        resident: clusters that the device holds at once, as `cuOccupancyMaxActiveClusters` counts them.
    """
    return min(tiles, max(1, min(resident, num_sms // spec.cluster_size)))
