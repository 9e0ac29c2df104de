"""Calls made ready without a GPU: the driver's part stubbed out, so that what would be launched can be looked at."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from types import SimpleNamespace

import builders
import torch

from jitgemm.activations import plan as quantizers
from jitgemm.activations.arguments import activation_of
from jitgemm.activations.run import QuantizeCall
from jitgemm.activations.scheme import Prologue
from jitgemm.gemm import launch as gemms
from jitgemm.gemm.problem import Gemm
from jitgemm.moe import exchange
from jitgemm.moe import plan as moe
from jitgemm.runtime import driver, loaded
from jitgemm.runtime import launch as launching
from jitgemm.runtime.loaded import KernelFamily
from jitgemm.select.devices import DEVICES

N, K = 72, 256


def without_driver(monkeypatch) -> list[tuple[bool, list[bytes]]]:
    """Plans of CPU tensors, as if on a device of number -1. Returns what is launched: (dependent, parameters)."""
    launches: list[tuple[bool, list[bytes]]] = []

    def launch(config, function, parameters, extra):
        sizes = function
        pointers = (ctypes.c_void_p * len(sizes)).from_address(parameters)
        blocks = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes)]
        launches.append((config.numAttrs == 1, blocks))
        return (driver.cu.CUresult.CUDA_SUCCESS,)

    def load(family, spec, device):
        name = f"{spec.family.upper()}_ARGUMENTS"
        block, maps = (
            next((getattr(each, name) for each in (moe, exchange) if hasattr(each, name)), quantizers.ARGUMENTS),
            0,
        )
        if family is gemms.KERNELS:
            block, maps = (gemms.GROUPED_ARGUMENTS, 5) if spec.experts else (gemms.ARGUMENTS, 3)
        return driver.LoadedKernel([128] * maps + [struct.calcsize("<" + "".join(block.fields.values()))], None, device)

    monkeypatch.setattr(driver.cu, "cuLaunchKernelEx", launch)
    monkeypatch.setattr(driver, "use_context", lambda device: None)
    monkeypatch.setattr(driver, "resident_ctas", lambda *_: 2)
    monkeypatch.setattr(driver, "resident_clusters", lambda *_: 60)
    monkeypatch.setattr(driver.TileMap, "encode", lambda self, address: address.to_bytes(128, "little"))
    monkeypatch.setattr(KernelFamily, "load", load)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launching, "current_device", lambda: -1)
    monkeypatch.setattr(launching, "current_stream", lambda device: 7)
    for module in (gemms, loaded, quantizers, moe):
        monkeypatch.setattr(module, "device_of", lambda index: DEVICES["h200"])
    return launches


def remembered(monkeypatch) -> tuple[launching.LaunchCache, list[tuple[bool, list[bytes]]]]:
    """Public calls of CPU tensors, as if on a GPU: what this thread remembers of them, from nothing on, and
    launches."""
    launches = without_driver(monkeypatch)
    cache = launching.LaunchCache()
    monkeypatch.setattr(launching.this_thread, "cache", cache)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(synchronize=lambda: None))
    return cache, launches


def gemm_operands(*, group_size: int = builders.PER_CHANNEL, affine: bool = True, m: int = 5) -> Gemm:
    """Operands that have all the tensors that there are."""
    x, x_scale, x_zero = builders.affine_lhs(1, m, K)
    weight = builders.weight_parts(2, N, K, group_size, scale_type="fp16").packed
    out = torch.empty(m, N, dtype=torch.bfloat16)
    return Gemm(x, x_scale, x_zero if affine else None, weight, out, builders.bias(3, N))


def quantizer_inputs(m: int = 5) -> QuantizeCall:
    """A call that has all the tensors that go together."""
    one = torch.ones(1)
    return QuantizeCall(
        torch.randn(m, K, dtype=torch.bfloat16),
        activation_of(torch.int8, "tensor", True),
        Prologue(
            norm=torch.ones(K, dtype=torch.bfloat16),
            eps=0.25,
            residual=torch.randn(m, 2 * K, dtype=torch.bfloat16)[:, K:],
            residual_out=torch.empty(m, 3 * K, dtype=torch.bfloat16)[:, :K],
            permutation=torch.randperm(K).int(),
        ),
        scale=one,
        zero=one.int(),
    )
