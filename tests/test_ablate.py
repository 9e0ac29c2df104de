"""scripts/ablate.py without a GPU: what it replaces still stands in the headers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))  # at the end: scripts/cache.py and warmup.py must not hide anything

import ablate

from jitgemm.jit.source import headers


@pytest.mark.parametrize("part", ablate.PARTS.values())
def test_every_change_finds_its_text(part):
    for name, variant in part().variants.items():
        texts = dict(headers())
        for header, old, new in variant.changes:
            assert old in texts[f"jitgemm/{header}.cuh"], f"{name}: {old!r}"
            texts[f"jitgemm/{header}.cuh"] = texts[f"jitgemm/{header}.cuh"].replace(old, new)
