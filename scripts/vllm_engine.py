"""vLLM's engine with and without jitgemm, on real GPUs: how fast it is, and whether what it says is right.

    python scripts/vllm_engine.py speed MODEL/QUANT... OUT.jsonl    weights of real sizes and no meaning
    python scripts/vllm_engine.py logprobs KIND OUT.jsonl [--tp 2] [--checkpoint ONE]
                                                                    small checkpoints with real weights, all engines
    python scripts/vllm_engine.py same QUANT... OUT.jsonl [--kind moe] [--tps 1 2] [--modes eager compiled]
                                                                    whether a model says the same on any number of GPUs

MODEL: llama8b or qwen3-30b. QUANT: bf16, fp8 (per tensor, as vLLM quantises by itself), fp8_per_block, w4a8 (vLLM's
own kernels of a compressed-tensors file), humming; jitgemm (quantised from bf16) with options or without, such as
'jitgemm:{"activation": "int8"}'; jitgemm-w4a8 (the file that w4a8 gets). The plug-in is found from this checkout,
installed or not. Qwen3's experts get uniform routing: by random weights all tokens would go the same way. vLLM 0.26's
humming has no int4 experts with e4m3 inputs, so humming is for llama8b.

MODEL: gpt-oss-120b or v4-flash-moe, DeepSeek-V4-Flash's experts in layers of Qwen3-MoE, whose attention needs no
libraries next to vLLM; their experts in MXFP4, see engine_lib/made_up.py. QUANT: vllm (the kernels that vLLM picks for
the format), one that its moe_backend names (marlin, triton, triton_unfused), humming (e4m3 activations), humming-a16;
jitgemm, with options or without.

"+sync" behind a QUANT switches vLLM's asynchronous scheduling off, which it has by default.

KIND: dense, moe, moe-mxfp4 or gpt-oss. Its weights are stored in bf16 and as the files that engine_lib/checkpoints.py
lists; of these, ONE or all are served by vLLM's own kernels and by jitgemm, each compiled and eager.

same serves one small model in bf16, a Llama or a mixture whose GPUs have whole experts, by each QUANT, such as
'jitgemm:{"tp_invariant": true}', on each number of GPUs, in each mode, under VLLM_BATCH_INVARIANT=1. It compares greedy
tokens and log probabilities, those of prompts, too.

Each engine is a process of its own; logs are in OUT's folder. All start at once, which takes about as long as one. When
all have started they take turns, a size at a time, in --rounds: what slows the host for a while slows all of them. An
engine that has not started within --start-seconds is ended; after --seconds no more is asked, and what was measured by
then is written. An idle engine leaves the GPU alone. OUT has the medians, and each round's figures under "rounds". For
the time that one engine takes to start, give one. With COPIED_EXPERTS=1 in the environment jitgemm quantises experts in
floats for one layer, and all others get copies, in memory of their own, as a step takes as long with any values: else
Qwen3's 48 layers take minutes. Its row says so.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from engine_lib import logprobs as compared
from engine_lib import turns
from engine_lib.checkpoints import E4M3, FP4_SCHEME, GPT_OSS, KINDS, compressed, small
from engine_lib.made_up import COPIED, VARIABLE
from engine_lib.models import MODELS
from engine_lib.turns import SYNC, report

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
"""Models whose experts are in MXFP4: vLLM's quantization_config and arguments, and jitgemm's config of the same
bytes."""
SETS = 3
"""Of experts, which the layers of such a model take in turn."""


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
        return {"quant_method": "jitgemm", **json.loads(options or "{}")}, {}
    if name == "humming":
        return compressed(None), {"quantization": "humming"}
    if name.endswith("w4a8"):
        return compressed(E4M3), {"quantization": "jitgemm"} if name.startswith("jitgemm") else {}
    return None, {"quantization": name}


PLUG_INS = {"jitgemm": "jitgemm.vllm:register", "made_up": "engine_lib.made_up:register_vllm"}
LITTLE_MEMORY = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 6 << 30}
"""A cache of a size that is told, without a look at the memory, which other engines change as they start."""


# ---- speed -----------------------------------------------------------------------------------------------------------


def engine(model: str, quant: str, out: str, beside: int, steps: int) -> None:
    """Start-up, µs a decode step, prefill tokens/s: for each line that comes in, "1", "16", "64" or "prefill"."""
    told = turns.stdout_to_stderr()
    if model in MXFP4:
        os.environ[VARIABLE] = str(SETS)
    else:
        os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    said, arguments = engine_of(model, quant)
    folder, layers = turns.model_folder(MODELS[model], said)
    memory = LITTLE_MEMORY | ({"kv_cache_memory_bytes": 3 << 30} if model in MXFP4 else {})

    from vllm import LLM, SamplingParams

    start = time.time()
    llm = LLM(
        model=folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=4096, **memory,
        enable_prefix_caching=False, max_num_batched_tokens=8192, max_num_seqs=128, disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}, **arguments,
    )  # fmt: skip
    row: dict[str, Any] = {"model": model, "quant": quant, "start_s": round(time.time() - start, 1)}
    row |= {"started_beside": beside, "layers": layers}
    if model in MXFP4:
        row["sets_of_experts"] = SETS
    if quant.startswith("jitgemm") and COPIED in os.environ:
        row["experts"] = "copies of the first layer's"
    print(f"started in {row['start_s']} s", file=sys.stderr)

    def outputs(sequences: int, tokens: int, made: int) -> list[float]:
        """When requests are made, and when the engine hands over each step's outputs."""
        prompts = [{"prompt_token_ids": each} for each in turns.prompts([tokens] * sequences)]
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
    row |= turns.take_turns(told, step_us, prefill)
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
    given = {name: {"tensor_parallel_size": tp, **arguments} for name, arguments in engines.items()}
    compared.compare(__file__, folder, given, out, {"kind": kind, "tp": tp})


