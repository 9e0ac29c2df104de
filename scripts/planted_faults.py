#!/usr/bin/env python3
"""Plants one fault after another in a copy of the repository and runs tests on each: which do not go unseen?

`python scripts/planted_faults.py --help` teaches. The faults are scripts/data/planted_faults.toml.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import typer

from jitgemm.cli import common

FAULTS = Path(__file__).with_name("data") / "planted_faults.toml"
LIMIT_S = 240.0
"""Of one run of tests: what hangs by a fault is found."""
VERDICTS = ("found", "missed", "equivalent")

app = common.command_line()


@dataclass(frozen=True)
class Fault:
    """A change of one file that makes it wrong.

    Attributes:
        name: what is wrong then.
        file: path from the root of the repository.
        old, new: what stands in the file exactly once, and what stands there then.
        tests: pytest's arguments for the tests that should see it.
        equivalent: why nothing that can be observed changes; "" where something does.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    equivalent: str = ""

    @property
    def package(self) -> str:
        """Where it is: a package of jitgemm, of its `nn` too, a module beside them, or the headers."""
        folders = Path(self.file).parts[:-1]
        if folders[:1] == ("include",):
            return "headers"
        return "/".join(folders[1:3]) or Path(self.file).stem

    def applied(self, text: str) -> str:
        """The file's text with the fault. Raises ValueError unless `old` stands there exactly once, and `new` is
        another."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: expected old once in {self.file}, found it {count} times: {self.old!r}")
        if self.old == self.new:
            raise ValueError(f"{self.name}: expected new to be another text than old in {self.file}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """What became of a fault: its verdict, and by which test, or why."""

    name: str
    package: str
    verdict: str
    by: str
    seconds: float


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Raises ValueError for a name that comes twice, and TypeError for a fault without or with other fields."""
    faults = [Fault(**each) for each in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]]
    twice = [name for name, count in Counter(each.name for each in faults).items() if count > 1]
    if twice:
        raise ValueError(f"{path.name}: expected every name once, got twice: {', '.join(twice)}")
    return faults


@contextlib.contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A copy of the repository's files, but for those that git ignores."""
    listed = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        for name in filter(None, names):
            if (root / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, Path(folder) / name)
        yield Path(folder)


@contextlib.contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    """The fault is in the copy inside, and is taken out again."""
    path = root / fault.file
    right, stamp = path.read_text(encoding="utf-8"), path.stat().st_mtime
    wrong = fault.applied(right)
    try:
        _write(path, wrong, stamp + 10)
        yield
    finally:
        _write(path, right, stamp + 20)


def _write(path: Path, text: str, stamp: float) -> None:
    """Python tells bytecode of another text by the file's size and second, so the caller gives each text its second."""
    path.write_text(text, encoding="utf-8")
    os.utime(path, (stamp, stamp))


