"""How long a kernel takes for a problem, predicted from a device's figures. All fitted constants stand here.

A call costs what it takes to start, the sum and epilogue of its last tiles, and between the two whatever is slowest of
memory, of the stages' latency and of the consumers' work. These overlap: they add up in a p-norm, close to the longest.

Eleven constants were fitted to timings of an H200 and an H100, dense and grouped, of 4 and 8 bits (`scripts/sweep.py
fit`, docs/notes/selector.md), all at once: a constant absorbs what the model leaves out, so none is a
measurement of the hardware. Constants in microseconds do not follow a device's clock, those in cycles do.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from itertools import chain
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from jitgemm.dtypes import DTYPES
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, Problem, ceil_div
from jitgemm.kernel.spec import KernelSpec, stage_weight_bytes
from jitgemm.kernel.tactics import prefetch_stages, promote_records, split_blocks, token_widths, units_in_flight
from jitgemm.select.devices import DeviceSpec
from jitgemm.select.legal import NARROW_TOKENS, cluster_tiles_along_n, launched_clusters

TILE_US = 1.23
"""Once a kernel, and for every round of tiles: its start, the first bytes' way, a tile's epilogue. Between narrow tiles
of grouped kernels of 4-bit weights, which have many rounds, the part that their tokens and `EMPTY_TOKENS` are of
`NARROW_TOKENS`: dense ones would take tiles of 8 x 64 at m = 1 where 8 x 256 are up to 1.2 times as fast (28672 x 4096,
zero points and MXFP4). All of it if CTAs add up a tile, as their barriers take as long for few tokens as for many."""
EMPTY_TOKENS = 12
"""What a tile's first record and its sum over k take whatever the tokens, in tokens. Not fitted: 8 to 16 are as good on
an H200. With none, experts' choices lose 0.7 % more there, and MXFP4's tiles of 8 x 64 over four warpgroups along k are
predicted 15 % too fast next to wider ones."""
HAND_US = 0.0091
"""For every token and strip of rows whose sums a CTA's warpgroups along k add up, through shared memory."""
SEND_US = 0.0135
"""The same for sums that the CTAs of a cluster send one another."""
ALONE_US = 0.98
"""Where a CTA is alone on its SM: the next kernel's CTA starts when it ends, and asks for its weights only then. The
square root of the part of the next kernel's CTAs that find no SM of their own counts; nothing where all do."""
RECORD_CYCLES = 140.0
"""Latency of a record that no multiply hides: barrier, loads from shared memory, loop. In halves, where a record's one
group is promoted, twice, as nothing overlaps the second half's promotion, or half as much again where e4m3's codes
decode slowly; if tokens are wgmma's rows, three times, as the second half's multiply comes after the first's."""
DECODE_CYCLES = 150.0
"""Issue cycles of a scheduler for a record on one warpgroup, apart from promotion: loads, decoding, barriers, loop."""
DECODE_TIMES = {"any": 1.5, "signed": 1.0, "own": 1.0, "bytes": 1.0, "table": 1.5, "terms": 2.6, "near": 2.0}
"""How often that counts, by `Decoder.cost`. Not fitted: codes for any activations take about twice the instructions of
codes for one type, besides what is the same for both; e4m3's signed ones multiply, and leave the ALUs to the rest. Of
MXFP4's by tables, NVFP4's two terms and two levels' factors, the least regret on an H100 and an H200, and about the
least error (docs/notes/selector.md)."""
PROMOTE_CYCLES = {"e4m3": 2.33, "s8": 3.06, "f16": 1.31, "parts": 2.7}
"""Issue cycles of a scheduler for every sum promoted, by lhs type: one multiply-add, and what its operands wait for;
int8's sums are converted first. Those by parts are not, and have a fit of their own. Not fitted for f16 sums: one
multiply-add for two of them reads 128 registers' banks where two read 228. Once more by e4m3's where the scale is a
product, of a row's and a token's."""
F16_WAITS = 1.22
"""Times as many for f16 sums where no other unit multiplies meanwhile (include/jitgemm/gemm/loop.cuh): 28672 x 4096,
m = 512, of groups of 128, 64 and 32 took 1.21, 1.19 and 1.19 by tiles of 176 tokens, for those of 128. Not fitted."""
FLUSH_CYCLES = 0.33
"""The same for f16 sums' way to fp32, of a record: four instructions for two sums, every eighth record. Not fitted."""
FETCH_CYCLES = 2120.0
"""From asking for a stage to having it; a pipeline of s stages waits for one part in s - 1 of it at every record."""
PAIRED_STREAM = 1.48
"""Times as long as at the HBM's rate that bytes take where two CTAs share an SM (docs/notes/decode.md)."""
PREFETCH_US = 1.86
"""Most microseconds of memory's time that a kernel's prefetch saves it: the end of the kernel before is no longer."""
OVERLAP = 4
"""Exponent p of the norm (sum of part^p)^(1/p). Not fitted: 3.6 to 4.6 are as good."""


