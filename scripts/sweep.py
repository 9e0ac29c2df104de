#!/usr/bin/env python3
"""Times many kernels on many problems, and fits the selector's constants to them: `python scripts/sweep.py --help`."""

from __future__ import annotations

import copy
import json
import math
import random
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import typer
from benchmark_lib.cells import Experts, Format, GroupedCell, make_moe_cells, parse_format

from jitgemm.cli import common
from jitgemm.kernel.formats import Problem
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select import cost
from jitgemm.select.choose import band_end, choose
from jitgemm.select.devices import DEVICES, DeviceSpec, device_spec
from jitgemm.select.legal import illegal
from jitgemm.select.ranked import candidates, predict

if TYPE_CHECKING:
    from benchmark_lib.timing import Timed

    from jitgemm.gemm.problem import Gemm

# ---- problems --------------------------------------------------------------------------------------------------------


FORMATS = (
    "e4m3_g128", "int8_g128_exact", "int8_g128", "e4m3_g128_any", "int8_g128_any", "e4m3_ch", "int8_ch", "e4m3_g32_any",
    "e4m3_g128z", "e4m3_g32z", "int8_g32z", "int8_g32", "int8_g128z_exact", "e4m3_g64", "int8_g64", "w8_e4m3_ch",
    "w8_int8_ch", "mxfp4_ch", "mxfp4_g128", "mxfp4_g32", "nvfp4_far", "nvfp4_g16", "int8_2l", "e4m3_g128_f16",
    "e4m3_g64_f16", "e4m3_g32_f16", "mxfp4_g32_f16", "e4m3_g128_b128", "int8_g128_b128", "w8_e4m3_block_b128",
    "w8_e4m3_block",
)  # fmt: skip
"""As scripts/benchmark.py names them; `_exact`: int8's sums are exact, not by parts; `nvfp4_far`: of two terms."""
EXACT, FAR = "_exact", "nvfp4_far"
MOE_FORMATS = "e4m3_g128", "int8_g128_exact", "int8_ch"
SHAPES = (
    (4096, 4096), (28672, 4096), (4096, 14336), (6144, 4096), (4608, 4096), (2112, 7168), (2048, 7168), (7168, 512),
    (7168, 1536), (1280, 7168), (3584, 1280), (7168, 2112), (7168, 1024), (5120, 2048), (8192, 1536), (6144, 2560),
    (512, 7168), (8192, 3584),
)  # fmt: skip
MS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 1024, 2048, 4096)

Cell = tuple[Any, ...]
"""Format, n, k, m; of a grouped problem, whose m counts tokens, then the figures of `Experts`."""


def held_out(n: int, k: int) -> bool:
    """Whether a layer's timings are never fitted to: about a quarter of all shapes, in every format, by a checksum."""
    return zlib.crc32(f"{n}x{k}".encode()) % 4 == 0


def format_of(name: str) -> Format:
    return parse_format("nvfp4_g16" if name == FAR else name.removesuffix(EXACT))


def problem_of(cell: Cell) -> Problem:
    """The problem as the selector sees it: with the last m of its band."""
    name, n, k, m, *figures = cell
    if figures:
        experts = Experts(*figures)
        rows = GroupedCell(n, k, m, "", experts).expected_rows
        m, more = band_end(rows, experts.count), {"experts": experts.count, "rows_vary": experts.rows_vary}
    else:
        m, more = band_end(m), {}
    problem = format_of(name).problem(m, n, k)
    if name.endswith(EXACT):
        problem = replace(problem, sums="exact")
    if name == FAR:
        problem = replace(problem, format=replace(problem.format, order="nvfp4"))
    return replace(problem, **more)


def kernels_of(problem: Problem, device: DeviceSpec, count: int) -> list[KernelSpec]:
    """The `count` kernels that the model likes best, and the best of each of `count` families."""
    ranked = [candidate.kernel for candidate in candidates(problem, device)]
    families: dict[tuple, KernelSpec] = {}
    for kernel in ranked:
        shape = (kernel.warpgroups_n, kernel.warpgroups_k, kernel.split_k, kernel.multicast_lhs)
        ways = kernel.ctas_per_sm, kernel.token_halves, kernel.reduce_scatter, kernel.tokens_as_m, kernel.sums
        families.setdefault((*shape, *ways), kernel)
    return list(dict.fromkeys(ranked[:count] + list(families.values())[:count]))


