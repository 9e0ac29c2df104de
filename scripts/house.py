#!/usr/bin/env python3
"""What the package weighs: lines by folder, what a call pulls in, where a code's fields are compared, the largest files.

    scripts/house.py [--json] [CHECKOUT]

CHECKOUT is another checkout to measure, such as a `git worktree` of an older commit. Lines are lines of the file, with
comments and empty ones. A call's closure is every module that the call's module imports, at its top or in a function,
and what those import. Imports for type checkers alone do not count.
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

CALLS = ("gemm_w4a8_nt", "fused_experts", "load_")
FIELDS = {"bits", "codes", "order"}
CODE_ROOMS = ("jitgemm/kernel/",)
"""Where a code's fields are at home."""


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
    """Comparisons of a code's fields, by attribute or by name."""
    count = 0
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {side.attr if isinstance(side, ast.Attribute) else getattr(side, "id", "") for side in sides}
            count += bool(names & FIELDS)
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
    compared = {file: comparisons(file) for file in package if not str(file.relative_to(root)).startswith(CODE_ROOMS)}
    pulled = {call: closure(definition(call, root), root) for call in CALLS}
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
    options = parser.parse_args()
    found = measure(options.checkout.resolve())
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return
    for folder, count in found["lines"].items():
        print(f"{folder:24}{count:7,} lines")
    for call, size in found["closures"].items():
        print(f"{call:24}{size['files']:7,} files{size['lines']:8,} lines")
    print(f"{'comparisons of a code':24}{found['comparisons']['count']:7,} in {found['comparisons']['files']} files")
    for file, count in found["largest"].items():
        print(f"{file:40}{count:7,} lines")


if __name__ == "__main__":
    main()
