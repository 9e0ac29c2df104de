"""SGLang's engine with and without jitgemm, on a real GPU: how fast it is, and whether what it says is right.

    python scripts/sglang_engine.py speed MODEL/QUANT... OUT.jsonl    weights of real sizes and no meaning
    python scripts/sglang_engine.py logprobs KIND OUT.jsonl           small checkpoints with real weights, all engines

MODEL: llama8b or qwen3-30b, whose experts get uniform routing. QUANT: bf16; fp8 (a file with a scale per weight, from
which SGLang makes one per row); w4a8 (a compressed-tensors file in 4 bits with e4m3 activations of experts, by SGLang's
CUTLASS kernels; its linears in bf16, as SGLang has no kernel for them, so for qwen3-30b alone); jitgemm (quantised from
bf16) with options or without, such as 'jitgemm:{"activation": "int8"}'; jitgemm-w4a8 (a file of 4 bits with e4m3
activations of all layers). "+sync" behind a QUANT switches SGLang's overlapped scheduling off. SGLang's own humming
needs a package that SGLang does not install, and its w4afp8 needs FP8 linears in blocks by DeepGEMM.

MODEL: gpt-oss-120b, its experts in MXFP4, see engine_lib/made_up.py. QUANT: sglang (the kernels that SGLang picks), one
that its moe_runner_backend names (marlin, triton_kernel); jitgemm, with options or without.

KIND: dense, moe or gpt-oss. Weights are stored in bf16 and as the files that engine_lib/checkpoints.py lists. Each file
is served by jitgemm, and by SGLang's own kernels where it has some.

The plug-in is found from this checkout, installed or not. --more takes more arguments of `sglang.Engine` as JSON, for
all engines. How engines start and take turns: `vllm_engine.py --help`. A step is timed over a stretch in which all
sequences are in it, by when an engine's process hands over its first token and its last.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from engine_lib import logprobs as compared
from engine_lib import turns
from engine_lib.checkpoints import E4M3, GPT_OSS, KINDS, compressed, small
from engine_lib.made_up import VARIABLE
from engine_lib.models import MODELS
from engine_lib.turns import SYNC, report

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PLUG_INS = {"jitgemm": "jitgemm.sglang:register", "made_up": "engine_lib.made_up:register_sglang"}
OWN = {"dense": ("gptq",), "moe": ("gptq", "compressed-tensors"), "gpt-oss": ("mxfp4",)}
"""Files of a kind that SGLang's own kernels serve."""
MXFP4 = ("gpt-oss-120b",)
"""Models whose experts are in MXFP4."""
SETS = 3
"""Of experts, which the layers of such a model take in turn."""
EVERY = 32
"""Tokens of a sequence that SGLang hands over at a time."""
SAME = {
    "skip_tokenizer_init": True, "grammar_backend": "none", "disable_radix_cache": True, "dtype": "bfloat16",
    "mem_fraction_static": 0.9, "log_level": "info",
}  # fmt: skip
"""Of all engines. A cache's size is told: other engines change how much memory is free as they start."""


