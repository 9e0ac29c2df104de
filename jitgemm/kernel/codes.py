"""What a weight's codes are: one entry a code, which formats, kernels, the selector and the error bound ask.

No torch, no CUDA. `jitgemm.weight.codes` has the bytes and numbers, under the same names. "Adding a weight format" in
docs/extending.md lists what else a code needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jitgemm.dtypes import REAL_TYPES

GROUP_SIZES = (32, 64, 128, 256)
"""Group sizes with a scale per group. Anything that covers all of k is per channel, written 0."""
EXPONENT_GROUP = 32
"""k that share an exponent of MXFP4: a step of wgmma's, and a block of the OCP MX formats."""
SCALE_GROUP = 16
"""k that share a scale of NVFP4: a block of it."""
FACTOR_GROUP = 128
"""k that share a factor of two levels: a record's, and a group of QServe's."""


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """How a kernel turns codes into operands of wgmma.

    Attributes:
        codec: C++ type, of include/jitgemm/gemm/codec.cuh or of `source`.
        cost: which of `jitgemm.select.cost.DECODE_CYCLES` it takes.
        source: C++ that defines the codec, where codec.cuh does not.
        f16_codec: the C++ type for sums in f16, where it is another.
        parts_codec: the C++ type for sums by parts, where it is another.
        parts_times: how often its operands are the codes with sums by parts; 0 where there are no such kernels.
        operand: the type of operands, where it is not the activations'.
        terms: operands of wgmma that a code becomes. It is their sum, as the products with each are added up.
        table_bytes: of shared memory, for the tables of the numbers inside records (`Code.inner`).
        registers: of a thread that it takes more than others (`jitgemm.select.legal`).
        long_runs: sums of 256 k may stay in the tensor cores, per channel (`promote_records`).
    """

    codec: str
    cost: str
    source: str = ""
    f16_codec: str = ""
    parts_codec: str = ""
    parts_times: int = 0
    operand: str = ""
    terms: int = 1
    table_bytes: int = 0
    registers: int = 0
    long_runs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """An order of a code's bytes.

    Attributes:
        name: in names of formats, which exported programs hold.
        number: in state dicts. Append only; different from those of all codes of as many bits.
        decoders: by the type of the activations that the order serves.
        zero_decoders: the same with zero points; empty where the order has none.
        mark: in kernels' labels, behind the type of activations.
        max_channel_k: largest k of int8 activations with one scale per row, whose sums stay in int32.
        slow: decoding a record takes about as long as memory takes to bring it.
        complete: holds every code.
        tier: how its records hold scales, for people; with {scale} and {per} where the group size says more.
    """

    name: str
    number: int
    decoders: Mapping[str, Decoder]
    zero_decoders: Mapping[str, Decoder] = field(default_factory=dict)
    mark: str = ""
    max_channel_k: int = 2**31 - 1
    slow: bool = False
    complete: bool = True
    tier: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Inner:
    """Numbers that records hold behind the codes, by which decoding multiplies them.

    Attributes:
        group: k that share one, as those of the scales that a weight is packed from do.
        most: the largest.
        row_bytes: of a record's row, for those of 128 k.
        spared: the group size whose own scales say all, so that records hold none; 0 where there is no such size.
    """

    group: int
    most: int
    row_bytes: int
    spared: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """What a weight's codes are.

    Attributes:
        name: `WeightFormat.code`.
        bits: of a code, 4 or 8.
        orders: the first holds every code and meets all activations that the others meet.
        largest: largest magnitude of a code minus its zero point; None for values of a type, which span too many.
        title: for people; "" for what goes without saying.
        prefix: in names of formats.
        lhs_type: the type of activations whose values the codes are. wgmma reads them from shared memory as they are;
            None for codes to decode.
        row_sums: packed weights have the sums of their rows, which zero points of int8 activations need.
        offsets, uniform_strip_scale: formats may have them.
        group_sizes, scale_types: what formats may have; 0 is one scale per row.
        inner: numbers that records hold behind the codes: MXFP4's exponents, NVFP4's scales, factors with zero points
            of two levels. None for none.
        f16_sums: groups may be added up in f16 with e4m3 activations.
        faster: by the type of activations, what is faster in prefill than groups of these codes with it.
        why_lhs: why its values go with one type of activations alone, for messages; "" where orders decide.
    """

    name: str
    bits: int
    orders: tuple[Order, ...]
    largest: float | None
    title: str = ""
    prefix: str = ""
    lhs_type: str | None = None
    row_sums: bool = True
    offsets: bool = False
    uniform_strip_scale: bool = False
    group_sizes: tuple[int, ...] = (0, *GROUP_SIZES)
    scale_types: tuple[str, ...] = REAL_TYPES
    inner: Inner | None = None
    f16_sums: bool = False
    faster: Mapping[str, str] = field(default_factory=dict)
    why_lhs: str = ""

    @property
    def least_group(self) -> int:
        """What group sizes of a weight before packing are multiples of."""
        return min(GROUP_SIZES) if self.inner is None else self.inner.group

    def order(self, name: str) -> Order:
        """The order of this name. ValueError for any other."""
        for order in self.orders:
            if order.name == name:
                return order
        raise ValueError(f"order: expected one of {tuple(order.name for order in self.orders)}, got {name!r}")