# ---- the file --------------------------------------------------------------------------------------------------------

Timings = dict[Cell, dict[KernelSpec, float]]
"""Microseconds of one call, by problem and kernel."""
FIELDS = (
    "block_m", "block_n", "stages", "token_halves", "warpgroups_k", "split_k", "reduce_scatter", "multicast_lhs",
    "ctas_per_sm", "consumers_copy_lhs", "tokens_as_m", "sums",
)  # fmt: skip
"""Of a kernel, as the file lists them; its other fields follow from the problem. Files from before a field have its
default."""


@dataclass
class Sweep:
    """A file of timings.

    Attributes:
        gpu, spec, date: the driver's name of the GPU, the selector's, the day of the last timing.
        all: microseconds by problem and kernel.
    """

    gpu: str
    spec: str
    date: str
    all: Timings = field(default_factory=dict)

    @property
    def device(self) -> DeviceSpec:
        return device_spec(self.spec)

    def timings(self) -> Timings:
        """Of the kernels that are legal: some that once were spill with today's count of registers."""
        found = {}
        for cell, us in self.all.items():
            legal = {kernel: value for kernel, value in us.items() if illegal(kernel, self.device) is None}
            if legal:
                found[cell] = legal
        return found

    def thinned(self, within: float) -> Sweep:
        """With the kernels that the selector chooses, and those at most `within` times as slow as a problem's best."""
        found: Timings = {}
        for cell, us in self.timings().items():
            chosen, most = choose(problem_of(cell), self.device), within * min(us.values())
            found[cell] = {kernel: value for kernel, value in us.items() if value <= most or kernel == chosen}
        return replace(self, all=found)

    @classmethod
    def read(cls, path: Path) -> Sweep:
        document = json.loads(path.read_text())

        found: Timings = {}
        for *cell, kernels, us in document["timings"]:
            problem = problem_of(tuple(cell))
            like = {"experts": problem.table_size, "lhs_group": problem.lhs_group}
            shapes = (dict(zip(document["fields"], document["kernels"][index])) for index in kernels)
            specs = (KernelSpec(problem.lhs, problem.format.kernel_format, **like, **shape) for shape in shapes)
            found[tuple(cell)] = dict(zip(specs, us))
        return cls(document["gpu"], document["spec"], document["date"], found)

    def write(self, path: Path) -> None:
        """Writes a line for each problem: its kernels by their place in a list, and their times."""
        numbers: dict[tuple, int] = {}
        rows = [
            [*cell, [numbers.setdefault(_shape(kernel), len(numbers)) for kernel in us], list(us.values())]
            for cell, us in self.all.items()
        ]
        dump = partial(json.dumps, separators=(",", ":"))
        head = dump({"gpu": self.gpu, "spec": self.spec, "date": self.date, "fields": FIELDS})[:-1]
        lists = {"kernels": list(numbers), "timings": rows}
        body = (f'"{name}": [\n' + ",\n".join(map(dump, rows)) + "\n]" for name, rows in lists.items())
        path.write_text(",\n".join((head, *body)) + "}\n")

    def merge(self, other: Sweep) -> None:
        """Takes over the timings of another file, which replace older ones."""
        if other.spec != self.spec:
            raise ValueError(f"timings of a {other.spec} cannot join those of a {self.spec}")
        self.date = max(self.date, other.date)
        for cell, us in other.all.items():
            self.all.setdefault(cell, {}).update(us)


def _shape(kernel: KernelSpec) -> tuple:
    return tuple(getattr(kernel, name) for name in FIELDS)


# ---- timing ----------------------------------------------------------------------------------------------------------

KERNELS = 12
"""By prediction, and families, of a problem."""
HOLD_S = 0.2
COMPILE_PART = 0.6
"""Part of a time limit after which no further kernel is compiled."""

Jobs = dict[Cell, list[KernelSpec]]


def briefly(contestants: list[Timed], m: int) -> None:
    for _ in range(2):  # everybody's second turn comes after everybody's first
        for timed in contestants:
            timed.turn(3)