def engine_of(model: str, quant: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(quantization_config of the model, arguments of the engine)."""
    if quant.endswith(SYNC):
        config, arguments = engine_of(model, quant.removesuffix(SYNC))
        return config, arguments | {"disable_overlap_schedule": True}
    name, _, options = quant.partition(":")
    given = json.loads(options or "{}")
    ours = {"quantization": "jitgemm", "json_model_override_args": json.dumps({"jitgemm": given})}
    if model in MXFP4:
        own = {} if name == "sglang" else {"moe_runner_backend": name}
        return GPT_OSS, ours if name == "jitgemm" else own
    if name == "bf16":
        return None, {}
    if name == "jitgemm":
        return {"quant_method": "jitgemm", "group_size": 128, **given}, {}
    if name == "jitgemm-w4a8":
        return compressed(E4M3), ours
    if name == "fp8":
        return FP8, {}
    if name == "w4a8":
        config = compressed(E4M3)
        return config | {"ignore": [*config["ignore"], "re:.*self_attn.*"]}, {}
    raise ValueError(f"QUANT: expected bf16, fp8, w4a8, jitgemm or jitgemm-w4a8, got {name!r}")


# ---- speed -----------------------------------------------------------------------------------------------------------


def engine(model: str, quant: str, out: str, beside: int, steps: int, more: str) -> None:
    """Start-up, µs a decode step, prefill tokens/s: for each line that comes in, "1", "16", "64" or "prefill"."""
    told = turns.stdout_to_stderr()
    if model in MXFP4:  # whose routers spread tokens evenly
        os.environ[VARIABLE] = str(SETS)
    else:
        os.environ.setdefault("SGLANG_SIMULATE_UNIFORM_EXPERTS", "1")
    said, arguments = engine_of(model, quant)
    folder, layers = turns.model_folder(MODELS[model], said)
    start = time.time()
    llm = start_engine(
        folder, load_format="dummy", context_length=4096, chunked_prefill_size=8192, max_prefill_tokens=8192,
        max_running_requests=64, max_total_tokens=49152, cuda_graph_bs_decode=[1, 2, 4, 8, 16, 32, 64],
        stream_interval=EVERY, **arguments | json.loads(more),
    )  # fmt: skip
    row: dict[str, Any] = {"model": model, "quant": quant, "start_s": round(time.time() - start, 1)}
    row |= {"started_beside": beside, "layers": layers} | ({"sets_of_experts": SETS} if model in MXFP4 else {})
    print(f"started in {row['start_s']} s", file=sys.stderr)

    def outputs(sequences: int, tokens: int, made: int) -> list[dict[int, float]]:
        """When each sequence was handed over so many tokens; at 0 all requests are made."""
        begin = time.perf_counter()
        times: list[dict[int, float]] = [{0: begin} for _ in range(sequences)]
        how = {"temperature": 0, "max_new_tokens": made, "ignore_eos": True}
        for each in llm.generate(input_ids=turns.prompts([tokens] * sequences), sampling_params=how, stream=True):
            times[each.get("index", 0)].setdefault(each["meta_info"]["completion_tokens"], time.perf_counter())
        if any(max(each) != made for each in times):
            raise RuntimeError(f"SGLang: expected {made} tokens of each sequence, got {[max(each) for each in times]}")
        return times

    def step_us(sequences: int) -> int:
        # Requests come in one by one, and the first ones leave first: all are there from step to step.
        outputs(sequences, 128, 3)
        first, last = EVERY + 1, EVERY + 1 + steps // EVERY * EVERY
        found = []
        for times in outputs(sequences, 128, last + EVERY):
            a, *_, b = sorted(tokens for tokens in times if first <= tokens <= last)
            found.append((times[b] - times[a]) / (b - a))
        return round(median(found) * 1e6)

    def prefill() -> int:
        runs = [outputs(8, 2048, 1) for _ in range(3)]
        return round(8 * 2048 / min(max(of[1] - of[0] for of in times) for times in runs))

    outputs(2, 128, 8)
    row |= turns.take_turns(told, step_us, prefill)
    report(out, row)
    llm.shutdown()


def start_engine(folder: str, **arguments: Any) -> Any:
    import sglang

    return sglang.Engine(model_path=folder, port=20000 + os.getpid() % 4000 * 10, **SAME | arguments)


# ---- logprobs --------------------------------------------------------------------------------------------------------


def logprobs(kind: str, out: str, more: str) -> None:
    """Each engine's logprobs of the same tokens, next to those of the same weights in bf16."""
    folder = Path(tempfile.mkdtemp())
    small(kind, folder, KINDS[kind])
    engines: dict[tuple[str, str], dict[str, Any]] = {("bf16", "bf16"): {}}
    engines |= {(each, "sglang"): {} for each in OWN[kind]}
    engines |= {(each, "jitgemm"): {"quantization": "jitgemm"} for each in KINDS[kind]}
    given = {name: json.loads(more) | arguments for name, arguments in engines.items()}
    compared.compare(__file__, folder, given, out, {"kind": kind})


def one(arguments: str, out: str) -> None:
    """Logprobs of every token of some prompts, as JSON."""
    given = json.loads(arguments)
    llm = start_engine(
        given.pop("model"), context_length=1024, max_total_tokens=16384, max_running_requests=16,
        cuda_graph_bs_decode=[1, 8], **given,
    )  # fmt: skip
    answers = llm.generate(
        input_ids=compared.prompts(), sampling_params={"temperature": 0, "max_new_tokens": 1}, return_logprob=True,
        logprob_start_len=0,
    )  # fmt: skip
    found = [each["meta_info"]["input_token_logprobs"] for each in answers]
    compared.write(out, [logprob for each in found for logprob, *_ in each if logprob is not None])
    llm.shutdown()


def speed(more: str, **given: Any) -> None:
    turns.speed(__file__, **given, more=("--more", more))


def main() -> None:
    parser, commands = turns.command_line(__doc__, OWN)
    for name in ("speed", "engine", "logprobs"):
        commands[name].add_argument("--more", default="{}", metavar="JSON")
    given = vars(parser.parse_args())
    turns.find_plug_ins("sglang.srt.plugins", PLUG_INS)
    globals()[given.pop("command")](**given)


if __name__ == "__main__":
    main()
