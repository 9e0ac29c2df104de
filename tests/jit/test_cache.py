"""The kernel cache, with real compilations, files and processes: what is found again, and what no disk can break."""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_kernel import OPTIONS, SPILLING, spilling_kernel, stacked_kernel, tiny_kernel

from jitgemm import settings
from jitgemm.checkpoint.writing import written
from jitgemm.errors import CacheMissError, JitGemmError
from jitgemm.jit import compile_many
from jitgemm.jit import entry as entries
from jitgemm.jit.cache import STALE_AFTER_S, KernelCache
from jitgemm.jit.entry import encode_entry, write_atomically
from jitgemm.jit.nvrtc import NvrtcInfo, nvrtc_info
from jitgemm.jit.sass import Yields
from jitgemm.jit.source import KernelSource
from jitgemm.kernel.formats import WeightFormat
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec

pytestmark = pytest.mark.nvrtc

REPOSITORY = Path(__file__).resolve().parents[2]
SPEC = KernelSpec("e4m3", WeightFormat(128, False, "bf16"), block_m=16, block_n=64, stages=4)
SLOW = replace(SPEC, block_m=64, block_n=128)
INFO = NvrtcInfo((12, 9), "12.9.86", "/somewhere/libnvrtc.so.12")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("JITGEMM_CACHE_DIR", "JITGEMM_JIT", "JITGEMM_DUMP_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


@contextmanager
def open_to_all(parent: str | Path | None = None):
    """A folder that other users reach, unlike tmp_path."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def child(script: str, root: Path, user: int | None = None, first: str = "", **variables: str) -> subprocess.Popen:
    """A process that runs `first` and then `script` with `cache`, `request` and `root` ready."""
    prelude = f"""
{first}
import jitgemm_cli  # as the command: without torch, which takes a second or two
import hashlib, os, resource, signal, sys, threading, time, warnings
from pathlib import Path
from tiny_kernel import tiny_kernel
from jitgemm.jit.cache import KernelCache
root = Path({str(root)!r})
cache, request = KernelCache([root]), tiny_kernel()
"""
    if user is not None:
        # Everything is imported first: this Python may lie where only root reads.
        prelude += f"""
import tempfile
from jitgemm import settings
with tempfile.TemporaryDirectory() as folder:
    KernelCache([Path(folder)]).get_or_compile(tiny_kernel(99))
settings.cache_roots()
os.setgroups([]); os.setuid({user})
"""
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "helpers")])
    return subprocess.Popen(
        [sys.executable, "-c", prelude + script],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        cwd="/",  # no other copy of the package
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def key_of(request) -> str:
    return request.key(nvrtc_info())


def built(root: Path, salt: int = 0) -> entries.Entry:
    """The entry of a kernel compiled into `root`."""
    return KernelCache([root]).get_or_compile(tiny_kernel(salt))[0]


@functools.cache
def file_of(salt: int) -> bytes:
    """A kernel's file; it is compiled once."""
    with tempfile.TemporaryDirectory() as folder:
        return built(Path(folder), salt).path.read_bytes()


def filled(root: Path, salts=(0,)) -> list[entries.Entry]:
    """Entries of kernels whose files lie in `root`."""
    root.mkdir(parents=True, exist_ok=True)
    found = []
    for salt in salts:
        (root / f"{key_of(tiny_kernel(salt))}.jgk").write_bytes(file_of(salt))
        found.append(KernelCache([root]).lookup(key_of(tiny_kernel(salt))))
    return found


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# What is found again


def test_a_kernel_is_compiled_once_and_found_by_another_process(root):
    entry, compiled = KernelCache([root]).get_or_compile(tiny_kernel())
    assert compiled and entry.cubin.startswith(b"\x7fELF") and entry.path == root / f"{entry.key}.jgk"
    said = output(child("entry, compiled = cache.get_or_compile(request); print(entry.key, compiled)", root))
    assert said.split() == [entry.key, "False"]
    again = KernelCache([root]).lookup(entry.key)
    assert (again.cubin, again.metadata) == (entry.cubin, entry.metadata)


def test_a_found_kernel_needs_no_nvrtc_loaded(root):
    filled(root)
    script = "cache.get_or_compile(request); print('libnvrtc' in open('/proc/self/maps').read())"
    said = output(child(script, root))
    if "site-packages" not in nvrtc_info().library:
        pytest.skip("NVRTC comes from no wheel: only the library itself knows its version")
    assert said.strip() == "False"


def test_the_entry_describes_itself(root):
    request = tiny_kernel()
    entry = built(root)
    known = entry.metadata
    assert known["key"] == entry.key and known["label"] == request.label and known["spec"] == request.spec
    assert known["source"] == request.source and known["options"] == list(OPTIONS) and known["arch"] == "sm_90a"
    assert known["nvrtc"]["build"] == nvrtc_info().build and "ptxas info" in known["log"]
    assert known["registers"] > 0 and (known["spill_bytes"], known["serialised"], entry.slow_because) == (0, "", "")
    assert known["cubin_bytes"] == len(entry.cubin)
    assert abs(time.time() - known["created"]) < 600


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o644), (0o022, 0o644), (0o077, 0o600)])
def test_entries_are_readable_as_the_umask_allows_and_written_by_their_owner_alone(root, umask, mode):
    before = os.umask(umask)
    try:
        entry = built(root)
    finally:
        os.umask(before)
    assert entry.path.stat().st_mode & 0o777 == mode
    assert names(root) == [entry.path.name]


