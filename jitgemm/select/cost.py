"""How long a kernel takes for a problem, predicted from a device's figures. All fitted constants stand here.

A call costs what it takes to start, the sum and epilogue of its last tiles, and between the two whatever is slowest of
memory, of the stages' latency and of the consumers' work. These overlap: they add up in a p-norm, close to the longest.

The constants were fitted to timings of an H200 and an H100 (`scripts/sweep.py fit`, docs/notes/selector.md), all at
once: a constant absorbs what the model leaves out beside it, so none is a measurement of the hardware unless it says
so. Constants in microseconds do not follow a device's clock, those in cycles do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple

from jitgemm.dtypes import DTYPES
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, Problem, ceil_div
from jitgemm.kernel.spec import KernelSpec, slice_tokens, stage_weight_bytes
from jitgemm.kernel.tactics import engine_stages, token_widths, prefetch_stages, promote_records, split_blocks
from jitgemm.select.devices import DeviceSpec
from jitgemm.select.legal import launched_clusters, units_along_n

TILE_US = 0.979
"""Start of a kernel and epilogue of a tile."""
TOKEN_US = 0.004213
"""Added for every token whose results a warpgroup stores."""
HAND_US = 0.007782
"""Added for every token and strip of rows whose sums a CTA's warpgroups along k hand to one another."""
SUM_US = 0.0238
"""Added where they sum up on their own, with no other CTA."""
SEND_US = 0.01224
"""Added for every token and strip of rows whose sums a CTA sends to the others that split k."""
ALONE_US = 1.116
"""Added where a CTA is alone on its SM: the next kernel's starts when it ends, and asks for its weights only then. Less
where SMs are left for some of the next kernel's, nothing where they are for all."""
ALONE_LEAST = 0.324
"""Part of it that is left where all but one of the next kernel's find an SM of their own."""
COPY_US = 0.1855
"""Added where the copy engine brings the first activations, not the consumers."""
MULTICAST_US = 0.7003
"""Added for a cluster that shares an operand: its start, and stages that are handed back across CTAs."""
TABLE_US = 1.38
"""Added where the CTAs build a table of the experts' tiles first."""
RECORD_CYCLES = 124.1
"""Latency of a record beside its multiply and promotion: barrier, loads from shared memory, loop."""
HALVES_CYCLES = 127.1
"""Added to it in halves where a record's one group is promoted: nothing runs beside that. Twice where tokens are
wgmma's rows, whose halves run one after the other."""
DECODE_CYCLES = {"any": 229.7, "signed": 170.0, "own": 158.7, "bytes": 160.0, "table": 190.0}
"""Issue cycles of a scheduler for a record on one warpgroup, by `Decoder.cost`: codes for any activations, the same for
e4m3 where they have no zero points, codes for this type's activations alone, and of 8 bits. The last is fitted to
scripts/data/sweep_w8_h200.json, and stands for what else they take longer for: nothing decodes them. Codes by tables
are not fitted: they have some 20 instructions a record more than signed ones."""
PROMOTE_CYCLES = {"e4m3": 1.45, "s8": 2.633}
"""Issue cycles of a scheduler for every accumulator register promoted, by lhs type."""
SCALE_CYCLES = 3.0
"""Added to it where the scale is a product, of a row's and a token's; fitted to scripts/data/sweep_w8_h200.json."""
FETCH_CYCLES = 1695.0
"""From asking for a stage to having it; a pipeline of s stages waits for one part in s - 1 of it at every record."""
PAIRED_STREAM = 1.549
"""Times as long as at the HBM's rate that bytes take where two CTAs share an SM (docs/notes/decode.md)."""
PAIRED_ISSUE = 1.135
"""Times as many issue cycles where they do: the next kernel's take some."""
PAIRED_TOKENS, PAIRED_TALL_US = 32, 1.5
"""Added, the latter, where two CTAs are to share an SM in dense tiles of more tokens than the former. Not fitted: among
GEMMs alone they are faster, behind quantisers slower (docs/notes/selector.md, "Behind a quantiser")."""
PREFETCH_US = 1.056
"""Most microseconds of memory's time that a kernel's prefetch saves it: the end of the kernel before is no longer."""
L2_BYTES_PER_CYCLE = 39.0
"""Bytes that an SM draws from the L2 in a cycle while all SMs draw: `scripts/probe.py copies` measures 38.7 to 39.9."""
DRAW_BYTES_PER_CYCLE = 41.0
"""Bytes of weights that an SM draws from the HBM in a cycle at most, however few SMs draw; fitted to
scripts/data/sweep_w8_h200.json. 4-bit weights are seldom held up by it."""
REREAD = 0.5
"""Part of an expert's 8-bit weight that its tiles but the first bring from the HBM again, where experts are expected to
have no more rows than a tile: the L2 is told not to keep it. Fitted to scripts/data/sweep_moe_w8_h200.json; 4-bit
weights are faster to bring than to multiply."""
GROUPED_EPILOGUE = 0.735
"""Part of an epilogue's time that counts for every tile but a CTA's last, of grouped GEMMs."""
L2_SHARE = 0.01973
"""Part of the time that operands take from the L2 which nothing hides. Multicast saves by it."""
OVERLAP = 4.548
"""Exponent p of the norm (sum of part^p)^(1/p)."""


