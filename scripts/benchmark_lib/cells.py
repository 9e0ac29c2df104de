"""The cells of a benchmark: shapes of GEMMs, the formats they run in, and the floor no kernel on this hardware passes.

Plain arithmetic: no torch, no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

from jitgemm.cli.common import parse_shape
from jitgemm.kernel.codes import typed_code
from jitgemm.kernel.formats import GROUP_SIZES, Correction, Problem, WeightFormat, ceil_div, tuned_order
from jitgemm.select.devices import DEVICES, DeviceSpec

GEMM_SHARE = 1.5 / 1.8
"""What cuBLAS FP8 and the best W4A8 kernels reach of a device's tensor rate: 1.5 of 1.8 PFLOP/s on an H200, measured.
int8 passes it."""

COPY_BYTES = 300e6
"""Copies of a weight together are at least this large, five times the L2, so that weights come from HBM."""

LLAMA_8B = ((4096, 4096), (28672, 4096), (4096, 14336))
MS = (1, 16, 64, 128, 256, 512, 1024, 4096, 8192)
QUICK_SHAPES = ((4096, 4096), (28672, 4096))
QUICK_MS = (1, 16, 64, 512, 4096)
GRID = (
    (28672, 4096), (4096, 14336),  # Llama-3-8B: gate and up, down
    (10240, 8192), (7168, 8192), (8192, 3584),  # Llama-3-70B: q, k and v; gate and up, and down, of one of eight ranks
    (7168, 18432), (2048, 7168),  # DeepSeek-V3: down of a dense layer, gate of the shared expert
    (13824, 5120),  # Qwen2.5-14B: gate and up of one of two ranks
    (3584, 18944),  # Qwen2.5-7B: down
    (1536, 8960),  # Qwen2.5-1.5B: down
)  # fmt: skip
"""Layers of models, few of them powers of two."""
GRID_MS = (96, 200, 400, 700, 1000, 1500, 2500, 4000, 8192)
PRESETS = {"llama-8b": (LLAMA_8B, MS), "quick": (QUICK_SHAPES, QUICK_MS), "grid": (GRID, GRID_MS)}
MOE_MS = (1, 8, 32, 128, 1024, 4096)
MOE_QUICK_MS = (1, 32, 1024)


@dataclass(frozen=True, slots=True)
class Rates:
    """What bounds a GEMM on a device: bytes of device memory and 8-bit operations, per microsecond."""

    hbm_bytes_per_us: float
    tensor_ops_per_us: float

    @classmethod
    def of(cls, device: DeviceSpec) -> Rates:
        return cls(device.hbm_bytes_per_us, device.tensor_ops_per_us * GEMM_SHARE)

    @property
    def limits(self) -> str:
        return f"{self.hbm_bytes_per_us / 1e6:.2g} TB/s, {self.tensor_ops_per_us / 1e9:.2g} PFLOP/s"

    def floor(self, bits: Collection[int] = (4,)) -> str:
        """The floor's formula for weights of so many bits, for people; of a grouped GEMM m counts all experts' rows."""
        bandwidth, tensor = self.limits.split(", ")
        weight = " or ".join(FLOOR_BYTES[each] for each in sorted(set(bits)))
        return f"max(bytes / {bandwidth}, 2mnk / {tensor}); bytes = weights*({weight}) + m*k + 2*m*n"


FLOOR_BYTES = {4: "n*k/2 + 2*n*k/128", 8: "n*k"}
"""Of a weight by its bits, for people: a 16-bit scale per 128 values, and of 8 bits none, as those are few."""


H200 = Rates.of(DEVICES["h200"])


@dataclass(frozen=True, slots=True)
class Cell:
    """One GEMM: out[m, n] = lhs[m, k] · rhs[n, k]ᵀ, and the layer it stands for."""

    n: int
    k: int
    m: int
    layer: str = ""

    @property
    def ops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def floor_bytes(self, bits: int = 4) -> float:
        """Bytes that a GEMM whose weight has so many bits has to move once: of the weight those of FLOOR_BYTES."""
        return self.bytes_of(self.n * self.k * (1 / 2 + 2 / 128 if bits == 4 else 1))

    def bytes_of(self, weight_bytes: float) -> float:
        """Bytes that a call has to move: weights of this size, activations, results of 16 bits."""
        return weight_bytes + self.m * self.k + 2 * self.m * self.n

    @property
    def weight(self) -> tuple[object, ...]:
        """What tells weights apart."""
        return self.n, self.k

    def problem(self, fmt: Format) -> Problem:
        """What the selector is asked."""
        return fmt.problem(self.m, self.n, self.k)

    def floor_us(self, rates: Rates = H200, bits: int = 4) -> float:
        """Microseconds below which no kernel is expected: one figure for all formats of so many bits; they compare."""
        return max(self.floor_bytes(bits) / rates.hbm_bytes_per_us, self.ops / rates.tensor_ops_per_us)

    @property
    def name(self) -> str:
        return f"{self.n}x{self.k} m={self.m}"


@dataclass(frozen=True, slots=True)
class Experts:
    """How tokens choose weights.

    Attributes:
        count: weights on this rank.
        top_k: distinct experts that a token chooses.
        of: experts that it chooses from; more than count where several ranks hold them.
    """

    count: int
    top_k: int
    of: int

    def __post_init__(self) -> None:
        if not (1 <= self.count <= self.of and 1 <= self.top_k <= self.of):
            raise ValueError(f"experts: expected 1 <= count <= of and 1 <= top_k <= of, got {self}")

    @property
    def rows_vary(self) -> bool:
        """`Problem.rows_vary`."""
        return self.count < self.of


ROUTINGS = 24
ROUTING_SEED = 42
"""Its loads come close to those that the peers of docs/performance/moe_peers_h200.json were timed with."""


@lru_cache(maxsize=256)
def routings(experts: Experts, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Rows of each weight in each of some uniform routings. A token's experts are distinct; the first `count` are
    here."""
    drawn = []
    for i in range(ROUTINGS):
        random, counts = Random(1000 * ROUTING_SEED + i), [0] * experts.of
        for _ in range(tokens):
            for expert in random.sample(range(experts.of), experts.top_k):
                counts[expert] += 1
        drawn.append(tuple(counts[: experts.count]))
    return tuple(drawn)


