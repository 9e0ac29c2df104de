"""NVRTC: its version is known without loading it and is that of what gets loaded; bad builds do not pass for good."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_kernel import HEADERS, OPTIONS, tiny_source

from jitgemm.errors import CompileError
from jitgemm.jit.nvrtc import INSTALL, NvrtcInfo, compile_cubin, nvrtc_info

pytestmark = pytest.mark.nvrtc

REPOSITORY = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "helpers")])


def python(script: str, **variables: str) -> str:
    """Standard output of a script in a new process, which runs without torch, as the command does."""
    script = f"import jitgemm_cli\n{script}"
    environment = {**os.environ, "PYTHONPATH": PATHS, **variables}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_what_messages_install_is_what_the_extras_install():
    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    for line, command in INSTALL.items():
        assert shlex.split(command) == ["pip", "install", *extras[f"cu{line}"]]


@pytest.mark.parametrize("way", ["pth", "PYTHONPATH"])
def test_a_wheel_is_found_wherever_python_imports_from(way, tmp_path):
    if "site-packages" not in (nvrtc_info().library or ""):
        pytest.skip(f"NVRTC comes from {nvrtc_info().library}, no wheel")
    here = sysconfig.get_paths()["purelib"]
    venv.create(tmp_path, with_pip=False)
    (overlay,) = tmp_path.glob("lib/python3*/site-packages")
    if way == "pth":  # as `uv run --with` does
        (overlay / "overlay.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    script = f"""
import jitgemm_cli  # without torch
from jitgemm.jit.nvrtc import compile_cubin, nvrtc_info
from tiny_kernel import HEADERS, OPTIONS, tiny_source
assert nvrtc_info().library == {nvrtc_info().library!r}
assert "libnvrtc" not in open("/proc/self/maps").read()
compile_cubin(tiny_source(), HEADERS, OPTIONS, name="tiny")
"""
    path = os.pathsep.join([PATHS, here] if way == "PYTHONPATH" else [PATHS])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [str(tmp_path / "bin" / "python"), "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_library_other_than_the_reported_one_is_refused(monkeypatch):
    real = nvrtc_info()
    monkeypatch.setattr("jitgemm.jit.nvrtc.nvrtc_info", lambda: NvrtcInfo((11, 0), "11.0.1", real.library))
    with pytest.raises(CompileError, match="two NVRTCs"):
        compile_cubin(tiny_source(), HEADERS, OPTIONS, name="tiny")


def test_another_library_loaded_beside_the_bindings_own_does_no_harm(tmp_path):
    script = f"""
import ctypes, shutil
from tiny_kernel import HEADERS, OPTIONS, SERIALISED, SPILLING, TIGHT, tiny_source
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
    assert "Used" in again.log  # which NVRTC's own cache would leave empty
    source = 'extern "C" __global__ void k(int* o) { __shared__ int s[96]; s[threadIdx.x] = 1; o[0] = s[95]; }'
    assert compile_cubin(source, {}, OPTIONS, name="shared").smem_static == 96 * 4


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


@pytest.mark.parametrize(
    ("options", "needed"),
    [(("-arch=sm_90a",), "--ptxas-options=-v"), (("-arch=compute_90a", "--ptxas-options=-v"), "-arch=sm_")],
)
def test_options_that_would_hide_a_spill_or_give_no_cubin_are_refused(monkeypatch, tmp_path, options, needed):
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path))
    with pytest.raises(CompileError, match=needed):
        compile_cubin(tiny_source(), HEADERS, options, name="tiny")
