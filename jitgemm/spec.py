"""The frozen facts that the selector, the renderer and the cache work on: device, weight format, problem, kernel.

Plain dataclasses with no torch and no CUDA, so that a machine without a GPU can choose, render and compile for any
device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

BLOCK_K = 128
"""k per weight record and per swizzled activation row: 128 bytes of 8-bit activations."""

STRIP_ROWS = 64
"""Rows of n per weight record: wgmma's M."""

CODE_BYTES = STRIP_ROWS * BLOCK_K // 2
"""Bytes of 4-bit codes in one record."""

REGISTERS_PER_SM = 65536
PRODUCER_REGISTERS = 40
"""What a thread of the producer's warpgroup keeps at least; with 24, the least that `setmaxnreg` takes, some spill."""

GROUP_SIZES = (32, 64, 128, 256)
"""Group sizes with a scale per group. Anything that covers all of k is per channel, written 0."""

DIRECT_LHS_TOKENS = 16
"""Up to so many tokens a tile's first activations are copied by threads (docs/notes/decode.md)."""

DIRECT_TOKENS = {(1, 2): (64, 300), (2, 1): (48, 128), (2, 2): (32, 64), (4, 1): (32, 64)}
"""The same for wider tiles and four warpgroups along k where weights are left to ask for: most tokens of a tile, times
warpgroups along n, and tokens of all stages together; by warpgroups along k and CTAs of an SM."""

PREFETCH_BYTES = {1: 54_000, 2: 40_000}
"""Bytes of weights that a CTA asks for before it waits for the grid before, and MIN_PREFETCH_STAGES at least: about
what memory delivers in that time. More would stand in front of the activations; less where CTAs of few tokens share an
SM (docs/notes/decode.md)."""
MIN_PREFETCH_STAGES = 5
STREAM_TOKENS = 32
"""Most tokens of a tile for which `streams` asks for all stages."""

