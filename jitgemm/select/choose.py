"""The choice: of the kernels that exist (`legal`), the one that the model predicts to be the fastest (`cost`).

Pure functions of a problem and a device's figures; no torch, no driver, no table of tuned shapes.

A layer has the kernels that are the fastest at the ends of bands over m, so that they are few and a new m compiles
none. A dense GEMM of many rows takes its band's or one of the three before, the fastest at its m: waves of tiles do not
end where bands do.

A grouped GEMM (`Problem.experts`) is chosen for the rows that all its experts have together: how many each one has is
known to the device alone, so that the prediction is the mean over a few routings (`cost.routings`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from jitgemm.kernel.formats import Problem, WeightFormat, ceil_div
from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import with_k_rules
from jitgemm.select import cost, legal
from jitgemm.select.cost import Costs
from jitgemm.select.devices import DeviceSpec


def bands(max_m: int, experts: int = 0) -> list[tuple[int, int]]:
    """The runs of m, first and last included, whose ends a layer has kernels for.

    Steps of 8, 16, 32, 64 and so on, an eighth of m at least, then doubling. With experts steps of 1 up to 8, then
    sixteen from one power of two to the next, because kernels follow the part of the experts that have rows, and the
    rows that one has: a tile with room for a few more is the best, and one for a quarter more wastes a quarter.
    """
    if max_m < 1:
        raise ValueError(f"max_m: expected at least 1, got {max_m}")
    out = []
    first = 1
    while first <= max_m:
        last = band_end(first, experts)
        out.append((first, last))
        first = last + 1
    return out


def band_end(m: int, experts: int = 0) -> int:
    """The last m of its band."""
    if experts:
        step = max(1, 2 ** (m - 1).bit_length() // 32)
        return ceil_div(m, step) * step
    power = 1 << (m - 1).bit_length()
    if m > 16384:
        return power
    step = 8 if m <= 64 else max(16, power // 16)
    return ceil_div(m, step) * step


@lru_cache(maxsize=4096)
def _costed(
    lhs: str, fmt: WeightFormat, device: DeviceSpec, out: str, block_m: int, experts: int, lhs_group: int, sums: str
) -> tuple[tuple[KernelSpec, Costs], ...]:
    """The legal kernels with tiles of `block_m` tokens, with their costs, which no problem changes."""
    every = legal.kernels(lhs, fmt, device, out, block_m, experts, lhs_group, sums)
    return tuple((spec, cost.costs(spec, device)) for spec in every)


def _considered(problem: Problem, device: DeviceSpec) -> Iterator[tuple[KernelSpec, Costs]]:
    asked = IN_ORDER if problem.in_order else _order_of(problem, device) if problem.batch_invariant else None
    rows = cost.most_rows(problem.experts, problem.m, problem.rows_vary)
    fast = problem.lhs == "s8" and not problem.format.decodes_slowly
    few_columns = problem.experts > 0 and fast and problem.k < legal.FINER_GROUPED_K
    for block_m in legal.BLOCK_MS:
        if block_m >= 2 * max(rows, 8):
            break  # half of the tile would be padding: a lower one does
        if few_columns and block_m in legal.FINER_MS:
            continue
        formats = problem.lhs, problem.format, device, problem.out
        for spec, costs in _costed(*formats, block_m, problem.table_size, problem.lhs_group, problem.sums):
            if asked is None or asked == _order(spec):
                yield spec, costs


def _as_asked(spec: KernelSpec, problem: Problem) -> KernelSpec:
    """The kernel with what costs nothing to choose."""
    spec = with_k_rules(spec, problem.lhs_columns)
    return spec if spec.lhs_e8m0 == problem.lhs_e8m0 else replace(spec, lhs_e8m0=problem.lhs_e8m0)


def _rank(us: float, spec: KernelSpec) -> tuple[float, int, bool, int, int, str]:
    """Best first. Ties go to the smaller tile, to sums that all splits reduce, then by whether a cluster shares an
    activations: experts' kernels that do, dense ones that do not."""
    shares = -spec.multicast_lhs if spec.experts else spec.multicast_lhs
    return us, spec.block_m * spec.block_n, not spec.reduce_scatter, shares, spec.token_halves, spec.label


EXACT_FROM = 256
"""Rows from which a dense GEMM is chosen at its own m. Below, a band's kernels differ by less than the model errs."""

WEIGHED_BANDS = 4
"""Bands whose kernels are weighed there. By the model two lose 0.3 % more in the mean and nine 0.3 % less, which take
17 ms for a layer's first m instead of 8."""


def _at_band_end(problem: Problem) -> Problem:
    m = band_end(problem.m, problem.experts)
    return replace(problem, m=m, rows_vary=problem.rows_vary and m <= cost.DRAWN_ROWS * problem.experts)


def _by_band(problem: Problem) -> bool:
    """Whether all m of a band share a kernel."""
    return problem.experts > 0 or problem.m <= EXACT_FROM


def seen(problem: Problem) -> Problem:
    """As the selector sees it: at its own m, or at its band's end."""
    return _at_band_end(problem) if _by_band(problem) else replace(problem, rows_vary=False)


@lru_cache(maxsize=4096)
def _choose(problem: Problem, device: DeviceSpec) -> KernelSpec:
    best: tuple[float, KernelSpec] | None = None
    for spec, costs in _considered(problem, device):
        us = cost.times(spec, costs, problem, device)[0].total
        if best is None or us < best[0] or (us == best[0] and _rank(us, spec) < _rank(*best)):
            best = us, spec
    if best is None:
        raise ValueError(f"device: no kernel fits {device}")
    return _as_asked(best[1], problem)


