"""scripts/vllm_engine.py and sglang_engine.py: engines take turns, and their figures are those of steps with all sequences
in them; logprobs are compared, and the checkpoints that they are of hold one and the same weights.

vLLM and SGLang are stand-ins, in the scripts' own processes: with a clock of their own, or with logprobs that the test says.
"""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import builders
import pytest
import torch
from safetensors.torch import load_file

import jitgemm
from jitgemm.nn.recipe import Recipe
from jitgemm.serving.experts import CollectedExperts

ROOT = Path(__file__).resolve().parents[2]
import sglang_engine
import vllm_engine
from engine_lib import checkpoints, made_up, turns


@pytest.fixture
def standin(tmp_path, monkeypatch):
    """standin(name, source): a library that the scripts' processes import."""

    def put(name, source):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
        monkeypatch.setattr(turns.signal, "signal", lambda *_: None)  # this process keeps its own

    return put


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


VLLM_CLOCK = '''
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

now = 0.0
time.perf_counter = lambda: now


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        self.max_tokens = max_tokens


class LLM:
    """Takes a request in each of the first steps, at 7 ms more; a decode step takes what the test says, and drifts."""

    def __init__(self, model, quantization="bf16", **arguments):
        self.quant, self.left, self.waiting, self.runs, self.steps = quantization, [], [], {}, 0
        self.llm_engine = self
        self.told = json.loads(os.environ["STEPS"])[quantization]

    def enqueue(self, prompts, how, use_tqdm):
        sequences, tokens = len(prompts), len(prompts[0]["prompt_token_ids"])
        if how.max_tokens > 64 or tokens > 128:
            with open(os.environ["TURNS"], "a") as file:
                print(self.quant, sequences, tokens, file=file)
            self.runs[sequences] = self.runs.get(sequences, 0) + 1
        self.waiting = [how.max_tokens] * sequences
        self.step_s = self.told[min(max(self.runs.get(sequences, 0), 1), len(self.told)) - 1] * 1e-6

    def has_unfinished_requests(self):
        return bool(self.left or self.waiting)

    def step(self):
        global now
        if self.step_s < 0:
            os._exit(3)
        now += self.step_s
        if self.waiting:
            now += 0.007
            self.left.append(self.waiting.pop())
        self.steps += 1
        if self.steps % int(os.environ.get("EVERY", 1)) == 0:
            self.left = [each - 1 for each in self.left if each > 1]
'''


SGLANG_CLOCK = '''
import json
import os
import time
from pathlib import Path

now = 0.0
time.perf_counter = lambda: now


class Engine:
    """Takes a request in each of the first steps, at 7 ms more, and hands tokens over as SGLang does."""

    def __init__(self, model_path, stream_interval, disable_overlap_schedule=False, **arguments):
        config = json.loads(Path(model_path, "config.json").read_text())
        assert arguments["load_format"] == "dummy" and arguments["attention_backend"] == "triton"
        self.every, self.step_s = stream_interval, 2e-3 if disable_overlap_schedule else 1e-3
        assert config["quantization_config"]["quant_method"] == "fp8"

    def generate(self, input_ids, sampling_params, stream):
        global now
        waiting, made, left = list(range(len(input_ids))), {}, sampling_params["max_new_tokens"]
        while waiting or made:
            now += self.step_s
            if waiting:
                now += 0.007
                made[waiting.pop(0)] = 0
            for i in list(made):
                made[i] += 1
                if made[i] % self.every == 1 or made[i] == left:
                    yield {"index": i, "meta_info": {"completion_tokens": made[i]}}
                if made[i] == left:
                    del made[i]

    def shutdown(self):
        Path(os.environ["SHUT_DOWN"]).touch()
'''


@pytest.fixture
def speed(standin, tmp_path, monkeypatch, capsys):
    standin("vllm", VLLM_CLOCK)
    monkeypatch.setenv("TURNS", str(tmp_path / "turns"))

    def run(steps, rounds=3, **more):
        monkeypatch.setenv("STEPS", json.dumps(steps))
        for name, value in more.items():
            monkeypatch.setenv(name, value)
        out = tmp_path / "out.jsonl"
        code = 0
        try:
            given = {"out": str(out), "rounds": rounds, "steps": 512, "start_seconds": 300, "seconds": 300}
            vllm_engine.speed(engines=[f"llama8b/{quant}" for quant in steps], **given)
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().out, {row["quant"]: row for row in rows_of(out)}

    return run


