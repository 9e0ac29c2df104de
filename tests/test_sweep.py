"""scripts/sweep.py without a GPU: what is held counts, and the selector's constants against the committed timings."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

import sweep
from benchmark_lib.cells import DEFAULT_FORMATS, LLAMA_8B

from jitgemm.select.devices import device_spec

DATA = ROOT / "scripts" / "data" / "sweep_h200.json"


@pytest.fixture(scope="module")
def document():
    return json.loads(DATA.read_text())


def test_held_timings_take_the_place_of_brief_ones(document, tmp_path):
    first = document["rows"][0]
    second = next(row for row in document["rows"][1:] if row[:4] == first[:4])
    other = next(row for row in document["rows"] if row[:4] != first[:4])
    again = [*first[:4], 2 * first[4], first[5]]
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(document | {"rows": [first, second, other], "held": [again]}))
    assert [us for *_, us in sweep.load(path)] == [other[4], again[4]]
    assert [us for *_, us in sweep.load(path, held=False)] == [first[4], second[4], other[4]]


def test_large_problems_are_those_that_the_data_holds(document, monkeypatch):
    # The bound on registers refuses one of them since.
    monkeypatch.setattr(sweep.config, "illegal", sweep.config._misfit)
    names = {row[0] for row in document["held"]}
    jobs = sweep.large_problems(row for row in sweep.load(DATA, held=False) if row[0][0] in names)
    assert {tuple(row[:4]) for row in document["held"]} == {tuple(cell) for *cell, _ in jobs}


@pytest.mark.parametrize("held", (True, False))
def test_the_selector_is_near_the_best_of_the_cells(held):
    found, _ = sweep.regrets(sweep.load(DATA, held=held), device_spec("h200"))
    names = {format.name for format in DEFAULT_FORMATS}
    cells = [regret for (name, n, k, _), (regret, *_) in found.items() if name in names and (n, k) in LLAMA_8B]
    assert len(cells) == 192
    assert statistics.median(cells) <= 1.05
    assert max(cells) <= 1.15


def test_written_timings_are_read_again(document, tmp_path, capsys):
    path = tmp_path / "sweep.json"
    cell = document["held"][0][:4]
    rows, held = ([row for row in document[name] if row[:4] == cell] for name in ("rows", "held"))
    sweep.write(path, document, rows=rows, held=held)
    assert json.loads(path.read_text()) == document | {"rows": rows, "held": held}
    assert f"{len(held)} timings, 1 problems" in capsys.readouterr().out