@pytest.mark.parametrize("refused", ["chmod", "fchmod", "utime"])
def test_a_file_system_that_refuses_modes_and_times_takes_entries(root, monkeypatch, refused):
    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, refused, refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry = built(root)
        assert KernelCache([root]).lookup(entry.key).path == entry.path == root / f"{entry.key}.jgk"


def test_a_kernel_that_spills_is_built_as_its_tighter_source_where_that_spills_less(root):
    cache, spilling = KernelCache([root]), spilling_kernel()
    plain, _ = cache.get_or_compile(spilling)
    calm = replace(spilling, tighter=SPILLING.replace("int i = 0; i < 64", "int i = 0; i < 8"))
    entry, compiled = cache.get_or_compile(calm)
    assert compiled and entry.metadata["spill_bytes"] == 0 and entry.metadata["source"] == calm.tighter
    assert entry.cubin != plain.cubin and cache.get_or_compile(calm) == (entry, False)
    entry, _ = cache.get_or_compile(replace(spilling, tighter=SPILLING + "\n"))
    assert entry.metadata["spill_bytes"] > 0 and entry.metadata["source"] == SPILLING
    roomy = replace(spilling, options=OPTIONS, tighter="no C++")
    assert cache.get_or_compile(roomy)[0].metadata["source"] == SPILLING


@pytest.fixture
def loads(monkeypatch):
    """loads(cache, names): the cubins of spilling kernels, loaded for these specs without a driver."""
    from jitgemm.runtime import driver, loaded

    monkeypatch.setattr(loaded, "kernels", {})
    monkeypatch.setattr(loaded, "_warned_of_slow", False)
    monkeypatch.setattr(loaded.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(driver, "check_nvrtc_against_driver", lambda version: None)
    monkeypatch.setattr(driver, "load_kernel", lambda cubin, name, **_: cubin)
    family = loaded.KernelFamily(lambda _: spilling_kernel(), lambda _: 0, call="it")

    def load(cache, *names: str) -> list[bytes]:
        monkeypatch.setattr(loaded, "cache", cache)
        return [family.load(name, 0) for name in names]

    return load


@pytest.mark.parametrize("cached", [False, True])
def test_a_slow_kernel_runs_with_one_warning_a_process(root, loads, cached):
    if cached:
        KernelCache([root]).get_or_compile(spilling_kernel())
    said = rf"kernel spilling .*NVRTC {nvrtc_info().build} .*\d+ bytes of register spills.*report"
    with pytest.warns(RuntimeWarning, match=said) as caught:
        assert all(cubin.startswith(b"\x7fELF") for cubin in loads(KernelCache([root]), "one", "two"))
    assert len(caught) == 1


def test_a_kernel_that_spills_a_little_runs_without_a_word(root, loads, recwarn):
    """The selector lets it pass: there is nothing to report."""
    entry, _ = KernelCache([root]).get_or_compile(spilling_kernel())
    little, much, ring = (
        replace(entry, metadata=entry.metadata | {"spill_bytes": spills, "stack_bytes": stack})
        for spills, stack in ((200, 104), (204, 104), (16, 112))
    )
    assert [each.slow_build for each in (little, much, ring)] == [False, True, True]
    assert little.slow_because == "200 bytes of register spills"
    assert ring.slow_because == "16 bytes of register spills; 104 bytes of stack"
    assert KernelCache([root]).get_or_compile(stacked_kernel())[0].slow_build
    loads(SimpleNamespace(get_or_compile=lambda source: (little, False)), "one")
    assert not recwarn


# The key


def test_every_field_changes_the_key_and_the_order_of_headers_and_the_librarys_place_do_not(monkeypatch):
    fields = {"source": "ab", "headers": {"c": "d", "e": "f"}, "options": ("-x", "-y"), "nvrtc": INFO}
    others = [
        {}, {"source": "t"}, {"tighter": "s"}, {"headers": {"c": "d", "e": "g"}}, {"headers": {"c": "d", "g": "f"}},
        {"headers": {"c": "d"}}, {"headers": {"c": "f", "e": "d"}}, {"options": ("-x",)}, {"options": ("-y", "-x")},
        {"options": ("-x-y",)}, {"options": ("-x", "-y", "")}, {"nvrtc": replace(INFO, version=(12, 8))},
        {"nvrtc": replace(INFO, build="12.9.87")},
        {"yields": Yields()}, {"yields": Yields(every=4)}, {"yields": Yields(conversions=False)},
        # text that moves from one field to the next
        {"source": "a", "headers": {"bc": "d", "e": "f"}}, {"source": "a", "headers": {"b": "cd", "e": "f"}},
        {"headers": {}, "options": ("c", "d", "e", "f", "-x", "-y")},
    ]  # fmt: skip

    def key(nvrtc: NvrtcInfo, source: str, headers: dict, options: tuple, **more) -> str:
        return KernelSource("label", {}, source, headers, options, **more).key(nvrtc)

    keys = [key(**{**fields, **other}) for other in others]
    same = fields | {"headers": {"e": "f", "c": "d"}, "nvrtc": replace(INFO, library="/elsewhere/libnvrtc.so.12")}
    assert len(set(keys)) == len(keys) and key(**same) == keys[0]
    for name in ("jitgemm.jit.source.SCHEMA", "jitgemm.jit.sass.VERSION"):
        monkeypatch.setattr(name, 999)
        keys.append(key(**fields | {"yields": Yields()}))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("variables", [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "en_US.ISO-8859-1"}])
