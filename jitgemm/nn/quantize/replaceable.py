"""Which Linears and stacked experts of a model can be replaced, which should not be, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from jitgemm.dtypes import REAL_TYPES
from jitgemm.kernel.formats import K_ALIGNMENT
from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.quantize.stacked import ExpertsLayout, experts_layout
from jitgemm.tensors import PLAIN, TYPE_NAMES, dtype_name, one_of

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
STACKED = "stacked experts"  # with which the reasons of `experts_layout` begin, too
_UNKNOWN = f"{STACKED} of an unknown kind, which stay in their type"
MIN_STACKED = 32  # smaller matrices in 3-D parameters are no experts

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
        head: first name of the output embedding, None where it is no such module.
    """

    def __init__(self, model: torch.nn.Module):
        if isinstance(model, (torch.nn.Linear, *PACKED)) or experts_layout(model) is not None:
            kind = type(model).__name__
            raise ValueError(f"model: expected a module that holds Linears, got a {kind}; use W4A8Linear.from_linear")
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
        self._model = model
        self._owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
        output = getattr(model, "get_output_embeddings", lambda: None)()
        found = [name for name in self.places if name.rpartition(".")[2] == "lm_head"]
        self.head: str | None = names[output][0] if output in names else found[0] if found else None

    def why_impossible(self, name: str) -> str | None:
        """Why no packed layer can stand for a Linear: something other than torch.nn.Linear's call uses its weight."""
        linear = self._model.get_submodule(name)
        if isinstance(linear, PackedLinear) or name in self.experts:
            return None
        if type(linear).forward is not torch.nn.Linear.forward:
            return f"{type(linear).__name__} has a forward of its own"
        if "forward" in vars(linear):
            return "its forward was replaced, as accelerate's hooks do"
        for place in self.places[name]:
            above, _, child = place.rpartition(".")
            parent = self._model.get_submodule(above)
            kinds = [kind.__name__ for kind in type(parent).__mro__]
            reads = any(child in READS_WEIGHT.get(kind, "").split() for kind in kinds) or child in READ_ANYWHERE
            if kinds[0].startswith("Bloom"):
                reads = reads and getattr(parent, "slow_but_exact", False)
            if reads:
                return f"{kinds[0]} reads this weight itself"
        return None

    def why_unwise(self, name: str, k_alignment: int = K_ALIGNMENT) -> str | None:
        """Why quantize_ leaves this module alone unless a filter asks for it; k_alignment: as for `why_unfit`."""
        linear = self._model.get_submodule(name)
        if name in self.experts:
            return self.why_unfit(name, k_alignment)
        if name.rpartition(".")[2] == "lm_head" or name == self.head:
            return "output embedding"
        if self.shared(name):
            return "shares its weight with another module"
        near = name.split(".")[-2:]
        if any(part in ROUTERS for part in near) and linear.out_features < linear.in_features:
            return "router"
        return self.why_unfit(name, k_alignment)

    def shared(self, name: str) -> bool:
        """Whether another module holds the same weight, as a tied embedding does."""
        return name not in self.experts and self._owners[id(self._model.get_submodule(name).weight)] > 1

    def why_unfit(self, name: str, k_alignment: int = K_ALIGNMENT) -> str | None:
        """Why a module has no packed form, whatever its values; k_alignment: what its columns are a multiple of."""
        linear = self._model.get_submodule(name)
        if (layout := self.experts.get(name)) is not None:
            if layout.hidden % k_alignment or layout.inter % k_alignment:
                wanted = f"expected hidden and intermediate sizes that are multiples of {k_alignment}"
                return f"{wanted}, got {layout.hidden} and {layout.inter}"
            problems = (_why_unfit_type(each, getattr(linear, each)) for each in layout.parameters)
            return next(filter(None, problems), None)
        n, k = linear.out_features, linear.in_features
        if not n or not k or n % 8 or k % k_alignment:
            wanted = f"expected out_features a multiple of 8 and in_features a multiple of {k_alignment}"
            return f"{wanted}, got {n} and {k}"
        return _why_unfit_type("a weight", linear.weight)

    def others(self) -> dict[str, str]:
        """What else holds matrices: layers of other classes, and stacked experts that stay as they are."""
        found = {}
        for name, module in self._model.named_modules():
            kind = type(module)
            if name in self.places or isinstance(module, torch.nn.Embedding) or kind.__module__.startswith("torch.nn"):
                continue
            reason = experts_layout(module)
            for child, parameter in module.named_parameters(recurse=False):
                if child == "weight" and parameter.dim() == 2:
                    found[name] = f"{kind.__name__}, which is no torch.nn.Linear"
                elif parameter.dim() == 3 and len(parameter) > 1 and min(parameter.shape[1:]) >= MIN_STACKED:
                    found[f"{name}.{child}"] = reason if isinstance(reason, str) else _UNKNOWN
        return found


def _why_unfit_type(name: str, tensor: torch.Tensor) -> str | None:
    plain = type(tensor) in PLAIN
    if plain and TYPE_NAMES.get(tensor.dtype) in REAL_TYPES:
        return None
    got = dtype_name(tensor.dtype) if plain else type(tensor).__name__
    return f"expected {name} of {one_of(REAL_TYPES)}, got {got}"
