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
    spec = replace(spec or chosen(q.shape[0], weight, lhs_group_of(lhs[1])), gate=2)
    assert scale.stride(1) == 1
    extra = {"gate_out": q.data_ptr(), "gate_stride": q.stride(0), "gate_scale": scale.data_ptr(),
             "gate_scale_stride": scale.stride(0)}
    dummy = torch.empty(q.shape[0], weight.n // 2, dtype=torch.bfloat16, device=q.device)
    return Direct(lhs, weight, dummy, spec, extra, (q, scale))