def test_the_key_does_not_depend_on_the_locale(root, variables):
    """Of a kernel, whose headers are not in ASCII."""
    script = f"""
from jitgemm.jit.nvrtc import nvrtc_info
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
print(kernel_source(KernelSpec.from_label({SPEC.label!r})).key(nvrtc_info()))
"""
    assert output(child(script, root, PYTHONUTF8="0", **variables)).strip() == key_of(kernel_source(SPEC))


# Many at once


def test_a_fork_while_a_thread_compiles_waits_for_it_and_else_raises_instead_of_compiling(root):
    """NVRTC has locks of its own, which nobody would give back in the child."""
    script = f"""
from jitgemm.errors import CompileError
from jitgemm.jit import nvrtc
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
cache.get_or_compile(request)
for patience, stages in ((60, 4), (0, 3)):
    slow = kernel_source(KernelSpec.from_label({SLOW.label!r}.replace("s4", f"s{{stages}}")))  # takes about a second
    worker = threading.Thread(target=cache.get_or_compile, args=[slow])
    worker.start()
    while not nvrtc._in_flight: time.sleep(0.001)
    time.sleep(0.05)
    assert nvrtc._FORK_TIMEOUT_S == 1 or not patience
    nvrtc._FORK_TIMEOUT_S = patience
    if not (child := os.fork()):
        signal.alarm(60)
        waiting = KernelCache([root], lock_timeout_s=60)
        compiled = [waiting.get_or_compile(each)[1] for each in (request, slow)]  # the parent compiles the second
        try:
            KernelCache([root / f"other{{patience}}"]).get_or_compile(request)
            print(compiled, flush=True)
        except CompileError as error:
            print(compiled, error, flush=True)
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), worker.join(), flush=True)
"""
    waited, parent, at_once, parent_again = output(child(script, root)).splitlines()
    assert waited == "[False, False]" and parent == parent_again == "7 None"
    assert at_once.startswith("[False, False] this process was forked while its parent compiled a kernel")


def test_eight_processes_on_one_cold_key_compile_once(root, tmp_path):
    script = f"""
(Path({str(tmp_path)!r}) / f"ready-{{os.getpid()}}").touch()
while not Path({str(tmp_path / "go")!r}).exists(): time.sleep(0.005)
entry, compiled = cache.get_or_compile(request)
print(compiled, entry.key, hashlib.sha256(entry.cubin).hexdigest())
"""
    processes = [child(script, root) for _ in range(8)]
    deadline = time.time() + 60
    while len(list(tmp_path.glob("ready-*"))) < 8 and time.time() < deadline:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    said = [output(process).split() for process in processes]
    assert sorted(compiled for compiled, *_ in said) == ["False"] * 7 + ["True"]
    assert len({(key, digest) for _, key, digest in said}) == 1
    assert names(root) == [f"{said[0][1]}.jgk"]


@pytest.mark.parametrize("writable", [True, False])
def test_threads_on_one_key_compile_once(root, tmp_path, writable):
    (tmp_path / "file").write_text("")
    cache = KernelCache([root if writable else tmp_path / "file" / "cache"])
    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("ignore")
        results = list(pool.map(lambda _: cache.get_or_compile(tiny_kernel()), range(8)))
    assert sum(compiled for _, compiled in results) == 1
    assert len({entry.cubin for entry, _ in results}) == 1


