"""Prints the note that scripts/gpu_tests.sh writes: what ran where, how much of it, and the worst errors found.

Arguments: the commit, pytest's exit status, and files with pytest's output, one of each process.
"""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
import sys
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


def total(outcomes: list[str]) -> str:
    """What pytest says of a run at its end, of all processes together: outcomes added up, the longest time."""
    counts: dict[str, int] = {}
    for number, outcome in re.findall(r"(\d+) (passed|failed|errors?|skipped|xfailed)", " ".join(outcomes)):
        counts[outcome] = counts.get(outcome, 0) + int(number)
    seconds = max(float(each) for each in re.findall(r" in ([\d.]+)s", " ".join(outcomes)))
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return f"{said} in {seconds:.0f} s" + (f" by {len(outcomes)} processes" if len(outcomes) > 1 else "")


def main(commit: str, status: str, *logs: str) -> None:
    import torch

    from jitgemm.jit.nvrtc import nvrtc_info

    texts = [re.sub(r"\x1b\[[0-9;]*m", "", Path(log).read_text(errors="replace")) for log in logs]
    text = "\n".join(texts)
    outcomes = re.findall(r"^(?:=+ )?((?:\d+ \w+(?:, )?)+ in [\d.]+s.*?)(?: =+)?$", text, re.M)
    numbers = re.findall(r"^GPU numbers: (.*)$", text, re.M)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", text, re.M)
    skipped = re.findall(r"^SKIPPED (.*)$", text, re.M)
    print(f"# GPU tests, {datetime.date.today().isoformat()}\n")
    print("| | |\n|---|---|")
    facts = {
        "Commit": commit,
        "Device": devices(),
        "Driver": f"{driver()}, CUDA of PyTorch {torch.version.cuda}",
        "Python, PyTorch, NVRTC": f"{platform.python_version()}, {torch.__version__}, {nvrtc_info().build}",
        "Command": "`scripts/gpu_tests.sh`: `pytest -m gpu`",
        "Result": total(outcomes)
        if len(outcomes) == len(logs)
        else f"{len(logs) - len(outcomes)} processes without a result, exit status {status} (124: time limit)",
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
