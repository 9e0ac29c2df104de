"""Choosing a kernel: enumerate what fits, predict each one's time from the device's figures, take the least.

Pure functions over frozen dataclasses; no torch, no driver, no table of tuned shapes. The model's constants stand above
it, each with its unit.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Iterator, NamedTuple

from jitgemm.dtypes import DTYPES
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, Problem, WeightFormat, ceil_div
from jitgemm.kernel.spec import (
    KernelSpec,
    slice_tokens,
    slot_tokens,
    smem_bytes,
    stage_bytes,
    stage_weight_bytes,
    wgmma_shapes,
)
from jitgemm.kernel.tactics import (
    DIRECT_LHS_TOKENS,
    engine_stages,
    for_k,
    promote_records,
    split_blocks,
)
from jitgemm.select.devices import DeviceSpec
from jitgemm.select.registers import registers_needed

# ---- what fits -------------------------------------------------------------------------------------------------------

BLOCK_MS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)
MIN_STAGES = 3
"""Two hide nothing, and with two ptxas has tiles of 112 tokens and 192 rows spill."""
MAX_STAGES = 12
NARROW_STAGE_TOKENS = 32
NARROW_STAGE_BYTES = {(4, False): 187_000, (4, True): 160_000, (1, True): 130_000}
"""Most bytes that the stages of a CTA alone on its SM take where three warpgroups or four have tiles of up to
NARROW_STAGE_TOKENS; by warpgroups along k and whether they decode a stage no faster than memory brings it."""
SYSTEM_SMEM = 1024
"""Bytes of shared memory the system takes from an SM for each resident CTA."""


def illegal(spec: KernelSpec, device: DeviceSpec) -> str | None:
    """Why this kernel cannot be built or cannot run on the device; None when it can."""
    why = _misfit(spec, device)
    if why is None and registers_needed(spec) > spec.consumer_registers:
        return f"about {registers_needed(spec)} registers a thread, {spec.consumer_registers} available"
    return why


def _misfit(spec: KernelSpec, device: DeviceSpec) -> str | None:
    """The same, registers apart."""
    if spec.block_m % spec.halves or spec.block_m // spec.halves not in wgmma_shapes(spec.lhs):
        return f"wgmma has no N of {spec.block_m}/{spec.halves} for {spec.lhs}"
    if spec.block_n % STRIP_ROWS or not 1 <= spec.warpgroups <= 4:
        return f"{spec.warpgroups} warpgroups"
    if spec.multicast > 1 and spec.split_k > 1:
        return "a cluster either splits k or shares an operand"
    if spec.multicast_lhs > 1 and spec.multicast_rhs > 1:
        return "a cluster shares one operand"
    if spec.block_m % (8 * spec.multicast_lhs):
        return "multicast shares must be whole swizzle rows"
    if spec.cluster_size > min(8, device.num_sms):
        return f"clusters of more than {min(8, device.num_sms)} do not fit"
    if spec.stages < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit"
    limit = _smem_limit(spec, device)
    if smem_bytes(spec) > limit:
        return f"{smem_bytes(spec)} bytes of shared memory, {limit} available"
    return None


def _smem_limit(spec: KernelSpec, device: DeviceSpec) -> int:
    """Bytes of shared memory that a CTA of this kernel may take."""
    return min(device.smem_per_block, device.smem_per_sm // spec.ctas_per_sm - SYSTEM_SMEM)


def _most_stages(spec: KernelSpec, device: DeviceSpec) -> int:
    """How many stages shared memory holds beside what the kernel needs however many there are."""
    return min(MAX_STAGES, spec.stages + (_smem_limit(spec, device) - smem_bytes(spec)) // stage_bytes(spec))


def _stages(spec: KernelSpec, device: DeviceSpec) -> int:
    """How many stages the kernel gets.

    All that fit, but for narrow tiles: there a call takes up to 9 % longer with too many (docs/notes/decode.md).
    """
    most = _most_stages(spec, device)
    if spec.ctas_per_sm > 1 or spec.block_m > NARROW_STAGE_TOKENS or spec.warpgroups < 3:
        return most
    bring_us = stage_weight_bytes(spec) * device.num_sms / device.hbm_bytes_per_us
    slow = _issue_cycles(spec) / device.clock_mhz >= bring_us
    useful = NARROW_STAGE_BYTES.get((spec.warpgroups_k, slow), math.inf) // stage_bytes(spec)
    return max(MIN_STAGES, min(most, useful))


def legal_kernels(lhs: str, fmt: WeightFormat, device: DeviceSpec, out: str = "bf16") -> tuple[KernelSpec, ...]:
    """Every kernel the selector considers for these formats on this device."""
    return tuple(spec for block_m in BLOCK_MS for spec, _ in _costed_kernels(lhs, fmt, device, out, block_m))


def refused_kernels(lhs: str, fmt: WeightFormat, device: DeviceSpec, out: str = "bf16") -> tuple[KernelSpec, ...]:
    """Every kernel that only the bound on registers keeps out, for `scripts/register_bound.py`."""
    return tuple(spec for block_m in BLOCK_MS for spec in _kernels(lhs, fmt, device, out, block_m, refused=True))


def _kernels(
    lhs: str, fmt: WeightFormat, device: DeviceSpec, out: str, block_m: int, *, refused: bool = False
) -> Iterator[KernelSpec]:
    """The legal kernels with tiles of so many tokens, or those that the bound on registers refuses."""
    # Per-channel kernels read their scales by a run-time type.
    fmt = fmt if fmt.group_size else replace(fmt, scale_type="fp32")
    for shape in dict.fromkeys(_shapes(block_m)):
        spec = KernelSpec(lhs, fmt, stages=MIN_STAGES, out=out, **shape._asdict())
        if _misfit(spec, device) is None and (registers_needed(spec) > spec.consumer_registers) == refused:
            yield replace(spec, stages=_stages(spec, device))


class _Shape(NamedTuple):
    """The fields of a `KernelSpec` that the selector is free to choose, stages apart."""

    block_m: int
    block_n: int
    halves: int = 1
    warpgroups_k: int = 1
    split_k: int = 1
    scatter: bool = False
    multicast_lhs: int = 1
    multicast_rhs: int = 1
    ctas_per_sm: int = 1


NARROW_SPLITS = {
    (1, 1): (1, 2, 3, 4, 5, 6), (2, 1): (1, 2, 3, 4, 6), (3, 1): (1, 2, 4, 5), (4, 1): (1,),
    (1, 2): (1, 2, 3, 4), (2, 2): (1, 2, 3), (1, 4): (1, 2, 3),
}  # fmt: skip
"""CTAs that split k for tiles of 64 tokens or less, by warpgroups along n and k; without what a sweep never chose."""
WIDE_SPLITS = {(1, 2): (1, 2, 3, 5), (2, 1): (2, 3, 4, 5, 6), (3, 1): (2, 4, 5)}
"""The same for 80 to 160. One strip and two warpgroups along k are the tallest tile that k fills."""
FOUR_SPLIT_TOKENS = 32
"""Most tokens for which CTAs split k as well as four warpgroups do: with more, stages become too few."""
PAIRED_SPLITS = {1: (1, 2, 4, 5, 6), 2: (1, 2, 4)}
"""Those of NARROW_SPLITS where two CTAs fit an SM, so that the next kernel can prefetch its weights; by warpgroups.
Clusters of three seem to put two of their own on one SM (docs/notes/selector.md)."""


def _shapes(block_m: int) -> Iterator[_Shape]:
    """What the selector may choose of. Narrow tiles live by filling the GPU, wide ones by sharing operands."""
    narrow = block_m <= 64
    if block_m <= 160:
        for (warpgroups_n, warpgroups_k), splits in (NARROW_SPLITS if narrow else WIDE_SPLITS).items():
            paired = PAIRED_SPLITS.get(warpgroups_n * warpgroups_k, ()) if narrow else ()
            for split_k in splits if warpgroups_k < 4 or block_m <= FOUR_SPLIT_TOKENS else splits[:1]:
                ctas_per_sm = (1, 2) if split_k in paired else (1,)
                for scatter in _ways_to_sum(block_m, warpgroups_k, split_k):
                    for halves, ctas in itertools.product((1,) if narrow else (1, 2), ctas_per_sm):
                        yield _Shape(
                            block_m,
                            64 * warpgroups_n,
                            halves,
                            warpgroups_k=warpgroups_k,
                            split_k=split_k,
                            scatter=scatter,
                            ctas_per_sm=ctas,
                        )
    if 64 < block_m <= 96:
        # Four warpgroups: fewer copies a multiply than two, and more to run while one waits.
        yield _Shape(block_m, 256)
    if block_m >= 48:
        # ptxas does better by two halves of the widest.
        for halves in (1, 2) if block_m <= 192 else (2,):
            for lhs, rhs in ((1, 1), (2, 1), (1, 2)):
                yield _Shape(block_m, 128, halves, multicast_lhs=lhs, multicast_rhs=rhs)
            yield _Shape(block_m, 192, halves)


def _ways_to_sum(block_m: int, warpgroups_k: int, split_k: int) -> tuple[bool, ...]:
    """Whether splits scatter their sums; for few tokens one CTA may sum as well, many it would keep all others from."""
    if warpgroups_k * split_k == 1 or block_m <= 8:
        return (False,)
    return (False, True) if split_k <= 2 or block_m <= 16 else (True,)


# ---- the model -------------------------------------------------------------------------------------------------------
#
# The constants were fitted to the 14,733 timings of scripts/data on an H200, 2026-11-23 (docs/notes/selector.md):
# they absorb what the model leaves out, so that one of them alone need not be what its name would cost by itself.

LAUNCH_US = 0.25
"""From the end of one kernel to the first wgmma of the next, when the next could prefetch its weights before."""
NO_PREFETCH_US = 0.2865
"""Added where a CTA leaves no room on its SM for the next kernel's: HBM latency and the first stages are not hidden."""
COPY_US = 0.1472
"""Added where the copy engine brings a tile's first activations, not the threads that multiply them."""
SUM_US = 0.173
"""Sum over the warpgroups along k of a CTA alone, per tile: hand-over."""
REDUCE_US = 0.008173
"""Sum over splits of k, of CTAs or of warpgroups, per token that a warpgroup reads of others: stores, reads."""
SCATTER_US = 0.2154
"""Added for each tile but the first where splits scatter their sums: all of them wait for one another."""
STORE_US = 0.395
"""Epilogue of a tile, during which nothing multiplies: latencies."""
TOKEN_US = 1e-05
"""The same, per token of a split's share: conversion, transposition."""
CLUSTER_US = {(1, "narrow"): 0.1996, (1, "wide"): 0.4882, (2, "narrow"): 0.02366, (2, "wide"): 0.01}
"""Launch of a cluster of two that splits k and its barriers, by CTAs of an SM and tile; grows with the root of the
further CTAs."""
SEND_US = 0.01072
"""Sums that a CTA of such a cluster sends to the others, per token of the tile and strip of rows, if all were sent; its
own share is not (docs/notes/sums.md)."""
MULTICAST_US = 2.491
"""Launch of a cluster that shares an operand, its barriers, and the stages that are handed back across it."""
RECORD_CYCLES = 134.5
"""Barrier wait, shared loads, wgmma latency and loop of one record, as one warpgroup sees them one after another."""
DECODE_CYCLES = {
    ("e4m3", "any"): 208.3, ("s8", "any"): 166.0, ("e4m3", "fast"): 133.8, ("s8", "fast"): 149.2,
    ("e4m3", "zero"): 212.6, ("s8", "zero"): 243.5,
}  # fmt: skip
"""Issue cycles of a scheduler to decode one record (16 fragment registers a thread), by lhs type and codes: of any
activations, of this type's order, with zero points."""
PROMOTE_CYCLES = {"e4m3": 1.208, "s8": 2.021}
"""Issue cycles of a scheduler per accumulator register promoted: FFMA, or I2F at half rate and FFMA."""
FETCH_CYCLES = 1437.9
"""From asking for a stage to having it, while all but the one in use are asked for; few leave the consumers waiting."""
HALVES_CYCLES = 122.4
"""Added where tokens are multiplied in halves and a record's one group is promoted: nothing runs beside that."""
ISSUE_CYCLES = 28.16
"""Issue cycles of a scheduler per record for everything else."""
L2_BYTES_PER_CYCLE = 129.1
"""Bytes an SM draws from the L2 in a cycle when all draw; what some leave, the others have (docs/notes/main-loop.md).
An operand that CTAs share counts for each of them: multicast kernels are no faster for it."""
STREAM_FACTOR = {1: 1.082, 2: 1.07}
"""Times as long as at the HBM's rate that a call's bytes take, by warpgroups along k; four draw as fast as it gives
(docs/notes/decode.md)."""
OVERLAP = 2.823
"""Exponent p with which the parts that run side by side add up, (sum of part^p)^(1/p): the longest counts, the next a
little."""
CLUSTER_SHARE = {1: 1.0, 2: 1.0, 3: 0.89, 4: 0.91, 5: 0.84, 6: 0.78}
"""Share of the SMs that clusters of a size can fill, one CTA an SM: a cluster lies within a GPC, whose SMs it need not
divide. 39 clusters of 3, 30 of 4, 22 of 5 and 17 of 6 on an H200, says `cuOccupancyMaxActiveClusters`."""


