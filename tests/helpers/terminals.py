"""Stderr as a terminal."""

from __future__ import annotations

import pty
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> Iterator[Callable[[], str]]:
    """screen(), behind it: what was written to stderr, a terminal of so many columns; without colours and moves."""
    leader, follower = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        with open(leader, "rb", buffering=0) as screen, suppress(OSError):  # EIO: all is read
            while chunk := screen.read(65536):
                written.append(chunk)

    reader = threading.Thread(target=read)
    with open(follower, "w") as terminal, monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stderr", terminal)
        reader.start()
        yield lambda: re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", b"".join(written).decode())
    reader.join()
