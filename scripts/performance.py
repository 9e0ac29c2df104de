#!/usr/bin/env python3
"""Measures what the documentation's tables of times say, and writes the tables: `python scripts/performance.py
--help`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import pictures
import typer

from jitgemm.cli import common

app = common.command_line()

RESULTS = ROOT / "docs" / "performance"
PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / page
        for page in ("performance.md", "moe.md", "choosing.md", "quantize.md", "parallel.md", "vllm.md", "sglang.md")
    ),
)

# ---- what is measured ------------------------------------------------------------------------------------------------


def _benchmark(formats: str, *options: str) -> tuple[str, ...]:
    return ("scripts/benchmark.py", *(part for name in formats.split() for part in ("--format", name)), *options)


LAYERS = ("--shape", "4096,4096", "--shape", "28672,4096")
RUNS: dict[str, tuple[str, ...]] = {
    "h200": _benchmark(
        "e4m3_g128 e4m3_g128_f16 int8_g128 int8_ch e4m3_g128_any", "--peer", "torch", "--rounds", "3",
        "--m", "1,16,64,128,256,512,1024,4096",
    ),
    "peers_h200": _benchmark(
        "e4m3_g128 int8_g128 int8_ch", "--peer", "hum_fp8_g128", "--peer", "hum_int8_g128", "--peer", "hum_int8_ch",
        "--rounds", "3", "--m", "1,16,64,256,1024,4096",
    ),
    "formats_h200": _benchmark(
        "e4m3_g128 e4m3_g128_f16 e4m3_g64 e4m3_g64_f16 e4m3_g32 e4m3_g32_f16 e4m3_g128z e4m3_g128z_f16 e4m3_g128_bi "
        "e4m3_g128_b128 e4m3_g128_b128e mxfp4_ch mxfp4_g128 mxfp4_g128_f16 mxfp4_g32 mxfp4_g32_f16 nvfp4_g16 "
        "int8_g128 int8_g64 int8_g32 int8_g128z int8_g128z_x int8_g128o int8_g128o_x int8_2l int8_g128_b128 int8_ch",
        "--peer", "none", "--rounds", "2", *LAYERS,
        "--m", "1,16,32,64,128,512,1024,4096",
    ),
    "grid_h200": _benchmark(
        "e4m3_g128 e4m3_g128_f16 int8_ch int8_2l mxfp4_ch", "--peer", "fp8row", "--peer", "fp8ten", "--preset", "grid",
        "--rounds", "2", "--check-once",
    ),
    "grid_peers_h200": _benchmark(
        "e4m3_g128 int8_ch int8_2l mxfp4_ch", "--peer", "hum_fp8_g128", "--peer", "hum_int8_g128", "--peer",
        "hum_int8_ch", "--peer", "hum_mxfp4", "--preset", "grid", "--m", "400,700,2500,4000", "--rounds", "2",
        "--check-once",
    ),
    "w8_h200": _benchmark(
        "w8_e4m3_ch w8_int8_ch w8_e4m3_block w8_int8_block w8_e4m3_block_b128", "--peer", "fp8row", "--peer", "fp8ten",
        "--peer", "fp8block", "--rounds", "2", "--m", "1,16,64,128,256,512,1024,4096",
    ),
    "sustained_h200": _benchmark(
        "e4m3_g128 e4m3_g128_f16 int8_g128 int8_ch w8_e4m3_ch w8_int8_ch", "--peer", "hum_fp8_g128", "--peer",
        "fp8row", "--peer", "fp8ten", "--sustained", "--shape", "4096,14336", "--m", "16,256,4096",
    ),
    "sustained_two_level_h200": _benchmark(
        "int8_2l e4m3_g128", "--peer", "fp8row", "--sustained", "--rounds", "1", "--shape", "4096,4096", "--shape",
        "28672,4096", "--shape", "4096,14336", "--shape", "7168,18432", "--m", "512,4096",
    ),
    "moe_h200": _benchmark(
        "e4m3_g128 e4m3_g128_f16 int8_g128 int8_2l int8_ch", "--moe", "--peer", "torch", "--peer", "hum_fp8_g128",
        "--peer", "hum_int8_ch", "--rounds", "2", "--peers-from", "docs/performance/moe_peers_h200.json",
    ),
    "moe_g32_h200": _benchmark(
        "e4m3_g32 e4m3_g32_f16 int8_g32", "--moe", "--peer", "none", "--rounds", "2", "--preset", "kimi-k2-ep8",
        "--preset", "gemma-4-26b", "--m", "1,16,128,1024,4096",
    ),
    "moe_w8_h200": _benchmark(
        "w8_e4m3_ch w8_int8_ch w8_e4m3_block w8_e4m3_block_b128", "--moe", "--peer", "torch", "--peer", "dg_fp8_block",
        "--peer", "dg_fp8_block_masked", "--rounds", "2", "--preset",
        "qwen3-30b", "--preset", "dsv3-ep8", "--preset", "mixtral", "--m", "16,128,1024,4096",
    ),
    "moe_mxfp4_h200": _benchmark(
        "mxfp4_ch mxfp4_g128 mxfp4_g32 e4m3_g128", "--moe", "--peer", "hum_mxfp4", "--peer", "hum_mxfp4_b128", "--peer",
        "hum_mxfp4_a16", "--rounds", "2", "--preset", "dsv4-flash", "--preset", "kimi-k3-ep16", "--preset",
        "dsv4-pro-ep8", "--preset", "gpt-oss-120b", "--m", "1,6,16,48,128,1024,4096",
    ),
    "moe_layer_w8_h200": (
        "scripts/benchmark_moe_layer.py", "--mode", "e4m3", "--mode", "w8-e4m3", "--mode", "w8-int8", "--mode",
        "w8-e4m3-block", "--tokens", "8,128",
    ),
}  # fmt: skip
"""File of results, and the command that writes it. Files of engines come from `collect`; layer_h200 and experts_h100
from `scripts/end_to_end.py layer` and `ep` of the tag `research`."""


def shown(document: dict[str, Any]) -> dict[str, Any]:
    """What tables and pictures take of a benchmark's document: no spreads, bounds or kernels."""
    environment = document["environment"]
    versions = {name: each for name, each in environment["versions"].items() if each is not None}
    run = {name: environment[name] for name in ("device", "commit", "driver")} | versions
    brief: dict[str, Any] = {"date": document["date"], "environment": run}
    if "rows" in document:
        rows = [
            {key: row[key] for key in ("model", "mode", "tokens")} | {"us": row["us"]["layer"]}
            for row in document["rows"]
        ]
        return brief | {"rows": rows}
    brief["cells"] = []
    for cell in document["cells"]:
        kept = {key: cell[key] for key in ("layer", "n", "k", "m", "floor_us") if cell[key] != ""}
        if "experts" in cell:
            kept["experts"] = cell["experts"]["count"]
        for figure in ("us", "power_w", "sm_mhz"):
            values = {name: result[figure] for name, result in cell["results"].items() if result.get(figure)}
            kept |= {figure: values} if values else {}
        brief["cells"].append(kept)
    return brief