def test_engines_take_turns_and_rows_have_each_rounds_figures_and_medians(speed, tmp_path):
    code, said, rows = speed({"fp8": [1000, 1900, 1100], "fp8_per_block": [2000, 2800, 2200]})
    assert code == 0, said
    sizes = [each for size in (1, 16, 64) for each in (f"fp8 {size} 128", f"fp8_per_block {size} 128")]
    prefill = ["fp8 8 2048"] * 3 + ["fp8_per_block 8 2048"] * 3
    assert (tmp_path / "turns").read_text().splitlines() == 3 * (sizes + prefill)
    for size in (1, 16, 64):  # without what admission takes
        assert rows["fp8"]["rounds"][f"step_us_{size}"] == [1000, 1900, 1100]
        assert rows["fp8"][f"step_us_{size}"] == 1100 and rows["fp8_per_block"][f"step_us_{size}"] == 2200
    row = rows["fp8"]
    # Three runs a round, and the best counts; runs 4 to 9 are at the last rate.
    best = [round(8 * 2048 / (8 * (0.007 + step * 1e-6))) for step in (1000, 1100, 1100)]
    assert row["rounds"]["prefill_tokens_s"] == best and row["prefill_tokens_s"] == best[1]
    assert row["started_beside"] == 1 and {"start_s", "date", "device", "commit", "model"} <= set(row)
    assert "round 3, llama8b/fp8: step_us_64 1100" in said


def test_an_engine_that_dies_leaves_the_others_measured(speed):
    code, said, rows = speed({"fp8": [1000], "fp8_per_block": [1000, -1]}, rounds=2)
    assert code == 1 and list(rows) == ["fp8"]
    assert rows["fp8"]["rounds"]["step_us_1"] == [1000] * 2
    assert "round 1, llama8b/fp8_per_block: failed" in said


def test_an_engine_that_does_not_make_a_token_each_step_gives_no_figure(speed):
    code, said, rows = speed({"fp8": [1000]}, EVERY="2")
    assert code == 1 and not rows and "llama8b/fp8: failed, exit code 1" in said


