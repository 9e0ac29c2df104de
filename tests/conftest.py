"""What all tests share. Where there is no Hopper GPU, one `gpu` test of a file skips with the reason, for all of
them."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob("helpers/*.py")))  # as tests' own are

FAILURES = os.environ.get("GPU_TESTS_FAILURES")
"""A file that takes each failure as it happens: a run that is cut off has said by then what failed."""

LIBRARIES = os.environ.get("JITGEMM_TEST_LIBRARIES")
"""Set where the `libraries` extra is installed, as scripts/test.sh does: `pytest.importorskip` fails there, not skips.

With a reason of its own, or for a version that is too old, it skips as ever.
"""


@functools.cache
def no_gpu_reason() -> str | None:
    """Why tests marked `gpu` cannot run here, or None when they can."""
    try:
        import torch
    except ImportError:
        return "needs a Hopper GPU: torch is not installed"
    if not torch.cuda.is_available():
        return "needs a Hopper GPU: torch finds no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        name = torch.cuda.get_device_name()
        return f"needs a Hopper GPU (compute capability 9.0): found {name}, {capability[0]}.{capability[1]}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-kernels", action="store_true", help="compile every kernel of test_compile.py, not a sample of them"
    )
    parser.addoption("--emulate", action="store_true", help="run tests marked `gpu` on the CPU, see tests/emulator")
    parser.addoption("--cpu", action="store_true", help="say how many seconds of CPU the tests of each folder took")
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N parts of the tests, I from 1 to N")


def pytest_configure(config: pytest.Config) -> None:
    if FAILURES:  # what runs under a time limit ends by it as by Ctrl-C: with pytest's summary of what ran
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell; tests press Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if FAILURES and report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = (crash.message if crash else report.longreprtext).split("\n")[0]
        with open(FAILURES, "a", encoding="utf-8") as file:
            file.write(f"FAILED {report.nodeid} - {message}\n{report.longreprtext}\n\n")


def _without_a_library(report):
    if LIBRARIES and report.skipped and "Skipped: could not import '" in str(report.longrepr):
        report.outcome, (path, line, reason) = "failed", report.longrepr
        report.longrepr = f"{path}:{line}: {reason}. JITGEMM_TEST_LIBRARIES is set: this library must be there."
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _without_a_library((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.when == "teardown":
        item.user_properties.append(("cpu_s", cpu_s() - item.stash[STARTED]))
    return _without_a_library((yield))


STARTED = pytest.StashKey[float]()


def cpu_s() -> float:
    """Seconds of CPU of this process and of its children that ended: however busy the machine is."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[STARTED] = cpu_s()
    return (yield)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--cpu"):
        return
    folders: Counter[str] = Counter()
    for report in sum(terminalreporter.stats.values(), []):
        for name, value in getattr(report, "user_properties", ()):
            if name == "cpu_s" and report.when == "teardown":
                folders[report.nodeid.partition("::")[0].rpartition("/")[0]] += value
    terminalreporter.section("seconds of CPU")
    for folder, seconds in folders.most_common():
        terminalreporter.line(f"{seconds:7.1f}  {folder}")
    terminalreporter.line(f"{folders.total():7.1f}  in all")


@pytest.fixture(scope="module", autouse=True)
def own_compilations() -> None:
    """torch compiles a function eight times at most: those of other files do not count."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels of the module go to a folder that is empty when the run starts.

    That of the whole run, where GPU_TESTS_CACHE names one: its processes then compile no kernel twice.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = os.environ.get("GPU_TESTS_CACHE") or str(tmp_path_factory.mktemp("kernels"))
        patch.setenv("JITGEMM_CACHE_DIR", folder)
        yield


def pytest_collection_finish() -> None:
    # What torch, transformers and the collection made stays, and need not be looked at again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    # torch traces each compilation for tools of its own; pytest would format and keep all of it as log records.
    logging.getLogger("torch.__trace").setLevel(logging.CRITICAL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--shard"):
        part, parts = map(int, config.getoption("--shard").split("/"))
        shards: list[list[pytest.Item]] = [[] for _ in range(parts)]
        seen: Counter[str] = Counter()
        for item in items:  # the cases of a test take as long as one another: they go round
            name = item.nodeid.partition("[")[0] + " on a GPU" * bool(item.get_closest_marker("gpu"))
            shards[(zlib.crc32(name.encode()) + seen[name]) % parts].append(item)
            seen[name] += 1
        items[:] = shards.pop(part - 1)
        config.hook.pytest_deselected(items=sum(shards, []))
    if not any("gpu" in item.keywords for item in items):
        return
    reason = None if config.getoption("--emulate") or config.option.collectonly else no_gpu_reason()
    if reason is None:
        return
    kept, dropped = [], {}
    for item in items:
        if not item.get_closest_marker("gpu"):
            kept.append(item)
        elif item.path in dropped:
            dropped[item.path].append(item)
        else:  # skips for all of its file: to set thousands of tests up for nothing takes half a minute
            kept.append(item)
            dropped[item.path] = []
            item.add_marker(pytest.mark.skip(reason=reason))
    items[:] = kept
    config.hook.pytest_deselected(items=sum(dropped.values(), []))


@pytest.fixture
def compiles_without_warnings() -> Callable[[Any], None]:
    """compiles_without_warnings(entry): what the cache has of a kernel says that ptxas spilled nothing and warned of
    nothing."""

    def check(entry: Any) -> None:
        log = entry.metadata["log"]
        assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", log) == [("0", "0")]
        assert "warning" not in log.lower(), log

    return check


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """A process compiles a function for eight layers at most, of this test and others."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """Without what transformers says of missing kernels and the like."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture
def compiles_well(request: pytest.FixtureRequest) -> Callable[..., None]:
    """compiles_well(kernels, spill_bytes=0): no more spills than that, and no serialised wgmma.

    Of each type of activations, code and order of codes the largest tile is compiled; with --all-kernels everything.
    """
    from jitgemm.kernel.render import kernel_source

    def check(kernels: Iterable[Any], spill_bytes: int = 0) -> None:
        kernels = list(dict.fromkeys(kernels))
        if not request.config.getoption("all_kernels"):
            by_tile = sorted(kernels, key=lambda spec: spec.block_m * spec.block_n)
            kernels = {(spec.lhs, spec.format.code, spec.format.order): spec for spec in by_tile}.values()
        for spec in kernels:
            built = kernel_source(spec).compile()
            assert built.spill_bytes <= spill_bytes and not built.serialised, spec.label

    return check


@pytest.fixture(autouse=True)
def emulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --emulate, the emulator in place of the GPU."""
    if not (request.config.getoption("--emulate") and request.node.get_closest_marker("gpu")):
        yield
        return
    from emulator.device import cuda_is_cpu

    with pytest.MonkeyPatch.context() as patch, cuda_is_cpu(patch):
        yield
