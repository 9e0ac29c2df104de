"""A code with numbers inside its records, out of the package: NVFP4's frame, e4m3 scales for 16 k under an fp32 one,
around sixteen other values. Its description, its codec, what it needs of torch and its reader stand here, and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import builders
import pytest
import torch
from emulator.launch import emulate
from marks import emulated

import jitgemm
from jitgemm.checkpoint import formats
from jitgemm.checkpoint.canonical import CanonicalWeight, TensorInfo
from jitgemm.checkpoint.format import Format, Headers, Scheme
from jitgemm.checkpoint.layouts import G, K, N, TensorLayout, stored
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.kernel.codes import CODES, Code, Decoder, Inner, Order, register
from jitgemm.kernel.formats import WeightFormat, format_named
from jitgemm.nn.layers.shard_weight import part_of_weight, unpacked
from jitgemm.nn.warm.warm import kernels
from jitgemm.weight import layout, nvfp4
from jitgemm.weight.codes import CODE_OPS, UNSIGNED, CodeOps, RowParts, Stored, Unpacked
from jitgemm.weight.codes import register as register_ops

VALUES = (-15.0, -11.0, -8.0, -6.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 7.0, 9.0, 13.0)
MOST = 0x5E
"""Byte of the largest scale, 28, of which 15 times is an e4m3. Products with others have eight bits: two e4m3s."""

CODEC = """\
struct TableCodec {
    static constexpr bool kIntegerSums = false, kSharedWeights = false, kZeroPoint = false;
    static constexpr float kOutputScale = 1.0f;
    static constexpr u32 kCodeBytes = kStripRows * kBlockK / 2, kMultiplierBytes = kStripRows * kBlockK / 16;
    static constexpr u32 kOne = 0x38383838u, kTableBytes = 0, kTerms = 2;

    __device__ __forceinline__ static void load(u32 (&high)[2][4], u32 (&low)[2][4], u32 record, u32 scales, u32 half,
                                                const Position& position) {
        const Nvfp4Half own(record, scales, half, position);
#pragma unroll
        for (u32 s = 0; s < 2; ++s)
#pragma unroll
            for (u32 row = 0; row < 2; ++row)
#pragma unroll
                for (u32 set = 0; set < 2; ++set) {
                    const u32 word = own.words[2 * s + row] >> 4 * set, at = row + 2 * set;
                    terms(high[s][at], low[s][at], word, own.bytes[row] >> (2 * s + set) * 8 & 0xFF);
                }
    }