class Costs(NamedTuple):
    """What a prediction needs of a kernel on a device, whatever the problem. Times in microseconds."""

    tensor: float  # of one record on every warpgroup of the CTA, as the next two
    issue: float
    latency: float
    any_width: tuple[float, float]  # parts of issue and latency that do not depend on a multiply's width
    fetch: float
    stream: float  # times the HBM's
    tile: float  # sum and epilogue of one tile
    between: float  # the same between tiles
    prefetch_stages: int
    stage_weights: int  # bytes of a stage's records
    widths: tuple[int, ...]  # tokens that a tile can multiply
    resident: int  # clusters that fit on the device
    sms_of_clusters: float  # SMs that they fill, one CTA an SM


def costs(spec: KernelSpec, device: DeviceSpec) -> Costs:
    """The costs of a kernel, apart from any problem."""
    fmt, cycle = spec.format, 1.0 / device.clock_mhz
    multiplies = 2 if fmt.offset else 1  # offsets take a multiply by ones
    groups = max(1, fmt.scale_rows)
    ops_per_cycle = device.tensor_ops_per_us * cycle / device.num_sms
    multiply = multiplies * fmt.terms * 2 * STRIP_ROWS * BLOCK_K * spec.wgmma_n / ops_per_cycle
    decode = DECODE_CYCLES * DECODE_TIMES[fmt.decoder(spec.lhs).cost]
    every = promote_records(spec)
    products = spec.lhs_group and fmt.group_size and not spec.tokens_as_m
    f16 = spec.sums == "f16"
    cycles = PROMOTE_CYCLES[spec.lhs if spec.sums == "f32" else spec.sums] + (
        PROMOTE_CYCLES["e4m3"] if products else 0.0
    )
    cycles *= F16_WAITS if f16 and units_in_flight(spec) == 1 else 1.0
    promote = multiplies * groups / every * spec.wgmma_n / 2 * cycles if every else 0.0
    promote += spec.wgmma_n / 2 * FLUSH_CYCLES if f16 else 0.0
    serial = max(multiply, decode) + RECORD_CYCLES
    # If a record has several groups, one half's promotion overlaps the other's multiplies. So it does with one group
    # whose codes take longer to decode than to multiply. Else it follows them.
    slow = spec.lhs == "e4m3" and spec.sums == "f32" and fmt.decodes_slowly and fmt.scale_rows and not fmt.zero_point
    if groups > 1:
        serial += promote / spec.token_halves
    elif slow:
        serial += promote / spec.token_halves + RECORD_CYCLES / 2 * (spec.token_halves - 1)
    elif promote:
        serial += promote + RECORD_CYCLES * (spec.token_halves if spec.tokens_as_m else 1) * (spec.token_halves - 1)
    sums = spec.block_m * spec.warpgroups_n
    summed = HAND_US * sums * (1 - 1 / spec.warpgroups_k) + SEND_US * sums * (1 - 1 / spec.split_k)
    short = spec.experts > 0 and not spec.shared_weights and spec.split_k == 1
    return Costs(
        # The warpgroups of an SM share its tensor cores and its schedulers.
        tensor=spec.warpgroups * multiply * cycle,
        issue=spec.warpgroups * (decode + promote) * cycle,
        latency=serial * cycle,
        any_width=(spec.warpgroups * decode * cycle, (decode + RECORD_CYCLES) * cycle),
        fetch=FETCH_CYCLES / (spec.stages - 1) * cycle,
        stream=PAIRED_STREAM if spec.ctas_per_sm > 1 else 1.0,
        tile=TILE_US + summed,
        between=TILE_US * (min(1, (spec.block_m + EMPTY_TOKENS) / NARROW_TOKENS) if short else 1) + summed,
        prefetch_stages=prefetch_stages(spec),
        stage_weights=stage_weight_bytes(spec),
        widths=token_widths(spec),
        resident=device.resident_clusters(spec.cluster_size, spec.ctas_per_sm),
        sms_of_clusters=device.resident_clusters(spec.cluster_size) * spec.cluster_size,
    )


