"""scripts/sanitize.py without a GPU: its list can be made, and a GEMM of it on the emulator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from emulator.device import cuda_is_cpu
from marks import emulated

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import sanitize

from jitgemm.kernel.formats import WeightFormat
from jitgemm.select.devices import DEVICES


def names(cases: list[tuple]) -> list[str]:
    return [case[0] for case in cases]


@pytest.mark.parametrize("case", sanitize.CASES, ids=names(sanitize.CASES))
def test_a_gemm_has_a_weight_and_a_legal_kernel(case):
    _, wanted, format, lhs, (_, n, k) = case
    weight = sanitize.weight_of(format, 1, n, k)
    assert weight.format == WeightFormat(*format)
    sanitize.first(wanted, lhs, weight.format, DEVICES["h200"])


@pytest.mark.parametrize("case", sanitize.GROUPED, ids=names(sanitize.GROUPED))
def test_a_grouped_gemm_has_a_weight_and_a_legal_kernel(case):
    _, wanted, format, lhs, _, (n, k), _ = case
    weights = [sanitize.weight_of(format, seed, n, k) for seed in range(2)]
    weight = type(weights[0]).stacked(2, weights.__getitem__)
    assert weight.format == WeightFormat(*format)
    assert sanitize.first(wanted, lhs, weight.format, DEVICES["h200"], experts=64).experts == 64


def test_every_way_to_add_up_is_there():
    for cases in (sanitize.CASES, sanitize.GROUPED):
        assert {wanted.get("sums", "f32") for _, wanted, *_ in cases} == {"f32", "f16", "parts"}


@emulated
@pytest.mark.parametrize(
    "name", ["sums in f16, any order, one run", "grouped, gathered, sums by parts", "zero points as corrections"]
)
def test_what_it_runs_is_right(monkeypatch, name):
    with cuda_is_cpu(monkeypatch) as emulator:
        [case] = [case for case in (*sanitize.CASES, *sanitize.GROUPED) if case[0] == name]
        run = sanitize.grouped if case in sanitize.GROUPED else sanitize.dense
        assert run(*case[1:])
    assert all(case[1].get("sums", "xfp16") in label for label in emulator.launched) and emulator.launched
