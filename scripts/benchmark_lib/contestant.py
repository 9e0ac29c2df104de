"""What taking part in a benchmark means, and the list of all who can. Importing this module imports no peer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .commit import version_of

EXACT, CHANNEL, ROUNDED, WIDER = KINDS = ("exact", "channel", "rounded", "wider")
"""Kinds: 4-bit weights with group scales applied as given; 4-bit with one scale per row of n; 4-bit with group scales
rounded on the way; weights of 8 or 16 bits."""


class Refused(Exception):
    """A contestant does not take this cell; the message says why, for the table's note."""


@dataclass
class Run:
    """One contestant on one cell, ready to be timed.

    Attributes:
        calls: one call per copy of the weight; each enqueues one GEMM on the current stream and does nothing else.
        rows: (indices of rows) -> those rows of the last result in fp32, scales applied.
        bytes: what a call has to move at least: weight, activations, output.
        poison: fills the output with NaN (or what stands for it), so that what is never written shows.
        exact_check: (indices of rows, index of the call that wrote them) -> largest error over what is allowed, at most
            1; None where only a coarse check is possible.
        snapshot: a copy of the bits that the last call writes; None where run-to-run identity is not asked for.
        kernel: the name of the kernel that runs; asked after the calls ran, because finding out may warm what a first
            call pays for.
        note: what a reader must know of how this cell was run.
    """

    calls: list[Callable[[], Any]]
    rows: Callable[[Any], Any]
    bytes: float
    poison: Callable[[], Any]
    exact_check: Callable[[Any, int], float] | None = None
    snapshot: Callable[[], Any] | None = None
    kernel: Callable[[], str] = str
    note: str = ""

    @classmethod
    def writing(cls, out: Any, calls: list[Callable[[], Any]], bytes: float, **more: Any) -> Run:
        """One whose calls write to `out` [rows, n]."""
        return cls(calls, lambda rows: out[rows].float(), bytes, lambda: out.fill_(float("nan")), **more)


Start = Callable[[int], Run]
"""Makes activations and outputs of an m."""


@dataclass(frozen=True)
class Contestant:
    """Someone who runs a GEMM.

    Attributes:
        name: key in results, such as "e4m3_g128" or "fp8row".
        label: what it is, in words.
        kind: one of KINDS.
        ours: whether it is jitgemm.
        package: distribution whose version is reported.
        module: what must be importable, None when nothing beyond torch.
        load: source -> start, and start(m) -> Run. Loading packs the weights of one (n, k), as many copies as leave the
            L2. Both may raise `Refused`.
        obstacle: why this one cannot take part at all, or None; asked once.
        floor_bits: of the weight whose floor ours is compared with, 4 or 8; a peer is compared with its cell's.
    """

    name: str
    label: str
    kind: str
    ours: bool
    package: str
    module: str | None
    load: Callable[[Any], Start]
    obstacle: Callable[[], str | None] = lambda: None
    floor_bits: int = 4

    def missing(self) -> str | None:
        """Why it cannot take part here; None when it can. Imports the peer to find out."""
        if self.module is not None:
            try:
                importlib.import_module(self.module)
            except Exception as error:  # a broken installation is as good as none
                return f"cannot import {self.module}: {short(error)}"
        try:
            return self.obstacle()
        except Exception as error:
            return short(error)

    @property
    def version(self) -> str | None:
        return version_of(self.package)


def cell_floor_bits(contestants: Iterable[Contestant]) -> int:
    """Of the floor that a cell has: 8 where all of ours have 8-bit weights, else 4."""
    return min((each.floor_bits for each in contestants if each.ours), default=4)


def short(error: BaseException, limit: int = 160) -> str:
    """One line of an exception for a note."""
    text = " ".join(str(error).split())
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