@pytest.mark.parametrize(("cpus", "quota", "threads"), [
    (8, "50000 100000", 1), (8, "250000 100000", 3), (8, "max 100000", 8), (8, "", 8), (1, "250000 100000", 1),
])  # fmt: skip
def test_kernels_are_compiled_by_no_more_threads_than_the_process_may_use_cpus(monkeypatch, cpus, quota, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cpus))
    monkeypatch.setattr(compile_many, "open", lambda *_, **__: io.StringIO(quota), raising=False)  # a container's
    assert compile_many.default_threads() == threads


# Bad entries


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")


def replace_by_text(path: Path) -> None:
    path.write_text("#!/bin/sh\necho not a kernel\n")


def replace_by_another_kernel(path: Path) -> None:
    other, _ = KernelCache([path.parent / "other"]).get_or_compile(tiny_kernel(1))
    shutil.copy(other.path, path)


@pytest.mark.parametrize("damage", [truncate, empty, lengthen, replace_by_text, replace_by_another_kernel])
def test_a_bad_entry_is_set_aside_and_compiled_anew(root, damage):
    (entry,) = filled(root)
    damage(entry.path)
    bad = entry.path.read_bytes()
    cache = KernelCache([root])
    with pytest.warns(UserWarning, match="set aside"):
        assert cache.lookup(entry.key) is None
    assert entry.path.with_suffix(".jgk.bad").read_bytes() == bad and not entry.path.exists()
    again, compiled = cache.get_or_compile(tiny_kernel())
    assert compiled and again.cubin == entry.cubin
    assert KernelCache([root]).lookup(entry.key).cubin == entry.cubin


def test_a_new_entry_that_another_process_puts_in_the_place_of_a_bad_one_stays(root, monkeypatch):
    (good,) = filled(root)
    new, bad = root / "new", good.path
    shutil.copy(bad, new)
    truncate(bad)
    read = entries._read_metadata

    def read_while_another_process_writes(file, key):
        try:
            return read(file, key)
        finally:
            os.replace(new, bad)

    monkeypatch.setattr(entries, "_read_metadata", read_while_another_process_writes)
    with pytest.raises(entries.BadEntry, match="bytes long"):
        entries.load_entry(bad, aside=True)
    monkeypatch.undo()
    assert not list(root.glob("*.bad")) and KernelCache([root]).lookup(good.key).cubin == good.cubin


def test_no_flipped_bit_goes_unnoticed(root):
    (entry,) = filled(root)
    good = entry.path.read_bytes()
    cache = KernelCache([root])
    spots = {*range(0, 60), *range(60, len(good), 97), len(good) - 1}
    for spot in spots:
        flipped = bytearray(good)
        flipped[spot] ^= 1 << spot % 8
        entry.path.write_bytes(flipped)
        with pytest.warns(UserWarning, match="set aside"):
            assert cache.lookup(entry.key) is None, f"byte {spot}"
    entry.path.write_bytes(good)
    assert cache.lookup(entry.key).cubin == entry.cubin


def test_a_fifo_or_folder_in_an_entrys_place_is_no_entry(root):
    path, folder = (root / f"{key_of(tiny_kernel(salt))}.jgk" for salt in (0, 1))
    root.mkdir()
    os.mkfifo(path)
    folder.mkdir()
    cache = KernelCache([root])
    assert cache.lookup(path.stem) is None
    entry, compiled = cache.get_or_compile(tiny_kernel())
    assert compiled and entry.path == path and KernelCache([root]).lookup(path.stem).cubin == entry.cubin
    with pytest.warns(UserWarning, match="cannot be written"):
        entry, compiled = cache.get_or_compile(tiny_kernel(1))
    assert compiled and entry.path is None


@pytest.mark.parametrize("change", [
    {"spec": ["m", 64]}, {"created": "yesterday"}, {"source": None}, {"label": 7}, {"nvrtc": "12.9"},
    {"nvrtc": {"build": 12.9}}, {"spill_bytes": "none"}, {"serialised": 1}, {"log": {}},
])  # fmt: skip
def test_metadata_of_wrong_types_are_a_bad_entry(root, change):
    (entry,) = filled(root)
    write_atomically(entry.path, encode_entry(entry.metadata | change, entry.cubin))
    (info,) = KernelCache([root]).entries()
    assert "without a proper" in info.problem
    with pytest.warns(UserWarning, match="set aside .*without a proper"):
        assert KernelCache([root]).lookup(entry.key) is None
    text, header = b"[" * 200_000, struct.Struct("<8sQQ32s")  # nested too deeply
    digest = hashlib.sha256(struct.pack("<Q", len(text)) + text + entry.cubin).digest()
    entry.path.write_bytes(header.pack(b"JITGEMM1", len(text), len(entry.cubin), digest) + text + entry.cubin)
    with pytest.warns(UserWarning, match="set aside"):
        assert KernelCache([root]).lookup(entry.key) is None


# Who is trusted

SOMEBODY, SOMEBODY_ELSE = 65534, 4242
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as several users")


