"""The cells of a benchmark: shapes of GEMMs, the formats they run in, and the floor no kernel on this hardware passes.

Plain arithmetic: no torch, no GPU.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from jitgemm.cli.common import parse_shape
from jitgemm.kernel.codes import typed_code
from jitgemm.kernel.formats import GROUP_SIZES, K_ALIGNMENT, Correction, Problem, WeightFormat, ceil_div, tuned_order
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


ROUTING_NAMES = ("uniform", "zipf", "same")
"""Experts alike; expert i of them chosen in proportion to 1 / i; all tokens choose the same ones."""


@dataclass(frozen=True, slots=True)
class Experts:
    """How tokens choose weights.

    Attributes:
        count: weights on this rank.
        top_k: distinct experts that a token chooses.
        of: experts that it chooses from; more than count where several ranks hold them.
        routing: a name of ROUTING_NAMES.
    """

    count: int
    top_k: int
    of: int
    routing: str = "uniform"

    def __post_init__(self) -> None:
        if not (1 <= self.count <= self.of and 1 <= self.top_k <= self.of):
            raise ValueError(f"experts: expected 1 <= count <= of and 1 <= top_k <= of, got {self}")
        if self.routing not in ROUTING_NAMES:
            raise ValueError(f"--routing: expected one of {', '.join(ROUTING_NAMES)}, got {self.routing!r}")

    @property
    def rows_vary(self) -> bool:
        """`Problem.rows_vary`."""
        return self.count < self.of


ROUTINGS = 24
ROUTING_SEED = 42
"""Its loads come close to those that the peers of docs/performance/moe_peers_h200.json were timed with."""


def _chooser(experts: Experts, random: Random) -> Callable[[], Iterable[int]]:
    """What gives one token's experts."""
    everybody, top_k = range(experts.of), experts.top_k
    if experts.routing == "uniform":
        return lambda: random.sample(everybody, top_k)
    ranked = random.sample(everybody, experts.of)
    if experts.routing == "same":
        return lambda: ranked[:top_k]
    cumulative = list(itertools.accumulate(1 / rank for rank in range(1, experts.of + 1)))

    def zipf() -> set[int]:
        found: set[int] = set()
        while len(found) < top_k:
            found.update(random.choices(ranked, cum_weights=cumulative, k=top_k - len(found)))
        return found

    return zipf


