#!/usr/bin/env python3
"""A Llama end to end: from a checkpoint to logits, and tokens a second. `python scripts/end_to_end.py --help`."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import inspect
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TQDM_DISABLE", "1")  # compressed-tensors' bars; read when tqdm is imported, which torch does

import torch
import typer

import jitgemm.nn
from jitgemm.activations.call import quantize_activations
from jitgemm.cli import common
from jitgemm.nn import W4A8Linear
from jitgemm.nn.layers.packed import LHS_DTYPES

from benchmark_lib import layer as one_layer
from benchmark_lib.divided import DIVIDED, Cells, on_ranks, time_divided
from benchmark_lib.divided_experts import ExpertSizes, time_experts
from benchmark_lib.llama import (
    ATTENTIONS,
    CONTESTANTS,
    MOST_DIFFERENT,
    MOST_DIFFERENT_LOGITS,
    USUAL,
    ModelSizes,
    empty_model,
    time_llama,
)
from benchmark_lib.results import environment

PRESETS = {"fp8": "W4AFP8", "int8": "W4A8"}
"""compressed-tensors' names for 4-bit weights with a scale per token."""
FORMATS = ("int-quantized", "pack-quantized")
EXPERTS_DIFFERENCE = 0.02
"""Largest relative error of divided experts: ranks round what they add up to bf16."""
LAYER_LIMIT = 2.2e-3
"""Largest relative RMS error of a layer's output: rounding it to bf16 alone takes 1.7e-3."""

app = common.command_line()


Hidden = Annotated[int, typer.Option("--hidden", min=32, help="Hidden size.")]
Intermediate = Annotated[int, typer.Option("--intermediate", min=32, help="Width of the MLP.")]
Heads = Annotated[int, typer.Option("--heads", min=1, help="Attention heads.")]
KvHeads = Annotated[int, typer.Option("--kv-heads", min=1, help="Key and value heads.")]
GroupSize = Annotated[int, typer.Option("--group-size", help="Values of k that share a scale.")]
Device = Annotated[
    Optional[str],
    typer.Option("--device", metavar="cuda|cpu", help="Where to run.", show_default="cuda, else cpu"),
]
Batch = Annotated[str, typer.Option("--batch", metavar="LIST", help="Sequences decoded at once.")]
Backend = Annotated[
    Optional[str],
    typer.Option("--backend", help="torch.compile's, or none.", show_default="inductor; none on a CPU"),
]
Seed = Annotated[int, typer.Option("--seed", help="Of the weights and the tokens.")]


@app.callback()
def end_to_end() -> None:
    """A Llama with W4A8 layers, end to end: what it computes, out of a checkpoint, and how fast it is."""


