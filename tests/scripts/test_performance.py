"""scripts/performance.py: the documentation's tables of times are those of the files in docs/performance."""

import json
import signal
import sys

import performance
import pictures
import pytest
import typer


@pytest.mark.parametrize("page", performance.PAGES, ids=lambda page: page.name)
def test_a_pages_tables_are_those_of_its_files(page):
    text = page.read_text()
    assert performance.with_tables(text) == text


def test_every_table_is_in_a_page():
    text = "".join(page.read_text() for page in performance.PAGES)
    assert {name for name in performance.TABLES if f"<!-- table {name} -->" not in text} == set()


def test_the_picture_is_what_the_script_draws():
    assert pictures.speed(performance.RESULTS) == (performance.RESULTS / "speed.svg").read_text()


def test_a_table_has_what_its_file_has(tmp_path):
    cell = {"n": 64, "k": 128, "m": 1024, "floor_us": 1.5, "us": {"e4m3_g128": 12.345}}
    environment = {"device": "a GPU", "commit": "0123456789"}
    document = {"date": "2026-01-02T03:04", "environment": environment, "cells": [cell]}
    (tmp_path / "h200.json").write_text(json.dumps(document))
    made = performance.with_tables("before\n<!-- table torch -->\nold\n<!-- end -->\nbehind\n", tmp_path)
    assert "| 64 × 128 | 1,024 | 1.50 | 12.35 | - |" in made.replace("12.34 |", "12.35 |") and "old" not in made
    assert "a GPU, 2026-01-02, commit 0123456, h200.json" in made and made.endswith("<!-- end -->\nbehind\n")


def test_speeds_span_all_cells_of_a_range():
    cells = [{"m": m, "us": {"a": 2.0, "b": us}} for m, us in ((1, 3), (9, 5), (80, 1))]
    made = performance.speeds([("x", 0, "a", "b c")], {"few": (1, 64), "many": (65, 99)}, {"cells": cells})
    assert made.splitlines()[-1] == "| x | 1.50 to 2.50 | 0.50 to 0.50 |"


def test_a_grid_has_mean_and_worst_of_each_m_and_where_it_loses():
    times = {(64, 1): (2.0, 4.0), (96, 1): (2.0, 2.0), (64, 9): (2.0, 1.0), (96, 9): (1.0, 2.0)}
    cells = [{"n": n, "k": 128, "m": m, "us": {"a": a, "b": b, "c": 9.0}} for (n, m), (a, b) in times.items()]
    made = performance.grid([("a", "x", "b c"), ("none", "y", "b"), ("a", "z", "c")], {"cells": cells})
    lines = [
        "| x | 1.19; 0.50 | 1.41; 1.00 | 1.00; 0.50 |",
        "| y | - | - | - |",
        "| z | 5.35; 4.50 | 4.50; 4.50 | 6.36; 4.50 |",
    ]
    assert made.splitlines()[2:] == lines
    made = performance.loses({"a": "x", "c": "y"}, "b", {"cells": cells[:3]})
    assert made.splitlines()[2] == "| x | 1 of 3 | 9 | 0.50: 64 × 128, m = 9 |"
    assert performance.loses({"b": "z"}, "c", {"cells": cells}).splitlines()[2] == "| z | 0 of 4 | - | - |"


def test_an_interrupted_benchmark_ends_by_itself(tmp_path):
    interrupting = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(0.2); exit(7)"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job ignores it
    try:
        with (tmp_path / "log").open("w") as log:
            assert performance._run([sys.executable, "-c", interrupting], log) == (7, True)
            assert performance._run([sys.executable, "-c", "exit(3)"], log) == (3, False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_rows_of_a_run_become_a_file_of_results(tmp_path):
    lines, out = tmp_path / "results.jsonl", tmp_path / "out.json"
    run = {"date": "2026-01-02", "device": "a GPU", "commit": "0123456"}
    rows = [{"model": "llama8b", "quant": each, "step_us_1": i} for i, each in enumerate(("fp8", "jitgemm"))]
    written = [row | run | {"rounds": {"step_us_1": [1, 2]}, "versions": {"sglang": "0.5.17"}} for row in rows]
    lines.write_text("".join(json.dumps(row) + "\n" for row in written))
    performance.collect(lines, out)
    environment = {"device": "a GPU", "commit": "0123456", "sglang": "0.5.17"}
    assert json.loads(out.read_text()) == {"date": "2026-01-02", "environment": environment, "rows": rows}
    with lines.open("a") as file:
        print(json.dumps(rows[0] | run | {"device": "another"}), file=file)
    with pytest.raises(typer.Exit):
        performance.collect(lines, out)


def test_of_a_benchmark_s_document_what_tables_show_is_kept(tmp_path):
    result = {"us": 3.5, "power_w": 600.0, "sm_mhz": 1980.0, "spread": 0.1, "kernel": "a label", "replays": 9}
    cell = {"n": 64, "k": 128, "m": 1, "layer": "w13", "floor_us": 1.5, "experts": {"count": 8, "top_k": 2}}
    cell["results"] = {"int8_ch": result, "int8mm": {"us": None, "note": "refused"}}
    versions = {"torch": "2.11.0", "humming-kernels": None}
    environment = {"device": "a GPU", "commit": "0123456", "driver": "580", "cuda": "13", "versions": versions}
    performance.write(
        tmp_path / "out.json", performance.shown({"date": "2026-01-02", "environment": environment, "cells": [cell]})
    )
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "date": "2026-01-02",
        "environment": {"device": "a GPU", "commit": "0123456", "driver": "580", "torch": "2.11.0"},
        "cells": [{"layer": "w13", "n": 64, "k": 128, "m": 1, "floor_us": 1.5, "experts": 8, "us": {"int8_ch": 3.5},
                   "power_w": {"int8_ch": 600.0}, "sm_mhz": {"int8_ch": 1980.0}}],
    }  # fmt: skip
