"""Engines that start together, each a process of its own, and are timed in turns.

An engine is what `SCRIPT engine MODEL QUANT OUT` runs. It says `STARTED`, then measures what each line of its input
names: a decode step of so many sequences, or prefill. At the end of its input it writes a row of results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from benchmark_lib.commit import commit

ROOT = Path(__file__).resolve().parents[2]
STARTED = "STARTED"
DECODED = ("1", "16", "64")
PREFILL = "prefill"
"""What a turn measures: a decode step of so many sequences, or prefill."""
SYNC = "+sync"
"""Behind an engine's name: the host waits for the GPU, which neither engine does by itself."""


def speed(
    script: str, engines: list[str], out: str, rounds: int, steps: int, start_seconds: float, seconds: float,
    more: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Starts all engines of a script, then has them measure in turns."""
    start = time.monotonic()
    running: dict[str, subprocess.Popen[str]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for each in engines:
            model, _, quant = each.partition("/")
            log = Path(out).parent / f"{re.sub('[^a-z0-9]+', '-', each.lower()).strip('-')}.log"
            command = [sys.executable, script, "engine", model, quant, out]
            command += ["--beside", str(len(engines) - 1), "--steps", str(steps), *more]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            with log.open("w") as file:
                running[each] = subprocess.Popen(command, stderr=file, start_new_session=True, **pipes)
        for each, engine in running.items():
            ready = answer(engine, start + start_seconds - time.monotonic()) == STARTED
            print(f"{each}: {'started' if ready else f'failed, exit code {engine.wait()}'}", flush=True)
        for turn in range(rounds):
            for size in (*DECODED, PREFILL):
                for each, engine in running.items():
                    left = start + seconds - time.monotonic()
                    if engine.poll() is None and left > 0:
                        print(f"round {turn + 1}, {each}: {answer(engine, left + 30, size) or 'failed'}", flush=True)
        for engine in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.communicate(timeout=60)  # vLLM's processes hang at their end now and then
    finally:
        for engine in running.values():
            end(engine)
    if any(engine.wait() for engine in running.values()):
        sys.exit(1)


def answer(engine: subprocess.Popen[str], seconds: float, asked: str = "") -> str:
    """The next line of an engine, once it was asked; empty where it ended instead, or is ended as it takes longer."""
    assert engine.stdin is not None and engine.stdout is not None
    limit = threading.Timer(max(seconds, 0), end, [engine])
    limit.start()
    try:
        if asked:
            print(asked, file=engine.stdin, flush=True)
        return engine.stdout.readline().strip()
    except BrokenPipeError:
        return ""
    finally:
        limit.cancel()


def end(engine: subprocess.Popen[str]) -> None:
    """Ends an engine's processes, which are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)


def stdout_to_stderr() -> TextIO:
    """Where an engine's process answers, once all that the engine itself prints goes to its log."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return told


def take_turns(told: TextIO, step_us: Callable[[int], int], prefill: Callable[[], int]) -> dict[str, Any]:
    """Measures what each line asks for, until there are no more: the medians, and each round's figures."""
    print(STARTED, file=told, flush=True)
    rounds: dict[str, list[int]] = {}
    for line in sys.stdin:
        size = line.strip()
        name = "prefill_tokens_s" if size == PREFILL else f"step_us_{size}"
        figure = prefill() if size == PREFILL else step_us(int(size))
        rounds.setdefault(name, []).append(figure)
        print(name, figure, file=told, flush=True)
    return {name: round(median(figures)) for name, figures in rounds.items()} | {"rounds": rounds}


def prompts(lengths: Iterable[int], vocabulary: int = 30000) -> list[list[int]]:
    """Tokens of requests of these lengths, which have no beginning in common."""
    return [[3 + (i * 7919 + j * 104729) % vocabulary for j in range(length)] for i, length in enumerate(lengths)]


def model_folder(config: dict[str, Any], quantization: dict[str, Any] | None) -> tuple[str, int]:
    """A folder with a model's config alone, and the number of its layers, which LAYERS in the environment says, too."""
    said = config | ({} if quantization is None else {"quantization_config": quantization})
    said["num_hidden_layers"] = int(os.environ.get("LAYERS", said["num_hidden_layers"]))
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(said))
    return folder, said["num_hidden_layers"]


def find_plug_ins(group: str, plug_ins: dict[str, str]) -> None:
    """Makes an engine's processes find entry points {name: place} of a group that are not installed, here."""
    from importlib.metadata import entry_points

    there = {each.name for each in entry_points(group=group)}
    above = Path(tempfile.mkdtemp())
    for name, place in plug_ins.items():
        if name not in there:
            folder = above / f"{name}-0.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
            (folder / "entry_points.txt").write_text(f"[{group}]\n{name} = {place}\n")
    paths = [str(above), str(ROOT), str(ROOT / "scripts")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    sys.path[:0] = paths


def command_line(
    doc: str | None, kinds: Iterable[str], *more: tuple[str, tuple[str, ...]]
) -> tuple[argparse.ArgumentParser, Any]:
    """The commands that the scripts have in common, with more (name, arguments), and them by name."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, arguments in (
        ("speed", ("engines", "out")), ("engine", ("model", "quant", "out")),
        ("logprobs", ("kind", "out")), ("one", ("arguments", "out")), *more,
    ):  # fmt: skip
        command = commands.add_parser(name)
        for argument in arguments:
            allowed = list(kinds) if argument == "kind" else None
            command.add_argument(argument, nargs="+" if argument in ("engines", "quants") else None, choices=allowed)
        if name in ("speed", "engine"):
            command.add_argument("--steps", type=int, default=512, help="timed, of each number of sequences")
    commands.choices["speed"].add_argument("--rounds", type=int, default=3)
    for option in ("--start-seconds", "--seconds"):
        commands.choices["speed"].add_argument(option, type=float, default=3600)
    commands.choices["engine"].add_argument("--beside", type=int, default=0)
    return parser, commands.choices


def report(out: str, row: dict[str, Any]) -> None:
    """Appends a row of results to a file, with the run it is of: `scripts/performance.py collect` makes a table's file
    of them."""
    torch: Any = sys.modules.get("torch")  # an engine has imported it
    device = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
    row |= {"date": time.strftime("%Y-%m-%d"), "device": device, "commit": commit()}
    imported = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "vllm", "sglang")}
    row["versions"] = {name: version for name, version in imported.items() if version}
    print("RESULT", json.dumps(row), flush=True)
    with open(out, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
