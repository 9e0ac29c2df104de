"""scripts/cliffs.py without a GPU: rises, limits, what is measured again, the table, arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "cliffs.py"
sys.path.append(str(ROOT / "scripts"))

import cliffs
from benchmark_lib.cells import Cell
from cliffs import RISE_LIMIT, limit_us, measure_line, rises, settle

LAYER = ("e4m3_g128", 512, 7168)


class Gpu:
    """Times that a test makes up: `first` for the quick look, `true` when measured again; remembers who was."""

    def __init__(self, true: dict[int, float], first: dict[int, float] | None = None):
        self.true, self.first = true, true | (first or {})
        self.again: list[tuple[int, ...]] = []

    def once(self, m: int) -> float:
        return self.first[m]

    def carefully(self, ms: tuple[int, ...]) -> tuple[float, ...]:
        self.again.append(ms)
        return tuple(self.true[m] for m in ms)


def line_of(gpu: Gpu) -> cliffs.Line:
    return measure_line(*LAYER, list(gpu.first), gpu.once, gpu.carefully)


def kernel_of(m: int) -> str:
    return f"kernel{(m + 7) // 8}"


# rises and limits


def test_a_rise_is_the_time_over_that_of_the_m_before():
    assert rises({1: 2.0, 2: 2.0, 3: 3.0, 5: 1.5}) == {(1, 2): 1.0, (2, 3): 1.5, (3, 5): 0.5}
    assert rises({7: 2.0}) == {}


def test_the_limit_is_taken_from_the_benchmarks_floor():
    assert limit_us(4096, 4096, 64) == pytest.approx(1.6 * Cell(4096, 4096, 64).floor_us() + 3)
    assert limit_us(4096, 4096, 64) == pytest.approx(1.6 * 2.1 + 3, abs=0.01)


def test_a_steep_rise_that_repeats_itself_is_found_between_its_two_ms():
    line = line_of(Gpu({1: 2.0, 2: 2.1, 3: 2.6, 4: 2.6}))
    assert line.steep == [(2, 3)]
    assert line.rises[2, 3] == pytest.approx(2.6 / 2.1)
    assert line.slow == []


def test_a_rise_of_up_to_20_percent_is_none():
    gpu = Gpu({1: 2.0, 2: 2.0 * RISE_LIMIT, 3: 2.4})
    assert line_of(gpu).steep == []
    assert (1, 2) in gpu.again  # so near the limit it is measured again


def test_a_fall_of_any_size_is_none():
    assert line_of(Gpu({1: 3.0, 2: 1.0})).steep == []


def test_a_call_beyond_its_limit_is_slow():
    limit = limit_us(*LAYER[1:], 2)
    line = line_of(Gpu({1: limit * 0.98, 2: limit * 1.02, 3: limit}))
    assert line.slow == [2]
    assert line.over_limit[2] == pytest.approx(1.02)


# noise


def test_a_slow_replay_that_does_not_repeat_itself_breaks_nothing():
    line = line_of(Gpu(dict.fromkeys(range(1, 9), 2.0), first={4: 9.0}))
    assert line.steep == line.slow == []
    assert line.us[4] == pytest.approx(2.0)
    assert max(line.rises.values()) == 1.0


def test_a_rise_hidden_by_noise_is_found_if_it_came_near_the_limit():
    gpu = Gpu({1: 2.0, 2: 2.5, 3: 2.5}, first={2: 2.36})
    assert line_of(gpu).steep == [(1, 2)]


def test_the_two_ms_of_a_rise_are_measured_together():
    gpu = Gpu({1: 2.0, 2: 2.0, 3: 2.6})
    line_of(gpu)
    assert (2, 3) in gpu.again


def test_the_largest_value_is_always_one_that_was_measured_again():
    values = {"a": 0.5, "b": 0.7, "c": 0.6}
    settled, sure = settle(values, 1.0, {"b": 0.4, "c": 0.55}.__getitem__)
    assert settled == {"a": 0.5, "b": 0.4, "c": 0.55}
    assert sure == {"b", "c"}


def test_every_suspicious_value_is_measured_again_and_no_other():
    asked = []

    def again(key: str) -> float:
        asked.append(key)
        return 1.2

    settled, sure = settle({"a": 0.9, "b": 1.1, "c": 0.98, "d": 1.3}, 1.0, again)
    assert asked == ["d", "b", "c"] and sure == set(asked)
    assert settled == {"a": 0.9, "b": 1.2, "c": 1.2, "d": 1.2}


def test_measuring_again_ends_and_what_was_not_measured_again_breaks_no_limit():
    values = {m: 2.0 for m in range(100)}
    settled, sure = settle(values, 1.0, lambda m: 2.0, most=5)
    assert len(sure) == 5 and len(settled) == 100
    line = cliffs.Line(*LAYER, {m: 50.0 for m in range(1, 9)}, {}, frozenset({2, 3}))
    assert line.slow == [2, 3]
    assert cliffs.row(line)[-1] == "2+"


def test_values_that_cannot_be_measured_again_are_no_endless_loop():
    assert settle({}, 1.0, lambda key: 1.0) == ({}, set())


# the report


def test_a_row_names_the_largest_rise_and_the_time_nearest_its_limit():
    line = line_of(Gpu({8: 2.0, 9: 2.6, 10: 2.7}))
    found = dict(zip(cliffs.COLUMNS, cliffs.row(line)))
    assert found["largest rise"] == "+30.0 %" and found["from m to m"] == "8 to 9"
    assert found["at m"] == "10" and found["us"] == "2.70"
    assert found["us / limit"] == f"{2.7 / limit_us(512, 7168, 10):.2f}"
    assert (found["steep"], found["slow"]) == ("1", "0")


def test_complaints_name_the_layer_the_ms_and_the_kernels():
    limit = limit_us(512, 7168, 9)
    line = line_of(Gpu({7: 2.0, 8: 2.5, 9: limit * 1.1}))
    rise, layer = 100 * (limit * 1.1 / 2.5 - 1), "e4m3_g128 n=512 k=7168"
    assert cliffs.complaints(line, kernel_of) == [
        f"{layer}: from m=8 to m=9 {rise:+.1f} %, more than 20 % (kernel1 to kernel2)",
        f"{layer}: from m=7 to m=8 +25.0 %, more than 20 % (kernel1)",
        f"{layer}: m=9 takes {limit * 1.1:.2f} us, more than {limit:.2f} (kernel2)",
    ]
    assert cliffs.complaints(line, kernel_of, most=1)[-1].endswith("and 1 more")
    assert cliffs.complaints(line_of(Gpu({1: 2.0, 2: 2.0})), kernel_of) == []


def test_the_document_holds_every_time_with_its_limit_and_kernel():
    line = line_of(Gpu({8: 2.0, 9: 2.6}))
    made = cliffs.to_dict(line, kernel_of)
    assert [(cell["m"], cell["us"], cell["kernel"]) for cell in made["cells"]] == [
        (8, 2.0, "kernel1"),
        (9, 2.6, "kernel2"),
    ]
    assert made["cells"][0]["limit_us"] == pytest.approx(limit_us(512, 7168, 8), abs=1e-3)
    assert made["rises"] == [{"from": 8, "to": 9, "ratio": 1.3, "again": True}]
    assert made["steep"] == [[8, 9]]


# the command


def script(*argv: object) -> SimpleNamespace:
    done = CliRunner().invoke(cliffs.app, [*map(str, argv)])
    return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--shape", "512"), "--shape: expected N,K"),
        (("--shape", "512,128"), "--shape 512,128: e4m3_g128 has one group there"),
        (("--format", "int3_g128"), "--format: expected LHS_GROUP"),
        (("--m", "0:4"), "--m: expected numbers of at least 1"),
    ],
)
def test_wrong_arguments_exit_2_and_say_which(argv, said):
    done = script(*argv)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.gpu
def test_a_layer_is_measured_at_every_m(tmp_path):
    path = tmp_path / "cliffs.json"
    done = script("--shape", "512,1024", "--format", "e4m3_g128", "--format", "int8_ch", "--m", "1:24", "--json", path)
    assert done.returncode in (0, 1), done.stderr  # fast or not is no matter of this test
    lines = json.loads(path.read_text())["lines"]
    assert [line["format"] for line in lines] == ["e4m3_g128", "int8_ch"]
    for line in lines:
        assert [cell["m"] for cell in line["cells"]] == list(range(1, 25))
        assert all(0.5 < cell["us"] < 100 for cell in line["cells"])
        assert len(line["rises"]) == 23
    assert (done.returncode == 1) == any(line["steep"] or line["slow"] for line in lines)
