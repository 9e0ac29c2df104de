#!/usr/bin/env python3
"""What the package weighs: lines by folder, what a call pulls in, where a code's fields are compared, the largest files.

    scripts/house.py [--json] [--closure CALL] [CHECKOUT]

CHECKOUT is another checkout to measure, such as a `git worktree` of an older commit. Lines are lines of the file, with
comments and empty ones. A call's closure is every module that the call's module imports, at its top or in a function,
and what those import; --closure lists its files. Imports for type checkers alone do not count. A comparison of a code
asks one of FIELDS, by attribute or by name, outside of jitgemm/kernel; a gate's order is another thing.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLOSURES = {"gemm_w4a8_nt": (26, 4_800), "fused_experts": (36, 6_800), "load_": (60, 12_000)}
"""Call -> at most so many files and lines."""
PACKAGE_LINES, FILE_LINES, COMPARISONS = 19_500, 450, 20
"""The other goals."""
FIELDS = {"bits", "codes", "order"}
CODE_PACKAGE = "jitgemm/kernel/"
"""Where a code's fields are at home."""
GATE_ORDERS = {"gate_up", "up_gate", "interleaved"}


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
    found = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "jitgemm":
                place = root / name.replace(".", "/")
                found |= {file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()}
    return found - {root / "jitgemm/__init__.py"}


def closure(path: Path, root: Path) -> set[Path]:
    seen, todo = {path}, [path]
    while todo:
        new = imports(todo.pop(), root) - seen
        seen |= new
        todo += new
    return seen


def comparisons(path: Path) -> int:
    """Comparisons of a code's fields, by attribute or by name. No order of codes: gate.order, and what is compared with
    one of GATE_ORDERS."""
    count = 0
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            asked = {side.rpartition(".")[2] for side in sides if not side.endswith("gate.order")} & FIELDS
            of_gate = asked == {"order"} and any(side.strip("'") in GATE_ORDERS for side in sides)
            count += bool(asked) and not of_gate
    return count


def definition(call: str, root: Path) -> Path:
    files = sorted((root / "jitgemm").rglob("*.py"))
    return next(file for file in files if f"def {call}(" in file.read_text(encoding="utf-8"))


def measure(root: Path) -> dict[str, Any]:
    lines = {
        file: len(file.read_text(encoding="utf-8").splitlines())
        for pattern in ("jitgemm/**/*.py", "include/**/*.cuh", "tests/**/*.py", "scripts/**/*.py", "docs/**/*.md")
        for file in root.glob(pattern)
    }
    package = {file: count for file, count in lines.items() if file.relative_to(root).parts[0] == "jitgemm"}
    folders: Counter[str] = Counter()
    for file, count in lines.items():
        parts = file.relative_to(root).parts
        folders[parts[0]] += count
        if parts[0] == "jitgemm":
            folders["/".join(parts[: 2 if len(parts) > 2 else 1]) + ("" if len(parts) > 2 else "/*.py")] += count
    compared = {file: comparisons(file) for file in package if not str(file.relative_to(root)).startswith(CODE_PACKAGE)}
    pulled = {call: closure(definition(call, root), root) for call in CLOSURES}
    largest = sorted(package, key=lambda file: -package[file])[:5]
    return {
        "lines": dict(sorted(folders.items())),
        "closures": {
            call: {"files": len(files), "lines": sum(map(package.get, files))} for call, files in pulled.items()
        },
        "comparisons": {"count": sum(compared.values()), "files": sum(map(bool, compared.values()))},
        "largest": {str(file.relative_to(root)): package[file] for file in largest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--closure", metavar="CALL", help="list the files that a call pulls in, with their lines")
    options = parser.parse_args()
    root = options.checkout.resolve()
    if options.closure:
        for file in sorted(closure(definition(options.closure, root), root)):
            print(f"{str(file.relative_to(root)):40}{len(file.read_text(encoding='utf-8').splitlines()):7,} lines")
        return
    found = measure(root)
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return
    for folder, count in found["lines"].items():
        goal = f"{PACKAGE_LINES:8,} wanted" if folder == "jitgemm" else ""
        print(f"{folder:24}{count:7,} lines{goal}")
    for call, size in found["closures"].items():
        files, lines = CLOSURES[call]
        print(f"{call:24}{size['files']:7,} files{size['lines']:8,} lines{files:5} and {lines:,} wanted")
    compared = found["comparisons"]
    print(f"{'comparisons of a code':24}{compared['count']:7,} in {compared['files']} files{COMPARISONS:5} wanted")
    for file, count in found["largest"].items():
        print(f"{file:40}{count:7,} lines{FILE_LINES:5} wanted")


if __name__ == "__main__":
    main()
