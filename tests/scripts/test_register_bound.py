"""scripts/register_bound.py, and the sum of registers against the compiler. Kernels that spill: tests/kernel/test_spills.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import register_bound
from benchmark_lib.cells import parse_format
from register_bound import DEVICE, MAX_SPILL_BYTES, Built, app, build_all, sample
from typer.testing import CliRunner

from jitgemm.kernel.formats import WeightFormat
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.legal import illegal, registers_needed


@pytest.mark.parametrize("name, scale", [("e4m3_g128", "bf16"), ("int8_g128z", "fp32"), ("e4m3_chz", "fp32")])
def test_it_takes_a_sample_of_what_is_near_the_limit_on_either_side(name, scale, monkeypatch):
    monkeypatch.setattr(register_bound, "WITHIN", 24)
    found = sample(parse_format(name), scale, 60)
    assert any(spec.consumers_copy_lhs for spec in found) and {True, False} == set(found.values())
    for spec, legal in found.items():
        spare = spec.consumer_registers - registers_needed(spec)
        assert abs(spare) <= 24 and (spare >= 0) == legal == (illegal(spec, DEVICE) is None)
        assert spec.format.scale_type == scale


def test_a_hopeless_kernel_is_refused_and_the_compiler_agrees():
    hopeless = KernelSpec("s8", WeightFormat(0, False, "fp32", "s8"), 224, 192, 3, token_halves=2)
    assert "registers" in illegal(hopeless, DEVICE)
    (built,) = build_all({hopeless: False})
    assert built.badly


def test_the_command_compiles_a_sample_and_fails_for_a_legal_one_that_is_badly_built(monkeypatch):
    arguments = ["--format", "int8_ch", "--sample", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "1 legal, " in done.output and "1 illegal, " in done.output, done.output

    fine = Built("one", True, 100, 104, 0, "")
    for built, code in (
        (fine, 0), (replace(fine, spill_bytes=MAX_SPILL_BYTES), 0), (replace(fine, spill_bytes=MAX_SPILL_BYTES + 4), 1),
        (replace(fine, serialised="C7512"), 1), (replace(fine, legal=False, spill_bytes=999), 0),
    ):  # fmt: skip
        monkeypatch.setattr(register_bound, "build_all", lambda jobs, built=built: [built])
        assert CliRunner().invoke(app, arguments).exit_code == code
