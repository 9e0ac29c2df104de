"""`jitgemm quantize`: a Hugging Face folder in floats as a checkpoint with 4-bit weights."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import Counter
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import jitgemm
from jitgemm.cli import common

if TYPE_CHECKING:
    import torch

    from jitgemm.nn.save.model_folder import ModelFolder

AUTO_KEEP_8BIT = 0.005
"""--keep-8bit AUTO: layers that lose more than this part of their result's energy (23 dB) get 8 bits."""
Activation = Enum("Activation", {"e4m3": "e4m3", "int8": "int8"}, type=str)
Scheme = Enum("Scheme", {"int4": "int4", "mxfp4": "mxfp4", "two-level": "two-level"}, type=str)
SHOWN = 10
"""Layers in the table."""

_DATA = 'UTF-8 text, or .jsonl with "text" in each line, to calibrate; or none. Default: Python\'s help topics.'
_TOKENS = "Tokens that calibrate, in windows of 256."
_SCHEME = "int4, in groups; mxfp4 (e4m3 only); two-level (int8 only; unrotated: QServe's). Default: two-level, rotated."
_ACTIVATION = "Inputs, per token: e4m3 or int8. Default: int8; e4m3 with another scheme, or bits."
_BITS = "Of weights: 4, or 8 with a scale per row. Default: 4."
_GROUP = "Of int4: columns that share a scale. Default: 128, or 32 and zero points without calibration."
_ROTATION = "128: a Hadamard matrix along weights and inputs, which spreads outliers. Default with no scheme."
_KEEP = f"Layers with a larger relative squared error get 8 bits. AUTO: {AUTO_KEEP_8BIT}. Default: none."
_RESTART = "Drop what an interrupted run left in OUT, instead of going on."
_ON = "Where the model runs. Default: the Hopper GPU at hand, else cpu, which takes long."

_option = partial(typer.Option, show_default=False)