@lru_cache(maxsize=256)
def routings(experts: Experts, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Rows of each weight in each of some routings. A token's experts are distinct; the first `count` are here."""
    drawn = []
    for i in range(ROUTINGS):
        random, counts = Random(1000 * ROUTING_SEED + i), [0] * experts.of
        choose = _chooser(experts, random)
        for _ in range(tokens):
            for expert in choose():
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
    sizes = record["n"], record["k"], record["m"], record.get("layer", "")
    return GroupedCell(*sizes, Experts(**record["experts"])) if "experts" in record else Cell(*sizes)


@dataclass(frozen=True, slots=True)
class Format:
    """How jitgemm runs a cell.

    Attributes:
        lhs: "e4m3" or "s8".
        group_size: 32, 64, 128 or 256; 0 for one scale per row of n.
        zero_point: unsigned codes with an integer zero point per group.
        batch_invariant: a row gets the same bits whatever m is.
        any_codes: codes in the order that both types of activations decode and that holds all sixteen of them, instead
            of the one that decodes fastest (`lhs_dtype` of `pack_w4`).
        bits: of the weight; 8 bits have fp32 scales, per row or with group_size 128 per block of 128 x 128.
        lhs_blocks: activations have a scale per token and 128 k.
        lhs_e8m0: those scales are powers of two, four packed in an int32.
        f16_sums: kernels may add up in f16 (`Weight.sums`).
        mxfp4: the weight is MXFP4, with a base for a row, for a row and 128 k, or scales for 32 k, by group_size.
        nvfp4: the weight is NVFP4.
        two_level: groups of 128 have integer scales and zero points under one scale per row.
        offset: an offset of the scale's type per group.
        corrects: zero points or offsets are corrections (`pack_w4`), and activations come with sums of groups.
    """

    lhs: str
    group_size: int
    zero_point: bool = False
    batch_invariant: bool = False
    any_codes: bool = False
    bits: int = 4
    lhs_blocks: bool = False
    lhs_e8m0: bool = False
    mxfp4: bool = False
    f16_sums: bool = False
    nvfp4: bool = False
    two_level: bool = False
    offset: bool = False
    corrects: bool = False

    @property
    def name(self) -> str:
        """The name in results: e4m3_g128, int8_ch, int8_g128z, e4m3_g128_any, e4m3_g128_bi, e4m3_g128_f16,
        w8_e4m3_block_b128e, mxfp4_ch, mxfp4_g128, mxfp4_g32_f16, nvfp4_g16, int8_2l, int8_g128o, int8_g128z_x."""
        group = "ch" if not self.group_size else f"g{self.group_size}" if self.bits == 4 else "block"
        lhs = ("w8_" if self.bits == 8 else "") + ("int8" if self.lhs == "s8" else self.lhs)
        lhs, group = ("nvfp4", "g16") if self.nvfp4 else ("mxfp4" if self.mxfp4 else lhs, group)
        group = "2l" if self.two_level else group
        blocks = self.lhs_blocks and not self.lhs_e8m0
        given = (self.any_codes, self.f16_sums, self.corrects, blocks, self.lhs_e8m0, self.batch_invariant)
        switches = "".join(f"_{switch}" for switch, on in zip(SWITCHES, given) if on)
        return f"{lhs}_{group}{'z' if self.zero_point else ''}{'o' if self.offset else ''}{switches}"

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


SWITCHES = ("any", "f16", "x", "b128", "b128e", "bi")
"""What may follow in a format's name, in this order, one of the b's: `any_codes`, `f16_sums`, `corrects`, `lhs_blocks`,
that with `lhs_e8m0`, `batch_invariant`."""
DEFAULT_FORMATS = (Format("e4m3", 128), Format("s8", 128), Format("s8", 0), Format("e4m3", 128, any_codes=True))
MOE_FORMATS = DEFAULT_FORMATS[:3]
MORE_FORMATS = (
    Format("e4m3", 32),
    Format("e4m3", 64),
    Format("e4m3", 128, True),
    Format("s8", 32),
    Format("s8", 64),
    Format("s8", 128, True),
    Format("e4m3", 0, bits=8),
    Format("s8", 0, bits=8),
    Format("e4m3", 128, bits=8),
    Format("s8", 128, bits=8),
    Format("e4m3", 128, bits=8, lhs_blocks=True),
    Format("e4m3", 128, lhs_blocks=True),
    *(Format("e4m3", size, f16_sums=True) for size in (128, 64, 32)),
    Format("e4m3", 128, True, f16_sums=True),
    *(Format("e4m3", size, mxfp4=True, f16_sums=True) for size in (128, 32)),
    Format("e4m3", 0, mxfp4=True),
    Format("e4m3", 128, mxfp4=True),
    Format("e4m3", 32, mxfp4=True),
    Format("e4m3", 0, nvfp4=True),
    Format("s8", 0, two_level=True),
    Format("s8", 128, True, corrects=True),
    Format("s8", 128, offset=True),
    Format("s8", 128, offset=True, corrects=True),
)


def parse_format(text: str) -> Format:
    """A format from its name, such as e4m3_g128, fp8_g64z, int8_ch, e4m3_g128_any, e4m3_g128_bi or w8_e4m3_block.

    Raises:
        ValueError: says what a name is made of.
    """
    name = text.strip().lower()
    bits = 8 if name.startswith("w8_") else 4
    lhs, _, rest = name.removeprefix("w8_").partition("_")
    group, *switches = rest.split("_")
    zero_point, offset = (group.endswith(letter) and bits == 4 for letter in "zo")
    group = group[:-1] if zero_point or offset else group
    types = {"e4m3": "e4m3", "fp8": "e4m3", "int8": "s8", "s8": "s8"} | (
        {"mxfp4": "e4m3", "nvfp4": "e4m3"} if bits == 4 else {}
    )
    mxfp4, nvfp4 = lhs == "mxfp4", lhs == "nvfp4"
    sizes = {f"g{size}": size for size in GROUP_SIZES} | {"ch": 0} if bits == 4 else {"ch": 0, "block": 128}
    sizes = {f"g{size}": size for size in (32, 128)} | {"ch": 0} if mxfp4 else sizes
    sizes = {"g16": 0} if nvfp4 else sizes
    two_level = group == "2l" and types.get(lhs) == "s8" and bits == 4 and not zero_point
    sizes = {"2l": 0} if two_level else sizes
    no_any = bits == 8 or mxfp4 or nvfp4 or two_level
    known = [switch for switch in SWITCHES if switch in switches and not (no_any and switch == "any")]
    e8m0 = "b128e" in switches
    wrong = switches != known or (e8m0 and "b128" in switches) or ((mxfp4 or nvfp4) and (zero_point or offset))
    corrects, by_block = "x" in switches, e8m0 or "b128" in switches
    no_x = types.get(lhs) != "s8" or not (zero_point or offset) or group == "ch" or by_block or "any" in switches
    wrong = wrong or (corrects and no_x) or (offset and (group == "ch" or "f16" in switches))
    f16 = "f16" in switches
    no_f16 = types.get(lhs) != "e4m3" or bits == 8 or nvfp4 or group == "ch" or e8m0 or "b128" in switches
    wrong = wrong or (f16 and no_f16)
    if lhs not in types or group not in sizes or wrong:
        raise ValueError(
            f"--format: expected LHS_GROUP with LHS e4m3 or int8 and GROUP one of g32, g64, g128, g256, ch, then z for "
            f"zero points or o for offsets (groups alone), _any for codes of any activations, _f16 for e4m3's "
            f"sums in f16, _x for int8's corrections, _b128 for activations' scales per 128 k, or _b128e for packed "
            f"e8m0 ones, and _bi for batch-invariant, such as int8_g64z; or w8_LHS_ch, w8_LHS_block for 8-bit weights, "
            f"mxfp4_ch, mxfp4_g128, mxfp4_g32 for MXFP4, nvfp4_g16 for NVFP4, int8_2l for scales in two levels; "
            f"got {text!r}"
        )
    invariant, any_codes, blocks = "bi" in switches, "any" in switches, e8m0 or "b128" in switches
    return Format(
        types[lhs],
        sizes[group],
        zero_point,
        invariant,
        any_codes,
        bits,
        blocks,
        e8m0,
        mxfp4,
        f16,
        nvfp4,
        two_level,
        offset,
        corrects,
    )


def parse_ms(text: str) -> tuple[int, ...]:
    """Numbers of tokens from "1,16,64", or "1:512:8" for first:last:step.

    Raises:
        ValueError: names what was wrong.
    """
    found: list[int] = []
    for part in text.split(","):
        numbers = part.strip().split(":")
        if not all(number.strip().isdecimal() for number in numbers) or len(numbers) > 3:
            raise ValueError(
                f"--m: expected numbers such as 1,16,64 or first:last:step such as 1:512:8, got {part.strip()!r}"
            )
        values = [int(number) for number in numbers]
        if len(values) == 1:
            found.append(values[0])
        else:
            found += range(values[0], values[1] + 1, values[2] if len(values) == 3 else 1)
    if not found or min(found) < 1:
        raise ValueError(f"--m: expected numbers of at least 1, got {text!r}")
    return tuple(dict.fromkeys(found))


def make_cells(
    shapes: Sequence[str] = (),
    preset: str | None = None,
    models: Sequence[str | Path] = (),
    tp: int = 1,
    ms: Sequence[int] | None = None,
) -> list[Cell]:
    """Every (n, k) of the shapes, the preset and the models, times every m; each cell once.

    Args:
        shapes: "N,K" each.
        preset: a key of PRESETS; its m's are taken unless `ms` are given.
        models: config.json files or folders holding one; their fused projections, cut into `tp` ranks.
        ms: numbers of tokens; None for the preset's or MS.

    Raises:
        ValueError: an argument cannot be read, or nothing was asked for.
    """
    layers: list[tuple[int, int, str]] = [(*parse_shape(text), "") for text in shapes]
    preset_ms: Sequence[int] = MS
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"--preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
        preset_shapes, preset_ms = PRESETS[preset]
        layers += [(n, k, "") for n, k in preset_shapes]
    for path in models:
        from jitgemm.nn.layers.linear import PackedLinear
        from jitgemm.nn.warm.ahead import models_ahead  # with torch and transformers

        model = next(models_ahead(path, "vllm", tp=tp))
        found = {name: layer for name, layer in model.named_children() if isinstance(layer, PackedLinear)}
        layers += [(layer.out_features, layer.in_features, re.split("[/#]", name)[-2]) for name, layer in found.items()]
    if not layers:
        raise ValueError("nothing to measure: give --shape N,K, --preset or --model")
    named: dict[tuple[int, int], str] = {}
    for n, k, name in layers:
        named[n, k] = ", ".join(filter(None, dict.fromkeys([*named.get((n, k), "").split(", "), name])))
    return [Cell(n, k, m, name) for (n, k), name in named.items() for m in (ms or preset_ms)]


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

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "moe_topk")
_WIDTH = ("moe_intermediate_size", "intermediate_size")


