#!/usr/bin/env python3
"""What the package weighs: branches on a weight's code and on formats, what a call pulls in, large files, lines.

    scripts/house.py [--list WHAT] [CHECKOUT]

CHECKOUT is another checkout to measure, such as a `git worktree` of an older commit. --list shows the places of one
kind of branch, or the files of a call's closure with their lines.

A branch is counted once for each line and word, where the word stands in a condition: of `if`, `while` and a
conditional expression, in operands of `and` and `or`, and in a comprehension's filter. A code's home is not counted:
jitgemm/kernel, which describes codes, and the modules of jitgemm/weight that have a class for each.

    capabilities  attributes that stand for one code: CAPABILITIES
    correction    whether a weight has corrections, by attribute
    fields        comparisons of FIELDS, by attribute or name; a gate's order is another thing
    names         comparisons of a code or scheme with its name as text
    formats       in engines' folders, comparisons with names of checkpoints' formats, or of files' types and strategies

A call's closure is every module that the call's module imports, at its top or in a function, and what those import; a
module that is imported from its package counts, and not the package, as in test_rooms.py. Imports for type checkers
alone do not count. Lines are lines of files, with comments and empty ones.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

CLOSURES = ("gemm_w4a8_nt", "fused_experts", "load_")
CAPABILITIES = {
    "powers", "exponents", "inner_scales", "factors", "near", "of_e2m1", "one_type", "nvfp4", "long_runs", "terms",
    "inner",
}  # fmt: skip
FIELDS = {"bits", "codes", "order"}
GATE_ORDERS = {"gate_up", "up_gate", "interleaved"}
NAMES = {"e2m1", "mxfp4", "nvfp4", "two_level", "two-level"}
"""Of codes and schemes."""
CODE_NAMES = {"int4", "int8", "e4m3"}
"""Of types too: they count where they are compared with a `code`."""
FORMATS = {
    "compressed-tensors", "gptq", "awq", "w4afp8", "w8a8", "mxfp4", "nvfp4", "qserve", "torchao", "executorch",
    "bitblas",
    "fp8", "auto-round", "I8", "U8", "F8_E4M3", "F8_E8M0", "block", "token", "tensor", "channel",
}  # fmt: skip
ENGINES = ("serving", "vllm", "sglang")
HOMES = ("kernel/", *(f"weight/{name}.py" for name in ("codes", "correction", "mxfp4", "nvfp4", "pack", "two_level")))
FILE_LINES = 450


def attributes(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Every attribute of an expression and its line; not what is indexed, a mapping of many."""
    indexed = {id(part.value) for part in ast.walk(node) if isinstance(part, ast.Subscript)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and id(part) not in indexed:
            yield part.end_lineno or part.lineno, part.attr


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield node.test
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def texts(node: ast.Compare) -> set[str]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def sides(node: ast.Compare) -> list[str]:
    """The last words of what is compared."""
    return [ast.unparse(side).rpartition(".")[2] for side in (node.left, *node.comparators)]


def branches(path: Path, engine: bool) -> dict[str, set[tuple[int, str]]]:
    """Places of each kind in a file: line and word."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: dict[str, set[tuple[int, str]]] = {kind: set() for kind in KINDS}
    for test in conditions(tree):
        for line, word in attributes(test):
            if word in CAPABILITIES:
                found["capabilities"].add((line, word))
            if word == "correction":
                found["correction"].add((line, word))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        asked, text = sides(node), texts(node)
        of_gate = {"order"} == FIELDS & {*asked} and (text & GATE_ORDERS or "gate.order" in ast.unparse(node))
        if FIELDS & {*asked} and not of_gate:
            found["fields"].add((node.lineno, ast.unparse(node)))
        if text & NAMES or ("code" in asked and text & CODE_NAMES):
            found["names"].add((node.lineno, ast.unparse(node)))
        if engine and text & FORMATS:
            found["formats"].add((node.lineno, ast.unparse(node)))
    return found


KINDS = ("capabilities", "correction", "fields", "names", "formats")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from statements(other)
        else:
            yield from statements(child)


def imports(path: Path, root: Path) -> set[Path]:
    def file_of(name: str) -> Path | None:
        place = root / name.replace(".", "/")
        return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()), None)

    found: set[Path | None] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {file_of(f"{node.module}.{alias.name}") or file_of(node.module) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
    return {file for file in found if file is not None} - {root / "jitgemm/__init__.py"}


def closure(call: str, root: Path) -> set[Path]:
    files = sorted((root / "jitgemm").rglob("*.py"))
    path = next(file for file in files if f"def {call}(" in file.read_text(encoding="utf-8"))
    seen, todo = {path}, [path]
    while todo:
        new = imports(todo.pop(), root) - seen
        seen |= new
        todo += new
    return seen


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def places(root: Path) -> dict[str, list[str]]:
    """Branches of each kind, as "file:line word"."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for file in sorted((root / "jitgemm").rglob("*.py")):
        inside = str(file.relative_to(root / "jitgemm"))
        if inside.startswith(HOMES):
            continue
        for kind, some in branches(file, inside.split("/")[0] in ENGINES).items():
            found[kind] += [f"{file.relative_to(root)}:{line} {word}" for line, word in sorted(some)]
    return found


def measure(root: Path) -> dict[str, int]:
    """Every number that tests/repository/test_house.py holds a ceiling for."""
    package = {file: lines_of(file) for file in (root / "jitgemm").rglob("*.py")}
    found = {kind: len(some) for kind, some in places(root).items()}
    found["branches on a code"] = sum(found[kind] for kind in KINDS if kind != "formats")
    for call in CLOSURES:
        files = closure(call, root)
        found |= {f"{call}: files": len(files), f"{call}: lines": sum(map(lines_of, files))}
    found[f"files above {FILE_LINES} lines"] = sum(lines > FILE_LINES for lines in package.values())
    found["lines of the package"] = sum(package.values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--list", choices=(*KINDS, *CLOSURES), help="the places, or the files, of one of these")
    options = parser.parse_args()
    root = options.checkout.resolve()
    if options.list in CLOSURES:
        for file in sorted(closure(options.list, root)):
            print(f"{str(file.relative_to(root)):40}{lines_of(file):7,} lines")
    elif options.list:
        print(*places(root)[options.list], sep="\n")
    else:
        for what, count in measure(root).items():
            print(f"{what:32}{count:8,}")


if __name__ == "__main__":
    main()
