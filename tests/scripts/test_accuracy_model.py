"""scripts/accuracy_model.py on a small model and the CPU: rows as a table and as a file, and what it refuses."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import accuracy_model
from model_folders import SIZES, folder_of, model_of


@pytest.fixture
def folder(tmp_path, quiet_transformers) -> Path:
    folder_of(tmp_path / "model", model_of("Llama", torch.float32, **SIZES | {"num_hidden_layers": 1}))
    words = "a scale of the weight and its group is what codes are multiplied by".split()
    (tmp_path / "text").write_text(" ".join(random.Random(0).choices(words, k=6000)))
    return tmp_path


def run(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy_model.py", *map(str, arguments)])
    accuracy_model.main()


def test_rows_say_what_a_format_costs(folder, monkeypatch, capsys):
    model, text, out = folder / "model", folder / "text", folder / "out.json"
    rows = [part for row in ("reference", "8 bits", "g32", "g128 calibrated") for part in ("--row", row)]
    run(monkeypatch, model, "--text", text, "--windows", 4, "--device", "cpu", *rows, "--json", out)
    reference, eight, four, calibrated = json.loads(out.read_text())["rows"]
    assert reference["kl"] == 0 and reference["same"] == 1 and reference["perplexity"] > 1
    assert 0 < eight["kl"] < four["kl"] and [row["layers"] for row in (eight, four, calibrated)] == [7, 7, 7]
    printed = capsys.readouterr().out
    for row in (reference, eight, four, calibrated):
        [line] = [line for line in printed.splitlines() if line.startswith(f"| {row['row']} |")]
        assert f"{row['perplexity']:.2f}" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "expected a folder, "), (("nowhere", "--row", "g31"), "--row: expected one of reference, ")],
)
def test_wrong_arguments_are_named(monkeypatch, capsys, arguments, said):
    with pytest.raises(SystemExit) as exit:
        run(monkeypatch, *arguments)
    assert exit.value.code == 2 and said in capsys.readouterr().err
