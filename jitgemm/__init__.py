"""jitgemm: W4A8 GEMM for Hopper, generated, compiled and cached just in time.

In three lines::

    import torch, jitgemm
    weight = jitgemm.pack_w4(q, scale, group_size=128)
    jitgemm.gemm_w4a8_bf16_nt((x, x_scale), weight, out)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jitgemm.errors import CacheMissError, CompileError, DriverError, JitGemmError, UnsupportedDeviceError

__version__ = "0.1.0"

__all__ = [
    "CacheMissError",
    "CompileError",
    "DriverError",
    "JitGemmError",
    "UnsupportedDeviceError",
    "W4Weight",
    "W8Weight",
    "fused_experts",
    "fused_experts_reference",
    "fused_experts_workspace_bytes",
    "gemm_w4a8_bf16_nt",
    "gemm_w4a8_int8_nt",
    "gemm_w4a8_nt",
    "gemm_w4a8_reference",
    "gemm_w8a8_bf16_nt",
    "gemm_w8a8_nt",
    "load",
    "m_grouped_gemm_w4a8_bf16_nt_contiguous",
    "m_grouped_gemm_w4a8_bf16_nt_masked",
    "m_grouped_gemm_w4a8_nt_contiguous",
    "m_grouped_gemm_w4a8_nt_masked",
    "m_grouped_gemm_w4a8_reference",
    "m_grouped_gemm_w8a8_bf16_nt_contiguous",
    "m_grouped_gemm_w8a8_bf16_nt_masked",
    "m_grouped_gemm_w8a8_nt_contiguous",
    "m_grouped_gemm_w8a8_nt_masked",
    "pack_w4",
    "pack_w8",
    "quantize_activations",
    "quantize_w4",
    "quantize_w8",
]


_HOMES = {
    "W4Weight": "weight.packed",
    "W8Weight": "weight.packed",
    "fused_experts": "moe.call",
    "fused_experts_reference": "moe.call",
    "fused_experts_workspace_bytes": "moe.call",
    "gemm_w4a8_bf16_nt": "gemm.call",
    "gemm_w4a8_int8_nt": "gemm.int8_out",
    "gemm_w4a8_nt": "gemm.call",
    "gemm_w4a8_reference": "gemm.reference",
    "gemm_w8a8_bf16_nt": "gemm.call",
    "gemm_w8a8_nt": "gemm.call",
    "load": "checkpoint.reader",
    "m_grouped_gemm_w4a8_bf16_nt_contiguous": "gemm.grouped",
    "m_grouped_gemm_w4a8_bf16_nt_masked": "gemm.grouped",
    "m_grouped_gemm_w4a8_nt_contiguous": "gemm.grouped",
    "m_grouped_gemm_w4a8_nt_masked": "gemm.grouped",
    "m_grouped_gemm_w4a8_reference": "gemm.reference",
    "m_grouped_gemm_w8a8_bf16_nt_contiguous": "gemm.grouped",
    "m_grouped_gemm_w8a8_bf16_nt_masked": "gemm.grouped",
    "m_grouped_gemm_w8a8_nt_contiguous": "gemm.grouped",
    "m_grouped_gemm_w8a8_nt_masked": "gemm.grouped",
    "pack_w4": "weight.pack",
    "pack_w8": "weight.pack8",
    "quantize_activations": "activations.call",
    "quantize_w4": "weight.quantize",
    "quantize_w8": "weight.quantize",
}
"""The module of every name that needs torch."""


def __getattr__(name: str) -> object:
    if name == "nn":
        return import_module("jitgemm.nn")
    if name not in _HOMES:
        raise AttributeError(f"module 'jitgemm' has no attribute {name!r}")
    value = getattr(import_module(f"jitgemm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def _load_calls() -> None:
    """What models call: compilers that trace it find plain functions, exported programs their operators."""
    for name in (
        "W4Weight", "W8Weight", "fused_experts", "gemm_w4a8_bf16_nt", "gemm_w4a8_nt", "gemm_w8a8_bf16_nt",
        "gemm_w8a8_nt", "m_grouped_gemm_w4a8_nt_contiguous", "pack_w4", "pack_w8", "quantize_activations",
    ):  # fmt: skip
        __getattr__(name)
    import_module("jitgemm.moe.masked")  # its operator
    import_module("jitgemm.graph")  # its pass, where something traces the operators


class _UntilTorch:
    """On `sys.meta_path` from `import jitgemm` to `import torch`, at whose end it loads the calls.

    Where one of jitgemm's modules imports torch, at the end of that module: in between it is incomplete.
    """

    def __init__(self) -> None:
        self.depth = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" and not name.startswith("jitgemm."):
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            execute = partial(self.exec_module, spec.loader.exec_module)
            setattr(spec.loader, "exec_module", execute)
        return spec

    def exec_module(self, execute: Callable[[Any], None], module: Any) -> None:
        self.depth += 1
        try:
            execute(module)
        finally:
            self.depth -= 1
        if self.depth == 0 and "torch" in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            _load_calls()


# Names load on first use, so that commands such as `jitgemm cache ls`, which need no torch, answer a second sooner.
if TYPE_CHECKING:
    from jitgemm.activations.call import quantize_activations
    from jitgemm.checkpoint.reader import load
    from jitgemm.gemm.call import gemm_w4a8_bf16_nt, gemm_w4a8_nt, gemm_w8a8_bf16_nt, gemm_w8a8_nt
    from jitgemm.gemm.grouped import (
        m_grouped_gemm_w4a8_bf16_nt_contiguous,
        m_grouped_gemm_w4a8_bf16_nt_masked,
        m_grouped_gemm_w4a8_nt_contiguous,
        m_grouped_gemm_w4a8_nt_masked,
        m_grouped_gemm_w8a8_bf16_nt_contiguous,
        m_grouped_gemm_w8a8_bf16_nt_masked,
        m_grouped_gemm_w8a8_nt_contiguous,
        m_grouped_gemm_w8a8_nt_masked,
    )
    from jitgemm.gemm.int8_out import gemm_w4a8_int8_nt
    from jitgemm.gemm.reference import gemm_w4a8_reference, m_grouped_gemm_w4a8_reference
    from jitgemm.moe.call import fused_experts, fused_experts_reference, fused_experts_workspace_bytes
    from jitgemm.weight.pack import pack_w4
    from jitgemm.weight.pack8 import pack_w8
    from jitgemm.weight.packed import W4Weight, W8Weight
    from jitgemm.weight.quantize import quantize_w4, quantize_w8
elif "torch" in sys.modules:
    _load_calls()
else:
    sys.meta_path.insert(0, _UntilTorch())
