#!/usr/bin/env python3
"""From a checkpoint to tokens: a Llama through jitgemm, compared and timed. `python scripts/end_to_end.py --help`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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
from jitgemm.nn.read import CODES

PRESETS = {"fp8": "W4AFP8", "int8": "W4A8"}
"""compressed-tensors' names for 4-bit weights with a scale per token."""
FORMATS = ("int-quantized", "pack-quantized")
LAYER_LIMIT = 2.2e-3
"""Largest relative RMS error of a layer's output: rounding it to bf16 alone takes 1.7e-3."""
ROUNDS = 3

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


class MissingLibrary(Exception):
    """A library that this script needs and the package does not."""


@app.command()
@common.guarded
def end_to_end(
    layers: Annotated[int, typer.Option("--layers", min=1, help="Decoder layers; the real model has 32.")] = 4,
    hidden: Annotated[int, typer.Option("--hidden", min=32, help="Hidden size.")] = 4096,
    intermediate: Annotated[int, typer.Option("--intermediate", min=32, help="Width of the MLP.")] = 14336,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Attention heads.")] = 32,
    kv_heads: Annotated[int, typer.Option("--kv-heads", min=1, help="Key and value heads.")] = 8,
    vocab: Annotated[
        Optional[int],
        typer.Option(
            "--vocab", min=8, help="Size of the vocabulary.", show_default="128256 * layers / 32: lm_head's real share"
        ),
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
    group_size: Annotated[int, typer.Option("--group-size", help="Values of k that share a scale.")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens whose logits are compared.")] = 256,
    batch: Annotated[str, typer.Option("--batch", metavar="LIST", help="Sequences decoded at once.")] = "1,16,64",
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens in the cache when decoding starts.")] = 512,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Tokens decoded for each sequence.")] = 64,
    device: Annotated[
        Optional[str], typer.Option("--device", metavar="cuda|cpu", help="Where to run.", show_default="cuda, else cpu")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the weights and the tokens.")] = 0,
    keep: Annotated[
        Optional[Path], typer.Option("--keep", metavar="FOLDER", help="Write the checkpoints here and leave them.")
    ] = None,
    as_json: common.Json = False,
) -> None:
    """Quantise a Llama-style model to W4A8, save it, load it through jitgemm, compare its logits, time its decoding.

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
    Decoding: one token a step for each sequence, greedily, from a filled cache; on a GPU one CUDA graph is replayed.
      bf16         torch.nn.Linear on the dequantised weights
      fp8          torch._scaled_mm, scales per row and per token, activations through jitgemm's quantiser
      jitgemm ...  4-bit weights, the checkpoint's activations
    Embedding, attention, norms and lm_head are the same bf16 modules for all.

    \b
    Examples:
      python scripts/end_to_end.py
      python scripts/end_to_end.py --layers 32 --batch 1,8,32 --context 2048 --json > llama.json
      python scripts/end_to_end.py --device cpu --layers 1 --hidden 256 --intermediate 512 --heads 4 --kv-heads 2 \\
          --vocab 512 --tokens 16 --batch 1 --context 4 --steps 2

    \b
    Exit codes:
      0  weights are equal, logits agree
      1  they do not
      2  wrong arguments, or a library is missing
      3  a kernel could not be compiled or run
    """
    try:
        libraries = _libraries()
    except MissingLibrary as error:
        common.fail(str(error), common.USAGE)
        return
    chosen = list(dict.fromkeys(activation or PRESETS))
    for name in chosen:
        if name not in PRESETS:
            raise ValueError(f"--activation: expected {' or '.join(PRESETS)}, got {name!r}")
    if format not in FORMATS:
        raise ValueError(f"--format: expected {' or '.join(FORMATS)}, got {format!r}")
    batches = _parse_batches(batch)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: expected a CUDA device for {device!r}, torch finds none")
    vocab = vocab or max(512, 128256 * layers // 32 // 64 * 64)
    sizes = ModelSizes(layers, hidden, intermediate, heads, kv_heads, vocab, max(tokens, context + steps + 8))
    sizes.check(group_size)

    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jitgemm-")))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_third_party_noise())
        document = _run(sizes, chosen, format, group_size, tokens, batches, context, steps, device, seed, folder)
    document["versions"] = libraries
    if as_json:
        common.print_json(document)
    else:
        _print(document)
    if not all(checkpoint["agrees"] for checkpoint in document["checkpoints"]):
        raise typer.Exit(common.FOUND)


@dataclass(frozen=True)
class ModelSizes:
    """A Llama model's sizes."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int

    def check(self, group_size: int) -> None:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"--heads: expected an even head size and a multiple of --kv-heads, got hidden {self.hidden}, heads "
                f"{self.heads}, kv-heads {self.kv_heads}"
            )
        for name, size in (("--hidden", self.hidden), ("--intermediate", self.intermediate)):
            if group_size < 1 or size % group_size:
                raise ValueError(f"{name}: expected a multiple of --group-size {group_size}, got {size}")

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=self.positions,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            bos_token_id=0,
            eos_token_id=1,
        )


def _run(  # type: ignore[no-untyped-def]
    sizes, chosen, format, group_size, tokens, batches, context, steps, device, seed, folder
) -> dict[str, Any]:
    contestants: dict[str, dict[str, torch.nn.Module]] = {}
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
        contestants.setdefault("bf16", plain)
        contestants[f"jitgemm {name}"] = ours
    eight = {n: Fp8Linear(linear) for n, linear in contestants["bf16"].items()}
    contestants = {"bf16": contestants.pop("bf16"), "fp8": eight, **contestants}
    rows = time_decoding(model, contestants, batches, context, steps, device, seed)
    return {
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        "model": asdict(sizes) | {"group_size": group_size},
        "checkpoints": checkpoints,
        "decode": rows,
        "context": context,
        "steps": steps,
    }


# ---- the checkpoint --------------------------------------------------------------------------------------------------


def empty_model(sizes: ModelSizes, device: str, seed: int) -> Any:
    """A model with random bf16 weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # not .to(bfloat16), which would round the rotary frequencies
    try:
        with torch.device(device):
            return LlamaForCausalLM(sizes.config()).eval()
    finally:
        torch.set_default_dtype(before)


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
    codes, scale = quantize_activations(x.reshape(-1, x.shape[-1]), CODES[ours.activation])
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


# ---- decoding --------------------------------------------------------------------------------------------------------


class Fp8Linear(torch.nn.Module):
    """torch._scaled_mm with a scale per row of the weight and per token."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.scale = (linear.weight.abs().amax(1).float() / 448)[None, :]
        codes = (linear.weight.float() / self.scale.t()).clamp_(-448, 448)
        self.codes = codes.to(torch.float8_e4m3fn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = quantize_activations(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn)
        # use_fast_accum: sums stay in the tensor cores, the faster setting and the one vLLM runs with.
        options = {"out_dtype": x.dtype, "use_fast_accum": q.is_cuda}
        out = torch._scaled_mm(q, self.codes.t(), scale_a=scale[:, None], scale_b=self.scale, **options)
        return out.view(*x.shape[:-1], -1)


class Decoder:
    """Greedy decoding from a filled static cache, one token a step for each sequence; on a GPU as a CUDA graph."""

    def __init__(self, model: Any, batch: int, context: int, steps: int, device: str, seed: int):
        from transformers import StaticCache

        self.model, self.context, self.steps = model, context, steps
        length = context + steps + 8
        ids = torch.randint(0, model.config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(seed))
        # Newer versions of transformers need the first two only, and ignore the rest.
        self.cache = StaticCache(
            config=model.config, max_cache_len=length, max_batch_size=batch, device=device, dtype=model.dtype
        )
        self.slots = torch.arange(length, device=device)
        self.position = torch.tensor([context], device=device)
        model(input_ids=ids.to(device), past_key_values=self.cache, cache_position=self.slots[:context], use_cache=True)
        self.ids = ids[:, -1:].to(device).contiguous()
        self.batch = batch
        self.run = self.step
        self.graph = None
        if torch.device(device).type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.step()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()
            self.run = self.graph.replay

    def step(self) -> None:
        # An explicit mask: nothing of it depends on values that the host would have to look at.
        mask = (self.slots <= self.position).expand(self.batch, 1, 1, -1)
        logits = self.model(
            input_ids=self.ids,
            attention_mask=mask,
            position_ids=self.position.expand(self.batch, 1),
            past_key_values=self.cache,
            cache_position=self.position,
            use_cache=True,
        ).logits
        self.ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position.add_(1)

    def rewind(self) -> None:
        """Back to where the prompt ended."""
        self.position.fill_(self.context)
        for layer in getattr(self.cache, "layers", ()):
            if hasattr(layer, "cumulative_length"):  # newer versions of transformers count by themselves
                layer.cumulative_length.fill_(self.context)

    def seconds_a_step(self) -> float:
        """The best of some rounds of all steps."""
        best = float("inf")
        for _ in range(ROUNDS):
            self.rewind()
            if self.graph is None:
                start = time.perf_counter()
                for _ in range(self.steps):
                    self.run()
                best = min(best, (time.perf_counter() - start) / self.steps)
                continue
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(self.steps):
                self.run()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) * 1e-3 / self.steps)
        return best


def time_decoding(
    model: Any,
    contestants: dict[str, dict[str, Any]],
    batches: list[int],
    context: int,
    steps: int,
    device: str,
    seed: int,
) -> list[dict[str, Any]]:
    """Every contestant's layers in the same model, for each number of sequences."""
    if device.startswith("cuda"):
        for layers in contestants.values():
            use(model, layers)
            jitgemm.nn.warmup(model, max(batches) * context)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        base = None
        for name, layers in contestants.items():
            use(model, layers)
            common.note(f"decoding {batch} sequences: {name}")
            seconds = Decoder(model, batch, context, steps, device, seed).seconds_a_step()
            base = base or seconds
            rows.append(
                {
                    "batch": batch,
                    "layers": name,
                    "us_per_step": seconds * 1e6,
                    "tokens_per_s": batch / seconds,
                    "times_bf16": base / seconds,
                }
            )
    return rows


# ---- in and out ------------------------------------------------------------------------------------------------------


def _libraries() -> dict[str, str]:
    """Versions of what is needed beside the package."""
    missing = []
    versions = {}
    for module, package in (
        ("torch", "torch"),
        ("transformers", "transformers"),
        ("safetensors", "safetensors"),
        ("compressed_tensors", "compressed-tensors"),
    ):
        try:
            importlib.import_module(module)
            versions[package] = importlib.metadata.version(package)
        except ImportError:
            missing.append(package)
    if missing:
        raise MissingLibrary(f"end_to_end.py needs {', '.join(missing)}: pip install {' '.join(missing)}")
    return versions


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


def _parse_batches(text: str) -> list[int]:
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        batches = [0]
    if min(batches) < 1:
        raise ValueError(f"--batch: expected positive numbers such as 1,16,64, got {text!r}")
    return list(dict.fromkeys(batches))


def _print(document: dict[str, Any]) -> None:
    out = common.out()
    model = document["model"]
    out.print(
        f"Llama, {model['layers']} layers, hidden {model['hidden']}, MLP {model['intermediate']}, vocabulary "
        f"{model['vocab']}, groups of {model['group_size']}, on {document['device']}\n"
    )
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
    out.print("Relative error of the logits against the exact model, and how often the likeliest token is the same.\n")
    rows = [
        (r["batch"], r["layers"], f"{r['us_per_step']:.0f}", f"{r['tokens_per_s']:.0f}", f"{r['times_bf16']:.2f}")
        for r in document["decode"]
    ]
    out.print(common.table(("batch", "layers", "us a step", "tokens/s", "x bf16"), rows, left=("layers",)))
    if document["device"] == "cpu":
        out.print("On the CPU jitgemm runs its exact reference: these times say nothing.")


if __name__ == "__main__":
    app()
