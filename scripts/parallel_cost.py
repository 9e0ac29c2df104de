#!/usr/bin/env python3
"""What a layer takes on several GPUs and nodes: a simulation, no measurement. `python scripts/parallel_cost.py --help`.

Pure functions over frozen dataclasses. GEMMs are the selector's predictions for an H200; quantisers a line through
docs/performance/quantize_h200.json; collectives a latency and bytes over a rate, which two measured points calibrate;
so are the kernels that exchange tokens over NVLink, by two points of docs/performance/experts_h100.json.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from jitgemm.cli import common
from jitgemm.kernel.formats import Problem, WeightFormat, tuned_order
from jitgemm.select.choose import choose
from jitgemm.select.devices import DEVICES
from jitgemm.select.cost import predict

# ---- figures. Rates in bytes per microsecond: 1e3 is 1 GB/s. ---------------------------------------------------------

DEVICE = DEVICES["h200"]
GROUP_SIZE = 128
QUANTISE_US, QUANTISE_ROW_RATE, QUANTISE_RATE = 1.5, 6.3e4, 3.9e6
"""A quantiser's start, bytes of a row over a rate and bytes of all rows over another: within 30 % of every figure of
docs/performance/quantize_h200.json for bf16 without zero points and permutations."""

HIDDEN, WORLD = 4096, 2
MEASURED = {1: (17.9, 25.2), 2048: (302.0, 403.0)}
"""Llama-3-8B's MLP on two H200s of one host, e4m3, by m: microseconds without and with NCCL's all-reduce of its output,
in CUDA graphs."""
NVLINK = 450e3
"""NVLink 4 of an H200, one direction: data sheet, 900 GB/s both directions together."""
NETWORK, NETWORK_SHARE = 50e3, 0.8
"""InfiniBand NDR, 400 Gb/s for each GPU; and the part of it that transfers reach, assumed."""
STEP_US, NETWORK_STEP_US = 0.47, 2.7
"""A step of a ring over NVLink and between nodes, as NCCL's own tuner takes them (src/graph/tuning.cc, ring, LL)."""
MEASURED_EXPERTS = Path(__file__).resolve().parent.parent / "docs" / "performance" / "experts_h100.json"
"""Qwen3-30B-A3B's experts on one GPU and divided between two, in microseconds: `scripts/end_to_end.py ep`."""


def _all_reduce_bytes(ranks: int, nbytes: float) -> float:
    """What a rank sends of an all-reduce in a ring."""
    return 2 * (ranks - 1) / ranks * nbytes


def _calibrated() -> tuple[float, float]:
    """(start_us, share): a collective's start, and NVLink's part that transfers reach, by which MEASURED is met."""
    (few, *least), (many, *most) = ((m, with_it - without) for m, (without, with_it) in MEASURED.items())
    sent = [_all_reduce_bytes(WORLD, 2 * m * HIDDEN) for m in (few, many)]
    rate = (sent[1] - sent[0]) / (most[0] - least[0])
    return least[0] - sent[0] / rate - 2 * (WORLD - 1) * STEP_US, rate / NVLINK


START_US, NVLINK_SHARE = _calibrated()


@dataclass(frozen=True)
class Cluster:
    """GPUs and what connects them; rates of one GPU, one direction.

    Attributes:
        gpus_per_node: GPUs that NVLink connects.
        nvlink, network: bytes per microsecond that transfers reach within a node and between nodes.
    """

    gpus_per_node: int = 8
    nvlink: float = NVLINK * NVLINK_SHARE
    network: float = NETWORK * NETWORK_SHARE

    def all_reduce_us(self, ranks: int, nbytes: float) -> float:
        """Of so many bytes on every rank, within a node."""
        if ranks == 1:
            return 0.0
        return START_US + 2 * (ranks - 1) * STEP_US + _all_reduce_bytes(ranks, nbytes) / self.nvlink

    def exchange_us(self, ranks: int, nbytes: float) -> float:
        """Kernels of every rank of a node write so many bytes, there and back together, to each other one."""
        start, share = exchange_figures()
        return start + (ranks - 1) * nbytes / (share * self.nvlink)

    def all_to_all_us(self, ranks: int, nbytes: float) -> float:
        """Every rank sends so many bytes to each other one; both kinds of links carry theirs at once."""
        near = min(ranks, self.gpus_per_node) - 1
        far = ranks - 1 - near
        step = NETWORK_STEP_US if far else STEP_US
        return START_US + step + max(near * nbytes / self.nvlink, far * nbytes / self.network)


