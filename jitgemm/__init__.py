"""jitgemm: W4A8 GEMM for Hopper, generated, compiled and cached just in time.

In three lines::

    import torch, jitgemm
    weight = jitgemm.pack_w4(q, scale, group_size=128)
    jitgemm.gemm_w4a8_bf16_nt((x, x_scale), weight, out)
"""

from __future__ import annotations

import sys
from importlib import import_module, reload
from typing import TYPE_CHECKING

from jitgemm.errors import CacheMissError, CompileError, DriverError, JitGemmError, UnsupportedDeviceError

__version__ = "1.0.0"

__all__ = [
    "CacheMissError", "CompileError", "DriverError", "JitGemmError", "Rotated", "UnsupportedDeviceError",
    "W4Weight", "W8Weight", "explain", "fused_experts", "fused_experts_masked", "fused_experts_reference",
    "fused_experts_workspace_bytes",
    "gemm_w4a8_bf16_nt", "gemm_w4a8_int8_nt", "gemm_w4a8_nt", "gemm_w4a8_reference", "gemm_w8a8_bf16_nt",
    "gemm_w8a8_nt", "load", "m_grouped_gemm_w4a8_bf16_nt_contiguous", "m_grouped_gemm_w4a8_bf16_nt_masked",
    "m_grouped_gemm_w4a8_nt_contiguous", "m_grouped_gemm_w4a8_nt_masked", "m_grouped_gemm_w4a8_reference",
    "m_grouped_gemm_w8a8_bf16_nt_contiguous", "m_grouped_gemm_w8a8_bf16_nt_masked",
    "m_grouped_gemm_w8a8_nt_contiguous", "m_grouped_gemm_w8a8_nt_masked", "pack_mxfp4", "pack_nvfp4", "pack_w4",
    "pack_w4_two_level", "pack_w8", "quantize_activations", "quantize_mxfp4", "quantize_w4",
    "quantize_w4_two_level", "quantize_w8",
]  # fmt: skip

_PACKAGES = ("checkpoint", "deep_gemm", "hf", "nn", "sglang", "vllm")
"""Loaded on first use, and `load` with the first of them: they take longer than all else here."""


def _command_runs() -> bool:
    """Whether this is the command, by its entry module or by `python -m jitgemm`: most of its parts need no torch."""
    by_name = sys.argv[:1] == ["-m"] and ("-m", "jitgemm") in zip(sys.orig_argv, sys.orig_argv[1:])
    return by_name or "jitgemm_cli" in sys.modules


if TYPE_CHECKING:
    from jitgemm import (
        checkpoint as checkpoint,
        deep_gemm as deep_gemm,
        hf as hf,
        nn as nn,
        sglang as sglang,
        vllm as vllm,
    )
    from jitgemm.checkpoint.load import load

if TYPE_CHECKING or "torch" in sys.modules or not _command_runs():
    from jitgemm.activations.call import quantize_activations
    from jitgemm.gemm.call import gemm_w4a8_bf16_nt, gemm_w4a8_nt, gemm_w8a8_bf16_nt, gemm_w8a8_nt
    from jitgemm.gemm.call import m_grouped_gemm_w4a8_bf16_nt_contiguous, m_grouped_gemm_w4a8_bf16_nt_masked
    from jitgemm.gemm.call import m_grouped_gemm_w4a8_nt_contiguous, m_grouped_gemm_w4a8_nt_masked
    from jitgemm.gemm.call import m_grouped_gemm_w8a8_bf16_nt_contiguous, m_grouped_gemm_w8a8_bf16_nt_masked
    from jitgemm.gemm.call import m_grouped_gemm_w8a8_nt_contiguous, m_grouped_gemm_w8a8_nt_masked
    from jitgemm.gemm.explain import explain
    from jitgemm.gemm.int8_out import gemm_w4a8_int8_nt
    from jitgemm.gemm.reference import gemm_w4a8_reference, m_grouped_gemm_w4a8_reference
    from jitgemm.moe.call import fused_experts, fused_experts_reference, fused_experts_workspace_bytes
    from jitgemm.moe.masked import fused_experts_masked
    from jitgemm.weight.mxfp4 import pack_mxfp4
    from jitgemm.weight.nvfp4 import pack_nvfp4
    from jitgemm.weight.pack import pack_w4, pack_w8
    from jitgemm.weight.packed import W4Weight, W8Weight
    from jitgemm.weight.parts import Rotated
    from jitgemm.weight.quantize_two_level import quantize_w4_two_level
    from jitgemm.weight.two_level import pack_w4_two_level
    from jitgemm.weight.quantize_mxfp4 import quantize_mxfp4
    from jitgemm.weight.quantize import quantize_w4, quantize_w8

    import_module("jitgemm.graph")  # its pass, where something traces the operators


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        try:
            return import_module(f"jitgemm.{name}")
        except ImportError as error:  # hf without transformers, which `hasattr` and `help` may ask for
            raise AttributeError(str(error)) from error
    if name == "load":
        value = globals()[name] = import_module("jitgemm.checkpoint.load").load
        return value
    if name in __all__:  # the command, which has needed no torch up to here
        import_module("torch")
        reload(sys.modules[__name__])
        return globals()[name]
    raise AttributeError(f"module 'jitgemm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
