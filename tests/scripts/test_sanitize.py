"""scripts/sanitize.py without a GPU: its list can be made, and a GEMM of it on the emulator."""

from __future__ import annotations

import pytest
import sanitize
from emulator.device import cuda_is_cpu
from marks import emulated

from jitgemm.kernel.formats import WeightFormat
from jitgemm.select.devices import DEVICES


@pytest.mark.parametrize("case", [*sanitize.CASES, *sanitize.GROUPED], ids=lambda case: case[0])
def test_a_gemm_has_a_weight_and_a_legal_kernel(case):
    _, wanted, format, lhs, *_, sizes = case if case in sanitize.CASES else case[:-1]
    weight, experts = sanitize.weight_of(format, 1, *sizes[-2:]), 0 if case in sanitize.CASES else 64
    assert weight.format == WeightFormat(*format)
    assert sanitize.first(wanted, lhs, weight.format, DEVICES["h200"], experts=experts).experts == experts


def test_every_way_to_add_up_is_there():
    for cases in (sanitize.CASES, sanitize.GROUPED):
        assert {wanted.get("sums", "f32") for _, wanted, *_ in cases} == {"f32", "f16", "parts"}


@emulated
@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("sums in f16, any order, one run", "-f16"),
        ("grouped, gathered, sums by parts", "-parts"),
        ("zero points as corrections", "-xfp16"),
        ("two levels, copied by threads", "s8tl-"),
        ("near scales", "e4m3nvnear-"),
        ("two terms", "e4m3nv-"),
        ("MXFP4, a scale for 32", "e4m3mx-g32"),
        ("rotated codes", "rotated"),
        ("codes and sums for corrections", "sums64bf16"),
    ],
)
def test_what_it_runs_is_right(monkeypatch, capsys, name, label):
    some = [each for each in sanitize.runs() if each[0] == name]
    with cuda_is_cpu(monkeypatch) as emulator:
        monkeypatch.setattr(sanitize, "runs", lambda: some)
        assert sanitize.main(["nothing of this name"]) == 0 and not emulator.launched
        assert sanitize.main([name]) == 0
    assert capsys.readouterr().out == f"ok    {name}\n"
    assert all(label in each for each in emulator.launched) and emulator.launched


@emulated
def test_a_rank_sends_its_tokens_to_itself(monkeypatch):
    with cuda_is_cpu(monkeypatch) as emulator:
        real = sanitize.Buffer
        monkeypatch.setattr(sanitize, "Buffer", lambda *parts: emulator.others.append(parts[1]) or real(*parts))
        assert sanitize.exchanged()
    assert {label.partition("-")[0] for label in emulator.launched} >= {"dispatch", "collect"}
