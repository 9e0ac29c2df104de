"""A code of one's own, "Adding a weight format" in docs/extending.md: unsigned 4-bit integers without zero points.

Everything that the code needs stands here, and it goes wherever int4 goes.
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
from jitgemm.checkpoint.layouts import FLOATS, G, K, N, TensorLayout, stored
from jitgemm.gemm.bound import gemm_w4a8_bound
from jitgemm.kernel.codes import CODES, Code, Decoder, Order, register
from jitgemm.kernel.formats import format_named
from jitgemm.kernel.spec import KernelSpec
from jitgemm.weight.codes import CODE_OPS, UNSIGNED
from jitgemm.weight.codes import register as register_ops
from jitgemm.weight.pack import IntegerOps, pack_w4

CODEC = """\
// A nibble is the code; byte b of a word is A_b | B_b << 4. As e4m3 the byte m is m * 2^-9.
template <bool kIntegers>
struct UnsignedCodes {
    static constexpr bool kIntegerSums = kIntegers;
    static constexpr float kOutputScale = kIntegers ? 1.0f : 512.0f;
    static constexpr u32 kOne = 0x01010101u;

    __device__ static u32 signed_a(u32 word) { return word & 0x0F0F0F0Fu; }
    __device__ static u32 signed_b(u32 word) { return word >> 4 & 0x0F0F0F0Fu; }
};
"""
DECODERS = {
    lhs: Decoder(f"Int4Codec<UnsignedCodes<{integers}>, false>", "own", CODEC)
    for lhs, integers in (("e4m3", "false"), ("s8", "true"))
}
CODE = Code("uint4", bits=4, orders=(Order("u4", 3, DECODERS, mark="u", max_channel_k=2**20 - 16),), largest=15.0)


class ToyFormat(Format):
    """`codes` uint8 [n, k], `step` [n, G]: weight = codes * step."""

    name, methods, cuts = "toy", ("toy",), True

    def detect(self, names: Mapping[str, TensorInfo], config: Any) -> bool:
        return {"codes", "step"} <= set(names)

    def scheme(self, config: Any, prefix: str = "", headers: Headers = None) -> Scheme:
        return Scheme(self.name, code=CODE.name, group_size=config["group_size"])

    def tensors(self, scheme: Scheme, k: int | None = None) -> dict[str, TensorLayout]:
        return {"codes": stored(torch.uint8, N, K), "step": stored(FLOATS, N, G)}

    def read(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> CanonicalWeight:
        size = self.sizes(tensors, scheme).group_size
        return CanonicalWeight(tensors["codes"], tensors["step"], group_size=size, code=scheme.code)


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    register(CODE)
    register_ops(IntegerOps(CODE.name, orders={"u4": UNSIGNED}))
    formats.register(ToyFormat())
    yield
    del CODES[CODE.name], CODE_OPS[CODE.name]
    formats.FORMATS.pop()


def layer(n: int = 72, k: int = 416, group_size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [n, k] and their scales [n, groups]."""
    g = torch.Generator().manual_seed(n)
    q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    return q, (torch.rand(n, -(-k // group_size), generator=g) + 0.5).bfloat16()


def packed(n: int = 72, k: int = 416, group_size: int = 64, **options: Any) -> jitgemm.W4Weight:
    return pack_w4(*layer(n, k, group_size), group_size=group_size, k=k, code=CODE.name, **options)


@pytest.mark.parametrize("group_size", [32, 128, 416])
def test_it_is_read_packed_and_unpacked_under_names_of_its_own(group_size):
    (q, scale), weight = layer(group_size=group_size), packed(group_size=group_size)
    found, found_scale, zero, offset = weight.packed.rows(0, 2)
    assert found.dtype == torch.uint8 and torch.equal(found, q) and torch.equal(found_scale, scale)
    assert (zero, offset) == (None, None)
    assert torch.equal(weight.dequantize(), q.float() * scale.float().repeat_interleave(group_size, 1)[:, :416])
    config = {"quant_method": "toy", "group_size": group_size}
    read = jitgemm.load({"l.codes": q, "l.step": scale}, "l", config=config, device="cpu")
    for again in (read, jitgemm.W4Weight.from_state_dict(weight.state_dict("w."), "w.")):
        assert again.format == weight.format and torch.equal(again.blocks, weight.blocks)
    assert weight.format.name.endswith("-u4") and format_named(weight.format.name) == weight.format
    spec = KernelSpec("e4m3", packed().format, block_m=16, block_n=64, stages=4)
    assert spec.label.startswith("e4m3u-g64-bf16-") and KernelSpec.from_label(spec.label) == spec


@emulated
@pytest.mark.parametrize("group_size", [64, 416])
@pytest.mark.parametrize("lhs_type", ["e4m3", "s8"])
def test_a_kernel_computes_what_the_reference_does(monkeypatch, lhs_type, group_size):
    weight, (x, scale) = packed(group_size=group_size), builders.lhs(1, 9, 416, lhs_type)
    ref, bound = gemm_w4a8_bound((x, scale), weight)
    q, step = layer(group_size=group_size)
    full = q.double() * step.double().repeat_interleave(group_size, 1)[:, :416]
    assert torch.allclose(ref, x.double() * scale.double().view(-1, 1) @ full.T, rtol=1e-12)
    emulator, out = emulate(monkeypatch), torch.empty(9, 72, dtype=torch.bfloat16)
    jitgemm.gemm_w4a8_nt((x, scale), weight, out)
    assert emulator.launched[0].startswith(f"{lhs_type}u-")
    assert bool(((out.double() - ref).abs() <= bound).all())