@app.command()
@common.guarded
def check(
    layers: Annotated[int, typer.Option("--layers", min=1, help="Decoder layers; the real model has 32.")] = 4,
    hidden: Hidden = 4096,
    intermediate: Intermediate = 14336,
    heads: Heads = 32,
    kv_heads: KvHeads = 8,
    vocab: Annotated[
        Optional[int],
        typer.Option("--vocab", min=8, help="Size of the vocabulary.", show_default="128256 * layers / 32"),
    ] = None,
    activation: Annotated[
        Optional[list[str]],
        typer.Option(
            "--activation", metavar="|".join(PRESETS), help="Of the checkpoint; may be repeated.", show_default="both"
        ),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", metavar="|".join(FORMATS), help="How compressed-tensors stores the codes.")
    ] = FORMATS[0],
    group_size: GroupSize = 128,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens whose logits are compared.")] = 256,
    device: Device = None,
    seed: Seed = 0,
    keep: Annotated[
        Optional[Path], typer.Option("--keep", metavar="FOLDER", help="Write the checkpoints here and leave them.")
    ] = None,
    as_json: common.Json = False,
) -> None:
    """Quantise a Llama-style model to W4A8, save it, load it through jitgemm and compare its logits.

    The model comes from transformers: Llama-3-8B's layers, fewer of them, with random weights. compressed-tensors
    quantises it (a scale per group, round to nearest) and writes config.json and safetensors as for vLLM; the weights
    then come back twice, through jitgemm.nn.load_ and through transformers' own loader, and must be equal bit for bit.

    \b
    Logits: relative error |a - exact| / |exact| over all tokens, where `exact` is the model whose every quantised layer
    multiplies the dequantised weight with identically quantised activations in fp32 and rounds once to bf16.
      jitgemm      the packed weights and 8-bit activations
      bf16 torch   the same weights and quantised activations, both rounded to bf16, through torch's GEMM
    jitgemm must be at least as close as bf16 torch, and each of its layers, on its own input, within 2.2e-3 (RMS).

    \b
    Examples:
      python scripts/end_to_end.py check
      python scripts/end_to_end.py check --device cpu --layers 1 --hidden 256 --intermediate 512 --heads 4 \\
          --kv-heads 2 --vocab 512 --tokens 16

    \b
    Exit codes:
      0  weights are equal, logits agree
      1  they do not
      2  wrong arguments, or a library is missing
      3  a kernel could not be compiled or run
    """
    versions = _libraries("transformers", "safetensors", "compressed-tensors")
    chosen = list(dict.fromkeys(activation or PRESETS))
    for name in chosen:
        if name not in PRESETS:
            raise ValueError(f"--activation: expected {' or '.join(PRESETS)}, got {name!r}")
    if format not in FORMATS:
        raise ValueError(f"--format: expected {' or '.join(FORMATS)}, got {format!r}")
    device = _device(device)
    vocab = vocab or max(512, 128256 * layers // 32 // 64 * 64)
    sizes = ModelSizes(layers, hidden, intermediate, heads, kv_heads, vocab, tokens)
    sizes.check(group_size)

    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jitgemm-")))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_third_party_noise())
        document = _about(sizes, device, versions, group_size=group_size)
        document["checkpoints"] = _checkpoints(sizes, chosen, format, group_size, tokens, device, seed, folder)
    if as_json:
        common.print_json(document)
    else:
        _print_check(document)
    if not all(checkpoint["agrees"] for checkpoint in document["checkpoints"]):
        raise typer.Exit(common.FOUND)


@app.command()
@common.guarded
def speed(
    layers: Annotated[int, typer.Option("--layers", min=1, help="Decoder layers.")] = 32,
    hidden: Hidden = 4096,
    intermediate: Intermediate = 14336,
    heads: Heads = 32,
    kv_heads: KvHeads = 8,
    vocab: Annotated[int, typer.Option("--vocab", min=8, help="Size of the vocabulary.")] = 128256,
    contestant: Annotated[
        Optional[list[str]],
        typer.Option(
            "--contestant", metavar="|".join(CONTESTANTS), help="May be repeated.", show_default=", ".join(USUAL)
        ),
    ] = None,
    group_size: GroupSize = 128,
    batch: Batch = "1,16,64",
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens in the cache when decoding starts.")] = 256,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Tokens decoded for each sequence.")] = 64,
    prefill: Annotated[int, typer.Option("--prefill", min=0, help="Tokens of a prompt; 0 for none.")] = 2048,
    attention: Annotated[
        str, typer.Option("--attention", metavar="sdpa|flex", help="Of decoding: SDPA, or FlexAttention compiled.")
    ] = "sdpa",
    backend: Backend = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: common.Json = False,
) -> None:
    """Time a whole Llama-3-8B with random weights: decoding from a static cache, and a prompt.

    One token a step for each sequence, greedily; on a GPU one CUDA graph is replayed a step. All blocks are compiled by
    torch.compile, as one function that serves all layers. Embedding, attention and lm_head are the same in all, in
    bf16, but for e4m3-head8's lm_head. SDPA reads the cache of a sequence with a CTA for each head of it; FlexAttention
    with as many as there are SMs.

    \b
      bf16         torch.nn.Linear
      fp8          torch._scaled_mm, scales per row and per token; the compiler fuses the quantiser
      e4m3, int8   W4A8Linear, groups of --group-size; the compiler fuses norms and gates into the quantisers
      e4m3-head8   e4m3, and lm_head a W8A8Linear, a scale per row and per token

    The logits of a compiled step are compared with those of the same modules uncompiled, as a guard against nonsense:
    within 60 %, as both round to bf16, elsewhere, and random weights pass on what that changes.

    \b
    Examples:
      python scripts/end_to_end.py speed --json > llama.json
      python scripts/end_to_end.py speed --attention flex --json > flex.json
      python scripts/end_to_end.py speed --contestant bf16 --contestant e4m3 --batch 1
      python scripts/end_to_end.py speed --device cpu --layers 2 --hidden 256 --intermediate 512 --heads 4 \\
          --kv-heads 2 --vocab 512 --batch 1 --context 4 --steps 2 --prefill 8

    \b
    Exit codes:
      0  logits agree
      1  they do not
      2  wrong arguments, or a library is missing
      3  a kernel could not be compiled or run
    """
    versions = _libraries("transformers")
    names = _contestants(contestant or USUAL, CONTESTANTS)
    batches = _numbers("--batch", batch)
    device = _device(device)
    backend = _backend(backend, device)
    _contestants([attention], ATTENTIONS, "--attention")
    if attention == "flex" and backend == "none":
        raise ValueError("--attention: FlexAttention is for a compiler, expected a --backend, got none")
    sizes = ModelSizes(layers, hidden, intermediate, heads, kv_heads, vocab, max(prefill, context + steps))
    sizes.check(group_size)
    start = time.monotonic()
    with torch.no_grad(), _third_party_noise():
        document = _about(sizes, device, versions, group_size=group_size)
        document |= {"context": context, "steps": steps, "prefill": prefill, "backend": backend, "attention": attention}
        document["rows"] = time_llama(
            sizes, names, batches, context, steps, prefill, group_size, None if backend == "none" else backend,
            attention, device, seed, lambda text: common.note(f"{time.monotonic() - start:4.0f} s  {text}"),
        )  # fmt: skip
    agree = all(row["difference"] <= MOST_DIFFERENT_LOGITS for row in document["rows"])
    _finish(document, start, as_json, _print_speed, agree)


