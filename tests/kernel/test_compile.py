"""What NVRTC makes of the rendered kernels: hardly a spill, no serialised wgmma, its shape, the same everywhere.

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

import builders
import pytest

from jitgemm.dtypes import LHS_TYPES, REAL_TYPES
from jitgemm.errors import CompileError
from jitgemm.jit import sass
from jitgemm.jit.cache import KernelCache
from jitgemm.jit.entry import Entry
from jitgemm.jit.nvrtc import SERIALISED, compile_cubin, nvrtc_info
from jitgemm.jit.source import OPTIONS, headers
from jitgemm.kernel.formats import CORRECTION_TYPES, GROUP_SIZES, Problem, WeightFormat
from jitgemm.kernel.render import kernel_source, render
from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import with_k_rules
from jitgemm.select.choose import choose, kernels_for
from jitgemm.select.devices import DEVICES
from jitgemm.select.legal import legal_kernels

pytestmark = pytest.mark.nvrtc

REPOSITORY = Path(__file__).resolve().parents[2]
H200 = DEVICES["h200"]
MAX_M = 8192
LLAMA_FORMAT = WeightFormat(128, False, "bf16")


@cache
def llama_kernels() -> list[KernelSpec]:
    """Every kernel that the layers of a Llama-3-8B can need on an H200, both lhs types."""
    found: dict[KernelSpec, None] = {}
    for n, k in ((6144, 4096), (4096, 4096), (1024, 4096), (28672, 4096), (14336, 4096), (4096, 14336)):
        for lhs in LHS_TYPES:
            found.update(dict.fromkeys(kernels_for(n, k, lhs, LLAMA_FORMAT, H200, MAX_M)))
    return list(found)


def sampled_kernels() -> list[KernelSpec]:
    """One legal kernel of every other format for each lhs type, and of the Llama format one with spin limits."""
    draw = random.Random(2024)
    found = [
        with_k_rules(draw.choice(legal_kernels(lhs, LLAMA_FORMAT, H200)), 14336) for lhs in LHS_TYPES for _ in range(4)
    ]
    for format in (WeightFormat(*format) for format in builders.ALL_FORMATS):
        # Scale types differ in one load only: two of three are left to the GPU tests.
        if format.scale_type == ("fp32", "bf16", "fp16")[draw.randrange(3)] or format.group_size == 128:
            for lhs in LHS_TYPES:
                found.append(draw.choice(legal_kernels(lhs, format, H200)))
    for lhs in LHS_TYPES:
        for m in (1, 2048):
            found.append(replace(choose(Problem(m, 4096, 4096, lhs, LLAMA_FORMAT), H200), debug=True))
    return list(dict.fromkeys(found))


def newer_kernels() -> list[KernelSpec]:
    """Offsets, orders of codes for one type of activations, and outputs other than bf16: what narrow and wide tiles
    choose, where registers are scarcest, and one drawn at random of each."""
    draw = random.Random(2025)
    found = []
    for lhs in LHS_TYPES:
        forms = [
            *((WeightFormat(group, zero, "bf16", offset=True), "bf16")
              for group, zero in ((32, True), (64, False), (128, False), (128, True), (256, False))),
            (WeightFormat(32, False, "fp32", lhs, True), "fp32"),
            (WeightFormat(128, False, "bf16", lhs), "bf16"),
            (WeightFormat(64, False, "fp16", lhs), "fp16"),
            (WeightFormat(128, True, "bf16"), "fp32"),
            (WeightFormat(0, False, "fp32", lhs), "fp32"),
            (WeightFormat(0, True, "fp32"), "fp16"),
        ]  # fmt: skip
        for format, out in forms:
            ms = (16, 4096) if format.offset and format.group_size in (32, 128) else (4096,)
            found += [choose(Problem(m, 4096, 4096, lhs, format, out), H200) for m in ms]
            found.append(draw.choice(legal_kernels(lhs, format, H200, out)))
        for rare in (lambda spec: spec.multicast_lhs > 1, lambda spec: spec.sums != "f32"):
            kernels = legal_kernels(
                lhs, WeightFormat(128, False, "bf16", lhs), H200, sums="f16" if lhs == "e4m3" else "f32"
            )
            found += draw.sample([spec for spec in kernels if rare(spec)], 2)
    return list(dict.fromkeys(found))


@cache
def sample() -> list[KernelSpec]:
    return [spec for spec in (*sampled_kernels(), *newer_kernels()) if spec not in llama_kernels()]


BLOCK_SCALES = [KernelSpec.from_label(label) for label in (
    "e4m3fast-g128-bf16-b128-m64n64-k2x2s-s7", "s8-g32-fp32-b128e-m16n64-k2x2s-s6",
    "e4m3w8-g128-fp32-b128-m64n64-k2x2s-s5-ss", "e4m3w8-g128-fp32-b128-m64n256-s4-ss-tr",
    "e4m3w8-g128-fp32-b128-m192n64-s6-ss-tr", "e4m3w8-g128-fp32-b128-m256hn128-s3-ss-tr",
    "s8w8-g128-bf16-b128e-m128n192-s4-ss-tr", "e4m3w8-g128-fp32-b128-m128n128-s3-ss-tr-e64",
)]  # fmt: skip
"""Activations with a scale per token and 128 k, which other warps copy one by one."""
DRAWN, DRAWN_SHAPES = 20, 6
"""Kernels that are compiled by default, and shapes of wgmma whose PTX is read; --all-kernels takes all of them."""


@cache
def shapes(everything: bool) -> list[KernelSpec]:
    """A kernel of each shape of wgmma."""
    found = list({(spec.lhs, spec.block_m, spec.token_halves): spec for spec in (*sample(), *llama_kernels())}.values())
    return found if everything else random.Random(2026).sample(found, DRAWN_SHAPES)


@cache
def drawn(all_kernels: bool) -> list[KernelSpec]:
    """The kernels to compile: all, or a sample by seed with some of every knob."""
    everything = [*llama_kernels(), *sample(), *BLOCK_SCALES]
    if all_kernels:
        return everything
    draw = random.Random(2026)
    knobs = {
        "direct": lambda spec: spec.consumers_copy_lhs,
        "four warpgroups along k": lambda spec: spec.warpgroups_k == 4,
        "multicast": lambda spec: spec.multicast_lhs > 1,
        "halves": lambda spec: spec.token_halves == 2,
        "two CTAs": lambda spec: spec.ctas_per_sm == 2,
        "debug": lambda spec: spec.debug,
        "sums": lambda spec: spec.sums != "f32",
    }
    found = [llama_kernels()[0], llama_kernels()[-1], sample()[0], *BLOCK_SCALES]
    for has in knobs.values():
        found += draw.sample([spec for spec in everything if has(spec)], 1)
    return list(dict.fromkeys([*found, *draw.sample(everything, DRAWN)]))[:DRAWN]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    everything = metafunc.config.getoption("all_kernels")
    for name, of, count in (("kernel", drawn, DRAWN), ("shape", shapes, DRAWN_SHAPES)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(len(of(True)) if everything else count), indirect=True)


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> KernelSpec:
    return drawn(request.config.getoption("all_kernels"))[request.param]


@pytest.fixture
def shape(request: pytest.FixtureRequest) -> KernelSpec:
    return shapes(request.config.getoption("all_kernels"))[request.param]


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


def test_llama_s_layers_need_few_kernels_and_bring_all_forms():
    assert 20 <= len(llama_kernels()) <= 150
    for lhs in LHS_TYPES:
        kernels = [spec for spec in llama_kernels() if spec.lhs == lhs]
        assert any(spec.split_k > 1 for spec in kernels) and any(spec.split_k == 1 for spec in kernels)
        assert any(spec.block_m >= 64 for spec in kernels) and any(spec.block_m <= 16 for spec in kernels)


# ---- wgmma shape ----------------------------------------------------------------------------------------------------


def ptx(spec: KernelSpec) -> str:
    """PTX of a kernel, from the same source, headers and options but for a virtual architecture."""
    from cuda.bindings import nvrtc

    done = nvrtc.nvrtcResult.NVRTC_SUCCESS
    texts = headers()
    names = sorted(texts)
    code, program = nvrtc.nvrtcCreateProgram(
        render(spec).encode(), b"kernel.cu", len(names), [texts[n].encode() for n in names], [n.encode() for n in names]
    )
    assert code == done
    options = [o.replace("sm_90a", "compute_90a").encode() for o in OPTIONS if not o.startswith("--ptxas-options")]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert code == done
    code, size = nvrtc.nvrtcGetPTXSize(program)
    assert code == done
    text = bytes(size)
    assert nvrtc.nvrtcGetPTX(program, text)[0] == done
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()


def test_the_ptx_holds_the_wgmma_asked_for_and_no_other(shape):
    text, spec = ptx(shape), shape
    types = {"e4m3": "f32.e4m3.e4m3", "s8": "s32.s8.s8"}[spec.lhs]
    expected = f"wgmma.mma_async.sync.aligned.m64n{spec.block_m // spec.token_halves}k32.{types}"
    assert set(re.findall(r"wgmma\.mma_async[\w.]*", text)) == {expected}
    assert ".target sm_90a" in text
    # Weights come from registers: four 32-bit operands before one 64-bit descriptor.
    assert re.search(re.escape(expected) + r" \{[^}]*\}, \{%r\d+, %r\d+, %r\d+, %r\d+\}, %rd\d+,", text)


# ---- shared memory --------------------------------------------------------------------------------------------------


def test_a_wrong_size_of_shared_memory_does_not_compile(monkeypatch, tmp_path):
    """That it compiles at all is the proof that spec.smem_bytes and shared.cuh agree."""
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path))
    source = re.sub(r"(kBytes == )(\d+)", lambda match: f"{match[1]}{int(match[2]) + 16}", render(llama_kernels()[0]))
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
out = {}
for label in json.loads(sys.argv[1]):
    request = kernel_source(KernelSpec.from_label(label))
    key = request.key(nvrtc_info())
    out[key] = hashlib.sha256(request.source.encode()).hexdigest()
    if len(sys.argv) > 2:
        out[key] = hashlib.sha256(KernelCache([sys.argv[2]]).get_or_compile(request)[0].cubin).hexdigest()
import jitgemm
print(json.dumps([jitgemm.__file__, out]))
"""