def write(path: Path, document: dict[str, Any]) -> None:
    """Writes a line for each cell or row."""
    dump = partial(json.dumps, separators=(",", ":"))
    fields = [
        f'"{name}":' + ("[\n" + ",\n".join(map(dump, value)) + "\n]" if isinstance(value, list) else dump(value))
        for name, value in document.items()
    ]
    path.write_text("{" + ",\n".join(fields) + "}\n", encoding="utf-8")


# ---- tables ----------------------------------------------------------------------------------------------------------

Document = dict[str, Any]


def _us(value: float | None) -> str:
    return (
        "-" if value is None else f"{value:.2f}" if value < 20 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
    )


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _time(cell: Document, name: str) -> float | None:
    return cell["us"].get(name)


def times(columns: dict[str, str], document: Document) -> str:
    """A line a cell, microseconds of contestants, which `columns` gives a heading each."""
    grouped, rows = "experts" in document["cells"][0], []
    for cell in document["cells"]:
        n, k, tokens = cell["n"], cell["k"], f"{cell['m']:,}"
        place = [cell["layer"], f"{cell['experts']} × {n} × {k}", tokens] if grouped else [f"{n} × {k}", tokens]
        rows.append([*place, _us(cell["floor_us"]), *(_us(_time(cell, name)) for name in columns)])
    place = ["layer", "experts × n × k", "tokens"] if grouped else ["n × k", "m"]
    return _rows([*place, "floor", *columns.values()], rows)


def ratios(base: str, rows: dict[str, str], layer: tuple[int, int], document: Document) -> str:
    """A line a contestant and a column an m of one layer: times over those of `base`, whose microseconds stand
    first."""
    cells = [cell for cell in document["cells"] if (cell["n"], cell["k"]) == layer]

    def over(cell: Document, name: str) -> str:
        mine, theirs = _time(cell, name), _time(cell, base)
        return f"{mine / theirs:.2f}" if mine and theirs else "-"

    lines = [[f"us, {rows[base]}", *(_us(_time(cell, base)) for cell in cells)]]
    lines += [[label, *(over(cell, name) for cell in cells)] for name, label in rows.items() if name != base]
    return _rows([f"{layer[0]} × {layer[1]}, m =", *(f"{cell['m']:,}" for cell in cells)], lines)


def held(columns: dict[str, str], document: Document) -> str:
    """A line a contestant: microseconds, watts and the clock of each cell at the power limit."""
    cells = document["cells"]

    def text(cell: Document, name: str) -> str:
        us = _time(cell, name)
        return f"{_us(us)} ({cell['power_w'][name]:.0f} W, {cell['sm_mhz'][name]:.0f} MHz)" if us else "-"

    rows = [[label, *(text(cell, name) for cell in cells)] for name, label in columns.items()]
    return _rows([f"{cells[0]['n']} × {cells[0]['k']}, m =", *(f"{cell['m']:,}" for cell in cells)], rows)


def energy(columns: dict[str, str], document: Document) -> str:
    """A line a cell: microseconds, watts and millijoules of a call at the power limit."""

    def text(cell: Document, name: str) -> str:
        us, watts = cell["us"][name], cell["power_w"][name]
        return f"{_us(us)} ({watts:.0f} W, {us * watts / 1000:.1f} mJ)"

    rows = [
        [f"{cell['n']} × {cell['k']}", f"{cell['m']:,}", *(text(cell, name) for name in columns)]
        for cell in document["cells"]
    ]
    return _rows(["n × k", "m", *columns.values()], rows)


