"""Which commit a measurement is of, and versions of packages. Imports nothing heavy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def output(command: Sequence[str]) -> str | None:
    """What a command prints; None where it cannot be run or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str | None:
    """BENCHMARK_COMMIT in the environment names it where the checkout travelled without its history, or with an older
    one."""
    return os.environ.get("BENCHMARK_COMMIT") or output(["git", "rev-parse", "HEAD"])


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
