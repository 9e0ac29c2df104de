#!/usr/bin/env python3
"""Times jitgemm next to its peers on the GPU at hand: `python scripts/benchmark.py --help`. benchmark_lib does it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import typer
from benchmark_lib import cells as cells_lib
from benchmark_lib import results as results_lib
from benchmark_lib.compare import NOISE_FLOOR, compare
from benchmark_lib.timing import MOE_ROUNDS, QUICK_ROUNDS, ROUNDS

from jitgemm.cli import common
from jitgemm.runtime.device import local_device

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
            help="Numbers of tokens: 1,16,64 or first:last:step.",
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
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="CONFIG", help="A Hugging Face config.json, or its folder; may be repeated."),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks that --model is cut into.")] = 1,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="A format of ours: e4m3 or int8, then _g32, _g64, _g128, _g256 or _ch, then z for zero points or o "
            "for offsets, then _any for codes that any activations decode, _x for int8's corrections, _b128 for "
            "activations with a scale per token and 128 k, _b128e for the same in packed e8m0, _bi for "
            "batch-invariant; w8_e4m3_ch, w8_int8_ch, w8_e4m3_block for 8-bit weights; 'all' for the usual ones; may "
            "be repeated.",
            show_default="e4m3_g128, int8_g128, int8_ch, e4m3_g128_any",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="NAME",
            help="Who to compare with: all, none, torch, humming, quack, or a name of --list-peers.",
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
            f"{len(cells_lib.USUAL_MOE_PRESETS)} unless given) or --model, --m counts tokens.",
        ),
    ] = False,
    ep: Annotated[
        int, typer.Option("--ep", min=1, help="--moe: ranks that the experts of --model are spread over.")
    ] = 1,
    routing: Annotated[
        str,
        typer.Option(
            "--routing",
            metavar="|".join(cells_lib.ROUTING_NAMES),
            help="--moe: all experts the same, expert i by 1 / i, or all tokens to the same ones.",
        ),
    ] = "uniform",
    quick: Annotated[
        bool, typer.Option("--quick", help="Ten cells, torch as the only peer, three rounds: under two minutes.")
    ] = False,
    host: Annotated[
        bool, typer.Option("--host", help="Instead: host microseconds a call, ours and the peers'.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, help="Turns each contestant gets in a cell.", show_default=str(ROUNDS)),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare results with the reference before timing.")
    ] = True,
    check_once: Annotated[
        bool, typer.Option("--check-once", help="Compare them in the first cell of each weight alone.")
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
    noise_floor: Annotated[
        float,
        typer.Option("--noise-floor", min=0.0, help="--compare: part by which two runs on one machine differ anyway."),
    ] = NOISE_FLOOR,
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
    list_peers: Annotated[
        bool, typer.Option("--list-peers", help="Say who can take part here, and why the others cannot.")
    ] = False,
) -> None:
    """Time jitgemm next to its peers: checked results, microseconds, part of the floor, and who is faster.

    A cell is one weight shape (n, k) and one number of tokens m. Its time is the median over replays of a CUDA graph
    that holds one call per copy of the weight, with copies of 300 MB and more, so that weights come from HBM as in a
    model. Contestants take turns, because large cells run at the power limit. Every result is compared with the exact
    reference first; a wrong one is not timed. A peer that is not installed, does not take a cell or fails stands in the
    notes, and the others go on.

    With --moe a cell is a grouped GEMM over a layer's experts. Its time is the mean over 24 routings in one CUDA graph,
    drawn by seed: uniform unless --routing says otherwise, a token's experts distinct, rows sorted by expert, offsets
    on the device.

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
      python scripts/benchmark.py --model config.json --tp 2 --m 16 --format int8_ch --sustained
      python scripts/benchmark.py --quick --compare baseline.json
      python scripts/benchmark.py --moe --peer torch --json moe.json
      python scripts/benchmark.py --moe --preset mixtral --m 8,128 --peers-from docs/performance/moe_peers_h200.json
      python scripts/benchmark.py --host

    \b
    --compare: a cell of ours is slower when  us > baseline_us * (1 + max(noise floor, +- there and +- here)).
    Same mode and same device only; cells that only one file has are left out and counted.

    \b
    Exit codes:
      0  done; nothing slower than the baseline
      1  a result of ours was wrong, or a cell was slower than the baseline allows
      2  wrong arguments, or a file that cannot be read
      3  could not measure: no Hopper GPU, a cell of ours failed, or the GPU was lost
    """
    to_stdout = json_file == Path("-")
    if sum((host, recorded is not None, list_peers)) > 1:
        raise ValueError("--host, --from and --list-peers are different things to do: give one of them")
    if host and (baseline or sustained):
        raise ValueError("--compare and --sustained are about GPU times: they do not go with --host")
    if moe and (host or shape):
        raise ValueError("--moe: --host and --shape cannot be combined with it")
    if len(preset or ()) > 1 and not moe:
        raise ValueError(f"--preset: expected one, or --moe, got {', '.join(preset or ())}")
    if (ep > 1 or routing != "uniform") and not moe:
        raise ValueError("--ep, --routing: expected only with --moe")
    base = results_lib.read_document(baseline) if baseline is not None else None
    console = common.err() if to_stdout else common.out()
    outputs = Outputs(console, json_file, base, noise_floor, peers_from)

    if recorded is not None:
        document = results_lib.read_document(recorded)
        _finish(document, outputs)
        return

    ms = cells_lib.parse_ms(m) if m else None
    if moe:
        ms = ms or (cells_lib.MOE_QUICK_MS if quick else None)
        cells = cells_lib.make_moe_cells(preset or (), model or (), tp, ep, ms, routing)
    else:
        asked_preset = preset[0] if preset else None if shape or model else "quick" if quick else "llama-8b"
        ms = ms or (cells_lib.QUICK_MS if quick else None)
        cells = cells_lib.make_cells(shape or (), asked_preset, model or (), tp, ms)

    from benchmark_lib.contestants import pick

    chosen = list(cells_lib.MOE_FORMATS if moe else cells_lib.DEFAULT_FORMATS)
    if formats:
        usual = [*cells_lib.DEFAULT_FORMATS, *cells_lib.MORE_FORMATS]
        chosen = [fmt for text in formats for fmt in (usual if text == "all" else [cells_lib.parse_format(text)])]
    everybody = pick(chosen, peer or (["torch"] if quick else ["all"]), moe=moe)
    if list_peers:
        _list_peers(pick(chosen, ["all"], moe=moe), console, to_stdout)
        return

    missing = _cannot_take_part(everybody)
    _need_hopper()
    able = [each for each in everybody if each.name not in missing]
    if host:
        _host(shape, m, able, missing, console, json_file)
        return

    turns = rounds or (QUICK_ROUNDS if quick else MOE_ROUNDS if moe else ROUNDS)
    _measure(cells, chosen, everybody, missing, sustained, turns, check, check_once, outputs)


@dataclass(frozen=True)
class Outputs:
    """Where a document goes once it is there."""

    console: Any
    json_file: Path | None
    baseline: dict[str, Any] | None
    noise_floor: float
    peers_from: Path | None = None

    @property
    def to_stdout(self) -> bool:
        return self.json_file == Path("-")

    @property
    def file(self) -> Path | None:
        return None if self.to_stdout else self.json_file


def _measure(  # type: ignore[no-untyped-def]
    cells,
    formats,
    everybody,
    missing,
    sustained: bool,
    rounds: int,
    check: bool,
    check_once: bool,
    outputs: Outputs,
) -> None:
    from benchmark_lib.run import HOLD_S, DeviceLost, Settings, compile_ahead, measure
    from benchmark_lib.timing import REPLAYS

    settings = {
        "rounds": rounds,
        "replays": REPLAYS,
        "check": check,
        "check_once": check_once,
        "hold_s": HOLD_S if sustained else None,
        "argv": sys.argv[1:],
    }
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
        measure(cells, able, Settings(rounds, REPLAYS, sustained, check, rates, check_once), done, common.note)
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
        comparison = compare(outputs.baseline, document, outputs.noise_floor)
        outputs.console.print()
        print_comparison(comparison, outputs.console)
        code = common.FOUND if comparison.regressions else 0
    for line in results_lib.wrong_results(document):
        common.err().print(f"wrong: {line}", style="red", markup=False, soft_wrap=True)
        code = common.FOUND
    for line in results_lib.failed_results(document):
        common.err().print(f"failed: {line}", style="red", markup=False, soft_wrap=True)
        code = code or common.FAILED
    if lost is not None:
        common.fail(f"the GPU was lost after {len(document['cells'])} cells: {lost}", common.FAILED)
    if code:
        raise typer.Exit(code)


def _cannot_take_part(everybody) -> dict[str, str]:  # type: ignore[no-untyped-def]
    return {each.name: reason for each in everybody if (reason := each.missing()) is not None}


def _need_hopper() -> None:
    if local_device() is None:
        common.fail("no Hopper GPU here: times need one. --from reads recorded results", common.FAILED)


def _list_peers(everybody, console, to_stdout: bool) -> None:  # type: ignore[no-untyped-def]
    missing = _cannot_take_part(everybody)
    facts = [
        {
            "name": e.name,
            "kind": "jitgemm" if e.ours else e.kind,
            "label": e.label,
            "version": e.version,
            "missing": missing.get(e.name),
        }
        for e in everybody
    ]  # fmt: skip
    if to_stdout:
        common.print_json(facts)
        return
    rows = [(f["name"], f["kind"], f["label"], f["version"] or "-", f["missing"] or "yes") for f in facts]
    console.print(
        common.table(
            ("name", "kind", "what", "version", "takes part"),
            rows,
            left=("name", "kind", "what", "version", "takes part"),
        )
    )


def _one_shape(shape: list[str] | None, m: str | None, default_ms: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    n, k = common.parse_shape(shape[0]) if shape else (4096, 4096)
    return n, k, cells_lib.parse_ms(m) if m else default_ms


def _host(shape, m, able, missing, console, json_file: Path | None) -> None:  # type: ignore[no-untyped-def]
    from benchmark_lib.host import BURST, BURSTS, LAYERS, measure_host
    from benchmark_lib.table import print_host

    n, k, ms = _one_shape(shape, m, (1,))
    rows = measure_host(n, k, ms[0], able, common.note)
    rows += [
        {"name": name, "label": name, "same_us": None, "rotating_us": None, "spread": None, "note": why}
        for name, why in missing.items()
    ]
    settings = {"n": n, "k": k, "m": ms[0], "burst": BURST, "bursts": BURSTS, "layers": LAYERS}
    document = {"schema": results_lib.SCHEMA, "mode": "host", "environment": results_lib.environment()}
    document |= {"settings": settings, "rows": rows}  # no cells in it
    print_host(rows, console)
    if json_file == Path("-"):
        common.print_json(document)
    elif json_file is not None:
        results_lib.write_document(json_file, document)


if __name__ == "__main__":
    app()