def at_power_limit(contestants: list[Timed], m: int) -> None:
    contestants[0].hold(HOLD_S, sample=False)  # the GPU settles
    contestants[0].turns.clear()
    for timed in random.sample(contestants, len(contestants)):
        timed.hold(HOLD_S, sample=False)


def time_all(jobs: Jobs, measure: Callable[[list[Timed], int], None], minutes: float) -> Timings:
    """Compiles the kernels in threads, then times problem by problem until the time is over."""
    started = time.monotonic()
    layers: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in jobs:
        layers[cell[:3] + cell[4:]].append(cell)
    built = _compile([kernel for kernels in jobs.values() for kernel in kernels], started + 60 * minutes * COMPILE_PART)
    found: Timings = {}
    for number, (layer, cells) in enumerate(layers.items()):
        bench = None
        for cell in cells:
            kernels = [kernel for kernel in jobs[cell] if kernel in built]
            if time.monotonic() - started > 60 * minutes or len(kernels) < 2:
                continue
            bench = bench or Bench(*layer)
            found[cell] = bench.times(cell[3], kernels, measure)
        passed = time.monotonic() - started
        common.note(f"{number + 1} of {len(layers)} layers, {len(found)} of {len(jobs)} problems, {passed:.0f} s")
        if passed > 60 * minutes:
            break
    return found


def _compile(kernels: Iterable[KernelSpec], deadline: float) -> set[KernelSpec]:
    """Those that are in the cache when the time is over."""
    from jitgemm.jit.cache import process_cache as cache
    from jitgemm.jit.compile_many import compile_all, default_threads, look_up

    specs, built = {kernel.label: kernel for kernel in kernels}, set()
    jobs = [look_up(cache, kernel_source(kernel)) for kernel in specs.values()]
    for job in compile_all(cache, jobs, default_threads(), common.err()):
        if job.error is None:
            built.add(specs[job.source.label])
        else:
            common.note(f"left out: {str(job.error).splitlines()[0]}")
        if time.monotonic() > deadline:
            break
    return built


class Bench:
    """A layer's weights on the GPU (tests: the CPU), as many copies as the L2 cannot hold; or one weight of experts."""

    def __init__(self, name: str, n: int, k: int, *experts: int, device: str = "cuda"):
        from benchmark_lib.data import GroupedSource, Source
        from benchmark_lib.ours import weight_of

        self.format = format_of(name)
        self.source = GroupedSource(n, k, Experts(*experts), device) if experts else Source(n, k, device)
        distinct = self.source.distinct if experts else [self.source]
        for each in distinct if name == FAR else ():
            each.weight[:, :16] *= 2**-12
        packed = [weight_of(self.format, each) for each in distinct]
        if experts:
            weights = [type(packed[0]).stacked(experts[0], lambda e: packed[e % len(packed)])]
        else:
            weights = packed + [copy.deepcopy(packed[0]) for _ in range(self.source.copies(packed[0].nbytes) - 1)]
        sums = "exact" if name.endswith(EXACT) else self.format.sums
        self.weights = [weight.with_sums(sums) for weight in weights]

    def gemms(self, m: int) -> list[Gemm]:
        """One a weight; of experts one a routing, and m counts tokens."""
        from benchmark_lib.ours import lhs_of

        from jitgemm.gemm.problem import Gemm, Groups

        lhs, out = lhs_of(self.format, self.source.activations(m)), self.source.out(m)
        gemms = [Gemm(*lhs, None, weight, out, None) for weight in (self.weights if m <= 512 else self.weights[:4])]
        if self.weights[0].experts is None:
            return gemms
        rows = self.source.cell(m).expected_rows
        return [gemms[0]._replace(groups=Groups(offsets, None, 0, rows)) for offsets in self.source.offsets(m)]

    def times(
        self, m: int, kernels: Sequence[KernelSpec], measure: Callable[[list[Timed], int], None]
    ) -> dict[KernelSpec, float]:
        from benchmark_lib.timing import Timed

        from jitgemm.gemm.launch import GemmLaunch

        gemms, contestants = self.gemms(m), {}
        for kernel in kernels:
            plan = GemmLaunch(gemms[0], kernel)
            contestants[kernel] = Timed([partial(plan.launch, each) for each in gemms])
        measure(list(contestants.values()), m)
        return {kernel: round(timed.us, 2) for kernel, timed in contestants.items()}


