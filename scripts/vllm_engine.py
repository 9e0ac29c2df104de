"""vLLM's engine with and without jitgemm, on real GPUs: how fast it is, and whether what it says is right.

    python scripts/vllm_engine.py speed MODEL/QUANT... OUT.jsonl    weights of real sizes and no meaning
    python scripts/vllm_engine.py logprobs KIND OUT.jsonl [--tp 2] [--checkpoint ONE]
                                                                    small checkpoints with real weights, all engines

MODEL: llama8b or qwen3-30b. QUANT: bf16, fp8 (per tensor, as vLLM quantises by itself), fp8_per_block, w4a8 (vLLM's
own kernels of a compressed-tensors file), humming; jitgemm (quantised from bf16) with options or without, such as
'jitgemm:{"activation": "int8"}'; jitgemm-w4a8 (the file that w4a8 gets). The plug-in is found from this checkout,
installed or not. Qwen3's experts get uniform routing: with weights of no meaning routers route alike.

MODEL: gpt-oss-120b or v4-flash-moe, DeepSeek-V4-Flash's experts in layers of Qwen3-MoE, whose attention needs no
libraries beside vLLM; their experts in MXFP4, see vllm_made_up.py. QUANT: vllm (the kernels that vLLM picks for the
format), one that its moe_backend names (marlin, triton, triton_unfused), humming (e4m3 activations), humming-a16;
jitgemm, with options or without.

"+sync" behind a QUANT switches vLLM's asynchronous scheduling off, which it has by default.

KIND: dense, moe, moe-mxfp4 or gpt-oss. Its weights are stored in bf16 and as the files that vllm_checkpoints.py lists;
of these, ONE or all are served by vLLM's own kernels and by jitgemm, each compiled and eager.

Each engine is a process of its own; its log lies beside OUT. All start at once, which takes about as long as one. When
all have started they take turns, a size at a time, in --rounds: what slows the host for a while slows all of them. An
engine that has not started within --start-seconds is ended; after --seconds no more is asked, and what was measured by
then is written. An idle engine leaves the GPU alone. OUT has the medians, and each round's figures under "rounds". For
the time that one engine takes to start, give one. With KERNELS=1 in the environment the kernels of a decode step go to
OUT, too, and a layer's one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from vllm_checkpoints import E4M3, FP4_SCHEME, GPT_OSS, KINDS, compressed, small

ROOT = Path(__file__).resolve().parent.parent
MODELS: dict[str, dict[str, Any]] = {
    "llama8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen3-30b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64,
        "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 8192,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 128, "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": True,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    },
    "v4-flash-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096, "head_dim": 128,
        "intermediate_size": 2048, "moe_intermediate_size": 2048, "num_hidden_layers": 43, "num_attention_heads": 32,
        "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 6, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 129280, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128], "modules_to_not_convert": [
        f"model.layers.{i}.{name}" for i in range(43)
        for name in (*(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.gate")
    ],
}  # fmt: skip
"""DeepSeek-V4's: FP8 linears, of which v4-flash-moe has none, next to experts in MXFP4."""
NO_FILE = GPT_OSS | {"modules_to_not_convert": [*GPT_OSS["modules_to_not_convert"], "attn"]}
"""gpt-oss', with what vLLM calls the attention: there are no files whose names say it."""
MXFP4: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gpt-oss-120b": (NO_FILE, {}, NO_FILE),
    "v4-flash-moe": (FP8, {"quantization": "deepseek_v4_fp8"}, FP4_SCHEME),
}
"""Models whose experts are in MXFP4: vLLM's quantization_config and arguments, and jitgemm's config of the same bytes."""
SETS = 3
"""Of experts, which the layers of such a model take in turn."""
SYNC = "+sync"


