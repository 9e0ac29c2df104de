"""The layers of the package: imports go downwards only, at the top of a module and inside functions alike, and so do
the names of ops."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "jitgemm"
LAYERS = (
    ("errors", "settings", "dtypes"),
    ("jit",),
    ("kernel",),
    ("tensors",),
    ("select", "weight"),
    ("runtime", "checkpoint"),
    ("activations",),
    ("gemm",),
    ("moe",),
    ("nn", "graph"),
    ("hf", "deep_gemm", "serving", "cli"),
    ("vllm", "sglang"),
)
"""From the lowest; a package imports from lower layers and from itself, never from another of its layer."""
LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
TENSOR_FREE = ("errors", "settings", "dtypes", "jit", "kernel", "select", "cli")


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
PACKAGES = {name: name.split(".")[1] for name in MODULES if name.count(".") and not name.endswith("__main__")}


def imports(name: str) -> set[str]:
    """Every module of the package that this one imports, wherever the statement stands."""
    found: set[str] = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                found.add(member if member in MODULES else node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {each for each in found if each in MODULES and each not in ("jitgemm", name)}


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_imports_go_downwards(name):
    package = PACKAGES[name]
    assert package in LAYER, f"{package} is in no layer"
    upwards = [
        each for each in imports(name) if PACKAGES.get(each) != package and LAYER[PACKAGES[each]] >= LAYER[package]
    ]
    assert upwards == []


def ops_defined(tree: ast.AST) -> set[str]:
    """The ops that a module gives `define_op` the schemas of."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "define_op"]
    return {re.match(r"f?['\"]+(\w+)", ast.unparse(call.args[0]))[1] for call in calls}


def ops_named(tree: ast.AST) -> set[str]:
    """Every X of `torch.ops.jitgemm.X`."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if ast.unparse(node.value) == "torch.ops.jitgemm"}


def test_ops_are_named_in_the_package_that_defines_them_or_above():
    homes = {op: PACKAGES[name] for name in PACKAGES for op in ops_defined(TREES[name])}
    named = [(name, op) for name in PACKAGES for op in ops_named(TREES[name])]
    assert ("jitgemm.graph.inductor", "gemm_w4a8_nt") in named
    upwards = [
        (name, op) for name, op in named if homes[op] != PACKAGES[name] and LAYER[homes[op]] >= LAYER[PACKAGES[name]]
    ]
    assert upwards == []


@pytest.mark.parametrize("package", sorted({name for name in PACKAGES if (PACKAGE / name.split(".", 1)[1]).is_dir()}))
def test_a_package_lists_its_files(package):
    docstring = ast.get_docstring(TREES[package])
    listed = re.findall(r"^ *(\w+)  +\w", docstring, re.MULTILINE)
    assert sorted(listed) == sorted(name.rpartition(".")[2] for name in PACKAGES if name.rpartition(".")[0] == package)


def test_private_functions_of_torch_that_calls_need_stand_in_one_module():
    named = {name for name, path in MODULES.items() if "torch._C" in path.read_text(encoding="utf-8")}
    assert named == {"jitgemm.runtime.torch_private"}


def test_no_two_modules_import_each_other_in_a_circle():
    graph = {name: imports(name) for name in PACKAGES}
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names a circle


def test_choosing_rendering_compiling_and_the_commands_need_no_torch():
    names = [name for name, package in PACKAGES.items() if package in TENSOR_FREE]
    loaded = "print(*sorted({'torch', 'numpy'} & set(sys.modules)))"
    code = f"import sys, jitgemm_cli\nfor name in {names!r}: __import__(name)\n{loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("", "")


TESTS = Path(__file__).resolve().parents[1]


def test_tests_import_helpers_and_never_one_another():
    """A test that another imports cannot change or leave by itself; its lists are made at every collection."""
    of_tests = re.compile(r"^\s*(?:from|import) (test_\w+)", re.MULTILINE)
    found = {path.name: set(of_tests.findall(path.read_text(encoding="utf-8"))) for path in TESTS.rglob("*.py")}
    assert {name: each for name, each in found.items() if each} == {}