@dataclass(frozen=True)
class Linear:
    """One GEMM of a layer, weight [n, k]; cut along "n" or "k", or whole on every rank.

    Attributes:
        per_k: bytes that its quantiser reads and writes for each k of a token: 3 with bf16 in, 5 behind silu * up.
    """

    n: int
    k: int
    cut: str = ""
    per_k: int = 3


@dataclass(frozen=True)
class Experts:
    count: int
    top_k: int
    inter: int


@dataclass(frozen=True)
class Model:
    """The GEMMs of one decoder layer, q, k, v and gate, up as one; attention itself is not counted.

    Attributes:
        kv_heads: ranks that attention can be divided among at most.
        layouts: (tp, gpus) that the table has: attention divided among tp, experts among all.
    """

    name: str
    hidden: int
    kv_heads: int
    linears: tuple[Linear, ...]
    layouts: tuple[tuple[int, int], ...]
    experts: Experts | None = None


DENSE = ((1, 1), (2, 2), (4, 4), (8, 8))
MODELS = {
    each.name: each
    for each in (
        Model(
            "Llama-3-8B", 4096, 8,
            (Linear(6144, 4096, "n"), Linear(4096, 4096, "k"), Linear(28672, 4096, "n"), Linear(4096, 14336, "k", 5)),
            DENSE,
        ),
        Model(
            "Llama-3-70B", 8192, 8,
            (Linear(10240, 8192, "n"), Linear(8192, 8192, "k"), Linear(57344, 8192, "n"), Linear(8192, 28672, "k", 5)),
            DENSE,
        ),
        Model(
            "Qwen3-30B-A3B", 2048, 4,
            (Linear(5120, 2048, "n"), Linear(2048, 4096, "k")),
            ((1, 1), (2, 2), (4, 4), (1, 2), (1, 4), (1, 8), (2, 8)),
            Experts(128, 8, 768),
        ),
        Model(  # latent attention: its two narrow projections stay whole; one shared expert
            "DeepSeek-V3", 7168, 128,
            (
                Linear(2112, 7168), Linear(24576, 1536, "n"), Linear(32768, 512, "n"), Linear(7168, 16384, "k"),
                Linear(4096, 7168, "n"), Linear(7168, 2048, "k", 5),
            ),
            ((8, 8), (1, 8), (1, 16), (1, 32), (4, 32)),
            Experts(256, 8, 2048),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Microseconds of one layer; wait: for the host, behind all that the device does.

    `rows` is how tokens travel to experts: "nvlink", "max_tokens" or "any", as ExpertParallel's; "" where they do not.
    """

    gemm_us: float
    quantise_us: float
    collective_us: float
    wait_us: float = 0.0
    rows: str = ""

    @property
    def us(self) -> float:
        return self.gemm_us + self.quantise_us + self.communication_us

    @property
    def communication_us(self) -> float:
        return self.collective_us + self.wait_us


def gemm_us(m: int, n: int, k: int, experts: int = 0) -> float:
    """The selector's prediction: e4m3, groups of 128, bf16 out; with experts of m rows together, evenly routed."""
    group = GROUP_SIZE if k > GROUP_SIZE else 0
    problem = Problem(
        m, n, k, "e4m3", WeightFormat(group, False, "bf16", tuned_order("e4m3", group, False, k)), experts=experts
    )
    return predict(choose(problem, DEVICE), problem, DEVICE).predicted_us


def quantise_us(m: int, k: int, per_k: int = 3) -> float:
    return QUANTISE_US + k * per_k / QUANTISE_ROW_RATE + m * k * per_k / QUANTISE_RATE


def layer(model: Model, cluster: Cluster, m: int, tp: int, gpus: int, code_bytes: int = 1) -> Cost:
    """A decoder layer on `gpus` GPUs, of which every `tp` share m tokens and divide attention and dense layers.

    Experts are divided among all GPUs. Where they are those of one group, all have the same tokens, and sums are
    all-reduced; else each rank sends its m / tp tokens and gets bf16 back, by what is fastest: kernels within a node,
    all tokens to all ranks, or each to its experts' ranks, which the host has to launch.

    Args:
        code_bytes: of an activation that travels to an expert: 1 for codes, 2 for bf16.

    Raises:
        ValueError: sizes that the ranks cannot share.
    """
    experts = model.experts
    heads, node = model.kv_heads, cluster.gpus_per_node
    if heads % tp or tp > node or gpus % tp or (experts is None and gpus != tp):
        raise ValueError(
            f"layout: expected tp up to {node} that divides {heads} heads and the GPUs, and is all of them without "
            f"experts, got {tp}x{gpus} for {model.name}"
        )
    gemm = quantise = collective = wait = 0.0
    rows_go = ""
    for linear in model.linears:
        n = linear.n // tp if linear.cut == "n" else linear.n
        k = linear.k // tp if linear.cut == "k" else linear.k
        gemm += gemm_us(m, n, k)
        quantise += quantise_us(m, k, linear.per_k)
        if linear.cut == "k":
            collective += cluster.all_reduce_us(tp, 2 * m * n)
    if experts is not None:
        if experts.count % gpus:
            raise ValueError(f"layout: expected GPUs that share {experts.count} experts alike, got {gpus}")
        tokens, own = math.ceil(m / tp), experts.count // gpus
        rows = max(1, m * experts.top_k // gpus if gpus == tp else tokens * experts.top_k)
        gemm += gemm_us(rows, 2 * experts.inter, model.hidden, own) + gemm_us(rows, model.hidden, experts.inter, own)
        quantise += quantise_us(m if gpus == tp else tokens, model.hidden) + quantise_us(rows, experts.inter, 5)
        if gpus == tp:
            collective += cluster.all_reduce_us(tp, 2 * m * model.hidden)
        else:
            goes, there, back = exchanged(model, gpus, code_bytes)
            everywhere = sum(cluster.all_to_all_us(gpus, tokens * each) for each in (there, back))
            wanted = sum(cluster.all_to_all_us(gpus, goes * tokens * each) for each in (0, there, back))
            launched = max(wanted, host_us() - gemm - quantise - collective)
            over_nvlink = cluster.exchange_us(gpus, goes * tokens * (there + back)) if gpus <= node else math.inf
            if over_nvlink <= min(everywhere, launched):
                rows_go, collective = "nvlink", collective + over_nvlink
            elif everywhere <= launched:
                rows_go, collective = "max_tokens", collective + everywhere
            else:
                rows_go, collective, wait = "any", collective + wanted, launched - wanted
    return Cost(gemm, quantise, collective, wait, rows_go)


def exchanged(model: Model, gpus: int, code_bytes: int = 1) -> tuple[float, int, int]:
    """The share of other ranks that a token needs, all experts as likely; its bytes on the way there, and back."""
    experts = model.experts
    assert experts is not None
    others = experts.count - experts.count // gpus
    goes = 1 - math.comb(others, experts.top_k) / math.comb(experts.count, experts.top_k)
    there = model.hidden * code_bytes + (4 if code_bytes == 1 else 0) + 8 * experts.top_k  # scale; choices and weights
    return goes, there, 2 * model.hidden


def experts_us(tokens: int, experts: int) -> float:
    """So many of Qwen3-30B-A3B's experts on a GPU, with as many choices as these tokens have."""
    model = MODELS["Qwen3-30B-A3B"]
    assert model.experts is not None
    rows, inter = tokens * model.experts.top_k, model.experts.inter
    us = gemm_us(rows, 2 * inter, model.hidden, experts) + gemm_us(rows, model.hidden, inter, experts)
    return us + quantise_us(tokens, model.hidden) + quantise_us(rows, inter, 5)


@cache
def measured_experts() -> list[dict[str, Any]]:
    return json.loads(MEASURED_EXPERTS.read_text())["rows"]


@cache
def host_us() -> float:
    """What the host takes for a layer that exchanges any number of tokens, which no CUDA graph captures: the least."""
    return min(row["any_us"] for row in measured_experts())


@cache
def measured_exchanges() -> dict[int, tuple[float, float]]:
    """By tokens of each of two ranks: microseconds of a rank's experts alone, and with the exchange over NVLink.

    The first is a measured layer of all experts on one GPU with as many choices, times what the selector predicts for
    half of the experts over what it predicts for all.
    """
    rows = [row for row in measured_experts() if row["activation"] == "e4m3"]
    experts = MODELS["Qwen3-30B-A3B"].experts
    assert experts is not None
    parts = {
        t: experts_us(t, experts.count // WORLD) / experts_us(t, experts.count) for t in (r["tokens"] for r in rows)
    }
    return {row["tokens"]: (parts[row["tokens"]] * row["one_us"], row["nvlink_us"]) for row in rows}


@cache
def exchange_figures() -> tuple[float, float]:
    """(start_us, share): of an exchange by kernels, and its rate over that of collectives, by the outer two points."""
    measured = measured_exchanges()
    few, many = min(measured), max(measured)
    least, most = (with_it - without for without, with_it in (measured[few], measured[many]))
    goes, there, back = exchanged(MODELS["Qwen3-30B-A3B"], WORLD)
    a_token = goes * (there + back)
    rate = (many - few) * a_token / (most - least)
    return least - few * a_token / rate, rate / Cluster().nvlink


def mlp_us(m: int) -> tuple[float, float]:
    """Llama-3-8B's MLP on two ranks without and with its all-reduce: what MEASURED has."""
    _, _, up, down = MODELS["Llama-3-8B"].linears
    us = gemm_us(m, up.n // WORLD, up.k) + gemm_us(m, down.n, down.k // WORLD)
    us += quantise_us(m, up.k, up.per_k) + quantise_us(m, down.k // WORLD, down.per_k)
    return us, us + Cluster().all_reduce_us(WORLD, 2 * m * HIDDEN)


def rows_of(models: Sequence[Model], cluster: Cluster, ms: Sequence[int], layouts: Any = None) -> Iterator[dict]:
    """A row for each model, layout and m; speedup: over one GPU with all of the layer and all tokens."""
    for model in models:
        for tp, gpus in layouts or model.layouts:
            for m in ms:
                cost, one = layer(model, cluster, m, tp, gpus), layer(model, cluster, m * gpus // tp, 1, 1)
                row = {"model": model.name, "tp": tp, "gpus": gpus, "m": m, "us": cost.us, **asdict(cost)}
                row |= {"communication": cost.communication_us / cost.us, "speedup": one.us / cost.us}
                if model.experts and gpus > tp:
                    row["us_with_bf16"] = layer(model, cluster, m, tp, gpus, code_bytes=2).us
                yield row


# ---- the command -----------------------------------------------------------------------------------------------------


def _numbers(option: str, text: str, example: str) -> list[tuple[int, ...]]:
    """Of a list like the example."""
    parts = [part.split("x") for part in text.split(",")]
    width = 1 + example.partition(",")[0].count("x")
    if any(len(part) != width or not all(each.isdecimal() and int(each) for each in part) for part in parts):
        raise ValueError(f"{option}: expected a list such as {example}, got {text!r}")
    return [tuple(map(int, part)) for part in parts]


app = common.command_line()


@app.command()
@common.guarded
def simulate(
    model: Annotated[
        Optional[list[str]],
        typer.Option("--model", metavar="|".join(MODELS), help="May be repeated.", show_default="all"),
    ] = None,
    m: Annotated[str, typer.Option("--m", metavar="LIST", help="Tokens of a group of TP GPUs.")] = "1,16,64,256,4096",
    layout: Annotated[
        Optional[str],
        typer.Option("--layout", metavar="LIST", help="TPxGPUS, such as 1x1,2x2,1x8.", show_default="the model's"),
    ] = None,
    nvlink: Annotated[
        float, typer.Option("--nvlink", min=1, help="GB/s within a node that transfers reach, one direction.")
    ] = round(NVLINK * NVLINK_SHARE / 1e3),
    network: Annotated[
        float, typer.Option("--network", min=1, help="GB/s between nodes that transfers reach, one direction.")
    ] = round(NETWORK * NETWORK_SHARE / 1e3),
    as_json: common.Json = False,
) -> None:
    """Simulate a decoder layer on several H200s and nodes of 8: tensor parallel, expert parallel, and both.

    No figure of the table is measured. GEMMs are the selector's predictions (e4m3, groups of 128), quantisers a line
    through measured times, collectives start + steps + bytes / rate, after the library's own: two all-reduces of bf16 a
    dense layer; tokens to experts as 8-bit codes, back as bf16: by kernels over NVLink within a node, all to all ranks, or
    each where it is wanted, whichever is fastest. Left out: attention itself, routing, experts that are chosen more often than others, and overlap of GEMMs
    and collectives.

    \b
    A row is a layout: TP x GPUs. Each group of TP GPUs has m tokens and divides attention and dense layers; experts
    are divided among all GPUs. A cell is
      us of a layer, times as fast as one GPU with the whole layer and the tokens of all groups, % communication
    and for GPUs > TP, where tokens travel, the row below says how many % longer it takes if they travel as bf16.

    \b
    Examples:
      python scripts/parallel_cost.py
      python scripts/parallel_cost.py --model DeepSeek-V3 --layout 1x8,1x64 --network 25
      python scripts/parallel_cost.py --json > cost.json

    \b
    Exit codes:
      0  done
      2  wrong arguments
    """
    for name in model or ():
        if name not in MODELS:
            raise ValueError(f"--model: expected one of {', '.join(MODELS)}, got {name!r}")
    ms = [number for (number,) in _numbers("--m", m, "1,16,2048")]
    layouts = None if layout is None else _numbers("--layout", layout, "1x1,2x2,1x8")
    cluster = Cluster(nvlink=nvlink * 1e3, network=network * 1e3)
    rows = list(rows_of([MODELS[name] for name in model or MODELS], cluster, ms, layouts))
    if as_json:
        calibration = {m: dict(zip(("measured_us", "predicted_us"), (MEASURED[m], mlp_us(m)))) for m in MEASURED}
        figures = {"start_us": START_US, "step_us": STEP_US, "network_step_us": NETWORK_STEP_US, "host_us": host_us()}
        start, share = exchange_figures()
        figures |= {"exchange_start_us": start, "exchange_share": share}
        common.print_json(
            {"simulated": True, "cluster": asdict(cluster), **figures, "calibration": calibration, "rows": rows}
        )
        return
    lines = []
    for begin in range(0, len(rows), len(ms)):
        of = rows[begin : begin + len(ms)]
        name = of[0]["model"] if not lines or of[0]["model"] != rows[begin - 1]["model"] else ""
        cells = [f"{row['us']:.0f} {row['speedup']:.2f}x {row['communication']:3.0%}" for row in of]
        lines.append((name, f"{of[0]['tp']} x {of[0]['gpus']}", *cells))
        if "us_with_bf16" in of[0]:
            lines.append(("", "bf16", *(f"+{row['us_with_bf16'] / row['us'] - 1:.0%}" for row in of)))
    common.out().print(common.table(("simulated", "TP x GPUs", *(f"m = {each}" for each in ms)), lines, ("simulated",)))


if __name__ == "__main__":
    app()
