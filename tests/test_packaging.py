"""What is installed: the wheel's files, types that users' checkers see, and requirements that agree with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

USER = """
import torch
import jitgemm

weight = jitgemm.pack_w4(torch.empty(8, 32, dtype=torch.int8), torch.empty(8, 1), group_size=32)
reveal_type(weight)
reveal_type(jitgemm.quantize_activations(torch.empty(1, 32), torch.int8))
reveal_type(jitgemm.load("model", "layer"))
reveal_type(jitgemm.gemm_w4a8_bf16_nt)
jitgemm.gemm_w4a8_nt("x", weight, torch.empty(1, 8))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("jitgemm", "include", "scripts", "tests"):
        shutil.copytree(ROOT / name, folder / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__", "data"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "checkout")
    script = f"import hatchling.build; print(hatchling.build.build_wheel({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder / "checkout", capture_output=True, text=True, check=True
    )
    return folder / done.stdout.splitlines()[-1]


def test_the_wheel_has_the_package_its_headers_and_nothing_else(wheel):
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jitgemm").rglob("*.py")} | {"jitgemm/py.typed"}
    headers = {f"jitgemm/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "include").rglob("*.cuh")}
    assert files == package | headers and len(headers) >= 10


def test_an_installed_package_renders_the_same_kernels(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = """
import jitgemm
from jitgemm.activations.kernel import quantize_source, quantize_spec
from jitgemm.kernel.formats import WeightFormat
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.jit.nvrtc import NvrtcInfo
info = NvrtcInfo((12, 9), "12.9.86", None)
spec = KernelSpec("e4m3", WeightFormat(128, False, "bf16"), block_m=16, block_n=64, stages=4)
print(kernel_source(spec).key(info), quantize_source(quantize_spec(256, "bf16", "s8")).key(info), jitgemm.__file__)
"""
    said = []
    for folder in (tmp_path, ROOT):
        done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True)
        *keys, file = done.stdout.split()
        assert Path(file).is_relative_to(folder)
        said.append(keys)
    assert said[0] == said[1]


def test_types_are_clean_and_users_see_them(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    files = [str(ROOT / name) for name in PROJECT["tool"]["mypy"]["files"]]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *files, str(tmp_path / "user.py")], cwd=ROOT, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    errors = [line for line in lines if ": error: " in line]
    assert [re.sub(r".*user.py:\d+", "user.py", error) for error in errors] == [
        'user.py: error: Argument 1 to "gemm_w4a8_nt" has incompatible type "str"; expected '
        '"tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]"  [arg-type]'
    ]
    revealed = [re.search(r'Revealed type is "(.*)"', line)[1] for line in lines if "Revealed type" in line]
    assert len(revealed) == 4 and revealed[0] == "jitgemm.weight.w4.W4Weight" and "CanonicalWeight" not in revealed[0]
    assert not any("Any" in text for text in revealed), revealed


def test_every_third_party_import_is_a_requirement():
    required = {re.match(r"[\w-]+", name)[0] for name in PROJECT["project"]["dependencies"]}
    imported = set()
    for path in (ROOT / "jitgemm").rglob("*.py"):
        imported |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    third_party = imported - sys.stdlib_module_names - {"jitgemm"}
    # cuda-bindings comes with torch or an extra; torchao's tensors, and transformers' names of tensors, are recognised
    # where torchao and transformers are there.
    assert third_party - {"cuda", "torchao", "transformers"} == required


# ---- the GPU run -----------------------------------------------------------------------------------------------------


def test_shards_are_all_tests_once_each():
    def collected(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/test_dtypes.py", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if "::" in line]

    shards = [collected("--shard", f"{part}/2") for part in (1, 2)]
    assert all(shards) and sorted(sum(shards, [])) == sorted(collected())


def test_a_note_adds_up_what_the_processes_of_a_gpu_run_say(tmp_path):
    logs = "12 passed, 2 skipped in 10.5s (0:00:10)", "FAILED tests/test_a.py::b\n1 failed, 30 passed in 22.6s (0:00:22)"
    paths = [tmp_path / "1", tmp_path / "2"]
    for path, text in zip(paths, logs):
        path.write_text(text)
    command = [sys.executable, "scripts/gpu_note.py", "abc", "1", *map(str, paths)]
    note = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "| Commit | abc |" in note and "- tests/test_a.py::b" in note
    assert "| Result | 42 passed, 2 skipped, 1 failed in 23 s by 2 processes |" in note
    paths[0].write_text("killed")
    assert "1 processes without a result, exit status 1" in subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
