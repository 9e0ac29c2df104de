"""Which Linears and stacked experts of a model layers can stand for, and what is in the way of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.quantize.stacked import ExpertsLayout, experts_layout

Filter = Callable[[str, torch.nn.Module], bool]
"""filter(name, module): whether to replace it, a Linear or the experts of a layer."""

READS_WEIGHT = {
    "TransformerEncoderLayer": "linear1 linear2",  # its inference path hands all weights to one fused call
    "MultiheadAttention": "out_proj", "WavLMAttention": "q_proj k_proj v_proj out_proj", "TDNNLayer": "kernel",
    "BloomAttention": "dense", "BloomMLP": "dense_4h_to_h", "DisentangledSelfAttention": "in_proj",
    "LSHSelfAttention": "query_key value", "MobileBertLMPredictionHead": "dense decoder",
    "DetrMHAttentionMap": "k_proj", "ConditionalDetrMHAttentionMap": "k_proj", "DabDetrMHAttentionMap": "k_linear",
    "MaskFormerDetrMHAttentionMap": "k_proj", "PPDocLayoutV2ReadingOrderEncoder": "rel_pos_bias",
    **dict.fromkeys(("LayoutLMv2Encoder", "LayoutLMv3Encoder"), "rel_pos_bias rel_pos_x_bias rel_pos_y_bias"),
}  # fmt: skip
"""Classes of PyTorch and transformers (5.23) whose calls read the weight of a Linear in them: {class: its Linears}."""
READ_ANYWHERE = ("dt_proj",)
"""Linears whose weight every model reads that has them: Mamba's kinds."""
ROUTERS = ("gate", "router", "gating", "wg", "shared_expert_gate")
"""What mixtures of experts call the small Linear that chooses experts, or the module around it."""

PACKED = (PackedLinear, PackedExperts)


def check_model(model: object, filter: object = None) -> None:
    """Raises TypeError for what is no module, and for a filter that cannot be called."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if filter is not None and not callable(filter):
        raise TypeError(f"filter: expected a function of a name and a module, got {type(filter).__name__}")


class Replaceable:
    """The Linears and stacked experts of a model, or the layers that replaced them, and what stands in each one's way.

    Attributes:
        places: {first name: all names at which the module stands}.
        experts: {first name: how it holds its experts} of the modules of experts.
        model: where they stand.
        head: first name of the output embedding, None where it is no such module.
    """

    def __init__(self, model: torch.nn.Module):
        if isinstance(model, (torch.nn.Linear, *PACKED)) or experts_layout(model) is not None:
            got = type(model).__name__
            raise ValueError(f"model: expected a module that holds Linears, got a {got}; use W4A8Linear.from_linear")
        names: dict[torch.nn.Module, list[str]] = {}
        layouts: dict[torch.nn.Module, ExpertsLayout | str | None] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if module not in layouts:
                layouts[module] = experts_layout(module)
            if isinstance(module, (torch.nn.Linear, PackedLinear)) or isinstance(layouts[module], ExpertsLayout):
                names.setdefault(module, []).append(name)
        # No modules are kept: originals are to be freed one by one.
        self.places = {same[0]: same for same in names.values()}
        self.experts = {
            names[module][0]: layout for module, layout in layouts.items() if isinstance(layout, ExpertsLayout)
        }
        self.model = model
        self._owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
        output = getattr(model, "get_output_embeddings", lambda: None)()
        heads = [name for name in self.places if name.rpartition(".")[2] == "lm_head"]
        self.head: str | None = names[output][0] if output in names else heads[0] if heads else None

    def why_impossible(self, name: str) -> str | None:
        """Why no packed layer can stand for a Linear: something other than torch.nn.Linear's call uses its weight."""
        linear = self.model.get_submodule(name)
        if isinstance(linear, PackedLinear) or name in self.experts:
            return None
        if type(linear).forward is not torch.nn.Linear.forward:
            return f"{type(linear).__name__} has a forward of its own"
        if "forward" in vars(linear):
            return "its forward was replaced, as accelerate's hooks do"
        for place in self.places[name]:
            above, _, child = place.rpartition(".")
            parent = self.model.get_submodule(above)
            kinds = [base.__name__ for base in type(parent).__mro__]
            reads = any(child in READS_WEIGHT.get(base, "").split() for base in kinds) or child in READ_ANYWHERE
            if kinds[0].startswith("Bloom"):
                reads = reads and getattr(parent, "slow_but_exact", False)
            if reads:
                return f"{kinds[0]} reads this weight itself"
        return None

    def shared(self, name: str) -> bool:
        """Whether another module holds the same weight, as a tied embedding does."""
        return name not in self.experts and self._owners[id(self.model.get_submodule(name).weight)] > 1