# ---- regret ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regret:
    """What the selector loses at a problem.

    Attributes:
        regret: time of the kernel that it chooses over the best time of all, None if its kernel was never timed.
        among_timed: the same of the kernel that it would choose of those that were timed.
    """

    cell: Cell
    regret: float | None
    among_timed: float
    chosen: KernelSpec
    best: KernelSpec
    best_us: float


def regrets(timings: Timings, device: DeviceSpec) -> list[Regret]:
    found = []
    for cell, us in timings.items():
        problem = problem_of(cell)
        chosen, best = choose(problem, device), min(us, key=us.__getitem__)
        likely = min(us, key=lambda kernel: predict(kernel, problem, device).predicted_us)
        regret = us[chosen] / us[best] - 1 if chosen in us else None
        found.append(Regret(cell, regret, us[likely] / us[best] - 1, chosen, best, us[best]))
    return found


def summary(values: Iterable[float]) -> tuple[float, float, float]:
    """(mean, 99th percentile, worst)"""
    ordered = sorted(values)
    return sum(ordered) / len(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]


def report(sweep: Sweep, worst: int) -> None:
    found = regrets(sweep.timings(), sweep.device)
    rows = []
    for part, which in (("fitted", False), ("held out", True)):
        some = [each for each in found if held_out(*each.cell[1:3]) == which]
        known = [each.regret for each in some if each.regret is not None]
        figures = [f"{100 * value:.2f} %" for value in summary(known)] if known else ["-"] * 3
        rows.append((part, len(some), len(some) - len(known), *figures))
    common.out().print(common.table(("problems", "number", "choice never timed", "mean", "p99", "worst"), rows))
    ranked = sorted((each for each in found if each.regret), key=lambda each: -(each.regret or 0))
    columns = ("regret", "format", "n", "k", "m", "experts", "", "chosen", "best", "us")
    rows = [
        (f"{100 * (each.regret or 0):.1f} %", *(*each.cell, None)[:5], "held out" if held_out(*each.cell[1:3]) else "",
         each.chosen.label, each.best.label, each.best_us)
        for each in ranked[:worst]
    ]  # fmt: skip
    common.out().print(common.table(columns, rows, left=("format", "", "chosen", "best")))


# ---- fit -------------------------------------------------------------------------------------------------------------

BLUR = 0.012
"""A kernel predicted this part slower than the best counts 1/e of it in a fit: else ties of predictions decide, which
another shape breaks."""
NEAR = 1.35
"""Kernels slower than the best by more than this factor do not count in the error of predictions."""
LIMITS = {"PAIRED_STREAM": (1.0, 1.6)}
LATER = ("DECODE_TIMES", "FLUSH_CYCLES", "F16_WAITS", "f16", "parts")
"""Constants of the model, and keys, that only some formats have: a fit changes them where it is told to, and no
others."""


def constants(only: Iterable[str] = ()) -> list[tuple[str, Any]]:
    """(name, key) of every constant of the model that a fit may change; key is None for a scalar.

    Args:
        only: texts such as "TILE_US" and "PROMOTE_CYCLES.parts"; none for those that all formats have.

    Raises:
        ValueError: there is no such constant.
    """
    found: dict[str, tuple[str, Any]] = {}
    for name, value in vars(cost).items():
        if name.isupper() and isinstance(value, float):
            found[name] = name, None
        elif name.isupper() and isinstance(value, dict) and all(isinstance(each, float) for each in value.values()):
            found |= {f"{name}.{key}": (name, key) for key in value}
    if unknown := set(only) - set(found):
        raise ValueError(f"--constant: expected one of {', '.join(found)}, got {', '.join(sorted(unknown))}")
    return [found[text] for text in only] or [each for each in found.values() if not {*each} & {*LATER}]