def same(quants: list[str], out: str, kind: str, tps: list[int], modes: list[str], seconds: float) -> None:
    """Whether the first number of GPUs and the others have equal tokens and logprobs."""
    folder = Path(tempfile.mkdtemp())
    small(kind, folder, [])
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    # vLLM's norm as it sums over ranks is another one than on one GPU.
    compiled = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}
    arguments_of: dict[str, Any] = {"eager": {"enforce_eager": True}, "compiled": compiled}
    engines = {}
    for number, quant in enumerate(quants):
        path = folder / str(number)
        path.mkdir()
        config, more = engine_of("small", quant)
        said = json.loads((folder / "bf16" / "config.json").read_text())
        said |= {} if config is None else {"quantization_config": config}
        (path / "config.json").write_text(json.dumps(said))
        (path / "model.safetensors").symlink_to(folder / "bf16" / "model.safetensors")
        for mode, tp in product(modes, tps):
            arguments = {"model": str(path), "tensor_parallel_size": tp, **arguments_of[mode], **more}
            arguments |= {"enable_expert_parallel": True} if kind == "moe" and tp > 1 else {}
            engines[f"{kind}-{number}-{mode}-{tp}"] = arguments
    answers, failed = compared.ask(__file__, engines, out, seconds, "--made", "24")
    for (number, quant), mode in product(enumerate(quants), modes):
        names = {tp: f"{kind}-{number}-{mode}-{tp}" for tp in tps}
        first = answers.get(names[tps[0]])
        for tp in tps[1:]:
            values = answers.get(names[tp])
            row: dict[str, Any] = {"kind": kind, "quant": quant, "mode": mode, "tp": [tps[0], tp]}
            if first is None or values is None:
                report(out, row | {"failed": [tp for tp, name in names.items() if name in failed]})
                continue
            apart = [abs(a - b) for a, b in zip(first["logprobs"], values["logprobs"])]
            report(out, row | {
                "tokens": len(values["tokens"]), "equal_tokens": values["tokens"] == first["tokens"],
                "logprobs": len(apart), "equal_logprobs": values == first, "most_apart": max(apart),
            })  # fmt: skip


def one(arguments: str, out: str, made: int) -> None:
    """Logprobs of every token of some prompts, as JSON; of those that are made, too, and these, where made is not 0."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        skip_tokenizer_init=True, max_model_len=1024, **LITTLE_MEMORY | {"kv_cache_memory_bytes": 1 << 30},
        enable_prefix_caching=False, disable_log_stats=True, **json.loads(arguments),
    )  # fmt: skip
    prompts = [{"prompt_token_ids": each} for each in compared.prompts()]
    how = SamplingParams(
        temperature=0, max_tokens=max(made, 1), prompt_logprobs=0, detokenize=False,
        **{"logprobs": 0, "ignore_eos": True} if made else {},
    )  # fmt: skip
    values: list[float] = []
    tokens: list[int] = []
    for prompt, answer in zip(prompts, llm.generate(prompts, how, use_tqdm=False)):
        ids = prompt["prompt_token_ids"]
        values += [each[ids[i]].logprob for i, each in enumerate(answer.prompt_logprobs) if each is not None]
        if made:
            [said] = answer.outputs
            tokens += said.token_ids
            values += [each[token].logprob for each, token in zip(said.logprobs, said.token_ids, strict=True)]
    compared.write(out, {"tokens": tokens, "logprobs": values} if made else values)


def speed(**given: Any) -> None:
    turns.speed(__file__, **given)


def main() -> None:
    parser, commands = turns.command_line(__doc__, KINDS, ("same", ("quants", "out")))
    commands["logprobs"].add_argument("--tp", type=int, default=1)
    commands["logprobs"].add_argument("--checkpoint", choices={name for each in KINDS.values() for name in each})
    commands["one"].add_argument("--made", type=int, default=0, help="tokens of each prompt")
    commands["same"].add_argument("--kind", default="dense", choices=["dense", "moe"])
    commands["same"].add_argument("--tps", type=int, nargs="+", default=[1, 2])
    commands["same"].add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    commands["same"].add_argument("--seconds", type=float, default=600)
    given = vars(parser.parse_args())
    turns.find_plug_ins("vllm.general_plugins", PLUG_INS)
    globals()[given.pop("command")](**given)


if __name__ == "__main__":
    main()