@app.command()
@common.guarded
def tp(
    ranks: Annotated[int, typer.Option("--ranks", min=2, help="GPUs of this host; processes on a CPU.")] = 2,
    layers: Annotated[
        int, typer.Option("--layers", min=1, help="Decoder layers; together more weights than the L2 holds.")
    ] = 8,
    hidden: Hidden = 4096,
    intermediate: Intermediate = 14336,
    heads: Heads = 32,
    kv_heads: KvHeads = 8,
    contestant: Annotated[
        Optional[list[str]],
        typer.Option(
            "--contestant", metavar="|".join(DIVIDED), help="May be repeated.", show_default="bf16, e4m3, int8"
        ),
    ] = None,
    group_size: GroupSize = 128,
    batch: Batch = "1,16,64",
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens in the cache of each sequence.")] = 256,
    prefill: Annotated[int, typer.Option("--prefill", min=0, help="Tokens of a prompt; 0 for none.")] = 2048,
    backend: Backend = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: common.Json = False,
) -> None:
    """Time Llama-3-8B's layers divided among GPUs of this host, and what of it is communication.

    Starts a process for each GPU, with NCCL; on a CPU with gloo. Each rank holds its part of every layer: q, k, v, gate
    and up by columns, o and down by rows, whose sums are two all-reduces of bf16 a layer. Weights are random, and the
    same on all ranks.

    \b
      bf16         torch.nn.Linear, divided by PyTorch's styles
      e4m3, int8   W4A8Linear, divided by jitgemm.nn.parallel

    \b
    Microseconds of one layer with its attention, from CUDA graphs of all layers that take turns; of the slowest rank:
      all          as it runs
      compute      the rank's part without the all-reduces
      all-reduces  those alone, back to back
      waits        1 - compute / all: what the all-reduces cost, and waiting for the other ranks
      one GPU      the whole layer on one GPU
      speed-up     one GPU / all

    First the last layer's output is compared with one GPU's: within 30 %, as ranks quantise by other scales and random
    weights pass on what that changes. Half of a sum would differ by more.

    \b
    Examples:
      python scripts/end_to_end.py tp --ranks 2 --json > tp.json
      python scripts/end_to_end.py tp --contestant bf16 --contestant int8 --batch 1 --prefill 0
      python scripts/end_to_end.py tp --device cpu --layers 2 --hidden 256 --intermediate 512 --heads 4 --kv-heads 4 \\
          --batch 1 --context 4 --prefill 8

    \b
    Exit codes:
      0  outputs agree
      1  they do not
      2  wrong arguments, too few GPUs, or a library is missing
      3  a kernel could not be compiled or run
    """
    versions = _libraries("transformers")
    names = _contestants(contestant or ["bf16", "e4m3", "int8"], DIVIDED)
    device = _device(device)
    _check_ranks(ranks, device)
    backend = _backend(backend, device)
    cells = [Cells(each, 1, context) for each in _numbers("--batch", batch)] + (
        [Cells(1, prefill, 0)] if prefill else []
    )
    sizes = ModelSizes(layers, hidden, intermediate, heads, kv_heads, 512, max(prefill, context + 1))
    sizes.check(group_size)
    for name, size, unit in (
        ("--kv-heads", kv_heads, 1),
        ("--hidden", hidden, group_size),
        ("--intermediate", intermediate, group_size),
    ):
        if size % (ranks * unit):
            raise ValueError(f"{name}: expected a multiple of {ranks} ranks * {unit}, got {size}")
    start = time.monotonic()
    document = _about(sizes, device, versions, group_size=group_size)
    document |= {"ranks": ranks, "context": context, "backend": backend}
    with tempfile.TemporaryDirectory(prefix="jitgemm-") as folder:
        compiled = None if backend == "none" else backend
        document["rows"] = on_ranks(
            ranks, folder, device, time_divided, sizes, names, cells, group_size, compiled, seed
        )
    agree = all(row["difference"] <= MOST_DIFFERENT for row in document["rows"])
    _finish(document, start, as_json, _print_tp, agree)


