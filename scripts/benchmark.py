#!/usr/bin/env python3
"""Times jitgemm next to its peers on the GPU at hand: `python scripts/benchmark.py --help`. benchmark_lib does it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import typer
from benchmark_lib import cells as cells_lib
from benchmark_lib import results as results_lib
from benchmark_lib.compare import compare
from benchmark_lib.timing import MOE_ROUNDS, QUICK_ROUNDS, ROUNDS

from jitgemm.cli import common
from jitgemm.runtime.device import local_device

if TYPE_CHECKING:
    from benchmark_lib.contestant import Contestant
    from rich.console import Console

app = common.command_line()


@app.command()
@common.guarded
def benchmark(
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="N,K", help="A weight's shape; may be repeated.")
    ] = None,
    m: Annotated[
        str | None,
        typer.Option(
            "--m",
            metavar="LIST",
            help="Numbers of tokens, such as 1,16,64.",
            show_default="the preset's, or 1..8192",
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            metavar="|".join(cells_lib.PRESETS),
            help="Shapes and m's by name; with --moe it may be repeated.",
            show_default="llama-8b",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"A format of ours: {cells_lib.NAMES}. May be repeated.",
            show_default="e4m3_g128, int8_g128, int8_ch, e4m3_g128_any",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="NAME",
            help="Who to compare with: all, none, torch, humming, or one of them, such as fp8row; may be repeated.",
        ),
    ] = None,
    sustained: Annotated[
        bool,
        typer.Option(
            "--sustained", help="Hold each cell for a second: a serving GPU runs at its power limit, a burst does not."
        ),
    ] = False,
    moe: Annotated[
        bool,
        typer.Option(
            "--moe",
            help=f"Grouped GEMMs: both of each expert layer of --preset ({', '.join(cells_lib.MOE_PRESETS)}; the first "
            f"{len(cells_lib.USUAL_MOE_PRESETS)} unless given); --m counts tokens.",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Ten cells, torch as the only peer, three rounds: under two minutes.")
    ] = False,
    host: Annotated[
        bool,
        typer.Option("--host", help="Instead: host microseconds a call, ours and the peers', of one --shape and --m."),
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, help="Turns each contestant gets in a cell.", show_default=str(ROUNDS)),
    ] = None,
    check_once: Annotated[
        bool,
        typer.Option("--check-once", help="Compare results with the reference in the first cell of each weight alone."),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all results; - for stdout.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--compare", metavar="BASELINE.json", help="Exit 1 if a cell is slower than there by more than noise."
        ),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RESULT.json", help="Measure nothing: table and --compare from a recorded file."
        ),
    ] = None,
    peers_from: Annotated[
        Path | None,
        typer.Option(
            "--peers-from",
            metavar="FILE.json",
            help="--moe: show peers' recorded times next to ours, as docs/performance/moe_peers_h200.json has them.",
        ),
    ] = None,
) -> None:
    """Time jitgemm next to its peers: checked results, microseconds, part of the floor, and who is faster.

    A cell is one weight shape (n, k) and one number of tokens m. Its time is the median over replays of a CUDA graph
    that holds one call per copy of the weight, with copies of 300 MB and more, so that weights come from HBM as in a
    model. Contestants take turns, because large cells run at the power limit. Every result is compared with the exact
    reference first; a wrong one is not timed. A peer that is not installed, does not take a cell or fails stands in the
    notes, and the others go on.

    With --moe a cell is a grouped GEMM over a layer's experts. Its time is the mean over 24 routings in one CUDA graph,
    drawn by seed: uniform, a token's experts distinct, rows sorted by expert, offsets on the device.

    \b
    Reading the table:
      % floor  floor_us / us. The floor is the longer of bytes and operations over the device's rates (H200:
               4.5 TB/s, 1.5 PFLOP/s), one figure for all formats of 4 bits and one for those of 8, whose "of" says
               which; int8 may pass 100, because it draws less power. With --moe: microseconds of the floor, and us
               over them.
      +-       how much the replays varied: 10th to 90th percentile, over the median.
      x        how many times faster than the best peer of its kind (exact group scales, or per channel), and than
               the best of any kind (also 8 and 16 bits, also rounded scales). Below 1 the peer is faster.

    \b
    Examples:
      python scripts/benchmark.py --quick
      python scripts/benchmark.py --preset llama-8b --json result.json
      python scripts/benchmark.py --shape 4096,14336 --m 1,16,64 --peer none
      python scripts/benchmark.py --m 16 --format int8_ch --sustained
      python scripts/benchmark.py --quick --compare baseline.json
      python scripts/benchmark.py --moe --peer torch --json moe.json
      python scripts/benchmark.py --moe --preset mixtral --m 8,128 --peers-from docs/performance/moe_peers_h200.json
      python scripts/benchmark.py --host

    \b
    --compare: a cell of ours is slower when  us > baseline_us * (1 + max(4 %, +- there and +- here)).
    Same mode and same device only; cells that only one file has are left out and counted.

    \b
    Exit codes:
      0  done; nothing slower than the baseline
      1  a result of ours was wrong, or a cell was slower than the baseline allows
      2  wrong arguments, or a file that cannot be read
      3  could not measure: no Hopper GPU, a cell of ours failed, or the GPU was lost
    """
    if host and (recorded or baseline or sustained or moe or json_file):
        raise ValueError("--host: expected none of --from, --compare, --sustained, --moe and --json with it")
    if moe and shape:
        raise ValueError("--moe: --shape cannot be combined with it")
    if len(preset or ()) > 1 and not moe:
        raise ValueError(f"--preset: expected one, or --moe, got {', '.join(preset or ())}")
    base = results_lib.read_document(baseline) if baseline is not None else None
    outputs = Outputs(json_file, base, peers_from)
    if recorded is not None:
        return _finish(results_lib.read_document(recorded), outputs)

    ms = cells_lib.parse_ms(m) if m else None
    if moe:
        cells = cells_lib.make_moe_cells(preset or (), ms or (cells_lib.MOE_QUICK_MS if quick else None))
    else:
        asked = preset[0] if preset else None if shape else "quick" if quick else "llama-8b"
        cells = cells_lib.make_cells(shape or (), asked, ms or (cells_lib.QUICK_MS if quick else None))

    from benchmark_lib.contestants import pick

    chosen = [cells_lib.parse_format(text) for text in formats or ()]
    chosen = chosen or list(cells_lib.MOE_FORMATS if moe else cells_lib.DEFAULT_FORMATS)
    everybody = pick(chosen, peer or (["torch"] if quick else ["all"]), moe=moe)
    missing = {each.name: reason for each in everybody if (reason := each.missing()) is not None}
    if local_device() is None:
        common.fail("no Hopper GPU here: times need one. --from reads recorded results", common.FAILED)
    if host:
        from benchmark_lib.host import print_host

        for name, why in missing.items():
            common.note(f"{name}: {why}")
        n, k = common.parse_shape(shape[0]) if shape else (4096, 4096)
        return print_host(n, k, ms[0] if ms else 1, [e for e in everybody if e.name not in missing], outputs.console)
    turns = rounds or (QUICK_ROUNDS if quick else MOE_ROUNDS if moe else ROUNDS)
    _measure(cells, chosen, everybody, missing, sustained, turns, check_once, outputs)


@dataclass(frozen=True)
class Outputs:
    """Where a document goes once it is there."""

    json_file: Path | None
    baseline: dict[str, Any] | None
    peers_from: Path | None

    @property
    def to_stdout(self) -> bool:
        return self.json_file == Path("-")

    @property
    def console(self) -> Console:
        return common.err() if self.to_stdout else common.out()

    @property
    def file(self) -> Path | None:
        return None if self.to_stdout else self.json_file


def _measure(
    cells: Sequence[cells_lib.Cell],
    formats: Sequence[cells_lib.Format],
    everybody: Sequence[Contestant],
    missing: dict[str, str],
    sustained: bool,
    rounds: int,
    check_once: bool,
    outputs: Outputs,
) -> None:
    from benchmark_lib.run import HOLD_S, DeviceLost, Settings, compile_ahead, measure
    from benchmark_lib.timing import REPLAYS

    settings = {"rounds": rounds, "replays": REPLAYS, "check_once": check_once}
    settings |= {"hold_s": HOLD_S if sustained else None, "argv": sys.argv[1:]}
    rates = cells_lib.Rates.of(local_device())
    document = results_lib.new_document("sustained" if sustained else "burst", settings, everybody, missing, rates)

    def done(record: dict[str, Any]) -> None:
        document["cells"].append(record)
        if outputs.file is not None:
            results_lib.write_document(outputs.file, document)

    able = [each for each in everybody if each.name not in missing]
    count, compiled = compile_ahead(cells, [fmt for fmt in formats if fmt.name not in missing])
    common.note(f"{len(cells)} cells, {len(able)} contestants, {count} kernels of ours, {compiled} compiled now")
    lost = None
    try:
        measure(cells, able, Settings(rounds, REPLAYS, sustained, check_once, rates), done, common.note)
    except DeviceLost as error:
        lost = str(error)
    except KeyboardInterrupt:
        common.note("stopped; these cells were done")
    _finish(document, outputs, lost)


def _finish(document: dict[str, Any], outputs: Outputs, lost: str | None = None) -> None:
    """Everything that is made of a document, and the exit code."""
    from benchmark_lib.table import print_cells, print_comparison

    if outputs.peers_from is not None:
        results_lib.add_recorded_peers(document, outputs.peers_from)
    print_cells(document, outputs.console)
    if outputs.to_stdout:
        common.print_json(document)
    elif outputs.file is not None:
        results_lib.write_document(outputs.file, document)
    code = 0
    if outputs.baseline is not None and document["cells"]:
        comparison = compare(outputs.baseline, document)
        outputs.console.print()
        print_comparison(comparison, outputs.console)
        code = common.FOUND if comparison.regressions else 0
    wrong, failed = results_lib.bad_results(document)
    for what, lines, status in (("wrong", wrong, common.FOUND), ("failed", failed, common.FAILED)):
        for line in lines:
            common.err().print(f"{what}: {line}", style="red", markup=False, soft_wrap=True)
            code = code or status
    if lost is not None:
        common.fail(f"the GPU was lost after {len(document['cells'])} cells: {lost}", common.FAILED)
    if code:
        raise typer.Exit(code)


if __name__ == "__main__":
    app()