LHS_TYPES = ("e4m3", "s8")
CODES = ("any", *LHS_TYPES)
SCALE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OUT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What the selector needs to know of a GPU.

    Rates are what a kernel can reach, not what a datasheet promises; sources stand in `jitgemm/device.py`.

    Attributes:
        name: short name, such as "h200".
        num_sms: streaming multiprocessors.
        smem_per_block: bytes of dynamic shared memory one CTA may ask for.
        smem_per_sm: bytes of shared memory an SM has for all its CTAs; each CTA also costs 1 KiB of the system's.
        l2_bytes: size of the L2.
        hbm_bytes_per_us: streaming read rate of device memory, bytes per microsecond.
        tensor_ops_per_us: dense 8-bit multiply-adds x 2 per microsecond, all SMs together.
        clock_mhz: SM clock under tensor load.
    """

    name: str
    num_sms: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int
    hbm_bytes_per_us: float
    tensor_ops_per_us: float
    clock_mhz: float


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a packed weight is laid out; see `record_bytes` for the picture.

    Attributes:
        group_size: 32, 64, 128 or 256 values of k share a scale; 0 means one scale per row of n (per channel).
        zero_point: False for signed codes -8..7, True for codes 0..15 minus an integer zero point per group.
        scale_type: "fp32", "bf16" or "fp16", as given by the checkpoint; never converted.
        codes: order of signed codes: "any" decodes for both types of activations and holds all sixteen codes; "e4m3"
            (which has no code for -8) and "s8" decode for that one only, in half the instructions.
        offset: a value of the scale's type per group is added to its scaled weights.
    """

    group_size: int
    zero_point: bool
    scale_type: str
    codes: str = "any"
    offset: bool = False

    def __post_init__(self) -> None:
        if self.group_size not in (0, *GROUP_SIZES):
            raise ValueError(f"group_size: expected 0 (per channel) or one of {GROUP_SIZES}, got {self.group_size!r}")
        if self.scale_type not in SCALE_BYTES:
            raise ValueError(f"scale_type: expected one of {tuple(SCALE_BYTES)}, got {self.scale_type!r}")
        if self.codes not in CODES:
            raise ValueError(f"codes: expected one of {CODES}, got {self.codes!r}")
        if self.zero_point and self.codes != "any":
            raise ValueError(f"codes: expected 'any' with zero points, got {self.codes!r}")
        if self.offset and not self.group_size:
            raise ValueError("offset: expected none per channel; express it as groups that repeat it")

    @property
    def scale_rows(self) -> int:
        """Rows of 64 scales in one record: groups that start in 128 k, at least 1; none per channel."""
        return max(1, BLOCK_K // self.group_size) if self.group_size else 0

    @property
    def zero_rows(self) -> int:
        """Rows of 64 zero points in one record; one even per channel, so that decode finds it where the codes are."""
        return max(1, self.scale_rows) if self.zero_point else 0

    @property
    def offset_rows(self) -> int:
        """Rows of 64 offsets in one record."""
        return self.scale_rows if self.offset else 0

    @property
    def offsets_at(self) -> int:
        """Byte of a record at which its offsets start."""
        return CODE_BYTES + STRIP_ROWS * SCALE_BYTES[self.scale_type] * self.scale_rows

    @property
    def zeros_at(self) -> int:
        """Byte of a record at which its zero points start."""
        return self.offsets_at + STRIP_ROWS * SCALE_BYTES[self.scale_type] * self.offset_rows

    @property
    def record_bytes(self) -> int:
        """Bytes of one packed record of 64 rows x 128 k, S of them for each scale and offset.

        ::

            0        4096                      offsets_at                  zeros_at
            | codes  | scales [scale_rows][64] | offsets [offset_rows][64] | zeros uint8 [zero_rows][64] |
        """
        return self.zeros_at + STRIP_ROWS * self.zero_rows


# A choice asks thousands of kernels for theirs; there are some hundred.
_weight_format = lru_cache(maxsize=None)(WeightFormat)


@dataclass(frozen=True, slots=True)
class Problem:
    """One GEMM: out[m, n] = lhs[m, k] · rhs[n, k]ᵀ, with out's type and whether a row's bits may depend on m."""

    m: int
    n: int
    k: int
    lhs: str
    format: WeightFormat
    out: str = "bf16"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.out not in OUT_BYTES:
            raise ValueError(f"out: expected one of {tuple(OUT_BYTES)}, got {self.out!r}")
        if self.m < 1:
            raise ValueError(f"m: expected at least 1, got {self.m}")
        if self.n < 8 or self.n % 8:
            raise ValueError(f"n: expected a positive multiple of 8, got {self.n}")
        if self.k < 32 or self.k % 32:
            raise ValueError(f"k: expected a positive multiple of 32, got {self.k}")
        if self.lhs not in LHS_TYPES:
            raise ValueError(f"lhs: expected one of {LHS_TYPES}, got {self.lhs!r}")
        if self.format.codes not in ("any", self.lhs):
            raise ValueError(f"format: expected codes 'any' or {self.lhs!r}, as lhs is, got {self.format.codes!r}")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Everything that is a compile-time constant of a kernel. Equal specs render to the same source.

    Attributes:
        lhs, group_size, zero_point, scale_type: the formats; scale_type is "fp32" for per-channel kernels, which read
            their scales by a run-time type.
        block_m: tokens per tile (wgmma's N over all `halves`).
        halves: 1, or 2 when a warpgroup multiplies and promotes its tokens in two halves.
        block_n: rows of n per tile; 64 per warpgroup along n.
        warpgroups_k: warpgroups that share a tile's rows and take k-blocks in turn.
        split_k: CTAs of a cluster that share a tile and take a run of k-blocks each.
        split_tail: only the tiles of the last, unfilled round are split; before, each CTA has tiles of its own.
        scatter: each split of k sums up and stores a share of the tile's tokens, instead of the first all of them. The
            sum is shorter, but no split starts its next tile before all have ended this one.
        multicast: CTAs of a cluster that share one operand; 1 for none.
        multicast_side: "lhs" when neighbours along n share activations, "rhs" when neighbours along m share weights.
        stages: pipeline depth; one stage holds `warpgroups_k` blocks of 128 k.
        ctas_per_sm: CTAs that are to fit an SM together; bounds the registers.
        direct: the consumers copy the activations of the prefetched stages also where `direct_lhs` would leave them to
            the copy engine; only where `may_copy` says so.
        codes, offset: as in `WeightFormat`.
        out: type of the result.
        debug: barrier waits trap after a spin limit instead of hanging.
    """

    lhs: str
    group_size: int
    zero_point: bool
    scale_type: str
    block_m: int
    block_n: int
    stages: int
    halves: int = 1
    warpgroups_k: int = 1
    split_k: int = 1
    split_tail: bool = False
    scatter: bool = False
    multicast: int = 1
    multicast_side: str = "none"
    ctas_per_sm: int = 1
    direct: bool = False
    codes: str = "any"
    offset: bool = False
    out: str = "bf16"
    debug: bool = False

    @property
    def format(self) -> WeightFormat:
        return _weight_format(self.group_size, self.zero_point, self.scale_type, self.codes, self.offset)

    @property
    def warpgroups_n(self) -> int:
        return self.block_n // STRIP_ROWS

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups of a CTA."""
        return self.warpgroups_n * self.warpgroups_k

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumer warpgroups and one more, of which a single warp produces.

        Registers are allocated for whole warpgroups, and `setmaxnreg` moves them between whole warpgroups only.
        """
        return 128 * (self.warpgroups + 1)

    @property
    def entry_registers(self) -> int:
        """Registers a thread starts with: what the launch bounds leave it."""
        return min(255, REGISTERS_PER_SM // self.ctas_per_sm // self.threads // 8 * 8)

    @property
    def consumer_registers(self) -> int:
        """Registers a consumer thread has once the producer's were handed over."""
        if self.warpgroups == 1:
            return self.entry_registers
        pool = self.entry_registers * (self.warpgroups + 1)
        return (pool - PRODUCER_REGISTERS) // self.warpgroups // 8 * 8

    @property
    def producer_registers(self) -> int:
        """Registers that are left to a thread of the producer's warpgroup, `PRODUCER_REGISTERS` or more."""
        return self.entry_registers * (self.warpgroups + 1) - self.consumer_registers * self.warpgroups

    @property
    def cluster_size(self) -> int:
        return self.split_k * self.multicast

    @property
    def label(self) -> str:
        """Short name for people, such as "e4m3-g128-bf16-m16n64-k2x2-s8-c2"; different kernels have different ones."""
        group = f"g{self.group_size}" if self.group_size else "channel"
        parts = [self.lhs, group + ("z" if self.zero_point else "") + ("o" if self.offset else "")]
        if self.codes != "any":
            parts[0] += "fast"
        if self.group_size:
            parts.append(self.scale_type)
        if self.out != "bf16":
            parts.append(f"to{self.out}")
        parts.append(f"m{self.block_m}{'h' if self.halves == 2 else ''}n{self.block_n}")
        if self.warpgroups_k * self.split_k > 1:
            how = "t" if self.split_tail else "s" if self.scatter else ""
            parts.append(f"k{self.warpgroups_k}x{self.split_k}{how}")
        if self.multicast > 1:
            parts.append(f"mc{self.multicast}{self.multicast_side}")
        parts.append(f"s{self.stages}")
        if self.ctas_per_sm > 1:
            parts.append(f"c{self.ctas_per_sm}")
        if self.direct:
            parts.append("d")
        if self.debug:
            parts.append("debug")
        return "-".join(parts)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def wgmma_shapes(lhs: str) -> tuple[int, ...]:
    """Legal N of `wgmma.mma_async.m64nNk32` for this type (PTX ISA, table of wgmma shapes)."""
    if lhs == "e4m3":
        return tuple(range(8, 257, 8))
    return (8, 16, 24, 32, *range(48, 257, 16))


def promote_records(spec: KernelSpec) -> int:
    """Records of 128 k summed in the tensor cores before they are promoted to fp32; 0 means the whole tile.

    int8 sums are exact in int32. e4m3 sums lose bits as they grow: the tensor cores cut every product off at about 14
    bits below the sum, and runs of 256 k miss 2^-10 of the sum of terms where all terms have one sign
    (docs/notes/e4m3-accuracy.md).
    """
    if spec.lhs == "e4m3" or spec.offset:
        return 1
    if spec.group_size == 0:
        return 0
    # Two warpgroups along k take alternate records, so neither sees both halves of a group of 256.
    return 2 if spec.group_size == 256 and spec.warpgroups_k == 1 else 1


IN_FLIGHT_REGISTERS = 16
"""Registers for sums of a narrow tile's multiplies, where groups shorter than a record would wait for one another."""


def units_in_flight(spec: KernelSpec) -> int:
    """How many of a record's sums are kept at a time, one for each half of the tokens, group and part of its value.

    All are promoted apart. Wide tiles have registers for one a half: the next group multiplies when one is promoted.
    """
    groups = max(1, spec.format.scale_rows) * (2 if spec.offset else 1)
    if groups == 1:
        return spec.halves
    fit = IN_FLIGHT_REGISTERS // (spec.block_m // spec.halves // 2) // spec.halves
    return spec.halves * max(1, min(groups, fit))


def fragment_sets(spec: KernelSpec) -> int:
    """Sets of registers that hold decoded records in turn: 2, or 1 that is copied into.

    One where a turn of two records would be too much: to compile (groups of 32 unroll to four times the code), or for
    registers (four warpgroups, or two CTAs, with wide tiles that convert int8's sums; with narrow ones, or with codes
    of any activations, ptxas serialises the multiplies of a single set).
    """
    if spec.format.scale_rows == 4:
        return 1
    if spec.lhs != "s8" or spec.codes != "s8" or spec.group_size == 0:
        return 2
    four = spec.warpgroups == 4 and spec.block_m >= 48
    crowded = spec.ctas_per_sm == 2 and spec.block_m >= 64 and spec.format.scale_rows == 1
    return 1 if four or crowded else 2


def keeps_addresses(spec: KernelSpec) -> bool:
    """Whether consumers keep where shared memory is in a register that ptxas cannot work out anew in each iteration.

    By measurement (docs/notes/main-loop.md): up to 6 % for tiles of few tokens. With more, one warpgroup, two CTAs on
    an SM or four warpgroups have no register for it, and two along k that convert sums in halves or take zero points
    off are slower with it; int8's with scales in fp32 spill.
    """
    if spec.block_m <= 32:
        return True
    if spec.ctas_per_sm == 2 or spec.warpgroups == 1:
        return False
    if spec.warpgroups_k == 1:
        return spec.block_m <= 96 and spec.warpgroups < 4
    crowded = spec.lhs == "s8" and (spec.halves == 2 or spec.scale_type == "fp32")
    return promote_records(spec) == 0 or not (spec.zero_point or crowded)


MAX_CHANNEL_K_S8 = 2**16
"""Largest k of a weight per channel in the order for int8: sums of 16 q x stay in int32 up to twice that."""


def tuned_codes(lhs: str, group_size: int, zero_point: bool, k: int) -> str:
    """`WeightFormat.codes` that decode fastest for these activations; e4m3's holds no -8, else it must be "any"."""
    if zero_point or (lhs == "s8" and not group_size and k > MAX_CHANNEL_K_S8):
        return "any"
    return lhs


def prefetch_stages(spec: KernelSpec) -> int:
    """Stages of the first tile whose weights a CTA asks for before it waits for the grid before."""
    shape = spec.warpgroups_k, spec.ctas_per_sm
    narrow = spec.block_m <= DIRECT_LHS_TOKENS
    budget = PREFETCH_BYTES[min(2, spec.ctas_per_sm) if narrow else 1]
    stages = min(spec.stages, max(MIN_PREFETCH_STAGES, budget // stage_weight_bytes(spec)))
    return min(stages, ceil_div(DIRECT_TOKENS[shape][1], spec.block_m)) if spec.direct else stages


def streams(spec: KernelSpec) -> bool:
    """Whether a CTA whose tile has more than twice as many stages asks for all before it waits for the grid before.

    Such a call lasts as long as its weights take, and no other kernel's CTA waits on the same SM.
    """
    return spec.block_m <= STREAM_TOKENS and spec.ctas_per_sm == spec.warpgroups_k == 1 and not spec.direct


def stage_weight_bytes(spec: KernelSpec) -> int:
    """Bytes of weights that a stage holds."""
    return spec.warpgroups * spec.format.record_bytes


def direct_lhs(spec: KernelSpec) -> bool:
    """Whether the consumers of a tile copy the first stages' activations themselves instead of the copy engine."""
    narrow = spec.block_m <= DIRECT_LHS_TOKENS and spec.warpgroups_k <= 2 and spec.multicast == 1
    return narrow or spec.direct


def may_copy(spec: KernelSpec) -> bool:
    """Whether consumers that do not copy the first activations could: whether `direct` may be set."""
    widest, _ = DIRECT_TOKENS.get((spec.warpgroups_k, spec.ctas_per_sm), (0, 0))
    if spec.lhs == "s8" and spec.ctas_per_sm == 2:
        # With more sums they spill 8 bytes.
        if spec.zero_point:
            widest = min(widest, 32)
        elif spec.warpgroups_n == 2 and spec.split_k >= 4:
            widest = min(widest, 48)
    return spec.block_m * spec.warpgroups_n <= widest and spec.multicast == 1 and not direct_lhs(spec)


def lhs_copy_rows(spec: KernelSpec, m: int) -> tuple[int, int]:
    """Tokens of one tile copy of activations: of a whole tile, and of the last along m, which brings what there is.

    CTAs that share activations copy a part each, of whole rows of eight, the period of the swizzle.
    """
    shares = spec.multicast if spec.multicast_side == "lhs" else 1
    left = m - (ceil_div(m, spec.block_m) - 1) * spec.block_m
    return spec.block_m // shares, left if shares == 1 else 8 * ceil_div(left, 8 * shares)


def share_tokens(spec: KernelSpec) -> int:
    """Tokens of a tile that one of the splits of k sums up and stores.

    Scattered, whole runs of 8, the same number for each; with fewer runs than splits, the last splits have none.
    """
    if not spec.scatter:
        return spec.block_m
    runs = spec.block_m // 8
    splits = spec.split_k * spec.warpgroups_k
    return 8 * next(share for share in range(ceil_div(runs, splits), runs + 1) if runs % share == 0)


def slot_tokens(spec: KernelSpec) -> int:
    """Tokens whose sums a summer gets of others: its part of each of its CTA's other warpgroups along k, then its share
    of each other CTA (include/jitgemm/shared.cuh)."""
    share = share_tokens(spec)
    part = share * min(spec.split_k, spec.block_m // share)
    return (spec.warpgroups_k - 1) * part + (spec.split_k - 1) * share


def stage_bytes(spec: KernelSpec) -> int:
    """Shared memory of one stage: activations, records and two barriers."""
    return spec.warpgroups_k * spec.block_m * BLOCK_K + stage_weight_bytes(spec) + 2 * 8


def smem_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of a CTA in bytes; the picture is in `include/jitgemm/shared.cuh`."""
    share = share_tokens(spec)
    summers = ceil_div(spec.block_m // share, spec.split_k) * spec.warpgroups_n
    out_panel = share * STRIP_ROWS * OUT_BYTES[spec.out]
    slots = slot_tokens(spec) * STRIP_ROWS * 4
    barriers = 8 * (summers + spec.warpgroups) if spec.warpgroups_k > 1 else 0
    barriers += 8 * 2 * summers if spec.split_k > 1 else 0
    factors = (share + 3 * STRIP_ROWS) * 4
    return spec.stages * stage_bytes(spec) + summers * (out_panel + slots + factors) + barriers
