"""The result document: what was measured, where and with what, as JSON. Read back, it is checked before use."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jitgemm.cli.env import gather

from .cells import Rates, from_record
from .commit import commit, output, version_of
from .contestant import KINDS, Contestant

SCHEMA = 1
_PACKAGES = ("torch", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "humming-kernels")


def new_document(
    mode: str, settings: dict[str, Any], contestants: Sequence[Contestant], missing: dict[str, str], rates: Rates
) -> dict[str, Any]:
    """An empty document; cells are appended to its "cells".

    Args:
        mode: "burst" or "sustained".
        settings: how it was run.
        contestants: all that were asked for.
        missing: name -> why it cannot take part.
        rates: the device's.
    """
    return {
        "schema": SCHEMA,
        "tool": "jitgemm scripts/benchmark.py",
        "mode": mode,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "settings": settings,
        "unit": "us: median microseconds a call over replays of one CUDA graph that holds one call per weight copy; "
        "weights come from HBM, activations are the same each call and quantised before; contestants take turns",
        "floor": rates.floor([each.floor_bits for each in contestants if each.ours] or [4]),
        "rates": asdict(rates),
        "contestants": [
            {
                "name": each.name,
                "label": each.label,
                "kind": each.kind,
                "ours": each.ours,
                "version": each.version if each.name not in missing or not each.module else None,
                "missing": missing.get(each.name),
            }
            for each in contestants
        ],
        "cells": [],
    }


def environment() -> dict[str, Any]:
    """Device, driver, versions and commit, and what `jitgemm env` says; what cannot be found out is None."""
    import torch

    told = "BENCHMARK_COMMIT" in os.environ
    changed = None if told else output(["git", "status", "--porcelain", "--untracked-files=no"])
    return {
        "commit": commit(),
        "dirty": None if changed is None else bool(changed),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version_of(name) for name in _PACKAGES},
        "driver": _smi("driver_version"),
        "power_limit_w": _smi("power.limit"),
        "jitgemm env": gather(),
    }


def _smi(field: str) -> str | None:
    text = output(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"])
    return text.splitlines()[0].strip() if text else None


# ---- reading and writing --------------------------------------------------------------------------------------------


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Written beside and renamed: whoever stops the benchmark keeps the cells so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_document(path: Path) -> dict[str, Any]:
    """A document that `write_document` wrote.

    Raises:
        ValueError: it cannot be read, or is not of this form.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA or "cells" not in document:
        raise ValueError(
            f"{path}: expected a result of scripts/benchmark.py with schema {SCHEMA} and cells, got {schema}"
        )
    return document


def add_recorded_peers(document: dict[str, Any], path: Path) -> None:
    """Adds peers' microseconds from a file such as docs/performance/moe_peers_h200.json to the cells that it has.

    A peer that was timed in this document stays as it is.

    Raises:
        ValueError: the file cannot be read, or was measured on another device.
    """
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        device, date, labels, kinds = (recorded[name] for name in ("device", "date", "contestants", "kinds"))
        times = {(f"{each['model']} {each['gemm']}", each["n"], each["k"], each["tokens"]): each["us"]
                 for each in recorded["cells"]}  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--peers-from {path}: {type(error).__name__}: {error}") from error
    if device != document["environment"].get("device"):
        raise ValueError(
            f"--peers-from: {path} was measured on {device}, this on {document['environment'].get('device')}"
        )
    timed = {name for cell in document["cells"] for name, result in cell["results"].items() if result.get("us")}
    added = [name for name in labels if name not in timed]
    document["contestants"] = [each for each in document["contestants"] if each["name"] not in added]
    document["contestants"] += [
        {"name": name, "label": f"{label} (measured {date})", "kind": kinds[name], "ours": False, "version": None}
        for name, label in labels.items()
        if name in added
    ]
    for record in document["cells"]:
        cell = from_record(record)
        for name, us in times.get((cell.layer, cell.n, cell.k, cell.m), {}).items():
            figures = {"tflops": round(cell.ops / us / 1e6, 2), "gbs": round(cell.floor_bytes() / us / 1e3, 1)}
            if name in added:
                record["results"][name] = {"us": us, "note": "", "spread": 0.0, **figures}


def write_rows(file: str | None, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows of figures to a file, "-" for stdout, or nowhere."""
    document = {"date": datetime.date.today().isoformat(), "environment": environment(), "rows": rows}
    if file == "-":
        print(json.dumps(document, indent=1))
    elif file:
        Path(file).write_text(json.dumps(document, indent=1) + "\n")


# ---- what is asked of a document ------------------------------------------------------------------------------------


def names_of(document: dict[str, Any], *, ours: bool | None = None, kinds: Sequence[str] = KINDS) -> list[str]:
    return [e["name"] for e in document["contestants"] if (ours is None or e["ours"] == ours) and e["kind"] in kinds]


def floor_bits(record: dict[str, Any]) -> int:
    """Bits of the weight whose floor a cell, or a result in it, has; where it is not said, 4."""
    return int(record.get("floor_bits", 4))


def best_of(document: dict[str, Any], cell: dict[str, Any], names: Sequence[str]) -> tuple[str, float] | None:
    """The fastest of these in a cell: (name, us); None when none was timed. Wrong results do not count."""
    timed = [
        (cell["results"][name]["us"], name)
        for name in names
        if cell["results"].get(name, {}).get("us") is not None and cell["results"][name].get("correct", True)
    ]
    return (min(timed)[1], min(timed)[0]) if timed else None


def bad_results(document: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Results of ours that were not right, and cells of ours that could not be run though they should have been."""
    ours, wrong, failed = set(names_of(document, ours=True)), [], []
    for cell in document["cells"]:
        for name, result in cell["results"].items():
            if name in ours and (result.get("correct") is False or result["note"].startswith("failed")):
                some = wrong if result.get("correct") is False else failed
                some.append(f"{from_record(cell).name} {name}: {result['note'] or 'wrong'}")
    return wrong, failed