def run_tests(root: Path, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """(pytest's exit status, or None at the limit; its output)."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {
        "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "COLUMNS": "400",
        "JITGEMM_CACHE_DIR": str(root / "planted-faults-kernels"),
    }  # fmt: skip
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    process = subprocess.Popen(command, cwd=root, env=environment, start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the test's own processes too
        return None, process.communicate()[0]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def judge(fault: Fault, root: Path, limit_s: float) -> Result:
    """What the fault's tests say of it.

    Raises:
        ValueError: the fault cannot be planted; its tests ran none, or fail without it too.
    """
    begun, tests = time.monotonic(), shlex.split(fault.tests)
    with planted(fault, root):
        status, output = run_tests(root, tests, limit_s)
    ran = re.search(r"\b\d+ (passed|failed|error)", output)
    if status == 0 and ran:
        verdict, by = ("equivalent", fault.equivalent) if fault.equivalent else ("missed", fault.tests)
    elif status in (0, 4, 5) or (status is not None and not ran):
        raise ValueError(f"{fault.name}: expected tests that run, got exit status {status} of {fault.tests}\n{output}")
    else:
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", output, re.MULTILINE)
        by = failed[0] if failed else f"no end within {limit_s:g} s"
        alone = [by] if failed and "::" in by else tests
        status, output = run_tests(root, alone, limit_s)
        if status != 0:
            raise ValueError(f"{fault.name}: expected a test that passes without it, got {by}\n{output}")
        verdict = "found"
    return Result(fault.name, fault.package, verdict, by, round(time.monotonic() - begun, 1))


def table(results: Sequence[Result]) -> str:
    """In Markdown: how many of each verdict a package has, and which were missed below."""
    counts = Counter((each.package, each.verdict) for each in results)
    packages = sorted({each.package for each in results})
    rows = [(name, [counts[name, verdict] for verdict in VERDICTS]) for name in packages]
    total = [sum(numbers) for numbers in zip(*(numbers for _, numbers in rows))]
    lines = [f"| package | {' | '.join(VERDICTS)} |", f"|---|{'---:|' * len(VERDICTS)}"]
    lines += [f"| {name} | {' | '.join(map(str, numbers))} |" for name, numbers in [*rows, ("all", total)]]
    judged = total[0] + total[1]
    if judged:
        lines.append(f"\n{total[0]} of {judged} found: {100 * total[0] / judged:.1f} %")
    lines += [f"missed: {each.name} ({each.package}), by {each.by}" for each in results if each.verdict == "missed"]
    return "\n".join(lines)


@app.command()
@common.guarded
def run(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="TEXT", help="Faults with this in their name or file; may come again."),
    ] = None,
    limit: Annotated[float, typer.Option("--limit", min=1, help="Seconds of one run of tests.")] = LIMIT_S,
    json: common.Json = False,
    faults_file: Annotated[Path, typer.Option("--faults", metavar="FILE", help="Other faults.")] = FAULTS,
    root: Annotated[Path, typer.Option("--root", metavar="FOLDER", help="The repository.")] = ROOT,
) -> None:
    """Plant faults, and see which of them the tests find.

    \b
    A fault is a text in one file and what stands in its place, with the tests
    that should see it: [[fault]] in scripts/data/planted_faults.toml, with
    name, file, old, new, tests (arguments of pytest), and equivalent: why
    nothing changes, where nothing does. old stands in the file exactly once.

    \b
    Each fault is planted in a copy of the working tree, and its tests run,
    up to the first that fails. That one must pass without the fault.
      found        a test fails, or does not end
      missed       all pass: write a test
      equivalent   all pass, as the file says
    All faults take most of an hour of one core: run it after tests have been
    rewritten or left out. The table goes into CONTRIBUTING.md.

    \b
    Examples:
      python scripts/planted_faults.py --json > results.json
      python scripts/planted_faults.py --only include/ --only eplb

    \b
    Exit codes:
      0  every fault was found, or is equivalent
      1  one was missed
      2  wrong arguments
      3  a fault cannot be planted, or its tests do not run or fail without it
    """
    faults = read_faults(faults_file)
    if only:
        faults = [each for each in faults if any(text in each.name or text in each.file for text in only)]
        if not faults:
            raise ValueError(f"--only: expected part of a fault's name or file, got {', '.join(only)}")
    results, broken = [], []
    with copy_of(root) as copy:
        for number, fault in enumerate(faults, 1):
            try:
                results.append(judge(fault, copy, limit))
            except ValueError as error:
                broken.append(fault.name)
                common.note(f"{number}/{len(faults)} {error}", "red")
                continue
            said = results[-1]
            common.note(f"{number}/{len(faults)} {said.verdict} in {said.seconds:.0f} s: {said.name} ({said.by})")
    common.print_json([asdict(each) for each in results]) if json else typer.echo(table(results))
    if broken:
        common.fail(f"not judged: {', '.join(broken)}", common.FAILED)
    if any(each.verdict == "missed" for each in results):
        raise typer.Exit(common.FOUND)


if __name__ == "__main__":
    app()
