"""scripts/vllm_engine.py: engines take turns, and their figures are those of steps with all sequences in them.

vLLM is a stand-in with a clock of its own, in the scripts' own processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STANDIN = '''
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


@pytest.fixture
def speed(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(STANDIN)
    monkeypatch.setenv("TURNS", str(tmp_path / "turns"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))

    def run(steps, **more):
        environment = os.environ | {"STEPS": json.dumps(steps)} | more
        engines = [f"llama8b/{quant}" for quant in steps]
        command = [sys.executable, ROOT / "scripts" / "vllm_engine.py", "speed", *engines, tmp_path / "out.jsonl"]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)
        out = tmp_path / "out.jsonl"
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return done, {row["quant"]: row for row in rows}

    return run


def test_engines_take_turns_and_rows_have_each_rounds_figures_and_medians(speed, tmp_path):
    done, rows = speed({"fp8": [1000, 1900, 1100], "fp8_per_block": [2000, 2800, 2200]})
    assert done.returncode == 0, done.stderr
    sizes = [each for size in (1, 16, 64) for each in (f"fp8 {size} 128", f"fp8_per_block {size} 128")]
    prefill = ["fp8 8 2048"] * 3 + ["fp8_per_block 8 2048"] * 3
    assert (tmp_path / "turns").read_text().splitlines() == 3 * (sizes + prefill)
    for size in (1, 16, 64):  # without what admission takes
        assert rows["fp8"]["rounds"][f"step_us_{size}"] == [1000, 1900, 1100]
        assert rows["fp8"][f"step_us_{size}"] == 1100 and rows["fp8_per_block"][f"step_us_{size}"] == 2200
    row = rows["fp8"]
    # Three runs a round, the best of which counts; runs 4 to 9 are at the last rate.
    best = [round(8 * 2048 / (8 * (0.007 + step * 1e-6))) for step in (1000, 1100, 1100)]
    assert row["rounds"]["prefill_tokens_s"] == best and row["prefill_tokens_s"] == best[1]
    assert row["started_beside"] == 1 and {"start_s", "date", "device", "commit", "model"} <= set(row)
    assert "round 3, llama8b/fp8: step_us_64 1100" in done.stdout


def test_an_engine_that_dies_leaves_the_others_measured(speed):
    done, rows = speed({"fp8": [1000], "fp8_per_block": [1000, -1]})
    assert done.returncode == 1 and list(rows) == ["fp8"]
    assert rows["fp8"]["rounds"]["step_us_1"] == [1000] * 3
    assert "round 1, llama8b/fp8_per_block: failed" in done.stdout


def test_an_engine_that_does_not_make_a_token_each_step_gives_no_figure(speed):
    done, rows = speed({"fp8": [1000]}, EVERY="2")
    assert done.returncode == 1 and not rows and "llama8b/fp8: failed, exit code 1" in done.stdout
