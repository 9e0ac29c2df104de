"""KernelSpec, all compile-time constants of a GEMM kernel, and what follows from them: shared memory, shapes of copies.

Plain arithmetic over a frozen dataclass; no torch, no CUDA.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from jitgemm.dtypes import DTYPES
from jitgemm.kernel.codes import CODES, every_order
from jitgemm.kernel.formats import BLOCK_K, STRIP_ROWS, WeightFormat, ceil_div

REGISTERS_PER_SM = 65536
PRODUCER_REGISTERS = 40
"""What a thread of the producer's warpgroup keeps at least; with 24, the least that `setmaxnreg` takes, some spill."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Everything that is a compile-time constant of a kernel. Equal specs render to the same source.

    Attributes:
        kind: what a kernel computes, "gemm", "quantizer" or "routing", for people; every spec has one.
        family: the template's name, by which tables have what renders and loads a spec.
        lhs: type of the activations.
        format: of the weight, as `WeightFormat.kernel_format`; its scale_type is "fp32" for per-channel kernels, which
            read their scales by a run-time type. With a `correction`, k counts the blocks that correct, too.
        block_m: tokens per tile (wgmma's N over all `token_halves`, except with `tokens_as_m`).
        token_halves: 1, or 2 when a warpgroup multiplies and promotes its tokens in two halves; with `tokens_as_m`
            one half after the other, of 64 tokens each.
        block_n: rows of n per tile; 64 per warpgroup along n, except with `tokens_as_m`.
        warpgroups_k: warpgroups that share a tile's rows and take k-blocks alternately.
        split_k: CTAs of a cluster that share a tile and take contiguous k-blocks each.
        reduce_scatter: each split of k reduces and stores a slice of the tile's tokens, instead of the first
            all of them. That is shorter, but no split starts its next tile before all have ended this one.
        multicast_lhs: CTAs of a cluster, neighbours along n, that share their activations.
        stages: pipeline depth; one stage holds `warpgroups_k` blocks of 128 k.
        ctas_per_sm: CTAs that are to fit an SM together; bounds the registers.
        consumers_copy_lhs: the consumers copy the activations of the prefetched stages also where `direct_lhs` would
            leave them to the copy engine; `tactics.with_k_rules` sets it.
        tokens_as_m: wgmma's M are tokens, 64 for each half of a warpgroup, and its N all rows of n of the tile; half of
            them in tiles of 64 x 256; two warpgroups have the same tokens. A thread then has sums of two
            tokens, whose scales per 128 k it multiplies by one for each strip of the weights: for 8-bit weights of a
            format with `uniform_strip_scale`.
        out: type of the result.
        experts: 0 for a dense GEMM; else the most experts of a grouped one, which a CTA keeps a table of.
        lhs_group: k that share a scale of activations, `LHS_GROUP`; 0 for a scale per token.
        lhs_e8m0: those scales come as packed exponents, four k-blocks to an int32.
        sums: how groups' scaled sums are added up (include/jitgemm/gemm/scaling.cuh): "f32"; "f16" over a run of eight
            records, which then goes to fp32, for e4m3 and weights with `WeightFormat.f16_sums`; "parts", in fp32 and
            unconverted, for int8 and weights with `WeightFormat.sums_by_parts`.
        chunks: sums of runs of k are stored apart, and not added up (`jitgemm.gemm.partial`).
        debug: barrier waits trap after a spin limit instead of hanging.
    """

    kind, family = "gemm", "gemm"

    lhs: str
    format: WeightFormat
    block_m: int
    block_n: int
    stages: int
    token_halves: int = 1
    warpgroups_k: int = 1
    split_k: int = 1
    reduce_scatter: bool = False
    multicast_lhs: int = 1
    ctas_per_sm: int = 1
    consumers_copy_lhs: bool = False
    tokens_as_m: bool = False
    out: str = "bf16"
    debug: bool = False
    experts: int = 0
    lhs_group: int = 0
    lhs_e8m0: bool = False
    sums: str = "f32"
    chunks: bool = False

    @property
    def shared_weights(self) -> bool:
        """Whether wgmma reads the weights from shared memory: weights that need no decoding."""
        return self.format.typed

    @property
    def strips(self) -> int:
        """Records of 64 rows of n side by side."""
        return self.block_n // STRIP_ROWS

    @property
    def warpgroups_m(self) -> int:
        return self.block_m // (STRIP_ROWS * self.token_halves) if self.tokens_as_m else 1

    @property
    def warpgroups_n(self) -> int:
        return self.strips if not self.tokens_as_m else 2 if (self.block_m, self.strips) == (64, 4) else 1

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups of a CTA."""
        return self.warpgroups_m * self.warpgroups_n * self.warpgroups_k

    @property
    def wgmma_n(self) -> int:
        """wgmma's N over all halves; a thread has half as many sums."""
        return self.token_halves * self.block_n // self.warpgroups_n if self.tokens_as_m else self.block_m

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumer warpgroups and one more, whose first warp produces.

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
    def cluster_size(self) -> int:
        return self.split_k * self.multicast_lhs

    @property
    def label(self) -> str:
        """Short name for people, such as "e4m3-g128-bf16-m16n64-k2x2-s8-c2"; different kernels have different ones."""
        fmt = self.format
        group = f"g{fmt.group_size}" if fmt.group_size else "channel"
        parts = [self.lhs, group + ("z" if fmt.zero_point else "") + ("o" if fmt.offset else "")]
        parts[0] += CODES[fmt.code].order(fmt.order).mark
        if fmt.group_size:
            parts.append(fmt.scale_type)
        if self.lhs_group:
            parts.append(f"b{self.lhs_group}{'e' if self.lhs_e8m0 else ''}")
        if self.out != "bf16":
            parts.append(f"to{self.out}")
        parts.append(f"m{self.block_m}{'h' if self.token_halves == 2 else ''}n{self.block_n}")
        if self.warpgroups_k * self.split_k > 1:
            parts.append(f"k{self.warpgroups_k}x{self.split_k}{'s' if self.reduce_scatter else ''}")
        if self.multicast_lhs > 1:
            parts.append(f"mc{self.multicast_lhs}lhs")
        parts.append(f"s{self.stages}")
        if self.ctas_per_sm > 1:
            parts.append(f"c{self.ctas_per_sm}")
        if self.consumers_copy_lhs:
            parts.append("d")
        if self.shared_weights:
            parts.append("ss")
        if self.tokens_as_m:
            parts.append("tr")
        if self.sums != "f32":
            parts.append(self.sums)
        if fmt.correction:
            parts.append(f"x{fmt.correction}")
        if self.experts:
            parts.append(f"e{self.experts}")
        if self.chunks:
            parts.append("ch")
        if self.debug:
            parts.append("debug")
        return "-".join(parts)

    @classmethod
    def from_label(cls, label: str) -> KernelSpec:
        """The kernel of a `label`. ValueError for any other text."""
        match = _LABEL.fullmatch(label)
        if match is None:
            raise ValueError(f"kernel: expected a label such as {_LABELLED}, got {label!r}")
        found = match.groupdict()

        def number(name: str, otherwise: int = 1) -> int:
            return int(found[name] or otherwise)

        def flag(name: str) -> bool:
            return found[name] is not None

        lhs, mark, scale_type = found["lhs"], found["mark"] or "", found["scale"] or "fp32"
        names = [(c.name, o.name) for c, o in every_order() if lhs in o.decoders and o.mark == mark]
        if not names:
            raise ValueError(f"kernel: expected a label such as {_LABELLED}, got {label!r}")
        ((code, order),) = names
        spec = cls(
            lhs=lhs,
            format=WeightFormat(
                number("group", 0), flag("zero"), scale_type, order, flag("offset"), code,
                correction=found["correction"] or "",
            ),
            block_m=number("m"), block_n=number("n"), stages=number("stages"), token_halves=1 + flag("halves"),
            warpgroups_k=number("warpgroups"), split_k=number("splits"), reduce_scatter=flag("scatter"),
            multicast_lhs=number("shares"), ctas_per_sm=number("ctas"),
            consumers_copy_lhs=flag("direct"), tokens_as_m=flag("rows"), out=found["out"] or "bf16",
            experts=number("experts", 0), debug=flag("debug"), lhs_group=number("block", 0), lhs_e8m0=flag("e8m0"),
            sums=found["sums"] or "f32", chunks=flag("chunks"),
        )  # fmt: skip
        if spec.label != label:
            raise ValueError(f"kernel: expected {spec.label}, got {label}")
        return spec

    def to_dict(self) -> dict[str, Any]:
        """Field -> value, with the format's in place of `format`."""
        values = asdict(self)
        del values["format"]
        return self.format.to_dict() | values


_LABELLED = "e4m3-g128-bf16-m16n64-k2x2-s8-c2"


_LABEL = re.compile(
    r"(?P<lhs>e4m3|s8)(?P<mark>[a-z]\w*)?-(?:channel|g(?P<group>\d+))(?P<zero>z)?(?P<offset>o)?"
    r"(?:-(?P<scale>fp32|bf16|fp16))?(?:-b(?P<block>128)(?P<e8m0>e)?)?(?:-to(?P<out>fp32|fp16|s32))?"
    r"-m(?P<m>\d+)(?P<halves>h)?n(?P<n>\d+)"
    r"(?:-k(?P<warpgroups>\d+)x(?P<splits>\d+)(?P<scatter>s)?)?(?:-mc(?P<shares>\d+)lhs)?"
    r"-s(?P<stages>\d+)(?:-c(?P<ctas>\d+))?(?P<direct>-d)?(?:-ss)?(?P<rows>-tr)?(?:-(?P<sums>f16|parts))?"
    r"(?:-x(?P<correction>bf16|fp16))?(?:-e(?P<experts>\d+))?(?P<chunks>-ch)?"
    r"(?P<debug>-debug)?"
)


def wgmma_shapes(lhs: str) -> tuple[int, ...]:
    """Legal N of `wgmma.mma_async.m64nNk32` for this type (PTX ISA, table of wgmma shapes)."""
    if lhs == "e4m3":
        return tuple(range(8, 257, 8))
    return (8, 16, 24, 32, *range(48, 257, 16))


def stage_weight_bytes(spec: KernelSpec) -> int:
    """Bytes of weights that a stage holds."""
    return spec.strips * spec.warpgroups_k * spec.format.record_bytes


def strip_scale_bytes(spec: KernelSpec) -> int:
    """Bytes of a record that are kept apart from its codes: the first of its scales."""
    return 32 if spec.tokens_as_m else 0


def record_stride(spec: KernelSpec) -> int:
    """Bytes from one record in shared memory to the next; wgmma reads weights that start at a multiple of 1024, and
    with `tokens_as_m` those of all strips as one operand."""
    size = spec.format.scales_at if spec.tokens_as_m else spec.format.record_bytes
    return 1024 * ceil_div(size, 1024) if spec.shared_weights else size


def lhs_copy_rows(spec: KernelSpec, m: int) -> tuple[int, int]:
    """Tokens of one tile copy of activations: of a whole tile, and of the last along m, which brings what there is.

    CTAs that share activations copy a part each, of whole rows of eight, the period of the swizzle.
    """
    ctas = spec.multicast_lhs
    left = m - (ceil_div(m, spec.block_m) - 1) * spec.block_m
    return spec.block_m // ctas, left if ctas == 1 else 8 * ceil_div(left, 8 * ctas)


def slice_tokens(spec: KernelSpec) -> int:
    """Tokens of a tile that one split of k reduces and stores.

    Scattered: multiples of 8, the same number for each; with fewer slices than splits, the last splits have none.
    """
    if spec.tokens_as_m:
        return STRIP_ROWS
    if not spec.reduce_scatter:
        return spec.block_m
    eights = spec.block_m // 8
    splits = spec.split_k * spec.warpgroups_k
    return 8 * next(size for size in range(ceil_div(eights, splits), eights + 1) if eights % size == 0)


def slot_tokens(spec: KernelSpec) -> int:
    """Tokens whose sums a reducing warpgroup gets from others: its span from each other warpgroup along k of its CTA,
    then its slice from each other CTA (include/jitgemm/gemm/shared.cuh)."""
    size = slice_tokens(spec)
    span = size * min(spec.split_k, spec.block_m // size)
    return (spec.warpgroups_k - 1) * span + (spec.split_k - 1) * size


def stage_bytes(spec: KernelSpec) -> int:
    """Shared memory of one stage: activations, perhaps their scales, records and two barriers."""
    token_bytes = BLOCK_K + (4 if spec.lhs_group else 0)
    records = spec.strips * spec.warpgroups_k * (record_stride(spec) + strip_scale_bytes(spec))
    return spec.warpgroups_k * spec.block_m * token_bytes + records + 2 * 8


def smem_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory of a CTA in bytes; the picture is in `include/jitgemm/gemm/shared.cuh`."""
    size = slice_tokens(spec)
    reducers = ceil_div(spec.block_m // size, spec.split_k) * spec.warpgroups_n
    out_panel = size * STRIP_ROWS * DTYPES[spec.out].bytes
    slots = slot_tokens(spec) * STRIP_ROWS * 4
    barriers = 8 * (reducers + spec.warpgroups) if spec.warpgroups_k > 1 else 0
    barriers += 8 * 2 * reducers if spec.split_k > 1 else 0
    factors = ((0 if spec.lhs_group else size) + 3 * STRIP_ROWS) * 4
    if spec.tokens_as_m:  # every warpgroup stores its tokens, and has the bias of all columns
        reducers, columns = spec.warpgroups, spec.wgmma_n // spec.token_halves
        out_panel, factors = columns // STRIP_ROWS * out_panel, columns * 4
    stages = spec.stages * stage_bytes(spec)
    size = stages + reducers * (out_panel + slots + factors) + barriers + 12 * spec.experts
    tables = spec.format.table_bytes
    return 16 * ceil_div(size, 16) + tables if tables else size
