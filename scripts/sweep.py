#!/usr/bin/env python3
"""Times many kernels on many problems and fits the selector's constants to them.

    python scripts/sweep.py run SWEEP.json            # on a Hopper GPU; a minute or two
    python scripts/sweep.py hold SWEEP.json           # there too: large problems again, at the power limit
    python scripts/sweep.py regret SWEEP.json         # anywhere: how good is the selector as it stands?
    python scripts/sweep.py fit SWEEP.json            # anywhere: constants for jitgemm/config.py that would do better

Regret is the time of the kernel that the selector picks over the best time of all kernels measured for that problem.
The kernels of a problem are the best by the model's own prediction, and the best of each family (warpgroups, splits,
multicast, ...), so that a wrong model is found out.

A large GEMM runs at the GPU's power limit, where its time depends on what the GPU did before. So `hold` replays the
best kernels of large problems for a while each; what it finds takes the place of the brief timings.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_lib.cells import COPY_BYTES  # noqa: E402

from jitgemm.cli.common import parse_shape  # noqa: E402
from jitgemm.kernel.formats import Problem, WeightFormat
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.runtime.device import device_of
from jitgemm.select import choose as config  # noqa: E402
from jitgemm.select.devices import (
    DeviceSpec,  # noqa: E402
    device_spec,  # noqa: E402
)

if TYPE_CHECKING:
    from benchmark_lib.timing import Timed

FORMATS = {
    "e4m3_g128": ("e4m3", WeightFormat(128, False, "bf16", "e4m3")),
    "int8_g128": ("s8", WeightFormat(128, False, "bf16", "s8")),
    "e4m3_g128_any": ("e4m3", WeightFormat(128, False, "bf16")),
    "int8_g128_any": ("s8", WeightFormat(128, False, "bf16")),
    "e4m3_ch": ("e4m3", WeightFormat(0, False, "bf16", "e4m3")),
    "int8_ch": ("s8", WeightFormat(0, False, "bf16", "s8")),
    "e4m3_g32": ("e4m3", WeightFormat(32, False, "bf16")),
    "e4m3_g128z": ("e4m3", WeightFormat(128, True, "bf16")),
    "e4m3_g32z": ("e4m3", WeightFormat(32, True, "bf16")),
    "int8_g32z": ("s8", WeightFormat(32, True, "bf16")),
    "int8_g32": ("s8", WeightFormat(32, False, "bf16", "s8")),
    "int8_g128z": ("s8", WeightFormat(128, True, "bf16")),
    "e4m3_g64": ("e4m3", WeightFormat(64, False, "bf16")),
    "int8_g64": ("s8", WeightFormat(64, False, "bf16", "s8")),
}
SHAPES = (
    (4096, 4096), (28672, 4096), (4096, 14336), (6144, 4096), (4608, 4096), (2112, 7168), (2048, 7168), (7168, 512),
    (7168, 1536), (1280, 7168), (3584, 1280), (7168, 2112), (7168, 1024), (5120, 2048), (8192, 1536), (6144, 2560),
)  # fmt: skip
MS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 1024, 2048, 4096)


def kernels_of(problem: Problem, device: DeviceSpec, count: int) -> list[KernelSpec]:
    """The `count` kernels that the model likes best, and the best of each of `count` families."""
    ranked = [candidate.kernel for candidate in config.candidates(problem, device)]
    families: dict[tuple, KernelSpec] = {}
    for kernel in ranked:
        family = (
            kernel.warpgroups_n,
            kernel.warpgroups_k,
            kernel.split_k,
            kernel.multicast_lhs,
            kernel.multicast_rhs,
            kernel.ctas_per_sm,
            kernel.halves,
            kernel.scatter,
        )
        families.setdefault(family, kernel)
    return list(dict.fromkeys(ranked[:count] + list(families.values())[:count]))


Job = tuple[str, int, int, int, list[KernelSpec]]
"""Format, n, k, m, and the kernels to time."""
HELD_US, HELD_WITHIN, HELD_KERNELS = 60.0, 1.15, 9
"""`hold` times problems of so many microseconds and more: kernels within this factor of the best, so many at most."""
HOLD_S = 0.2


def run(path: Path, names: list[str], shapes: Sequence[tuple[int, int]], count: int) -> None:
    import torch

    device = device_of(0)
    jobs = []
    for name in names:
        lhs, fmt = FORMATS[name]
        for n, k in shapes:
            for m in MS:
                jobs.append((name, n, k, m, kernels_of(Problem(m, n, k, lhs, fmt), device, count)))
    rows = time_all(jobs, briefly)
    document = {
        "device": torch.cuda.get_device_name(),
        "spec": "h200",
        "date": time.strftime("%Y-%m-%d"),
        "kernel": list(jobs[0][-1][0].to_dict()),
    }
    write(path, document, rows=rows)


def hold(path: Path, names: list[str]) -> None:
    """Times the best kernels of the file's large problems again, each for a while, and adds them to the file."""
    document = json.loads(path.read_text())
    others = [row for row in document.get("held", []) if row[0] not in names]
    rows = time_all(large_problems(row for row in load(path, held=False) if row[0][0] in names), at_power_limit)
    write(path, document, rows=document["rows"], held=others + rows)


