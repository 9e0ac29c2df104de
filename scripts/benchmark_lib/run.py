"""The measurement: cell by cell, all checked, then timed in turns. Whoever fails is noted; the others go on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .cells import H200, Cell, Format, Rates, to_record
from .contestant import Contestant, Refused, Run, Start, cell_floor_bits, short

HOLD_S = 1.0
"""Seconds that --sustained holds a cell."""


@dataclass(frozen=True)
class Settings:
    rounds: int
    replays: int
    sustained: bool
    check_once: bool  # in the first cell of a weight alone
    rates: Rates = H200


class DeviceLost(Exception):
    """The CUDA context is broken (an illegal access somewhere); nothing more can be measured in this process."""


def compile_ahead(cells: Sequence[Cell], formats: Sequence[Format]) -> tuple[int, int]:
    """Compile what the selector chooses for all cells, in threads, so that no cell waits for it.

    Returns:
        (kernels, of them compiled now). A kernel that fails to compile fails again where it is used, and is noted
        there.
    """
    import torch

    from jitgemm.cli.common import err
    from jitgemm.jit.cache import KernelCache
    from jitgemm.jit.compile_many import compile_all, default_threads, look_up
    from jitgemm.kernel.render import kernel_source
    from jitgemm.runtime.device import device_of
    from jitgemm.select.choose import choose

    device, cache = device_of(torch.cuda.current_device()), KernelCache()
    specs = dict.fromkeys(choose(cell.problem(fmt), device) for fmt in formats for cell in cells)
    jobs = [look_up(cache, kernel_source(spec)) for spec in specs]
    return len(jobs), sum(job.compiled for job in compile_all(cache, jobs, default_threads(), err(), bar=False))


def measure(
    cells: Sequence[Cell],
    contestants: Sequence[Contestant],
    settings: Settings,
    done: Callable[[dict], None],
    say: Callable[[str], None],
) -> None:
    """Times every cell.

    Args:
        cells: in any order; cells that share weights are taken together.
        contestants: those that can take part here.
        done: receives each cell's record as soon as it is there, so that a crash loses one cell at most.
        say: told what goes on.

    Raises:
        DeviceLost: the cells given to `done` stand.
    """
    from .data import source_of

    weights: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        weights.setdefault(cell.weight, []).append(cell)
    for mine in weights.values():
        say(f"{mine[0].name.rpartition(' ')[0]}: packing weights")
        source = source_of(mine[0])
        starters: dict[str, Start] = {}
        failures: dict[str, str] = {}
        for each in contestants:
            try:
                starters[each.name] = each.load(source)
            except Exception as error:
                failures[each.name] = _reason(error)
                _check_context(error)
        for number, cell in enumerate(mine):
            checks = not (settings.check_once and number)
            say(f"{cell.name}: {'checking and ' * checks}timing")
            record = _measure_cell(cell, contestants, starters, failures, source, settings, checks)
            done(record)
            if settings.check_once:
                wrong = [name for name, each in record["results"].items() if each.get("correct") is False]
                failures |= dict.fromkeys(wrong, f"WRONG RESULT at {cell.name}, not timed")
        del starters, source
        _free()


def _measure_cell(
    cell: Cell,
    contestants: Sequence[Contestant],
    starters: dict[str, Start],
    failures: dict[str, str],
    source,  # type: ignore[no-untyped-def]
    settings: Settings,
    checks: bool,
) -> dict:
    import torch

    from .checks import check
    from .timing import Timed

    results: dict[str, dict] = {}
    timed: dict[str, Timed] = {}
    runs: dict[str, Run] = {}
    before: dict[str, object] = {}
    by_name, floor_bits = {each.name: each for each in contestants}, cell_floor_bits(contestants)
    for each in contestants:
        result = results[each.name] = {"us": None, "note": failures.get(each.name, "")}
        if each.name in failures:
            continue
        try:
            run = starters[each.name](cell.m)
            result["note"] = run.note
            if checks:
                result |= check(run, source, cell.m)
                if not result["correct"]:
                    result["note"] = "WRONG RESULT, not timed"
                    continue
                before[each.name] = run.snapshot() if run.snapshot is not None else None
            timed[each.name], runs[each.name] = Timed(run.calls), run
            result["kernel"] = run.kernel()
        except Exception as error:
            result["note"] = _reason(error)
            _check_context(error)

    for name in _turns(timed, settings):
        try:
            if settings.sustained:
                results[name] |= timed[name].hold(HOLD_S)
            else:
                timed[name].turn(settings.replays)
        except Exception as error:
            results[name]["note"] = _reason(error)
            timed[name].turns.clear()
            _check_context(error)

    for name, clock in timed.items():
        if not clock.turns:
            continue
        result, run = results[name], runs[name]
        result |= {
            "us": round(clock.us, 3),
            "spread": round(clock.spread, 4),
            "replays": len(clock.times),
            "copies": clock.calls,
            "tflops": round(cell.ops / clock.us / 1e6, 2),
            "gbs": round(run.bytes / clock.us / 1e3, 1),
        }
        bits = by_name[name].floor_bits if by_name[name].ours else floor_bits
        mine = cell.floor_us(settings.rates, bits)
        result |= {"floor_us": round(mine, 3), "floor_bits": bits, "floor_percent": round(100 * mine / clock.us, 1)}
        if before.get(name) is not None and not torch.equal(before[name], run.snapshot()):
            result["correct"] = False
            result["note"] = "WRONG: bits changed between the check and the replays"
    floor = {"floor_us": round(cell.floor_us(settings.rates, floor_bits), 3), "floor_bits": floor_bits}
    record = to_record(cell) | floor | {"results": results}
    del timed, runs, before
    _free()
    return record


def _turns(timed: dict, settings: Settings) -> list[str]:
    """Who is measured when: everybody once a round, each round in another order, the same in every run."""
    names = list(timed)
    if settings.sustained:
        return names
    return [name for i in range(settings.rounds) for name in random.Random(i).sample(names, len(names))]


def _reason(error: BaseException) -> str:
    return f"refused: {error}" if isinstance(error, Refused) else f"failed: {short(error)}"


def _check_context(error: BaseException) -> None:
    """After a failure: is the CUDA context still good?"""
    import torch

    if isinstance(error, Refused):
        return
    try:
        torch.cuda.synchronize()
        torch.zeros(8, device="cuda").sum().item()
    except Exception as broken:
        raise DeviceLost(f"{short(error)}; after it the device answers: {short(broken)}") from error


def _free() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
