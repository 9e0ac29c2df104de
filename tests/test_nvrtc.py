"""NVRTC: its version is known without loading it and is that of what gets loaded; bad builds do not pass for good."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_kernel import HEADERS, OPTIONS, tiny_source

from jitgemm.errors import CompileError
from jitgemm.jit.nvrtc import NvrtcInfo, compile_cubin, nvrtc_info

pytestmark = pytest.mark.nvrtc

REPOSITORY = Path(__file__).resolve().parent.parent
PATHS = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])

SERIALISED = """
extern "C" __global__ void serialised(float* out, unsigned long long a, unsigned long long b) {
    float d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;");
    for (int i = 0; i < 4; ++i) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, 1, 1, 1;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a + i), "l"(b + i));
        asm volatile("wgmma.commit_group.sync.aligned;");
        out[threadIdx.x + i] = d[i];  // read before the wait
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    out[threadIdx.x] += d[0] + d[1] + d[2] + d[3];
}
"""

SPILLING = """
extern "C" __global__ void spilling(float* out) {
    float v[64];
    #pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = out[threadIdx.x + 1024 * i];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; ++i) out[threadIdx.x + 1024 * i] = v[i] * v[63 - i];
}
"""


def python(script: str, **variables: str) -> str:
    """Standard output of a script in a new process."""
    environment = {**os.environ, "PYTHONPATH": PATHS, **variables}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_found_without_loading_the_library():
    script = """