def large_problems(rows: Iterable[Row]) -> list[Job]:
    cells: dict[tuple, list[tuple[float, KernelSpec]]] = defaultdict(list)
    for cell, _, kernel, us in rows:
        cells[cell].append((us, kernel))
    jobs = []
    for cell, found in cells.items():
        found.sort(key=lambda timing: timing[0])
        best = found[0][0]
        if best >= HELD_US:
            near = dict.fromkeys(kernel for us, kernel in found if us <= best * HELD_WITHIN)
            jobs.append((*cell, list(near)[:HELD_KERNELS]))
    return jobs


def write(path: Path, document: dict, **tables: list) -> None:
    """Writes the document with these tables, a row a line, and says how good the selector is by them."""
    head = json.dumps({key: value for key, value in document.items() if key not in ("rows", "held")})[:-1]
    body = (f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in tables.items())
    path.write_text(",\n".join((head, *body)) + "}\n")
    report(load(path))


def briefly(contestants: list[Timed], m: int) -> None:
    for timed in contestants:
        timed.turn(5 if m < 1024 else 3)


def at_power_limit(contestants: list[Timed], m: int) -> None:
    contestants[0].hold(HOLD_S, sample=False)  # the GPU settles
    contestants[0].turns.clear()
    for timed in random.sample(contestants, len(contestants)):
        timed.hold(HOLD_S, sample=False)