@app.command()
@common.guarded
def ep(
    ranks: Annotated[int, typer.Option("--ranks", min=2, help="GPUs of this host; processes on a CPU.")] = 2,
    experts: Annotated[int, typer.Option("--experts", min=2, help="Of the layer.")] = 128,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Experts of a token.")] = 8,
    hidden: Hidden = 2048,
    intermediate: Annotated[int, typer.Option("--intermediate", min=32, help="Width of an expert.")] = 768,
    activation: Annotated[
        Optional[list[str]],
        typer.Option(
            "--activation", metavar="|".join(one_layer.ACTIVATIONS), help="May be repeated.", show_default="both"
        ),
    ] = None,
    group_size: GroupSize = 128,
    tokens: Annotated[str, typer.Option("--tokens", metavar="LIST", help="Of each rank.")] = "1,16,64,256,2048",
    device: Device = None,
    seed: Seed = 0,
    as_json: common.Json = False,
) -> None:
    """Time Qwen3-30B-A3B's experts divided among GPUs of this host, next to one GPU.

    Starts a process for each GPU, with NCCL; on a CPU with gloo. Each rank holds its part of the experts, by
    jitgemm.nn.parallel's ExpertParallel. Weights are random, routing is uniform.

    \b
    Microseconds of one layer, of the slowest rank:
      one GPU      the whole layer and a rank's tokens
      shared       all ranks have these tokens, and an all-reduce sums what they make of them
      all on one   the whole layer and the tokens of all ranks
      own          every rank has tokens of its own, which travel by NCCL, as many as max_tokens
      nvlink       the same with exchange="nvlink", by kernels over NVLink
      any          the same for any number of tokens, for which the host waits: as it launches that
    All but the last in CUDA graphs.

    First outputs are compared with the whole layer's, and nvlink's bits with own's.

    \b
    Examples:
      python scripts/end_to_end.py ep --ranks 2 --json > ep.json
      python scripts/end_to_end.py ep --experts 256 --hidden 7168 --intermediate 2048 --activation e4m3
      python scripts/end_to_end.py ep --device cpu --experts 4 --top-k 2 --hidden 64 --intermediate 64 \\
          --group-size 32 --tokens 1,8

    \b
    Exit codes:
      0  outputs agree
      1  they do not
      2  wrong arguments, or too few GPUs
      3  a kernel could not be compiled or run
    """
    versions = _libraries()
    names = _contestants(activation or one_layer.ACTIVATIONS, one_layer.ACTIVATIONS, "--activation")
    device = _device(device)
    _check_ranks(ranks, device)
    sizes = ExpertSizes(experts, top_k, hidden, intermediate, group_size)
    for name, size, unit in (
        ("--experts", experts, ranks),
        ("--hidden", hidden, group_size),
        ("--intermediate", intermediate, group_size),
    ):
        if size % unit:
            raise ValueError(f"{name}: expected a multiple of {unit}, got {size}")
    if top_k > experts:
        raise ValueError(f"--top-k: expected at most the {experts} experts, got {top_k}")
    counts = _numbers("--tokens", tokens)
    start = time.monotonic()
    document = _about(sizes, device, versions) | {"ranks": ranks}
    with tempfile.TemporaryDirectory(prefix="jitgemm-") as folder:
        document["rows"] = on_ranks(ranks, folder, device, time_experts, sizes, names, counts, seed)
    agree = all(row["difference"] <= EXPERTS_DIFFERENCE and row["same_bits"] for row in document["rows"])
    _finish(document, start, as_json, _print_ep, agree)