def test_an_entry_that_everybody_can_write_is_not_loaded(root):
    (entry,) = filled(root)
    entry.path.chmod(0o664)  # as its group can, which is no harm
    assert KernelCache([root]).lookup(entry.key).cubin == entry.cubin
    entry.path.chmod(0o646)
    cache = KernelCache([root])
    with pytest.warns(UserWarning, match="not trusted and not loaded: everybody can write it") as caught:
        assert cache.lookup(entry.key) is None and cache.lookup(entry.key) is None
    assert len(caught) == 1
    (info,) = cache.entries()
    assert info.problem == "everybody can write it" and cache.verify()[0][1] == info.problem
    again, compiled = cache.get_or_compile(tiny_kernel())
    assert compiled and KernelCache([root]).lookup(entry.key).path == again.path == entry.path


@as_root
def test_in_a_folder_for_everybody_another_users_entry_is_not_loaded_and_roots_is():
    with open_to_all() as folder:
        first, second = filled(folder, (0, 1))
        folder.chmod(0o1777)
        os.chown(first.path, SOMEBODY, SOMEBODY)
        said = f"not trusted and not loaded: user {SOMEBODY} wrote it where everybody can write"
        with pytest.warns(UserWarning, match=said):
            assert KernelCache([folder]).lookup(first.key) is None
        script = f"print(cache.lookup({first.key!r}) is None, cache.lookup({second.key!r}) is None)"
        assert output(child(script, folder, user=SOMEBODY)).split() == ["False", "False"]
        assert output(child(script, folder, user=SOMEBODY_ELSE)).split() == ["True", "False"]
        assert [info.key for info in KernelCache([folder]).clear()] == [second.key] and first.path.exists()


@as_root
def test_a_cache_of_other_users_is_shared_unless_it_lies_where_everybody_makes_folders():
    if any(above.stat().st_mode & 0o002 for above in REPOSITORY.parents):
        pytest.skip("this checkout lies in a folder that everybody can write")
    for parent, shared in ((REPOSITORY, True), (None, False)):
        with open_to_all(parent) as folder:
            (entry,) = filled(folder)
            for path, mode in ((folder, 0o2775), (entry.path, 0o644)):
                os.chown(path, SOMEBODY_ELSE, SOMEBODY_ELSE)
                path.chmod(mode)
            script = f"print(cache.lookup({entry.key!r}) is not None)"
            assert output(child(script, folder, user=SOMEBODY)).strip() == str(shared)
            os.chown(entry.path, 1234, 1234)  # another of the folder's group
            assert output(child(script, folder, user=SOMEBODY)).strip() == str(shared)
            folder.chmod(0o2777)
            assert output(child(script, folder, user=SOMEBODY)).strip() == "False"


@as_root
def test_a_path_of_which_everybody_could_have_made_a_part_shares_nothing(tmp_path):
    if any(above.stat().st_mode & 0o002 for above in REPOSITORY.parents):
        pytest.skip("this checkout lies in a folder that everybody can write")
    with open_to_all(REPOSITORY) as closed, open_to_all() as below, open_to_all(REPOSITORY) as squatted:
        squatted.chmod(0o777)
        (entry,) = filled(closed / "cache")
        for path in (closed / "cache", entry.path):
            os.chown(path, SOMEBODY_ELSE, SOMEBODY_ELSE)
        for link, target in (
            (closed / "link", "cache"), (closed / "far", f"{closed}/./link/../cache"), (squatted / "cache", "../" + closed.name + "/cache"),
            (below / "above", closed), (closed / "by", squatted / "cache"), (closed / "loop", "loop"),
        ):  # fmt: skip
            link.symlink_to(target)
            os.chown(link, SOMEBODY, SOMEBODY, follow_symlinks=False)
        (closed / "of").mkdir()
        (closed / "of" / entry.path.name).symlink_to(squatted / "cache" / entry.path.name)
        trusted = ("cache", "link", "far", "of/../link")
        others = ("by", "of", "loop", f"../{squatted.name}/cache", f"../{squatted.name}/../{closed.name}/cache")
        roots = [closed / each for each in (*trusted, *others)] + [
            below / "above" / "cache",
            below / "above" / ".." / closed.name / "cache",
        ]
        script = f"""
found = [KernelCache([Path(root)]).lookup({entry.key!r}) is not None for root in {list(map(str, roots))}]
os.chdir({str(squatted)!r})
print(*found, KernelCache([Path("cache")]).lookup({entry.key!r}) is not None)"""
        found = output(child(script, closed, user=SOMEBODY)).split()
        assert found == ["True"] * len(trusted) + ["False"] * (len(roots) - len(trusted) + 1)