@common.guarded
def quantize(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The model: config.json and safetensors in floats.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new folder.")],
    data: Annotated[str | None, _option("--data", metavar="FILE|none", help=_DATA)] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=256, metavar="N", help=_TOKENS)] = 16384,
    activation: Annotated[Activation | None, _option("--activation", metavar="TYPE", help=_ACTIVATION)] = None,
    scheme: Annotated[Scheme | None, _option("--scheme", metavar="SCHEME", help=_SCHEME)] = None,
    bits: Annotated[int, _option("--bits", metavar="4|8", help=_BITS)] = 4,
    group_size: Annotated[int | None, _option("--group-size", metavar="128|64|32", help=_GROUP)] = None,
    zero_point: Annotated[bool, typer.Option("--zero-point", help="Codes 0..15 with integer zero points.")] = False,
    rotation: Annotated[int | None, _option("--rotation", metavar="128", help=_ROTATION)] = None,
    keep_8bit: Annotated[str | None, _option("--keep-8bit", metavar="AUTO|NUMBER", help=_KEEP)] = None,
    device: Annotated[str | None, _option("--device", metavar="cuda|cpu", help=_ON)] = None,
    restart: Annotated[bool, typer.Option("--restart", help=_RESTART)] = False,
    as_json: common.Json = False,
) -> None:
    """Quantise a model's Linears and experts to 4 bits, and write a checkpoint that jitgemm's vLLM, SGLang and nn load.

    By default in two levels, rotated; --scheme int4 is for other readers. Weights are fitted (GPTQ) to inputs that a
    text gives. After Ctrl-C or a full disk the same command goes on.

    \b
    Examples:
      jitgemm quantize Llama-3.1-8B-Instruct Llama-3.1-8B-W4A8
      jitgemm quantize Qwen3-30B-A3B Qwen3-W4A8 --data chats.jsonl --tokens 65536
      jitgemm quantize gemma-3-1b-it gemma-W4A8 --keep-8bit AUTO
      jitgemm quantize Qwen2.5-7B Qwen-g128 --scheme int4
      jitgemm quantize gpt-oss-20b-BF16 gpt-oss-MXFP4 --scheme mxfp4
      jitgemm quantize Llama-3-8B Llama-3-8B-QServe --scheme two-level

    \b
    Then one of:
      vllm serve OUT --quantization jitgemm
      AutoModelForCausalLM.from_pretrained("OUT", config=jitgemm.hf.config("OUT"))

    \b
    Exit codes:
      0    OUT is complete
      2    wrong arguments, or a model that cannot be quantised
      3    failed: a file is missing, or could not be written or read back
      130  interrupted; what is done is kept
    """
    from jitgemm.nn.quantize.folder import GROUPS, quantize_folder  # with torch, as all that follows

    if group_size not in (None, *GROUPS):
        raise ValueError(f"--group-size: expected one of {', '.join(map(str, GROUPS))}, got {group_size}")
    said = {
        "bits": bits, "scheme": None if scheme is None else scheme.value, "group_size": group_size,
        "activation": None if activation is None else activation.value, "symmetric": False if zero_point else None,
        "rotation": rotation,
    }  # fmt: skip
    recipe = common.recipe_of(said, calibrated=data != "none")
    limit = _limit(keep_8bit)
    if limit is not None and bits == 8:
        raise ValueError("--keep-8bit: expected none with --bits 8, got one")
    if limit is not None and recipe.writes_qserve:
        raise ValueError("--keep-8bit: expected none with --scheme two-level; files of --rotation 128 have 8 bits too")
    if limit is not None and data == "none":
        raise ValueError("--keep-8bit: expected --data other than none, which says what a layer loses")
    if out.resolve() == folder.resolve():
        raise ValueError(f"OUT: expected another folder than FOLDER, got {out}")

    from jitgemm.nn.quantize.evaluate import WIDTH, help_texts, texts_of
    from jitgemm.nn.save.model_folder import check_config, open_model_folder
    from jitgemm.nn.save.resume import ResumableFolder

    started = time.monotonic()
    source = open_model_folder(folder)
    check_config(source)
    held, text = help_texts() if data in (None, "none") else texts_of(Path(data))
    where = _device(device)
    settings = {
        "jitgemm": jitgemm.__version__,
        "files of FOLDER": _digest(*((file.name, state) for file, state in source.states.items())),
        "--data": "none" if data == "none" else _digest(text),
        "--tokens": tokens // WIDTH * WIDTH,
        "--activation": (recipe.otherwise or recipe).inputs,
        "--scheme": recipe.code,
        "--group-size": group_size,
        "--zero-point": zero_point,
        "--rotation": recipe.rotation,
        "--keep-8bit": limit,
    }
    target = ResumableFolder(out, settings, restart)
    try:
        if left := target.layers_done:
            common.note(f"{out}: going on with {left} layers that an interrupted run quantised")
        if data is None:
            common.note("calibrates with Python's help topics; --data FILE takes text like what the model will read")
        held_back, ids = _windows(source, (held, None if data == "none" else text), tokens // WIDTH)
        facts = quantize_folder(
            source, target, recipe, device=where, calibration=ids, held_back=held_back, group_size=group_size,
            keep_8bit=limit, note=common.note, tenths=not common.err().is_terminal,
        )  # fmt: skip
    except KeyboardInterrupt:
        kept, complete = target.layers_done, (out / "config.json").is_file()
        told = f"{kept} layers are kept" + (f" in {out}; the same command goes on" if kept else "")
        common.note(f"interrupted: {f'{out} is complete, but not evaluated' if complete and not kept else told}")
        raise typer.Exit(130) from None
    except ValueError as error:
        raise ValueError(re.sub("^group_size:", "--group-size:", str(error))) from error
    finally:
        target.close()
    facts |= {"seconds": round(time.monotonic() - started, 1)}
    _report(facts, as_json)


def _windows(
    source: ModelFolder, texts: tuple[str, str | None], windows: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Token ids [windows, WIDTH] that are evaluated, and that calibrate; None for none. texts: likewise."""
    from jitgemm.nn.quantize.evaluate import TESTED, WIDTH, windows_of
    from jitgemm.nn.save.model_folder import load_tokenizer

    held, text = texts
    try:
        tokenizer = load_tokenizer(source)
    except ValueError as error:
        if text is not None:
            raise ValueError(f"{error}; --data none does without calibration") from error
        common.note(f"nothing is evaluated: {error}")
        return None, None
    ids = None if text is None else windows_of(tokenizer, text, windows)
    if ids is not None and not len(ids):
        raise ValueError(f"--data: expected text of at least {2 * WIDTH} tokens, got less")
    if ids is not None and len(ids) < windows:
        common.note(f"--data: the text calibrates with {ids.numel()} tokens, less than --tokens {windows * WIDTH}")
    tested = windows_of(tokenizer, held, TESTED)
    if not len(tested):
        common.note(f"nothing is evaluated: less than {WIDTH} tokens are held back")
    return tested if len(tested) else None, ids


def _device(text: str | None) -> torch.device:
    """Where the model runs. Raises ValueError for a GPU that runs no kernels."""
    import torch

    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    try:
        device = torch.device(text or ("cuda" if hopper else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device: expected cuda or cpu, got {text!r}: {error}") from None
    if device.type != "cpu" and (device.type != "cuda" or not torch.cuda.is_available()):
        raise ValueError(f"--device: expected a Hopper GPU or cpu, got {text}, and PyTorch finds none")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        raise ValueError(f"--device: expected a Hopper GPU or cpu, got {torch.cuda.get_device_name(device)}")
    if device.type == "cpu":
        common.note("runs on the CPU, by the exact reference of the kernels, which takes long for large models")
    return device


def _limit(text: str | None) -> float | None:
    if text is None or text.upper() == "AUTO":
        return None if text is None else AUTO_KEEP_8BIT
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise ValueError(f"--keep-8bit: expected AUTO or a number such as 0.02, got {text!r}")
    return limit


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _report(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        common.print_json(facts)
        return
    rows = []
    for layer in facts["layers"][:SHOWN]:
        lost = f"{-10 * math.log10(error):.1f} dB" if (error := layer["error"]) else None
        rows.append((layer["name"], layer["bits"], f"{error:.2%}", lost))
    columns = ("layer", "bits", "error in 4 bits", "signal to error")
    common.out().print(common.table(columns, rows, left=("layer",), drop=("signal to error",)))
    if (evaluation := facts["evaluation"]) is not None:
        before, after = evaluation["before"], evaluation["after"]
        shown = {
            "perplexity": f"{before['perplexity']:.2f} before, {after['perplexity']:.2f} after",
            "KL divergence": f"{after['kl']:.4f}",
            "same first token": f"{after['same']:.1%}",
        }
        common.out().print()
        common.print_facts(shown)
    counts = Counter(layer["bits"] for layer in facts["layers"])
    sizes = f"{common.show_size(facts['bytes_before'])} before, {common.show_size(facts['bytes_after'])} after"
    common.note(f"{counts[4]} layers of 4 bits, {counts[8]} of 8; {sizes}; {facts['seconds']:.0f} s")
    common.note(f"load it with: vllm serve {facts['out']} --quantization jitgemm")
