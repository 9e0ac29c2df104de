"""vLLM's engine with and without jitgemm, on real GPUs: how fast it is, and whether what it says is right.

    python scripts/vllm_engine.py speed MODEL/QUANT... OUT.jsonl    weights of real sizes and no meaning
    python scripts/vllm_engine.py logprobs KIND OUT.jsonl [--tp 2] [--checkpoint ONE]
                                                                    small checkpoints with real weights, all engines

MODEL: llama8b or qwen3-30b. QUANT: bf16, fp8 (per tensor, as vLLM quantises by itself), fp8_per_block, w4a8 (vLLM's
own kernels of a compressed-tensors file), humming; jitgemm (quantised from bf16) with options or without, such as
'jitgemm:{"activation": "int8"}'; jitgemm-w4a8 (the file that w4a8 gets). The plug-in is found from this checkout,
installed or not. Experts get uniform routing: with weights of no meaning routers route alike.

KIND: dense or moe. Its weights are stored as bf16, compressed-tensors and gptq; of the latter two, ONE or both are
served by vLLM's own kernels and by jitgemm, each compiled and eager.

Each engine is a process of its own; its log lies beside OUT. All start at once, which takes about as long as one. When
all have started they take turns, a size at a time, in three rounds: what slows the host for a while slows all of them.
An idle engine leaves the GPU alone. OUT has the medians, and each round's figures under "rounds". For the time that
one engine takes to start, give one. With KERNELS=1 in the environment the kernels of a decode step go to OUT, too, and
a layer's one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

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
}  # fmt: skip
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(inputs: dict[str, Any] | None, group: int = 128) -> dict[str, Any]:
    """A compressed-tensors config of 4 bits in groups."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": scheme}, "ignore": ["lm_head", "re:.*mlp.gate$"],
    }  # fmt: skip


def engine_of(quant: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(quantization_config of the model, arguments of the engine)."""
    if quant == "bf16":
        return None, {}
    if quant.startswith("jitgemm") and quant != "jitgemm-w4a8":
        options = quant.partition(":")[2]
        return {"quant_method": "jitgemm", "group_size": 128, **json.loads(options or "{}")}, {}
    if quant == "humming":
        os.environ["VLLM_HUMMING_INPUT_QUANT_CONFIG"] = '{"a_dtype": "float8e4m3"}'
        return compressed(None), {"quantization": "humming"}
    if quant.endswith("w4a8"):
        return compressed(E4M3), {"quantization": "jitgemm"} if quant.startswith("jitgemm") else {}
    return None, {"quantization": quant}


def find_plug_in() -> None:
    """Makes vLLM's processes find the entry point, where the package is not installed but lies here."""
    from importlib.metadata import entry_points

    if "jitgemm" in {each.name for each in entry_points(group="vllm.general_plugins")}:
        return
    folder = Path(tempfile.mkdtemp()) / "jitgemm-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: jitgemm\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\njitgemm = jitgemm.vllm:register\n")
    paths = [str(folder.parent), str(ROOT)]
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


