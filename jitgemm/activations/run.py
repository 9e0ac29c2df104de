"""A quantiser's call beneath the public name, which layers of experts take: one look-up, and on a miss down to a
launch. CPU tensors run `reference.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from jitgemm.activations.arguments import CODES, POINTERS, Outputs, check_arguments
from jitgemm.activations.kernel import check_correction
from jitgemm.activations.scheme import NO_PROLOGUE, Activation, Prologue
from jitgemm.kernel.formats import LHS_GROUP, Correction, ceil_div, lhs_columns
from jitgemm.runtime.launch import Call, Launch, Operands, run_prepared


@dataclass(slots=True)
class QuantizeCall(Call):
    """A call's arguments, x as rows.

    Attributes:
        scale, zero: those of scheme "tensor".
        row_count: int32 [1]: rows from there on are left alone. Or [E]: the result is E parts of as many rows, and of
            each part rows from row_count[e] on are left alone. None: no row is.
        row_index: int32 [m]: row i of the result is row row_index[i] of x, which is not checked. None: row i.
        out: where to write, checked by `check_out`; None for new tensors.
        correction: type and group size of the sums behind the codes; None for none.
    """

    x: torch.Tensor
    activation: Activation
    prologue: Prologue = NO_PROLOGUE
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    row_count: torch.Tensor | None = None
    row_index: torch.Tensor | None = None
    out: Outputs | None = None
    correction: Correction | None = None
    pointers: ClassVar = POINTERS

    @property
    def empty(self) -> bool:
        return (self.x if self.row_index is None else self.row_index).shape[0] == 0

    @property
    def masked(self) -> bool:
        """Whether padding rows may precede valid rows."""
        if self.row_count is None:
            return False
        return self.row_count.shape[0] > 1 or (self.prologue.gate is None and self.row_index is None)

    def check(self) -> None:
        activation = self.activation
        check_correction(self.correction, activation.dtype, activation.block, activation.rotation != 0)
        check_arguments(self.x, activation, self.prologue, self.scale, self.zero, self.row_count, self.row_index)

    def operands(self) -> Operands:
        norm, _, _, residual, total, permutation = self.prologue
        q, scale, zero = self.out or self.new_outputs()
        return (
            self.x, q, scale, zero, self.scale, self.zero, norm, permutation, self.row_count, self.row_index, residual,
            total,
        )  # fmt: skip

    def new_outputs(self) -> Outputs:
        """Tensors to write to."""
        x, index, (dtype, scheme, affine, _) = self.x, self.row_index, self.activation
        (m, k), device = x.shape, x.device
        m, k = m if index is None else index.shape[0], k // (self.prologue[2].inputs if self.prologue[2] else 1)
        q = torch.empty(m, lhs_columns(k, self.correction), dtype=CODES[dtype], device=device)
        if scheme == "block":  # by column, as DeepGEMM has them
            shape = m, ceil_div(k, LHS_GROUP)
            scales = torch.empty_strided(shape, (1, 4 * ceil_div(m, 4)), dtype=torch.float32, device=device)
        else:
            scales = torch.empty(m, dtype=torch.float32, device=device)
        return q, scales, torch.empty(m, dtype=torch.int32, device=device) if affine else None

    def run_reference(self, operands: Operands) -> None:
        from jitgemm.activations.reference import write_reference

        write_reference(self.activation, self.prologue, self.correction, operands)

    def prepare(self, operands: Operands) -> Launch:
        from jitgemm.activations.plan import prepare

        return prepare(self.activation, self.prologue, self.correction, self.masked, operands)


def quantize(call: QuantizeCall) -> Outputs:
    """The call, directly or by its op, into its `out` or new tensors."""
    x, out, (norm, eps, gate, residual, total, permutation) = call.x, call.out, call.prologue
    scale, zero, row_count, row_index = call.scale, call.zero, call.row_count, call.row_index
    key = (
        x.numel(), call.activation, gate, eps, scale is None, zero is None, norm is None, permutation is None,
        row_count is None, row_index is None, out is None, residual is None, total is x, total is residual,
        torch.is_grad_enabled(), call.correction,
    )  # fmt: skip
    layouts = [x] if out is None else [x, out[0], out[1]]
    layouts += [t for t in (scale, zero, norm, permutation, row_count, row_index, residual) if t is not None]
    if total is not None and total is not x and total is not residual:
        layouts.append(total)
    return run_prepared(key, layouts, call)[1:4]  # type: ignore[return-value]
