"""scripts/sglang_engine.py: its figures are those of a stretch with all sequences in it, and its logprobs those of each
file's own kernels and of jitgemm.

SGLang is a stand-in, in the script's own processes: with a clock of its own, or with logprobs that the test says. How
engines take turns, and what the files hold: test_vllm_engine.py.
"""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import sglang_engine
from engine_lib import checkpoints, turns

STANDIN = '''
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
SAYS = """
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


@pytest.fixture
def standin(tmp_path, monkeypatch):
    def put(source):
        (tmp_path / "sglang").mkdir()
        (tmp_path / "sglang" / "__init__.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
        monkeypatch.setattr(turns.signal, "signal", lambda *_: None)  # this process keeps its own

    return put


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_timed_while_all_sequences_are_in_it(standin, tmp_path, monkeypatch, capsys):
    standin(STANDIN)
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


def test_an_unknown_engine_is_an_error():
    with pytest.raises(ValueError, match="QUANT: expected bf16, fp8, .* got 'fp9'"):
        sglang_engine.engine_of("llama8b", "fp9")


def test_options_of_jitgemm_go_where_the_plug_in_reads_them():
    config, arguments = sglang_engine.engine_of("llama8b", 'jitgemm:{"sums": "f16"}')
    assert config == {"quant_method": "jitgemm", "group_size": 128, "sums": "f16"} and arguments == {}
    config, arguments = sglang_engine.engine_of("llama8b", 'jitgemm-w4a8:{"sums": "f16"}')
    assert config["quant_method"] == "compressed-tensors"
    assert json.loads(arguments["json_model_override_args"]) == {"jitgemm": {"sums": "f16"}}


def test_a_model_in_mxfp4_is_served_by_a_runner_of_sglang_s_or_by_jitgemm():
    config, arguments = sglang_engine.engine_of("gpt-oss-120b", "sglang")
    assert config["quant_method"] == "mxfp4" and arguments == {}
    assert sglang_engine.engine_of("gpt-oss-120b", "marlin+sync") == (
        config, {"moe_runner_backend": "marlin", "disable_overlap_schedule": True}
    )  # fmt: skip
    found, arguments = sglang_engine.engine_of("gpt-oss-120b", 'jitgemm:{"activation": "int8"}')
    assert found == config and arguments["quantization"] == "jitgemm"
    assert json.loads(arguments["json_model_override_args"]) == {"jitgemm": {"activation": "int8"}}


def test_each_engine_s_logprobs_stand_next_to_those_in_bf16(standin, tmp_path, monkeypatch):
    standin(SAYS)
    files = [f"{name} {engine}" for name in checkpoints.KINDS["dense"] for engine in ("sglang", "jitgemm")]
    says = {each: (-2, -3.5) for each in files} | {"bf16 sglang": (-2, -3), "gptq sglang": (-2.25, -3)}
    monkeypatch.setenv("SAYS", json.dumps(says))
    monkeypatch.setattr(sglang_engine, "small", lambda *_: None)
    out = tmp_path / "out.jsonl"
    sglang_engine.logprobs("dense", str(out), "{}")
    rows = {(row["checkpoint"], row["engine"]): row["most_apart"] for row in rows_of(out)}
    jitgemm = {(name, "jitgemm"): 0.5 for name in checkpoints.KINDS["dense"]}
    assert rows == {("bf16", "bf16"): 0, ("gptq", "sglang"): 0.25} | jitgemm