@dataclass(frozen=True, slots=True)
class GroupedCell(Cell):
    """One grouped GEMM, in all `routings`; m counts tokens. Figures are means over the routings.

    Attributes:
        experts: how the tokens choose weights.
    """

    experts: Experts = Experts(1, 1, 1)

    @property
    def loads(self) -> tuple[tuple[int, ...], ...]:
        return routings(self.experts, self.m)

    @property
    def rows(self) -> float:
        return sum(map(sum, self.loads)) / ROUTINGS

    @property
    def most_rows(self) -> int:
        """Rows of the activations' and the result's tensors, the same for every routing; they have at least one."""
        return max(1, *map(sum, self.loads))

    @property
    def expected_rows(self) -> int:
        """Rows that a caller expects, who knows tokens and experts and no routing."""
        return max(1, round(self.m * self.experts.top_k * self.experts.count / self.experts.of))

    @property
    def hit(self) -> float:
        """Weights that have rows."""
        return sum(count > 0 for load in self.loads for count in load) / ROUTINGS

    @property
    def ops(self) -> float:
        return 2.0 * self.rows * self.n * self.k

    def bytes_of(self, weight_bytes: float) -> float:
        return self.hit * weight_bytes + self.rows * (self.k + 2 * self.n)

    @property
    def weight(self) -> tuple[object, ...]:
        return self.n, self.k, self.experts

    def problem(self, fmt: Format) -> Problem:
        dense = fmt.problem(self.expected_rows, self.n, self.k)
        return replace(dense, experts=self.experts.count, rows_vary=self.experts.rows_vary)

    @property
    def name(self) -> str:
        return f"{self.experts.count} x {self.n}x{self.k} tokens={self.m}"


def to_record(cell: Cell) -> dict[str, Any]:
    """A cell in a result document."""
    record: dict[str, Any] = {"n": cell.n, "k": cell.k, "m": cell.m, "layer": cell.layer}
    if isinstance(cell, GroupedCell):
        record |= {"experts": asdict(cell.experts), "rows": round(cell.rows, 2), "hit": round(cell.hit, 2)}
    return record


def from_record(record: Mapping[str, Any]) -> Cell:
    """The inverse of `to_record`; what else the record holds is not looked at."""
    sizes, experts = (record["n"], record["k"], record["m"], record.get("layer", "")), record.get("experts")
    return GroupedCell(*sizes, Experts(experts["count"], experts["top_k"], experts["of"])) if experts else Cell(*sizes)


