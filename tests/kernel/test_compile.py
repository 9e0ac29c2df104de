"""What NVRTC makes of the rendered kernels: hardly a spill, no serialised wgmma, the same everywhere.

Needs NVRTC, no GPU. A sample by seed is compiled once, two at a time, into one cache for the whole session; with
--all-kernels everything is. The lists of kernels take seconds to choose, so tests go by the numbers in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
from selected import FORMATS_OF

from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.errors import CompileError
from jitgemm.jit import sass
from jitgemm.jit.cache import KernelCache
from jitgemm.jit.entry import Entry
from jitgemm.jit.nvrtc import SERIALISED, compile_cubin, nvrtc_info
from jitgemm.jit.source import OPTIONS, headers
from jitgemm.kernel.formats import CORRECTION_TYPES, Problem, WeightFormat
from jitgemm.kernel.render import kernel_source, render
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.choose import choose, kernels_for
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import legal_kernels

pytestmark = pytest.mark.nvrtc

REPOSITORY = Path(__file__).resolve().parents[2]
H200 = DEVICES["h200"]
LLAMA_FORMAT = WeightFormat(128, False, "bf16")
BLOCK_SCALES = [KernelSpec.from_label(label) for label in (
    "s8-g32-fp32-b128e-m16n64-k2x2s-s6", "e4m3w8-g128-fp32-b128-m64n64-k2x2s-s5-ss", "e4m3w8-g128-fp32-b128-m192n64-s6-ss-tr", "e4m3w8-g128-fp32-b128-m256hn128-s3-ss-tr",
    "s8w8-g128-bf16-b128e-m128n192-s4-ss-tr", "e4m3w8-g128-fp32-b128-m128n128-s3-ss-tr-e64",
)]  # fmt: skip
"""Activations with a scale per token and 128 k, which other warps copy one by one."""
DRAWN = 13
"""Kernels that are compiled by default; --all-kernels takes all."""


@cache
def everything() -> list[KernelSpec]:
    """What the layers of a Llama-3-8B can need on an H200; of each format of weights what narrow or wide tiles choose,
    and one drawn; with spin limits, shared activations and other sums."""
    draw, found = random.Random(2024), []
    for lhs in LHS_TYPES:
        for n, k in ((6144, 4096), (4096, 4096), (1024, 4096), (28672, 4096), (14336, 4096), (4096, 14336)):
            found += kernels_for(n, k, lhs, LLAMA_FORMAT, H200, 8192)
        for number, format in enumerate(FORMATS_OF[lhs]):
            out = REAL_TYPES[number % 3]
            found.append(choose(Problem((16, 4096)[number % 2], 4096, 4096, lhs, format, out), H200))
            found.append(draw.choice(legal_kernels(lhs, format, H200, out)))
        found += [replace(choose(Problem(m, 4096, 4096, lhs, LLAMA_FORMAT), H200), debug=True) for m in (1, 2048)]
        sums = "f16" if lhs == "e4m3" else "f32"
        kernels = legal_kernels(lhs, replace(LLAMA_FORMAT, order=lhs), H200, sums=sums)
        for rare in (lambda spec: spec.multicast_lhs > 1, lambda spec: spec.sums != "f32"):
            found += draw.sample([spec for spec in kernels if rare(spec)], 2)
    return list(dict.fromkeys([*found, *BLOCK_SCALES]))


@cache
def drawn(all_kernels: bool) -> list[KernelSpec]:
    """The kernels to compile: all, or a sample by seed with some of every knob."""
    if all_kernels:
        return everything()
    draw, found = random.Random(2026), [everything()[0], *BLOCK_SCALES]
    for has in (
        lambda spec: spec.consumers_copy_lhs, lambda spec: spec.warpgroups_k == 4, lambda spec: spec.multicast_lhs > 1,
        lambda spec: spec.ctas_per_sm == 2, lambda spec: spec.debug, lambda spec: spec.sums != "f32",
    ):  # fmt: skip
        found += draw.sample([spec for spec in everything() if has(spec)], 1)
    return list(dict.fromkeys([*found, *draw.sample(everything(), DRAWN)]))[:DRAWN]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel" in metafunc.fixturenames:
        count = len(everything()) if metafunc.config.getoption("all_kernels") else DRAWN
        metafunc.parametrize("kernel", range(count), indirect=True)


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> KernelSpec:
    return drawn(request.config.getoption("all_kernels"))[request.param]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory, request) -> dict[KernelSpec, Entry | CompileError]:
    """The drawn kernels, compiled; a failure is kept for the test of that kernel."""
    cache = KernelCache([tmp_path_factory.mktemp("kernels")])

    def build(spec: KernelSpec) -> Entry | CompileError:
        try:
            return cache.get_or_compile(kernel_source(spec))[0]
        except CompileError as error:
            return error

    specs = drawn(request.config.getoption("all_kernels"))
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(specs, pool.map(build, specs)))


# ---- builds ---------------------------------------------------------------------------------------------------------


SPILLED_BYTES = 200
"""Most that a kernel may spill, stored and loaded: what the selector's sum of registers lets pass."""