@app.command()
@common.guarded
def layer(
    layers: Annotated[
        int, typer.Option("--layers", min=1, help="Layers in turn; together more weights than the L2 holds.")
    ] = 8,
    hidden: Hidden = 4096,
    intermediate: Intermediate = 14336,
    heads: Heads = 32,
    kv_heads: KvHeads = 8,
    contestant: Annotated[
        Optional[list[str]],
        typer.Option(
            "--contestant", metavar="|".join(one_layer.CONTESTANTS), help="May be repeated.", show_default="all"
        ),
    ] = None,
    activation: Annotated[
        Optional[list[str]],
        typer.Option(
            "--activation", metavar="|".join(one_layer.ACTIVATIONS), help="May be repeated.", show_default="e4m3"
        ),
    ] = None,
    group_size: GroupSize = 128,
    batch: Batch = "1,16,64",
    backend: Backend = None,
    device: Device = None,
    seed: Seed = 0,
    allocations: Annotated[
        int, typer.Option("--allocations", min=1, help="Times that each gets its buffers, for the median.")
    ] = 3,
    as_json: common.Json = False,
) -> None:
    """Time the four Linears of Llama-3-8B's layers in a decode step, with the norms, additions and gate around them.

    Without attention: o_proj reads the columns of q that qkv_proj writes. q, k and v are one Linear, and so are gate
    and up. Layers have weights of their own, which are random, and follow one another in one CUDA graph.

    \b
      gemms           the four GEMMs alone, on inputs quantised beforehand
      hand            the GEMMs and quantize_activations with rms_norm, residual and silu_mul, written by hand
      hand-attention  the same with two kernels of PyTorch's ahead of o_proj, which are not launched dependently
      modules         W4A8Linear, torch.nn.RMSNorm, silu(gate) * up
      compiled        modules under torch.compile, all layers as one graph
      bf16            torch.nn.Linear under torch.compile, likewise
      floor           the bytes of the 4-bit weights at 4.5 TB/s, not timed

    What the layers add to their input is compared with what the calls by hand add, and bf16's with its modules'
    uncompiled, as a guard against nonsense: within 30 %, as norm and gate are rounded to bf16 in some only, and
    quantising passes on what that changes.

    \b
    Examples:
      python scripts/end_to_end.py layer --json > layer.json
      python scripts/end_to_end.py layer --contestant hand --contestant compiled --activation int8 --batch 1,16
      python scripts/end_to_end.py layer --device cpu --layers 2 --hidden 256 --intermediate 512 --heads 4 \\
          --kv-heads 2 --batch 1

    \b
    Exit codes:
      0  outputs agree
      1  they do not
      2  wrong arguments
      3  a kernel could not be compiled or run
    """
    names = _contestants(contestant or one_layer.CONTESTANTS, one_layer.CONTESTANTS)
    activations = _contestants(activation or one_layer.ACTIVATIONS[:1], one_layer.ACTIVATIONS, "--activation")
    batches = _numbers("--batch", batch)
    device = _device(device)
    backend = _backend(backend, device)
    sizes = ModelSizes(layers, hidden, intermediate, heads, kv_heads, 0, 0)
    sizes.check(group_size)
    start = time.monotonic()
    document = _about(sizes, device, _libraries(), group_size=group_size)
    document |= {"backend": backend}
    with torch.no_grad():
        document["rows"] = one_layer.time_layer(
            sizes, names, activations, batches, group_size, None if backend == "none" else backend, device, seed,
            allocations, lambda text: common.note(f"{time.monotonic() - start:4.0f} s  {text}"),
        )  # fmt: skip
    agree = all(row.get("difference", 0) <= MOST_DIFFERENT for row in document["rows"])
    _finish(document, start, as_json, _print_layer, agree)


def _finish(
    document: dict[str, Any], start: float, as_json: bool, show: Callable[[dict[str, Any]], None], agree: bool
) -> None:
    """Prints what was measured since `start`; exits with 1 where outputs do not agree."""
    document["seconds"] = round(time.monotonic() - start, 1)
    if as_json:
        common.print_json(document)
    else:
        show(document)
    if not agree:
        raise typer.Exit(common.FOUND)