@dataclass(frozen=True, slots=True)
class Format:
    """How jitgemm runs a cell; `parse_format` makes one of a name.

    Attributes:
        name: in results.
        lhs: "e4m3" or "s8".
        group_size: 32, 64, 128 or 256; 0 for one scale per row of n.
        bits: of the weight; 8 bits have fp32 scales, per row or with group_size 128 per block of 128 x 128.
        zero_point: unsigned codes with an integer zero point per group.
        offset: an offset of the scale's type per group.
        mxfp4: the weight is MXFP4, with a base for a row, for a row and 128 k, or scales for 32 k, by group_size.
        nvfp4: the weight is NVFP4.
        two_level: groups of 128 have integer scales and zero points under one scale per row.
        any_codes: codes in the order that both types of activations decode and that holds all sixteen of them, instead
            of the one that decodes fastest (`lhs_dtype` of `pack_w4`).
        f16_sums: kernels may add up in f16 (`Weight.sums`).
        corrects: zero points or offsets are corrections (`pack_w4`), and activations come with sums of groups.
        lhs_blocks: activations have a scale per token and 128 k.
        lhs_e8m0: those scales are powers of two, four packed in an int32.
        batch_invariant: a row gets the same bits whatever m is.
    """

    name: str
    lhs: str
    group_size: int
    bits: int
    zero_point: bool
    offset: bool
    mxfp4: bool
    nvfp4: bool
    two_level: bool
    any_codes: bool
    f16_sums: bool
    corrects: bool
    lhs_blocks: bool
    lhs_e8m0: bool
    batch_invariant: bool

    @property
    def sums(self) -> str:
        return "f16" if self.f16_sums else "f32"

    @property
    def correction(self) -> Correction | None:
        """`Weight.correction`: with bf16 scales factors of zero points have 11 bits, offsets 8."""
        return ("fp16" if self.zero_point else "bf16", self.group_size) if self.corrects else None

    def problem(self, m: int, n: int, k: int) -> Problem:
        """What the selector is asked for this GEMM; the benchmark's 4-bit weights have bf16 scales and no code -8."""
        group, lhs_group = self.group_size if self.group_size < k else 0, 128 if self.lhs_blocks else 0
        if self.bits == 8:
            weight = WeightFormat(
                group, False, "fp32", self.lhs, code=typed_code(self.lhs), uniform_strip_scale=group > 0
            )
        elif self.mxfp4:
            weight = WeightFormat(group, False, "bf16", "e2m1", code="e2m1")
        elif self.nvfp4:
            weight = WeightFormat(0, False, "fp32", "near", code="nvfp4")
        elif self.two_level:
            weight = WeightFormat(0, False, "bf16", "two_level", code="two_level")
        else:
            signed = self.corrects or not self.zero_point
            codes = "any" if self.any_codes else tuned_order(self.lhs, group, not signed, k)
            correction = self.correction[0] if self.correction else ""
            weight = WeightFormat(group, self.zero_point, "bf16", codes, self.offset, correction=correction)
        return Problem(
            m, n, k, self.lhs, weight, batch_invariant=self.batch_invariant, lhs_group=lhs_group,
            lhs_e8m0=self.lhs_e8m0, sums=self.sums,
        )  # fmt: skip

    def weight_bytes(self, n: int, k: int) -> float:
        """Bytes of codes, scales, zero points and offsets, or of factors in their place; padding of tiles, and copies
        of a block's scale, are not counted."""
        if self.bits == 8:
            return n * k + 4 * (ceil_div(n, 128) * ceil_div(k, 128) if self.group_size else n)
        if self.mxfp4:
            return n * k / 2 + n * ceil_div(k, 32)
        if self.nvfp4:
            return n * k / 2 + n * k / 16
        if self.two_level:
            return n * k / 2 + n * (2 * ceil_div(k, 128) + 2)
        groups = ceil_div(k, self.group_size) if self.group_size else 1
        each = 2 + (2 if self.offset or self.corrects else self.zero_point)
        return n * k / 2 + n * groups * each


_GROUPS = f"g(?:{'|'.join(map(str, GROUP_SIZES))})"
_BLOCKED = rf"(?:e4m3|int8)_(?:chz?|{_GROUPS}[zo]?)(?:_any)?|w8_(?:e4m3|int8)_(?:ch|block)|mxfp4_(?:ch|g32|g128)"
_NAMES = re.compile(
    rf"(?:(?:{_BLOCKED}|nvfp4_g16|int8_2l)(?:_b128e?)?|(?:e4m3_{_GROUPS}z?(?:_any)?|mxfp4_g(?:32|128))_f16"
    rf"|int8_{_GROUPS}[zo]_x)(?:_bi)?"
)
NAMES = (
    "e4m3 or int8, then _g32, _g64, _g128, _g256 or _ch, then z for zero points or o for offsets (of groups alone), "
    "_any for codes that any activations decode, _f16 for e4m3's sums in f16, _x for int8's corrections, _b128 for "
    "activations with a scale per token and 128 k, _b128e for the same in packed e8m0, _bi for batch-invariant; "
    "w8_e4m3_ch, w8_int8_block and their like for 8-bit weights; mxfp4_ch, mxfp4_g128, mxfp4_g32; nvfp4_g16; int8_2l "
    "for scales in two levels"
)
"""Of formats, for people."""