def of_the_selector(timings: Timings, device: DeviceSpec) -> Timings:
    """Without the kernels that the selector does not weigh; the best of all may be among them."""
    found = {}
    for cell, us in timings.items():
        weighed = {candidate.kernel for candidate in candidates(problem_of(cell), device)}
        found[cell] = {kernel: value for kernel, value in us.items() if kernel in weighed}
    return {cell: us for cell, us in found.items() if us}


def fit(
    sweeps: Sequence[tuple[Timings, DeviceSpec]], seconds: float, seed: int, only: Sequence[str] = ()
) -> dict[tuple[str, Any], float]:
    """Random descent on the regret and on the error of predictions of near kernels, from the constants as they are."""

    def score_of(timings: Timings, device: DeviceSpec) -> float:
        costs = {kernel: cost.costs(kernel, device) for us in timings.values() for kernel in us}
        losses, errors = [], []
        for cell, us in timings.items():
            problem, best = problem_of(cell), min(us.values())
            predicted = {kernel: cost.times(kernel, costs[kernel], problem, device)[0].total for kernel in us}
            least = min(predicted.values())
            weights = {kernel: (value / least) ** (-1 / BLUR) for kernel, value in predicted.items()}
            losses.append(sum(weights[k] * us[k] for k in us) / sum(weights.values()) / best - 1)
            errors += [abs(math.log(predicted[k] / us[k])) for k in us if us[k] <= NEAR * best]
        mean, squares = sum(losses) / len(losses), sum(loss**2 for loss in losses) / len(losses)
        return 4 * mean + 2 * squares**0.5 + 0.15 * max(losses) + 0.7 * sum(errors) / len(errors)

    def score() -> float:
        return sum(score_of(*each) for each in sweeps)

    def get(name: str, key: Any) -> float:
        return getattr(cost, name) if key is None else getattr(cost, name)[key]

    def put(values: dict[tuple[str, Any], float]) -> None:
        for (name, key), value in values.items():
            if key is None:
                setattr(cost, name, value)
            else:
                getattr(cost, name)[key] = value

    rng = random.Random(seed)
    best = {each: get(*each) for each in constants(only)}
    best_score, started = score(), time.monotonic()
    while time.monotonic() - started < seconds:
        trial = dict(best)
        for each in rng.sample(list(trial), min(len(trial), rng.choice((1, 1, 2, 3)))):
            low, high = LIMITS.get(each[0], (1e-6, math.inf))
            trial[each] = min(max(trial[each] * math.exp(rng.gauss(0, 0.2)), low), high)
        put(trial)
        trial_score = score()
        if trial_score < best_score:
            best, best_score = trial, trial_score
    put(best)
    return best


# ---- the command -----------------------------------------------------------------------------------------------------

app = common.command_line(
    help=__doc__
    + """

    \b
    A sweep times, for each problem, the kernels that the model likes best and
    the best of each family of kernels (warpgroups, splits, multicast, ...),
    so that a wrong model is found out. Regret is the time of the kernel that
    the selector chooses over the best time of all. A quarter of the layers
    (`held_out`) is never fitted to.
    """
)

File = Annotated[Path, typer.Argument(help="File of timings, such as scripts/data/sweep_h200.json.")]
Out = Annotated[Path, typer.Option("--out", help="File to write: what was timed, also when the time was over.")]
Minutes = Annotated[float, typer.Option("--minutes", min=0.1, help="Time limit, compiling included.")]
Held = Annotated[
    bool,
    typer.Option("--held", help="Hold each kernel for a while: large GEMMs run at the power limit, a burst does not."),
]