def layers(rows: dict[str, str], document: Document) -> str:
    """A line a contestant, microseconds of a layer for each number of tokens; first what its weights take at 4.5
    TB/s."""
    measured = {(row["contestant"], row["tokens"]): row["us"] for row in document["rows"]}
    tokens = sorted({count for _, count in measured})
    lines = [[label, *(_us(measured.get((name, count))) for count in tokens)] for name, label in rows.items()]
    return _rows(["tokens", *(str(count) for count in tokens)], lines)


def speeds(rows: Sequence[tuple[str, int, str, str]], ranges: dict[str, tuple[int, int]], *documents: Document) -> str:
    """A line a comparison and a column a range of m: from the least to the most, over all cells, of how many times as
    fast the fastest of ours is as the fastest of the others; rows: heading, which document, names of both."""
    lines = []
    for label, file, ours, others in rows:
        line = [label]
        for first, last in ranges.values():
            found = [
                (_fastest(cell, ours), _fastest(cell, others))
                for cell in documents[file]["cells"]
                if first <= cell["m"] <= last
            ]
            ratios = [theirs / mine for mine, theirs in found if mine and theirs]
            line.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
        lines.append(line)
    return _rows(["times as fast", *ranges], lines)


SERVED = (
    ("llama8b", "rotated two levels from bf16, next to FP8", 0, 'jitgemm:{"scheme":"two-level","rotation":128}', "fp8"),
    ("llama8b", "groups of 128 and e4m3, next to FP8", 0, 'jitgemm:{"group_size":128}', "fp8"),
    ("qwen3-30b", "rotated two levels from bf16, next to FP8", 2, "jitgemm", "fp8"),
    ("gpt-oss-120b", "next to vLLM's choice", 1, "jitgemm", "vllm"),
    ("gpt-oss-120b", "next to humming", 1, "jitgemm", "humming"),
)
"""Rows of the first table: the model, what is compared, which document, and both engines."""
VLLM_RATIOS = (
    ("llama8b", "next to FP8", 0, "jitgemm", "fp8"),
    ("llama8b", "sums in f16, next to FP8", 0, 'jitgemm:{"sums": "f16"}', "fp8"),
    ("llama8b", "host and GPU in turn, next to FP8", 0, "jitgemm+sync", "fp8+sync"),
    ("gpt-oss-120b", "next to vLLM's choice", 0, "jitgemm", "vllm"),
    ("gpt-oss-120b", "next to humming", 0, "jitgemm", "humming"),
    ("v4-flash-moe", "next to vLLM's choice", 0, "jitgemm", "vllm"),
    ("v4-flash-moe", "next to humming", 0, "jitgemm", "humming"),
)
SGLANG_RATIOS = (
    ("llama8b", "next to FP8", 0, "jitgemm", "fp8"),
    ("llama8b", "sums in f16, next to FP8", 0, 'jitgemm:{"sums": "f16"}', "fp8"),
    ("qwen3-30b", "next to FP8", 0, "jitgemm-w4a8", "fp8"),
    ("qwen3-30b", "next to SGLang's CUTLASS W4A8", 1, "jitgemm-w4a8", "w4a8"),
    ("gpt-oss-120b", "next to SGLang's choice", 1, "jitgemm", "sglang"),
)


def served(rows: Sequence[tuple[str, str, int, str, str]], *documents: Document, engine: str = "vLLM 0.26") -> str:
    """A line a model: how many times as fast it decodes with 1, 16 and 64 sequences, and reads prompts."""
    lines = []
    for model, what, file, ours, theirs in rows:
        found = {row["quant"]: row for row in documents[file]["rows"] if row["model"] == model}
        steps = [found[theirs][key] / found[ours][key] for key in ("step_us_1", "step_us_16", "step_us_64")]
        prompts = found[ours]["prefill_tokens_s"] / found[theirs]["prefill_tokens_s"]
        lines.append([f"{SERVED_MODELS[model]}, {what}", *(f"{each:.2f}" for each in (*steps, prompts))])
    return _rows([f"times as fast in {engine}", "1 sequence", "16", "64", "prefill"], lines)


def grid(rows: Sequence[tuple[str, str, str]], document: Document) -> str:
    """A line a contestant, a column of all m and one an m: how many times as fast as the fastest of others, geometric
    mean over the layers; and in the worst of them.

    Args:
        rows: (name, words for people, names of the others).
    """
    ms = sorted({cell["m"] for cell in document["cells"]})

    def text(found: list[float]) -> str:
        return f"{geometric_mean(found):.2f}; {min(found):.2f}" if found else "-"

    lines = [
        [label, *(text([each for _, each in _ahead(name, others, document, m)]) for m in (None, *ms))]
        for name, label, others in rows
    ]
    return _rows(["times as fast, m =", "all", *(f"{m:,}" for m in ms)], lines)


def loses(rows: dict[str, str], others: str, document: Document) -> str:
    """A line a contestant: in how many cells the fastest of the others is faster, from which m on, and the worst."""
    lines = []
    for name, label in rows.items():
        found = _ahead(name, others, document)
        behind = [(cell, each) for cell, each in found if each < 1]
        if not behind:
            lines.append([label, f"0 of {len(found)}", "-", "-"])
            continue
        worst, least = min(behind, key=lambda each: each[1])
        first = min(cell["m"] for cell, _ in behind)
        at = f"{least:.2f}: {worst['n']} × {worst['k']}, m = {worst['m']:,}"
        lines.append([label, f"{len(behind)} of {len(found)}", f"{first:,}", at])
    return _rows(["slower than FP8", "cells", "from m =", "worst"], lines)


