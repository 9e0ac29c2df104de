"""What tests of commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Result:
    """What a command printed, and its exit code."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """The command in this process: command("cache", "ls") -> Result."""
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from jitgemm.cli import main

    def call(*argv: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main([*map(str, argv)])
        captured = capsys.readouterr()
        return Result(exit.value.code or 0, captured.out, captured.err)

    return call
