"""What is installed: the wheel's files, types that users' checkers see, and requirements that agree with each other."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import jitgemm

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

KEYS = """
from jitgemm.activations.kernel import quantize_source, quantize_spec
from jitgemm.jit.nvrtc import NvrtcInfo
from jitgemm.kernel.formats import WeightFormat
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec

info = NvrtcInfo((12, 9), "12.9.86", None)
spec = KernelSpec("e4m3", WeightFormat(128, False, "bf16"), block_m=16, block_n=64, stages=4)
keys = [kernel_source(spec).key(info), quantize_source(quantize_spec(256, "bf16", "s8")).key(info)]
"""
"""Cache keys of two kernels, which the headers' text is part of."""

IN_USE = f"""
import json
from importlib.metadata import distribution, version

import torch

import jitgemm
{KEYS}
weight = jitgemm.pack_w4(torch.full((8, 32), 3, dtype=torch.int8), torch.ones(8, 1), group_size=32)
out = torch.empty(2, 8, dtype=torch.bfloat16)
jitgemm.gemm_w4a8_bf16_nt(jitgemm.quantize_activations(torch.ones(2, 32), torch.int8), weight, out)
groups = "vllm.general_plugins", "sglang.srt.plugins"
plug_ins = sorted(each for each in distribution("jitgemm").entry_points if each.group in groups)
plug_ins = [[each.name, each.value, each.load().__code__.co_filename] for each in plug_ins]
print(json.dumps([jitgemm.__file__, jitgemm.__version__, version("jitgemm"), out.unique().tolist(), keys, plug_ins]))
"""


def build(what: str, checkout: Path, folder: Path) -> Path:
    """What `pip` and `python -m build` ask of hatchling: build_sdist or build_wheel, from a checkout into a folder."""
    script = f"import hatchling.build; print(hatchling.build.{what}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=checkout, capture_output=True, text=True, check=True)
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The sdist of this checkout, unpacked."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("build_sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"jitgemm-{jitgemm.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """The wheel that the sdist makes."""
    return build("build_wheel", sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """An environment of its own with the wheel in it, which sees the packages of this one."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--quiet", str(wheel)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "this_one.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder / "bin"


def run_elsewhere(*command: str | Path) -> str:
    """What the command prints in /, with nothing that leads back to this checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "JITGEMM_CACHE_DIR")}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_the_package_its_headers_and_nothing_else(wheel):
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jitgemm").rglob("*.py")} | {"jitgemm/py.typed"}
    headers = {f"jitgemm/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "include").rglob("*.cuh")}
    assert files == package | headers | {"jitgemm_cli.py"} and len(headers) >= 10


def test_the_sdist_has_what_tests_and_docs_need_and_no_leftovers(sdist):
    files = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    wanted = "README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE pyproject.toml jitgemm_cli.py docs/conf.py"
    more = ".pre-commit-config.yaml scripts/test.sh tests/conftest.py include/jitgemm/gemm/kernel.cuh"
    assert {*wanted.split(), *more.split()} <= files
    folders = {name.partition("/")[0] for name in files if "/" in name}
    assert folders == {"jitgemm", "include", "tests", "scripts", "docs"}
    assert [name for name in files if "__pycache__" in name or name.endswith((".pyc", ".jgk"))] == []


def test_an_installed_package_works_renders_the_same_kernels_and_brings_engines_plug_ins(installed):
    found = json.loads(run_elsewhere(installed / "python", "-c", IN_USE))
    file, version, metadata, results, keys, plug_ins = found
    assert version == metadata == jitgemm.__version__ and results == [96.0]
    here: dict[str, list[str]] = {}
    exec(KEYS, here)
    assert keys == here["keys"]
    names = [(name, value) for name, value, _ in plug_ins]
    assert names == [("jitgemm", f"jitgemm.{engine}:register") for engine in ("sglang", "vllm")]
    assert all(Path(each).is_relative_to(installed.parent) for each in (file, *(place for *_, place in plug_ins)))


def test_an_installed_package_brings_the_command(installed):
    assert run_elsewhere(installed / "jitgemm", "--version") == f"jitgemm {jitgemm.__version__}\n"
    report = json.loads(run_elsewhere(installed / "jitgemm", "env", "--json"))
    assert report["packages"]["jitgemm"] == jitgemm.__version__
    assert report["python"].endswith(str(installed / "python"))
    assert report["cache"] and not any(Path(folder).is_relative_to(ROOT) for folder in report["cache"])


def test_lint_and_format_are_clean():
    """As pre-commit has them, where ruff is the version that it pins: another one formats otherwise."""
    [pin] = [name for name in PROJECT["project"]["optional-dependencies"]["test"] if name.startswith("ruff==")]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"ruff==[\d.]+", hooks)) == {pin}
    if importlib.util.find_spec("ruff") is None or f"ruff=={importlib.metadata.version('ruff')}" != pin:
        pytest.skip(f"{pin} not installed")
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_versions_that_the_readme_names_are_those_tested():
    script = (ROOT / "scripts" / "test_versions.sh").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("torch", "transformers"):
        oldest, *_, newest = re.findall(rf"\b{name}==([\d.]+)", script)
        assert re.search(rf"^\| {name}.* \| {re.escape(oldest)} \| {re.escape(newest)} \|$", readme, re.MULTILINE)
        requirements = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["libraries"]
        [bounds] = [text for text in requirements if re.match(rf"{name}\b", text)]
        least, *others = bounds.removeprefix(f"{name}>=").split(",")
        assert oldest.startswith(least) and all(each.startswith("!=") for each in others)  # no ceiling


TYPES = """
import torch
import jitgemm

