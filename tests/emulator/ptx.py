"""PTX as text, and as what machine.cpp takes: registers by number, branch targets, operands without brackets."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field

SPECIAL = ("%tid.x", "%tid.y", "%ntid.x", "%ntid.y", "%ctaid.x", "%nctaid.x", "%cluster_ctarank", "%laneid")
"""Registers 0 to 7, then the kernel's parameters' addresses."""
SHARED_BASE = 1024
_NO_TARGET = -1


@dataclass
class Assembled:
    """A kernel for machine.cpp.

    Attributes:
        text: as `emulator_load` takes it.
        dynamic: where dynamic shared memory begins, in bytes from `SHARED_BASE`.
        variables: the buffers of variables in global memory, whose addresses stand in the text.
    """

    text: str
    dynamic: int
    parameters: int
    variables: list[ctypes.Array] = field(default_factory=list)


class _Names:
    """Numbers of registers, which are names in a scope."""

    def __init__(self, parameters: list[str]):
        self.numbers: dict[tuple[int, str], int] = {(0, name): i for i, name in enumerate((*SPECIAL, *parameters))}
        self.values: dict[str, int] = {}
        self.scopes = [0]
        self.declared: dict[int, set[str]] = {0: set()}
        self.last_scope = 0

    def enter(self) -> None:
        self.last_scope += 1
        self.scopes.append(self.last_scope)
        self.declared[self.last_scope] = set()

    def scope_of(self, name: str) -> int:
        return next((scope for scope in reversed(self.scopes) if name in self.declared[scope]), 0)

    def number(self, name: str) -> int:
        return self.numbers.setdefault((self.scope_of(name), name), len(self.numbers))


def _assert(found: re.Match[str]) -> str:
    """CUDA's assert: a trap where it is called, and nothing of its declaration."""
    return "" if found[0].startswith(".") else "trap;"


def assemble(ptx: str) -> Assembled:
    """One kernel's PTX, as NVRTC writes it."""
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx.rstrip("\0"), flags=re.DOTALL)
    ptx = re.sub(r"\{[^{}]*call\.uni\s*__assertfail[^{}]*\}|\.extern \.func __assertfail[^;]*;", _assert, ptx)
    head, body = re.match(r"(.*?\.entry[^{]*)\{(.*)\}", ptx, re.DOTALL).groups()
    parameters = re.findall(r"\.param[^,\n]*?(\w+_param_\d+)", head)
    cluster = re.search(r"\.reqnctapercluster (\d+), 1, 1", head)
    names = _Names(parameters)
    variables = []
    for size, name, count, value in re.findall(
        r"\.global \.align \d+ \.[a-z](\d+) ([\w$]+)(?:\[(\d+)\])?(?: = ([^;]+))?;", head
    ):
        buffer = ctypes.create_string_buffer(max(8, int(size) // 8 * int(count or 1)))
        variables.append(buffer)
        names.values[name] = ctypes.addressof(buffer)
        if value:
            if name.startswith("$str"):
                buffer.raw = bytes(map(int, value.strip("{} ").split(",")))
                continue
            if count:
                raise ValueError(f"no such variable: {name}, an array with values")
            buffer[: int(size) // 8] = _value(value.strip()).to_bytes(8, "little")[: int(size) // 8]
    end = SHARED_BASE
    shared = re.findall(r"\.shared \.align (\d+) \.[a-z](\d+) (\w+)\[(\d*)\]", head + body)
    for align, size, name, count in sorted(shared, key=lambda each: not each[3]):  # dynamic memory, of no size, last
        end = -(-end // int(align)) * int(align)
        names.values[name] = end
        end += int(size) // 8 * int(count or 0)

    labels: dict[tuple[int, str], int] = {}
    instructions: list[tuple[int, str, int, str, list[str], tuple[int, ...]]] = []
    for statement in _statements(body, names, labels, lambda: len(instructions)):
        if statement.startswith("."):
            declared = re.match(r"\.reg \.\w+ (\w+)$", statement)
            if declared:
                names.declared[names.scopes[-1]].add(declared[1])
            continue
        predicate, negated = -1, 0
        if statement.startswith("@"):
            guard, statement = statement[1:].split(None, 1)
            negated = int(guard.startswith("!"))
            predicate = names.number(guard.lstrip("!"))
        opcode, _, rest = statement.partition(" ")
        opcode, rest = opcode.strip(), rest.strip()
        if opcode.startswith("bra"):
            instructions.append((predicate, str(negated), 0, "bra", [rest], tuple(names.scopes)))
            continue
        operands = _operands(rest, names)
        if opcode in ("mov.b32", "mov.b64") and "{" in rest:
            opcode = f"mov.{'unpack' if rest.startswith('{') else 'pack'} {opcode[-2:]}"
        if opcode.startswith("shfl.sync") and "|" not in rest:
            operands.insert(1, "n")
        instructions.append((predicate, str(negated), _NO_TARGET, opcode, operands, ()))
    lines = []
    for predicate, negated, target, opcode, operands, scopes in instructions:
        if opcode == "bra":
            label = operands[0]
            target = next(labels[scope, label] for scope in reversed(scopes) if (scope, label) in labels)
            operands = []
        lines.append(" ".join((str(predicate), negated, str(target), opcode, *operands)))
    lines.append("-1 0 -1 ret")
    text = f"{len(names.numbers)} {end - SHARED_BASE} {cluster[1] if cluster else 1}\n" + "\n".join(lines)
    return Assembled(text, end - SHARED_BASE, len(parameters), variables)


def _statements(body, names, labels, position):  # type: ignore[no-untyped-def]
    """Statements without semicolon; enters and leaves scopes and notes labels on the way."""
    for raw in body.split(";"):
        text = " ".join(raw.split())
        while True:
            if text.startswith("{"):
                names.enter()
                text = text[1:].lstrip()
            elif text.startswith("}"):
                names.scopes.pop()
                text = text[1:].lstrip()
            elif found := re.match(r"([$\w]+):(?!:)\s*", text):
                labels[names.scopes[-1], found[1]] = position()
                text = text[found.end() :]
            elif found := re.match(r'\.pragma "[^"]*"\s*', text):
                text = text[found.end() :]
            else:
                break
        if text:
            yield text


def _operands(text: str, names: _Names) -> list[str]:
    """Operands in the order of the text, brackets and braces taken off."""
    found = []
    for part in re.findall(r"\[[^\[\]{}]+\]|[^,{}\[\]|\s]+", text):
        if part.startswith("["):
            base, _, offset = part[1:-1].replace(" ", "").replace("+-", "+ -").partition("+")
            step = _value(offset.strip()) if offset else 0
            if base in names.values:
                found.append(f"m-1+{names.values[base] + step}")
            elif base[0].isdigit():
                found.append(f"m-1+{_value(base)}")
            else:
                found.append(f"m{names.number(base)}+{step}")
        elif part == "_":
            found.append("n")
        elif part in names.values:
            found.append(f"i{names.values[part]}")
        elif part[0] == "%" or re.match(r"[A-Za-z_]", part):
            found.append(f"r{names.number(part)}")
        else:
            found.append(f"i{_value(part)}")
    return found


def _value(text: str) -> int:
    """A number of PTX as 64 bits."""
    if text.startswith(("0f", "0F")):
        return int(text[2:], 16)
    if re.fullmatch(r"-?\d+\.\d+", text):
        return 0  # a fraction of an L2 policy
    return int(text.rstrip("U"), 0) % 2**64
