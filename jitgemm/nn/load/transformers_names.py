"""A checkpoint under the names that the model has: transformers renames what older files call otherwise.

Mixtral's files, for one, say block_sparse_moe where the model has mlp. What the model's class says of that is taken
from transformers. So is what it says of tensors that the model has joined along their rows, or cut, whose layers may be
quantised; its merging of experts is not used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch

from jitgemm.checkpoint.files import Checkpoint, Rows
from jitgemm.kernel.formats import LHS_GROUP


def renamed_for(model: torch.nn.Module, checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint with names that the model does not have renamed as transformers does; itself for any other.

    Returns:
        The checkpoint, and {name: reason} of tensors that are part of a head that the model does not have.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return checkpoint, {}
    rules, others = _mapping(model)
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    tensors = model.state_dict(keep_vars=True).keys()
    base = model.base_model_prefix
    start, inner = f"{base}.", known - {"", base}

    def has_place(name: str) -> bool:
        return name in tensors or any(name[:i] in inner for i, letter in enumerate(name) if letter == ".")

    def renamed(name: str) -> str:
        """By the rules, with or without the base model's name as a prefix, whichever has a place."""
        for rule in rules:
            name = rule.rename_source_key(name)[0]
        if base and not has_place(name):
            short = name.removeprefix(start)
            if short != name and has_place(short) and not hasattr(model, base):
                return short
            return start + name if has_place(start + name) else name
        return name

    new_names: dict[str, str] = {}
    for name in checkpoint.names():
        if name in tensors:
            continue
        (layer, _, child), new = name.rpartition("."), renamed(name)
        if layer in known and new not in tensors:  # a packed layer's tensors, such as weight_scale
            continue
        if new == name and (weight := renamed(f"{layer}.weight")).endswith(".weight"):
            new = weight.removesuffix("weight") + child  # by rules that speak of weights alone
        if new != name and new not in checkpoint:
            new_names[new] = name
    checkpoint = checkpoint.renamed(new_names) if new_names else checkpoint
    bare = any(name == start + new for new, name in new_names.items())  # a base model, of the file of a whole one
    heads = [
        name
        for name in checkpoint.names()
        if not has_place(name) and (name.startswith("lm_head.") or (bare and not name.startswith(start)))
    ]
    made = _made_of_rows(others, checkpoint, model)
    checkpoint = checkpoint.with_rows(made) if made else checkpoint
    return checkpoint, dict.fromkeys(heads, f"of a head, which {type(model).__name__} does not have")


def _mapping(model: Any) -> tuple[list[Any], list[Any]]:
    """transformers' rules for the names of the model's checkpoints: renamings, and the other rules."""
    try:  # by name, as nothing here requires transformers
        mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping
        renaming = import_module("transformers.core_model_loading").WeightRenaming
    except (AttributeError, ImportError):  # transformers 4, whose models have the files' names
        return [], []
    mapped = mapping(model, add_legacy=False)
    rules = [rule for rule in mapped if isinstance(rule, renaming)]
    return rules, [rule for rule in mapped if rule not in rules]


def _made_of_rows(rules: list[Any], checkpoint: Checkpoint, model: torch.nn.Module) -> dict[str, Rows]:
    """The model's tensors that are the checkpoint's, joined or cut along their rows; of quantised layers, theirs."""
    modules, tensors = dict(model.named_modules(remove_duplicate=False)), model.state_dict(keep_vars=True).keys()
    made: dict[str, Rows] = {}

    def rows_of(target: str) -> int:
        weight = getattr(modules.get(target.rpartition(".")[0]), "weight", None)
        return 0 if weight is None or target in checkpoint else weight.shape[0]

    for rule in rules:
        operation_name, operation = type(rule.operations[0]).__name__, rule.operations[0]
        one = len(rule.operations) == 1 and operation_name in ("Chunk", "Split", "Concatenate")
        if not one or operation.dim != 0 or getattr(operation, "num_shards_attribute", None):
            continue
        joined: dict[str, dict[str, tuple[str, int]]] = {}  # {target: {pattern: (source, its layer's rows)}}
        for name in checkpoint.names():
            layer, _, child = name.rpartition(".")
            (target, pattern), end = rule.rename_source_key(name), child
            if pattern is None and child != "bias":  # rules speak of weights, which quantised layers have not
                (target, pattern), end = rule.rename_source_key(f"{layer}.weight"), "weight"
            rows, step = (0, 1) if pattern is None or name in tensors else _rows(checkpoint, layer)
            if not rows or not target.endswith(end):
                continue
            target = target.removesuffix(end) + child
            if operation_name == "Concatenate":
                joined.setdefault(target, {})[pattern] = name, rows
                continue
            first, *others = (part.removesuffix(".weight") for part in rule.target_patterns)
            parts = [target, *(target.replace(first, part, 1) for part in others)]
            sizes, start = [rows_of(part) for part in parts], 0
            divides = sum(sizes) == rows and all(size % step == 0 for size in sizes)
            divides = divides and (operation_name == "Split" or len(set(sizes)) == 1)
            for part, size in zip(parts, sizes if divides else ()):
                made[part] = _part(checkpoint, (name,), start, size, rows)
                start += size
        for target, sources in joined.items():
            count = sum(rows for _, rows in sources.values())
            if len(sources) == len(rule.source_patterns) and rows_of(target) == count:
                names = tuple(sources[pattern][0] for pattern in rule.source_patterns)
                made[target] = _part(checkpoint, names, 0, count, sources[rule.source_patterns[0]][1])
    return made


def _rows(checkpoint: Checkpoint, layer: str) -> tuple[int, int]:
    """(rows of a layer, of how many a part must be whole multiples); 0 where a tensor has others.

    A tensor has as many rows as the weight, or those of scales of whole blocks of 128.
    """
    infos = {child: checkpoint.info(full) for child, full in checkpoint.layer(layer).items() if child != "weight_shape"}
    weight = infos.get("weight", infos.get("weight_packed"))
    if weight is None or not weight.shape or any(info.kind or not info.shape for info in infos.values()):
        return 0, 1
    rows, counts = weight.shape[0], {info.shape[0] for info in infos.values()}
    if counts == {rows}:
        return rows, 1
    scale = infos.get("weight_scale_inv", infos.get("weight_scale"))
    blocks = scale is not None and len(scale.shape) == 2 and scale.shape[0] * LHS_GROUP == rows
    return (rows, LHS_GROUP) if blocks and counts == {rows, rows // LHS_GROUP} else (0, 1)


def _part(checkpoint: Checkpoint, names: tuple[str, ...], start: int, count: int, rows: int) -> Rows:
    """Rows of a layer's tensors; rows: of the first one's layer."""
    if names[0].endswith(".weight_shape"):
        return Rows(names, start, count, numbers=True)
    step = rows // checkpoint.info(names[0]).shape[0]
    return Rows(names, start // step, count // step)
