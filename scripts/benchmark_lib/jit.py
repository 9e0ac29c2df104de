"""What stands before a first call: compiling a kernel, finding one on disk, and whole first calls beside the peers'.

Every figure comes from a fresh process (`jit_probe.py`), since only that pays for what a process loads once. Without
a GPU the first two parts still run, for a named device.
"""

from __future__ import annotations

import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "jitgemm"
PROBE = Path(__file__).resolve().parent / "jit_probe.py"
TIMEOUT_S = 240
REPEATS = 5
PEER_CACHES = ("HUMMING_CACHE_DIR", "QUACK_CACHE_DIR")
"""Where humming and QuACK keep what they compiled, so that a peer starts as cold as we do."""


class ProbeFailed(Exception):
    """A probe ended without an answer; the message is the last line of its complaint."""


def measure_jit(
    n: int, k: int, m: int, m2: int, formats: Sequence[tuple[str, int]], callers: Sequence[str], device: str | None,
    say: Callable[[str], None], repeats: int = REPEATS,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of {what, ms, least, most, note}.

    Args:
        n, k, m, m2: the layer, and two m's that take different kernels.
        formats: (lhs, group size) of the kernels to compile.
        callers: contestants whose first calls are timed; none on a machine without a GPU.
        device: device to compile for; None for the one at hand, else an H200.
    """
    # As pip leaves a package: a checkout that just arrived has its Python not compiled yet.
    compileall.compile_dir(PACKAGE, quiet=2)
    rows: list[dict[str, Any]] = []
    sizes = {"n": n, "k": k, "m": m, "m2": m2}
    for lhs, group in formats:
        name = f"{lhs} {'g' + str(group) if group else 'per channel'}"
        arguments = sizes | {"lhs": lhs, "group": group, "device": device}
        say(f"jit: compiling {name}")
        with tempfile.TemporaryDirectory(prefix="jitgemm-bench-") as folder:
            cold = _repeat("kernel", arguments, repeats, lambda i: _cache_variables(Path(folder) / f"cold{i}"))
            rows.append(_row(f"{name}: choose, render, compile, cold", cold, "total_ms", _kernel_note(cold)))
            rows.append(_row(f"{name}:   of that choosing the kernel", cold, "choose_ms"))
            rows.append(_row(f"{name}:   of that loading and running NVRTC, writing the entry", cold, "compile_ms"))
            rows.append(_row(f"{name}:   of that NVRTC compiling", cold, "nvrtc_ms"))
            rows.append(_row(f"{name}: the next kernel in that process, cold", cold, "second_ms"))
            say(f"jit: finding {name}")
            warm = _repeat("kernel", arguments, repeats, lambda _: _cache_variables(Path(folder) / "cold0"))
            if any(not answer.get("found") for answer in _answers(warm)):
                warm = [*warm, ProbeFailed("the warm cache did not have the kernel")]
            rows.append(_row(f"{name}: render, key and look-up, warm", warm, "find_ms"))
            rows.append(_row(f"{name}: the same and choosing the kernel, warm", warm, "total_ms"))
    for name in callers:
        say(f"jit: first call of {name}")
        with tempfile.TemporaryDirectory(prefix="jitgemm-bench-") as folder:
            arguments = sizes | {"name": name}
            # One cold start is dear with some peers; ours is repeated where it shows.
            cold = _repeat("call", arguments, 1, lambda i: _cache_variables(Path(folder)))
            warm = _repeat("call", arguments, 2, lambda i: _cache_variables(Path(folder)))
        rows.append(_row(f"{name}: first call, cold", cold, "first_ms"))
        rows.append(_row(f"{name}: first call with another m, cold", cold, "other_m_ms"))
        rows.append(_row(f"{name}: first call, warm disk", warm, "first_ms"))
        for what, key in (("CUDA's bindings", "bindings_ms"), ("the layers below the call", "layers_ms")):
            if any(key in answer for answer in _answers(warm)):
                rows.append(_row(f"{name}:   of that importing {what}", warm, key))
        rows.append(_row(f"{name}: first call with another m, warm disk", warm, "other_m_ms"))
        rows.append(_row(f"{name}: second call", warm, "again_ms"))
        rows.append(_row(f"{name}: whole process with imports and packing, warm disk", warm, "process_ms"))
    return rows


def _cache_variables(folder: Path) -> dict[str, str]:
    return {"JITGEMM_CACHE_DIR": str(folder / "jitgemm"), "JITGEMM_JIT": "on"} | {
        name: str(folder / name.lower()) for name in PEER_CACHES
    }


def _repeat(
    probe: str, arguments: dict[str, Any], repeats: int, variables: Callable[[int], dict[str, str]]
) -> list[dict[str, Any] | ProbeFailed]:
    answers: list[dict[str, Any] | ProbeFailed] = []
    for i in range(repeats):
        try:
            answers.append(run_probe(probe, arguments, variables(i)))
        except ProbeFailed as error:
            answers.append(error)
            break
    return answers


def run_probe(probe: str, arguments: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """The answer of one probe in a fresh process, with the process's own wall time as "process_ms"."""
    command = [sys.executable, str(PROBE), probe, json.dumps(arguments)]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProbeFailed(str(error)) from error
    milliseconds = (time.perf_counter() - started) * 1e3
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ProbeFailed(lines[-1] if lines else f"exit code {done.returncode}")
    # A peer may print while it compiles; the answer is the last line.
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"process_ms": milliseconds}


def _answers(results: Sequence[dict[str, Any] | ProbeFailed]) -> list[dict[str, Any]]:
    return [result for result in results if isinstance(result, dict)]


def _row(what: str, results: Sequence[dict[str, Any] | ProbeFailed], key: str, note: str = "") -> dict[str, Any]:
    values = [answer[key] for answer in _answers(results) if answer.get(key) is not None]
    failures = [str(result) for result in results if isinstance(result, ProbeFailed)]
    row: dict[str, Any] = {"what": what, "ms": None, "spread": "", "note": "; ".join(filter(None, [note, *failures]))}
    if values:
        row["ms"] = round(statistics.median(values), 3)
        row["spread"] = f"{min(values):.1f}..{max(values):.1f}" if len(values) > 1 else ""
    return row


def _kernel_note(results: Sequence[dict[str, Any] | ProbeFailed]) -> str:
    return next((str(answer.get("kernel", "")) for answer in _answers(results)), "")
