"""The `jitgemm` command. No part of it needs a GPU.

Files::

    app       the commands, put together
    quantize  a model's folder with 4-bit weights
    warmup    compiling what layers can need
    cache     looking into the cache, checking and pruning it
    explain   why a kernel is chosen
    env       versions and folders, for a bug report
    common    output, exit codes, and the options that describe a layer

Data goes to stdout, progress and notes to stderr, so that output can be piped. Typer and rich are imported by these
modules and nowhere else in the package.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv` (without the program's name; default: sys.argv) and exit with its code."""
    from jitgemm.cli.app import app
    from jitgemm.cli.common import note

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started the command
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a folder may have any name, a terminal any encoding
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: note(f"warning: {message}")
        app(args=None if argv is None else list(argv), prog_name="jitgemm")