@pytest.mark.parametrize("trap", ["symlink_to", "hardlink_to"])
def test_what_another_user_put_under_a_name_that_is_written_leads_nowhere(root, tmp_path, monkeypatch, trap):
    precious, key = tmp_path / "precious", key_of(tiny_kernel())
    precious.write_text("keep me")
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path / "dump"))
    for path in (root / f"{key}.lock", root / f"{key}.jgk", tmp_path / "dump" / f"tiny-0-{key[:12]}.cu"):
        path.parent.mkdir(exist_ok=True)
        getattr(path, trap)(precious)
    with pytest.warns(UserWarning, match="set aside"):
        entry, compiled = KernelCache([root]).get_or_compile(tiny_kernel())
    assert compiled and entry.path.exists() and precious.read_text() == "keep me"


def test_a_writer_killed_half_way_leaves_no_entry(root):
    # The kernel kills the process by SIGXFSZ in the middle of its write, with lock and temporary file in place.
    script = """
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
cache.get_or_compile(request)
"""
    process = child(script, root)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGXFSZ
    (half,) = root.glob("*.tmp")
    assert half.stat().st_size == 1000 and not list(root.glob("*.jgk"))
    started = time.perf_counter()
    entry, compiled = KernelCache([root]).get_or_compile(tiny_kernel())
    assert compiled and time.perf_counter() - started < 5
    assert KernelCache([root]).lookup(entry.key).cubin == entry.cubin
    os.utime(half, (0, time.time() - STALE_AFTER_S - 1))
    built(root, 1)
    assert not half.exists()


@pytest.mark.parametrize("handler", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"])
def test_a_sigterm_while_kernels_are_compiled_leaves_whole_ones(root, handler):
    """An engine's handler raises SystemExit in the main thread, while another one compiles."""
    script = f"""
from rich.console import Console
from jitgemm.jit.compile_many import compile_all, look_up
{handler}
jobs = [look_up(cache, tiny_kernel(salt)) for salt in range(600)]
threading.Thread(target=lambda: [*compile_all(cache, jobs, 2, Console(stderr=True), bar=False)]).start()
while not root.exists() or len(list(root.glob("*.jgk"))) < 2: time.sleep(0.005)
print("warm", flush=True)
time.sleep(100)
"""
    process = child(script, root)
    assert process.stdout.readline() == "warm\n", process.communicate()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == (7 if handler else -signal.SIGTERM)
    KernelCache([root]).prune(leftovers_after_s=0)  # what a killed writer left
    assert {path.suffix for path in root.iterdir()} == {".jgk"} and 2 <= len(names(root)) < 300
    assert {problem for _, problem in KernelCache([root]).verify()} == {None}


# Locks


def test_a_lock_that_nobody_gives_back_costs_its_timeout_and_no_more(root):
    import filelock

    root.mkdir()
    with filelock.FileLock(root / f"{key_of(tiny_kernel())}.lock"):
        entry, compiled = KernelCache([root], lock_timeout_s=0.2).get_or_compile(tiny_kernel())
    assert compiled and entry.path.exists()


# Folders that cannot be written


@contextmanager
def tmpfs(folder: Path, options: str):
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"may not mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write into `folder` until its disk is full."""
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC, error


@pytest.fixture(params=["below a file", "no write permission", "read-only mount", "full"])
def unwritable(request, tmp_path):
    """A cache folder that cannot take an entry, each for another reason."""
    if request.param == "below a file":
        (tmp_path / "file").write_text("")
        yield tmp_path / "file" / "cache"
    elif request.param == "no write permission":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        (tmp_path / "closed").mkdir(mode=0o555)
        yield tmp_path / "closed"
    elif request.param == "read-only mount":
        with tmpfs(tmp_path / "mount", "ro") as folder:
            yield folder
    else:
        with tmpfs(tmp_path / "mount", "size=64k") as folder:
            fill(folder)
            yield folder


def test_an_unwritable_folder_warns_once_and_compiles(unwritable):
    cache = KernelCache([unwritable])
    with pytest.warns(UserWarning, match="cannot be written") as caught:
        results = [cache.get_or_compile(tiny_kernel(salt)) for salt in (0, 1, 0)]
    assert [compiled for _, compiled in results] == [True, True, False]
    assert all(entry.cubin.startswith(b"\x7fELF") and entry.path is None for entry, _ in results)
    assert len([one for one in caught if "cannot be written" in str(one.message)]) == 1
    if unwritable.is_dir():
        assert not [name for name in names(unwritable) if name != "filler"]
    assert all("cannot be written" in entry.unwritten for entry, _ in results)


def test_the_next_folder_is_written_when_one_is_full(tmp_path):
    with tmpfs(tmp_path / "mount", "size=64k") as full:
        fill(full)
        cache = KernelCache([full, tmp_path / "second"])
        with pytest.warns(
            UserWarning, match=f"{full} cannot be written .No space.*; {tmp_path / 'second'} is used"
        ) as caught:
            entries = [cache.get_or_compile(tiny_kernel(salt))[0] for salt in (0, 1)]
        assert len(caught) == 1 and [entry.path.parent for entry in entries] == [tmp_path / "second"] * 2
        assert names(full) == ["filler"]
        assert KernelCache([full, tmp_path / "second"]).lookup(entries[0].key).cubin == entries[0].cubin


@as_root
def test_in_a_checkout_that_one_may_not_write_the_users_folder_is_used():
    with open_to_all() as folder:
        (folder / "pyproject.toml").write_text('[project]\nname = "jitgemm"\n')
        for part in ("jitgemm", "include"):
            shutil.copytree(REPOSITORY / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPOSITORY / "jitgemm_cli.py", folder)
        (folder / "tests").mkdir()
        shutil.copy(REPOSITORY / "tests" / "helpers" / "tiny_kernel.py", folder / "tests")
        (folder / "home").mkdir()
        os.chown(folder / "home", SOMEBODY, SOMEBODY)
        script = "print(KernelCache().get_or_compile(request)[0].path.parent)"
        variables = {"PYTHONPATH": f"{folder}:{folder / 'tests'}", "XDG_CACHE_HOME": str(folder / "home")}
        assert output(child(script, folder, user=SOMEBODY, **variables)).strip() == str(folder / "home" / "jitgemm")
        # Its owner still has it in the checkout.
        assert output(child(script, folder, **variables)).strip() == str(folder / "cache")


@pytest.mark.parametrize("folder", ["~nosuch/x", ""])
def test_without_any_folder_a_kernel_is_compiled_for_the_process(root, folder):
    script = """
os.path.expanduser, settings.checkout_dir = (lambda path: path), (lambda: None)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(KernelCache().roots, KernelCache().get_or_compile(request)[0].cubin.startswith(b"\x7fELF"))
print(*(w.message for w in caught))
"""
    script = "from jitgemm import settings" + script
    said = output(child(script, root, JITGEMM_CACHE_DIR=folder, XDG_CACHE_HOME="")).splitlines()
    assert said[0] == "[] True" and "cannot be written (there is no folder)" in said[1]


@pytest.mark.parametrize("name", [b"[bold]x[/nope]", "ünï 漢".encode(), b"\xff\xfe"])
def test_any_folder_name_will_do(tmp_path, name):
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    entry = built(root)
    assert KernelCache([root]).lookup(entry.key).path == entry.path


@pytest.mark.parametrize("whose", ["an entry", "a checkpoint's file"])
def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, whose):
    """Else a power cut may leave the name with nothing behind it."""
    done = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, call=call: (done.append(name), call(*given)))
    if whose == "an entry":
        write_atomically(tmp_path / "a.jgk", b"data")
    else:
        with written(tmp_path / "a.jgk") as file:
            file.write(b"data")
    assert done == ["fsync", "replace"] and (tmp_path / "a.jgk").read_bytes() == b"data"