def speed(engines: list[str], out: str) -> None:
    """Starts all engines, then has them measure in turns."""
    running = {}
    for each in engines:
        model, _, quant = each.partition("/")
        log = Path(out).parent / f"{re.sub('[^a-z0-9]+', '-', each.lower()).strip('-')}.log"
        with log.open("w") as file:
            command = [sys.executable, __file__, "engine", model, quant, out, "--beside", str(len(engines) - 1)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            running[each] = subprocess.Popen(command, stderr=file, **pipes)
    for each, engine in running.items():
        ready = answer(engine) == STARTED
        print(f"{each}: {'started' if ready else f'failed, exit code {engine.wait()}'}", flush=True)
    for turn in range(ROUNDS):
        for size in (*DECODED, PREFILL):
            for each, engine in running.items():
                if engine.poll() is None:
                    print(f"round {turn + 1}, {each}: {answer(engine, size) or 'failed'}", flush=True)
    for engine in running.values():
        engine.communicate()
    if any(engine.returncode for engine in running.values()):
        sys.exit(1)


STARTED = "STARTED"
ROUNDS = 3
DECODED = ("1", "16", "64")
PREFILL = "prefill"
"""What a turn measures: a decode step of so many sequences, or prefill."""


def answer(engine: subprocess.Popen[str], asked: str = "") -> str:
    """The next line of an engine, once it was asked; empty where it ended instead."""
    assert engine.stdin is not None and engine.stdout is not None
    try:
        if asked:
            print(asked, file=engine.stdin, flush=True)
        return engine.stdout.readline().strip()
    except BrokenPipeError:
        return ""


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


def engine(model: str, quant: str, out: str, beside: int) -> None:
    """Start-up, µs a decode step, prefill tokens/s: for each line that comes in, "1", "16", "64" or "prefill"."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    said, arguments = engine_of(quant)
    config = MODELS[model] | ({} if said is None else {"quantization_config": said})
    config["num_hidden_layers"] = int(os.environ.get("LAYERS", config["num_hidden_layers"]))
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(config))

    from vllm import LLM, SamplingParams

    if profiled := os.environ.get("KERNELS") == "1":
        profile = {"profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": False}
        arguments |= {"profiler_config": profile | {"torch_profiler_use_gzip": False}}
    start = time.time()
    llm = LLM(
        model=folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=4096, **LITTLE_MEMORY,
        enable_prefix_caching=False, max_num_batched_tokens=8192, max_num_seqs=128, disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}, **arguments,
    )  # fmt: skip
    row: dict[str, Any] = {"model": model, "quant": quant, "start_s": round(time.time() - start, 1)}
    row["started_beside"] = beside
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
        first, last = 64, 576
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


GROUP = 128
SCHEME = compressed(E4M3, GROUP)


def by_compressed_tensors(q: Any, scale: Any) -> dict[str, Any]:
    """A layer's tensors, packed by the library itself; it rounds the dequantised weight to the same codes again."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(SCHEME["config_groups"]["group_0"])
    tensors = {"weight": dequantised(q, scale), "weight_scale": scale}
    return PackedQuantizationCompressor.compress(tensors, scheme)


def by_gptq(q: Any, scale: Any) -> dict[str, Any]:
    """A layer's tensors by GPTQ's definition, with its zero points of 8 stored less one."""
    import torch

    def words(codes: Any) -> Any:
        places = torch.arange(0, 32, 4)[:, None]
        return (codes.long().unflatten(0, (-1, 8)) << places).sum(1).int()  # int32 wraps

    n, k = q.shape
    return {
        "qweight": words(q.T + 8),
        "qzeros": words(torch.full((n, k // GROUP), 8 - 1)).T,
        "scales": scale.T,
        "g_idx": torch.arange(k, dtype=torch.int32) // GROUP,
    }


def dequantised(q: Any, scale: Any) -> Any:
    return (q.float() * scale.float().repeat_interleave(GROUP, 1)).bfloat16()


GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "checkpoint_format": "gptq",
}  # fmt: skip
CHECKPOINTS = {"compressed-tensors": (by_compressed_tensors, SCHEME), "gptq": (by_gptq, GPTQ)}
"""What packs a layer's codes and scales, none of it jitgemm's code, and the model's quantization_config."""


def small(kind: str, folder: Path, names: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """One small random model, its linears in 4 bits, as these checkpoints and in bf16: {layer: (codes, scales)}."""
    import torch
    import transformers
    from safetensors.torch import save_file

    sizes = {
        "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 1024,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "moe":
        more = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
        config: Any = transformers.Qwen3MoeConfig(**sizes, **more)
    else:
        config = transformers.LlamaConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    drawn, others = {}, {}
    for name, tensor in one_by_one(model.state_dict()):
        if "_proj" not in name:
            others[name] = tensor.clone()
            continue
        groups = tensor.float().unflatten(1, (-1, GROUP))
        scale = (groups.abs().amax(2) / 7).bfloat16()
        q = (groups / scale[..., None].float()).round().clamp(-8, 7).flatten(1).to(torch.int8)
        drawn[name.removesuffix(".weight")] = q, scale
    plain = (lambda q, scale: {"weight": dequantised(q, scale)}, None)
    for checkpoint, (pack, quantization) in ({"bf16": plain} | {name: CHECKPOINTS[name] for name in names}).items():
        tensors = dict(others)
        for layer, parts in drawn.items():
            tensors |= {f"{layer}.{name}": tensor.contiguous() for name, tensor in pack(*parts).items()}
        path = folder / checkpoint
        path.mkdir()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        if quantization is not None:
            config.quantization_config = quantization
        config.save_pretrained(path)
    return drawn


def one_by_one(tensors: dict[str, Any]) -> Any:
    """A state dict with each expert's projections under names of their own, as checkpoints have them."""
    for name, tensor in tensors.items():
        above, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for e, expert in enumerate(tensor):
            if last == "down_proj":
                yield f"{above}.{e}.down_proj.weight", expert
            else:
                yield from zip((f"{above}.{e}.{part}_proj.weight" for part in ("gate", "up")), expert.chunk(2))


def logprobs(kind: str, out: str, tp: int, checkpoint: str | None) -> None:
    """Each engine's logprobs of the same tokens, next to those of the same weights in bf16."""
    folder = Path(tempfile.mkdtemp())
    chosen = [checkpoint] if checkpoint else list(CHECKPOINTS)
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
            allowed = ("dense", "moe") if argument == "kind" else None
            command.add_argument(argument, nargs="+" if argument == "engines" else None, choices=allowed)
    commands.choices["engine"].add_argument("--beside", type=int, default=0)
    commands.choices["logprobs"].add_argument("--tp", type=int, default=1)
    commands.choices["logprobs"].add_argument("--checkpoint", choices=CHECKPOINTS)
    given = vars(parser.parse_args())
    find_plug_in()
    globals()[given.pop("command")](**given)


if __name__ == "__main__":
    main()