def parse_format(text: str) -> Format:
    """A format from its name.

    Raises:
        ValueError: says what a name is made of.
    """
    if not _NAMES.fullmatch(text):
        raise ValueError(f"--format: expected {NAMES}; got {text!r}")
    lhs, group, *switches = text.removeprefix("w8_").split("_")
    group_size = re.fullmatch(r"g(\d+)[zo]?", group)
    return Format(
        name=text,
        lhs="s8" if lhs == "int8" else "e4m3",
        group_size=128 if group == "block" else int(group_size[1]) if group_size and lhs != "nvfp4" else 0,
        bits=8 if text.startswith("w8_") else 4,
        zero_point=group.endswith("z"),
        offset=group.endswith("o"),
        mxfp4=lhs == "mxfp4",
        nvfp4=lhs == "nvfp4",
        two_level=group == "2l",
        any_codes="any" in switches,
        f16_sums="f16" in switches,
        corrects="x" in switches,
        lhs_blocks="b128" in switches or "b128e" in switches,
        lhs_e8m0="b128e" in switches,
        batch_invariant="bi" in switches,
    )


DEFAULT_FORMATS = tuple(map(parse_format, ("e4m3_g128", "int8_g128", "int8_ch", "e4m3_g128_any")))
MOE_FORMATS = DEFAULT_FORMATS[:3]


def parse_ms(text: str) -> tuple[int, ...]:
    """Numbers of tokens from "1,16,64"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--m: expected numbers of at least 1 such as 1,16,64, got {text!r}")
    return tuple(dict.fromkeys(map(int, parts)))


def make_cells(shapes: Sequence[str] = (), preset: str | None = None, ms: Sequence[int] | None = None) -> list[Cell]:
    """Every (n, k) of the shapes and the preset, times every m; each cell once.

    Args:
        shapes: "N,K" each.
        preset: a key of PRESETS; its m's are taken unless `ms` are given.
        ms: numbers of tokens; None for the preset's or MS.

    Raises:
        ValueError: an argument cannot be read.
    """
    layers, preset_ms = [parse_shape(text) for text in shapes], MS
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"--preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
        preset_shapes, preset_ms = PRESETS[preset]
        layers += preset_shapes
    return [Cell(n, k, m) for n, k in dict.fromkeys(layers) for m in (ms or preset_ms)]


# ---- mixtures of experts ---------------------------------------------------------------------------------------------

MOE_PRESETS = {
    "qwen3-30b": (Experts(128, 8, 128), 2048, 768),
    "dsv3-ep8": (Experts(32, 8, 256), 7168, 2048),
    "mixtral": (Experts(8, 2, 8), 4096, 14336),
    "gpt-oss-120b": (Experts(128, 4, 128), 2880, 2880),
    "gemma-4-26b": (Experts(128, 8, 128), 2816, 704),
    "kimi-k2-ep8": (Experts(48, 8, 384), 7168, 2048),
    "kimi-k3-ep16": (Experts(56, 16, 896), 3584, 3072),
    "dsv4-flash": (Experts(256, 6, 256), 4096, 2048),
    "dsv4-pro-ep8": (Experts(48, 6, 384), 7168, 3072),
}
"""Experts, hidden size and width of an expert; ep8: of one of eight ranks.

Kimi-K2's and Gemma 4's files of 4 bits are int4 in groups of 32, those of gpt-oss, Kimi-K3 and DeepSeek-V4 MXFP4.
"""

USUAL_MOE_PRESETS = ("qwen3-30b", "dsv3-ep8", "mixtral", "gpt-oss-120b")
"""Measured where none is asked for."""


def make_moe_cells(presets: Sequence[str] = (), ms: Sequence[int] | None = None) -> list[GroupedCell]:
    """Both grouped GEMMs of the presets' expert layers, times every number of tokens.

    Args:
        presets: keys of MOE_PRESETS; none for USUAL_MOE_PRESETS.
        ms: numbers of tokens; None for MOE_MS.

    Raises:
        ValueError: there is no such preset.
    """
    if unknown := [name for name in presets if name not in MOE_PRESETS]:
        raise ValueError(f"--preset: expected one of {', '.join(MOE_PRESETS)} with --moe, got {unknown[0]!r}")
    return [
        GroupedCell(n, k, m, f"{name} {gemm}", experts)
        for name in presets or USUAL_MOE_PRESETS
        for experts, hidden, width in (MOE_PRESETS[name],)
        for gemm, n, k in (("w13", 2 * width, hidden), ("w2", hidden, width))
        for m in ms or MOE_MS
    ]
