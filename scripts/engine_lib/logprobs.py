"""Engines' log probabilities of the same tokens, next to those of the same weights in bf16."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_lib import turns
from engine_lib.turns import report

Engine = tuple[str, str]
"""A checkpoint's name, and the engine's."""


def prompts() -> list[list[int]]:
    return turns.prompts(range(64, 464, 50), vocabulary=4000)


def ask(
    script: str, engines: dict[str, dict[str, Any]], out: str, seconds: float = 3600, *more: str
) -> tuple[dict[str, Any], dict[str, int]]:
    """Runs all engines at once, each as `SCRIPT one ARGUMENTS FILE`, for `seconds` at most. Logs are in OUT's folder.

    Returns:
        What each wrote; exit codes of the engines that wrote nothing. The others may have any: vLLM's interpreters
        abort at their end now and then.
    """
    folder, deadline, running = Path(tempfile.mkdtemp()), time.monotonic() + seconds, {}
    for name, arguments in engines.items():
        command = [sys.executable, script, "one", json.dumps(arguments), str(folder / f"{name}.json"), *more]
        with Path(out).with_name(f"{name}.log").open("w") as log:
            running[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        for engine in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.wait(max(deadline - time.monotonic(), 0))
    finally:
        for engine in running.values():
            turns.end(engine)
    files = {name: folder / f"{name}.json" for name in engines}
    answers = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    return answers, {name: engine.wait() for name, engine in running.items() if name not in answers}


def compare(script: str, folder: Path, engines: dict[Engine, dict[str, Any]], out: str, row: dict[str, Any]) -> None:
    """Runs all engines at once, and reports how far each is from ("bf16", "bf16").

    Args:
        folder: that of the checkpoints.
        engines: their arguments but that of the model.
        row: what every row of results has.
    """
    names = {"-".join((*map(str, row.values()), *each)): each for each in engines}
    given = {name: {"model": str(folder / names[name][0]), **engines[names[name]]} for name in names}
    answers, failed = ask(script, given, out)
    found = {names[name]: values for name, values in answers.items()}
    for name, code in failed.items():
        report(out, row | {"checkpoint": names[name][0], "engine": names[name][1], "failed": code})
    for (each, name), values in found.items():
        apart = [abs(a - b) for a, b in zip(values, found["bf16", "bf16"], strict=True)]
        line = row | {"checkpoint": each, "engine": name}
        line |= {"mean_apart": sum(apart) / len(apart), "most_apart": max(apart)}
        compiled = each, name.removesuffix("-eager")
        if compiled != (each, name) and compiled in found:
            line["equal_to_compiled"] = values == found[compiled]
        report(out, line)


def write(out: str, values: list[float] | dict[str, Any]) -> None:
    """A file that is there as a whole or not at all."""
    part = Path(out).with_suffix(".part")
    part.write_text(json.dumps(values))
    part.rename(out)