def _ahead(name: str, others: str, document: Document, m: int | None = None) -> list[tuple[Document, float]]:
    """Cells, of one m or all, and how many times as fast the contestant is there as the fastest of the others."""
    cells = [cell for cell in document["cells"] if m in (None, cell["m"])]
    found = [(cell, _fastest(cell, name), _fastest(cell, others)) for cell in cells]
    return [(cell, theirs / mine) for cell, mine, theirs in found if mine and theirs]


def _fastest(cell: Document, names: str) -> float | None:
    return min((us for name in names.split() if (us := _time(cell, name))), default=None)


def losses(rows: Sequence[tuple[str, ...]], which: tuple[str, str], document: Document) -> str:
    """A line a format: its own words, and what it loses on each text.

    Args:
        rows: (row of the document, words for people).
        which: the model, and the text that calibrated.
    """
    header = [f"{text}: {figure}" for text in TEXTS for figure in ("perplexity", "×", "KL", "same token")]
    words = ["format", "option"][: len(rows[0]) - 1]
    return _rows([*words, *header], [[*each, *_lost(document, row, *which)] for row, *each in rows])


def _lost(document: Document, name: str, model: str = "gemma3-270m", calibrates: str = "help") -> list[str]:
    """On each text: perplexity, the same over that of the model in floats, KL divergence, and the part of tokens whose
    most probable one is the same."""
    found = {(row["row"], row["text"], row["calibrates"]): row for row in document["rows"] if row["model"] == model}
    cells = []
    for text in TEXTS:
        row, floats = found[name, text, calibrates], found["reference", text, "help"]
        kl = row["kl"]
        times = row["perplexity"] / floats["perplexity"]
        cells += [
            f"{row['perplexity']:.2f}",
            f"{times:.3f}",
            f"{kl:.3f}" if kl > 0.01 else f"{kl:.4f}",
            f"{row['same']:.2f}",
        ]
    return cells


TEXTS = "help", "news"
GEMMA = "gemma3-270m", "help"
CALIBRATED = (
    ("reference", "the model in floats", ""),
    ("two levels calibrated, rotated", "two levels, rotated, int8: the default", "(none)"),
    ("two levels calibrated", "two levels, int8", "`--scheme two-level`"),
    ("g128 calibrated", "groups of 128, e4m3", "`--scheme int4`"),
    ("g128 calibrated, rotated", "the same, rotated", "`--scheme int4 --rotation 128`"),
    ("g128 calibrated, int8", "groups of 128, int8", "`--scheme int4 --activation int8`"),
    ("g128 calibrated, int8, rotated", "the same, rotated", "`--scheme int4 --activation int8 --rotation 128`"),
    ("g128 calibrated, zero points", "groups of 128, zero points, e4m3", "`--group-size 128 --zero-point`"),
    ("g64 calibrated", "groups of 64, e4m3", "`--group-size 64`"),
    ("g32 calibrated", "groups of 32, e4m3", "`--group-size 32`"),
    ("g32 calibrated, zero points", "groups of 32, zero points, e4m3", "`--group-size 32 --zero-point`"),
    (
        "g128 calibrated, keep 8 bits",
        "groups of 128, e4m3, 37 of 126 layers in 8 bits",
        "`--scheme int4 --keep-8bit AUTO`",
    ),
    ("mxfp4 calibrated", "MXFP4, e4m3", "`--scheme mxfp4`"),
    ("mxfp4 calibrated, rotated", "the same, rotated", "`--scheme mxfp4 --rotation 128`"),
    ("8 bits calibrated", "8 bits, e4m3", "`--bits 8`"),
    ("8 bits calibrated, rotated", "the same, rotated", "`--bits 8 --rotation 128`"),
    ("8 bits calibrated, int8", "8 bits, int8", "`--bits 8 --activation int8`"),
    ("8 bits calibrated, int8, rotated", "the same, rotated", "`--bits 8 --activation int8 --rotation 128`"),
)
UNCALIBRATED = (
    ("two levels, rotated", "two levels, rotated, int8: the default"),
    ("two levels", "two levels, int8"),
    ("g128", "groups of 128, e4m3, scales of least squared error"),
    ("g128, plain rounding", "the same, plain rounding"),
    ("g128, rotated", "groups of 128, e4m3, rotated"),
    ("g128, int8", "groups of 128, int8"),
    ("g128, int8, rotated", "the same, rotated"),
    ("g128, zero points", "groups of 128, zero points, e4m3"),
    ("g32", "groups of 32, e4m3"),
    ("g32, zero points", "groups of 32, zero points, e4m3: `--data none --scheme int4`"),
    ("mxfp4", "MXFP4, e4m3"),
    ("mxfp4, rotated", "the same, rotated"),
    ("8 bits", "8 bits, e4m3"),
    ("8 bits, rotated", "the same, rotated"),
    ("8 bits, int8", "8 bits, int8"),
    ("8 bits, int8, rotated", "the same, rotated"),
)
ON_NEWS = tuple((row, words) for row, words, _ in CALIBRATED if row in (
    "two levels calibrated, rotated", "two levels calibrated", "g128 calibrated", "mxfp4 calibrated")) + (
    ("8 bits calibrated, int8, rotated", "8 bits, int8, rotated"),
)  # fmt: skip
SMOLLM = ON_NEWS[:-2] + (
    ("8 bits calibrated", "8 bits, e4m3"), ("8 bits calibrated, int8", "8 bits, int8"), ON_NEWS[-1],
)  # fmt: skip