def _about(sizes: ModelSizes | ExpertSizes, device: str, versions: dict[str, str], **more: Any) -> dict[str, Any]:
    gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": environment(),
        "model": asdict(sizes) | more,
        "versions": versions,
    }


def _checkpoints(
    sizes: ModelSizes,
    chosen: list[str],
    format: str,
    group_size: int,
    tokens: int,
    device: str,
    seed: int,
    folder: Path,
) -> list[dict[str, Any]]:
    checkpoints = []
    for name in chosen:
        path = folder / f"llama-{PRESETS[name].lower()}"
        common.note(f"{PRESETS[name]}: quantising and saving {sizes.layers} layers to {path}")
        write_checkpoint(path, sizes, PRESETS[name], format, group_size, device, seed)
        model = empty_model(sizes, device, seed + 1)
        names = jitgemm.nn.load_(model, path, device=device)
        ours = {layer: model.get_submodule(layer) for layer in names}
        plain = dequantised_linears(path, names, device)
        differ = [n for n in names if not torch.equal(ours[n].weight.dequantize().bfloat16(), plain[n].weight)]
        common.note(f"{PRESETS[name]}: comparing the logits of {tokens} tokens")
        compared = compare_logits(model, ours, plain, tokens, sizes.vocab, seed)
        checkpoints.append(
            {
                "activations": name,
                "format": format,
                "layers": len(names),
                "file_bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
                "packed_bytes": sum(layer.weight.nbytes for layer in ours.values()),
                "bf16_bytes": sum(linear.weight.nbytes for linear in plain.values()),
                "weights_that_differ": differ,
                "logits": compared,
                "agrees": not differ and compared["agrees"],
            }
        )
    return checkpoints


# ---- the checkpoint --------------------------------------------------------------------------------------------------


def write_checkpoint(
    path: Path, sizes: ModelSizes, preset: str, format: str, group_size: int, device: str, seed: int
) -> None:
    """Quantises a random model with compressed-tensors and saves it the way llm-compressor does."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    model = empty_model(sizes, device, seed)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.weights.group_size = group_size
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        args = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if args is not None:
            groups = module.weight.data.unflatten(1, (-1, group_size))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model, format)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)


def dequantised_linears(path: Path, names: list[str], device: str) -> dict[str, Any]:
    """The quantised layers of a checkpoint as transformers and compressed-tensors read them: bf16 Linears."""
    from transformers import CompressedTensorsConfig, LlamaForCausalLM

    known = inspect.signature(CompressedTensorsConfig).parameters
    option = {"dequantize": True} if "dequantize" in known else {"run_compressed": False}
    model = LlamaForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(**option)
    )
    plain = {}
    for name in names:
        source = model.get_submodule(name)
        linear = torch.nn.Linear(source.in_features, source.out_features, bias=False, device="meta")
        linear.weight = torch.nn.Parameter(source.weight.detach().to(device), requires_grad=False)
        plain[name] = linear
    return plain


# ---- logits ----------------------------------------------------------------------------------------------------------


def use(model: Any, layers: dict[str, Any]) -> None:
    """Puts these modules at their names."""
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)


class FakeQuantised(torch.nn.Module):
    """A layer on the dequantised weight and on activations quantised as `ours` does and dequantised again."""

    def __init__(self, ours: W4A8Linear, plain: torch.nn.Linear, exact: bool):
        super().__init__()
        self.parts = ours, plain, exact

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ours, plain, exact = self.parts
        return by_torch(ours, plain, x, exact)


def by_torch(ours: W4A8Linear, plain: torch.nn.Linear, x: torch.Tensor, exact: bool) -> torch.Tensor:
    """x quantised and dequantised, times the dequantised weight: in fp32 with one rounding if exact, else in bf16."""
    codes, scale = quantize_activations(x.reshape(-1, x.shape[-1]), LHS_DTYPES[ours.activation])
    values = codes.float() * scale[:, None]
    if exact:
        out = (values @ ours.weight.dequantize().T).to(x.dtype)
    else:
        out = torch.nn.functional.linear(values.to(x.dtype), plain.weight)
    return out.view(*x.shape[:-1], -1)


def compare_logits(model: Any, ours: dict, plain: dict, tokens: int, vocab: int, seed: int) -> dict[str, Any]:
    device = model.lm_head.weight.device
    ids = torch.randint(0, vocab, (1, tokens), generator=torch.Generator().manual_seed(seed)).to(device)
    worst: dict[str, float] = {}

    def measure(name: str) -> Callable:
        def hook(layer, args, out):  # type: ignore[no-untyped-def]
            exact = by_torch(layer, plain[name], args[0].float(), exact=True)
            worst[name] = float((out.float() - exact).norm() / exact.norm())

        return hook

    hooks = [layer.register_forward_hook(measure(name)) for name, layer in ours.items()]
    logits = {"jitgemm": model(input_ids=ids, use_cache=False).logits[0].float()}
    for hook in hooks:
        hook.remove()
    for kind, exact in (("exact", True), ("bf16", False)):
        use(model, {name: FakeQuantised(ours[name], plain[name], exact) for name in ours})
        logits[kind] = model(input_ids=ids, use_cache=False).logits[0].float()
    use(model, ours)

    def error(a: str, b: str) -> float:
        return float((logits[a] - logits[b]).norm() / logits[b].norm())

    def same_first(a: str, b: str) -> float:
        return float((logits[a].argmax(-1) == logits[b].argmax(-1)).float().mean())

    worst_layer = max(worst, key=worst.__getitem__)
    numbers = {
        "tokens": tokens,
        "error_jitgemm": error("jitgemm", "exact"),
        "error_bf16_torch": error("bf16", "exact"),
        "jitgemm_to_bf16_torch": error("jitgemm", "bf16"),
        "top1_jitgemm": same_first("jitgemm", "exact"),
        "top1_bf16_torch": same_first("bf16", "exact"),
        "worst_layer": worst_layer,
        "worst_layer_error": worst[worst_layer],
    }
    closer = numbers["error_jitgemm"] <= numbers["error_bf16_torch"]
    return numbers | {"agrees": closer and worst[worst_layer] <= LAYER_LIMIT}


# ---- in and out ------------------------------------------------------------------------------------------------------


def _libraries(*packages: str) -> dict[str, str]:
    """Versions of torch and of what is needed besides the package."""
    missing = []
    versions = {}
    for package in ("torch", *packages):
        try:
            importlib.import_module(package.replace("-", "_"))
            versions[package] = importlib.metadata.version(package)
        except ImportError:
            missing.append(package)
    if missing:
        raise ValueError(f"end_to_end.py needs {', '.join(missing)}: pip install {' '.join(missing)}")
    return versions


def _device(device: str | None) -> str:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: expected a CUDA device for {device!r}, torch finds none")
    return device


@contextlib.contextmanager
def _third_party_noise() -> Iterator[None]:
    """Without the other libraries' progress bars and advice."""
    from transformers.utils import logging

    levels = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        from loguru import logger

        logger.disable("compressed_tensors")
    except ImportError:
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(levels)


