"""From a quantiser's checked arguments to a launch, as `gemm/launch.py` does for GEMMs."""

from __future__ import annotations

import torch

from jitgemm.activations.arguments import POINTERS
from jitgemm.activations.kernel import MAX_PERMUTED_K, QuantizeSpec, block_dims, quantize_source
from jitgemm.activations.kernel import quantize_spec, smem_bytes, spec_for_rows
from jitgemm.activations.scheme import SILU_MUL, Activation, Prologue
from jitgemm.dtypes import DTYPES
from jitgemm.kernel.formats import Correction, ceil_div
from jitgemm.runtime.device import device_of
from jitgemm.runtime.loaded import KernelFamily, resident
from jitgemm.runtime.launch import ArgumentBlock, Launch, Operands
from jitgemm.tensors import TYPE_NAMES

ARGUMENTS = ArgumentBlock(
    POINTERS, x_row_bytes="Q", q_row_bytes="Q", m="I", k="I", eps="f", norm_weight_type="i", gate_limit="f",
    gate_alpha="f", scale_row_stride="Q", scale_block_stride="Q", residual_row_bytes="Q", sum_row_bytes="Q",
    rows_of_count="Q", given_stride="Q",
)  # fmt: skip
"""`QuantizeArgs` in include/jitgemm/quantize/types.cuh."""

KERNELS: KernelFamily[QuantizeSpec] = KernelFamily(
    quantize_source, smem_bytes=lambda spec: MAX_PERMUTED_K if spec.permuted else 0,
    call="quantize_activations once with these arguments",
)  # fmt: skip


def prepare(
    activation: Activation, prologue: Prologue, correction: Correction | None, masked: bool, operands: Operands
) -> Launch:
    """The launch for calls of these shapes, strides, dtypes and device; operands: in the order of POINTERS.

    The kernel may start while the kernel before it still runs: it reads and writes nothing before that has ended.
    """
    x, q, scale, _, given_scale, _, norm, _, row_count, row_index, residual, total = operands
    assert x is not None and q is not None and scale is not None
    device, block, gate = x.get_device(), activation.block, prologue.gate or SILU_MUL
    m, k = q.shape[0], x.shape[1] // (prologue.gate.inputs if prologue.gate else 1)
    spec = quantize_spec(
        k, TYPE_NAMES[x.dtype], activation.dtype, **activation.flags, **prologue.flags, masked=masked,
        gathered=row_index is not None, correction=correction,
    )  # fmt: skip
    spec = spec_for_rows(spec, k, m, device_of(device).num_sms)
    kernel = KERNELS.load(spec, device)
    threads, rows = block_dims(spec, k)
    smem = smem_bytes(spec, k)
    values = {
        "x_row_bytes": row_bytes(x),
        "q_row_bytes": row_bytes(q),
        "m": m,
        "k": k,
        "eps": prologue.eps,
        "norm_weight_type": 0 if norm is None else DTYPES[TYPE_NAMES[norm.dtype]].number,
        "gate_limit": gate.limit,
        "gate_alpha": gate.alpha,
        "scale_row_stride": scale.stride(0) if block else 0,
        "scale_block_stride": scale.stride(1) if block else 0,
        "residual_row_bytes": row_bytes(residual),
        "sum_row_bytes": row_bytes(total),
        "rows_of_count": 0 if row_count is None else m // row_count.shape[0],
        "given_stride": 0 if given_scale is None or given_scale.numel() == 1 else 1,
    }
    grid = min(ceil_div(m, rows), resident(kernel, device, threads * rows, smem)) * spec.ctas
    return Launch(kernel, ARGUMENTS, values, grid=grid, threads=(threads, rows), smem_bytes=smem)


def row_bytes(tensor: torch.Tensor | None) -> int:
    """From row to row. One row's stride is never walked, and torch may report any value for it."""
    return 0 if tensor is None or tensor.shape[0] < 2 else tensor.stride(0) * tensor.element_size()