from jitgemm.jit.nvrtc import nvrtc_info
info = nvrtc_info()
print("libnvrtc" in open("/proc/self/maps").read(), info.library)
"""
    loaded, library = python(script).split()
    if "site-packages" not in library:
        pytest.skip(f"NVRTC comes from {library}, no wheel: only the library itself knows its version")
    assert loaded == "False"


@pytest.mark.parametrize("before", ["", "from cuda.bindings import nvrtc; nvrtc.nvrtcVersion()", "import torch"])
def test_the_version_is_that_of_the_library_the_bindings_load(before):
    script = f"""
{before}
from jitgemm.jit.nvrtc import nvrtc_info
info = nvrtc_info()
from cuda.bindings import nvrtc
_, major, minor = nvrtc.nvrtcVersion()
paths = {{line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/libnvrtc.so" in line}}
import os
assert info.version == (major, minor), (info, major, minor)
assert {{os.path.realpath(info.library)}} == paths, (info, paths)
assert info.build.startswith(f"{{major}}.{{minor}}.") and info.build.count(".") == 2, info
"""
    python(script)


def test_a_missing_nvrtc_names_the_extras():
    # No wheel to be found: the bindings look in site's folders too, then ask the dynamic linker.
    script = """
import site
site.getsitepackages, site.ENABLE_USER_SITE = (lambda: []), False
from jitgemm.errors import CompileError
from jitgemm.jit.nvrtc import nvrtc_info
try:
    print("found", nvrtc_info().library)
except CompileError as error:
    print("missing", error)
"""
    said = python(script, CONDA_PREFIX="", CUDA_PATH="", CUDA_HOME="")
    if said.startswith("found"):
        pytest.skip(f"this machine has an NVRTC outside the wheels: {said}")
    assert "pip install jitgemm[cu12]" in said and "jitgemm[cu13]" in said


def test_a_library_other_than_the_reported_one_is_refused(monkeypatch):
    real = nvrtc_info()
    monkeypatch.setattr("jitgemm.jit.nvrtc.nvrtc_info", lambda: NvrtcInfo((11, 0), "11.0.1", real.library))
    with pytest.raises(CompileError, match="two NVRTCs"):
        compile_cubin(tiny_source(), HEADERS, OPTIONS, name="tiny")


def test_another_library_loaded_beside_the_bindings_own_does_no_harm(tmp_path):
    script = f"""
import ctypes, shutil
from tiny_kernel import HEADERS, OPTIONS, tiny_source
from jitgemm.jit.nvrtc import compile_cubin, nvrtc_info
before = compile_cubin(tiny_source(), HEADERS, OPTIONS, name="tiny").cubin
other = shutil.copy(nvrtc_info().library, {str(tmp_path / "libnvrtc.so.99")!r})
ctypes.CDLL(other)
assert other in open("/proc/self/maps").read()
assert compile_cubin(tiny_source(), HEADERS, OPTIONS, name="tiny").cubin == before
"""
    python(script)


def test_compiling_yields_a_cubin_and_what_ptxas_said():
    first, again = (compile_cubin(tiny_source(), HEADERS, OPTIONS, name="tiny") for _ in range(2))
    assert first.cubin.startswith(b"\x7fELF")
    assert 0 < first.registers < 32
    assert (first.spill_bytes, first.stack_bytes, first.smem_static) == (0, 0, 0)
    assert "Compiling entry function 'tiny' for 'sm_90a'" in first.log
    # NVRTC's own cache would leave the second log empty.
    assert "Used" in again.log


def test_static_shared_memory_is_reported():
    source = 'extern "C" __global__ void k(int* o) { __shared__ int s[96]; s[threadIdx.x] = o[0]; __syncthreads();' \
             " o[threadIdx.x] = s[95 - threadIdx.x]; }"
    assert compile_cubin(source, {}, OPTIONS, name="shared").smem_static == 96 * 4


def test_the_same_source_gives_the_same_cubin_in_two_processes(tmp_path):
    script = """
import hashlib
from tiny_kernel import *
from jitgemm.jit.nvrtc import compile_cubin
print(hashlib.sha256(compile_cubin(tiny_source(), HEADERS, OPTIONS, name="{}").cubin).hexdigest())
"""
    digests = {python(script.format(name), TMPDIR=str(tmp_path)) for name in ("one", "two")}
    here = compile_cubin(tiny_source(), HEADERS, OPTIONS, name="three").cubin
    assert digests == {hashlib.sha256(here).hexdigest() + "\n"}


def test_threads_compile_at_once():
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda salt: compile_cubin(tiny_source(salt), HEADERS, OPTIONS, name="t"), range(8)))
    assert len({one.cubin for one in built}) == 8


def test_an_error_carries_the_log_and_keeps_the_source(monkeypatch, tmp_path):
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path / "dump"))
    source = tiny_source() + "int x = not_a_name;\n"
    with pytest.raises(CompileError) as caught:
        compile_cubin(source, HEADERS, OPTIONS, name="broken")
    error = caught.value
    assert "broken" in str(error) and "not_a_name" in error.log and error.log in str(error)
    assert error.source_path in str(error) and Path(error.source_path).read_text() == source
    assert Path(error.source_path).parent == tmp_path / "dump"


def test_an_error_survives_a_source_that_cannot_be_kept(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path / "file" / "dump"))
    with pytest.raises(CompileError, match="source could not be kept") as caught:
        compile_cubin("#error no", {}, OPTIONS, name="broken")
    assert caught.value.source_path is None


def test_spills_are_a_failed_build(monkeypatch, tmp_path):
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path))
    assert compile_cubin(SPILLING, {}, OPTIONS, name="roomy").spill_bytes == 0
    with pytest.raises(CompileError, match="kernel tight counts as a failed build: .* bytes of register spills"):
        compile_cubin(SPILLING, {}, (*OPTIONS, "-maxrregcount=24"), name="tight")
    assert compile_cubin(SPILLING, {}, (*OPTIONS, "-maxrregcount=24"), name="tight", may_spill=True).spill_bytes > 0


def test_serialised_wgmma_is_a_failed_build(monkeypatch, tmp_path):
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path))
    with pytest.raises(CompileError, match="kernel early counts as a failed build: \\(C75..\\) "):
        compile_cubin(SERIALISED, {}, OPTIONS, name="early")


@pytest.mark.parametrize(
    ("options", "needed"),
    [(("-arch=sm_90a",), "--ptxas-options=-v"), (("-arch=compute_90a", "--ptxas-options=-v"), "-arch=sm_")],
)
def test_options_that_would_hide_a_spill_or_give_no_cubin_are_refused(monkeypatch, tmp_path, options, needed):
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path))
    with pytest.raises(CompileError, match=needed):
        compile_cubin(tiny_source(), HEADERS, options, name="tiny")
