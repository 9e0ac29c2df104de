"""scripts/planted_faults.py: its faults fit the code, and what it says of a fault that is found, missed or none."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
import planted_faults

FAULTS = planted_faults.read_faults()
PACKAGES = {"headers", *(path.parent.name for path in ROOT.glob("jitgemm/*/__init__.py"))}


def test_faults_fit_the_code_and_their_tests_are_there():
    texts = {fault.file: (ROOT / fault.file).read_text(encoding="utf-8") for fault in FAULTS}
    for fault in FAULTS:
        assert fault.applied(texts[fault.file])
        paths = [word for word in fault.tests.split() if word.startswith("tests/")]
        assert paths and all((ROOT / path).exists() for path in paths), fault.name


def test_every_package_has_faults():
    found = {fault.package.partition("/")[0] for fault in FAULTS}
    assert found >= PACKAGES and len(FAULTS) >= 80


# ---- a repository of one module ---------------------------------------------------------------------------------------

MODULE = "def double(x):\n    return x + x\n\n\ndef least(x, y):\n    return x if x < y else y\n"
TESTS = "import numbers_of\n\n\ndef test_double():\n    assert numbers_of.double(3) == 6\n\n\ndef test_never():\n    assert numbers_of.double(3) == 7\n"


def fault(name, old, new, tests="tests/test_numbers.py -k double", **more):
    given = {"name": name, "file": "numbers_of.py", "old": old, "new": new, "tests": tests} | more
    return "[[fault]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())


SUM, LESS = ("x + x", "x * x"), ("x < y", "x > y")


@pytest.fixture
def run(tmp_path):
    """run(faults, arguments): exit status and output of the script on a repository of its own."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "numbers_of.py").write_text(MODULE)
    (tmp_path / "tests" / "test_numbers.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def call(*faults, arguments=()):
        (tmp_path / "faults.toml").write_text("\n".join(faults))
        given = ["--root", str(tmp_path), "--faults", str(tmp_path / "faults.toml"), *arguments]
        done = CliRunner().invoke(planted_faults.app, given)
        assert (tmp_path / "numbers_of.py").read_text() == MODULE
        return done.exit_code, done.output

    return call


def test_some_faults_are_chosen_and_printed_as_json_and_what_does_not_end_is_found(run):
    loop = fault("loop", "    return x + x", "    while True:\n        pass")
    status, output = run(fault("sum", *SUM), loop, arguments=["--only", "oo", "--json", "--limit", "6"])
    (found,) = json.loads(output[output.index("[") : output.rindex("]") + 1])
    assert status == 0 and (found["name"], found["verdict"], found["by"]) == ("loop", "found", "no end within 6 s")


WRONG = {
    "twice": (fault("twice", "x", "y"), "twice: expected old once in numbers_of.py, found it "),
    "gone": (fault("gone", "z + z", "y"), "gone: expected old once in numbers_of.py, found it 0 times"),
    "same": (fault("same", "x + x", "x + x"), "same: expected new to be another text"),
    "idle": (fault("idle", *SUM, tests="tests/test_numbers.py -k nothing"), "idle: expected tests that run"),
    "never": (
        fault("never", *SUM, tests="tests/test_numbers.py::test_never"),
        "never: expected a test that passes without it",
    ),
}


def test_found_missed_and_equivalent_faults_are_counted_and_those_that_cannot_be_judged_are_named(run):
    equal = fault("equal", "x < y", "x <= y", equivalent="of equal numbers either is the least")
    judged = fault("sum", *SUM), fault("least", *LESS), equal
    status, output = run(*(each for each, _ in WRONG.values()), *judged)
    assert status == 3 and f"not judged: {', '.join(WRONG)}" in output
    assert all(said in output for _, said in WRONG.values())
    assert "| numbers_of | 1 | 1 | 1 |" in output and "1 of 2 found: 50.0 %" in output
    assert "missed: least (numbers_of), by tests/test_numbers.py -k double" in output


def test_a_run_with_a_missed_fault_fails_and_so_does_a_name_that_comes_twice(run):
    assert run(fault("least", *LESS))[0] == 1
    status, output = run(fault("sum", *SUM), fault("sum", *LESS))
    assert status == 2 and "expected every name once" in output
