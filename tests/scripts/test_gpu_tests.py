"""How GPU tests are run where there is none: what a run that was cut off still says, and what thinning leaves out."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import builders

ROOT = Path(__file__).resolve().parents[2]
import gpu_note

WHOLE = "collected 90 items / 40 deselected / 50 selected\n\ntests/test_a.py ...F\n"
ENDED = "= 1 failed, 47 passed, 2 skipped, 40 deselected, 3 warnings in 61.50s (0:01:01) =\n"
CUT = "!!! KeyboardInterrupt !!!\n= 2 failed, 10 passed, 40 deselected in 30.00s =\n"
KILLED = "collected 9 items\n\ntests/test_a.py ..F.                  [ 44%]\ntests/test_b.py s.\nFatal Python error: Aborted\n"


def cells(texts, status, *names):
    found = dict(zip(gpu_note.COLUMNS, gpu_note.row("abc", status, "", texts), strict=True))
    return [found[name] for name in names]


def numbers(texts, status):
    return cells(texts, status, "passed", "skipped", "failed", "not run", "seconds", "remarks")


def test_a_row_counts_what_ran():
    assert numbers([WHOLE + ENDED], "1") == ["47", "2", "1", "0", "62", ""]
    cut = "1 of 3 processes killed, exit status 124"
    assert numbers([WHOLE + ENDED, WHOLE + CUT, KILLED], "124") == ["61", "3", "4", "41", "62", cut]
    assert numbers(["no output"], "3")[:5] == ["0", "0", "0", "0", "0"]


def test_a_row_has_the_worst_errors_of_all_processes():
    text = "GPU numbers: 5 outputs; worst error / bound: e4m3 {}, s8 {}; worst relative RMS: e4m3 0.999, s8 0.999\n"
    texts = [text.format("0.953", "0.120"), text.format("0.470", "0.997")]
    assert cells(texts, "1", "error / bound") == ["0.953, 0.997"] and cells(["none"], "1", "error / bound") == ["-, -"]


def test_a_row_names_each_failure_once(tmp_path):
    texts = (
        "FAILED tests/test_a.py::b[x y] - assert 1 == 2\ntests/test_a.py:3: in b\n",
        f"{WHOLE}FAILED tests/test_a.py::b[x y] - assert 1 == 2\nERROR tests/test_a.py::c - OSError\n{ENDED}",
        KILLED,
    )
    paths = [tmp_path / name for name in ("failures", "shard-1", "shard-2")]
    for path, text in zip(paths, texts):
        path.write_text(text)
    command = [sys.executable, "scripts/gpu_note.py", "abc", "1", *map(str, paths)]
    row = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert row.startswith("| ") and row.endswith(" |\n") and row.count("\n") == 1
    assert "| abc |" in row and "| tests/test_a.py::b[x y], tests/test_a.py::c, 1 of 2 processes killed |" in row


def test_a_run_that_is_cut_off_has_said_what_failed(tmp_path):
    path, failures = tmp_path / "test_it.py", tmp_path / "failures"
    path.write_text(
        "import time\n\n\ndef test_wrong():\n    found = 3\n    assert found == 4\n\n\n"
        "def test_right():\n    pass\n\n\ndef test_slow():\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--tb=short", str(path)]
    environment = os.environ | {"GPU_TESTS_FAILURES": str(failures), "PYTHONPATH": str(ROOT / "tests")}
    run = subprocess.Popen(
        [*command, "-v", f"--rootdir={tmp_path}"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 50
    while not failures.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    said = failures.read_text()  # while the slow one runs
    assert said.startswith("FAILED test_it.py::test_wrong - ") and "assert 3 == 4" in said and "test_it.py:6" in said
    time.sleep(1)
    run.send_signal(signal.SIGTERM)
    output = run.communicate(timeout=50)[0]
    counts, seconds = gpu_note.counts_of(output)
    assert counts == {"failed": 1, "passed": 1, "not run": 1} and seconds < 50, output
    assert "KeyboardInterrupt" in output and "FAILED test_it.py::test_wrong" in output


def test_two_thirds_of_a_product_hold_every_pair():
    lists = ("abcde", range(4), "xyz", "pq")
    drawn = builders.two_thirds(*lists)
    whole = set(itertools.product(*lists))
    assert set(drawn) < whole and len(drawn) == len(set(drawn)) and abs(len(drawn) / len(whole) - 2 / 3) < 0.05
    for first, second in itertools.combinations(range(len(lists)), 2):
        pairs = {(values[first], values[second]) for values in drawn}
        assert pairs == set(itertools.product(lists[first], lists[second]))