@dataclass(frozen=True)
class Candidate:
    """A kernel and what the model says of it.

    Attributes:
        kernel: the kernel.
        predicted_us: predicted microseconds of one call in a chain of calls.
        terms: the prediction's parts in microseconds: memory, tensor, issue, latency, fetch and l2 run side by side,
            fixed is added.
        waves: rounds of tiles, the last one perhaps not full.
        ctas: CTAs launched.
    """

    kernel: KernelSpec
    predicted_us: float
    terms: dict[str, float]
    waves: int
    ctas: int


def _cluster_tile(spec: KernelSpec) -> tuple[int, int]:
    """Tokens and rows of n that a cluster computes at once."""
    return spec.block_m * spec.multicast_rhs, spec.block_n * spec.multicast_lhs


def _clusters_that_fit(spec: KernelSpec, num_sms: int) -> int:
    # A second CTA on an SM belongs to the next kernel, except where clusters would leave SMs empty otherwise.
    share = 1.0 if spec.ctas_per_sm > 1 else CLUSTER_SHARE[spec.cluster_size]
    return max(1, int(num_sms * share) // spec.cluster_size)


def grid_clusters(spec: KernelSpec, m: int, n: int, num_sms: int) -> tuple[int, int]:
    """(clusters with work, clusters launched): about one CTA an SM, the rest of the work in persistent strides."""
    tokens, rows = _cluster_tile(spec)
    units = ceil_div(m, tokens) * ceil_div(n, rows)
    return units, min(units, _clusters_that_fit(spec, num_sms))


class _Costs(NamedTuple):
    """What a prediction needs of a kernel on a device, problem apart. Times in microseconds."""

    tensor: float  # of a record on every warpgroup of the CTA; the next three alike
    issue: float
    latency: float
    fetch: float
    l2: float  # of the operands of one record's k, where all SMs draw
    stream: float  # of a byte from device memory
    launch: float
    tile: float  # epilogue, and the sum of the splits
    later_tile: float  # added for each tile but the first
    cluster_tile: tuple[int, int]
    clusters: int  # that fit the device
    engine_stages: float  # as of tactics.py


def _parts(spec: KernelSpec) -> int:
    """Multiplies of a step of k: offsets take their own, by ones."""
    return 2 if spec.format.offset else 1


def _groups(spec: KernelSpec) -> int:
    """Groups of a record that are promoted each on its own."""
    return max(1, spec.format.scale_rows)


def _decode_cycles(spec: KernelSpec) -> float:
    fmt = spec.format
    return DECODE_CYCLES[spec.lhs, "zero" if fmt.zero_point else "any" if fmt.codes == "any" else "fast"]


def _promote_cycles(spec: KernelSpec) -> float:
    """Of one record on one warpgroup."""
    every = promote_records(spec)
    times = _parts(spec) * _groups(spec) / every if every else 0.0
    return times * spec.block_m / 2 * PROMOTE_CYCLES[spec.lhs]


def _issue_cycles(spec: KernelSpec) -> float:
    """Issue cycles of a scheduler for one record on every warpgroup of the CTA, which share it."""
    return spec.warpgroups * (_decode_cycles(spec) + _promote_cycles(spec) + ISSUE_CYCLES)


def _costs(spec: KernelSpec, device: DeviceSpec) -> _Costs:
    us_per_cycle = 1.0 / device.clock_mhz
    # One record of 64 x 128 on one warpgroup, in cycles.
    ops_per_cycle = device.tensor_ops_per_us * us_per_cycle / device.num_sms
    wgmma = _parts(spec) * 2 * STRIP_ROWS * BLOCK_K * spec.block_m / ops_per_cycle
    promote = _promote_cycles(spec)
    serial = max(wgmma, _decode_cycles(spec)) + RECORD_CYCLES
    # Halves are promoted beside each other's multiplies where a record has several groups, else after them.
    if _groups(spec) > 1:
        serial += promote / spec.halves
    elif promote:
        serial += promote + HALVES_CYCLES * (spec.halves - 1)
    operand_bytes = (spec.block_m + spec.block_n / 2) * BLOCK_K

    share = slice_tokens(spec)
    width = "wide" if spec.block_m > DIRECT_LHS_TOKENS else "narrow"
    launch = LAUNCH_US + CLUSTER_US[spec.ctas_per_sm, width] * (spec.split_k - 1) ** 0.5
    launch += MULTICAST_US if spec.multicast > 1 else 0.0
    if spec.ctas_per_sm == 1 or 2 * (smem_bytes(spec) + SYSTEM_SMEM) > device.smem_per_sm:
        launch += NO_PREFETCH_US
    reduce_us = REDUCE_US * slot_tokens(spec)
    if spec.split_k > 1:
        reduce_us += SEND_US * spec.block_m * spec.warpgroups_n * (1 - 1 / spec.split_k)
    elif spec.warpgroups_k > 1:
        reduce_us += SUM_US
    return _Costs(
        # The warpgroups of an SM share its tensor cores and its schedulers.
        tensor=spec.warpgroups * wgmma * us_per_cycle,
        issue=_issue_cycles(spec) * us_per_cycle,
        latency=serial * us_per_cycle,
        # Of all that fit; where `_stages` grants fewer, they wait no longer.
        fetch=FETCH_CYCLES / (_most_stages(spec, device) - 1) * us_per_cycle,
        l2=operand_bytes / L2_BYTES_PER_CYCLE * us_per_cycle,
        stream=STREAM_FACTOR.get(spec.warpgroups_k, 1.0) / device.hbm_bytes_per_us,
        launch=launch,
        tile=STORE_US + TOKEN_US * share + reduce_us,
        later_tile=SCATTER_US if spec.scatter else 0.0,
        cluster_tile=_cluster_tile(spec),
        clusters=_clusters_that_fit(spec, device.num_sms),
        engine_stages=engine_stages(spec),
    )


class _Times(NamedTuple):
    """A prediction's parts in microseconds; all but `fixed` run side by side."""

    memory: float
    tensor: float
    issue: float
    latency: float
    fetch: float
    l2: float
    fixed: float

    @property
    def total(self) -> float:
        return self.fixed + sum(term**OVERLAP for term in self[:-1]) ** (1 / OVERLAP)


def _times(spec: KernelSpec, costs: _Costs, problem: Problem, device: DeviceSpec) -> tuple[_Times, int, int]:
    """The times, the rounds of tiles and the CTAs."""
    m, n, k = problem.m, problem.n, problem.k
    tokens, rows = costs.cluster_tile
    units = ceil_div(m, tokens) * ceil_div(n, rows)
    clusters = min(units, costs.clusters)
    blocks = ceil_div(k, BLOCK_K)
    waves = ceil_div(units, clusters)
    # Of one warpgroup, one after another.
    records_of_tile = ceil_div(split_blocks(spec, blocks), spec.warpgroups_k)
    records = waves * records_of_tile
    ctas = clusters * spec.cluster_size
    weight_bytes = ceil_div(n, STRIP_ROWS) * blocks * problem.format.record_bytes
    # Clusters beyond those that fit one an SM share their SMs.
    shared = 2 if ctas > device.num_sms * CLUSTER_SHARE[spec.cluster_size] else 1
    copy = COPY_US if records_of_tile <= costs.engine_stages else 0.0
    memory = costs.stream * (weight_bytes + m * k + DTYPES[spec.out].bytes * m * n)
    times = _Times(
        memory,
        shared * records * costs.tensor,
        shared * records * costs.issue,
        records * costs.latency,
        records * costs.fetch,
        units * spec.multicast * blocks / device.num_sms * costs.l2,
        costs.launch + copy + waves * costs.tile + (waves - 1) * costs.later_tile,
    )
    return times, waves, ctas


def _candidate(spec: KernelSpec, costs: _Costs, problem: Problem, device: DeviceSpec) -> Candidate:
    times, waves, ctas = _times(spec, costs, problem, device)
    return Candidate(spec, times.total, times._asdict(), waves, ctas)


def predict(spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Candidate:
    """Predicted time of `problem` on `device` with this kernel."""
    return _candidate(spec, _costs(spec, device), problem, device)


@lru_cache(maxsize=4096)
def _costed_kernels(
    lhs: str, fmt: WeightFormat, device: DeviceSpec, out: str, block_m: int
) -> tuple[tuple[KernelSpec, _Costs], ...]:
    """The legal kernels with tiles of so many tokens, with their costs, which no problem changes."""
    return tuple((spec, _costs(spec, device)) for spec in _kernels(lhs, fmt, device, out, block_m))


# ---- the choice ------------------------------------------------------------------------------------------------------


def bands(max_m: int) -> list[tuple[int, int]]:
    """The runs of m, first and last included, within which one layer uses one kernel.

    Steps of 8, 16, 32, 128, 1024, then doubling.
    """
    if max_m < 1:
        raise ValueError(f"max_m: expected at least 1, got {max_m}")
    out = []
    first = 1
    while first <= max_m:
        last = band_end(first)
        out.append((first, last))
        first = last + 1
    return out


def band_end(m: int) -> int:
    """The largest m that shares a kernel with this one; the selector sees this m only."""
    for limit, step in ((64, 8), (256, 16), (512, 32), (2048, 128), (16384, 1024)):
        if m <= limit:
            return ceil_div(m, step) * step
    return 1 << (m - 1).bit_length()


def candidates(problem: Problem, device: DeviceSpec) -> list[Candidate]:
    """Every legal kernel for the problem with its prediction, best first; ties go to the smaller tile."""
    problem = replace(problem, m=band_end(problem.m))
    found = [_candidate(spec, costs, problem, device) for spec, costs in _considered(problem, device)]
    found.sort(key=lambda c: _rank(c.predicted_us, c.kernel))
    return [replace(candidate, kernel=for_k(candidate.kernel, problem.k)) for candidate in found]


def _considered(problem: Problem, device: DeviceSpec) -> Iterator[tuple[KernelSpec, _Costs]]:
    order = _invariant_order(replace(problem, m=1), device) if problem.batch_invariant else None
    for block_m in BLOCK_MS:
        if block_m >= 2 * max(problem.m, 8):
            break  # half of the tile is padding: a lower one does
        for spec, costs in _costed_kernels(problem.lhs, problem.format, device, problem.out, block_m):
            if order in (None, _order(spec)):
                yield spec, costs


def _rank(us: float, spec: KernelSpec) -> tuple[float, int, int, str]:
    return us, spec.block_m * spec.block_n, spec.halves, spec.label


ORDER_MS = (1, 16, 64, 256, 1024, 4096)
"""Values of m over which orders of summation are compared."""


def _order(spec: KernelSpec) -> tuple[int, int]:
    """(split_k, warpgroups_k), which decide in which order k is summed."""
    return spec.split_k, spec.warpgroups_k


@lru_cache(maxsize=512)
def _invariant_order(layer: Problem, device: DeviceSpec) -> tuple[int, int]:
    """(split_k, warpgroups_k) that decide in which order k is summed: the one that costs a layer least over all m.

    Tiles, stages and multicast change no sum; promotion follows from these two.
    """
    losses: dict[tuple[int, int], list[float]] = {}
    for m in ORDER_MS:
        best: dict[tuple[int, int], float] = {}
        problem = replace(layer, m=m, batch_invariant=False)
        for spec, costs in _considered(problem, device):
            order = _order(spec)
            us = _times(spec, costs, problem, device)[0].total
            best[order] = min(us, best.get(order, math.inf))
        least = min(best.values())
        for order, us in best.items():
            losses.setdefault(order, []).append(math.log(us / least))
    # Some orders are those of tall tiles alone.
    everywhere = (order for order, found in losses.items() if len(found) == len(ORDER_MS))
    return min(everywhere, key=lambda order: (sum(losses[order]), order))


@lru_cache(maxsize=4096)
def _choose(problem: Problem, device: DeviceSpec) -> KernelSpec:
    best: tuple[float, KernelSpec] | None = None
    for spec, costs in _considered(problem, device):
        us = _times(spec, costs, problem, device)[0].total
        if best is None or us < best[0] or (us == best[0] and _rank(us, spec) < _rank(*best)):
            best = us, spec
    if best is None:
        raise ValueError(f"device: no kernel fits {device}")
    return for_k(best[1], problem.k)


def choose(problem: Problem, device: DeviceSpec) -> KernelSpec:
    """The kernel for a problem: a pure function of the problem's band over m and the device's figures."""
    return _choose(replace(problem, m=band_end(problem.m)), device)


def kernels_for(
    n: int,
    k: int,
    lhs: str,
    format: WeightFormat,
    device: DeviceSpec,
    max_m: int,
    *,
    out: str = "bf16",
    batch_invariant: bool = False,
) -> list[KernelSpec]:
    """Every kernel that `choose` can return for this layer with m up to `max_m`, in order of m, each once."""
    layer = Problem(1, n, k, lhs, format, out, batch_invariant)
    return list(dict.fromkeys(_choose(replace(layer, m=last), device) for _, last in bands(max_m)))
