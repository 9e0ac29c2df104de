"""scripts/end_to_end.py, tiny and on the CPU: the way from a checkpoint, the forward that is timed, arguments and exit codes."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from jitgemm.nn import PackedLinear

ROOT = Path(__file__).resolve().parents[2]
SIZES = "--device cpu --hidden 64 --intermediate 128 --heads 2 --kv-heads 1 --vocab 96 --group-size 32".split()
CHECK = ["check", *SIZES, "--layers", "1", "--tokens", "8"]
TP = "tp --device cpu --hidden 64 --intermediate 128 --heads 4 --kv-heads 4 --group-size 32 --layers 1".split()
TP += "--context 3 --prefill 8".split()
EP = "ep --device cpu --experts 4 --top-k 2 --hidden 64 --intermediate 32 --group-size 32 --tokens 1,5".split()
LAYER = "layer --device cpu --hidden 64 --intermediate 128 --heads 2 --kv-heads 1 --group-size 32 --layers 2".split()
SPEED = ["speed", *SIZES, "--layers", "2", "--batch", "1,2", "--context", "3", "--steps", "2", "--prefill", "8"]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("end_to_end", ROOT / "scripts" / "end_to_end.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["end_to_end"] = module  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules["end_to_end"]
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture
def libraries(transformers):
    pytest.importorskip("compressed_tensors", minversion="0.20")  # older ones choose the format themselves


def run(script, *arguments: str):
    return CliRunner().invoke(script.app, [*arguments])


@pytest.mark.parametrize("format", ["int-quantized", "pack-quantized"])
def test_the_whole_way(script, libraries, format, tmp_path):
    result = run(script, *CHECK, "--format", format, "--keep", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [c["activations"] for c in document["checkpoints"]] == ["fp8", "int8"]
    for checkpoint in document["checkpoints"]:
        assert checkpoint["layers"] == 7 and checkpoint["weights_that_differ"] == []
        logits = checkpoint["logits"]
        assert logits["error_jitgemm"] <= logits["error_bf16_torch"] and logits["error_bf16_torch"] > 0
        assert 0 < logits["worst_layer_error"] < 2.2e-3
        assert checkpoint["agrees"]
    config = json.loads((tmp_path / "llama-w4afp8" / "config.json").read_text())["quantization_config"]
    assert config["format"] == format and config["quant_method"] == "compressed-tensors"


def test_a_table_for_people_and_a_layer_beyond_the_limit_exits_with_1(script, libraries, monkeypatch):
    monkeypatch.setattr(script, "LAYER_LIMIT", 1e-6)
    result = run(script, *CHECK, "--activation", "int8")
    assert result.exit_code == 1, result.output
    assert re.search(r"W4 int8 +7 of 7 .* NO", result.stdout)
    assert "W4 fp8" not in result.stdout


def test_a_weight_that_differs_exits_with_1(script, libraries, monkeypatch):
    whole = script.dequantised_linears

    def changed(*arguments):
        linears = whole(*arguments)
        linears["model.layers.0.mlp.up_proj"].weight[5, 7] += 1
        return linears

    monkeypatch.setattr(script, "dequantised_linears", changed)
    result = run(script, *CHECK, "--activation", "fp8", "--json")
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["checkpoints"][0]["weights_that_differ"] == ["model.layers.0.mlp.up_proj"]


def test_every_contestant_is_timed_in_decoding_and_with_a_prompt(script, transformers):
    pytest.importorskip("torch", minversion="2.13")  # 2.8 has no FP8 with scales by row on the CPU
    result = run(script, *SPEED, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    rows = [(row["contestant"], row["kind"], row["sequences"]) for row in document["rows"]]
    kinds = [("decode", 1), ("decode", 2), ("prefill", 1)]
    assert rows == [(name, *kind) for name in ("bf16", "fp8", "e4m3", "int8") for kind in kinds]
    base = {(row["kind"], row["sequences"]): row["us"] for row in document["rows"] if row["contestant"] == "bf16"}
    for row in document["rows"]:
        tokens = row["sequences"] * (8 if row["kind"] == "prefill" else 1)
        assert row["tokens_per_s"] == pytest.approx(tokens * 1e6 / row["us"])
        assert row["times_bf16"] == pytest.approx(base[row["kind"], row["sequences"]] / row["us"])
        assert row["difference"] == 0  # nothing is compiled on a CPU
    assert set(document["versions"]) == {"torch", "transformers"} and document["backend"] == "none"


def test_logits_that_a_compiler_changes_exit_with_1(script, transformers, monkeypatch):
    def wrong(graph, inputs):  # but for masks, whose -inf would make NaN
        return lambda *arguments: [each if each.isinf().any() else -2 * each for each in graph(*arguments)]

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(compile_with, torch.compile, wrong))
    result = run(
        script, *SPEED, "--contestant", "bf16", "--batch", "1", "--prefill", "0", "--backend", "eager", "--json"
    )
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["rows"][0]["difference"] > 0.3


def compile_with(compile, other, function, *, backend, **options):
    return compile(function, backend=other, **options)


def test_flex_attention_decodes_what_sdpa_decodes(script, transformers):
    model = ["--contestant", "bf16", "--batch", "1,2", "--context", "70", "--prefill", "0", "--backend", "eager"]
    result = run(script, *SPEED, *model, "--attention", "flex", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["attention"] == "flex" and len(document["rows"]) == 2
    assert all(0 < row["difference"] < 0.02 for row in document["rows"])  # SDPA's, uncompiled, masks 58 of 128 slots


@pytest.fixture(params=["bf16", "fp8", "e4m3", "e4m3-head8"])
def changed(request, script, transformers):
    """A model of transformers, and the forward that is timed; one graph for each shape serves all layers."""
    if request.param == "fp8":
        pytest.importorskip("torch", minversion="2.13")  # 2.8 has no FP8 with scales by row on the CPU
    llama = sys.modules["benchmark_lib.llama"]
    with torch.no_grad():
        model = llama.empty_model(llama.ModelSizes(10, 64, 128, 2, 1, 96, 64), "cpu", 3)
        llama.CONTESTANTS[request.param](model, 32)
        torch._dynamo.reset()
        graphs = torch._dynamo.testing.CompileCounterWithBackend("eager")
        yield model, llama.Forward(model, 2, 16, graphs), graphs
    torch._dynamo.reset()


def test_the_forward_is_that_of_transformers_and_its_block_is_compiled_once(changed):
    model, forward, graphs = changed
    ids = torch.randint(0, 96, (2, 5), generator=torch.Generator().manual_seed(7))
    expected = model(input_ids=ids, use_cache=False).logits[:, -1].float()
    logits = forward(ids, torch.arange(5)).float()
    # 2.8's attention rounds elsewhere, which 8-bit activations make more of.
    apart = 0.01 if torch.__version__ >= (2, 13) else 0.1
    assert float((logits - expected).norm() / expected.norm()) < apart
    assert graphs.frame_count == 3  # of ten layers
    for position in range(5, 8):
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        expected = model(input_ids=ids, use_cache=False).logits[:, -1].float()
        logits = forward(ids[:, -1:].contiguous(), torch.tensor([position])).float()
        assert float((logits - expected).norm() / expected.norm()) < 0.1  # 8-bit activations, of keys rounded elsewhere
    assert graphs.frame_count == 6


@torch.no_grad()
def test_a_contestant_s_head_alone_has_8_bits(script, transformers):
    llama = sys.modules["benchmark_lib.llama"]
    model = llama.empty_model(llama.ModelSizes(2, 64, 128, 2, 1, 96, 64), "cpu", 3)
    llama.CONTESTANTS["e4m3-head8"](model, 32)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if "A8Linear" in str(type(module))}
    assert kinds.pop("lm_head") == "W8A8Linear" and set(kinds.values()) == {"W4A8Linear"}


@torch.no_grad()
def test_steps_decode_greedily_and_go_back(script, transformers):
    llama = sys.modules["benchmark_lib.llama"]
    model = llama.empty_model(llama.ModelSizes(2, 64, 128, 2, 1, 96, 64), "cpu", 3).float()  # so that ties are rare
    prompt = torch.randint(0, 96, (2, 5), generator=torch.Generator().manual_seed(7))
    forward = llama.Forward(model, 2, 10)
    forward(prompt[:, :4], torch.arange(4))
    steps = llama.Steps(forward, prompt[:, 4:], 4)
    for _ in range(2):
        tokens = prompt
        for _ in range(4):
            steps.run()
            following = model(input_ids=tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            assert torch.equal(steps.ids, following)
            tokens = torch.cat([tokens, following], 1)
        steps.rewind()


def test_layers_are_divided_among_ranks_and_timed(script, transformers, monkeypatch, capsys):
    monkeypatch.setattr(script, "MOST_DIFFERENT", 1e-9)
    result = run(script, *TP, "--batch", "1,2", "--contestant", "bf16", "--contestant", "int8", "--json")
    assert result.exit_code == 1, result.output  # the differences below are more
    document = json.loads(result.stdout)
    rows = [(row["contestant"], row["kind"], row["tokens"]) for row in document["rows"]]
    kinds = [("decode", 1), ("decode", 2), ("prefill", 8)]
    assert rows == [(name, *kind) for name in ("bf16", "int8") for kind in kinds]
    base = {row["tokens"]: row["us"] for row in document["rows"] if row["contestant"] == "bf16"}
    for row in document["rows"]:
        assert 0 < row["difference"] < 0.1  # ranks add up other parts
        assert min(row["us"], row["compute_us"], row["collective_us"], row["one_us"]) > 0
        assert row["communication"] == pytest.approx(1 - row["compute_us"] / row["us"])
        assert row["speedup"] == pytest.approx(row["one_us"] / row["us"])
        assert row["times_bf16"] == pytest.approx(base[row["tokens"]] / row["us"])
    assert document["ranks"] == 2 and document["environment"]["commit"] and document["date"]
    for row in document["rows"]:
        del row["times_bf16"]  # a column fewer: 80 are enough
    script._print_tp(document)
    table = capsys.readouterr().out
    assert re.search(r"decode +1  int8( +[\d.]+){3} +-?\d+%", table) and "2 ranks" in table


def test_experts_are_divided_among_ranks_and_timed(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "EXPERTS_DIFFERENCE", 1e-9)
    result = run(script, *EP, "--json")
    assert result.exit_code == 1, result.output  # the differences below are more
    document = json.loads(result.stdout)
    rows = [(row["activation"], row["tokens"]) for row in document["rows"]]
    assert rows == [(name, tokens) for name in ("e4m3", "int8") for tokens in (1, 5)]
    for row in document["rows"]:
        assert 0 < row["difference"] < 0.01  # ranks add up what they have rounded
        assert min(row[f"{name}_us"] for name in ("one", "shared", "one_all", "own", "any")) > 0
    assert document["ranks"] == 2 and document["model"]["experts"] == 4 and document["environment"]["commit"]
    script._print_ep(document)
    table = capsys.readouterr().out
    assert re.search(r"int8 +5( +\S+){5}", table) and "2 x cpu" in table


def test_layers_are_timed_as_modules_and_by_hand(script):
    torch._dynamo.reset()
    result = run(script, *LAYER, "--activation", "e4m3", "--batch", "1,3", "--backend", "eager", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    ours = "gemms", "hand", "hand-attention", "modules", "compiled", "floor"
    kinds = [(name, "e4m3") for name in ours] + [("bf16", None)]
    rows = [(row["contestant"], row["activation"], row["tokens"]) for row in document["rows"]]
    assert rows == [(*kind, m) for m in (1, 3) for kind in kinds]
    base = {(row["activation"], row["tokens"]): row["us"] for row in document["rows"] if row["contestant"] == "hand"}
    for row in document["rows"]:
        if row["contestant"] != "bf16":
            assert row["times_hand"] == pytest.approx(row["us"] / base[row["activation"], row["tokens"]])
        if row["contestant"] in ("modules", "compiled"):
            assert 0 < row["difference"] < 0.1  # norms and gates are rounded
        elif row["contestant"] != "floor":
            assert row["difference"] == 0  # bit for bit the calls by hand
            assert row["us"] == sorted(row["us_by_allocation"])[1]
    (floor,) = {row["us"] for row in document["rows"] if row["contestant"] == "floor"}
    values = 64 * (128 + 64) + 64 * 256 + 128 * 64
    assert floor == pytest.approx((values / 2 + 2 * values / 32) / 4.5e6)
    assert document["backend"] == "eager" and document["environment"]["commit"] and document["date"]


def test_a_table_of_layers_for_people(script):
    result = run(
        script, *LAYER, "--batch", "2,1", "--contestant", "hand", "--contestant", "bf16", "--activation", "int8"
    )
    assert result.exit_code == 0, result.output
    assert re.search(r"activations +m = 2 +m = 1 +difference", result.stdout)
    assert re.search(r"hand +int8( +[\d.]+ \(1\.00\)){2} +0", result.stdout)
    assert re.search(r"bf16 +-( +[\d.]+){2} +0", result.stdout)


def test_layers_that_a_module_changes_exit_with_1(script, monkeypatch):
    def wrong(self, x):
        return 2 * forward(self, x)

    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", wrong)
    result = run(script, *LAYER, "--batch", "1", "--contestant", "modules", "--activation", "int8", "--json")
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["rows"][0]["difference"] > 0.3


@pytest.mark.gpu
def test_compiled_steps_replay_on_a_gpu(script, transformers):
    sizes = "--hidden 1024 --intermediate 2048 --heads 8 --kv-heads 2 --vocab 512 --layers 2".split()
    result = run(script, "speed", *sizes, "--batch", "1,3", "--context", "40", "--prefill", "100", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == 12 and all(row["difference"] < 0.1 for row in rows)


@pytest.mark.gpu
def test_layers_replay_as_modules_and_by_hand(script):
    sizes = "--hidden 1024 --intermediate 2048 --heads 8 --kv-heads 2 --layers 2".split()
    result = run(script, "layer", *sizes, "--activation", "e4m3", "--activation", "int8", "--batch", "1,3", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == 26
    for row in rows:
        exact = row["contestant"] in ("gemms", "hand", "hand-attention")
        assert row["us"] > 0 and row.get("difference", 0) < (1e-9 if exact else 0.1)


@pytest.mark.gpu
def test_layers_divided_among_gpus_replay(script, transformers):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs of one host: found {torch.cuda.device_count()}")
    sizes = "--hidden 1024 --intermediate 2048 --heads 8 --kv-heads 2 --layers 2".split()
    result = run(script, "tp", *sizes, "--batch", "1,3", "--context", "40", "--prefill", "100", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == 9
    for row in rows:
        assert row["difference"] < 0.1 and row["us"] > row["compute_us"] > 0 and row["collective_us"] > 1


@pytest.mark.gpu
def test_experts_divided_among_gpus_replay(script):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs of one host: found {torch.cuda.device_count()}")
    sizes = "--experts 16 --top-k 4 --hidden 1024 --intermediate 256 --tokens 1,33".split()
    result = run(script, "ep", *sizes, "--activation", "int8", "--json")
    assert result.exit_code == 0, result.output
    for row in json.loads(result.stdout)["rows"]:
        assert row["difference"] < 0.01 and 1 < row["own_us"] < row["any_us"]


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([*CHECK, "--activation", "int4"], "--activation: expected fp8 or int8, got 'int4'"),
        ([*CHECK, "--format", "gptq"], "--format: expected int-quantized or pack-quantized, got 'gptq'"),
        (
            [*SPEED, "--contestant", "int4"],
            "--contestant: expected one of bf16, fp8, e4m3, int8, e4m3-head8, got 'int4'",
        ),
        ([*SPEED, "--attention", "eager"], "--attention: expected one of sdpa, flex, got 'eager'"),
        ([*SPEED, "--attention", "flex"], "--attention: FlexAttention is for a compiler, expected a --backend"),
        ([*SPEED, "--batch", "1,x"], "--batch: expected positive numbers such as 1,16,64, got '1,x'"),
        ([*SPEED, "--batch", "0"], "--batch: expected positive numbers"),
        ([*SPEED, "--heads", "3"], "--heads: expected an even head size and a multiple of --kv-heads"),
        ([*TP, "--contestant", "fp8"], "--contestant: expected one of bf16, e4m3, int8, e4m3-head8, got 'fp8'"),
        ([*TP, "--ranks", "3"], "--kv-heads: expected a multiple of 3 ranks * 1, got 4"),
        ([*TP, "--group-size", "64"], "--hidden: expected a multiple of 2 ranks * 64, got 64"),
        ([*EP, "--ranks", "3"], "--experts: expected a multiple of 3, got 4"),
        ([*EP, "--top-k", "5"], "--top-k: expected at most the 4 experts, got 5"),
        ([*EP, "--activation", "fp8"], "--activation: expected one of e4m3, int8, got 'fp8'"),
        ([*EP, "--tokens", "0"], "--tokens: expected positive numbers"),
        (
            [*LAYER, "--contestant", "fp8"],
            "--contestant: expected one of gemms, hand, hand-attention, modules, compiled, bf16, floor, got 'fp8'",
        ),
        ([*LAYER, "--activation", "fp8"], "--activation: expected one of e4m3, int8, got 'fp8'"),
        ([*CHECK, "--group-size", "48"], "--hidden: expected a multiple of --group-size 48, got 64"),
    ],
)
def test_wrong_arguments_exit_with_2(script, libraries, arguments, text):
    result = run(script, *arguments)
    assert result.exit_code == 2 and text in result.stderr


def test_a_missing_library_exits_with_2_and_says_what_to_install(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    result = run(script, *CHECK)
    assert result.exit_code == 2
    assert re.search(r"needs .*compressed-tensors: pip install .*compressed-tensors", result.stderr)


def test_help_teaches(script):
    result = run(script, "--help")
    assert result.exit_code == 0
    assert "check" in result.stdout and "speed" in result.stdout
    pages = {"check": ("Logits", "--keep"), "speed": ("one CUDA graph", "--contestant"), "tp": ("waits", "--ranks")}
    pages["layer"] = "hand-attention", "--activation"
    for command, texts in pages.items():
        result = run(script, command, "--help")
        assert result.exit_code == 0
        for text in ("python scripts/end_to_end.py " + command, "Exit codes", *texts):
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
    smaller |= {"model.compile()": "model.compile(backend='aot_eager')"}
    for there, here in smaller.items():
        assert there in code
        code = code.replace(there, here)
    names: dict = {}
    exec(compile(code, "docs/linear.md", "exec"), names)
    assert names["logits"].shape == (1, 16, 96) and bool(names["logits"].isfinite().all())
    plain = [name for name, m in names["model"].named_modules() if type(m) is torch.nn.Linear]
    assert plain == ["lm_head"] and sum(isinstance(m, PackedLinear) for m in names["model"].modules()) == 7
