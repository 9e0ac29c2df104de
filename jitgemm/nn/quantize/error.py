"""What quantisation does to a layer's results."""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.quantize.stacked import ExpertsLayout
from jitgemm.weight.rotation import rotated

_VALUES = 1 << 26
"""Of a weight at a time."""


def relative_error(
    layer: PackedLinear | PackedExperts, module: torch.nn.Module, layout: ExpertsLayout | None, moments: Any = None
) -> float:
    """The squared error of a layer's results over their squares: 0.01 is 20 dB. Activations' rounding is not in it.

    Args:
        layer: what stands for the module.
        module: a Linear, or experts as `layout` says.
        moments: of the inputs, as `Moments.given` has them. Where there are none, all inputs count the same: the error
            of the weight.
    """
    if isinstance(layer, PackedLinear):
        lost, whole = _squares(layer.weight, module.weight, moments)
    else:
        found = [
            _squares(
                packed.weight[e], layout.rows(getattr(module, name))[e], None if moments is None else moments[i][e]
            )
            for i, (name, packed) in enumerate(zip(layout.parameters, (layer.w13, layer.w2), strict=True))
            for e in range(layout.experts)
        ]
        # Of each projection and expert the same share: inputs of different layers have no common unit.
        lost = sum(lost / whole.clamp(min=torch.finfo(torch.float32).tiny) for lost, whole in found)
        whole = torch.tensor(float(len(found)))
    return float(lost) / float(whole) if float(whole) else 0.0


def _squares(weight: Any, w: torch.Tensor, moments: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(of the error, of all): sums of w M wᵀ's diagonal."""
    with torch.no_grad():
        packed = weight.dequantize()
        packed = rotated(packed) if weight.rotation else packed  # back
        lost = whole = torch.zeros((), dtype=torch.float64, device=packed.device)
        moments = None if moments is None else moments.to(packed.device)
        step = max(1, _VALUES // packed.shape[1])
        for part, old in zip(packed.split(step), w.detach().split(step), strict=True):
            old = old.to(packed.device, torch.float32)
            for_error, for_all = (
                (x * (x if moments is None else x @ moments)).sum(dtype=torch.float64) for x in (part - old, old)
            )
            lost, whole = lost + for_error, whole + for_all
    return lost, whole