def test_an_engine_that_does_not_answer_is_ended():
    engine = subprocess.Popen(
        ["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert turns.answer(engine, 0.1, "16") == "" and engine.wait(10) != 0


def test_a_step_is_timed_while_all_sequences_are_in_it(standin, tmp_path, monkeypatch, capsys):
    standin("sglang", SGLANG_CLOCK)
    monkeypatch.setenv("SHUT_DOWN", str(tmp_path / "down"))
    given = {"rounds": 1, "steps": 512, "start_seconds": 300, "seconds": 300, "more": '{"attention_backend": "triton"}'}
    out = tmp_path / "out.jsonl"
    sglang_engine.speed(engines=["llama8b/fp8", "llama8b/fp8+sync"], out=str(out), **given)
    rows = {row["quant"]: row for row in rows_of(out)}
    assert rows["fp8"]["rounds"]["step_us_1"] == [1000] and rows["fp8+sync"]["step_us_1"] == 2000
    assert rows["fp8"]["step_us_16"] == rows["fp8"]["step_us_64"] == 1000  # without what admission takes
    assert rows["fp8"]["prefill_tokens_s"] == round(8 * 2048 / (8 * 0.008))
    assert rows["fp8"]["started_beside"] == 1 and {"start_s", "date", "device", "commit", "model"} <= set(rows["fp8"])
    assert (tmp_path / "down").exists()


# ---- engines, and weights that are made up ---------------------------------------------------------------------------


def test_models_in_mxfp4_have_both_configs_of_the_same_experts():
    for model, (theirs, arguments, ours) in vllm_engine.MXFP4.items():
        assert vllm_engine.engine_of(model, "vllm") == (theirs, arguments)
        marlin = arguments | {"moe_backend": "marlin", "async_scheduling": False}
        assert vllm_engine.engine_of(model, "marlin+sync") == (theirs, marlin)
        config, found = vllm_engine.engine_of(model, 'jitgemm:{"activation": "e4m3_block"}')
        assert config == ours and found["hf_overrides"] == {"jitgemm": {"activation": "e4m3_block"}}


def test_an_engine_of_sglang_s_has_its_config_where_it_or_the_plug_in_reads_it():
    def overrides(arguments):
        assert arguments["quantization"] == "jitgemm"
        return json.loads(arguments["json_model_override_args"])["jitgemm"]

    engine_of, f16 = sglang_engine.engine_of, {"sums": "f16"}
    config, arguments = engine_of("llama8b", 'jitgemm:{"sums": "f16"}')
    assert config == {"quant_method": "jitgemm", "group_size": 128, **f16} and arguments == {}
    config, arguments = engine_of("llama8b", 'jitgemm-w4a8:{"sums": "f16"}')
    assert config["quant_method"] == "compressed-tensors" and overrides(arguments) == f16
    config, arguments = engine_of("gpt-oss-120b", "sglang")
    assert config["quant_method"] == "mxfp4" and arguments == {}
    marlin = {"moe_runner_backend": "marlin", "disable_overlap_schedule": True}
    assert engine_of("gpt-oss-120b", "marlin+sync") == (config, marlin)
    found, arguments = engine_of("gpt-oss-120b", 'jitgemm:{"sums": "f16"}')
    assert found == config and overrides(arguments) == f16
    with pytest.raises(ValueError, match="QUANT: expected bf16, fp8, .* got 'fp9'"):
        engine_of("llama8b", "fp9")


def test_layers_take_experts_in_turn():
    made = made_up.in_turn(lambda **options: options, 2)
    layers = [made(prefix=f"layers.{i}") for i in range(5)]
    assert [layer["prefix"] for layer in layers] == ["layers.0", "layers.1"] * 2 + ["layers.0"]
    assert layers[0] is layers[2]


def test_experts_after_the_first_layer_s_are_copies_in_memory_of_their_own(monkeypatch):
    quantised, random = [], CollectedExperts.random
    monkeypatch.setattr(CollectedExperts, "random", lambda *given: quantised.append(given[1:]) or random(*given))
    made_up.copy_experts()
    stored = SimpleNamespace(floats=True, sources={})
    method = SimpleNamespace(config=None, names=["m"], stored=stored, recipe=Recipe(scheme="int4"))
    for part, widths, k in (("w13", [64, 64], 128), ("w2", [128], 64)):
        collected = CollectedExperts(method, part, 2, widths, k, k, 0, 64)
        first, second = (collected.made_up() for _ in range(2))
        assert torch.equal(first.weight.blocks, second.weight.blocks) and second.weight.ready
        assert first.weight.blocks.data_ptr() != second.weight.blocks.data_ptr()
    assert quantised == [(2, 128, 128), (2, 128, 64)]


def test_made_up_weights_have_random_codes_near_scales_and_wide_routers():
    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    given = {"weight": torch.uint8, "weight_scale": torch.uint8, "scale": torch.float8_e8m0fnu}
    given |= {"weight_packed": torch.int32, "weight_shape": torch.int32, "w13_weight_scale": torch.bfloat16}
    for name, dtype in given.items():
        zeros = torch.zeros(64, 64 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        model.mlp.register_parameter(name, torch.nn.Parameter(zeros, requires_grad=False))
    model.mlp.gate = torch.nn.Linear(64, 64)
    model.mlp.up = torch.nn.Linear(64, 64)
    before = model.mlp.up.weight.clone()
    made_up.fill(model)
    for codes in (model.mlp.weight, model.mlp.weight_packed):
        assert len(codes.view(torch.uint8).unique()) == 256
    assert not model.mlp.weight_shape.any() and model.mlp.w13_weight_scale.min() > 0
    assert 0.9 < model.mlp.gate.weight.std() < 1.1
    for scale in (model.mlp.weight_scale, model.mlp.scale):
        assert scale.view(torch.uint8).unique().tolist() == [118, 119, 120, 121, 122]
    assert torch.equal(model.mlp.up.weight, before)


# ---- logprobs --------------------------------------------------------------------------------------------------------

VLLM_SAYS = """
import atexit
import json
import os
from types import SimpleNamespace


class SamplingParams:
    def __init__(self, temperature, max_tokens, prompt_logprobs, detokenize, logprobs=None, ignore_eos=False):
        self.made = max_tokens * ignore_eos


class LLM:
    def __init__(self, model, quantization="vllm", enforce_eager=False, tensor_parallel_size=1, **arguments):
        config = json.load(open(os.path.join(model, "config.json"))).get("quantization_config", {})
        name = " ".join([config.get("quant_method", "bf16"), *(each for each in ("tp_invariant", "sums") if each in config)])
        self.says = json.loads(os.environ["SAYS"])[f"{name} {quantization}{' eager' * enforce_eager} {tensor_parallel_size}"]
        if quantization == "jitgemm" and name == "gptq":
            atexit.register(os._exit, 134)  # as vLLM's interpreters do now and then, behind their answer

    def generate(self, prompts, how, use_tqdm):
        assert not how.made or os.environ["VLLM_BATCH_INVARIANT"] == "1"
        first, rest, third = self.says
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            value = SimpleNamespace(logprob=first if len(ids) == 64 else rest)
            made = [7, 7, third, *range(3, how.made)]
            said = SimpleNamespace(token_ids=made, logprobs=[{token: value} for token in made])
            yield SimpleNamespace(prompt_logprobs=[None, *({each: value} for each in ids[1:])], outputs=[said])
"""


@pytest.fixture
def says(standin, monkeypatch):
    """Has the stand-in answer {engine: (logprob in the first prompt, in the others, third token that it makes)}."""
    standin("vllm", VLLM_SAYS)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    monkeypatch.setattr(vllm_engine, "small", configs_alone)
    return lambda answers: monkeypatch.setenv("SAYS", json.dumps(answers))


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_all_files_of_a_model_hold_the_values_of_that_in_bf16(tmp_path, kind):
    """As jitgemm reads them, which is tested against the formats' definitions elsewhere."""
    pytest.importorskip("transformers")
    if "gptq" in checkpoints.KINDS[kind]:
        pytest.importorskip("compressed_tensors", minversion="0.17")  # that of vLLM 0.24
    drawn = checkpoints.small(kind, tmp_path, checkpoints.KINDS[kind], layers=1)
    assert len(drawn) == {"dense": 7, "moe": 4 + 3 * 16, "moe-mxfp4": 3 * 16, "gpt-oss": 2}[kind]
    plain = load_file(tmp_path / "bf16" / "model.safetensors")
    for name in checkpoints.KINDS[kind]:
        packed = load_file(tmp_path / name / "model.safetensors")
        for layer in drawn:
            if kind == "gpt-oss":  # whose files have one tensor of all experts
                blocks, scales = packed[f"{layer}_blocks"], packed[f"{layer}_scales"]
                assert len(blocks) == len(scales) == 16 and packed[f"{layer}_bias"].std() > 0.05
                weight, right = jitgemm.pack_mxfp4(blocks[3].flatten(1), scales[3]), plain[layer][3].T
            else:
                weight, right = jitgemm.load(tmp_path / name, layer, device="cpu"), plain[f"{layer}.weight"]
            # 0 * scale is +0 or -0 by the path taken.
            assert builders.same_bits(weight.dequantize().bfloat16() + 0.0, right + 0.0), (name, layer)


def configs_alone(kind, folder, names):
    """What `small` writes, without weights: a stand-in for vLLM reads none."""
    for name in ("bf16", *names):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").touch()
        quantization = {"quantization_config": checkpoints.KINDS[kind][name][1]} if name != "bf16" else {}
        (folder / name / "config.json").write_text(json.dumps(quantization))


def test_each_engine_s_logprobs_stand_next_to_those_in_bf16(tmp_path, says):
    said = {"bf16 vllm": (-2, -3), "gptq vllm": (-2.5, -3.25), "gptq vllm eager": (-2.5, -3)}
    said |= dict.fromkeys(("gptq jitgemm", "gptq jitgemm eager"), (-2, -1))
    said |= {"compressed-tensors vllm": (-2, -3), "compressed-tensors jitgemm": (-2, -4)}
    said["compressed-tensors jitgemm eager"] = (-2, -3)
    says({f"{name} 2": (*values, 7) for name, values in said.items()})
    out = tmp_path / "out.jsonl"
    vllm_engine.logprobs("dense", str(out), 2, None)
    rows = rows_of(out)
    assert all(row["kind"] == "dense" and row["tp"] == 2 and "commit" in row for row in rows)
    found = {f"{row['checkpoint']} {row['engine']}": row for row in rows}
    assert [name for name in found if "failed" in found[name]] == ["compressed-tensors vllm-eager"]
    del found["compressed-tensors vllm-eager"]
    equal = {"gptq vllm-eager": False, "gptq jitgemm-eager": True, "compressed-tensors jitgemm-eager": False}
    assert {name: row["equal_to_compiled"] for name, row in found.items() if "equal_to_compiled" in row} == equal
    first, rest = 63, sum(63 + 50 * i for i in range(1, 8))  # tokens with logprobs in the first prompt, in the others
    assert found.keys() == {name.replace(" eager", "-eager") for name in said} - {"bf16 vllm"} | {"bf16 bf16"}
    for name, values in said.items():
        a, b = (abs(mine - theirs) for mine, theirs in zip(values, said["bf16 vllm"]))
        row = found["bf16 bf16" if name == "bf16 vllm" else name.replace(" eager", "-eager")]
        assert row["most_apart"] == max(a, b)
        assert row["mean_apart"] == pytest.approx((a * first + b * rest) / (first + rest))


def test_numbers_of_gpus_are_compared_by_tokens_and_logprobs(tmp_path, says):
    invariant, plain = "jitgemm tp_invariant vllm", "jitgemm vllm"
    said = {
        f"{name}{mode} {tp}": (-1, -1, 7) for name in (invariant, plain) for mode in ("", " eager") for tp in (1, 2)
    }
    said |= {f"{plain} 2": (-1, -1.5, 8)} | {f"jitgemm sums vllm{mode} 1": (-1, -1, 7) for mode in ("", " eager")}
    says(said)
    out, quants = tmp_path / "out.jsonl", ['jitgemm:{"tp_invariant": true}', "jitgemm", 'jitgemm:{"sums": "exact"}']
    vllm_engine.same(quants, str(out), "dense", [1, 2], ["eager", "compiled"], 60)
    rows = rows_of(out)
    each = [(quant, mode, [1, 2]) for quant in quants for mode in ("eager", "compiled")]
    assert [(row["quant"], row["mode"], row["tp"]) for row in rows] == each
    assert [row.get("failed") for row in rows] == [None] * 4 + [[2]] * 2
    found = [(row["equal_tokens"], row["equal_logprobs"], row["most_apart"]) for row in rows[:4]]
    assert found == 3 * [(True, True, 0)] + [(False, False, 0.5)]
    assert rows[0]["tokens"] == 8 * 24 and rows[0]["logprobs"] == 8 * 24 + sum(63 + 50 * i for i in range(8))


SGLANG_SAYS = """
import json
import os


class Engine:
    def __init__(self, model_path, quantization="sglang", **arguments):
        self.says = json.loads(os.environ["SAYS"])[f"{os.path.basename(model_path)} {quantization}"]

    def generate(self, input_ids, sampling_params, return_logprob, logprob_start_len):
        for ids in input_ids:
            found = [(None, ids[0], None)] + [(self.says[len(ids) > 64], each, None) for each in ids[1:]]
            yield {"meta_info": {"input_token_logprobs": found}}

    def shutdown(self):
        pass
"""


def test_sglang_s_logprobs_are_those_of_its_own_kernels_and_of_jitgemm(standin, tmp_path, monkeypatch):
    standin("sglang", SGLANG_SAYS)
    files = [f"{name} {engine}" for name in checkpoints.KINDS["dense"] for engine in ("sglang", "jitgemm")]
    says = {each: (-2, -3.5) for each in files} | {"bf16 sglang": (-2, -3), "gptq sglang": (-2.25, -3)}
    monkeypatch.setenv("SAYS", json.dumps(says))
    monkeypatch.setattr(sglang_engine, "small", lambda *_: None)
    out = tmp_path / "out.jsonl"
    sglang_engine.logprobs("dense", str(out), "{}")
    rows = {(row["checkpoint"], row["engine"]): row["most_apart"] for row in rows_of(out)}
    ours = {(name, "jitgemm"): 0.5 for name in checkpoints.KINDS["dense"]}
    assert rows == {("bf16", "bf16"): 0, ("gptq", "sglang"): 0.25} | ours
