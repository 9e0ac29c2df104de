"""A rank's part of a layer is what the whole layer's shard is, and no more than that is read."""

from __future__ import annotations

import functools
from dataclasses import fields

import builders
import files_8bit as eight
import files_awq
import files_compressed_tensors as ct
import files_gptq
import pytest
import torch
from layers import PREFIX, layer
from safetensors.torch import save_file

from jitgemm.checkpoint.files import Checkpoint, Rows
from jitgemm.checkpoint.load import read_layer
from jitgemm.checkpoint.reader import layer_header, parts_of_rank, read_header

N, K = 256, 1024
E4M3 = torch.float8_e4m3fn


def w4(group_size: int, **options):
    return layer(3, N, K, group_size, **options)


def short(tensors):
    return {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}


def ct_case(form, group_size, zero_point, **options):
    parts = builders.weight_parts(4, N, K, group_size, zero_point=zero_point)
    strategy = "group" if group_size else "channel"
    name = "pack-quantized" if form is ct.pack_quantized else "int-quantized"
    scheme = ct.scheme(strategy, group_size, symmetric=not zero_point)
    return short(form(parts, PREFIX, **options)), ct.config(scheme, format=name)


def fp8(scale, **config):
    return {"weight": eight.codes(1, N, K, E4M3), **scale}, {"quant_method": "fp8"} | config


GPTQ = files_gptq.V2 | {"group_size": 128}
CASES = {
    "gptq": (files_gptq.packed(w4(128), minus_one=False), GPTQ, "n"),
    "gptq without g_idx": (
        {k: v for k, v in files_gptq.packed(w4(128), minus_one=False).items() if k != "g_idx"}, GPTQ, "nk",
    ),
    "gptq, act-order": (
        files_gptq.packed(w4(128, act_order=True), minus_one=False), GPTQ | {"desc_act": True}, "n",
    ),
    "gptq per channel": (
        {k: v for k, v in files_gptq.packed(w4(K), minus_one=False).items() if k != "g_idx"},
        files_gptq.V2 | {"group_size": -1}, "nk",
    ),
    "awq": (files_awq.gemm(w4(64)), files_awq.GEMM | {"group_size": 64}, "nk"),
    "awq gemv": (files_awq.gemv(w4(64), 2), files_awq.GEMV | {"group_size": 64}, ""),
    "pack-quantized": (*ct_case(ct.pack_quantized, 128, False), "nk"),
    "pack-quantized, zeros": (*ct_case(ct.pack_quantized, 32, True), "nk"),
    "pack-quantized, zeros in bytes": (*ct_case(ct.pack_quantized, 32, True, zero="bytes"), "nk"),
    "pack-quantized, no shape": (*ct_case(ct.pack_quantized, 128, False, shape=False), "nk"),
    "int-quantized per channel": (*ct_case(ct.int_quantized, 0, True), "nk"),
    "w4afp8": (
        {
            "weight": ct.checkpoints.words(builders.weight_parts(5, N, K).q, 1, torch.int8),
            "weight_scale_inv": builders.weight_parts(5, N, K).scale,
            "input_scale": torch.tensor([0.5]),
        },
        {"quant_method": "w4afp8", "group_size": 128}, "nk",
    ),
    "fp8 in blocks": (*fp8({"weight_scale_inv": eight.scales(2, 2, 8)}), "nk"),
    "fp8 per row": (*fp8({"weight_scale": eight.scales(2, N, 1)}), "nk"),
    "fp8, a vector": (*fp8({"weight_scale": eight.scales(2, N)}), "nk"),
    "fp8 per tensor": (*fp8({"weight_scale": eight.scales(2, 1)}), "nk"),
    "8 bits in groups": (
        {"weight": eight.codes(1, N, K, torch.int8), "weight_scale": eight.scales(2, N, 8)},
        eight.scheme("int", "group", "int-quantized", group_size=128), "nk",
    ),
    "8 bits in blocks": (
        {"weight": eight.codes(1, N, K, E4M3), "weight_scale": eight.scales(2, 2, 8)},
        eight.scheme("float", "block", "float-quantized", block_structure=[128, 128]), "nk",
    ),
}  # fmt: skip
"""Name -> (tensors, config, the dimensions along which a part is read alone)."""


class Counted(Checkpoint):
    """A checkpoint that counts the bytes that are read."""

    bytes = 0

    def read(self, *arguments):
        tensor = super().read(*arguments)
        self.bytes += tensor.nbytes
        return tensor