def test_compiles_for_sm_90a_without_spilling_badly_or_serialised_wgmma(compiled, kernel):
    entry, spec = compiled[kernel], kernel
    if isinstance(entry, CompileError):
        pytest.fail(f"{spec.label}: {str(entry)[:3000]}")
    log = entry.metadata["log"]
    assert entry.cubin.startswith(b"\x7fELF") and entry.metadata["arch"] == "sm_90a"
    assert "for 'sm_90a'" in log
    ((stores, loads),) = re.findall(r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert int(stores) + int(loads) <= SPILLED_BYTES
    assert SERIALISED.findall(log) == []
    assert "warning" not in log.lower(), log
    if spec.warpgroups > 1:
        # setmaxnreg hands on what the launch allocated: with fewer than the spec counts on, consumers wait forever.
        assert entry.metadata["registers"] == spec.entry_registers
    else:
        assert entry.metadata["registers"] <= spec.entry_registers


MEMBAR, ARRIVE, NEVER = 0x992, 0x9A7, 15
"""Opcodes of fence.acq_rel.cta and mbarrier.arrive, and the predicate of what never runs."""


def test_a_stage_is_handed_back_when_its_loads_are_done(compiled, kernel):
    """An arrival overtakes loads in flight (docs/notes/sums.md): a fence stands between them, in the machine code."""
    cubin = compiled[kernel].cubin
    found = 0
    for start, end in sass.code_sections(cubin):
        code = list(sass.instructions(cubin, start, end))
        loads = [at for at, each in enumerate(code) if each.opcode == sass.LDS and each.low >> 12 & 15 != NEVER]
        fences = [at for at, each in enumerate(code) if each.opcode == MEMBAR]
        for multiply in (at for at, each in enumerate(code) if each.opcode in sass.MULTIPLY):
            handed_back = next(at for at in range(multiply, len(code)) if code[at].opcode == ARRIVE)
            fence = max((at for at in fences if multiply < at < handed_back), default=-1)
            assert fence > max((at for at in loads if at < handed_back), default=-1), code[handed_back].offset - start
            found += 1
    assert found >= 4


COPY, LOAD = 0xFAE, 0x981
"""Opcodes of cp.async and of a load from global memory."""


def test_a_record_s_scales_are_copied_without_looking_up_whose_they_are():
    """That is done once a tile: for each record of a grouped kernel it took longer than the record's multiplies."""
    spec = KernelSpec.from_label("e4m3w8-g128-fp32-b128-m192n128-s4-ss-tr-e64")
    source = kernel_source(spec)
    cubin = compile_cubin(source.source, source.headers, source.options, name=source.label).cubin
    ((start, end),) = sass.code_sections(cubin)
    code = [each.opcode for each in sass.instructions(cubin, start, end)]
    copies = [at for at, opcode in enumerate(code) if opcode == COPY]
    assert len(copies) == spec.block_m / 32
    between = code[copies[0] : copies[-1]]
    assert LOAD not in between and len(between) < 8 * len(copies)


# ---- shared memory --------------------------------------------------------------------------------------------------


def test_a_wrong_size_of_shared_memory_does_not_compile(monkeypatch, tmp_path):
    """That it compiles at all is the proof that spec.smem_bytes and shared.cuh agree."""
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path))
    source = re.sub(r"(kBytes == )(\d+)", lambda match: f"{match[1]}{int(match[2]) + 16}", render(everything()[0]))
    with pytest.raises(CompileError, match="spec.py and shared.cuh disagree"):
        compile_cubin(source, headers(), OPTIONS, name="wrong")


# ---- the same everywhere --------------------------------------------------------------------------------------------

