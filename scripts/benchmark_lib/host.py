"""What a call costs the host: microseconds from entering it to being free again, while the GPU's queue never fills."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .cells import DEFAULT_FORMATS, Format
from .contestant import Contestant, short
from .timing import host_microseconds, relative_spread

LAYERS = 32
BURST = 250
"""Calls between two waits; with at most one launch each, a quarter of what the queue holds."""
BURSTS = 40


def measure_host(
    n: int, k: int, m: int, contestants: Sequence[Contestant], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row a contestant; then parts of our first format's call, the same call as a `torch.library` op, and an empty
    call: what the clock's own loop costs.

    Returns:
        name, label; same_us: one weight, activation and output, over and over; rotating_us: 32 weights in turn,
        activations and outputs alternating between two, as a model's layers do; spread of the latter; note.
    """
    import torch

    from .data import Source

    source = Source(n, k)
    rows = []
    for each in contestants:
        say(f"host: {each.name}")
        rows.append(_row(each.name, each.label, lambda: each.load(source, LAYERS)(m, 2).calls, torch.cuda.synchronize))
    formats = {fmt.name: fmt for fmt in DEFAULT_FORMATS}
    for fmt in [formats[each.name] for each in contestants if each.name in formats][:1]:
        say("host: parts of a call")
        for name, what, part in PARTS:
            label = f"of {fmt.name}: {what}"
            rows.append(
                _row(f"{fmt.name}_{name}", label, lambda: _part_calls(fmt, source, m, part), torch.cuda.synchronize)
            )
        say("host: torch.library op")
        label = f"the same as a torch.library op ({fmt.name})"
        rows.append(_row(f"{fmt.name}_op", label, lambda: _op_calls(fmt, source, m), torch.cuda.synchronize))
    rows.append(
        _row("empty", "an empty call, part of every figure above", lambda: [partial(_nothing, None)] * LAYERS, _nothing)
    )
    return rows


def _row(
    name: str, label: str, make: Callable[[], Sequence[Callable[[], Any]]], synchronise: Callable[[], Any]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "label": label,
        "same_us": None,
        "rotating_us": None,
        "spread": None,
        "note": "",
    }
    try:
        calls = make()
        for call in calls:
            call()
        same = host_microseconds(calls[:1], synchronise, BURST, BURSTS)
        rotating = host_microseconds(calls, synchronise, BURST, BURSTS)
    except Exception as error:
        return row | {"note": short(error)}
    return row | {
        "same_us": round(statistics.median(same), 3),
        "rotating_us": round(statistics.median(rotating), 3),
        "spread": round(relative_spread(rotating), 4),
    }


def _launch(plan: Any, operands: Any) -> Callable[[], Any]:
    return partial(plan.launch, operands)


def _driver(plan: Any, operands: Any) -> Callable[[], Any]:
    """`cuLaunchKernelEx` with what the plan gives it."""
    import torch
    from cuda.bindings import driver as cu

    plan.launch(operands)
    launch, parameters = plan._launch, next(reversed(plan._remembered.values()))
    launch.run(parameters, torch.cuda.current_stream().cuda_stream, True)
    call = partial(cu.cuLaunchKernelEx, launch._config, launch._kernel, parameters.address, 0)
    call.keep = plan, operands, parameters  # type: ignore[attr-defined]  # whose addresses it holds
    return call


PARTS = (("launch", "from the plan on, that is without its look-up", _launch), ("driver", "cuLaunchKernelEx", _driver))


def _layers(fmt: Format, source: Any, m: int) -> list[Any]:
    """The GEMM of each layer, activations and outputs alternating between two."""
    import copy

    import torch

    from jitgemm.gemm.problem import Gemm

    from .ours import lhs_of, weight_of

    first = weight_of(fmt, source)
    pairs = [lhs_of(fmt, source.activations(m, i)) for i in range(2)]
    outs = [torch.empty(m, source.n, dtype=torch.bfloat16, device=source.device) for _ in range(2)]
    weights = [first] + [copy.deepcopy(first) for _ in range(LAYERS - 1)]
    return [Gemm(*pairs[i % 2], None, weight, outs[i % 2], None) for i, weight in enumerate(weights)]


def _part_calls(fmt: Format, source: Any, m: int, part: Callable[..., Callable[[], Any]]) -> list[Callable[[], Any]]:
    from jitgemm.gemm.launch import GemmLaunch

    return [part(GemmLaunch(operands), operands) for operands in _layers(fmt, source, m)]


def _op_calls(fmt: Format, source: Any, m: int) -> list[Callable[[], Any]]:
    """The op with the arguments that `gemm_w4a8_bf16_nt` gives it under `torch.compile`."""
    from jitgemm.gemm.run import call_op

    return [partial(call_op, operands) for operands in _layers(fmt, source, m)]


def _nothing(*_: Any) -> None:
    return None