    // Times 2^-120, so that the upper bits of an fp32 are an e4m3's; an e4m3's bits as f16 are 2^-8 of it.
    __device__ __forceinline__ static void terms(u32& high, u32& low, u32 word, u32 scale) {
        high = low = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 code = word >> 8 * i;
            const u32 value = (code & 8 ? permuted(%s, %s, code & 7) : permuted(%s, %s, code & 7)) & 0xFF;
            const float2 both = f16x2_to_floats(scale << 7 | (value & 0x80) << 24 | (value & 0x7F) << 23);
            const float product = both.x * 0x1p-104f * both.y;
            const u32 upper = __float_as_uint(product) & 0xFFF00000u;
            high |= byte(upper) << 8 * i;
            low |= byte(__float_as_uint(product - __uint_as_float(upper))) << 8 * i;
        }
    }
    __device__ __forceinline__ static u32 byte(u32 bits) { return bits >> 24 & 0x80 | bits >> 20 & 0x7F; }
};
""" % tuple(
    f"{word & 0xFFFFFFFF}u" for word in torch.tensor(VALUES).to(torch.float8_e4m3fn).view(torch.int32)[[2, 3, 0, 1]]
)
DECODER = Decoder("TableCodec", "terms", CODEC, terms=2, registers=16)
CODE = Code(
    "table", 4, (Order("table", 9, {"e4m3": DECODER}, mark="t16", slow=True),), largest=None, prefix="t16", row_sums=False,
    group_sizes=(0,), scale_types=("fp32",), inner=Inner(16, MOST, row_bytes=8), why_lhs="as its products are no integers",
)  # fmt: skip


class TableOps(CodeOps):
    given_scales, row_scales, needs_row_scale = torch.float8_e4m3fn, ("fp32",), True

    def values(self, q: torch.Tensor) -> torch.Tensor:
        return torch.tensor(VALUES, device=q.device)[q.int()]

    def no_scales(self, scale: torch.Tensor) -> tuple[torch.Tensor, str, torch.Tensor]:
        return scale > MOST, "numbers of 0 to 28", scale.view(torch.float8_e4m3fn)

    def pack(self, weight: Any, lhs_dtype: torch.dtype | None, correction: bool | None) -> jitgemm.W4Weight:
        assert not bool(self.no_scales(weight.scale)[0].any())
        format, (n, k) = WeightFormat(0, False, "fp32", "table", code=self.name), weight.q.shape
        blocks = weight.q.new_empty(layout.strips_of(n), layout.kblocks_of(k), format.record_bytes)
        parts: dict[str, Any] = dict(k=k, canonical=False, format=format, inner=weight.scale)
        layout.pack_records(blocks, weight.q, weight.row_scale, None, None, **parts)
        rows = layout.pack_channel_scale(weight.row_scale[:, None])
        return jitgemm.W4Weight(blocks, rows, n, k, k, format)

    def to_bytes(self, inner: torch.Tensor) -> torch.Tensor:
        return nvfp4.to_bytes(inner)

    def from_bytes(self, bytes: torch.Tensor, format: WeightFormat) -> torch.Tensor:
        return nvfp4.from_bytes(bytes).contiguous().view(torch.float8_e4m3fn)

    def operands(self, stored: Stored) -> RowParts:
        scales = stored.inner.float().repeat_interleave(16, 1)[:, : stored.q.shape[1]]
        return RowParts(self.values(stored.q) * scales, *stored[1:4])

    def unpacked(self, stored: Stored, format: WeightFormat) -> Unpacked:
        return Unpacked(stored.q, stored.inner, None, row_scale=stored.scale)

    def summands(self, stored: Stored, format: WeightFormat) -> tuple[torch.Tensor, ...]:
        products = self.operands(stored).q.double()
        return nvfp4.upper(products, 4), products - nvfp4.upper(products, 4)


class TableFormat(Format):
    """`codes` uint8 [n, k], `scales` e4m3 [n, k / 16], `whole` fp32 [1]: weight = VALUES[codes] * scales * whole."""

    name, methods, cuts = "table", ("table",), True

    def detect(self, names: Mapping[str, TensorInfo], config: Any) -> bool:
        return {"codes", "scales", "whole"} <= set(names)

    def scheme(self, config: Any, prefix: str = "", headers: Headers = None) -> Scheme:
        return Scheme(self.name, code="table", group_size=16)

    def tensors(self, scheme: Scheme, k: int | None = None) -> dict[str, TensorLayout]:
        scales = stored(torch.float8_e4m3fn, N, G)
        return {"codes": stored(torch.uint8, N, K), "scales": scales, "whole": stored(torch.float32)}

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        q, scale = tensors["codes"], tensors["scales"].view(torch.uint8)
        return CanonicalWeight(q, scale, group_size=16, code="table", row_scale=tensors["whole"].expand(len(q)))


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    register(CODE)
    register_ops(TableOps("table", orders={"table": UNSIGNED}))
    formats.register(TableFormat())
    yield
    del CODES["table"], CODE_OPS["table"]
    formats.FORMATS.pop()


def file(n: int = 72, k: int = 416) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    scales = torch.randint(0, MOST + 1, (n, k // 16), generator=g, dtype=torch.uint8)
    codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    return {"codes": codes, "scales": scales.view(torch.float8_e4m3fn), "whole": torch.tensor([0.03])}


def dense(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    scales = (tensors["scales"].double() * tensors["whole"].double()).repeat_interleave(16, 1)
    return torch.tensor(VALUES).double()[tensors["codes"].int()] * scales


def packed(n: int = 72, k: int = 416) -> jitgemm.W4Weight:
    tensors = {f"l.{name}": tensor for name, tensor in file(n, k).items()}
    return jitgemm.load(tensors, "l", config={"quant_method": "table"}, device="cpu")


def test_it_is_read_packed_and_unpacked_bit_for_bit():
    tensors, weight = file(), packed()
    q, scale, zero = found = weight.unpack()
    assert torch.equal(q, tensors["codes"]) and builders.same_bits(scale, tensors["scales"]) and zero is None
    assert torch.equal(found.row_scale, tensors["whole"].expand(72, 1))
    assert all(torch.equal(each.dequantize(), dense(tensors).float()) for each in (weight, unpacked(weight)))
    again = jitgemm.W4Weight.from_state_dict(weight.state_dict("w."), "w.")
    assert again.format == format_named(weight.format.name) and torch.equal(again.blocks, weight.blocks)


@pytest.mark.parametrize("dim", ["n", "k"])
def test_ranks_have_their_parts(dim):
    weight = packed(80, 480)
    parts = [part_of_weight(weight, dim, rank, 2, torch.float8_e4m3fn).dequantize() for rank in range(2)]
    assert torch.equal(torch.cat(parts, "nk".index(dim)), weight.dequantize())


def test_models_load_it_and_warm_up_names_its_kernels():
    tensors = {f"0.{name}": tensor for name, tensor in file().items()}
    model = torch.nn.Sequential(torch.nn.Linear(416, 72, bias=False))
    jitgemm.nn.load_(model, tensors, config={"quant_method": "table"}, device="cpu")
    x = torch.randn(3, 416, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = x.double() @ dense(file()).T
    assert float((model(x).double() - expected).norm() / expected.norm()) < 0.05
    with pytest.raises(jitgemm.CacheMissError, match="2 kernels are not in the cache"):
        jitgemm.nn.warmup(model, 16, device="h200", build=False)
    labels = [spec.label for spec, *_ in kernels(model[0], 16, [torch.bfloat16], "h200")]
    assert any(label.startswith("e4m3t16-channel-") for label in labels), labels


@emulated
@pytest.mark.parametrize("m", [9, 70])
def test_a_kernel_computes_what_the_reference_does(monkeypatch, m):
    weight, (x, scale) = packed(), builders.lhs(1, m, 416, "e4m3")
    ref, bound = gemm_w4a8_bound((x, scale), weight)
    assert torch.allclose(ref, x.double() * scale.double().view(-1, 1) @ dense(file()).T, rtol=1e-12)
    emulator, out = emulate(monkeypatch), torch.empty(m, 72, dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_nt((x, scale), weight, out)
    assert emulator.launched[0].startswith("e4m3t16-")
    assert bool(((out.double() - ref).abs() <= bound).all())
