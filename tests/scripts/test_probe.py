"""scripts/probe.py without a GPU: its probes compile with the headers, and registers can be put into their FFMA."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import probe

from jitgemm.jit.sass import FFMA, code_sections, instructions

pytestmark = pytest.mark.nvrtc

FFMA_BESIDE = probe.Beside("FFMA", "e4m3", 128, probe.BESIDE["FFMA"][0], None, others=2)
PROBES = [
    probe.Multiply("e4m3", 64, True, 2, 1),
    probe.Multiply("s8", 128, False, 2, 0),
    probe.Beside("I2F", "s8", 128, probe.BESIDE["I2F"][0], None),
    probe.Copy(1, True, 64),
    probe.Copy(2, False),
    probe.Copy(4, True),
    *(probe.Send(how, 2, 32768) for how in probe.STORES),
]


@pytest.mark.parametrize("each", PROBES, ids=str)
def test_a_probe_compiles(each):
    assert probe.build([each])[0].startswith(b"\x7fELF")


def test_an_ffma_gets_the_registers_asked_for():
    (cubin,) = probe.build([FFMA_BESIDE])
    changed = probe.PORTS["two read of one bank, one written"].apply(cubin, every=2)
    found = [each for each in instructions(changed, *code_sections(changed)[0]) if each.opcode == FFMA]
    assert len(found) == 64 and sum(each.yields for each in found) == 32
    for each in found:
        destination, a, b, c = (*(each.low >> at & 0xFF for at in (16, 24, 32)), each.high & 0xFF)
        assert destination % 2 == a % 2 == c % 2 == 0 and b == 255
