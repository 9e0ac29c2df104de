"""Engines' log probabilities of the same tokens, next to those of the same weights in bf16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine_lib import turns
from engine_lib.turns import report

Engine = tuple[str, str]
"""A checkpoint's name, and the engine's."""


def prompts() -> list[list[int]]:
    return turns.prompts(range(64, 464, 50), vocabulary=4000)


def compare(script: str, folder: Path, engines: dict[Engine, dict[str, Any]], out: str, row: dict[str, Any]) -> None:
    """Runs all engines at once, each as `SCRIPT one ARGUMENTS FILE`, and reports how far each is from ("bf16", "bf16").

    Args:
        folder: that of the checkpoints.
        engines: their arguments but that of the model.
        row: what every row of results has.
    """
    found: dict[Engine, list[float]] = {}
    running = {}
    for (each, name), arguments in engines.items():
        command = [sys.executable, script, "one", json.dumps({"model": str(folder / each), **arguments})]
        command += [str(folder / f"{each}-{name}.json")]
        called = "-".join((*map(str, row.values()), each, name))
        with Path(out).with_name(f"{called}.log").open("w") as log:
            running[each, name] = subprocess.Popen(command, stdout=log, stderr=log)
    for (each, name), engine in running.items():
        engine.wait()
        values = folder / f"{each}-{name}.json"
        if values.exists():  # whatever its exit code: vLLM's interpreters abort at their end now and then
            found[each, name] = json.loads(values.read_text())
        else:
            report(out, row | {"checkpoint": each, "engine": name, "failed": engine.returncode})
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