CODES: dict[str, Code] = {}
"""By name."""


def every_order() -> Iterator[tuple[Code, Order]]:
    """The orders of all codes."""
    for code in CODES.values():
        for order in code.orders:
            yield code, order


def numbered_orders() -> dict[tuple[int, int], tuple[Code, Order]]:
    """Every order with its code, by the bits of codes and the order's number."""
    return {(code.bits, order.number): (code, order) for code, order in every_order()}


def typed_code(lhs: str) -> str:
    """The code whose values are of this type of activations: "e4m3", or "int8" for "s8"."""
    return next(code.name for code in CODES.values() if code.lhs_type == lhs)


def register(code: Code) -> None:
    """Adds a code. ValueError if a name, label or number of its is taken."""

    def claims(code: Code) -> set[tuple[str, str | int]]:
        claimed: set[tuple[str, str | int]] = {("name", code.name)}
        for order in code.orders:
            claimed |= {(f"order {order.name} of prefix", code.prefix), (f"number of {code.bits} bits", order.number)}
            claimed |= {(f"label of {lhs}", order.mark) for lhs in order.decoders}
        return claimed

    for other in CODES.values():
        if taken := claims(code) & claims(other):
            raise ValueError(f"code: expected names, labels and numbers of its own, got those of {other.name}: {taken}")
    CODES[code.name] = code


_INT4_ANY = Order(
    "any",
    0,
    {"e4m3": Decoder("Int4Codec<E4m3Codes, false>", "signed"), "s8": Decoder("Int4Codec<S8Codes, false>", "any")},
    {
        "e4m3": Decoder("Int4Codec<E4m3ZeroPointCodes, true>", "any"),
        "s8": Decoder(
            "Int4Codec<S8ZeroPointCodes, true>",
            "any",
            parts_codec="Int4Codec<S8ZeroPointCodesOf<8>, true>",
            parts_times=8,
        ),
    },
    max_channel_k=2**20 - 16,  # products of up to 128 * 16
    slow=True,
)
# Sign and magnitude, which has no code for -8.
_SIGN_MAGNITUDE = {"e4m3": Decoder("Int4Codec<E4m3SignMagnitudeCodes, false>", "own")}
_INT4_E4M3 = Order("e4m3", 1, _SIGN_MAGNITUDE, mark="fast", complete=False)
# Its sums are 16 times as large.
_TWOS_COMPLEMENT = {"s8": Decoder("Int4Codec<S8TwosComplementCodes, false>", "own", parts_times=16)}
_INT4_S8 = Order("s8", 2, _TWOS_COMPLEMENT, mark="fast", max_channel_k=2**16)
_E4M3 = Order("e4m3", 1, {"e4m3": Decoder("ByteCodec<false>", "bytes")}, mark="w8")
# Products of up to 128 * 128.
_INT8 = Order("s8", 2, {"s8": Decoder("ByteCodec<true>", "bytes")}, mark="w8", max_channel_k=2**17 - 16)

