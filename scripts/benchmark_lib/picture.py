"""The roofline picture of a document. matplotlib is imported here and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cells import H200, Rates, from_record
from .results import floor_bits, names_of

_MARKERS = "osD^vP*X"


class NoMatplotlib(Exception):
    """matplotlib cannot be imported."""


def draw(document: dict[str, Any], path: Path) -> int:
    """Throughput over arithmetic intensity, log by log, under the roof; ours in colour, peers in grey. One panel a
    weight shape.

    All contestants of a cell stand at the same intensity, that of the cell's floor, so that they compare vertically.

    Returns:
        Points drawn.

    Raises:
        NoMatplotlib: it is not there.
        ValueError: nothing was timed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise NoMatplotlib(f"no picture: {error} (pip install matplotlib)") from error

    cells = [cell for cell in document["cells"] if any(result.get("us") for result in cell["results"].values())]
    if not cells:
        raise ValueError("no picture: nothing was timed")
    bits = "an 8-bit" if {floor_bits(cell) for cell in cells} == {8} else "a 4-bit"
    shapes = list(dict.fromkeys(from_record(cell).weight for cell in cells))
    across = 2 if len(shapes) == 4 else min(3, len(shapes))
    down = -(-len(shapes) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(5.2 * across, 4.6 * down + 0.9), squeeze=False, sharex=True, sharey=True
    )
    points = sum(_panel(panel, document, cells, shape) for panel, shape in zip(axes.flat, shapes))
    for panel in list(axes.flat)[len(shapes) :]:
        panel.set_visible(False)
    for row in axes:
        row[0].set_ylabel("TFLOP/s")
    for panel in axes[-1]:
        panel.set_xlabel(f"operations per byte of {bits} weight's GEMM")
    environment = document["environment"]
    commit = str(environment.get("commit") or "")[:10]
    figure.suptitle(f"{environment.get('device')}, {document['mode']}, {document['date'][:10]}, {commit}", fontsize=10)
    handles: dict[str, Any] = {}
    for panel in axes.flat:
        for handle, label in zip(*panel.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=min(6, len(handles)), fontsize=8, frameon=False
    )
    inches = figure.get_size_inches()[1]
    figure.tight_layout(rect=(0, (0.15 + 0.2 * -(-len(handles) // 6)) / inches, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, format="png")
    pyplot.close(figure)
    return points


def _panel(panel: Any, document: dict[str, Any], cells: list[dict[str, Any]], shape: tuple[Any, ...]) -> int:
    n, k, *experts = shape
    ours = set(names_of(document, ours=True))
    mine = [cell for cell in cells if from_record(cell).weight == shape]
    intensities = [_intensity(cell) for cell in cells]
    low, high = min(intensities) / 1.5, max(intensities) * 1.5
    rates = Rates(**document["rates"]) if "rates" in document else H200
    ridge = rates.tensor_ops_per_us / rates.hbm_bytes_per_us
    xs = sorted({low, high, *([ridge] if low < ridge < high else [])})
    panel.plot(
        xs,
        [min(x * rates.hbm_bytes_per_us, rates.tensor_ops_per_us) / 1e6 for x in xs],
        color="black",
        linewidth=1,
        label=rates.limits,
    )
    points = 0
    for i, name in enumerate(names_of(document)):
        timed = sorted(
            (_intensity(cell), cell["results"][name]["tflops"])
            for cell in mine
            if cell["results"].get(name, {}).get("us")
        )
        if not timed:
            continue
        points += len(timed)
        style = {"marker": _MARKERS[i % len(_MARKERS)], "label": name}
        if name in ours:
            panel.plot(*zip(*timed), linewidth=1.2, markersize=5, zorder=3, **style)
        else:
            shade = 0.45 + 0.3 * (i % 4) / 4
            panel.plot(
                *zip(*timed),
                linewidth=0.6,
                linestyle=":",
                markersize=4,
                color=str(shade),
                markerfacecolor="none",
                **style,
            )
    panel.set(
        xscale="log", yscale="log", title=f"n = {n}, k = {k}" + (f", {experts[0].count} experts" if experts else "")
    )
    panel.grid(True, which="major", linewidth=0.3)
    return points


def _intensity(cell: dict[str, Any]) -> float:
    """Operations per byte, with the bytes of the floor's formula."""
    sizes = from_record(cell)
    return sizes.ops / sizes.floor_bytes(floor_bits(cell))