def choices(accuracy: Document, four: Document, eight: Document) -> str:
    """A line a format: its error as one model shows it, and its times over those of the default, of one layer."""
    cells: dict[int, Document] = {m: {} for m in CHOICE_MS}
    for cell in (*eight["cells"], *four["cells"]):
        if (cell["n"], cell["k"]) == CHOICE_LAYER and cell["m"] in cells:
            cells[cell["m"]] |= cell["us"]
    lines = []
    for label, bits, row, name in CHOICES:
        times = [us[name] / us["int8_2l"] for us in cells.values()]
        lost = dict(zip(product(TEXTS, ("perplexity", "×", "KL", "same")), _lost(accuracy, row), strict=True))
        figures = [lost[text, figure] for text in TEXTS for figure in ("×", "KL")]
        lines.append([label, bits, *figures, *(f"{time:.2f}" for time in times)])
    header = [f"{text}: {figure}" for text in TEXTS for figure in ("perplexity ×", "KL")]
    return _rows(["format", "bits a weight", *header, *(f"m = {m:,}" for m in CHOICE_MS)], lines)


CHOICE_LAYER = 28672, 4096
CHOICE_MS = 1, 16, 64, 512, 4096
CHOICES = (
    ("two levels, rotated, int8: the default", "4.125", "two levels calibrated, rotated", "int8_2l"),
    ("groups of 128, e4m3", "4.125", "g128 calibrated", "e4m3_g128"),
    ("groups of 64, e4m3", "4.25", "g64 calibrated", "e4m3_g64"),
    ("groups of 32, e4m3", "4.5", "g32 calibrated", "e4m3_g32"),
    ("groups of 128, zero points, e4m3", "4.2", "g128 calibrated, zero points", "e4m3_g128z"),
    ("groups of 128, rotated, int8", "4.125", "g128 calibrated, int8, rotated", "int8_g128"),
    ("MXFP4, e4m3; time with a base a row", "4.25", "mxfp4 calibrated", "mxfp4_ch"),
    ("8 bits, e4m3", "8", "8 bits calibrated", "w8_e4m3_ch"),
    ("8 bits, rotated, int8", "8", "8 bits calibrated, int8, rotated", "w8_int8_ch"),
)
"""A format's name for people, bits a weight with bf16 scales, its row of accuracy_h200.json and its contestant."""


def whole_layers(columns: dict[str, str], document: Document) -> str:
    """A line a model and number of tokens, microseconds of the expert layer by mode."""
    measured = {(row["model"], row["tokens"], row["mode"]): row["us"] for row in document["rows"]}
    cells = dict.fromkeys((model, tokens) for model, tokens, _ in measured)
    rows = [
        [model, f"{tokens:,}", *(_us(measured.get((model, tokens, mode))) for mode in columns)]
        for model, tokens in cells
    ]
    return _rows(["model", "tokens", *columns.values()], rows)


SERVED_MODELS = {
    "llama8b": "Llama-3-8B", "gpt-oss-120b": "gpt-oss-120b, MXFP4",
    "v4-flash-moe": "DeepSeek-V4-Flash's experts, MXFP4",
    "qwen3-30b": "Qwen3-30B-A3B",
}  # fmt: skip
VLLM_ENGINES = {
    "fp8": "FP8, per tensor", "humming": "humming, e4m3 activations", "marlin": "Marlin, bf16 activations",
    "vllm": "vLLM's choice", "jitgemm": "jitgemm", "jitgemm-w4a8": "jitgemm",
    'jitgemm:{"sums": "f16"}': "jitgemm, sums in f16",
    'jitgemm:{"group_size": -1}': "jitgemm, a scale per row",
    'jitgemm:{"group_size":128}': "jitgemm, e4m3, groups of 128",
    'jitgemm:{"scheme":"two-level","rotation":128}': "jitgemm, int8, two levels, rotated",
    "fp8+sync": "FP8, host and GPU in turn", "jitgemm+sync": "jitgemm, host and GPU in turn",
}  # fmt: skip


SGLANG_ENGINES = {
    "bf16": "bf16", "fp8": "FP8", "jitgemm": "jitgemm", "jitgemm-w4a8": "jitgemm",
    'jitgemm:{"sums": "f16"}': "jitgemm, sums in f16", "sglang": "SGLang's choice",
    "w4a8": "SGLang's CUTLASS W4A8, linears in bf16",
}  # fmt: skip