# 1 is the ninth of fifteen powers of two for which all of a code's values are e4m3's.
_EXPONENTS = Inner(EXPONENT_GROUP, most=14, row_bytes=2, spared=EXPONENT_GROUP)
# Without the registers, tiles of 64 x 256 and 192 x 128 spill 70 to 116 bytes.
_BY_TABLE = Decoder("E2m1Codec", "table", f16_codec="E2m1LowCodec", table_bytes=128, registers=8, long_runs=True)
_E2M1 = Order("e2m1", 4, {"e4m3": _BY_TABLE}, mark="mx", slow=True, tier="a {scale} for {per}")
_NVFP4_SCALES = Inner(SCALE_GROUP, most=126, row_bytes=8)  # bytes of e4m3s
# Without the registers, tiles of 64 x 256, 112 x 192 and 192 x 128 spill 160 to 344 bytes.
_E5M2_TERMS = Decoder("Nvfp4Codec", "terms", operand="e5m2", terms=2, table_bytes=2048, registers=16)
_NVFP4 = Order("nvfp4", 5, {"e4m3": _E5M2_TERMS}, mark="nv", slow=True, tier="2 e5m2 terms a code")
# Two e4m3s, next to a base of each row: holds scales that are near one another.
_E4M3_TERMS = Decoder("Nvfp4NearCodec", "near", terms=2, registers=16)
_NEAR = Order("near", 6, {"e4m3": _E4M3_TERMS}, mark="nvnear", slow=True, complete=False, tier="2 e4m3 terms a code")
# Codes minus zero points times their group's factor are any integers of 8 bits: products of up to 128 * 128.
_FACTORS = Inner(FACTOR_GROUP, most=127, row_bytes=2)  # each with its product with the zero point
_TWO_LEVEL = Order(
    "two_level", 7, {"s8": Decoder("TwoLevelCodec", "any")}, mark="tl", max_channel_k=2**17 - 16, slow=True
)

_FASTER = {"s8": "int8 with float scales in groups: two levels or e4m3 are faster in prefill"}
_INT4 = Code("int4", 4, (_INT4_ANY, _INT4_E4M3, _INT4_S8), largest=16.0, offsets=True, f16_sums=True, faster=_FASTER)
register(_INT4)
register(
    Code("e4m3", 8, (_E4M3,), largest=None, prefix="w8", lhs_type="e4m3", row_sums=False, uniform_strip_scale=True)
)
register(Code("int8", 8, (_INT8,), largest=None, prefix="w8", lhs_type="s8", uniform_strip_scale=True))
register(
    Code(
        "e2m1", 4, (_E2M1,), largest=None, title="MXFP4", prefix="mx", row_sums=False, group_sizes=(0, 32, 128),
        scale_types=("fp32", "bf16"), inner=_EXPONENTS, f16_sums=True,
        why_lhs="as no integers of 8 bits hold MXFP4's codes times their groups' powers of two",
    )
)  # fmt: skip
# Its scale per channel is the tensor's.
register(
    Code(
        "nvfp4", 4, (_NVFP4, _NEAR), largest=None, title="NVFP4", prefix="nv", row_sums=False, group_sizes=(0,),
        scale_types=("fp32",), inner=_NVFP4_SCALES,
        why_lhs="as no integers of 8 bits hold NVFP4's codes times their groups' scales",
    )
)  # fmt: skip
register(
    Code(
        "two_level", 4, (_TWO_LEVEL,), largest=None, title="two levels", prefix="tl", group_sizes=(0,), inner=_FACTORS,
        why_lhs="as no e4m3 holds the integers of 8 bits that codes times their groups' factors are",
    )
)  # fmt: skip
