"""Which kernel a GEMM call takes, and why: what `jitgemm explain` prints, of tensors at hand. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from jitgemm.gemm.problem import ANY, Gemm, Lhs, X, check_types, check_weight, pack_e8m0, split_lhs
from jitgemm.weight.parts import check_rotated

if TYPE_CHECKING:
    from jitgemm.weight.packed import AnyWeight


@dataclass(frozen=True)
class Explanation:
    """Which kernel a call takes. Printed, it says so in words.

    Attributes:
        kernel: the kernel's label, as `jitgemm cache show LABEL` and the calls' `kernel=` take it.
        function: the kernel's name in a profile.
        device: the device that it is chosen for.
        rows: (first, last) m that share the kernel.
        predicted_us: the model's prediction in microseconds, for the last of these m.
        bound_by: what takes longest in the prediction, a name of `jitgemm.select.ranked.TERMS`.
        candidates: how many kernels were compared.
        why: one sentence on the winner against the runner-up.
        legend: (part, what it says) for each part of the label.
        on_cpu: the tensors are the CPU's: the exact reference multiplies them, and the kernel is the device's for such
            a call.
        rotation: the weight's, which changes no kernel of a GEMM.
        faster_instead: what to take instead, where operands of another kind are faster in prefill; else "".
    """

    kernel: str
    function: str
    device: str
    rows: tuple[int, int]
    predicted_us: float
    bound_by: str
    candidates: int
    why: str
    legend: tuple[tuple[str, str], ...]
    on_cpu: bool = False
    faster_instead: str = ""
    rotation: int = 0

    def __str__(self) -> str:
        width = max(len(part) for part, _ in self.legend)
        lines = ["on the CPU the exact reference runs, and no kernel; on a GPU it would be:"] if self.on_cpu else []
        lines.append(f"{self.kernel} on {self.device}, in a profile {self.function}")
        lines += [f"  {part:<{width}}  {text}" for part, text in self.legend]
        first, last = self.rows
        lines.append(f"m = {first}..{last} share it; predicted {self.predicted_us:.2f} us, bound by {self.bound_by}")
        lines.append(f"of {self.candidates} candidates {self.why}")
        from jitgemm.kernel.legend import ROTATED

        return "\n".join([*lines, *filter(None, [self.faster_instead, ROTATED if self.rotation else ""])])


def explain(lhs: Lhs, rhs: AnyWeight, out: torch.Tensor, *, batch_invariant: bool = False) -> Explanation:
    """Which kernel `gemm_w4a8_nt` or `gemm_w8a8_nt` takes for these arguments, and why. Compiles and launches nothing.

    Args:
        lhs, rhs, out, batch_invariant: as `gemm_w4a8_nt` takes them; rhs may have 8 bits. For CPU tensors, which
            the reference multiplies, the kernel is the one of an H200.

    Raises:
        TypeError, ValueError: as the call; lhs without rows.
        UnsupportedDeviceError: the tensors' GPU is no Hopper.
    """
    from jitgemm import settings
    from jitgemm.gemm.launch import problem_of
    from jitgemm.jit.source import function_name
    from jitgemm.kernel.legend import legend
    from jitgemm.runtime.device import device_of
    from jitgemm.select.choose import bands
    from jitgemm.select.devices import device_spec
    from jitgemm.select.ranked import candidates, faster_instead, why

    x, x_scale, x_zero = split_lhs(lhs)
    gemm = Gemm(x, x_scale, x_zero, rhs, out, None, None, batch_invariant)
    check_rotated(lhs, getattr(check_weight(rhs, ANY), "rotation", 0))
    check_types(gemm)
    if gemm.packs_scales:
        gemm = gemm._replace(x_scale=pack_e8m0(x_scale))
    gemm.check()
    if gemm.empty:
        raise ValueError(f"{X}: expected at least one row, got shape {list(x.shape)}")
    device = device_of(x.get_device()) if x.is_cuda else device_spec("h200")
    problem = problem_of(gemm)
    ranked = candidates(problem, device)
    best = ranked[0]
    label = best.kernel.label + ("-debug" if settings.debug() else "")
    return Explanation(
        label, function_name(label), device.name, bands(problem.m)[-1], best.predicted_us, best.bound_by, len(ranked),
        why(ranked), tuple(legend(label)), x.device.type == "cpu", faster_instead(problem),
        getattr(rhs, "rotation", 0),
    )  # fmt: skip