class Times(NamedTuple):
    """A prediction's parts in microseconds, as in `Candidate.terms`; `ranked.TERMS` has them in words."""

    memory: float
    fetch: float
    tensor: float
    issue: float
    latency: float
    epilogue: float
    fixed: float

    @property
    def total(self) -> float:
        memory, fetch, tensor, issue, latency, epilogue, fixed = self
        consumers = _norm(tensor, issue, latency) + epilogue
        return fixed + _norm(memory, fetch, consumers)


def _norm(a: float, b: float, c: float) -> float:
    return (a**OVERLAP + b**OVERLAP + c**OVERLAP) ** (1 / OVERLAP)


def times(spec: KernelSpec, of: Costs, problem: Problem, device: DeviceSpec) -> tuple[Times, float, int]:
    """The times, the rounds of tiles and the CTAs. Of a grouped problem they are means over its routings."""
    m, n, k = problem.m, problem.n, problem.lhs_columns
    routed = problem.experts, m, problem.rows_vary
    tiles = token_tiles(*routed, spec.block_m)
    along_n = cluster_tiles_along_n(spec, n)
    clusters = launched_clusters(spec, max(tiles) * along_n, device.num_sms, of.resident)
    ctas = clusters * spec.cluster_size
    rounds = sum(ceil_div(along_m * along_n, clusters) for along_m in tiles) / len(tiles)
    blocks = ceil_div(k, BLOCK_K)
    stages = ceil_div(split_blocks(spec, blocks), spec.warpgroups_k)  # of a tile, and records of one warpgroup
    records = rounds * stages
    # CTAs beyond one per SM share their SMs.
    shared = 2 if ctas > of.sms_of_clusters else 1
    # Each weight once: an expert's tiles follow one another, and find it in the L2. But where experts are expected to
    # have no more rows than a tile, the L2 is told not to keep it (Scheduler::weight_policy), and each tile reads it
    # again; 4-bit weights are faster to bring than to multiply, and are counted once.
    reads = weights_read(*routed)
    if problem.experts and spec.shared_weights and m <= problem.experts * spec.block_m:
        reads = sum(tiles) / len(tiles)
    all_bytes = reads * ceil_div(n, STRIP_ROWS) * blocks * problem.format.record_bytes
    all_bytes += m * k + DTYPES[spec.out].bytes * m * n
    memory = all_bytes / device.hbm_bytes_per_us
    # SMs that a round leaves without a tile bring the next dense kernel's weights, and nothing for a grouped one. No
    # sweep has narrow tiles of 8 bits for experts: this, and short epilogues, are counted for 4 bits alone.
    room = device.num_sms // spec.cluster_size
    if problem.experts and not spec.shared_weights:
        memory *= max(1.0, rounds * room * len(tiles) / (sum(tiles) * along_n))
    # What CTAs ask for before they wait for the kernel before comes while that one ends. Where tiles are odd in number,
    # one CTA of a cluster that shares activations has none.
    asking = min(ctas, max(tiles) * ceil_div(n, spec.block_n) * spec.split_k)
    prefetched = min(of.prefetch_stages, stages) * of.stage_weights * asking / device.hbm_bytes_per_us
    # CTAs of the next kernel that find no SM of their own while this one's are alone on theirs. Its clusters have no
    # use of an SM that is left over of whole clusters.
    crowded = max(0.0, 2 - room / clusters) if spec.ctas_per_sm == 1 else 0.0
    alone = ALONE_US * math.sqrt(crowded)
    fill = filled(*routed, of.widths)
    issue, latency = (part + fill * (all_of_it - part) for part, all_of_it in zip(of.any_width, (of.issue, of.latency)))
    parts = Times(
        memory=of.stream * max(0.0, memory - min(prefetched, PREFETCH_US)),
        fetch=records * of.fetch,
        tensor=shared * records * fill * of.tensor,
        issue=shared * records * issue,
        latency=records * latency,
        epilogue=(rounds - 1) * of.between,
        fixed=alone + of.tile,
    )
    return parts, rounds, ctas


