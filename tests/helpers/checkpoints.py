"""Checkpoints for tests: packers written from the formats' definitions, and files on disk.

Nothing here uses jitgemm's own bit handling, so that a format's test does not check code against itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def words(
    values: torch.Tensor, dim: int, dtype: torch.dtype = torch.int32, order: Sequence[int] | None = None, bits: int = 4
):
    """The low bits of integers as words along dim: value order[i] of each word in nibble i, counted from the low.

    A word that is not full is filled with zeros.
    """
    per_word = 8 * dtype.itemsize // bits
    order = list(range(per_word)) if order is None else list(order)
    last = values.long().movedim(dim, -1)
    filled = torch.nn.functional.pad(last, (0, -last.shape[-1] % per_word))
    of_words = filled.unflatten(-1, (-1, per_word))[..., order] % 2**bits
    packed = (of_words * 2 ** (bits * torch.arange(per_word))).sum(-1)
    return packed.movedim(-1, dim).contiguous().to(dtype)  # integers wrap around


def dequantized(
    q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, group: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, (q - zero) * scale, fp64 [n, k]; group says which column of scale each column of q has."""
    n, k = q.shape
    if group is None:
        group = torch.arange(k) * scale.shape[1] // k
    weight = q.double()
    if zero is not None:
        weight = weight - zero.double()[:, group.long()]
    return weight * scale.double()[:, group.long()]


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    *,
    shards: int | None = None,
) -> Path:
    """Writes a checkpoint as Hugging Face lays it out: one file, or as many as `shards` and an index.

    `config` becomes the quantization_config of config.json; None writes no config.json.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards is None:
        save_file(tensors, folder / "model.safetensors")
    else:
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(tensors.items())[shard::shards])
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        text = json.dumps({"model_type": "llama", "quantization_config": dict(config)})
        (folder / "config.json").write_text(text)
    return folder