def opened(tmp_path, kind: str, tensors, config) -> Counted:
    named = {f"{PREFIX}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    if kind == "mapping":
        return Counted(named, config)
    save_file(named, tmp_path / "model.safetensors")
    return Counted([tmp_path / "model.safetensors"], config)


@pytest.mark.parametrize("kind", ["file", "mapping"])
@pytest.mark.parametrize("name", CASES)
def test_a_part_is_the_shard_and_read_alone(tmp_path, name, kind):
    tensors, config, alone = CASES[name]
    tensors = tensors | {"bias": torch.randn(N, generator=builders.generator(6)).bfloat16()}
    source = opened(tmp_path, kind, tensors, config)
    cpu = torch.device("cpu")
    whole = read_layer(source, PREFIX, device="cpu")
    everything, header = source.bytes, layer_header(source, PREFIX)
    for dim, world in (("n", 2), ("k", 2), ("k", 4)):
        if name == "gptq, act-order" and dim == "k":
            continue  # mixes all ranks' columns
        for rank in range(world):
            source.bytes = 0
            part, expected = read_header(source, header, cpu, cut=(dim, rank, world)), whole.shard(dim, rank, world)
            for field in fields(part):
                got, wanted = getattr(part, field.name), getattr(expected, field.name)
                same = (
                    builders.same_bits(got, wanted) if isinstance(got, torch.Tensor) else got is wanted or got == wanted
                )
                assert same, (field.name, dim, rank, got, wanted)
            if dim in alone:
                assert source.bytes <= everything // world + 4 * K + 64
            else:
                assert source.bytes >= everything


def test_parts_that_are_cut_through_blocks_are_read_whole():
    tensors, config, _ = CASES["fp8 in blocks"]
    source = Counted({f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}, config)
    header = layer_header(source, PREFIX)
    part_of = functools.partial(parts_of_rank, header)
    assert part_of("n", 0, 4) is None and part_of("k", 0, 8) is not None
    whole = read_layer(source, PREFIX, device="cpu").dequantize()
    parts = [read_header(source, header, torch.device("cpu"), cut=("k", rank, 16)) for rank in range(16)]
    assert part_of("k", 0, 16) is None and torch.equal(torch.cat([part.dequantize() for part in parts], 1), whole)
    part = read_header(source, header, torch.device("cpu"), cut=("n", 3, 4))
    assert torch.equal(part.dequantize(), read_layer(source, PREFIX, device="cpu").dequantize()[192:])
    for wrong in (("rows", 0, 2), ("G", 0, 2), ("n", 2, 2), ("n", 0, 1), ("n", 0, 3), ("k", 0, 64)):
        assert part_of(*wrong) is None


@pytest.mark.parametrize("dim", ["n", "k"])
def test_rows_of_one_tensor_and_of_several(tmp_path, dim):
    """Layers that a model splits or joins otherwise than its file."""
    tensors, config, _ = CASES["pack-quantized"]
    source = opened(tmp_path, "file", tensors, config)
    whole = read_layer(source, PREFIX, device="cpu")
    half = {
        f"half.{name}": Rows((f"{PREFIX}.{name}",), N // 2, N // 2, numbers=name == "weight_shape") for name in tensors
    }
    split = source.with_rows(half)
    found = [
        read_layer(split, "half", device="cpu", tp_dim=dim, tp_rank=rank, tp_size=2).dequantize() for rank in range(2)
    ]
    assert torch.equal(torch.cat(found, 0 if dim == "n" else 1), whole.dequantize()[N // 2 :])

    both = {f"a.{name}": tensor for name, tensor in tensors.items()}
    both |= {f"b.{name}": tensor.flip(0) if name != "weight_shape" else tensor for name, tensor in tensors.items()}
    made = {
        f"ab.{name}": Rows((f"a.{name}", f"b.{name}"), 0, 2 * N, numbers=name == "weight_shape") for name in tensors
    }
    joined = Checkpoint(both, config).with_rows(made)
    found = [
        read_layer(joined, "ab", device="cpu", tp_dim=dim, tp_rank=rank, tp_size=2).dequantize() for rank in range(2)
    ]
    expected = torch.cat([whole.dequantize(), whole.dequantize().flip(0)])
    assert torch.equal(torch.cat(found, 0 if dim == "n" else 1), expected)