x, out = torch.empty(1, 32), torch.empty(1, 8)
weight = jitgemm.pack_w4(torch.empty(8, 32, dtype=torch.int8), torch.empty(8, 1), group_size=32)
for affine in (False, True):
    jitgemm.gemm_w4a8_nt(jitgemm.quantize_activations(x, torch.int8, affine=affine), weight, out)
reveal_type(jitgemm.quantize_activations(x, torch.int8))
reveal_type(jitgemm.quantize_activations(x, torch.int8, affine=True))
reveal_type(jitgemm.gemm_w4a8_int8_nt(jitgemm.quantize_activations(x, torch.int8), weight))
reveal_type(weight)
loaded = jitgemm.load("model", "layer")
reveal_type(loaded)
reveal_type(jitgemm.gemm_w4a8_bf16_nt)
jitgemm.gemm_w4a8_nt("x", weight, torch.empty(1, 8))
jitgemm.gemm_w4a8_bf16_nt(jitgemm.gemm_w4a8_int8_nt((x, x), weight, affine=False), weight, out)
if isinstance(loaded, jitgemm.W4Weight):
    jitgemm.gemm_w4a8_nt((x, x), loaded, out, bias=None, batch_invariant=True, kernel=None)
else:
    jitgemm.gemm_w8a8_nt((x, x), loaded, out)
jitgemm.nn.load_(torch.nn.Linear(1, 1), "model")
"""


STRICT = """
disallow_any_generics = True
disallow_subclassing_any = True
disallow_untyped_calls = True
disallow_untyped_defs = True
disallow_incomplete_defs = True
check_untyped_defs = True
disallow_untyped_decorators = True
warn_unused_ignores = True
warn_return_any = True
strict_equality = True
extra_checks = True
"""
"""What `mypy --strict` sets for a module. Besides, packages export what they say: kernel/formats.py alone says less."""
CONFIG = f"""[mypy]
{{settings}}
implicit_reexport = False
untyped_calls_exclude = transformers
[mypy-jitgemm.kernel.formats,transformers.*]
implicit_reexport = True
[mypy-first,second,typed]{STRICT}{{overrides}}"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[str]:
    """What mypy says of the package and, as --strict, of the README's samples and of TYPES."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("types")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    samples = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert len(samples) == 2
    for name, text in {"first": samples[0], "second": samples[1], "typed": TYPES}.items():
        (folder / f"{name}.py").write_text(text)
    mypy = PROJECT["tool"]["mypy"]
    settings = "\n".join(f"{name} = {value}" for name, value in mypy.items() if name not in ("files", "overrides"))
    overrides = "".join(
        f"[mypy-{','.join(each['module'])}]\nfollow_imports = {each['follow_imports']}\n" for each in mypy["overrides"]
    )
    (folder / "mypy.ini").write_text(CONFIG.format(settings=settings, overrides=overrides))
    # Options decide what a cache is good for: one of its own.
    options = [f"--config-file={folder / 'mypy.ini'}", f"--cache-dir={ROOT / '.mypy_cache' / 'tests'}"]
    files = [*(str(ROOT / name) for name in mypy["files"]), *map(str, sorted(folder.glob("*.py")))]
    command = [sys.executable, "-m", "mypy", *options, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [re.sub(r"^\S*/(\w+\.py:)", r"\1", line) for line in done.stdout.splitlines()]


def test_types_are_clean_and_users_see_them(said):
    """The README's samples and results as arguments pass strict checks too."""
    errors = [line for line in said if ": error: " in line]
    assert [re.sub(r"^typed.py:\d+", "typed.py", error) for error in errors] == [
        'typed.py: error: Argument 1 to "gemm_w4a8_nt" has incompatible type "str"; expected '
        '"tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]"  [arg-type]'
    ]
    *results, weight, loaded, call = (
        found[1] for line in said if (found := re.search(r'Revealed type is "(.*)"', line))
    )
    assert weight == "jitgemm.weight.packed.W4Weight"
    assert not any("Any" in text for text in (*results, weight, loaded, call))
    parts = [re.fullmatch(r"tuple\[(.*)\]", text)[1].split(", ") for text in results]  # pairs or triples
    assert [len(each) for each in parts] == [2, 3, 3]
    assert all(name.endswith("Tensor") for each in parts for name in each)