@dataclass(frozen=True)
class Candidate:
    """A kernel and what the model says of it.

    Attributes:
        kernel: the kernel.
        predicted_us: predicted microseconds of one call in a chain of calls.
        terms: the prediction's parts in microseconds. memory, tensor, issue, latency and fetch overlap; epilogue, of
            all tiles but a CTA's last, is added to the consumers' work; l2 and fixed are added to the whole.
        waves: rounds of tiles, the last one perhaps not full.
        ctas: CTAs launched.
    """

    kernel: KernelSpec
    predicted_us: float
    terms: dict[str, float]
    waves: int
    ctas: int


class Costs(NamedTuple):
    """What a prediction needs of a kernel on a device, whatever the problem. Times in microseconds."""

    tensor: float  # of one record on every warpgroup of the CTA; the next three alike
    issue: float
    latency: float
    any_width: tuple[float, float]  # parts of issue and latency that do not depend on a multiply's width
    fetch: float
    l2: float  # of one record of every warpgroup along n, where all SMs draw
    draw: float  # of what a CTA asks for in a block of k
    stream: float  # times the HBM's
    once: float  # beside the tiles, apart from ALONE_US
    tile: float  # sum and epilogue of one tile
    engine_stages: float
    prefetch_stages: int
    resident: int  # clusters that fit on the device
    sms_of_clusters: float  # SMs that they fill, one CTA an SM