def _contestants(asked: Sequence[str], known: Collection[str], option: str = "--contestant") -> list[str]:
    for name in asked:
        if name not in known:
            raise ValueError(f"{option}: expected one of {', '.join(known)}, got {name!r}")
    return list(dict.fromkeys(asked))


def _backend(backend: str | None, device: str) -> str:
    return backend or ("none" if torch.device(device).type == "cpu" else "inductor")


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ValueError(f"{option}: expected positive numbers such as 1,16,64, got {text!r}")
    return list(dict.fromkeys(numbers))


def _check_ranks(ranks: int, device: str) -> None:
    if torch.device(device).type == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(f"--ranks: expected at most {torch.cuda.device_count()} GPUs, as there are, got {ranks}")


def _print_model(document: dict[str, Any]) -> None:
    model = document["model"]
    vocabulary = f"vocabulary {model['vocab']}, " if model["vocab"] else ""
    common.out().print(
        f"Llama, {model['layers']} layers, hidden {model['hidden']}, MLP {model['intermediate']}, {vocabulary}"
        f"groups of {model['group_size']}, on {document['device']}\n"
    )


def _print_check(document: dict[str, Any]) -> None:
    out = common.out()
    _print_model(document)
    rows = []
    for checkpoint in document["checkpoints"]:
        logits = checkpoint["logits"]
        rows.append(
            (
                f"W4 {checkpoint['activations']}",
                f"{checkpoint['layers'] - len(checkpoint['weights_that_differ'])} of {checkpoint['layers']}",
                f"{logits['error_jitgemm']:.2e}",
                f"{logits['error_bf16_torch']:.2e}",
                f"{logits['top1_jitgemm']:.1%}",
                f"{logits['top1_bf16_torch']:.1%}",
                f"{logits['worst_layer_error']:.2e}",
                "yes" if checkpoint["agrees"] else "NO",
            )
        )
    columns = ("checkpoint", "equal weights", "jitgemm", "bf16 torch", "top-1", "bf16's top-1", "worst layer", "agrees")
    out.print(common.table(columns, rows, left=("checkpoint",)))
    out.print("Relative error of the logits against the exact model, and how often the likeliest token is the same.")


