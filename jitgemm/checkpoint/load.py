"""`jitgemm.load`: a layer of a checkpoint as a `W4Weight` or `W8Weight`, and `read_layer`, the same before packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jitgemm.checkpoint.canonical import CanonicalWeight, concat
from jitgemm.checkpoint.files import Source, opened
from jitgemm.checkpoint.reader import layer_header, read_header, target_device
from jitgemm.weight.packed import W4Weight, W8Weight


def load(
    source: Source, prefix: str | Sequence[str], *, device: torch.device | str | int | None = None,
    tp_dim: str | None = None, tp_rank: int = 0, tp_size: int = 1, expert: int | None = None, format: str | None = None,
    config: Mapping[str, Any] | None = None, lhs_dtype: torch.dtype | None = None,
) -> W4Weight | W8Weight:  # fmt: skip
    """Reads a quantised linear layer of a checkpoint and packs it for the kernel. Exact, or an error.

    The formats and their layouts are listed in docs/formats.md. The layer's bias and static activation scale, where it
    has them, come from `read_layer`.

    Args:
        source: a folder, a `.safetensors` file, an `.index.json`, a mapping of names to tensors, or a `Checkpoint`.
            Only the layer's tensors are read.
        prefix: the layer's name, "model.layers.0.self_attn.o_proj"; or several, whose layers share their input and are
            joined along n in this order (q_proj, k_proj, v_proj). One that ends in "." or "_" is taken as it stands.
        device: where to unpack and pack; default: the current CUDA device, the CPU without one.
        tp_dim: with tp_size > 1, "n" (column-parallel) or "k" (row-parallel): how tensor parallelism cuts the layer,
            each of several prefixes by itself. See `CanonicalWeight.shard`.
        tp_rank, tp_size: this rank and the number of ranks.
        expert: for tensors that stack experts along their first dimension, which one.
        format: a format's name, where names and config do not tell (see `jitgemm.checkpoint.formats.FORMATS`).
        config: config.json or its quantization_config, as a mapping; default: the one next to the files.
        lhs_dtype: as `pack_w4` takes it: the only activations that the weight will meet, or None. An 8-bit weight meets
            those of its own type.

    Returns:
        The packed weight: a `W4Weight`, or a `W8Weight` for a layer of 8 bits. With activation order, `permutation`
        says which input columns its columns are; of a layer whose input the file has rotated `rotation` is 128.

    Raises:
        FileNotFoundError: source is not there.
        TypeError, ValueError: an argument is wrong, the format is not known, or the layer cannot be represented
            exactly; the message names layer, tensor or setting.
    """
    return read_layer(
        source, prefix, device=device, tp_dim=tp_dim, tp_rank=tp_rank, tp_size=tp_size, expert=expert, format=format,
        config=config,
    ).pack(lhs_dtype)  # fmt: skip


def read_layer(
    source: Source, prefix: str | Sequence[str], *, device: torch.device | str | int | None = None,
    tp_dim: str | None = None, tp_rank: int = 0, tp_size: int = 1, expert: int | None = None, format: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> CanonicalWeight:  # fmt: skip
    """The layer before packing: `load` without its last step, with the same arguments and errors. With static
    activation scale, and with bias: cut along k it stays with rank 0, as the ranks' results are added up."""
    prefixes = [prefix] if isinstance(prefix, str) else list(prefix) if isinstance(prefix, Sequence) else []
    if not prefixes or not all(isinstance(p, str) for p in prefixes):
        raise TypeError(f"prefix: expected a layer's name or several, got {prefix!r}")
    if tp_dim is None and (tp_size, tp_rank) != (1, 0):
        raise ValueError(f"tp_dim: expected 'n' or 'k' with tp_rank {tp_rank} of tp_size {tp_size}, got None")
    checkpoint, device = opened(source, config), target_device(device)
    cut, parts = None if tp_dim is None else (tp_dim, tp_rank, tp_size), []
    with torch.no_grad():
        for name in prefixes:
            with checkpoint.errors_that_name(name):
                header = layer_header(checkpoint, name, expert, format)
                parts.append(read_header(checkpoint, header, device, expert, cut))
        return concat(parts)
