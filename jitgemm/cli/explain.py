"""`jitgemm explain`: the selector's candidates for a GEMM, what it predicts for each, and why one won."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from jitgemm.cli import common
from jitgemm.cli.common import layer_option
from jitgemm.kernel.formats import K_ALIGNMENT, LHS_GROUP, ROTATION, Problem
from jitgemm.kernel.legend import ROTATED, legend
from jitgemm.kernel.spec import smem_bytes
from jitgemm.runtime.device import local_device, pick_device
from jitgemm.select import cost
from jitgemm.select.choose import bands, seen
from jitgemm.select.ranked import TERMS, Candidate, candidates, faster_instead, why

_EXPERTS = "A grouped GEMM of E weights; M tokens choose experts."
_ROTATION = "Of the weight, and of activations in their quantiser. Default: none."
_TOP_K = "Experts that a token chooses."


@common.guarded
def explain(
    m: Annotated[int, typer.Argument(min=1, help="Tokens.")],
    n: Annotated[int, typer.Argument(min=8, help="Rows of the weight: output features.")],
    k: Annotated[int, typer.Argument(min=K_ALIGNMENT, help="Columns of the weight: input features.")],
    weight: Annotated[str, layer_option("--weight", "Default: g128-bf16-any.", metavar="NAME")] = "g128-bf16-any",
    lhs: Annotated[common.Lhs | None, layer_option("--lhs", "Default: e4m3, or what it meets.")] = None,
    out: Annotated[common.RealType, layer_option("--out", "Default: bf16.")] = common.RealType("bf16"),
    batch_invariant: common.BatchInvariant = False,
    block_scales: Annotated[bool, layer_option("--block-scales", metavar=None)] = False,
    e8m0: Annotated[bool, layer_option("--e8m0", metavar=None)] = False,
    sums: Annotated[common.Sums, layer_option("--sums", "Default: f32.", metavar="SUMS")] = common.Sums("f32"),
    rotation: Annotated[int, typer.Option("--rotation", metavar="128", help=_ROTATION, show_default=False)] = 0,
    experts: Annotated[int | None, typer.Option("--experts", metavar="E", min=1, help=_EXPERTS)] = None,
    top_k: Annotated[int, typer.Option("--top-k", metavar="K", min=1, help=_TOP_K)] = 1,
    device: common.Device = None,
    top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="Candidates to print.")] = 10,
    as_json: common.Json = False,
) -> None:
    """Print the candidates for out[M, N] = lhs[M, K] @ weight[N, K].T, the model's predictions, and why one won.

    Predictions are microseconds on the device; the lines below the table say
    what each column is. Up to 256 rows all m of a band share a kernel, so m is
    rounded up to its band's end; with more its band's kernel or that of the band
    before is taken. With --experts a prediction is the mean over random routings.

    \b
    Examples (more: docs/commands.md):
      jitgemm explain 16 4096 4096 --weight g128-bf16-e4m3 --out fp32
      jitgemm explain 4096 28672 8192 --weight channel-bf16-s8 --device h20
      jitgemm explain 512 7168 2048 --weight w8-channel-fp32-e4m3
      jitgemm explain 32 1536 2048 --experts 128 --top-k 8

    \b
    Exit codes:
      0  printed
      2  wrong arguments
    """
    target = pick_device(device)
    format = common.weight_format(weight, k)
    lhs_type = common.LHS_TYPES[lhs.value] if lhs else format.lhs_types[0]
    if rotation not in (0, ROTATION) or k % (rotation or 1):
        raise ValueError(f"--rotation: expected {ROTATION}, and K a multiple of it, got {rotation} and {k}")
    if top_k > (experts or 1):
        raise ValueError(f"--top-k: expected at most --experts ({experts or 'not given'}), got {top_k}")
    problem = Problem(
        m * top_k, n, k, lhs_type, format, out.value, batch_invariant, experts or 0,
        LHS_GROUP if block_scales or e8m0 else 0, e8m0, sums.value,
    )  # fmt: skip
    ranked = candidates(problem, target)
    if not ranked:
        raise ValueError(f"no kernel fits {target.name}")
    first, last = bands(problem.m, problem.experts)[-1]
    shown = [_facts(candidate, rank) for rank, candidate in enumerate(ranked[:top])]
    if as_json:
        facts = {name: value for name, value in asdict(problem).items() if name != "format"} | format.to_dict()
        facts |= ({"tier": format.tier} if format.tier else {}) | ({"rotation": rotation} if rotation else {})
        report = {"problem": facts, "band": [first, last], "device": asdict(target), "chosen": ranked[0].kernel.label}
        common.print_json(report | {"candidates_in_all": len(ranked), "candidates": shown})
        return
    terms = list(ranked[0].terms)
    rows = []
    for each in shown:
        start = ">" if each["chosen"] else "", each["label"], f"{each['predicted_us']:.2f}", each["bound_by"]
        times = (f"{each['terms'][name]:.2f}" for name in terms)
        rows.append((*start, *times, each["waves"], each["ctas"], common.show_size(each["smem_bytes"])))
    columns = ("", "kernel", "predicted us", "bound by", *terms, "waves", "CTAs", "shared memory")
    drop = (*reversed(terms), "shared memory", "CTAs", "waves")
    common.out().print(common.table(columns, rows, left=("", "kernel", "bound by"), drop=drop))
    routed = ""
    if experts:
        hit, most = cost.weights_read(experts, last), cost.most_rows(experts, last)
        routed = f" rows of {experts} experts; on average {hit:.3g} experts have rows, and none has more than {most}"
    shared = f"m = {first}..{last} share a kernel and are predicted for {last}{routed}"
    shared = f"m = {m} is predicted, for kernels of m up to {last}" if seen(problem).m != last else shared
    count = f"{min(top, len(ranked))} of {len(ranked)} candidates"
    shared = f"{format.title}; {shared}" if format.title else shared
    chosen = ranked[0]
    longest = max(chosen.terms.values())
    bars = [
        f"  {name:<9}{us:6.2f} us  {'#' * round(16 * us / longest):<16}  {TERMS[name]}"
        for name, us in chosen.terms.items()
    ]
    if device is None and local_device() is None:
        common.note(f"no Hopper GPU is at hand: this is what an {target.name} would run; --device names another")
    common.note(f"{target.name} ({target.num_sms} SMs), {shared}; {count}\n{why(ranked)}")
    for note in filter(None, (faster_instead(problem), ROTATED if rotation else "")):
        common.note(note)
    common.note("\n".join([f"times of {chosen.kernel.label}; all but the last two overlap", *bars]))
    parts = legend(chosen.kernel.label)
    width = max(len(part) for part, _ in parts)
    common.note("\n".join(["which is", *(f"  {part:<{width}}  {text}" for part, text in parts)]))


def _facts(candidate: Candidate, rank: int) -> dict[str, Any]:
    kernel = candidate.kernel
    facts = {"label": kernel.label, "chosen": rank == 0, "bound_by": candidate.bound_by}
    facts |= {name: getattr(candidate, name) for name in ("predicted_us", "terms", "waves", "ctas")}
    return facts | {"smem_bytes": smem_bytes(kernel), "kernel": kernel.to_dict()}
