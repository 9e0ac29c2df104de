"""Prints the row that scripts/gpu_tests.sh appends to docs/notes/log/gpu-tests.md: what ran where, and the worst
errors.

Arguments: the commit, pytest's exit status, a file with the failures as they happened, and files with pytest's output,
one of each process. A process that was killed has no result in its output: what it did is counted from its progress.
With `--header` alone it prints the table's head.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections import Counter
from pathlib import Path

COLUMNS = "date", "commit", "device", "passed", "skipped", "failed", "not run", "seconds", "error / bound", "remarks"
OUTCOMES = {".": "passed", "F": "failed", "E": "failed", "s": "skipped", "x": "skipped"}
"""By pytest's letters for them."""
_WORDS = {"error": "failed", "errors": "failed", "xfailed": "skipped"}


def devices() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_properties(0).name}"


def counts_of(text: str) -> tuple[Counter[str], float | None]:
    """(tests of a process's output by outcome, its seconds or None without a result). "not run" were cut off."""
    outcomes = re.findall(r"^(?:=+ )?((?:\d+ \w+(?:, )?)+) in ([\d.]+)s.*$", text, re.M)
    counts: Counter[str] = Counter()
    numbers = " ".join(numbers for numbers, _ in outcomes)
    for number, outcome in re.findall(r"(\d+) (passed|failed|errors?|skipped|xfailed)", numbers):
        counts[_WORDS.get(outcome, outcome)] += int(number)
    if not outcomes:
        letters = "".join(re.findall(r"^(?:tests/\S+\.py )?([.FEsx]+)(?: +\[ *\d+%\])?$", text, re.M))
        counts.update(OUTCOMES[letter] for letter in letters)
    selected = re.search(r"^(?:collecting \.\.\. )?collected .*?(\d+)(?: selected| items?)$", text, re.M)
    if selected and (missing := int(selected[1]) - counts.total()) > 0:
        counts["not run"] = missing
    return counts, float(outcomes[0][1]) if outcomes else None


def worst(text: str) -> str:
    """The largest error over its bound, of e4m3 and of int8, of all processes; - where none was compared."""
    lines = "\n".join(re.findall(r"worst error / bound: ([^;\n]*)", text))
    return ", ".join(max(re.findall(rf"{name} (\d\.\d+)", lines), default="-") for name in ("e4m3", "s8"))


def row(commit: str, status: str, noted: str, texts: list[str]) -> list[str]:
    """The cells of a run, all processes together: outcomes added up, the longest time, each failure's name once."""
    results = [counts_of(text) for text in texts]
    counts = sum((counts for counts, _ in results), Counter())
    text = "\n".join(texts)
    remarks = list(dict.fromkeys(re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", f"{noted}\n{text}", re.M)))
    killed = sum(seconds is None for _, seconds in results)
    remarks += [f"{killed} of {len(texts)} processes killed"] if killed else []
    remarks += [f"exit status {status}"] if status not in ("0", "1") else []
    seconds = max((seconds or 0 for _, seconds in results), default=0)
    numbers = [str(counts[name]) for name in ("passed", "skipped", "failed", "not run")]
    today = datetime.date.today().isoformat()
    return [today, commit, devices(), *numbers, f"{seconds:.0f}", worst(text), ", ".join(remarks)]


def main(*arguments: str) -> None:
    if arguments == ("--header",):
        print(f"# GPU tests\n\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
        return
    commit, status, failures, *logs = arguments
    texts = [re.sub(r"\x1b\[[0-9;]*m", "", Path(log).read_text(errors="replace")) for log in logs]
    print(f"| {' | '.join(row(commit, status, Path(failures).read_text(errors='replace'), texts))} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
