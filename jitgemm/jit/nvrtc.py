"""NVRTC: which library there is, and source text in, cubin out.

Knows nothing of kernels' meaning, of the cache's files or of a GPU. Two rules shape it. Asking which NVRTC there is
must not load it, because a cached kernel's key needs the version and loading takes longer than reading the kernel. And
what it says must hold for the library that cuda.bindings then loads, so every compilation checks that first.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jitgemm import settings
from jitgemm.errors import CompileError

# Where NVIDIA's wheels put the library and what they are called. In one folder CUDA 13's wins even under cuda-bindings
# 12, as the bindings themselves look.
_WHEELS = {
    "nvidia/cu13/lib/libnvrtc.so.13": "nvidia_cuda_nvrtc",
    "nvidia/cuda_nvrtc/lib/libnvrtc.so.12": "nvidia_cuda_nvrtc_cu12",
}
INSTALL = {
    12: "pip install 'cuda-python==12.9.*' 'nvidia-cuda-nvrtc-cu12>=12.8,<13'",
    13: "pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'",
}
"""By line of CUDA, what the package's extras cu12 and cu13 install. No index has the package itself."""
INSTALL_ONE = (
    f"install one line of CUDA, as .[cu12] or .[cu13] of jitgemm's checkout do: {' or '.join(INSTALL.values())}"
)
_PROGRAM_NAME = b"jitgemm.cu"  # constant, so that no name reaches the cubin

SERIALISED = re.compile(r"\(C75(?:08|1[0-8])\b[^\n]*")
"""ptxas on setmaxnreg ignored (C7508), on wgmma serialised or given waits unasked for (C7510-C7518): right results,
slowly. C7519, a fence for each multiply of a record, means only that decode was scheduled between them."""
_FUNCTION = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass(frozen=True)
class NvrtcInfo:
    """The NVRTC that a compilation uses.

    Attributes:
        version: (major, minor).
        build: full version, such as "12.9.86". Where only (major, minor) is known, the library's size stands in for the
            rest, as "12.9+106244480".
        library: path of the shared library, or None where it is not known.
    """

    version: tuple[int, int]
    build: str
    library: str | None


@dataclass(frozen=True)
class Compiled:
    """A cubin and what ptxas reported: registers of the hungriest entry; bytes of spills, of stack and of static shared
    memory; its line on serialised wgmma, or ""; `seconds` of wall clock, NVRTC's loading left out; `built`, the cubin
    before yield hints were set in it, or None where none were; `source`, what was compiled."""

    cubin: bytes
    log: str
    seconds: float
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_static: int
    serialised: str = ""
    built: bytes | None = None
    source: str = ""


@lru_cache(maxsize=1)
def nvrtc_info() -> NvrtcInfo:
    """The NVRTC that cuda.bindings loads or has loaded; found without loading it when it comes from a wheel.

    Raises:
        CompileError: there is none.
    """
    library = next(iter(_mapped_libraries()), None) or _wheel_library()
    build = _build_of(library)
    if not build:  # toolkits, conda and broken installations: only the library knows
        with _gate:
            version = "{}.{}".format(*_call(_load(), "Version"))
        library = next(iter(_mapped_libraries()), None)
        build = _build_of(library)
        if not build.startswith(version + "."):
            build = f"{version}+{os.path.getsize(library)}" if library else version
    major, minor = re.findall(r"\d+", build)[:2]
    return NvrtcInfo((int(major), int(minor)), build, library)


# A fork while a thread is inside NVRTC leaves the child with NVRTC's own locks held for ever. So a fork waits a second
# for those threads, and holds back others meanwhile; a child of one that waited in vain compiles nothing.
_FORK_TIMEOUT_S = 1.0
_gate, _idle, _in_flight, _locks_held = threading.RLock(), threading.Condition(), 0, False


def _before_fork() -> None:
    _gate.acquire()
    with _idle:
        _idle.wait_for(lambda: _in_flight == 0, _FORK_TIMEOUT_S)


