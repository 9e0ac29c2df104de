"""Documents as tables for people, on stdout."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.console import Console

from jitgemm.cli.common import table

from .cells import from_record
from .compare import Comparison
from .results import best_of, floor_bits, names_of


def print_cells(document: dict[str, Any], console: Console) -> None:
    """Our formats in detail, then everybody's microseconds side by side, then what must be said of them."""
    environment = document["environment"]
    commit = str(environment.get("commit") or "unknown")[:10] + ("+" if environment.get("dirty") else "")
    console.print(
        f"{environment.get('device')}, driver {environment.get('driver')}, jitgemm {commit}, "
        f"{document['date']}, {document['mode']}"
    )
    console.print(f"floor = {document['floor']}\n", markup=False)
    left = ("layer", "format", "best of its kind", "best peer", "kernel", "note")
    console.print(table(ours_columns(document), ours_rows(document), left=left))
    peers = names_of(document, ours=False)
    if any(cell["results"].get(name, {}).get("us") for cell in document["cells"] for name in peers):
        console.print("\nmicroseconds a call")
        columns, rows = side_by_side(document)
        console.print(table(columns, rows, left=("layer",)))
    notes = peer_notes(document)
    if notes:
        console.print("\nnotes")
        for note in notes:
            console.print(f"  {note}", markup=False, soft_wrap=True)


def _grouped(document: dict[str, Any]) -> bool:
    return any("experts" in cell for cell in document["cells"])


def _place(cell: dict[str, Any]) -> tuple[str, ...]:
    """A cell's columns, as `PLACE` names them."""
    layer = (cell["layer"], str(cell["experts"]["count"])) if "experts" in cell else ()
    return *layer, str(cell["n"]), str(cell["k"]), str(cell["m"])


PLACE = {False: ("n", "k", "m"), True: ("layer", "experts", "n", "k", "tokens")}


def _says_bits(document: dict[str, Any]) -> bool:
    """Whether some result of ours stands beside the floor of 8-bit weights."""
    ours = names_of(document, ours=True)
    return any(floor_bits(cell["results"].get(name, {})) == 8 for cell in document["cells"] for name in ours)


def ours_columns(document: dict[str, Any]) -> tuple[str, ...]:
    grouped = _grouped(document)
    floor = ("floor", "us/floor") if grouped else ("% floor",)
    if _says_bits(document):
        floor += ("of",)
    return (
        *PLACE[grouped], "format", "us", "+-", "TFLOP/s", "GB/s", *floor,
        "best of its kind", "x", "best peer", "x", "kernel", "note",
    )  # fmt: skip


def ours_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row a cell and format. x: how many times faster than that peer; below 1 it is the faster one."""
    peers, says_bits = names_of(document, ours=False), _says_bits(document)
    kind_of = {each["name"]: each["kind"] for each in document["contestants"]}
    rows = []
    for cell in document["cells"]:
        best = best_of(document, cell, peers)
        for name in names_of(document, ours=True):
            result = cell["results"].get(name)
            if result is None:
                continue
            us = result.get("us")
            grouped, floor_us = "experts" in cell, result.get("floor_us", cell["floor_us"])
            figures = ("-",) * (5 + grouped + says_bits)
            if us is not None:
                figures = (_us(us), f"{100 * result['spread']:.1f}%", f"{result['tflops']:.0f}", f"{result['gbs']:.0f}")
                figures += (_us(floor_us), f"{us / floor_us:.2f}") if grouped else (f"{100 * floor_us / us:.0f}",)
                figures += (f"{floor_bits(result)} bits",) if says_bits else ()
            best_kin = best_of(document, cell, names_of(document, ours=False, kinds=(kind_of[name],)))
            against = [_against(us, peer) for peer in (best_kin, best)]
            # Peers' kernels are their own business; of ours, what the name does not say already.
            kernel = result.get("kernel", "").partition("-m")[2]
            kernel = "m" + kernel if kernel else ""
            rows.append((*_place(cell), name, *figures, *against[0], *against[1], kernel, result["note"]))
    return rows


def side_by_side(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of everybody's microseconds."""
    names = [n for n in names_of(document) if any(cell["results"].get(n, {}).get("us") for cell in document["cells"])]
    grouped = _grouped(document)
    bits = {floor_bits(cell) for cell in document["cells"]}
    columns = [*PLACE[grouped], "8-bit floor" if bits == {8} else "floor", *names]
    rows = []
    for cell in document["cells"]:
        start = [*_place(cell), _us(cell["floor_us"])]
        rows.append(start + [_us(cell["results"].get(name, {}).get("us")) for name in names])
    return columns, rows


def peer_notes(document: dict[str, Any]) -> list[str]:
    """Whoever is missing and why, and every cell that a peer refused, failed at or ran differently."""
    notes = [f"{each['name']}: {each['missing']}" for each in document["contestants"] if each.get("missing")]
    ours = set(names_of(document, ours=True))
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell in document["cells"]:
        for name, result in cell["results"].items():
            if name not in ours and result["note"]:
                cells[name, result["note"]].append(from_record(cell).name)
    for (name, note), where in cells.items():
        more = f" and {len(where) - 4} more" if len(where) > 4 else ""
        notes.append(f"{name}: {note} ({', '.join(where[:4])}{more})")
    return notes


def print_comparison(comparison: Comparison, console: Console) -> None:
    shown = [change for change in comparison.changes if change.verdict != "same"]
    if shown:
        rows = [
            (
                change.n, change.k, change.m, change.name, _us(change.base_us), _us(change.new_us),
                "-" if change.new_us is None else f"{100 * (change.ratio - 1):+.1f}%",
                f"{100 * (change.allowed - 1):.1f}%", change.verdict,
            )
            for change in shown
        ]  # fmt: skip
        columns = ("n", "k", "m", "format", "baseline", "now", "change", "noise", "verdict")
        console.print(table(columns, rows, left=("format", "verdict")))
    counts = {
        verdict: sum(c.verdict == verdict for c in comparison.changes)
        for verdict in ("slower", "lost", "faster", "same")
    }
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    peers = (
        f"; peers moved by {100 * (comparison.peers_ratio - 1):+.1f}% in the median"
        if comparison.peers_ratio is not None
        else ""
    )
    skipped = f"; {comparison.missing} cells of the baseline were not measured" if comparison.missing else ""
    console.print(f"against the baseline: {said}{peers}{skipped}", markup=False)


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _against(us: float | None, peer: tuple[str, float] | None) -> tuple[str, str]:
    if peer is None:
        return "-", "-"
    name, peer_us = peer
    return f"{name} {_us(peer_us)}", "-" if us is None else f"{peer_us / us:.2f}"