def costs(spec: KernelSpec, device: DeviceSpec) -> Costs:
    """The costs of a kernel, apart from any problem."""
    fmt, cycle = spec.format, 1.0 / device.clock_mhz
    multiplies = 2 if fmt.offset else 1  # offsets take a multiply by ones
    groups = max(1, fmt.scale_rows)
    ops_per_cycle = device.tensor_ops_per_us * cycle / device.num_sms
    multiply = multiplies * 2 * STRIP_ROWS * BLOCK_K * spec.wgmma_n / ops_per_cycle
    decode = DECODE_CYCLES[fmt.decoder(spec.lhs).cost]
    every = promote_records(spec)
    products = spec.lhs_group and fmt.group_size and not spec.token_rows
    cycles = PROMOTE_CYCLES[spec.lhs] + (SCALE_CYCLES if products else 0.0)
    promote = multiplies * groups / every * spec.wgmma_n / 2 * cycles if every else 0.0
    serial = max(multiply, decode) + RECORD_CYCLES
    # Halves are promoted beside each other's multiplies where a record has several groups, else after them.
    if groups > 1:
        serial += promote / spec.halves
    elif promote:
        serial += promote + HALVES_CYCLES * (spec.halves if spec.token_rows else 1) * (spec.halves - 1)

    paired = PAIRED_ISSUE if spec.ctas_per_sm > 1 else 1.0
    sums = spec.block_m * spec.warpgroups_n
    tile = TILE_US + TOKEN_US * slice_tokens(spec) + HAND_US * sums * (1 - 1 / spec.warpgroups_k)
    if spec.split_k > 1:
        tile += SEND_US * sums * (1 - 1 / spec.split_k)
    elif spec.warpgroups_k > 1:
        tile += SUM_US
    once = (MULTICAST_US if spec.multicast > 1 else 0.0) + (TABLE_US if spec.experts else 0.0)
    if spec.ctas_per_sm > 1 and spec.block_m > PAIRED_TOKENS and not spec.experts:
        once += PAIRED_TALL_US
    weights = spec.strips * fmt.record_bytes / spec.multicast_rhs
    operands = spec.block_m * BLOCK_K / spec.multicast_lhs + weights
    return Costs(
        # The warpgroups of an SM share its tensor cores and its schedulers.
        tensor=spec.warpgroups * multiply * cycle,
        issue=spec.warpgroups * (decode + promote) * paired * cycle,
        latency=serial * cycle,
        any_width=(spec.warpgroups * decode * paired * cycle, (decode + RECORD_CYCLES) * cycle),
        fetch=FETCH_CYCLES / (spec.stages - 1) * cycle,
        draw=weights / DRAW_BYTES_PER_CYCLE * cycle,
        l2=spec.multicast * operands / (L2_BYTES_PER_CYCLE * device.num_sms) * cycle,
        stream=PAIRED_STREAM if spec.ctas_per_sm > 1 else 1.0,
        once=once,
        tile=tile,
        engine_stages=engine_stages(spec),
        prefetch_stages=prefetch_stages(spec),
        resident=device.resident_clusters(spec.cluster_size, spec.ctas_per_sm),
        sms_of_clusters=device.resident_clusters(spec.cluster_size) * spec.cluster_size,
    )


class Times(NamedTuple):
    """A prediction's parts in microseconds, as in `Candidate.terms`."""

    memory: float
    fetch: float
    tensor: float
    issue: float
    latency: float
    epilogue: float
    l2: float
    fixed: float

    @property
    def total(self) -> float:
        memory, fetch, tensor, issue, latency, epilogue, l2, fixed = self
        consumers = _norm(tensor, issue, latency) + epilogue
        return fixed + l2 + _norm(memory, fetch, consumers)


def _norm(a: float, b: float, c: float) -> float:
    return (a**OVERLAP + b**OVERLAP + c**OVERLAP) ** (1 / OVERLAP)


