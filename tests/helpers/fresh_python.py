"""Code in a Python that has imported torch and nothing else: a fork of one that waits, as to import torch takes a
second."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_WAITS = """
import json, os, signal, sys, traceback
import torch

for line in sys.stdin:
    code, variables, *files = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    signal.alarm(120)
    status = 1
    try:
        exec(code, {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)
"""


@functools.cache
def _waiting() -> subprocess.Popen[str]:
    """Ends when this process does: its input does."""
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", _WAITS], stdin=pipe, stdout=pipe, text=True, env=environment)


def fresh_python(code: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs code with these variables on top of the environment; as `subprocess.run`, which imports torch again."""
    waiting = _waiting()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "error")]
        print(json.dumps([code, dict(variables or {}), *map(str, files)]), file=waiting.stdin, flush=True)
        status = int(waiting.stdout.readline())
        return subprocess.CompletedProcess(code, status, *(file.read_text() for file in files))