RENDER = """
import jitgemm_cli  # without torch
import hashlib, json, sys
from jitgemm.jit.cache import KernelCache
from jitgemm.kernel.render import kernel_source
from jitgemm.jit.nvrtc import nvrtc_info
from jitgemm.kernel.spec import KernelSpec
sources, cubins = {}, {}
for number, label in enumerate(json.loads(sys.argv[1])):
    request = kernel_source(KernelSpec.from_label(label))
    sources[request.key(nvrtc_info())] = hashlib.sha256(request.source.encode()).hexdigest()
    if number < 2:
        entry = KernelCache([sys.argv[2]]).get_or_compile(request)[0]
        cubins[entry.key] = hashlib.sha256(entry.cubin).hexdigest()
import jitgemm
print(json.dumps([jitgemm.__file__, sources, cubins]))
"""


def test_another_process_and_checkout_have_the_same_sources_keys_and_cubins(compiled, tmp_path):
    two = [spec for spec, entry in compiled.items() if isinstance(entry, Entry)][:2]
    specs = [*two, *(spec for spec in everything()[::4] if spec not in two)]
    checkout = tmp_path / "a" / "longer path"
    for folder in ("jitgemm", "include"):
        shutil.copytree(REPOSITORY / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "jitgemm_cli.py", checkout)
    command = [sys.executable, "-c", RENDER, json.dumps([spec.label for spec in specs]), str(checkout / "cache")]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "77"}
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    package, sources, cubins = json.loads(done.stdout)
    assert Path(package).is_relative_to(checkout)  # its own copy, not this one
    here = [kernel_source(spec) for spec in specs]
    assert sources == {each.key(nvrtc_info()): hashlib.sha256(each.source.encode()).hexdigest() for each in here}
    assert len(sources) == len(specs)
    assert cubins == {compiled[spec].key: compiled[spec].metadata["cubin_sha256"] for spec in two}


def test_only_the_scheduler_says_where_a_tile_s_weights_factors_and_tokens_are():
    """So that a scheduler over groups of rows is another scheduler, not another kernel."""
    read = re.compile(r"args\.(m|records|channel_scale|row_sum|bias|last_rows)\b")
    assert {name for name, text in headers().items() if read.search(text)} == {"jitgemm/gemm/scheduler.cuh"}


def test_no_path_and_no_date_reaches_what_is_keyed():
    request = kernel_source(everything()[0])
    text = "\n".join([request.source, *request.headers, *request.headers.values(), *request.options])
    assert str(REPOSITORY) not in text and str(Path.home()) not in text
    assert "__FILE__" not in text and "__DATE__" not in text and "__TIME__" not in text


def test_every_field_of_a_kernel_reaches_its_source():
    """A field that did not would give two kernels one cubin."""
    fmt = WeightFormat(128, False, "bf16")
    base = KernelSpec("e4m3", fmt, block_m=48, block_n=64, stages=4, warpgroups_k=2)
    other = {
        "lhs": "s8", "block_m": 32, "block_n": 128, "stages": 3, "token_halves": 2, "warpgroups_k": 1, "split_k": 2,
        "reduce_scatter": True, "multicast_lhs": 2, "ctas_per_sm": 2, "consumers_copy_lhs": True, "out": "fp16",
        "debug": True, "experts": 64, "lhs_group": 128, "tokens_as_m": True, "sums": "f16", "chunks": 2,
    }  # fmt: skip
    formats = {"group_size": 64, "zero_point": True, "scale_type": "fp16", "order": "e4m3", "offset": True}
    assert other.keys() == {field.name for field in fields(KernelSpec)} - {"format", "lhs_e8m0"}
    not_alone = {"code", "uniform_strip_scale", "correction"}
    assert formats.keys() == {field.name for field in fields(WeightFormat)} - not_alone
    changed = [replace(base, **{name: value}) for name, value in other.items() if name != "tokens_as_m"]
    changed += [replace(base, format=replace(fmt, **{name: value})) for name, value in formats.items()]
    changed.append(replace(base, format=replace(fmt, code="e4m3", order="e4m3")))
    rows = replace(changed[-1], block_m=128, block_n=128, warpgroups_k=1, lhs_group=128)
    changed += [rows, replace(rows, tokens_as_m=True)]
    changed.append(replace(base, lhs_group=128, lhs_e8m0=True))
    int8 = replace(base, lhs="s8", format=replace(fmt, order="s8"))
    changed += [int8, *(replace(int8, format=replace(int8.format, correction=type)) for type in CORRECTION_TYPES)]
    # Not through the label in the first line alone.
    sources = {render(spec).split("\n", 1)[1] for spec in (base, *changed)}
    assert len(sources) == len(changed) + 1
    assert len({spec.label for spec in (base, *changed)}) == len(changed) + 1