def engine_of(model: str, quant: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(quantization_config of the model, arguments of the engine)."""
    if quant.endswith(SYNC):
        config, arguments = engine_of(model, quant.removesuffix(SYNC))
        return config, arguments | {"async_scheduling": False}
    name, _, options = quant.partition(":")
    if name == "humming":
        os.environ["VLLM_HUMMING_INPUT_QUANT_CONFIG"] = '{"a_dtype": "float8e4m3"}'
    if model in MXFP4:
        theirs, arguments, ours = MXFP4[model]
        if name == "jitgemm":
            return ours, {"quantization": "jitgemm", "hf_overrides": {"jitgemm": json.loads(options or "{}")}}
        return theirs, arguments | ({} if name == "vllm" else {"moe_backend": name.removesuffix("-a16")})
    if name == "bf16":
        return None, {}
    if name == "jitgemm":
        return {"quant_method": "jitgemm", "group_size": 128, **json.loads(options or "{}")}, {}
    if name == "humming":
        return compressed(None), {"quantization": "humming"}
    if name.endswith("w4a8"):
        return compressed(E4M3), {"quantization": "jitgemm"} if name.startswith("jitgemm") else {}
    return None, {"quantization": name}


PLUG_INS = {"jitgemm": "jitgemm.vllm:register", "vllm_made_up": "vllm_made_up:register"}


def find_plug_ins() -> None:
    """Makes vLLM's processes find the entry points that are not installed, here."""
    from importlib.metadata import entry_points

    there = {each.name for each in entry_points(group="vllm.general_plugins")}
    above = Path(tempfile.mkdtemp())
    for name, place in PLUG_INS.items():
        if name not in there:
            folder = above / f"{name}-0.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
            (folder / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {place}\n")
    paths = [str(above), str(ROOT), str(ROOT / "scripts")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    sys.path[:0] = paths


LITTLE_MEMORY = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 6 << 30}
"""A cache of a size that is told, without a look at the memory, which other engines change as they start."""


def report(out: str, row: dict[str, Any]) -> None:
    sys.path.append(str(ROOT / "scripts"))
    from benchmark_lib.results import environment

    found = environment()
    row |= {"date": time.strftime("%Y-%m-%d"), "device": found["device"], "commit": found["commit"]}
    print("RESULT", json.dumps(row), flush=True)
    with open(out, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


# ---- speed -----------------------------------------------------------------------------------------------------------


def speed(engines: list[str], out: str, rounds: int, steps: int, start_seconds: float, seconds: float) -> None:
    """Starts all engines, then has them measure in turns."""
    start = time.monotonic()
    running: dict[str, subprocess.Popen[str]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for each in engines:
            model, _, quant = each.partition("/")
            log = Path(out).parent / f"{re.sub('[^a-z0-9]+', '-', each.lower()).strip('-')}.log"
            command = [sys.executable, __file__, "engine", model, quant, out]
            command += ["--beside", str(len(engines) - 1), "--steps", str(steps)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            with log.open("w") as file:
                running[each] = subprocess.Popen(command, stderr=file, start_new_session=True, **pipes)
        for each, engine in running.items():
            ready = answer(engine, start + start_seconds - time.monotonic()) == STARTED
            print(f"{each}: {'started' if ready else f'failed, exit code {engine.wait()}'}", flush=True)
        for turn in range(rounds):
            for size in (*DECODED, PREFILL):
                for each, engine in running.items():
                    left = start + seconds - time.monotonic()
                    if engine.poll() is None and left > 0:
                        print(f"round {turn + 1}, {each}: {answer(engine, left + 30, size) or 'failed'}", flush=True)
        for engine in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.communicate(timeout=60)  # vLLM's processes hang at their end now and then
    finally:
        for engine in running.values():
            end(engine)
    if any(engine.wait() for engine in running.values()):
        sys.exit(1)


STARTED = "STARTED"
DECODED = ("1", "16", "64")
PREFILL = "prefill"
"""What a turn measures: a decode step of so many sequences, or prefill."""


def answer(engine: subprocess.Popen[str], seconds: float, asked: str = "") -> str:
    """The next line of an engine, once it was asked; empty where it ended instead, or is ended as it takes longer."""
    assert engine.stdin is not None and engine.stdout is not None
    limit = threading.Timer(max(seconds, 0), end, [engine])
    limit.start()
    try:
        if asked:
            print(asked, file=engine.stdin, flush=True)
        return engine.stdout.readline().strip()
    except BrokenPipeError:
        return ""
    finally:
        limit.cancel()


def end(engine: subprocess.Popen[str]) -> None:
    """Ends an engine's processes, which are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)


def profiled_events(folder: Path) -> list[dict[str, Any]]:
    """Those on the GPU in the later half of the newest profile, as they start."""
    newest = max(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    events = [e for e in json.loads(newest.read_text())["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")]
    events.sort(key=lambda e: e["ts"])
    return [e for e in events if e["ts"] > (events[0]["ts"] + events[-1]["ts"]) / 2]


def layer_chain(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels of a layer from one attention to the next, in the order in which they end: name, µs since the last.

    A kernel that launches dependently starts before the last ends, and waits. Its time is that from end to end; medians
    of all layers with the most frequent sequence of kernels.
    """
    layers: dict[tuple[str, ...], list[list[float]]] = {}
    names: list[str] = []
    times: list[float] = []
    end = 0.0
    for each in sorted(events, key=lambda e: e["ts"] + e["dur"]):
        if "FlashAttnFwdSm90" in each["name"]:
            layers.setdefault(tuple(names), []).append(times)
            names, times = [], []
        names.append(each["name"][:120])
        times.append(each["ts"] + each["dur"] - end)
        end = each["ts"] + each["dur"]
    kind = max(layers, key=lambda kind: len(layers[kind]))
    return [{"name": name, "us": round(median(of), 2)} for name, of in zip(kind, zip(*layers[kind]))]


def kernels(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels, a step each: name, launches, µs; first all together.

    Beside "all" stands how long the GPU is busy and how long a step takes. A kernel that is launched least often is
    launched once a step.
    """
    found: dict[str, list[float]] = {}
    busy = end = 0.0
    for each in events:
        found.setdefault(each["name"], []).append(each["dur"])
        busy += max(0.0, each["ts"] + each["dur"] - max(end, each["ts"]))
        end = max(end, each["ts"] + each["dur"])
    steps = min(len(times) for times in found.values() if len(times) >= 8)
    whole = {"name": "all", "launches": len(events) / steps, "us": sum(map(sum, found.values())) / steps}
    whole |= {"busy_us": busy / steps, "step_us": (end - events[0]["ts"]) / steps}
    rows = [{"name": n[:120], "launches": len(t) / steps, "us": sum(t) / steps} for n, t in found.items()]
    return [whole, *sorted(rows, key=lambda row: -row["us"])]


def engine(model: str, quant: str, out: str, beside: int, steps: int) -> None:
    """Start-up, µs a decode step, prefill tokens/s: for each line that comes in, "1", "16", "64" or "prefill"."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    if model in MXFP4:
        os.environ["VLLM_ENGINE_EXPERTS"] = str(SETS)
    else:
        os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    said, arguments = engine_of(model, quant)
    config = MODELS[model] | ({} if said is None else {"quantization_config": said})
    config["num_hidden_layers"] = int(os.environ.get("LAYERS", config["num_hidden_layers"]))
    memory = LITTLE_MEMORY | ({"kv_cache_memory_bytes": 3 << 30} if model in MXFP4 else {})
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(config))

    from vllm import LLM, SamplingParams

    if profiled := os.environ.get("KERNELS") == "1":
        profile = {"profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": False}
        arguments |= {"profiler_config": profile | {"torch_profiler_use_gzip": False}}
    start = time.time()
    llm = LLM(
        model=folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=4096, **memory,
        enable_prefix_caching=False, max_num_batched_tokens=8192, max_num_seqs=128, disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}, **arguments,
    )  # fmt: skip
    row: dict[str, Any] = {"model": model, "quant": quant, "start_s": round(time.time() - start, 1)}
    row |= {"started_beside": beside, "layers": config["num_hidden_layers"]}
    if model in MXFP4:
        row["sets_of_experts"] = SETS
    print(f"started in {row['start_s']} s", file=sys.stderr)

    def outputs(sequences: int, tokens: int, made: int) -> list[float]:
        """When requests are made, and when the engine hands over each step's outputs."""
        ids = [[3 + (i * 7919 + j * 104729) % 30000 for j in range(tokens)] for i in range(sequences)]
        prompts = [{"prompt_token_ids": each} for each in ids]
        how = SamplingParams(temperature=0, max_tokens=made, ignore_eos=True, detokenize=False)
        times = [time.perf_counter()]
        llm.enqueue(prompts, how, use_tqdm=False)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            times.append(time.perf_counter())
        if not made < len(times) <= made + sequences:
            raise RuntimeError(f"vLLM: expected an output a step, {made} and few more, got {len(times) - 1}")
        return times

    def step_us(sequences: int) -> int:
        # Requests come in one by one, and the first ones leave first: all are there from step to step.
        outputs(sequences, 128, 3)
        first, last = 64, 64 + steps
        times = outputs(sequences, 128, last + 8)
        return round((times[last] - times[first]) / (last - first) * 1e6)

    def prefill() -> int:
        runs = [outputs(8, 2048, 1) for _ in range(3)]
        return round(8 * 2048 / min(times[-1] - times[0] for times in runs))

    outputs(2, 128, 8)
    print(STARTED, file=told, flush=True)
    rounds: dict[str, list[int]] = {}
    for line in sys.stdin:
        size = line.strip()
        name = "prefill_tokens_s" if size == PREFILL else f"step_us_{size}"
        figure = prefill() if size == PREFILL else step_us(int(size))
        rounds.setdefault(name, []).append(figure)
        print(name, figure, file=told, flush=True)
    row |= {name: round(median(figures)) for name, figures in rounds.items()} | {"rounds": rounds}
    for sequences in DECODED if profiled else ():
        llm.start_profile()
        outputs(int(sequences), 128, 33)
        llm.stop_profile()
        events = profiled_events(Path(folder))
        row |= {f"kernels_{sequences}": kernels(events), f"layer_{sequences}": layer_chain(events)}
    report(out, row)


# ---- logprobs --------------------------------------------------------------------------------------------------------


def logprobs(kind: str, out: str, tp: int, checkpoint: str | None) -> None:
    """Each engine's logprobs of the same tokens, next to those of the same weights in bf16."""
    folder = Path(tempfile.mkdtemp())
    chosen = [checkpoint] if checkpoint else list(KINDS[kind])
    small(kind, folder, chosen)
    engines: dict[tuple[str, str], dict[str, Any]] = {("bf16", "bf16"): {}}
    for each in chosen:
        for name, arguments in (("vllm", {}), ("jitgemm", {"quantization": "jitgemm"})):
            engines[each, name] = arguments
            engines[each, f"{name}-eager"] = arguments | {"enforce_eager": True}
    found: dict[tuple[str, str], list[float]] = {}
    running = {}
    for (each, name), arguments in engines.items():
        given = {"model": str(folder / each), "tensor_parallel_size": tp, **arguments}
        command = [sys.executable, __file__, "one", json.dumps(given), str(folder / f"{each}-{name}.json")]
        with Path(out).with_name(f"{kind}-tp{tp}-{each}-{name}.log").open("w") as log:
            running[each, name] = subprocess.Popen(command, stdout=log, stderr=log)
    for (each, name), engine in running.items():
        engine.wait()
        values = folder / f"{each}-{name}.json"
        if values.exists():  # whatever its exit code: vLLM's interpreters abort at their end now and then
            found[each, name] = json.loads(values.read_text())
        else:
            report(out, {"kind": kind, "tp": tp, "checkpoint": each, "engine": name, "failed": engine.returncode})
    for (each, name), values in found.items():
        apart = [abs(a - b) for a, b in zip(values, found["bf16", "bf16"], strict=True)]
        row = {"kind": kind, "tp": tp, "checkpoint": each, "engine": name}
        row |= {"mean_apart": sum(apart) / len(apart), "most_apart": max(apart)}
        compiled = each, name.removesuffix("-eager")
        if compiled != (each, name) and compiled in found:
            row["equal_to_compiled"] = values == found[compiled]
        report(out, row)


def one(arguments: str, out: str) -> None:
    """Logprobs of every token of some prompts, as JSON."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        skip_tokenizer_init=True, max_model_len=1024, **LITTLE_MEMORY | {"kv_cache_memory_bytes": 1 << 30},
        enable_prefix_caching=False, disable_log_stats=True, **json.loads(arguments),
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [3 + (i * 7919 + j * 104729) % 4000 for j in range(64 + 50 * i)]} for i in range(8)]
    how = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    values = []
    for prompt, answer in zip(prompts, llm.generate(prompts, how, use_tqdm=False)):
        ids = prompt["prompt_token_ids"]
        values += [each[ids[i]].logprob for i, each in enumerate(answer.prompt_logprobs) if each is not None]
    part = Path(out).with_suffix(".part")
    part.write_text(json.dumps(values))
    part.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, arguments in (
        ("speed", ("engines", "out")), ("engine", ("model", "quant", "out")),
        ("logprobs", ("kind", "out")), ("one", ("arguments", "out")),
    ):  # fmt: skip
        command = commands.add_parser(name)
        for argument in arguments:
            allowed = list(KINDS) if argument == "kind" else None
            command.add_argument(argument, nargs="+" if argument == "engines" else None, choices=allowed)
        if name in ("speed", "engine"):
            command.add_argument("--steps", type=int, default=512, help="timed, of each number of sequences")
    commands.choices["speed"].add_argument("--rounds", type=int, default=3)
    for option in ("--start-seconds", "--seconds"):
        commands.choices["speed"].add_argument(option, type=float, default=3600)
    commands.choices["engine"].add_argument("--beside", type=int, default=0)
    commands.choices["logprobs"].add_argument("--tp", type=int, default=1)
    commands.choices["logprobs"].add_argument(
        "--checkpoint", choices={name for each in KINDS.values() for name in each}
    )
    given = vars(parser.parse_args())
    find_plug_ins()
    globals()[given.pop("command")](**given)


if __name__ == "__main__":
    main()
