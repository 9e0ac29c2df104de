"""Puts the commands together; each lives in a module of its own."""

from __future__ import annotations

from typing import Annotated

import typer

import jitgemm
from jitgemm.cli import common
from jitgemm.cli.cache import cache_app
from jitgemm.cli.env import env
from jitgemm.cli.explain import explain
from jitgemm.cli.quantize import quantize
from jitgemm.cli.warmup import warmup

app = common.command_line(
    name="jitgemm",
    epilog="Exit codes: 0 done, 1 a check found something, 2 wrong arguments, 3 failed (compiler, disk).",
    no_args_is_help=True,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"jitgemm {jitgemm.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """4-bit weight x 8-bit activation GEMM for NVIDIA Hopper, compiled at run time."""


app.command("quantize")(quantize)
app.command("warmup", cls=common.OfWeights)(warmup)
app.add_typer(cache_app, name="cache")
app.command("explain", cls=common.OfWeights)(explain)
app.command("env")(env)
