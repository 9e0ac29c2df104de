"""What quantisation does to a layer's results, and to a model's predictions of texts: perplexity and KL divergence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from jitgemm.nn.layers.experts import PackedExperts
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.quantize.stacked import ExpertsLayout
from jitgemm.weight.rotation import rotated

WIDTH = 256
"""Tokens of a window, the first of a text among them."""
TESTED = 8
"""Windows that are evaluated."""
AT_ONCE = 2
"""Windows in one call of the model."""
_HELD_BACK = ("classes", "exceptions", "execmodel", "objects", "truth", "typesfunctions", "integers", "lambda")
"""Python's help topics that are evaluated."""
_VALUES = 1 << 26
"""Of a weight at a time."""


def relative_error(
    layer: PackedLinear | PackedExperts, module: torch.nn.Module, layout: ExpertsLayout | None, moments: Any = None
) -> float:
    """The squared error of a layer's results over their squares: 0.01 is 20 dB. Activations' rounding is not in it.

    Args:
        layer: what stands for the module.
        module: a Linear, or experts as `layout` says.
        moments: of the inputs, as `Moments.given` has them. Where there are none, all inputs count the same: the error
            of the weight.
    """
    if isinstance(layer, PackedLinear):
        assert isinstance(module.weight, torch.Tensor)
        lost, total = _squares(layer.weight, module.weight, moments)
    else:
        assert layout is not None
        squares = [
            _squares(
                packed.weight[e], layout.rows(getattr(module, name))[e], None if moments is None else moments[i][e]
            )
            for i, (name, packed) in enumerate(zip(layout.parameters, (layer.w13, layer.w2), strict=True))
            for e in range(layout.experts)
        ]
        # Of each projection and expert the same share: inputs of different layers have no common unit.
        shares = (lost / total.clamp(min=torch.finfo(torch.float32).tiny) for lost, total in squares)
        lost = sum(shares, torch.zeros(()))
        total = torch.tensor(float(len(squares)))
    return float(lost) / float(total) if float(total) else 0.0


def _squares(weight: Any, w: torch.Tensor, moments: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(of the error, of all): sums of w M wᵀ's diagonal."""
    with torch.no_grad():
        packed = weight.dequantize()
        packed = rotated(packed) if weight.rotation else packed  # back
        lost = total = torch.zeros((), dtype=torch.float64, device=packed.device)
        moments = None if moments is None else moments.to(packed.device)
        step = max(1, _VALUES // packed.shape[1])
        for part, old in zip(packed.split(step), w.detach().split(step), strict=True):
            old = old.to(packed.device, torch.float32)
            for_error, for_all = (
                (x * (x if moments is None else x @ moments)).sum(dtype=torch.float64) for x in (part - old, old)
            )
            lost, total = lost + for_error, total + for_all
    return lost, total


def help_texts() -> tuple[str, str]:
    """(text to evaluate, text to calibrate with): the help topics of the Python that runs, in English."""
    from pydoc_data.topics import topics

    held = "\n\n".join(topics[name] for name in _HELD_BACK if name in topics)
    return held, "\n\n".join(text for name, text in sorted(topics.items()) if name not in _HELD_BACK)


def texts_of(file: Path) -> tuple[str, str]:
    """(text to evaluate, text to calibrate with): the first eighth of a file's text, and the rest.

    Args:
        file: text in UTF-8, or .jsonl with an object in each line whose "text" is one. Such lines end at LF or CR LF
            and nowhere else; halves of surrogate pairs, which JSON lets pass and no text has, become U+FFFD.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such text.
    """
    try:
        lines = file.suffix == ".jsonl"
        with open(file, encoding="utf-8-sig", newline="" if lines else None) as opened:
            text = opened.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected text in UTF-8, got {error}") from None
    if lines:
        texts = []
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip(" \t\r"):
                continue
            try:
                found = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, RecursionError):
                found = None
            if not isinstance(found, str):
                raise ValueError(f'{file}: expected a JSON object with a "text" in line {number}, got {line[:60]!r}')
            texts.append(found.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        text = "\n\n".join(texts)
    return text[: len(text) // 8], text[len(text) // 8 :]


def windows_of(tokenizer: Any, text: str, count: int) -> torch.Tensor:
    """Token ids [windows, WIDTH], at most `count` windows; each begins with the tokenizer's first token of a text, if
    it has one.

    Args:
        tokenizer: one of transformers.
    """
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[0].long()
    size = WIDTH - len(first)
    rows = ids[: min(count, len(ids) // size) * size].view(-1, size)
    return torch.cat([ids.new_tensor(first).expand(len(rows), -1), rows], 1)


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Of each next token, fp32 [windows, WIDTH - 1, vocabulary], for two windows at a time.

    Args:
        model: a causal language model of transformers.
        ids: [windows, WIDTH], on the model's device.
    """
    for part in ids.split(AT_ONCE):
        yield model(part, use_cache=False).logits[:, :-1].float().log_softmax(-1)


def compared(base: Sequence[torch.Tensor], got: Iterable[torch.Tensor], ids: torch.Tensor) -> dict[str, float]:
    """What became of a model.

    Args:
        base: `log_probabilities` of the model in floats, on any device.
        got: those of the model that is compared with it.
        ids: what both were called with.

    Returns:
        perplexity; kl, the mean KL divergence from `base` in nats; same, how often the most probable token is `base`'s.
    """
    loss = divergence = same = 0.0
    for reference, got_part, part in zip(base, got, ids.split(AT_ONCE), strict=True):
        reference = reference.to(got_part.device)
        loss -= float(got_part.gather(-1, part[:, 1:, None].to(got_part.device)).sum(dtype=torch.float64))
        terms = reference.exp() * (reference - got_part)
        divergence += float(terms.where(reference.exp() > 0, 0.0).sum(dtype=torch.float64))
        same += float((reference.argmax(-1) == got_part.argmax(-1)).sum())
    count = ids[:, 1:].numel()
    perplexity = float(torch.tensor(loss / count, dtype=torch.float64).exp())
    return {"perplexity": perplexity, "kl": divergence / count, "same": same / count}
