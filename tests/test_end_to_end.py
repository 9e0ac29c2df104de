"""scripts/end_to_end.py, tiny and on the CPU: the whole way, its decoder, its arguments and exit codes."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    "--device cpu --layers 1 --hidden 64 --intermediate 128 --heads 2 --kv-heads 1 --vocab 96 --group-size 32 "
    "--tokens 8 --batch 1,2 --context 3 --steps 2"
).split()


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("end_to_end", ROOT / "scripts" / "end_to_end.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["end_to_end"] = module  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules["end_to_end"]


@pytest.fixture
def libraries():
    for name in ("transformers", "safetensors", "compressed_tensors"):
        pytest.importorskip(name)


def run(script, *arguments: str):
    return CliRunner().invoke(script.app, [*arguments])


@pytest.mark.parametrize("format", ["int-quantized", "pack-quantized"])
def test_the_whole_way(script, libraries, format, tmp_path):
    result = run(script, *TINY, "--format", format, "--keep", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [c["activations"] for c in document["checkpoints"]] == ["fp8", "int8"]
    for checkpoint in document["checkpoints"]:
        assert checkpoint["layers"] == 7 and checkpoint["weights_that_differ"] == []
        logits = checkpoint["logits"]
        assert logits["error_jitgemm"] <= logits["error_bf16_torch"] and logits["error_bf16_torch"] > 0
        assert 0 < logits["worst_layer_error"] < 2.2e-3
        assert checkpoint["agrees"]
    rows = [(row["batch"], row["layers"]) for row in document["decode"]]
    assert rows == [(b, name) for b in (1, 2) for name in ("bf16", "fp8", "jitgemm fp8", "jitgemm int8")]
    for row in document["decode"]:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e6 / row["us_per_step"])
    config = json.loads((tmp_path / "llama-w4afp8" / "config.json").read_text())["quantization_config"]
    assert config["format"] == format and config["quant_method"] == "compressed-tensors"


def test_a_table_for_people(script, libraries):
    result = run(script, *TINY, "--activation", "int8", "--batch", "1")
    assert result.exit_code == 0, result.output
    assert re.search(r"W4 int8 +7 of 7 .* yes", result.stdout)
    assert re.search(r"1  jitgemm int8 ", result.stdout) and "jitgemm fp8" not in result.stdout


def test_a_layer_beyond_the_limit_exits_with_1(script, libraries, monkeypatch):
    monkeypatch.setattr(script, "LAYER_LIMIT", 1e-6)
    result = run(script, *TINY, "--activation", "int8", "--batch", "1", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["checkpoints"][0]["agrees"] is False


def test_a_weight_that_differs_exits_with_1(script, libraries, monkeypatch):
    whole = script.dequantised_linears

    def changed(*arguments):
        linears = whole(*arguments)
        linears["model.layers.0.mlp.up_proj"].weight[5, 7] += 1
        return linears

    monkeypatch.setattr(script, "dequantised_linears", changed)
    result = run(script, *TINY, "--activation", "fp8", "--batch", "1", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["checkpoints"][0]["weights_that_differ"] == ["model.layers.0.mlp.up_proj"]


@torch.no_grad()
def test_decoding_with_the_cache_is_decoding_without(script, libraries):
    sizes = script.ModelSizes(2, 64, 128, 2, 1, 96, 64)
    model = script.empty_model(sizes, "cpu", 3).float()  # so that ties between tokens are rare
    decoder = script.Decoder(model, 2, 5, 4, "cpu", 7)
    tokens = torch.randint(0, 96, (2, 5), generator=torch.Generator().manual_seed(7))
    # The prompt's last token is fed once more: it stands in the cache, and then again at the first step.
    tokens = torch.cat([tokens, tokens[:, -1:]], 1)
    for _ in range(2):
        expected = tokens
        decoder.rewind()
        decoder.ids.copy_(tokens[:, -1:])
        for _ in range(4):
            decoder.step()
            following = model(input_ids=expected, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            assert torch.equal(decoder.ids, following)
            expected = torch.cat([expected, following], 1)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--activation", "int4"], "--activation: expected fp8 or int8, got 'int4'"),
        (["--format", "gptq"], "--format: expected int-quantized or pack-quantized, got 'gptq'"),
        (["--batch", "1,x"], "--batch: expected positive numbers such as 1,16,64, got '1,x'"),
        (["--batch", "0"], "--batch: expected positive numbers"),
        (["--heads", "3"], "--heads: expected an even head size and a multiple of --kv-heads"),
        (["--group-size", "48"], "--hidden: expected a multiple of --group-size 48, got 64"),
    ],
)
def test_wrong_arguments_exit_with_2(script, libraries, arguments, text):
    result = run(script, *TINY, *arguments)
    assert result.exit_code == 2 and text in result.stderr


def test_a_missing_library_exits_with_2_and_says_what_to_install(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    result = run(script, *TINY)
    assert result.exit_code == 2
    assert re.search(r"needs .*compressed-tensors: pip install .*compressed-tensors", result.stderr)


def test_help_teaches(script):
    result = run(script, "--help")
    assert result.exit_code == 0
    for text in ("python scripts/end_to_end.py", "Exit codes", "Logits", "Decoding", "--keep"):
        assert text in result.stdout


def first_example(page: str) -> str:
    return re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)[1]


def test_the_readme_begins_with_the_same_example():
    assert first_example("README.md") == first_example("docs/linear.md")


def test_the_first_example_of_the_documentation_runs(script, libraries, tmp_path, monkeypatch):
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "checkpoint"
    sizes = script.ModelSizes(1, 64, 128, 2, 1, 96, 64)
    with torch.no_grad():
        script.write_checkpoint(folder, sizes, "W4AFP8", "int-quantized", 32, "cpu", 0)
    code = first_example("docs/linear.md")
    assert len(code.strip().splitlines()) <= 10
    smaller = {"Meta-Llama-3-8B-Instruct-W4AFP8": str(folder), '"cuda"': '"cpu"', "max_m=4096": "max_m=8"}
    for there, here in smaller.items():
        assert there in code
        code = code.replace(there, here)
    names: dict = {}
    exec(compile(code, "docs/linear.md", "exec"), names)
    assert names["logits"].shape == (1, 16, 96) and bool(names["logits"].isfinite().all())
    assert sum(isinstance(m, script.W4A8Linear) for m in names["model"].modules()) == 7
