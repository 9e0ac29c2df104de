"""What gives way under servers that share a cache: two that start at once, a disk that fills while they serve, a SIGTERM while
they warm up. Real processes, files and compilations."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jitgemm.jit.cache import KernelCache

REPOSITORY = Path(__file__).resolve().parents[2]
PRELUDE = """
import jitgemm_cli  # as the command: without torch, which takes a second or two
import os, resource, signal, sys, threading, time, warnings
from pathlib import Path
from rich.console import Console
from tiny_kernel import tiny_kernel
from jitgemm.jit.cache import KernelCache
from jitgemm.jit.compile_many import compile_all, look_up

def warm_up(cache, salts, threads=2):
    jobs = [look_up(cache, tiny_kernel(salt)) for salt in salts]
    return list(compile_all(cache, [job for job in jobs if not job.stored], threads, Console(stderr=True), bar=False))
"""


def server(script: str, root: Path) -> subprocess.Popen:
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "helpers")])
    code = f"{PRELUDE}\nroot = Path({str(root)!r})\ncache = KernelCache([root])\n{script}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, **pipes)


def said(process: subprocess.Popen) -> list[str]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return out.split()


def good(root: Path) -> int:
    """Entries of the cache, each of which is whole; nothing else lies there."""
    entries = KernelCache([root]).verify()
    assert [problem for _, problem in entries if problem] == []
    assert {path.suffix for path in root.iterdir()} <= {".jgk"}
    return len(entries)


def test_two_servers_that_start_at_once_compile_each_kernel_once(tmp_path):
    root = tmp_path / "cache"
    script = f"""
Path({str(tmp_path)!r}, f"ready-{{os.getpid()}}").touch()
while not Path({str(tmp_path / "go")!r}).exists(): time.sleep(0.005)
done = warm_up(cache, range(8))
print(sum(job.compiled for job in done), sum(look_up(cache, tiny_kernel(salt)).stored for salt in range(8)))
"""
    servers = [server(script, root) for _ in range(2)]
    deadline = time.time() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.time() < deadline:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    compiled, stored = zip(*map(said, servers), strict=True)
    assert sum(map(int, compiled)) == 8 and stored == ("8", "8") and good(root) == 8


def test_a_disk_that_is_full_while_a_server_runs_costs_its_new_kernels_a_place_and_no_call(tmp_path):
    script = """
warm_up(cache, range(2))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # a write beyond fails as on a full disk
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    threads = [threading.Thread(target=cache.get_or_compile, args=(tiny_kernel(salt % 2 + 2),)) for salt in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    found = [cache.get_or_compile(tiny_kernel(salt)) for salt in range(4)]
print(*(compiled for _, compiled in found), *(entry.path is not None for entry, _ in found))
print(len(caught), "cannot be written" in str(caught[0].message))
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
print(*(cache.get_or_compile(tiny_kernel(salt))[0].path is not None for salt in range(4)))
"""
    root = tmp_path / "cache"
    found = said(server(script, root))
    assert found[:4] == ["False"] * 4 and found[4:8] == ["True", "True", "False", "False"]
    assert found[8:10] == ["1", "True"] and found[10:] == ["True"] * 4 and good(root) == 4


KERNELS = 600


@pytest.mark.parametrize("handled", [False, True], ids=["default", "SystemExit"])
def test_a_sigterm_while_a_server_warms_up_ends_it_and_leaves_whole_kernels(tmp_path, handled):
    """An engine's handler raises SystemExit in the main thread, while another one compiles."""
    root = tmp_path / "cache"
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))" if handled else ""
    script = f"""
{handler}
threading.Thread(target=warm_up, args=(cache, range({KERNELS}))).start()
while not root.exists() or len(list(root.glob("*.jgk"))) < 2: time.sleep(0.005)
print("warm", flush=True)
time.sleep(100)
"""
    process = server(script, root)
    assert process.stdout.readline() == "warm\n", process.communicate()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == (7 if handled else -signal.SIGTERM)
    KernelCache([root]).prune(leftovers_after_s=0)  # what a killed writer left
    before = good(root)
    assert 2 <= before < KERNELS // 2
    assert said(server("print(sum(job.compiled for job in warm_up(cache, range(12))))", root)) == [
        str(12 - min(before, 12))
    ]
