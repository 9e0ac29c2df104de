"""Graphs that compilers make: what they compute ahead of jitgemm's ops, computed by them.

    inductor   the pass over inductor's graphs, and its place among inductor's own
    producers  the operators that a quantiser can compute itself, as a graph has them

Subscribes to traces, so that nothing below knows of it. The pass is imported at the first one.
"""

from __future__ import annotations

from jitgemm.runtime.dispatch import on_trace


def _register() -> None:
    from jitgemm.graph.inductor import register

    register()


on_trace(_register)