def make_moe_cells(
    presets: Sequence[str] = (),
    models: Sequence[str | Path] = (),
    tp: int = 1,
    ep: int = 1,
    ms: Sequence[int] | None = None,
    routing: str = "uniform",
) -> list[GroupedCell]:
    """Both grouped GEMMs of the presets' and the models' expert layers, times every number of tokens.

    Args:
        presets: keys of MOE_PRESETS; USUAL_MOE_PRESETS where neither presets nor models are given.
        models: config.json files or folders holding one.
        tp: ranks that each expert of the models is cut into.
        ep: ranks that the models' experts are spread over.
        ms: numbers of tokens; None for MOE_MS.
        routing: a name of ROUTING_NAMES.

    Raises:
        ValueError: an argument cannot be read, or a model cannot be cut so.
    """
    layers: dict[str, tuple[Experts, int, int]] = {}
    for name in presets or (() if models else USUAL_MOE_PRESETS):
        if name not in MOE_PRESETS:
            raise ValueError(f"--preset: expected one of {', '.join(MOE_PRESETS)} with --moe, got {name!r}")
        layers[name] = MOE_PRESETS[name]
    for path in models:
        config = json.loads((Path(path) / "config.json" if Path(path).is_dir() else Path(path)).read_text())
        config = config.get("text_config", config)
        count, width = _first(config, _EXPERTS), _first(config, _WIDTH)
        if count % ep or width % tp or (width // tp) % K_ALIGNMENT:
            raise ValueError(f"{path}: {count} experts of width {width} cannot be cut for ep = {ep}, tp = {tp}")
        experts = Experts(count // ep, _first(config, _TOP_K), count)
        layers[str(config.get("model_type"))] = experts, _first(config, ("hidden_size",)), width // tp
    suffix = "" if routing == "uniform" else f" {routing}"
    return [
        GroupedCell(n, k, m, f"{name} {gemm}{suffix}", replace(experts, routing=routing))
        for name, (experts, hidden, width) in layers.items()
        for gemm, n, k in (("w13", 2 * width, hidden), ("w2", hidden, width))
        for m in ms or MOE_MS
    ]


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    found = next((config[name] for name in names if config.get(name)), None)
    if not isinstance(found, int):
        raise ValueError(f"model config: expected one of {', '.join(names)}, an integer, got {found!r}")
    return found
