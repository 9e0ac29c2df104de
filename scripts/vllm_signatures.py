"""Writes down the signatures of vLLM that jitgemm.vllm overrides and calls; its tests' stand-ins are made from them.

    VLLM_TARGET_DEVICE=cpu .venv-vllm-0.24.0/bin/python scripts/vllm_signatures.py tests/helpers/vllm_signatures.json

The file has those of several versions; only the one that is imported is written anew. scripts/vllm_contract.sh makes
such environments.
"""

from __future__ import annotations

import inspect
import json
import sys
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

LAYERS = "vllm.model_executor.layers."
BASES = (
    LAYERS + "quantization.base_config:QuantizeMethodBase",
    LAYERS + "quantization.base_config:QuantizationConfig",
    LAYERS + "linear:LinearMethodBase",
    LAYERS + "fused_moe:FusedMoEMethodBase",
    LAYERS + "fused_moe:FusedMoEExpertsModular",
    LAYERS + "fused_moe.experts.lora_experts_mixin:LoRAExpertsMixin",
)
"""What the plug-in derives from: all methods are written down."""
CLASSES = {
    "vllm.model_executor.parameter": ("BasevLLMParameter", "ChannelQuantScaleParameter"),
    LAYERS + "linear": (
        "UnquantizedLinearMethod", "ReplicatedLinear", "ColumnParallelLinear", "MergedColumnParallelLinear",
        "QKVParallelLinear", "RowParallelLinear",
    ),
    LAYERS + "fused_moe": ("UnquantizedFusedMoEMethod", "RoutedExperts"),
}  # fmt: skip
"""What it makes, or is made for: constructors and loaders are written down."""
METHODS = ("__init__", "weight_loader", "weight_loader_v2")
FUNCTIONS = (
    LAYERS + "quantization:register_quantization_config",
    LAYERS + "quantization:get_quantization_config",
    LAYERS + "fused_moe.all2all_utils:maybe_make_prepare_finalize",
    LAYERS + "fused_moe.modular_kernel:FusedMoEKernel",
    LAYERS + "fused_moe.modular_kernel:FusedMoEKernel.apply",
    LAYERS + "fused_moe.config:fp8_w8a8_moe_quant_config",
    LAYERS + "linear:register_weight_loader_v2_supported_method",
    "vllm.transformers_utils.config:get_safetensors_params_metadata",
    "vllm.config:get_current_vllm_config_or_none",
    "vllm.logger:init_logger",
)


def found(path: str) -> Any:
    module, _, name = path.partition(":")
    return attrgetter(name)(import_module(module))


def parameters(function: Any) -> str:
    """As between the brackets of its definition; every default is None."""
    shown, kinds = [], inspect.Parameter
    for each in inspect.signature(function).parameters.values():
        if each.kind == kinds.KEYWORD_ONLY and not any(name.startswith("*") for name in shown):
            shown.append("*")
        star = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(each.kind, "")
        shown.append(star + each.name + ("" if each.default is each.empty else "=None"))
    return ", ".join(shown)


def described(owner: type, name: str) -> str:
    """Such as "abstract staticmethod()" or "method(self, layer)"."""
    raw = inspect.getattr_static(owner, name)
    kind = next((kind for kind in (staticmethod, classmethod, property) if isinstance(raw, kind)), None)
    function = raw.fget if isinstance(raw, property) else raw.__func__ if kind else raw
    abstract = "abstract " if getattr(raw, "__isabstractmethod__", False) else ""
    return f"{abstract}{kind.__name__ if kind else 'method'}({parameters(function)})"


def methods(owner: type) -> dict[str, str]:
    """All methods that it has from vLLM."""
    ours = [name for each in owner.__mro__ if each.__module__.startswith("vllm") for name in vars(each)]
    names = [name for name in dict.fromkeys(ours) if name == "__init__" or not name.startswith("__")]
    kinds = (staticmethod, classmethod, property)
    static = {name: inspect.getattr_static(owner, name) for name in names}
    return {
        n: described(owner, n) for n in sorted(static) if inspect.isfunction(static[n]) or isinstance(static[n], kinds)
    }


def signatures() -> dict[str, Any]:
    classes = {f"{module}:{name}": found(f"{module}:{name}") for module, names in CLASSES.items() for name in names}
    return {
        "bases": {path: methods(found(path)) for path in BASES},
        "classes": {
            path: {name: described(owner, name) for name in METHODS if inspect.isfunction(getattr(owner, name, None))}
            for path, owner in classes.items()
        },
        "functions": {path: parameters(found(path)) for path in FUNCTIONS},
    }


if __name__ == "__main__":
    path = Path(sys.argv[1])
    versions = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    versions[version("vllm").partition("+")[0]] = signatures()
    path.write_text(json.dumps(dict(sorted(versions.items())), indent=1) + "\n", encoding="utf-8")