def test_a_read_only_folder_still_serves_what_it_holds(tmp_path):
    (entry,) = filled(tmp_path / "first")
    with tmpfs(tmp_path / "mount", "size=1m") as folder:
        shutil.copy(entry.path, folder)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        found, compiled = KernelCache([folder]).get_or_compile(tiny_kernel())
    assert not compiled and found.cubin == entry.cubin


# Several folders


def test_all_roots_are_read_and_the_first_writable_one_is_written(tmp_path):
    (tmp_path / "file").write_text("")
    closed, mine, shared = tmp_path / "file" / "cache", tmp_path / "mine", tmp_path / "shared"
    (theirs,) = filled(shared, [0])
    filled(tmp_path / "first")[0].path.write_bytes(b"")
    with pytest.warns(UserWarning, match="set aside"):  # a bad entry hides no good one
        assert KernelCache([tmp_path / "first", shared]).lookup(theirs.key).path == theirs.path
    cache = KernelCache([closed, mine, shared])
    found, compiled = cache.get_or_compile(tiny_kernel(0))
    assert not compiled and found.path == theirs.path and not mine.exists()
    made, compiled = cache.get_or_compile(tiny_kernel(1))
    assert compiled and made.path.parent == mine
    assert {info.root for info in cache.entries()} == {mine, shared}


def test_without_roots_of_its_own_the_cache_follows_the_environment(monkeypatch, tmp_path):
    cache = KernelCache()
    for name in ("one", "two"):
        monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path / name))
        entry, compiled = cache.get_or_compile(tiny_kernel())
        assert compiled and entry.path.parent == tmp_path / name


# When compiling is not wanted


def test_jit_off_turns_a_miss_into_an_error_that_names_the_command(monkeypatch, root):
    spec = KernelSpec("s8", WeightFormat(128, True, "bf16"), block_m=16, block_n=64, stages=4)
    missing = kernel_source(spec)
    monkeypatch.setenv("JITGEMM_JIT", "off")
    with pytest.raises(CacheMissError) as caught:
        KernelCache([root]).get_or_compile(missing)
    said = str(caught.value)
    assert spec.label in said and "JITGEMM_JIT=off" in said and str(root) in said
    assert "jitgemm warmup --shape N,K --weight g128-bf16-z --lhs int8" in said
    assert not root.exists()