# ---- routings --------------------------------------------------------------------------------------------------------
#
# How many rows the experts of a grouped GEMM get, which only the device knows: a few routings, uniform over the
# experts, drawn by seed. The same routings in every process and on every machine. Where rows vary, as a rank's do,
# their number does by its square root: a round of tiles that a mean fills is too full in half of the calls. More than
# `DRAWN_ROWS` an expert vary by less than one round.

ROUTINGS = 8
_SIGMAS = tuple(NormalDist().inv_cdf((i + 0.5) / ROUTINGS) for i in range(ROUTINGS))
DRAWN_ROWS = 16
"""Up to so many rows an expert, the rows are drawn one by one; above, an expert's rows from a normal distribution."""


@lru_cache(maxsize=1024)
def routings(experts: int, rows: int, vary: bool = False) -> tuple[tuple[int, ...], ...]:
    """Rows of every expert that has some, in each routing. Without experts all rows belong to one weight."""
    if experts <= 1:
        return ((rows,),)
    spread = vary * math.sqrt(rows)
    totals = [max(1, round(rows + spread * sigma)) for sigma in _SIGMAS]
    return tuple(_routing(experts, total, Random(seed)) for seed, total in enumerate(totals))


def _routing(experts: int, rows: int, random: Random) -> tuple[int, ...]:
    counts = [0] * experts
    if rows <= DRAWN_ROWS * experts:
        for _ in range(rows):
            counts[int(random.random() * experts)] += 1
        return tuple(filter(None, counts))
    left = rows
    for expert in range(experts - 1):
        # What a multinomial draw leaves for this expert of the rows that are left, by Box and Muller.
        part = 1 / (experts - expert)
        normal = math.sqrt(-2 * math.log(1 - random.random())) * math.cos(2 * math.pi * random.random())
        count = round(left * part + normal * math.sqrt(left * part * (1 - part)))
        counts[expert] = max(0, min(left, count))
        left -= counts[expert]
    counts[-1] = left
    return tuple(filter(None, counts))


@lru_cache(maxsize=4096)
def token_tiles(experts: int, rows: int, vary: bool, block_m: int) -> tuple[int, ...]:
    """Tiles of `block_m` rows in each routing; a tile holds rows of one expert."""
    return tuple(sum(ceil_div(count, block_m) for count in routing) for routing in routings(experts, rows, vary))


@lru_cache(maxsize=4096)
def filled(experts: int, rows: int, vary: bool, widths: tuple[int, ...]) -> float:
    """Part of the full width, the last, that an average tile multiplies, if it takes the narrowest that it fits."""
    if len(widths) == 1:
        return 1.0
    full, multiplied, tiles = widths[-1], 0, 0
    for count, often in Counter(chain.from_iterable(routings(experts, rows, vary))).items():
        full_waves, left = divmod(count, full)
        multiplied += often * (full_waves * full + (next(width for width in widths if left <= width) if left else 0))
        tiles += often * (full_waves + (left > 0))
    return multiplied / (tiles * full)


@lru_cache(maxsize=1024)
def weights_read(experts: int, rows: int, vary: bool = False) -> float:
    """Experts that have rows, on average: weights that a call reads."""
    drawn = routings(experts, rows, vary)
    return sum(map(len, drawn)) / len(drawn)


@lru_cache(maxsize=1024)
def most_rows(experts: int, rows: int, vary: bool = False) -> int:
    """Most rows that an expert has in any of the routings."""
    return max(map(max, routings(experts, rows, vary)))
