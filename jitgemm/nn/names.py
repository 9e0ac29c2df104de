"""A checkpoint under the names that the model has: transformers renames what older files call otherwise.

Mixtral's files, for one, say block_sparse_moe where the model has mlp. What the model's class says of that is taken
from transformers; its merging of experts is not used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch

from jitgemm.checkpoint.files import Checkpoint


def in_names_of(model: torch.nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with names that the model does not have renamed as transformers does; itself for any other."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return checkpoint
    try:  # by name, as nothing here requires transformers
        mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping
        renaming = import_module("transformers.core_model_loading").WeightRenaming
    except (AttributeError, ImportError):  # transformers 4, whose models have the files' names
        return checkpoint
    rules = [rule for rule in mapping(model, add_legacy=False) if isinstance(rule, renaming)]
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    tensors = model.state_dict(keep_vars=True).keys()
    renamed: dict[str, str] = {}
    for name in checkpoint.names():
        layer, _, child = name.rpartition(".")
        if name in tensors:
            continue
        new = _by_rules(rules, name)
        if layer in known and new not in tensors:  # a packed layer's tensors, such as weight_scale
            continue
        if new == name and (weight := _by_rules(rules, f"{layer}.weight")).endswith(".weight"):
            new = weight.removesuffix("weight") + child  # by rules that speak of weights alone
        if new != name and new not in checkpoint:
            renamed[new] = name
    return checkpoint.renamed(renamed) if renamed else checkpoint


def _by_rules(rules: list[Any], name: str) -> str:
    for rule in rules:
        name = rule.rename_source_key(name)[0]
    return name