def _after_fork_in_child() -> None:
    global _gate, _idle, _in_flight, _locks_held
    _gate, _idle, _in_flight, _locks_held = threading.RLock(), threading.Condition(), 0, _locks_held or _in_flight > 0


@lru_cache(maxsize=1)
def _watch_forks() -> None:
    """At the first compilation, not at import: processes that compile nothing fork as ever."""
    release = lambda: _gate.release()  # noqa: E731 - the gate of then
    os.register_at_fork(before=_before_fork, after_in_parent=release, after_in_child=_after_fork_in_child)


@contextmanager
def _compiling() -> Iterator[None]:
    global _in_flight
    if _locks_held:
        raise CompileError(
            "this process was forked while its parent compiled a kernel, and NVRTC's locks are held in it for ever: "
            "fork before or after that, start processes by spawn, or compile ahead (jitgemm warmup)"
        )
    with _gate, _idle:
        _watch_forks()
        _load()
        _in_flight += 1
    try:
        yield
    finally:
        with _idle:
            _in_flight -= 1
            _idle.notify_all()


@_compiling()
def compile_cubin(source: str, headers: Mapping[str, str], options: Sequence[str], *, name: str) -> Compiled:
    """Compile one translation unit. Thread-safe; NVRTC leaves the GIL to others meanwhile.

    A kernel that spills or whose wgmma ptxas serialised is right, and slow: `Compiled` says so.

    Args:
        source: CUDA C++.
        headers: name -> text of everything `source` includes as `<name>`.
        options: NVRTC options. Must hold a real -arch=sm_* and --ptxas-options=-v, without which spills stay unseen.
        name: what messages and kept files call the kernel; does not reach the cubin.

    Raises:
        CompileError: NVRTC is missing, is not the one `nvrtc_info()` reported, or does not compile the source, which is
            kept; the message says where. Or the process was forked while its parent compiled for more than a second.
    """
    nvrtc = _load()
    _check_is_reported(nvrtc)
    # NVRTC 12.9 brought a cache of its own, whose hits leave the log empty.
    flags = [*options, "--no-cache"] if nvrtc_info().version >= (12, 9) else options
    names = sorted(headers)
    texts, includes = [headers[each].encode() for each in names], [each.encode() for each in names]
    started = time.perf_counter()
    (program,) = _call(nvrtc, "CreateProgram", source.encode(), _PROGRAM_NAME, len(names), texts, includes)
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if code.value:
            raise _failure(f"NVRTC did not compile kernel {name} ({code.name})", log, name, source)
        cubin = _read(nvrtc, program, "CUBIN")
    finally:
        _call(nvrtc, "DestroyProgram", program)
    seconds = time.perf_counter() - started
    if not cubin:
        raise _failure(f"NVRTC built no cubin for kernel {name}: options need a real -arch=sm_*", log, name, source)
    frames = [tuple(map(int, match)) for match in _FUNCTION.findall(log)]
    used = _USED.findall(log)
    if not frames or not used:
        raise _failure(f"ptxas reported nothing on kernel {name}: options need --ptxas-options=-v", log, name, source)
    serialised = SERIALISED.search(log)
    return Compiled(
        cubin=cubin,
        log=log,
        seconds=seconds,
        registers=max(int(registers) for registers, _ in used),
        spill_bytes=sum(stores + loads for _, stores, loads in frames),
        stack_bytes=sum(stack for stack, _, _ in frames),
        smem_static=max(int(smem or 0) for _, smem in used),
        serialised=serialised[0].strip() if serialised else "",
        source=source,
    )


