"""Prototype of SwiGLU in the epilogue of gate_up, and of the quantiser behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from jitgemm.gemm.launch import GemmLaunch
from jitgemm.gemm.problem import Gemm, lhs_group_of
from jitgemm.kernel.formats import Problem
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.choose import choose
from jitgemm.tensors import TYPE_NAMES


def interleaved(n: int) -> torch.Tensor:
    """Which row of [gates; ups] each row of the interleaved weight is: 8 gates, their 8 ups, and so on."""
    row = torch.arange(n)
    return row // 16 * 8 + row % 8 + (row % 16 // 8) * (n // 2)


def chosen(m: int, weight: Any, lhs_group: int = 0) -> KernelSpec:
    from jitgemm.select.devices import DEVICES

    return choose(Problem(m, weight.n, weight.k, "e4m3", weight.format, lhs_group=lhs_group), DEVICES["h200"])


def wide(m: int) -> str:
    """The label of the kernel for gate_up whose tile has the columns of a scale."""
    return "e4m3fast-g128-bf16-" + ("m8n256-s12" if m <= 8 else "m16n256-s11")


class Direct:
    """A GEMM launched as it stands; `keep` are tensors whose addresses its arguments hold."""

    def __init__(self, lhs: Any, weight: Any, out: torch.Tensor, spec: KernelSpec, extra: dict[str, int], keep: Any = ()):
        self.gemm, self.keep = Gemm(*lhs[:2], None, weight, out), keep
        self.launch = GemmLaunch(self.gemm, spec, extra)

    def __call__(self) -> None:
        self.launch.launch(self.gemm)


def swiglu(lhs: Any, weight: Any, y: torch.Tensor, spec: KernelSpec | None = None) -> Direct:
    """y [m, n / 2] = silu(gate) * up in bf16; weight interleaved."""
    spec = replace(spec or chosen(y.shape[0], weight, lhs_group_of(lhs[1])), gate=1)
    extra = {"gate_out": y.data_ptr(), "gate_stride": y.stride(0) * y.element_size()}
    return Direct(lhs, weight, y, spec, extra)


def swiglu_block(lhs: Any, weight: Any, q: torch.Tensor, scale: torch.Tensor, spec: KernelSpec | None = None) -> Direct:
    """(q, scale) of y with a scale per token and 128 columns."""
    spec = replace(spec or KernelSpec.from_label(wide(q.shape[0])), gate=2)
    assert scale.stride(1) == 1
    extra = {"gate_out": q.data_ptr(), "gate_stride": q.stride(0), "gate_scale": scale.data_ptr(),
             "gate_scale_stride": scale.stride(0)}
    dummy = torch.empty(q.shape[0], weight.n // 2, dtype=torch.bfloat16, device=q.device)
    return Direct(lhs, weight, dummy, spec, extra, (q, scale))


QUANTIZING = {
    "qkv": "m8n64-k4x1-s8-d", "o": "m8n64-k2x2-s10-c2", "gu": "m8n256-s11", "down": "m8n64-k4x2-s8-d",
    "qkv16": "m16n64-k4x1s-s7-d", "o16": "m16n64-k2x2s-s8-c2", "gu16": "m16n256-s9", "down16": "m16n64-k4x2s-s6-d",
}  # fmt: skip
"""Kernels that quantise themselves, up to 8 and 16 tokens."""


def quantizing(
    which: str, x: torch.Tensor, weight: Any, out: torch.Tensor, *, residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None, norm: torch.Tensor | None = None, eps: float = 1e-5, gate: int = 0,
    codes: Any = (),
) -> Direct:  # fmt: skip
    """out = quantised x * weight, x [m, k] in bf16; with a norm that of x + residual, which goes to total."""
    which += "16" if x.shape[0] > 8 else ""
    spec = KernelSpec.from_label("e4m3fast-g128-bf16-" + QUANTIZING[which])
    spec = replace(spec, gate=gate, quantize=1 if norm is None else 2, k_blocks=weight.k // 128)
    extra: dict[str, Any] = {"lhs_stride": x.stride(0) * 2}
    if gate == 1:
        extra |= {"gate_out": out.data_ptr(), "gate_stride": out.stride(0) * out.element_size()}
    if gate == 2:
        q, block = codes
        extra |= {"gate_out": q.data_ptr(), "gate_stride": q.stride(0), "gate_scale": block.data_ptr(),
                  "gate_scale_stride": block.stride(0)}
    if norm is not None:
        assert residual.stride(0) == total.stride(0) and residual.data_ptr() != total.data_ptr()
        extra |= {"residual": residual.data_ptr(), "sum": total.data_ptr(), "norm_weight": norm.data_ptr(),
                  "residual_stride": residual.stride(0) * 2, "eps": eps}
    scale = torch.empty(x.shape[0], device=x.device)
    return Direct((x, scale), weight, out, spec, extra, (residual, total, norm, codes))
