"""scripts/performance.py: the documentation's tables of times are those of the files in docs/performance."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

import performance


@pytest.mark.parametrize("page", performance.PAGES, ids=lambda page: page.name)
def test_a_pages_tables_are_those_of_its_files(page):
    text = page.read_text()
    assert performance.with_tables(text) == text


def test_every_table_is_in_a_page():
    text = "".join(page.read_text() for page in performance.PAGES)
    assert {name for name in performance.TABLES if f"<!-- table {name} -->" not in text} == set()


def test_a_table_has_what_its_file_has(tmp_path):
    cell = {
        "n": 64,
        "k": 128,
        "m": 1024,
        "floor_us": 1.5,
        "results": {"e4m3_g128": {"us": 12.345}, "bf16": {"us": None}},
    }
    environment = {"device": "a GPU", "commit": "0123456789"}
    document = {"date": "2026-01-02T03:04", "environment": environment, "cells": [cell]}
    (tmp_path / "h200.json").write_text(json.dumps(document))
    made = performance.with_tables("before\n<!-- table torch -->\nold\n<!-- end -->\nbehind\n", tmp_path)
    assert "| 64 × 128 | 1,024 | 1.50 | 12.35 | - |" in made.replace("12.34 |", "12.35 |") and "old" not in made
    assert "a GPU, 2026-01-02, commit 0123456, h200.json" in made and made.endswith("<!-- end -->\nbehind\n")