@lru_cache(maxsize=4096)
def _of_layer(problem: Problem, device: DeviceSpec) -> KernelSpec:
    """The fastest for this m of the kernels that are chosen for the ends of its band and of the three before."""
    kernels = dict.fromkeys(_choose(replace(problem, m=end), device) for _, end in bands(problem.m)[-WEIGHED_BANDS:])
    times = {spec: cost.times(spec, cost.costs(spec, device), problem, device)[0].total for spec in kernels}
    return min(kernels, key=lambda spec: _rank(times[spec], spec))


def choose(problem: Problem, device: DeviceSpec) -> KernelSpec:
    """The kernel for a problem: a pure function of the problem and the device's figures, one of `kernels_for`."""
    problem = seen(problem)
    return (_choose if _by_band(problem) else _of_layer)(problem, device)


def kernel_named(label: str, problem: Problem, device: DeviceSpec) -> KernelSpec:
    """The kernel of this label, which `choose` would not have to choose.

    Raises:
        ValueError: it is no label, or one for other operands than the problem's; the device cannot run the kernel, or
            it sums k in another order than batch-invariant calls, which are asked for.
    """
    spec = KernelSpec.from_label(label)
    fmt = problem.format.kernel_format
    operands = replace(
        spec, lhs=problem.lhs, format=fmt, out=problem.out, experts=problem.table_size, lhs_group=problem.lhs_group,
        lhs_e8m0=problem.lhs_e8m0,
    )  # fmt: skip
    if spec != operands:
        raise ValueError(f"kernel: expected one for these operands, such as {operands.label}, got {label}")
    if spec.sums != "f32" and {"f16": "f16", "parts": "f32"}[spec.sums] != problem.sums:
        raise ValueError(f"kernel: expected one that adds up as the call's sums={problem.sums!r} allows, got {label}")
    if spec.tokens_as_m and not problem.format.uniform_strip_scale:
        raise ValueError(f"kernel: expected one for weights whose strips do not share scales, got {label}")
    reason = legal.illegal(spec, device)
    if reason is not None:
        raise ValueError(f"kernel: expected one that an {device.name} can run, got {label}: {reason}")
    if problem.batch_invariant:
        asked = split_k, warpgroups_k, sums = _order_of(problem, device)
        if _order(spec) != asked:
            order = f"{warpgroups_k} warpgroups along k times {split_k} CTAs, in {sums}"
            raise ValueError(f"kernel: expected one that sums k as batch_invariant calls here do, {order}, got {label}")
    return spec


def kernels_for(
    n: int, k: int, lhs: str, format: WeightFormat, device: DeviceSpec, max_m: int, *, out: str = "bf16",
    batch_invariant: bool = False, experts: int = 0, lhs_group: int = 0, lhs_e8m0: bool = False, sums: str = "f32",
    in_order: bool = False,
) -> list[KernelSpec]:  # fmt: skip
    """Every kernel that `choose` can return for this layer with m up to `max_m`, in order of m, each once.

    With experts m counts the rows of all of them, and the kernels are those of every routing, whether rows vary or not.
    """
    layer = Problem(1, n, k, lhs, format, out, batch_invariant, experts, lhs_group, lhs_e8m0, sums, in_order=in_order)
    both = (replace(layer, m=last, rows_vary=vary) for _, last in bands(max_m, experts) for vary in (False, True))
    return list(dict.fromkeys(_choose(_at_band_end(one), device) for one in both))


# ---- batch-invariant calls -------------------------------------------------------------------------------------------

IN_ORDER = 1, 1, "f32"
"""What `_order` is of kernels for `Problem.in_order`."""
ORDER_MS = (1, 16, 64, 256, 1024, 4096)
"""Values of m over which orders of summation are compared; times the experts of a token, about, where there are any."""
ORDER_EXPERTS = 128
"""Experts for which orders are compared where there are any."""
EXPERTS_PER_TOKEN = 1 / 16
"""Part of the experts that a token goes to, about: 8 of 128 and 256, 4 of 128, 2 of 8."""


def _order(spec: KernelSpec) -> tuple[int, int, str]:
    """(split_k, warpgroups_k, sums), which decide in which order k is summed, and in what."""
    return spec.split_k, spec.warpgroups_k, spec.sums


def _order_of(problem: Problem, device: DeviceSpec) -> tuple[int, int, str]:
    """The order of summation of a layer's batch-invariant calls, for any rows, and any number of a rank's experts."""
    experts = ORDER_EXPERTS if problem.experts else 0
    return _invariant_order(replace(problem, m=1, rows_vary=False, experts=experts), device)


@lru_cache(maxsize=512)
def _invariant_order(layer: Problem, device: DeviceSpec) -> tuple[int, int, str]:
    """The order of summation that costs a layer least over all m.

    Tiles, stages and multicast change no sum; promotion follows from the order.
    """
    losses: dict[tuple[int, int, str], list[float]] = {}
    for m in ORDER_MS:
        best: dict[tuple[int, int, str], float] = {}
        rows = m * max(1, round(layer.experts * EXPERTS_PER_TOKEN))
        problem = replace(layer, m=rows, batch_invariant=False)
        for spec, costs in _considered(problem, device):
            us = cost.times(spec, costs, problem, device)[0].total
            best[_order(spec)] = min(us, best.get(_order(spec), math.inf))
        least = min(best.values())
        for order, us in best.items():
            losses.setdefault(order, []).append(math.log(us / least))
    # Some orders are those of tall tiles alone.
    everywhere = (order for order, found in losses.items() if len(found) == len(ORDER_MS))
    return min(everywhere, key=lambda order: (sum(losses[order]), order))