def start(checkout: Path, specs: list[KernelSpec], *arguments: str, hash_seed: str = "0") -> subprocess.Popen:
    labels = json.dumps([spec.label for spec in specs])
    return subprocess.Popen(
        [sys.executable, "-c", RENDER, labels, *arguments],
        env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": hash_seed},
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen) -> tuple[str, dict[str, str]]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return tuple(json.loads(out))


def test_rendering_is_the_same_in_every_process():
    specs = [*llama_kernels()[::4], *sample()[::3]]
    _, there = result(start(REPOSITORY, specs, hash_seed="77"))
    sources = [kernel_source(spec) for spec in specs]
    here = {each.key(nvrtc_info()): hashlib.sha256(each.source.encode()).hexdigest() for each in sources}
    assert there == here and len(here) == len(specs)


def test_another_checkout_has_the_same_keys_and_cubins(compiled, tmp_path):
    specs = [spec for spec in (llama_kernels()[0], sample()[0]) if isinstance(compiled[spec], Entry)]
    assert specs
    checkout = tmp_path / "a" / "longer path"
    for folder in ("jitgemm", "include"):
        shutil.copytree(REPOSITORY / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "jitgemm_cli.py", checkout)
    package, found = result(start(checkout, specs, str(checkout / "cache"), hash_seed="3"))
    assert Path(package).is_relative_to(checkout)  # its own copy, not this one
    assert found == {compiled[spec].key: compiled[spec].metadata["cubin_sha256"] for spec in specs}


def test_the_sample_holds_every_output_order_of_codes_and_offsets_of_every_group_size():
    for lhs in LHS_TYPES:
        kernels = [spec for spec in sample() if spec.lhs == lhs]
        assert {spec.out for spec in kernels} == set(REAL_TYPES)
        assert {spec.format.order for spec in kernels} == {"any", lhs}
        assert {spec.format.group_size for spec in kernels if spec.format.offset} == set(GROUP_SIZES)


def test_different_kernels_have_different_sources():
    sources = [render(spec) for spec in (*llama_kernels(), *sample())]
    assert len(set(sources)) == len(sources)


def test_only_the_scheduler_says_where_a_tile_s_weights_factors_and_tokens_are():
    """So that a scheduler over groups of rows is another scheduler, not another kernel."""
    read = re.compile(r"args\.(m|records|channel_scale|row_sum|bias|last_rows)\b")
    assert {name for name, text in headers().items() if read.search(text)} == {"jitgemm/gemm/scheduler.cuh"}


def test_no_path_and_no_date_reaches_what_is_keyed():
    request = kernel_source(llama_kernels()[0])
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
    assert formats.keys() == {field.name for field in fields(WeightFormat)} - {
        "code",
        "uniform_strip_scale",
        "correction",
    }
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