def _print_speed(document: dict[str, Any]) -> None:
    out = common.out()
    _print_model(document)
    others = [name for name in USUAL[:2] if f"times_{name}" in document["rows"][0]]
    rows = [
        (
            row["kind"],
            row["sequences"],
            row["contestant"],
            f"{row['us']:.0f}",
            f"{row['tokens_per_s']:.0f}",
            *(f"{row[f'times_{name}']:.2f}" for name in others),
            f"{row['difference']:.1e}",
        )
        for row in document["rows"]
    ]
    columns = ("", "sequences", "Linears", "us a step", "tokens/s", *(f"x {name}" for name in others), "difference")
    out.print(common.table(columns, rows, left=("", "Linears")))
    out.print(
        f"{document['context']} tokens of context, a prompt of {document['prefill']}; {document['seconds']:.0f} s."
    )
    _print_caveat(document)


def _print_tp(document: dict[str, Any]) -> None:
    _print_model(document)
    rows = [
        (
            row["kind"],
            row["tokens"],
            row["contestant"],
            *(f"{row[key]:.1f}" for key in ("us", "compute_us", "collective_us")),
            f"{row['communication']:.0%}",
            f"{row['one_us']:.1f}",
            f"{row['speedup']:.2f}",
            *([f"{row['times_bf16']:.2f}"] if "times_bf16" in row else []),
            f"{row['difference']:.1e}",
        )
        for row in document["rows"]
    ]
    columns = ["", "tokens", "Linears", "all", "compute", "all-reduces", "waits", "one GPU", "speed-up"]
    columns += ["x bf16"] if "times_bf16" in document["rows"][0] else []
    common.out().print(common.table((*columns, "difference"), rows, left=("", "Linears")))
    common.out().print(f"us of a layer on {document['ranks']} ranks; {document['context']} tokens of context.")
    _print_caveat(document)


def _print_ep(document: dict[str, Any]) -> None:
    model = document["model"]
    out = common.out()
    out.print(
        f"{model['experts']} experts, {model['top_k']} of a token, hidden {model['hidden']}, intermediate "
        f"{model['intermediate']}, groups of {model['group_size']}, on {document['ranks']} x {document['device']}\n"
    )
    keys = ("one_us", "shared_us", "one_all_us", "own_us", "nvlink_us", "any_us")
    rows = [
        (
            row["activation"], row["tokens"], *(f"{row[key]:.1f}" if key in row else None for key in keys),
            f"{row['difference']:.1e}",
        )
        for row in document["rows"]
    ]  # fmt: skip
    columns = ("", "tokens", "one GPU", "shared", "all on one", "own", "nvlink", "any", "difference")
    out.print(common.table(columns, rows, left=("",)))
    out.print(f"us of a layer; tokens of a rank; {document['seconds']:.0f} s.")
    _print_caveat(document)


def _print_layer(document: dict[str, Any]) -> None:
    _print_model(document)
    kinds: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in document["rows"]:
        kinds.setdefault((row["contestant"], row["activation"] or "-"), {})[row["tokens"]] = row
    rows = []
    for kind, by_tokens in kinds.items():
        times = [
            f"{row['us']:.1f}" + (f" ({row['times_hand']:.2f})" if "times_hand" in row else "")
            for row in by_tokens.values()
        ]
        differences = [row["difference"] for row in by_tokens.values() if "difference" in row]
        rows.append((*kind, *times, f"{max(differences):.1e}" if differences else None))
    tokens = [f"m = {each}" for each in dict.fromkeys(row["tokens"] for row in document["rows"])]
    columns = ("", "activations", *tokens, "difference")
    common.out().print(common.table(columns, rows, left=("", "activations")))
    common.out().print(f"us of a layer (times that of the calls by hand) for m tokens; {document['seconds']:.0f} s.")
    _print_caveat(document)


def _print_caveat(document: dict[str, Any]) -> None:
    if document["device"] == "cpu":
        common.out().print("On the CPU jitgemm runs its exact reference: these times say nothing.")


if __name__ == "__main__":
    app()