def test_no_function_of_the_package_is_untyped():
    """Of what `mypy --strict` calls so."""
    for path in (ROOT / "jitgemm").rglob("*.py"):
        assert "no-untyped-def" not in path.read_text(encoding="utf-8"), path


def test_every_third_party_import_is_a_requirement():
    required = {re.match(r"[\w-]+", name)[0] for name in PROJECT["project"]["dependencies"]}
    imported = set()
    for path in (ROOT / "jitgemm").rglob("*.py"):
        imported |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    third_party = imported - sys.stdlib_module_names - {"jitgemm"}
    # cuda-bindings comes with torch or an extra; torchao's tensors, and transformers' names of tensors, are recognised
    # where torchao and transformers are there. vLLM imports its plug-in, not the other way round.
    assert third_party - {"cuda", "sglang", "torchao", "transformers", "vllm"} == required


# ---- the run of all tests --------------------------------------------------------------------------------------------

LIBRARY = """
import pytest


@pytest.mark.parametrize("name, more", [
    ("no_such_library", {}), ("no_such_library", {"reason": "needs no such library"}), ("pytest", {"minversion": "1000"})
])
def test_it(name, more):
    pytest.importorskip(name, **more)
"""


@pytest.mark.parametrize("installed, counts", [("", "4 skipped"), ("1", "1 failed, 2 skipped, 1 error")])
def test_a_library_that_is_missing_fails_where_libraries_are_installed(tmp_path, installed, counts):
    (tmp_path / "test_it.py").write_text(LIBRARY)
    (tmp_path / "test_module.py").write_text('import pytest\n\npytest.importorskip("no_such_library")\n')
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    environment = os.environ | {"JITGEMM_TEST_LIBRARIES": installed, "PYTHONPATH": str(ROOT / "tests")}
    command += ["-ra", "--continue-on-collection-errors", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].strip("= ").startswith(counts), done.stdout + done.stderr
    assert ("could not import 'no_such_library'" in done.stdout) and done.returncode == int(bool(installed))


def test_the_libraries_that_are_checked_are_those_of_the_extra():
    sys.path.insert(0, str(ROOT / "scripts"))
    import check_environment

    extra = PROJECT["project"]["optional-dependencies"]["libraries"]
    assert check_environment.LIBRARIES == [re.match(r"[\w-]+", name)[0].replace("-", "_") for name in extra]


# ---- the GPU run -----------------------------------------------------------------------------------------------------


def test_shards_are_all_tests_once_each(pytestconfig):
    of_all_tests = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))

    def config(shard: str) -> SimpleNamespace:
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        return SimpleNamespace(getoption=lambda name: shard if name == "--shard" else False, hook=hook)

    unmarked = {"keywords": (), "get_closest_marker": lambda name: None}
    items = [SimpleNamespace(nodeid=f"test_it.py::test[{number}]", **unmarked) for number in range(40)]
    shards = []
    for part in (1, 2):
        shard = [*items]
        of_all_tests.pytest_collection_modifyitems(config(f"{part}/2"), shard)
        shards.append(shard)
    assert all(shards) and sorted(sum(shards, []), key=items.index) == items
