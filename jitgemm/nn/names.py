"""A checkpoint under the names that the model has: transformers renames what older files call otherwise.

Mixtral's files, for one, say block_sparse_moe where the model has mlp. What the model's class says of that is taken
from transformers; its merging of experts is not used.
"""

from __future__ import annotations

import sys
from importlib import import_module

import torch

from jitgemm.checkpoint.files import Checkpoint


def in_names_of(model: torch.nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with names that the model has no module for renamed as transformers does; itself for any other."""
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
    renamed: dict[str, str] = {}
    for name in checkpoint.names():
        if name.rpartition(".")[0] in known:
            continue
        new = name
        for rule in rules:
            new = rule.rename_source_key(new)[0]
        if new != name and new not in checkpoint:
            renamed[new] = name
    return checkpoint.renamed(renamed) if renamed else checkpoint