def engines(labels: dict[str, str], document: Document) -> str:
    """A line a model and engine: microseconds a decode step by sequences, and tokens a second of prefill. Models that
    one engine alone served are left out."""
    columns = ("step_us_1", "step_us_16", "step_us_64", "prefill_tokens_s")
    compared = Counter(row.get("model", "llama8b") for row in document["rows"])
    rows = [
        [SERVED_MODELS[row["model"]], labels[row["quant"]], *(f"{row[key]:,}" for key in columns)]
        for row in sorted(document["rows"], key=lambda row: list(SERVED_MODELS).index(row.get("model", "llama8b")))
        if all(key in row for key in columns) and compared[row.get("model", "llama8b")] > 1
    ]
    return _rows(["model", "engine", "1 sequence", "16", "64", "prefill, tokens/s"], rows)


def divided(columns: dict[str, str], document: Document) -> str:
    """A line for each activation and number of a rank's tokens."""
    rows = [[row["activation"], f"{row['tokens']:,}", *(_us(row[key]) for key in columns)] for row in document["rows"]]
    return _rows(["activations", "tokens of a rank", *columns.values()], rows)


TORCH = {"fp8row": "FP8, a scale a row", "fp8ten": "FP8, a scale a tensor"}
FORMATS = {
    "e4m3_g128": "groups of 128",
    "e4m3_g128_f16": "groups of 128, f16 sums",
    "e4m3_g64": "groups of 64",
    "e4m3_g64_f16": "groups of 64, f16 sums",
    "e4m3_g32": "groups of 32",
    "e4m3_g32_f16": "groups of 32, f16 sums",
    "e4m3_g128z": "zero points",
    "e4m3_g128z_f16": "zero points, f16 sums",
    "e4m3_g128_b128": "activations' scales per 128 k",
    "e4m3_g128_b128e": "the same in e8m0",
    "e4m3_g128_bi": "batch-invariant",
    "mxfp4_ch": "MXFP4, a base a row",
    "mxfp4_g128": "MXFP4, a base for 128 k",
    "mxfp4_g128_f16": "MXFP4, a base for 128 k, f16 sums",
    "mxfp4_g32": "MXFP4, a scale for 32 k",
    "mxfp4_g32_f16": "MXFP4, a scale for 32 k, f16 sums",
    "nvfp4_g16": "NVFP4",
    "int8_ch": "int8, per channel",
    "int8_2l": "int8, two levels",
    "int8_g128": "int8, groups of 128",
    "int8_g64": "int8, groups of 64",
    "int8_g32": "int8, groups of 32",
    "int8_g128z": "int8, zero points",
    "int8_g128z_x": "int8, zero points as corrections",
    "int8_g128o": "int8, offsets",
    "int8_g128o_x": "int8, offsets as corrections",
    "int8_g128_b128": "int8, activations' scales per 128 k",
}
W8 = {
    "w8_e4m3_ch": "e4m3", "w8_int8_ch": "int8", "w8_e4m3_block": "e4m3 in blocks", "w8_int8_block": "int8 in blocks",
    "w8_e4m3_block_b128": "both in blocks", **TORCH, "fp8block": "FP8, both in blocks",
}  # fmt: skip
OURS = {"e4m3_g128": "e4m3", "e4m3_g128_f16": "e4m3, f16 sums", "int8_g128": "int8", "int8_ch": "int8 per channel"}
HUMMING = {"hum_fp8_g128": "humming e4m3", "hum_int8_g128": "humming int8", "hum_int8_ch": "humming int8 per channel"}
PEERS = {"hum_fp8_g128": "humming e4m3", "hum_int8_ch": "humming int8 per channel", "vllm_w4a8": "vLLM's CUTLASS",
         "fp8row": "FP8", "bf16": "bf16"}  # fmt: skip

LAYER = {
    "floor": "weights at 4.5 TB/s", "gemms": "the GEMMs alone", "hand": "calls by hand, fused",
    "compiled": "modules, `torch.compile`", "hand-attention": "calls by hand, two kernels of PyTorch ahead of o_proj",
    "modules": "modules", "bf16": "modules in bf16, `torch.compile`",
}  # fmt: skip

RANGES = {"decode, m ≤ 64": (1, 64), "m = 128 and 256": (65, 256), "prefill, m ≥ 512": (257, 4096)}
SPEEDS = (
    ("int8 per channel, next to the fastest of PyTorch", 0, "int8_ch", "fp8row fp8ten bf16 int8mm"),
    ("e4m3 in groups of 128, next to the fastest of PyTorch", 0, "e4m3_g128", "fp8row fp8ten bf16 int8mm"),
    ("the same, sums in f16", 0, "e4m3_g128_f16", "fp8row fp8ten bf16 int8mm"),
    ("e4m3 in groups of 128, next to humming's", 1, "e4m3_g128", "hum_fp8_g128"),
    ("int8 per channel, next to humming's", 1, "int8_ch", "hum_int8_ch"),
)
FEW_OR_MANY = {"up to 128 tokens": (1, 128), "1,024 and 4,096 tokens": (129, 4096)}
EXPERTS_SPEEDS = (
    ("e4m3 in groups of 128, next to humming's", 0, "e4m3_g128", "hum_fp8_g128"),
    ("the fastest format, next to the fastest peer", 0, " ".join(OURS), " ".join(PEERS)),
    ("e4m3, sums in f16, next to sums in fp32", 0, "e4m3_g128_f16", "e4m3_g128"),
    (
        "MXFP4 with a base a row, next to the fastest of humming's",
        1,
        "mxfp4_ch",
        "hum_mxfp4 hum_mxfp4_b128 hum_mxfp4_a16",
    ),
)
EXPERTS_W8_SPEEDS = (
    ("e4m3, next to FP8 of PyTorch", 0, "w8_e4m3_ch", "fp8row"),
    ("both in blocks, next to the faster of DeepGEMM's", 0, "w8_e4m3_block_b128", "dg_fp8_block dg_fp8_block_masked"),
)  # fmt: skip

