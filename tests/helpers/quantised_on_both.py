"""A quantiser's results on a GPU and on the CPU."""

from __future__ import annotations

import torch
from quantize_cases import MODES

from jitgemm.activations.call import quantize_activations
from jitgemm.kernel.formats import lhs_columns

POISON = 0x5B


def on_cpu(arguments: dict) -> dict:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


class Guarded:
    """Outputs in a sea of poison; `check` says whether anything else was written."""

    def __init__(self, m: int, k: int, mode: str):
        dtype, affine = MODES[mode]
        self._q = torch.full((m + 2, k + 48), POISON, dtype=torch.uint8, device="cuda")
        self._rows = [torch.full((m + 2,), POISON, dtype=torch.int32, device="cuda") for _ in range(1 + affine)]
        inside = (self._rows[0][1 : m + 1].view(torch.float32), *(t[1 : m + 1] for t in self._rows[1:]))
        self.out = (self._q[1 : m + 1, 16 : 16 + k].view(dtype), *inside)

    def check(self) -> tuple[torch.Tensor, ...]:
        results = tuple(t.clone() for t in self.out)
        m, k = self.out[0].shape
        self._q[1 : m + 1, 16 : 16 + k] = POISON
        assert bool((self._q == POISON).all()), "the kernel wrote beside q"
        for rows in self._rows:
            assert bool((rows[[0, -1]] == POISON).all()), "the kernel wrote beside a row's results"
        return results


def run_both(x: torch.Tensor, mode: str, **arguments) -> tuple[tuple, tuple]:
    """(GPU's results, CPU's) of the same tensors, which are on the GPU."""
    dtype, affine = MODES[mode]
    k = x.shape[1] // 2 if {"silu_mul", "gelu_mul"} & set(arguments) else x.shape[1]
    guarded = Guarded(x.shape[0], lhs_columns(k, arguments.get("correction")), mode)
    quantize_activations(x, dtype, affine=affine, out=guarded.out, **arguments)
    expected = quantize_activations(x.cpu(), dtype, affine=affine, **on_cpu(arguments))
    return guarded.check(), expected


def run_both_by_block(x: torch.Tensor, dtype: torch.dtype, **arguments) -> tuple[tuple, tuple]:
    """The same with a scale for each block; the GPU's are written by column."""
    m, k = x.shape[0], x.shape[1] // (2 if arguments.get("silu_mul") else 1)
    q = torch.full((m + 2, k + 48), POISON, dtype=torch.uint8, device="cuda")
    scale = torch.full((-(-k // 128) + 2, m + 7), 91.0, device="cuda")
    out = q[1:-1, 16 : 16 + k].view(dtype), scale[1:-1, 3 : 3 + m].T
    quantize_activations(x, dtype, scheme="block", out=out, **arguments)
    results = tuple(each.clone() for each in out)
    q[1:-1, 16 : 16 + k], scale[1:-1, 3 : 3 + m] = POISON, 91.0
    assert bool((q == POISON).all() and (scale == 91.0).all()), "the kernel wrote beside its results"
    return results, quantize_activations(x.cpu(), dtype, scheme="block", **on_cpu(arguments))
