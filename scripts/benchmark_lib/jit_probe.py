"""One measurement of what stands before a first call, in the process that runs this file; one JSON object on stdout.

    python jit_probe.py kernel '{"n": .., "k": .., "m": .., "m2": .., "lhs": .., "group": .., "device": ..}'
    python jit_probe.py call   '{"n": .., "k": .., "m": .., "m2": .., "name": ..}'

`kernel` gets two kernels out of the cache folder that JITGEMM_CACHE_DIR names, whether they are there or not, and
needs no GPU. `call` makes one contestant's first calls.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path


def kernel(n: int, k: int, m: int, m2: int, lhs: str, group: int, device: str | None) -> dict[str, object]:
    """Milliseconds of each step for a first kernel, and the second one's total, with NVRTC and all imports there."""
    from jitgemm.jit.cache import KernelCache
    from jitgemm.jit.nvrtc import nvrtc_info
    from jitgemm.kernel.formats import Problem, WeightFormat
    from jitgemm.kernel.render import kernel_source
    from jitgemm.runtime.device import pick_device
    from jitgemm.select.choose import choose

    target = pick_device(device)
    fmt = WeightFormat(group, False, "bf16")
    cache = KernelCache()
    result: dict[str, object] = {}
    clock = time.perf_counter
    started = clock()
    spec = choose(Problem(m, n, k, lhs, fmt), target)
    chosen = clock()
    source = kernel_source(spec)
    rendered = clock()
    key = source.key(nvrtc_info())
    keyed = clock()
    entry = cache.lookup(key)
    looked = clock()
    result["found"] = entry is not None
    steps = {"choose": chosen - started, "render": rendered - chosen, "key": keyed - rendered, "lookup": looked - keyed}
    if entry is None:
        entry, _ = cache.get_or_compile(source)
        steps["compile"] = clock() - looked
        result["nvrtc_ms"] = entry.metadata["seconds"] * 1e3
    result |= {f"{step}_ms": seconds * 1e3 for step, seconds in steps.items()}
    result["find_ms"] = (looked - chosen) * 1e3
    result["total_ms"] = (clock() - started) * 1e3
    result["kernel"] = spec.label

    started = clock()
    second = choose(Problem(m2, n, k, lhs, fmt), target)
    _, compiled = cache.get_or_compile(kernel_source(second))
    result |= {"second_ms": (clock() - started) * 1e3, "second_kernel": second.label, "second_compiled": compiled}
    return result


def call(n: int, k: int, m: int, m2: int, name: str) -> dict[str, object]:
    """Milliseconds of the first call, of the same again, and of the first call with another m, each waited for; of the
    first call of ours what it imports on its way, apart.

    A contestant's own imports, the CUDA context and packing are done before the clock runs.
    """
    import torch

    from benchmark_lib.cells import parse_format
    from benchmark_lib.contestants import all_peers
    from benchmark_lib.data import Source
    from benchmark_lib.ours import ours

    contestant = {each.name: each for each in all_peers()}.get(name) or ours(parse_format(name))
    source = Source(n, k)
    start = contestant.load(source, 1)
    runs = [start(rows, 1) for rows in (m, m, m2)]
    torch.cuda.synchronize()
    imports: dict[str, float] = {}
    if contestant.ours:
        for step, module in (("bindings_ms", "cuda.bindings.driver"), ("layers_ms", "jitgemm.gemm.launch")):
            started = time.perf_counter()
            importlib.import_module(module)
            imports[step] = (time.perf_counter() - started) * 1e3
    times = []
    for run in runs:
        started = time.perf_counter()
        run.calls[0]()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    times[0] += sum(imports.values())
    return dict(zip(("first_ms", "again_ms", "other_m_ms"), times)) | imports


if __name__ == "__main__":
    # This file's folder must not be on the path: its modules would be found under two names.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent.parent))
    print(json.dumps({"kernel": kernel, "call": call}[sys.argv[1]](**json.loads(sys.argv[2]))))