GRID = {
    "int8_ch": "int8, per channel", "int8_2l": "int8, two levels", "e4m3_g128_f16": "e4m3, groups of 128, sums in f16",
    "e4m3_g128": "e4m3, groups of 128, exact", "mxfp4_ch": "MXFP4, a base a row",
}  # fmt: skip
GRID_HUMMING = (
    ("e4m3_g128", "e4m3, groups of 128", "hum_fp8_g128"),
    ("int8_ch", "int8, per channel", "hum_int8_ch"),
    ("int8_2l", "int8, two levels; humming's groups of 128 made integers", "hum_int8_g128"),
    ("mxfp4_ch", "MXFP4, a base a row; humming's per token", "hum_mxfp4"),
)
TABLES: dict[str, tuple[str, Callable[..., str]]] = {
    "served": ("vllm_two_level_h200 vllm_h200 vllm_qwen_h200", partial(served, SERVED)),
    "speeds": ("h200 peers_h200", partial(speeds, SPEEDS, RANGES)),
    "experts-speeds": ("moe_h200 moe_mxfp4_h200", partial(speeds, EXPERTS_SPEEDS, FEW_OR_MANY)),
    "experts-layer": ("moe_layer_w8_h200", partial(
        whole_layers, {"e4m3": "4 bits, e4m3", "w8-e4m3": "8 bits, e4m3", "w8-int8": "8 bits, int8",
                       "w8-e4m3-block": "8 bits, e4m3 in blocks"})),
    "experts-w8-speeds": ("moe_w8_h200", partial(speeds, EXPERTS_W8_SPEEDS, FEW_OR_MANY)),
    "accuracy": ("accuracy_h200", partial(losses, CALIBRATED, GEMMA)),
    "accuracy-weights": ("accuracy_h200", partial(losses, UNCALIBRATED, GEMMA)),
    "accuracy-news": ("accuracy_h200", partial(losses, ON_NEWS, ("gemma3-270m", "news"))),
    "accuracy-smollm": ("accuracy_h200", partial(losses, SMOLLM, ("smollm2-135m", "help"))),
    "choosing": ("accuracy_h200 formats_h200 w8_h200", choices),
    "torch": ("h200", partial(
        times, OURS | {"e4m3_g128_any": "e4m3, codes of any"} | TORCH | {"bf16": "bf16", "int8mm": "int8, no scales"})),
    "humming": ("peers_h200", partial(
        times, {"e4m3_g128": "e4m3", "int8_g128": "int8", "int8_ch": "int8 per channel"} | HUMMING)),
    "formats-wide": ("formats_h200", partial(ratios, "e4m3_g128", FORMATS, (28672, 4096))),
    "formats-square": ("formats_h200", partial(ratios, "e4m3_g128", FORMATS, (4096, 4096))),
    "grid": ("grid_h200", partial(grid, [(*row, " ".join(TORCH)) for row in GRID.items()])),
    "grid-humming": ("grid_peers_h200", partial(grid, GRID_HUMMING)),
    "grid-loses": ("grid_h200", partial(loses, GRID, " ".join(TORCH))),
    "w8": ("w8_h200", partial(times, W8)),
    "sustained": ("sustained_h200", partial(
        held, OURS | {"w8_e4m3_ch": "8 bits, e4m3", "w8_int8_ch": "8 bits, int8", "hum_fp8_g128": "humming e4m3"}
        | TORCH)),
    "sustained-two-level": ("sustained_two_level_h200", partial(
        energy, {"int8_2l": "int8, two levels", "e4m3_g128": "e4m3, groups of 128", "fp8row": "FP8, a scale a row"})),
    "layer": ("layer_h200", partial(layers, LAYER)),
    "experts-mxfp4": ("moe_mxfp4_h200", partial(
        times, {"mxfp4_ch": "a base a row", "mxfp4_g128": "a base for 128 k", "mxfp4_g32": "a scale for 32 k",
                  "e4m3_g128": "int4, groups of 128", "hum_mxfp4": "humming, per token",
                  "hum_mxfp4_b128": "humming, per 128 k", "hum_mxfp4_a16": "humming, bf16"})),
    "experts-w8": ("moe_w8_h200", partial(
        times, {"w8_e4m3_ch": "e4m3", "w8_int8_ch": "int8", "w8_e4m3_block": "e4m3 in blocks",
                  "w8_e4m3_block_b128": "both in blocks", "dg_fp8_block": "DeepGEMM", "dg_fp8_block_masked": "masked",
                  "fp8row": "FP8", "bf16": "bf16"})),
    "experts": ("moe_h200", partial(times, OURS | {"int8_2l": "int8, two levels"} | PEERS)),
    "experts-g32": ("moe_g32_h200", partial(
        times, {"e4m3_g32": "e4m3", "e4m3_g32_f16": "e4m3, f16 sums", "int8_g32": "int8"})),
    "experts-divided": ("experts_h100", partial(
        divided, {"one_us": "one GPU", "shared_us": "shared", "one_all_us": "one GPU, all tokens", "own_us":
                  "collectives", "nvlink_us": "nvlink", "any_us": "any number"})),
    "vllm": ("vllm_h200", partial(engines, VLLM_ENGINES)),
    "vllm-two-level": ("vllm_two_level_h200", partial(engines, VLLM_ENGINES)),
    "vllm-qwen": ("vllm_qwen_h200", partial(engines, VLLM_ENGINES)),
    "vllm-ratios": ("vllm_h200", partial(served, VLLM_RATIOS)),
    "sglang-ratios": ("sglang_h200 sglang_h100", partial(served, SGLANG_RATIOS, engine="SGLang")),
    "sglang": ("sglang_h200", partial(engines, SGLANG_ENGINES)),
    "sglang-experts": ("sglang_h100", partial(engines, SGLANG_ENGINES)),
}  # fmt: skip
"""Name in a page, files of results, and what makes the table of them."""
_MARKED = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def run_of(document: Document) -> str:
    """Device, date and commit of a file of results."""
    environment = document.get("environment", document)
    return f"{environment['device']}, {document['date'][:10]}, commit {str(environment['commit'])[:7]}"