@lru_cache(maxsize=1)
def _load() -> Any:
    """cuda.bindings.nvrtc with its library loaded; threads come here through the gate at first."""
    try:
        from cuda.bindings import nvrtc

        library = None if _mapped_libraries() else _wheel_library()
        if library:
            ctypes.CDLL(library)  # the bindings take what is loaded, and look in fewer folders themselves
        nvrtc.nvrtcVersion()  # the bindings load at the first call
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError is the bindings' for a missing library
        raise CompileError(
            f"NVRTC or cuda.bindings is missing ({error}): {INSTALL_ONE}. NVRTC's wheel was looked for in "
            f"{', '.join(filter(None, sys.path)) or 'no folder'}, then its library by the dynamic linker, which "
            "LD_LIBRARY_PATH sends to other folders"
        ) from error
    return nvrtc


def _check_is_reported(nvrtc: Any) -> None:
    """CompileError instead of a kernel under the name of an NVRTC that did not compile it."""
    info, version = nvrtc_info(), tuple(_call(nvrtc, "Version"))
    mapped = _mapped_libraries()  # other libraries may have loaded an NVRTC of their own, too
    with suppress(OSError):  # replaced on disk since it was loaded
        ours = not (mapped and info.library) or any(os.path.samefile(path, info.library) for path in mapped)
        if ours and version == info.version:
            return
    raise CompileError(
        "NVRTC {} ({}) was found, but NVRTC {}.{} ({}) was loaded: two NVRTCs are installed; keep the wheel of one "
        "CUDA line".format(info.build, info.library, *version, ", ".join(mapped))
    )


def _mapped_libraries() -> list[str]:
    """Every libnvrtc that this process has mapped, whoever loaded it; first the one that the bindings take."""
    try:
        maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    except OSError:
        return []
    paths = set(re.findall(r"(/[^\n]*/libnvrtc\.so\.\d[^\n/]*)\n", maps))
    return sorted(paths, key=os.path.basename, reverse=True)


def _wheel_library() -> str | None:
    """The library of the first wheel where Python imports from."""
    folders = (os.path.abspath(folder) for folder in sys.path if folder)
    paths = (os.path.join(folder, relative) for folder in folders for relative in _WHEELS)
    return next(filter(os.path.exists, paths), None)


def _build_of(library: str | None) -> str:
    """Full version from the dist-info of the library's wheel or from a toolkit's file name; "" if neither says."""
    for relative, distribution in _WHEELS.items():
        if library and library.endswith("/" + relative):
            files = "\n".join(os.listdir(library[: -len(relative)]))
            builds = re.findall(rf"^{distribution}-([^-\n]+)\.dist-info$", files, re.MULTILINE)
            if len(builds) == 1:  # a broken upgrade leaves two: then only the library itself knows
                return builds[0]
    match = re.search(r"libnvrtc\.so\.(\d+\.\d+\.\d+)$", os.path.realpath(library or ""))
    return match[1] if match else ""


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    """`what` ("ProgramLog" or "CUBIN") of a program; empty when there is none."""
    (size,) = _call(nvrtc, f"Get{what}Size", program)
    data = bytes(size)
    if size:
        _call(nvrtc, f"Get{what}", program, data)  # fills the bytes object in place; Python's only b"\0" with itself
    return data


def _call(nvrtc: Any, name: str, *arguments: Any) -> list[Any]:
    """The results of an NVRTC call. Raises CompileError."""
    code, *results = getattr(nvrtc, f"nvrtc{name}")(*arguments)
    if code.value:
        raise CompileError(f"nvrtc{name} failed: {code.name}")
    return results


def _failure(message: str, log: str, name: str, source: str) -> CompileError:
    """A CompileError whose source is kept: in the dump folder if there is one, else in a temporary file."""
    import tempfile

    path = None
    try:
        folder = settings.dump_dir()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=f"jitgemm-{name}-", suffix=".cu", dir=folder)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(source)
        kept = f"source kept in {path}"
    except OSError as error:
        kept = f"source could not be kept: {error}"
    return CompileError(f"{message}\n{kept}\nNVRTC's log:\n{log or '(empty)'}", log=log, source_path=path)
