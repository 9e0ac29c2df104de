"""Prints the note that scripts/gpu_tests.sh writes: what ran where, how much of it, and the worst errors found.

Arguments: the commit, pytest's exit status, a file with the failures as they happened, and files with pytest's output,
one of each process. A process that was killed has no result in its output: what it did is counted from its progress.
"""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def driver() -> str:
    """Version of the NVIDIA driver, from the tool that comes with it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def devices() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    properties = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} x {properties.name}, {properties.multi_processor_count} SMs"


OUTCOMES = {".": "passed", "F": "failed", "E": "error", "s": "skipped", "x": "xfailed"}
"""By pytest's letters for them."""


def counts_of(text: str) -> tuple[Counter[str], float | None]:
    """(tests of a process's output by outcome, its seconds or None without a result). "unrun" were cut off."""
    outcomes = re.findall(r"^(?:=+ )?((?:\d+ \w+(?:, )?)+) in ([\d.]+)s.*$", text, re.M)
    counts: Counter[str] = Counter()
    for number, outcome in re.findall(r"(\d+) (passed|failed|error|skipped|xfailed)", " ".join(o for o, _ in outcomes)):
        counts[outcome] += int(number)
    if not outcomes:
        letters = "".join(re.findall(r"^(?:tests/\S+\.py )?([.FEsx]+)(?: +\[ *\d+%\])?$", text, re.M))
        counts.update(OUTCOMES[letter] for letter in letters)
    selected = re.search(r"^(?:collecting \.\.\. )?collected .*?(\d+)(?: selected| items?)$", text, re.M)
    if selected and (missing := int(selected[1]) - counts.total()) > 0:
        counts["unrun"] = missing
    return counts, float(outcomes[0][1]) if outcomes else None


def total(texts: list[str], status: str) -> str:
    """The result of all processes together: outcomes added up, the longest time, and what is missing."""
    found = [counts_of(text) for text in texts]
    counts = sum((counts for counts, _ in found), Counter())
    unrun, killed = counts.pop("unrun", 0), sum(seconds is None for _, seconds in found)
    said = [", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing ran"]
    said += [f"in {max(seconds or 0 for _, seconds in found):.0f} s"] if killed < len(found) else []
    said += [f"by {len(texts)} processes"] if len(texts) > 1 else []
    said += [f"({killed} killed)"] if killed else []
    if unrun:
        said.append(f"and {unrun} not run, exit status {status} (124, 137: time limit)")
    return " ".join(said)


def main(commit: str, status: str, failures: str, *logs: str) -> None:
    import torch

    from jitgemm.jit.nvrtc import nvrtc_info

    texts = [re.sub(r"\x1b\[[0-9;]*m", "", Path(log).read_text(errors="replace")) for log in logs]
    text = "\n".join(texts)
    numbers = re.findall(r"^GPU numbers: (.*)$", text, re.M)
    noted = Path(failures).read_text(errors="replace")
    lines = re.findall(r"^(?:FAILED|ERROR) (tests/.*)$", f"{noted}\n{text}", re.M)
    failed = {line.split(" - ")[0]: line for line in lines}.values()
    skipped = re.findall(r"^SKIPPED (.*)$", text, re.M)
    print(f"# GPU tests, {datetime.date.today().isoformat()}\n")
    print("| | |\n|---|---|")
    facts = {
        "Commit": commit,
        "Device": devices(),
        "Driver": f"{driver()}, CUDA of PyTorch {torch.version.cuda}",
        "Python, PyTorch, NVRTC": f"{platform.python_version()}, {torch.__version__}, {nvrtc_info().build}",
        "Command": "`scripts/gpu_tests.sh`: `pytest -m gpu`",
        "Result": total(texts, status),
    }
    for name, value in facts.items():
        print(f"| {name} | {value} |")
    print()
    for line in numbers:
        print(line[0].upper() + line[1:].replace("; ", ";\n") + ".\n")
    print("Bounds: `gemm_w4a8_bound`, of which rounding to bf16 alone takes up to 2^-8 |ref|; e4m3 also a relative RMS")
    print("of at most 2.2e-3.")
    for title, lines in (("Failed", failed), ("Skipped", skipped)):
        if lines:
            print(f"\n{title}:")
            print("\n".join(f"- {line}" for line in lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
