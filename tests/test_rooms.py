"""The rooms of the package: imports go downwards only, at the top of a module and inside functions alike, and so do the
names of ops."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "jitgemm"
FLOORS = (
    ("errors", "settings", "dtypes"),
    ("jit", "tensors"),
    ("kernel",),
    ("select", "weight"),
    ("runtime", "checkpoint"),
    ("activations",),
    ("gemm",),
    ("moe",),
    ("nn", "graph"),
    ("hf", "deep_gemm", "vllm", "cli"),
)
"""From the ground up; a room imports from lower floors and from itself, never from a neighbour."""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
TENSOR_FREE = ("errors", "settings", "dtypes", "jit", "kernel", "select", "cli")


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
ROOMS = {name: name.split(".")[1] for name in MODULES if name.count(".") and not name.endswith("__main__")}


def imports(name: str) -> set[str]:
    """Every module of the package that this one imports, wherever the statement stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                found.add(member if member in MODULES else node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {each for each in found if each in MODULES and each not in ("jitgemm", name)}


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_imports_go_downwards(name):
    room = ROOMS[name]
    assert room in FLOOR, f"{room} is on no floor"
    upwards = [each for each in imports(name) if ROOMS.get(each) != room and FLOOR[ROOMS[each]] >= FLOOR[room]]
    assert upwards == []


def ops_defined(tree: ast.AST) -> set[str]:
    """The ops that a module gives `define_op` the schemas of."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "define_op"]
    return {re.match(r"f?['\"]+(\w+)", ast.unparse(call.args[0]))[1] for call in calls}


def ops_named(tree: ast.AST) -> set[str]:
    """Every X of `torch.ops.jitgemm.X`."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if ast.unparse(node.value) == "torch.ops.jitgemm"}


def test_ops_are_named_in_the_room_that_defines_them_or_above():
    trees = {name: ast.parse(MODULES[name].read_text(encoding="utf-8")) for name in ROOMS}
    homes = {op: ROOMS[name] for name, tree in trees.items() for op in ops_defined(tree)}
    named = [(name, op) for name, tree in trees.items() for op in ops_named(tree)]
    assert ("jitgemm.graph.inductor", "gemm_w4a8_nt") in named
    upwards = [(name, op) for name, op in named if homes[op] != ROOMS[name] and FLOOR[homes[op]] >= FLOOR[ROOMS[name]]]
    assert upwards == []


@pytest.mark.parametrize("room", sorted({name for name in ROOMS if (PACKAGE / name.split(".", 1)[1]).is_dir()}))
def test_a_room_that_lists_its_files_lists_all(room):
    listed = re.findall(
        r"^    (\w+)  +\w", ast.get_docstring(ast.parse(MODULES[room].read_text(encoding="utf-8"))), re.M
    )
    files = {name.rpartition(".")[2] for name in ROOMS if name.startswith(f"{room}.")}
    assert not listed or (set(listed), len(listed)) == (files, len(files))


def test_private_functions_of_torch_that_calls_need_stand_in_one_module():
    named = {name for name, path in MODULES.items() if "torch._C" in path.read_text(encoding="utf-8")}
    assert named == {"jitgemm.runtime.torch_private"}


def test_no_two_modules_import_each_other_in_a_circle():
    graph = {name: imports(name) for name in ROOMS}
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names a circle


def test_choosing_rendering_compiling_and_the_commands_need_no_torch():
    names = [name for name, room in ROOMS.items() if room in TENSOR_FREE]
    loaded = "print(*sorted({'torch', 'numpy'} & set(sys.modules)))"
    code = f"import sys, jitgemm_cli\nfor name in {names!r}: __import__(name)\n{loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("", "")