def time_all(jobs: list[Job], measure: Callable[[list[Timed], int], None]) -> list[list]:
    """A row [format, n, k, m, us, kernel's fields] for each job and kernel that builds."""
    import torch
    from benchmark_lib.timing import Timed

    import jitgemm
    from jitgemm.gemm.arguments import Operands
    from jitgemm.gemm.plan import Plan
    from jitgemm.jit.cache import KernelCache

    kernels = {kernel for job in jobs for kernel in job[-1]}
    cache = KernelCache()

    def compile_one(kernel: KernelSpec) -> KernelSpec | None:
        try:
            cache.get_or_compile(kernel_source(kernel))
        except jitgemm.CompileError as error:
            print(f"left out: {error.args[0].splitlines()[0]}", file=sys.stderr)
            return kernel
        return None

    started = time.time()
    with ThreadPoolExecutor() as pool:
        failed = {kernel for kernel in pool.map(compile_one, kernels) if kernel}
    print(f"{len(kernels)} kernels, {len(failed)} do not build, {time.time() - started:.0f} s", file=sys.stderr)

    rows, weights, current = [], [], None
    for name, n, k, m, chosen in jobs:
        lhs, fmt = FORMATS[name]
        if current != (name, n, k):
            current = (name, n, k)
            low = 0 if fmt.zero_point else -7
            q = torch.randint(low, 16 if fmt.zero_point else 8, (n, k), device="cuda", dtype=torch.int8)
            groups = -(-k // fmt.group_size) if fmt.group_size else 1
            scale = (torch.rand(n, groups, device="cuda") * 0.02 + 0.001).bfloat16()
            zero = torch.randint(0, 16, (n, groups), device="cuda", dtype=torch.uint8) if fmt.zero_point else None
            lhs_dtype = {"any": None, "e4m3": torch.float8_e4m3fn, "s8": torch.int8}[fmt.codes]
            weight = jitgemm.pack_w4(q, scale, zero, group_size=fmt.group_size or k, lhs_dtype=lhs_dtype)
            copies = max(2, math.ceil(COPY_BYTES / weight.nbytes)) - 1
            weights = [weight] + [copy.deepcopy(weight) for _ in range(copies)]
        x = torch.randn(m, k, device="cuda")
        x = x.to(torch.float8_e4m3fn) if lhs == "e4m3" else (x * 30).round().clamp(-128, 127).to(torch.int8)
        x_scale = torch.rand(m, device="cuda")
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        used = weights if m <= 512 else weights[:4]
        contestants = {}
        for kernel in chosen:
            if kernel not in failed:
                operands = [Operands(x, x_scale, None, weight, out, None) for weight in used]
                plan = Plan(operands[0], kernel)
                calls = [partial(plan.launch, *each) for each in operands]
                contestants[kernel] = Timed(calls)
        if contestants:
            measure(list(contestants.values()), m)
        for kernel, timed in contestants.items():
            rows.append([name, n, k, m, round(timed.us, 3), list(kernel.to_dict().values())])
    print(f"{len(rows)} timings, {time.time() - started:.0f} s", file=sys.stderr)
    return rows


Row = tuple[tuple, Problem, KernelSpec, float]


def load(path: Path, held: bool = True) -> list[Row]:
    """The timings; with `held`, of problems that were held those timings alone."""
    document = json.loads(path.read_text())
    device = device_spec(document["spec"])
    again = document.get("held", []) if held else []
    replaced = {tuple(row[:4]) for row in again}
    rows = []
    for name, n, k, m, us, values in [row for row in document["rows"] if tuple(row[:4]) not in replaced] + again:
        lhs, fmt = FORMATS[name]
        kernel = KernelSpec.from_dict(dict(zip(document["kernel"], values)))
        # The bound on registers may have left it out since.
        if config.illegal(kernel, device) is None:
            rows.append(((name, n, k, m), Problem(config.band_end(m), n, k, lhs, fmt), kernel, us))
    return rows


BLUR = 0.012
"""A kernel predicted this part slower than the best counts 1/e of it in a fit: else ties of predictions decide, which
another shape breaks."""


def regrets(
    rows: list[Row], device: DeviceSpec, blur: float = 0.0
) -> tuple[dict[tuple, tuple[float, float, float, str]], float]:
    """Per cell (regret, time of the choice, best time, label of the best); and the mean |log(predicted / measured)|.

    With `blur` the time of the choice is a mean over kernels, weighed by how near they stand to the best prediction.
    """
    cells: dict[tuple, list[tuple[float, float, str]]] = defaultdict(list)
    error = 0.0
    for cell, problem, kernel, us in rows:
        predicted = config.predict(kernel, problem, device).predicted_us
        cells[cell].append((predicted, us, kernel.label))
        error += abs(math.log(predicted / us))
    out = {}
    for cell, found in cells.items():
        best = min(found, key=lambda f: f[1])
        least, chosen, _ = min(found)
        if blur:
            weights = [(predicted / least) ** (-1 / blur) for predicted, _, _ in found]
            chosen = sum(weight * us for weight, (_, us, _) in zip(weights, found)) / sum(weights)
        out[cell] = (chosen / best[1], chosen, best[1], best[2])
    return out, error / len(rows)


def report(rows: list[Row], worst: int = 12) -> None:
    found, error = regrets(rows, device_spec("h200"))
    ranked = sorted(found.items(), key=lambda item: -item[1][0])
    values = [value[0] for _, value in ranked]
    median, mean = values[len(values) // 2], sum(values) / len(values)
    print(f"{len(rows)} timings, {len(values)} problems: regret median {median:.3f}, mean {mean:.3f}, ")
    print(f"worst {values[0]:.3f}; mean |log(predicted / measured)| {error:.3f}")
    for cell, (regret, chosen, best, label) in ranked[:worst]:
        name, n, k, m = cell
        print(f"  {regret:.3f}  {name} n={n} k={k} m={m}: {chosen:.1f} us, best {best:.1f} us by {label}")


SCALARS = {
    "LAUNCH_US": (0.2, 3), "COPY_US": (0.001, 1), "NO_PREFETCH_US": (0.05, 4), "REDUCE_US": (0.00001, 0.05),
    "STORE_US": (0.01, 1.5), "TOKEN_US": (0.00001, 0.05), "SCATTER_US": (0.01, 3), "SUM_US": (0.001, 1),
    "SEND_US": (0.0005, 0.05), "MULTICAST_US": (0.01, 3),
    "RECORD_CYCLES": (50, 800), "ISSUE_CYCLES": (10, 200), "FETCH_CYCLES": (100, 4000), "HALVES_CYCLES": (0.1, 200),
    "L2_BYTES_PER_CYCLE": (15, 160), "OVERLAP": (1.2, 8),
}  # fmt: skip
# CLUSTER_SHARE stays: it decides how many CTAs are launched, so that timings hold for one value of it.
TABLES = {
    "DECODE_CYCLES": (40, 500), "PROMOTE_CYCLES": (0.8, 8), "CLUSTER_US": (0.01, 3), "STREAM_FACTOR": (1, 1.5),
}  # fmt: skip


def fit(rows: list[Row], seconds: float, seed: int) -> None:
    """Random descent on mean regret, worst regret and the error of the predictions."""
    device = device_spec("h200")
    entries = [(name, None, limits) for name, limits in SCALARS.items()]
    for name, limits in TABLES.items():
        entries += [(name, key, limits) for key in getattr(config, name)]

    def put(values: list[float]) -> None:
        for (name, key, _), value in zip(entries, values):
            if key is None:
                setattr(config, name, value)
            else:
                getattr(config, name)[key] = value

    def score() -> float:
        found, error = regrets(rows, device, BLUR)
        values = [value[0] for value in found.values()]
        return 4 * (sum(values) / len(values) - 1) + (max(values) - 1) + error

    random.seed(seed)
    best = [getattr(config, name) if key is None else getattr(config, name)[key] for name, key, _ in entries]
    best_score, started = score(), time.time()
    while time.time() - started < seconds:
        trial = list(best)
        for i in random.sample(range(len(trial)), random.choice((1, 1, 2, 3))):
            low, high = entries[i][2]
            trial[i] = min(max(trial[i] * math.exp(random.gauss(0, 0.25)), low), high)
        put(trial)
        trial_score = score()
        if trial_score < best_score:
            best, best_score = trial, trial_score
    put(best)
    report(rows)
    for (name, key, _), value in zip(entries, best):
        print(f"{name}{'' if key is None else f'[{key!r}]'} = {value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "hold", "regret", "fit"))
    parser.add_argument("file", type=Path)
    formats = "e4m3_g128,int8_g128,e4m3_g128_any,int8_ch"
    parser.add_argument("--formats", default=formats, help=f"of {','.join(FORMATS)}")
    shapes = " ".join(f"{n},{k}" for n, k in SHAPES)
    parser.add_argument(
        "--shape", metavar="N,K", action="append", help=f"a weight's shape; may be repeated (default {shapes})"
    )
    parser.add_argument(
        "--kernels", type=int, default=12, help="kernels by prediction, and families, of a problem (default 12)"
    )
    parser.add_argument("--seconds", type=float, default=120, help="how long to fit (default 120)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.action == "run":
        try:
            shapes = [parse_shape(text) for text in arguments.shape] if arguments.shape else SHAPES
        except ValueError as error:
            parser.error(str(error))
        run(arguments.file, arguments.formats.split(","), shapes, arguments.kernels)
    elif arguments.action == "hold":
        hold(arguments.file, arguments.formats.split(","))
    elif arguments.action == "regret":
        report(load(arguments.file))
    else:
        fit(load(arguments.file), arguments.seconds, arguments.seed)


if __name__ == "__main__":
    main()