def with_tables(text: str, results: Path = RESULTS) -> str:
    """A page with each table between `<!-- table NAME -->` and `<!-- end -->` made again, and a line on the run."""

    def table(match: re.Match[str]) -> str:
        files, make = TABLES[match[2]]
        documents = {name: json.loads((results / f"{name}.json").read_text()) for name in files.split()}
        runs: dict[str, list[str]] = {}
        for name, document in documents.items():
            runs.setdefault(run_of(document), []).append(f"{name}.json")
        line = "; ".join(f"{run}, {' and '.join(names)}" for run, names in runs.items())
        return f"{match[1]}\n{make(*documents.values())}\n\n{line}\n\n{match[3]}"

    return _MARKED.sub(table, text)


def _run(command: Sequence[str], log: TextIO) -> tuple[int, bool]:
    """A benchmark's exit status, and whether Ctrl-C came, which both get: it then ends by itself, with what it has
    measured."""
    child, stopped = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log), False
    while True:
        try:
            return child.wait(), stopped
        except KeyboardInterrupt:
            stopped = True


# ---- commands --------------------------------------------------------------------------------------------------------


@app.command()
@common.guarded
def measure(
    only: Annotated[list[str] | None, typer.Option("--only", metavar="|".join(RUNS), help="May be repeated.")] = None,
) -> None:
    """Run every benchmark that a table of the documentation shows; needs an H200 to itself, and 18 minutes.

    A run that fails is named, and the others go on. What the benchmark wrote stays in build/performance, for its
    --compare. Interrupted, the cells that were done are kept.
    """
    unknown = set(only or ()) - set(RUNS)
    if unknown:
        raise ValueError(f"--only: expected names of {', '.join(RUNS)}, got {', '.join(sorted(unknown))}")
    failed = []
    for name in only or RUNS:
        started = time.monotonic()
        raw = ROOT / "build" / "performance" / f"{name}.json"
        raw.parent.mkdir(parents=True, exist_ok=True)
        with raw.with_suffix(".log").open("w") as log:
            raw.unlink(missing_ok=True)
            code, stopped = _run([sys.executable, *RUNS[name], "--json", str(raw)], log)
        common.note(f"{name}: {time.monotonic() - started:.0f} s, {'stopped' if stopped else f'exit status {code}'}")
        if raw.exists():
            write(RESULTS / f"{name}.json", shown(json.loads(raw.read_text())))
        if stopped:
            raise KeyboardInterrupt
        failed += [name] if code else []
    if failed:
        raise OSError(f"not measured: {', '.join(failed)}")


@app.command()
@common.guarded
def collect(
    lines: Annotated[
        Path, typer.Argument(metavar="RESULTS.jsonl", help="Of scripts/vllm_engine.py or sglang_engine.py.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.json", help="A file of results, as in docs/performance.")],
) -> None:
    """Write a table's file of results from the rows that a run of an engine's script appended; needs no GPU."""
    rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").split("\n") if line]
    runs = [(row.pop("date"), {"device": row.pop("device"), "commit": row.pop("commit")}) for row in rows]
    if any(run != runs[0] for run in runs):
        raise ValueError(f"{lines}: expected rows of one date, device and commit, got {runs}")
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row.pop("versions", {})
        row.pop("rounds", None)
    date, environment = runs[0]
    write(out, {"date": date, "environment": environment | versions, "rows": rows})


@app.command()
@common.guarded
def pages(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if a page or the picture differs.")
    ] = False,
) -> None:
    """Write the tables and the picture of README and docs from the files in docs/performance; needs no GPU."""
    different = []
    for page in PAGES:
        text = page.read_text()
        made = with_tables(text)
        if made != text:
            different.append(page.name)
            if not check:
                page.write_text(made)
    if (picture := RESULTS / "speed.svg").read_text() != (made := pictures.speed(RESULTS)):
        different.append(picture.name)
        if not check:
            picture.write_text(made)
    common.out().print(f"{'differ' if check else 'written'}: {', '.join(different) or 'none'}")
    if check and different:
        raise typer.Exit(common.FOUND)


if __name__ == "__main__":
    app()
