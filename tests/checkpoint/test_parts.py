"""Parts of a layer that are cut through its blocks, and layers that are rows of others."""

from __future__ import annotations

import functools

import builders
import files_8bit as eight
import files_compressed_tensors as ct
import pytest
import torch
from layers import PREFIX
from safetensors.torch import save_file

from jitgemm.checkpoint.files import Checkpoint, Rows
from jitgemm.checkpoint.load import read_layer
from jitgemm.checkpoint.reader import layer_header, parts_of_rank, read_header

N, K = 256, 1024
PARTS = ct.pack_quantized(builders.weight_parts(4, N, K, 128), PREFIX)
PACKED = {name.rpartition(".")[2]: tensor for name, tensor in PARTS.items()}


def test_parts_that_are_cut_through_blocks_are_read_whole():
    tensors = {"weight": eight.codes(1, N, K, eight.E4M3), "weight_scale_inv": eight.scales(2, 2, 8)}
    source = Checkpoint({f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}, {"quant_method": "fp8"})
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
    tensors, config = PACKED, ct.config()
    save_file(PARTS, tmp_path / "model.safetensors")
    source = Checkpoint([tmp_path / "model.safetensors"], config)
    whole = read_layer(source, PREFIX, device="cpu").dequantize()

    def found(of: Checkpoint, made_of: tuple[str, ...], start: int, count: int) -> torch.Tensor:
        """Rows of these layers, cut in two."""
        rows = {}
        for name in tensors:
            names = tuple(f"{each}.{name}" for each in made_of)
            rows[f"made.{name}"] = Rows(names, start, count, numbers=name == "weight_shape")
        made = of.with_rows(rows)
        halves = [read_layer(made, "made", device="cpu", tp_dim=dim, tp_rank=rank, tp_size=2) for rank in range(2)]
        return torch.cat([half.dequantize() for half in halves], "nk".index(dim))

    assert torch.equal(found(source, (PREFIX,), N // 2, N // 2), whole[N // 2 :])
    both = {f"a.{name}": tensor for name, tensor in tensors.items()}
    both |= {f"b.{name}": tensor.flip(0) if name != "weight_shape" else tensor for name, tensor in tensors.items()}
    assert torch.equal(found(Checkpoint(both, config), ("a", "b"), 0, 2 * N), torch.cat([whole, whole.flip(0)]))
