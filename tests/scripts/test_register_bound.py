"""scripts/register_bound.py, and the sum of registers against the compiler. Kernels that spill: tests/kernel/test_spills.py."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import register_bound
from benchmark_lib.cells import parse_format
from register_bound import MAX_SPILL_BYTES, Built, app, build_all, sample

from jitgemm.kernel.formats import WeightFormat
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import illegal, registers_needed

H200 = DEVICES["h200"]


@pytest.mark.parametrize("name, scale", [("e4m3_g128", "bf16"), ("int8_g128z", "fp32"), ("e4m3_chz", "fp32")])
def test_it_takes_a_sample_of_what_is_near_the_limit_on_either_side(name, scale):
    found = sample(parse_format(name), scale, "bf16", H200, 24, 60, 1)
    assert found == sample(parse_format(name), scale, "bf16", H200, 24, 60, 1)
    assert any(spec.consumers_copy_lhs for spec in found) and {True, False} == set(found.values())
    for spec, legal in found.items():
        spare = spec.consumer_registers - registers_needed(spec)
        assert abs(spare) <= 24 and (spare >= 0) == legal == (illegal(spec, H200) is None)
        assert spec.format.scale_type == scale


def test_a_hopeless_kernel_is_refused_and_the_compiler_agrees():
    hopeless = KernelSpec("s8", WeightFormat(0, False, "fp32", "s8"), 224, 192, 3, token_halves=2)
    assert "registers" in illegal(hopeless, H200)
    (built,) = build_all({hopeless: False}, 1)
    assert built.badly


def test_the_command_writes_every_kernel_and_fails_for_a_legal_one_that_is_badly_built(monkeypatch, tmp_path):
    arguments = ["--format", "int8_g128", "--only", "m64n64-k2x2s", "--threads", "2", "--scale", "bf16"]
    path = tmp_path / "bound.json"
    done = CliRunner().invoke(app, [*arguments, "--within", "40", "--sample", "500", "--json", str(path)])
    assert done.exit_code == 0, done.output
    document = json.loads(path.read_text())
    assert document["nvrtc"].startswith(("12.", "13.")) and document["kernels"]
    for each in document["kernels"]:
        assert "m64n64-k2x2s" in each["kernel"] and each["legal"] == (each["needed"] <= each["available"])

    fine = Built("one", True, 100, 104, 0, "")
    for built, code in (
        (fine, 0), (replace(fine, spill_bytes=MAX_SPILL_BYTES), 0), (replace(fine, spill_bytes=MAX_SPILL_BYTES + 4), 1),
        (replace(fine, serialised="C7512"), 1), (replace(fine, legal=False, spill_bytes=999), 0),
    ):  # fmt: skip
        monkeypatch.setattr(register_bound, "build_all", lambda jobs, threads, built=built: [built])
        assert CliRunner().invoke(app, arguments).exit_code == code


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--format", "int4"], "--format"),
        (["--scale", "fp64"], "--scale: expected one of bf16, fp16, fp32, got 'fp64'"),
        (["--out", "int8"], "--out: expected one of bf16, fp16, fp32, got 'int8'"),
        (["--device", "a100"], "a100"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")
