"""From a quantiser's checked arguments to a launch, as `gemm/plan.py` does for GEMMs."""

from __future__ import annotations

import torch

from jitgemm.activations.arguments import POINTERS, Inputs, Outputs
from jitgemm.activations.kernel import (
    KERNEL_NAME,
    MAX_PERMUTED_K,
    QuantizeSpec,
    block_dims,
    quantize_source,
    quantize_spec,
    smem_bytes,
    spec_for_rows,
)
from jitgemm.activations.scheme import SILU_MUL
from jitgemm.dtypes import DTYPES
from jitgemm.kernel.formats import ceil_div
from jitgemm.runtime import driver
from jitgemm.runtime.device import device_of
from jitgemm.runtime.loaded import KernelFamily
from jitgemm.runtime.launch import ArgumentBlock, Launch
from jitgemm.tensors import TYPE_NAMES

ARGUMENTS = ArgumentBlock(
    POINTERS, x_row_bytes="Q", q_row_bytes="Q", m="I", k="I", eps="f", norm_weight_type="i", gate_limit="f",
    gate_alpha="f", scale_row_stride="Q", scale_block_stride="Q", residual_row_bytes="Q", sum_row_bytes="Q",
    rows_of_count="Q",
)  # fmt: skip
"""`QuantizeArgs` in include/jitgemm/quantize.cuh."""


KERNELS: KernelFamily[QuantizeSpec] = KernelFamily(
    KERNEL_NAME,
    quantize_source,
    smem_bytes=lambda spec: MAX_PERMUTED_K if spec.permuted else 0,
    call="quantize_activations once with these arguments",
)


class QuantizePlan(Launch):
    """A prepared call, for tensors of the shapes, strides, dtypes and device that it was made for.

    The kernel may start while the kernel before it still runs: it reads and writes nothing before that has ended.
    """

    __slots__ = ("spec",)

    def __init__(self, inputs: Inputs, outputs: Outputs):
        x, q, scale, norm, gate = inputs.x, *outputs[:2], inputs.rms_norm, inputs.gate or SILU_MUL
        m, k, device = inputs.rows, inputs.k, x.get_device()
        spec = quantize_spec(
            k,
            TYPE_NAMES[x.dtype],
            TYPE_NAMES[q.dtype],
            affine=inputs.affine,
            static=inputs.static,
            gate=inputs.gate,
            rms_norm=norm is not None,
            permuted=inputs.permutation is not None,
            block=inputs.block,
            gathered=inputs.row_index is not None,
            residual=inputs.residual is not None,
            masked=inputs.masked,
        )
        sms = device_of(device).num_sms
        spec = self.spec = spec_for_rows(spec, k, m, sms)
        kernel = KERNELS.load(spec, device)
        threads, rows = block_dims(spec, k)
        smem = smem_bytes(spec, k)
        driver.use_context(device)
        resident = max(1, driver.resident_ctas(kernel, threads * rows, smem))
        super().__init__(
            kernel,
            ARGUMENTS,
            {
                "x_row_bytes": row_bytes(x),
                "q_row_bytes": row_bytes(q),
                "m": m,
                "k": k,
                "eps": inputs.eps,
                "norm_weight_type": 0 if norm is None else DTYPES[TYPE_NAMES[norm.dtype]].number,
                "gate_limit": gate.limit,
                "gate_alpha": gate.alpha,
                "scale_row_stride": scale.stride(0) if inputs.block else 0,
                "scale_block_stride": scale.stride(1) if inputs.block else 0,
                "residual_row_bytes": row_bytes(inputs.residual),
                "sum_row_bytes": row_bytes(inputs.residual_out),
                "rows_of_count": 0 if inputs.row_count is None else m // inputs.row_count.shape[0],
            },
            grid=min(ceil_div(m, rows), resident * sms) * spec.ctas,
            threads=(threads, rows),
            smem_bytes=smem,
        )

    def launch(self, inputs: Inputs, outputs: Outputs) -> None:
        """Runs on the tensors' device and its current stream. Raises as `Launch.run`."""
        x, _, _, _, given_scale, given_zero, _, rms_norm, _, permutation, row_count, _, row_index, *sums = inputs
        residual, total = sums
        q, scale, zero = outputs
        addresses = (
            x.data_ptr(),
            q.data_ptr(),
            scale.data_ptr(),
            0 if zero is None else zero.data_ptr(),
            0 if given_scale is None else given_scale.data_ptr(),
            0 if given_zero is None else given_zero.data_ptr(),
            0 if rms_norm is None else rms_norm.data_ptr(),
            0 if permutation is None else permutation.data_ptr(),
            0 if row_count is None else row_count.data_ptr(),
            0 if row_index is None else row_index.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0 if total is None else total.data_ptr(),
            self.number,
        )
        if not self.run(addresses, True):
            self.run(addresses, True, inputs.tensors(outputs))


def row_bytes(tensor: torch.Tensor | None) -> int:
    """From row to row. One row's stride is never walked, and torch may report any value for it."""
    return 0 if tensor is None or tensor.shape[0] < 2 else tensor.stride(0) * tensor.element_size()