def test_a_caller_can_forbid_compiling(root):
    with pytest.raises(CacheMissError, match="kernel tiny-0 .*graph is being captured.$"):
        KernelCache([root]).get_or_compile(tiny_kernel(), allow_compile=False)
    with pytest.raises(CacheMissError, match="ahead: some command"):
        KernelCache([root]).get_or_compile(replace(tiny_kernel(), warmup="some command"), allow_compile=False)
    filled(root)
    assert KernelCache([root]).get_or_compile(tiny_kernel(), allow_compile=False)[1] is False


def test_jit_warn_compiles_and_says_so(monkeypatch, root):
    monkeypatch.setenv("JITGEMM_JIT", "warn")
    with pytest.warns(UserWarning, match="compiling kernel tiny-0"):
        assert KernelCache([root]).get_or_compile(tiny_kernel())[1] is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KernelCache([root]).get_or_compile(tiny_kernel())[1] is False


def test_the_dump_folder_receives_source_log_and_cubin(monkeypatch, root, tmp_path):
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path / "dump"))
    entry = built(root)
    stem = tmp_path / "dump" / f"tiny-0-{entry.key[:12]}"
    assert stem.with_suffix(".cu").read_text() == tiny_kernel().source
    assert stem.with_suffix(".cubin").read_bytes() == entry.cubin
    assert stem.with_suffix(".log").read_text() == entry.metadata["log"]


def test_a_dump_folder_in_nobodys_home_costs_the_dump_alone(monkeypatch, root):
    monkeypatch.setenv("JITGEMM_DUMP_DIR", "~nosuch/dump")
    settings._folder.cache_clear()
    with pytest.warns(UserWarning, match="JITGEMM_DUMP_DIR: folder '~nosuch/dump' is left out"):
        entry = built(root)
    assert entry.path.exists()


# Inspection and maintenance


def test_a_look_up_renews_the_last_use(root):
    (entry,) = filled(root)
    os.utime(entry.path, (1e9, 1e9))
    cache = KernelCache([root])
    cache.read(entry.key)
    cache.verify()
    assert next(cache.entries()).last_used == 1e9
    cache.lookup(entry.key)
    assert time.time() - next(cache.entries()).last_used < 600


def test_read_takes_a_prefix_and_names_what_is_unknown_or_ambiguous(root):
    first, second = filled(root, [0, 1])
    cache = KernelCache([root])
    assert cache.read(first.key[:16]).cubin == first.cubin
    with pytest.raises(JitGemmError, match="no kernel in the cache has a key that starts with 'zz'"):
        cache.read("zz")
    with pytest.raises(JitGemmError, match=f"2 kernels have a key .*({first.key[:16]}|{second.key[:16]})"):
        cache.read("")
    truncate(first.path)
    with pytest.raises(JitGemmError, match="bytes long"):
        cache.read(first.key)


def test_prune_by_size_removes_the_least_recently_used_first(root):
    made = filled(root, range(3))
    for age, entry in enumerate(made):
        os.utime(entry.path, (2e9 - age, 2e9 - age))
    room = made[0].path.stat().st_size + made[1].path.stat().st_size
    assert [info.key for info in KernelCache([root]).prune(max_bytes=room)] == [made[2].key]
    assert names(root) == sorted([made[0].path.name, made[1].path.name])


def test_prune_removes_what_is_bad_or_left_by_the_dead(root):
    good, bad = filled(root, [0, 1])
    empty(bad.path)
    with pytest.warns(UserWarning, match="set aside"):
        KernelCache([root]).lookup(bad.key)
    dead, living, foreign = [f"{good.key}.x1_y.tmp", f"{bad.key}.lock"], f"{good.key}.lock", "poetry.lock"
    for name in (*dead, living, foreign):
        (root / name).touch()
    for name in (*dead, foreign):
        os.utime(root / name, (1e9, 1e9))
    KernelCache([root]).prune()
    assert names(root) == sorted([good.path.name, living, foreign])


def test_clear_empties_the_writable_root_only_and_leaves_what_is_not_its_own(tmp_path):
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    filled(shared)
    (entry,) = filled(mine)
    for name in ("README.md", "poetry.lock", "thesis.jgk", "thesis.jgk.bad", f"{entry.key}.x1_y.tmp"):
        (mine / name).touch()
    cache = KernelCache([mine, shared])
    assert {info.key for info in cache.entries()} >= {entry.key} and len(cache.verify()) == 2
    cache.prune(older_than_s=86400)
    assert [info.key for info in cache.clear()] == [entry.key]
    assert names(mine) == ["README.md", "poetry.lock", "thesis.jgk", "thesis.jgk.bad"] and len(names(shared)) == 1