@app.command("run")
@common.guarded
def run_command(
    out: Out,
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="NAME", help="May be repeated.", show_default="all")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="N,K", help="May be repeated.", show_default="18 layers")
    ] = None,
    m: Annotated[
        list[int] | None, typer.Option("--m", min=1, help="May be repeated.", show_default="16 of them")
    ] = None,
    moe: Annotated[
        list[str] | None,
        typer.Option(
            "--moe",
            metavar="PRESET",
            help="Time the grouped GEMMs of this preset of benchmark.py --moe instead, or of "
            "the usual ones; --m counts tokens. May be repeated.",
        ),
    ] = None,
    held: Held = False,
    minutes: Minutes = 10.0,
) -> None:
    """Times kernels on problems; needs a Hopper GPU."""
    sweep = _here()
    layers = [
        (name, n, k)
        for name in formats or FORMATS
        for n, k in ([common.parse_shape(text) for text in shape] if shape else SHAPES)
    ]
    cells = [(*layer, tokens) for layer in layers for tokens in m or MS]
    if moe:
        if shape:
            raise ValueError("--moe: --shape cannot be combined with it")
        cells = [
            (name, cell.n, cell.k, cell.m, *astuple(cell.experts))
            for cell in make_moe_cells(() if moe == ["usual"] else moe, m)
            for name in formats or MOE_FORMATS
        ]
    device = _this_device()
    jobs = {cell: kernels_of(problem_of(cell), device, KERNELS) for cell in cells}
    sweep.all = time_all(jobs, at_power_limit if held else briefly, minutes)
    _finish(sweep, out)


@app.command()
@common.guarded
def missing(
    file: File,
    out: Out,
    held: Held = False,
    minutes: Minutes = 10.0,
) -> None:
    """Times what the selector chooses for the file's problems and was never timed there, and the three best."""
    known, sweep = Sweep.read(file), _here()
    timings, device = known.timings(), _this_device()
    jobs = {}
    for each in regrets(timings, device):
        if each.regret is None:
            best = sorted(timings[each.cell], key=timings[each.cell].__getitem__)
            jobs[each.cell] = [each.chosen, *best[:3]]
    common.note(f"{len(jobs)} problems whose choice was never timed")
    sweep.all = time_all(jobs, at_power_limit if held else briefly, minutes)
    _finish(sweep, out)


@app.command()
@common.guarded
def merge(
    file: File,
    others: Annotated[list[Path] | None, typer.Argument(help="Files to take over; the last one wins.")] = None,
    within: Annotated[
        float,
        typer.Option(
            "--within", min=1, help="Leave out kernels this many times as slow as a problem's best.", show_default="all"
        ),
    ] = math.inf,
) -> None:
    """Takes the timings of other files over into the first one. Kernels that the selector chooses always stay."""
    sweep = Sweep.read(file)
    for other in others or ():
        sweep.merge(Sweep.read(other))
    sweep.thinned(within).write(file)
    report(Sweep.read(file), 0)


@app.command()
@common.guarded
def regret(
    file: File, worst: Annotated[int, typer.Option("--worst", min=0, help="Rows of the table of the worst.")] = 12
) -> None:
    """Says how good the selector is by a file of timings; needs no GPU."""
    report(Sweep.read(file), worst)


@app.command("fit")
@common.guarded
def fit_command(
    files: Annotated[list[Path], typer.Argument(help="Files of timings, one a device.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="How long to fit.")] = 300,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--constant",
            metavar="NAME",
            help="Fit this one alone, such as PROMOTE_CYCLES.parts; may be repeated.",
            show_default="those that all formats have",
        ),
    ] = None,
) -> None:
    """Finds constants for jitgemm/select/cost.py that would do better on the fitted parts; needs no GPU."""
    parts = []
    for sweep in map(Sweep.read, files):
        fitted = {cell: us for cell, us in sweep.timings().items() if not held_out(*cell[1:3])}
        parts.append((of_the_selector(fitted, sweep.device), sweep.device))
    for (name, key), value in fit(parts, seconds, 1, only or ()).items():
        print(f"{name}{'' if key is None else f'[{key!r}]'} = {value:.4g}")


def _this_device() -> DeviceSpec:
    from jitgemm.runtime.device import device_of

    return device_of(0)


def _here() -> Sweep:
    """An empty sweep of the GPU at hand."""
    import torch

    spec = _this_device().name
    if spec not in DEVICES:
        raise ValueError(f"{spec} is no device of jitgemm/select/devices.py: add it there first")
    return Sweep(torch.cuda.get_device_name(), spec, time.strftime("%Y-%m-%d"))


def _finish(sweep: Sweep, out: Path) -> None:
    sweep.write(out)
    common.note(f"{sum(map(len, sweep.all.values()))} timings in {out}")
    if sweep.timings():
        report(sweep, 12)


if __name__ == "__main__":
    app()
