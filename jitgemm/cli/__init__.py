"""The `jitgemm` command: warm-up, cache inspection, explanations of a choice, and the environment. None needs a GPU.

Data goes to stdout, progress and notes to stderr, so that output can be piped. Typer and rich are imported by these
modules and nowhere else in the package.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv` (without the program's name; default: sys.argv) and exit with its code."""
    from jitgemm.cli.app import app

    app(args=None if argv is None else list(argv), prog_name="jitgemm")