def times(spec: KernelSpec, of: Costs, problem: Problem, device: DeviceSpec) -> tuple[Times, float, int]:
    """The times, the rounds of tiles and the CTAs. Of a grouped problem they are means over its routings."""
    m, n, k = problem.m, problem.n, problem.k
    tiles = token_tiles(problem.experts, m, spec.block_m * spec.multicast_rhs)
    along_n = units_along_n(spec, n)
    units = sum(tiles) / len(tiles) * along_n
    clusters = launched_clusters(spec, max(tiles) * along_n, device.num_sms, of.resident)
    ctas = clusters * spec.cluster_size
    rounds = sum(ceil_div(along_m * along_n, clusters) for along_m in tiles) / len(tiles)
    blocks = ceil_div(k, BLOCK_K)
    stages = ceil_div(split_blocks(spec, blocks), spec.warpgroups_k)  # of a tile, and records of one warpgroup
    records = rounds * stages
    # CTAs beyond those that fit one an SM share their SMs.
    shared = 2 if ctas > of.sms_of_clusters else 1
    # Each weight once: an expert's tiles follow one another, and find it in the L2 (the term l2).
    reads = weights_read(problem.experts, m)
    if problem.experts and spec.shared_weights and m <= problem.experts * spec.block_m:
        reads += REREAD * (sum(tiles) / len(tiles) - reads)  # Scheduler::weight_policy
    all_bytes = reads * ceil_div(n, STRIP_ROWS) * blocks * problem.format.record_bytes
    all_bytes += m * k + DTYPES[spec.out].bytes * m * n
    memory = all_bytes / device.hbm_bytes_per_us
    # What CTAs ask for before they wait for the kernel before comes while that one ends.
    prefetched = min(of.prefetch_stages, stages) * stage_weight_bytes(spec) * ctas / device.hbm_bytes_per_us
    # CTAs of the next kernel that find no SM of their own while this one's are alone on theirs.
    crowded = max(0.0, 2 - device.num_sms / ctas) if spec.ctas_per_sm == 1 else 0.0
    alone = ALONE_US * (ALONE_LEAST + (1 - ALONE_LEAST) * crowded) if crowded else 0.0
    fill = filled(problem.experts, m, token_widths(spec))
    issue, latency = (part + fill * (all_of_it - part) for part, all_of_it in zip(of.any_width, (of.issue, of.latency)))
    draw = rounds * split_blocks(spec, blocks) * of.draw  # an SM's, which few CTAs have to draw all
    found = Times(
        memory=max(of.stream * max(0.0, memory - min(prefetched, PREFETCH_US)), draw),
        fetch=records * of.fetch,
        tensor=shared * records * fill * of.tensor,
        issue=shared * records * issue,
        latency=records * latency,
        epilogue=(rounds - 1) * of.tile * (GROUPED_EPILOGUE if problem.experts else 1.0),
        l2=L2_SHARE * units * blocks * of.l2,
        fixed=of.once + alone + of.tile + (COPY_US if stages <= of.engine_stages else 0.0),
    )
    return found, rounds, ctas


def candidate(spec: KernelSpec, of: Costs, problem: Problem, device: DeviceSpec) -> Candidate:
    """The prediction as users see it."""
    found, waves, ctas = times(spec, of, problem, device)
    return Candidate(spec, found.total, found._asdict(), math.ceil(waves), ctas)


def predict(spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Candidate:
    """Predicted time of `problem` on `device` with this kernel."""
    return candidate(spec, costs(spec, device), problem, device)


# ---- routings --------------------------------------------------------------------------------------------------------
#
# How many rows the experts of a grouped GEMM get, which only the device knows: a few routings, uniform over the experts,
# drawn by seed. The same routings in every process and on every machine.

ROUTINGS = 8
DRAWN_ROWS = 16
"""Up to so many rows an expert, the rows are drawn one by one; above, an expert's rows from a normal distribution."""


@lru_cache(maxsize=1024)
def routings(experts: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """Rows of every expert that has some, in each routing. Without experts all rows belong to one weight."""
    if experts <= 1:
        return ((rows,),)
    return tuple(_routing(experts, rows, Random(seed)) for seed in range(ROUTINGS))


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
def token_tiles(experts: int, rows: int, block_m: int) -> tuple[int, ...]:
    """Tiles of `block_m` rows in each routing; a tile holds rows of one expert."""
    return tuple(sum(ceil_div(count, block_m) for count in routing) for routing in routings(experts, rows))


@lru_cache(maxsize=4096)
def filled(experts: int, rows: int, widths: tuple[int, ...]) -> float:
    """Part of the full width that an average tile multiplies, if a tile takes the narrowest of the widths that it fits;
    the last is the full one."""
    if len(widths) == 1:
        return 1.0
    full, multiplied, tiles = widths[-1], 0, 0
    for routing in routings(experts, rows):
        for count in routing:
            whole, rest = divmod(count, full)
            multiplied += whole * full + (next(width for width in widths if rest <= width) if rest else 0)
            tiles += whole + (rest > 0)
    return multiplied / (tiles * full)


@lru_cache(maxsize=1024)
def weights_read(experts: int, rows: int) -> float:
    """Experts that have rows, on average: weights that a call reads."""
    found = routings(experts, rows)
    return sum(map(len, found)) / len(found)


@lru_cache(maxsize=1024)
def most_rows(experts: int, rows: int) -> int:
    """Most rows that an expert has in any of the routings."""
    return max(map(max, routings(experts, rows)))
