"""What a GEMM multiplies: the packed weight's format and the problem. Frozen dataclasses; no torch, no CUDA."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import Any

from jitgemm.dtypes import DTYPES, LHS_TYPES, REAL_TYPES
from jitgemm.kernel.codes import CODES, GROUP_SIZES, Decoder, Inner, Order, every_order

BLOCK_K = 128
"""k per weight record and per swizzled activation row: 128 bytes of 8-bit activations."""
STRIP_ROWS = 64
"""Rows of n per weight record: wgmma's M."""
K_ALIGNMENT = 16
"""What k is a multiple of: copies of a tile of activations ask for rows that start at 16 bytes. A record holds zeros
behind k, and copies fill activations up with zeros."""
_GROUP_NAMES = {0: "channel", **{size: f"g{size}" for size in GROUP_SIZES}}
LHS_GROUP = BLOCK_K
"""k that share a scale of activations where they have one per token and group: a record's."""
ROTATION = 128
"""k that a Hadamard matrix rotates together, of weights and activations."""
MAX_ROWS = 2**31 - 1
"""Largest m and n: tile coordinates are 32-bit."""
SUMS = ("f32", "f16", "exact")
F16_OPERANDS = "e4m3 with a scale per token, and MXFP4 or int4 in groups without offsets"
"""What may be added up in f16, for messages."""
CORRECTION_GROUPS = 32
"""Groups whose corrections share a block of k."""
CORRECTION_TYPES = ("bf16", "fp16")
"""Types of corrections' factors, and of the digits of sums that they multiply."""
Correction = tuple[str, int]
"""Type and group size of corrections."""
TABLE_SIZES = (64, 256, 1024)
"""Experts that a grouped kernel's table holds, one size a kernel."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def correction_blocks(k: int, group_size: int) -> int:
    """Blocks of k that a weight with corrections, and its activations, have behind those of codes."""
    return ceil_div(ceil_div(k, group_size), CORRECTION_GROUPS)


def lhs_columns(k: int, correction: Correction | None) -> int:
    """Columns of activations of k: their codes, and with corrections the sums of its groups.

    ::

        [0, k)                      codes; zeros up to a multiple of 128
        128 for each 32 groups      32 high digits of their sums, then 32 low ones, of the type, two bytes each

    A sum is its high digit plus its low one, exactly; behind the last group they are zeros.
    """
    if correction is None:
        return k
    return BLOCK_K * (ceil_div(k, BLOCK_K) + correction_blocks(k, correction[1]))


@dataclass(frozen=True)  # with a dict, which keeps what is computed once
class WeightFormat:
    """How a packed weight is laid out; see `record_bytes` for the picture.

    Attributes:
        group_size: 32, 64, 128 or 256 values of k share a scale; 0 means one scale per row of n (per channel).
        zero_point: False for signed codes -8..7, True for codes 0..15 minus an integer zero point per group.
        scale_type: "fp32", "bf16" or "fp16", as given by the checkpoint; never converted.
        order: the codes' order. Of int4 "any" decodes for both types of activations and holds all sixteen codes; "e4m3"
            (which has no code for -8) and "s8" decode for that one only, in half the instructions. 8-bit codes have one
            order each, "e4m3" or "s8".
        offset: a value of the scale's type per group is added to its scaled weights.
        code: name of the `Code`; "e4m3" and "int8" have no zero points and no offsets.
        uniform_strip_scale: the 64 rows of every strip have the same scales, as those of a block of 128 x 128 have; of
            8 bits in groups of 128 only. The record is the same.
        correction: "", or the type, "bf16" or "fp16", of factors in blocks behind those of the codes, which stand for
            zero points or offsets: codes are in the order "s8" and signed, and records hold neither
            (`jitgemm.weight.correction`).
    """

    group_size: int
    zero_point: bool
    scale_type: str
    order: str = "any"
    offset: bool = False
    code: str = "int4"
    uniform_strip_scale: bool = False
    correction: str = ""

    def __post_init__(self) -> None:
        code = CODES.get(self.code)
        if code is None:
            raise ValueError(f"code: expected one of {tuple(CODES)}, got {self.code!r}")
        order = code.order(self.order)
        if self.group_size not in code.group_sizes:
            raise ValueError(
                f"group_size: expected 0 (per channel) or one of {code.group_sizes[1:]}, got {self.group_size!r}"
            )
        if self.scale_type not in code.scale_types:
            raise ValueError(f"scale_type: expected one of {code.scale_types}, got {self.scale_type!r}")
        if self.correction and self.correction not in CORRECTION_TYPES:
            raise ValueError(f"correction: expected '' or one of {CORRECTION_TYPES}, got {self.correction!r}")
        if self.correction and (not code.offsets or self.order != "s8" or not self.group_size):
            got = f"{self.code}, {self.order!r}, {self.group_size}"
            raise ValueError(f"correction: expected int4 in order 's8' and in groups, got {got}")
        if self.correction and self.zero_point and self.offset:
            raise ValueError("correction: expected zero points or offsets, got both")
        if self.zero_point and not self.correction and not order.zero_decoders:
            raise ValueError(
                f"order: expected {code.orders[0].name!r} with zero points, got {self.order!r}"
                if code.orders[0].zero_decoders
                else f"zero_point: expected none with code {self.code!r}"
            )
        if self.offset and not code.offsets:
            raise ValueError(f"offset: expected none with code {self.code!r}")
        if self.offset and not self.group_size:
            raise ValueError("offset: expected none per channel; express it as groups that repeat it")
        if self.uniform_strip_scale and not (code.uniform_strip_scale and self.group_size == BLOCK_K):
            raise ValueError(
                f"uniform_strip_scale: expected 8 bits in groups of {BLOCK_K}, got {code.bits}, {self.group_size}"
            )

    @property
    def name(self) -> str:
        """One text for all of it, which `format_named` reads: "g128-bf16-any", "channel-fp32-z", "w8-g128-fp32-s8".

        Exported programs hold it with the packed bytes: a format that packs to other bytes takes another name.
        """
        # Found by comparing: a compiler that traces this may know the group size as a symbol only.
        group = [name for size, name in _GROUP_NAMES.items() if size == self.group_size][0]
        prefix = CODES[self.code].prefix
        parts = [*([prefix] if prefix else []), group, self.scale_type]
        parts += ["z"] if self.zero_point else []
        parts += ["o"] if self.offset else []
        parts += ["b"] if self.uniform_strip_scale else []
        parts += [f"x{self.correction}"] if self.correction else []
        return "-".join(parts if self.zero_point else [*parts, self.order])

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return CODES[self.code].bits

    @property
    def _order(self) -> Order:
        return CODES[self.code].order(self.order)

    @property
    def typed(self) -> bool:
        """Whether codes are values of the activations' type, which wgmma reads from shared memory as they are."""
        return CODES[self.code].lhs_type is not None

    @property
    def tuned(self) -> bool:
        """Whether the order is another than `for_any_values`'s."""
        return self.order != CODES[self.code].orders[0].name

    @property
    def f16_sums(self) -> bool:
        """Whether groups of codes times e4m3 may be added up in f16 (`KernelSpec.sums`). A base a row would gain
        nothing (docs/notes/mxfp4.md)."""
        groups = CODES[self.code].f16_sums and self.group_size > 0
        return groups and not self.offset_rows and "e4m3" in self.lhs_types

    @property
    def sums_by_parts(self) -> bool:
        """Whether groups of codes times int8 may be added up by parts (`KernelSpec.sums`): 4 bits without offsets, one
        group or less a record, in int8's own order or with zero points, whose sums are large next to the rounding."""
        return not self.offset_rows and self.scale_rows == 1 and self.parts_times > 0

    @property
    def parts_times(self) -> int:
        """How often operands are the codes where int8's sums are added up by parts; 0 where they cannot be."""
        return self.decoder("s8").parts_times if "s8" in self.lhs_types else 0

    @property
    def long_runs(self) -> bool:
        """True if kernels may add up 256 k in tensor cores (`promote_records`): e4m3 times codes with a base a row."""
        return not self.group_size and self._any_decoder.long_runs

    def longer_runs(self, block: bool) -> tuple[int, ...]:
        """Records that kernels may add up in a run of the tensor cores besides one; block: x has a scale for 128 k."""
        return (2,) if self.long_runs and not block else ()

    @property
    def decodes_slowly(self) -> bool:
        """Whether decoding a record takes about as long as memory takes to bring it."""
        return self._order.slow

    @property
    def complete(self) -> bool:
        """Whether the order holds every code."""
        return self._order.complete

    @property
    def row_sums(self) -> bool:
        """Whether packed weights have the sums of their rows."""
        return CODES[self.code].row_sums

    @property
    def _any_decoder(self) -> Decoder:
        """Of any activations, for what is the same for all."""
        return next(iter(self._order.decoders.values()))

    def decoder(self, lhs: str) -> Decoder:
        """How kernels decode it for activations of this type."""
        return (self._order.zero_decoders if self.zero_rows else self._order.decoders)[lhs]

    @property
    def lhs_types(self) -> tuple[str, ...]:
        """Types of activations that the codes meet."""
        return tuple(self._order.decoders)

    def why_lhs(self, name: str = "it") -> str:
        """Why the codes of a weight of this name meet no other activations than `lhs_types`, for messages."""
        orders = f"as {name} is" if self.typed else f"for which {name} was packed (lhs_dtype of pack_w4)"
        return CODES[self.code].why_lhs or orders

    @property
    def max_int8_k(self) -> int:
        """Largest k of int8 activations: sums per channel stay in int32."""
        return MAX_ROWS if self.group_size else self._order.max_channel_k

    @property
    def scales_at(self) -> int:
        """Byte of a record at which its scales start, behind its codes."""
        return STRIP_ROWS * BLOCK_K * self.bits // 8

    @cached_property
    def scale_rows(self) -> int:
        """Rows of 64 scales in one record: groups that start in 128 k, at least 1; none per channel."""
        return max(1, BLOCK_K // self.group_size) if self.group_size else 0

    @property
    def zero_rows(self) -> int:
        """Rows of 64 zero points in one record; one even per channel, so that decode finds it where the codes are."""
        return max(1, self.scale_rows) if self.zero_point and not self.correction else 0

    @property
    def offset_rows(self) -> int:
        """Rows of 64 offsets in one record."""
        return self.scale_rows if self.offset and not self.correction else 0

    @cached_property
    def offsets_at(self) -> int:
        """Byte of a record at which its offsets start."""
        return self.scales_at + STRIP_ROWS * DTYPES[self.scale_type].bytes * self.scale_rows

    @cached_property
    def inner(self) -> Inner | None:
        """The numbers that records hold behind the codes, if they hold some."""
        inner = CODES[self.code].inner
        return None if inner is None or (inner.spared and inner.spared == self.group_size) else inner

    @property
    def by_values(self) -> bool:
        """Whether another weight's values may ask for another format where this one is had."""
        spared = CODES[self.code].inner is not None and CODES[self.code].inner.spared  # type: ignore[union-attr]
        return not self.complete or bool(self.correction) or bool(spared and self.inner)

    @property
    def terms(self) -> int:
        """Operands of wgmma that a code becomes."""
        return self._any_decoder.terms

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables in shared memory that kernels decode by."""
        return self._any_decoder.table_bytes if self.inner else 0

    @property
    def tier(self) -> str:
        """Which scales a weight has of those that its values decide, or how else codes become operands, in words."""
        per = f"a row and {self.group_size} k" if self.group_size else "a row"
        return self._order.tier.format(scale="base" if self.inner else "scale", per=per)

    # For commands and the selector.

    @property
    def powers(self) -> bool:
        """Whether it is of MXFP4."""
        return self.code == "e2m1"

    @property
    def title(self) -> str:
        """`Code.title`, and its tier where it has one; "" for codes that nobody needs told."""
        return f"{CODES[self.code].title}{' with ' if self.tier else ''}{self.tier}"

    @cached_property
    def zeros_at(self) -> int:
        """Byte of a record at which its zero points start."""
        return self.offsets_at + STRIP_ROWS * DTYPES[self.scale_type].bytes * self.offset_rows

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one packed record of 64 rows x 128 k, S of them for each scale and offset.

        ::

            0        scales_at                 offsets_at                  zeros_at
            | codes  | scales [scale_rows][64] | offsets [offset_rows][64] | zeros uint8 [zero_rows][64] |
                                                                           | or `inner` [64][row_bytes] |
        """
        return self.zeros_at + STRIP_ROWS * (self.zero_rows + (self.inner.row_bytes if self.inner else 0))

    @property
    def stored(self) -> WeightFormat:
        """What the records of codes hold: of a weight with corrections, a symmetric one's."""
        return replace(self, zero_point=False, offset=False, correction="") if self.correction else self

    @property
    def lhs_sums(self) -> Correction | None:
        """`Weight.correction`: of factors, the type and the group size; None without."""
        return (self.correction, self.group_size) if self.correction else None

    def kblocks(self, k: int) -> int:
        """Records of a strip: of k codes, and of their corrections."""
        return ceil_div(k, BLOCK_K) + (correction_blocks(k, self.group_size) if self.correction else 0)

    def to_dict(self) -> dict[str, Any]:
        """Field -> value; order and code as "codes" and "bits", which cache entries and commands have."""
        names = {"order": ("codes", self.order), "code": ("bits", self.bits)}
        return dict(names.get(name, (name, value)) for name, value in asdict(self).items())

    @property
    def for_any_values(self) -> WeightFormat:
        """The same apart from what depends on a weight's values: codes in the order that holds all, and scales that
        rows need not share. Corrections have one order."""
        return replace(
            self, order="s8" if self.correction else CODES[self.code].orders[0].name, uniform_strip_scale=False
        )

    @property
    def kernel_format(self) -> WeightFormat:
        """The format as kernels have it: they read scales per channel by a run-time type, those of strips that share
        them (`KernelSpec.tokens_as_m`) lie where others do; corrections are the same for zero points and offsets."""
        scale_type, corrects = self.scale_type if self.group_size else "fp32", bool(self.correction)
        zero_point, offset = self.zero_point and not corrects, self.offset and not corrects
        return replace(self, scale_type=scale_type, uniform_strip_scale=False, zero_point=zero_point, offset=offset)


def check_sums(sums: object) -> str:
    """What kernels may add up in, one of SUMS."""
    if not isinstance(sums, str) or sums not in SUMS:
        raise (ValueError if isinstance(sums, str) else TypeError)(f"sums: expected one of {SUMS}, got {sums!r}")
    return sums


@cache
def format_named(name: str) -> WeightFormat:
    """The format whose `name` this is. ValueError for any other text."""
    match = re.fullmatch(r"(?:(\w+)-)?(?:g(\d+)|channel)-(\w+?)(-z)?(-o)?(-b)?(?:-x(bf16|fp16))?(?:-(\w+))?", name)
    parts: tuple[Any, ...] = match.groups() if match else 8 * (None,)
    prefix, group_size, scale_type, zero_point, offset, strip, correction, order = parts
    code = next((c for c, o in every_order() if c.prefix == (prefix or "") and o.name == (order or "any")), None)
    if match is None or (zero_point is None) == (order is None) or code is None:
        raise ValueError(
            f"format: expected the name of a WeightFormat, such as 'g128-bf16-any', got {name!r}; if a program was "
            "exported with it, pack the weight and export again"
        )
    return WeightFormat(
        int(group_size or 0), zero_point is not None, scale_type, order or ("s8" if correction else "any"),
        offset is not None, code.name, strip is not None, correction or "",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """One GEMM: out[m, n] = lhs[m, k] · rhs[n, k]ᵀ, with out's type and whether a row's bits may depend on m.

    With `experts` a grouped one: each of the m rows is multiplied by one of so many weights [n, k]. `lhs_group` is 0
    where a token has one scale, and `LHS_GROUP` where it has one for as many k; with `lhs_e8m0` those are packed
    exponents (`jitgemm.gemm.problem`). `sums` is "f16" where kernels may add up in f16, "exact" where they may
    not add up int8's groups by parts (`KernelSpec.sums`), else "f32". `rows_vary` tells that m is what one rank's
    experts get on average, of tokens that choose among more. `in_order`: one warpgroup adds up k, in order, in fp32.
    """

    m: int
    n: int
    k: int
    lhs: str
    format: WeightFormat
    out: str = "bf16"
    batch_invariant: bool = False
    experts: int = 0
    lhs_group: int = 0
    lhs_e8m0: bool = False
    sums: str = "f32"
    rows_vary: bool = False
    in_order: bool = False

    def __post_init__(self) -> None:
        check_sums(self.sums)
        if self.sums == "f16" and not (self.format.f16_sums and self.lhs == "e4m3" and not self.lhs_group):
            raise ValueError(f"sums: expected 'f32' except for {F16_OPERANDS}, got 'f16'")
        if self.sums == "exact" and self.lhs != "s8":
            raise ValueError(f"sums: expected 'exact' for int8 activations alone, got it with {self.lhs}")
        if self.lhs_group not in (0, LHS_GROUP):
            raise ValueError(f"lhs_group: expected {LHS_GROUP}, or 0 for a scale per token, got {self.lhs_group}")
        if self.lhs_e8m0 and not self.lhs_group:
            raise ValueError(f"lhs_e8m0: expected lhs_group {LHS_GROUP} with it, got {self.lhs_group}")
        if not 0 <= self.experts <= TABLE_SIZES[-1]:
            raise ValueError(f"experts: expected 1 to {TABLE_SIZES[-1]}, or 0 for a dense GEMM, got {self.experts}")
        integers = self.lhs == "s8" and not self.lhs_group and not self.format.group_size
        if self.out not in (types := (*REAL_TYPES, "s32") if integers else REAL_TYPES):
            raise ValueError(f"out: expected one of {types}, got {self.out!r}")
        if not 1 <= self.m <= MAX_ROWS:
            raise ValueError(f"m: expected 1 to {MAX_ROWS}, got {self.m}")
        if not 8 <= self.n <= MAX_ROWS or self.n % 8:
            raise ValueError(f"n: expected a positive multiple of 8 up to {MAX_ROWS}, got {self.n}")
        if self.k < K_ALIGNMENT or self.k % K_ALIGNMENT:
            raise ValueError(f"k: expected a positive multiple of {K_ALIGNMENT}, got {self.k}")
        if self.lhs not in LHS_TYPES:
            raise ValueError(f"lhs: expected one of {LHS_TYPES}, got {self.lhs!r}")
        if self.lhs not in self.format.lhs_types:
            raise ValueError(f"format: expected order 'any' or {self.lhs!r}, as lhs is, got {self.format.order!r}")
        if self.lhs_group and self.format.correction:
            raise ValueError(f"lhs_group: expected 0 with a weight's correction, got {self.lhs_group}")
        if self.lhs == "s8" and not self.lhs_group and self.k > (most := self.format.max_int8_k):
            raise ValueError(f"k: expected at most {most} for int8 with scales per channel, got {self.k}")

    @property
    def lhs_columns(self) -> int:
        """Columns of the activations as kernels multiply them, corrections' sums included."""
        return lhs_columns(self.k, self.format.lhs_sums)

    @property
    def table_size(self) -> int:
        """`KernelSpec.experts`: the least table that holds the experts, so that models share kernels; 0 for none."""
        return next(size for size in (0, *TABLE_SIZES) if self.experts <= size)


def tuned_order(lhs: str, group_size: int, zero_point: bool, k: int, code: str = "int4") -> str:
    """`WeightFormat.order` that decodes fastest for these activations, if it holds the codes (e4m3's has no -8)."""
    common, *tuned = CODES[code].orders
    for order in tuned:
        fits = lhs != "s8" or group_size or k <= order.max_channel_k
        if fits and lhs in order.decoders and (order.zero_decoders or not zero_point):
            return order.name
    return common.name
