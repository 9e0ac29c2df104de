"""scripts/register_bound.py: which kernels it takes, and what it says of what the compiler makes of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

import register_bound
from benchmark_lib.cells import parse_format
from register_bound import app, build_all, near_the_bound

from jitgemm.select.choose import illegal, legal_kernels
from jitgemm.select.devices import DEVICES
from jitgemm.select.registers import registers_needed

H200 = DEVICES["h200"]


@pytest.mark.parametrize("name", ["e4m3_g128", "int8_g128z", "int8_ch"])
def test_it_takes_what_is_near_the_bound_on_either_side(name):
    legal, refused = near_the_bound(parse_format(name), "bf16", "bf16", H200, 8)
    assert legal and refused
    assert all(illegal(spec, H200) is None for spec in legal)
    assert all(0 <= spec.consumer_registers - registers_needed(spec) <= 8 for spec in legal)
    assert all(registers_needed(spec) > spec.consumer_registers for spec in refused)
    assert all("registers" in illegal(spec, H200) for spec in refused)
    more, _ = near_the_bound(parse_format(name), "bf16", "bf16", H200, 255)
    assert set(legal) < set(more) == set(legal_kernels(more[0].lhs, more[0].format, H200))


def test_what_the_compiler_says_is_held_against_the_bound():
    legal, refused = near_the_bound(parse_format("e4m3_g128"), "bf16", "bf16", H200, 8)
    spec = next(spec for spec in legal if spec.block_m == 64 and spec.ctas_per_sm == 2 and spec.split_k == 4)
    (built,) = build_all({spec: True}, 1)
    assert built.problem is None and not built.surprise and built.bound <= built.available
    assert replace(built, legal=False).surprise
    hopeless = max(refused, key=lambda spec: registers_needed(spec) - spec.consumer_registers)
    (failed,) = build_all({hopeless: False}, 1)
    assert "spill" in failed.problem and not failed.surprise
    assert replace(failed, legal=True).surprise


def test_the_command_writes_every_kernel_and_fails_for_a_legal_one_that_does_not_build(monkeypatch, tmp_path):
    arguments = ["--format", "int8_g128", "--only", "m64n64-k1x4s", "--threads", "2"]
    path = tmp_path / "bound.json"
    done = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert done.exit_code == 0, done.output
    document = json.loads(path.read_text())
    assert document["nvrtc"].startswith(("12.", "13."))
    assert [each["kernel"] for each in document["kernels"]] == ["s8fast-g128-bf16-m64n64-k1x4s-s8-c2"]
    assert document["kernels"][0] | {"bound": 0, "available": 0} == {
        "kernel": "s8fast-g128-bf16-m64n64-k1x4s-s8-c2", "legal": True, "bound": 0, "available": 0, "problem": None,
    }  # fmt: skip

    spills = replace(register_bound.Built(**document["kernels"][0]), problem="8 bytes of register spills")
    monkeypatch.setattr(register_bound, "build_all", lambda jobs, threads: [spills])
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1 and "8 bytes of register spills" in done.output


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
