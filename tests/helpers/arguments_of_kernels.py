"""The argument blocks of kernels as ctypes structs."""

from __future__ import annotations

import re

from jitgemm.jit.source import headers

SIZES = {"u64": 8, "u32": 4, "i32": 4, "float": 4}
CODES = {"u64": "Q", "u32": "I", "i32": "i", "float": "f", "pointer": "Q"}


def _lines(text: str, name: str) -> list[str]:
    """Of a struct, behind those of what it inherits, whose sizes are multiples of 8 bytes."""
    bases, body = re.search(rf"struct {name}(?: : ([\w, ]+))? {{\n(.*?)\n}};", text, re.DOTALL).groups()
    return [*(line for base in (bases or "").split(", ") if base for line in _lines(text, base)), *body.splitlines()]


def struct_of(header: str, name: str) -> dict[str, tuple[str, int]]:
    """Field -> (type, offset) of a struct in a header, laid out as C++ does; checked against its own size."""
    text = headers(header.removeprefix("jitgemm/").removesuffix(".cuh"))[header]
    fields, offset = {}, 0
    for line in _lines(text, name):
        declaration = line.split("//")[0].strip().rstrip(";")
        if not declaration:
            continue
        type_, names = re.fullmatch(r"((?:const )?\w+\*?)\s+([\w, ]+)", declaration).groups()
        kind = "pointer" if type_.endswith("*") else type_
        size = 8 if kind == "pointer" else SIZES[kind]
        for field in names.split(", "):
            offset = -(-offset // size) * size
            fields[field] = kind, offset
            offset += size
    asserted = re.search(rf"static_assert\(sizeof\({name}\) == (\d+)", text)
    assert -(-offset // 8) * 8 == int(asserted[1])
    return fields
