"""Which instructions of a kernel's machine code (SASS) give way to the other warps of their scheduler.

A warp that promotes sums can issue in every cycle, and then it does: the other warp, whose next multiplies only
wait to be issued, gets few turns, and the tensor cores run dry. A yield hint on some of the instructions hands the turn
on. ptxas sets it on every other FFMA of a run since CUDA 12.9, before that on none, and never between int8's
conversions (docs/notes/yields.md has what each choice is worth).

An instruction of Hopper has 16 bytes, little endian; the layout is that of Volta, found by Z. Jia et al., "Dissecting
the NVIDIA Volta GPU Architecture via Microbenchmarking", section 2.1::

    bit   0..11   12..104   105..108   109                110..121        122..125
          opcode  operands  stall, in  0: yield, another  barriers set    operands a, b, c to the
                            cycles     warp goes first    and waited for  reuse cache

Yielding is a hint and changes no result. It clears the reuse cache, so an instruction that yields asks for no reuse;
the next one reads its registers, as it would anyway.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

VERSION = 5
"""Part of a kernel's cache key: raise it whenever `apply_yields` makes other bytes of the same cubin and `Yields`."""

EM_CUDA, SM_90 = 190, 90
"""What an ELF header calls a GPU's machine code, and Hopper."""

MULTIPLY = frozenset({0xDF1, 0xDF3, 0x9F1, 0x9F3})
"""Opcodes of wgmma for int8 and e4m3, with A in registers and in shared memory: they neither yield nor end a run."""
FFMA = 0x223
PROMOTE = frozenset({FFMA, 0x231, 0x232})
"""FFMA, and HFMA2 and HMUL2, which promote two sums in f16; what is said of FFMA is of all three."""
I2FP = 0x245
LDS = 0x984
INTEGER = frozenset({0x010, 0x012, 0x016, 0x019})
"""IADD3, LOP3, PRMT and SHF by the low 9 bits of their opcodes; the others say where operands come from."""

STALL, YIELD, REUSE = 41, 45, 58
"""First bits of those fields in an instruction's upper 8 bytes."""

_MOST_STALL = 4
"""Instructions that wait longer than this by themselves are left alone."""

_INSTRUCTION = struct.Struct("<QQ")


@dataclass(frozen=True)
class Yields:
    """Which instructions of a kernel yield. Loads from shared memory and every other integer instruction do.

    "Every other" counts within a run: consecutive FFMA, I2FP and integer instructions.

    Attributes:
        every: of the kernel's FFMA one in so many does; 0: every second FFMA of a run.
        conversions: whether conversions of int8's sums (I2FP) do, every other one.
    """

    every: int = 0
    conversions: bool = True

    def __str__(self) -> str:
        return f"yields {VERSION}: FFMA {self.every}, I2FP {int(self.conversions)}"


class BadCubin(ValueError):
    """Not a 64-bit ELF file with a kernel's code for sm_90."""


def apply_yields(cubin: bytes, yields: Yields) -> bytes:
    """The cubin with other yield hints.

    Args:
        cubin: an ELF file for sm_90a.
        yields: which instructions yield.

    Raises:
        BadCubin: its code cannot be found, or is for another architecture.
    """
    changed = bytearray(cubin)
    for start, end in code_sections(cubin):
        _yield_in(changed, start, end, yields)
    return bytes(changed)


def code_sections(cubin: bytes) -> list[tuple[int, int]]:
    """First byte and end of every function's instructions (the ELF sections .text.*).

    Raises BadCubin, also for another architecture, whose instructions mean other things.
    """
    try:
        if cubin[:5] != b"\x7fELF\x02":
            raise BadCubin("cubin: not a 64-bit ELF file")
        (machine,), (flags,) = struct.unpack_from("<H", cubin, 0x12), struct.unpack_from("<I", cubin, 0x30)
        # Since version 8 of its ABI, which came with CUDA 13, the architecture stands in the second byte of the flags.
        architecture = (flags >> 8 if cubin[8] >= 8 else flags) & 0xFF
        if machine != EM_CUDA or architecture != SM_90:
            got = f"sm_{architecture}" if machine == EM_CUDA else f"ELF machine {machine}"
            raise BadCubin(f"cubin: expected code for sm_{SM_90}, got {got}")
        (headers,) = struct.unpack_from("<Q", cubin, 0x28)
        size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
        # Of a section header: offset of its name, type, flags, address, offset, bytes.
        sections = [struct.unpack_from("<IIQQQQ", cubin, headers + index * size) for index in range(count)]
        name_table = sections[names][4]
        code = []
        for name, _, _, _, start, length in sections:
            if cubin.startswith(b".text.", name_table + name):
                if length % _INSTRUCTION.size or start + length > len(cubin):
                    raise BadCubin(f"cubin: {length} bytes of code at {start}, in a file of {len(cubin)}")
                code.append((start, start + length))
    except (struct.error, IndexError) as error:
        raise BadCubin(f"cubin: broken headers ({error})") from error
    if not code:
        raise BadCubin("cubin: no code")
    return code


class Instruction(NamedTuple):
    """An instruction's offset in the cubin and its two words."""

    offset: int
    low: int
    high: int

    @property
    def opcode(self) -> int:
        return self.low & 0xFFF

    @property
    def stall(self) -> int:
        return self.high >> STALL & 15

    @property
    def yields(self) -> bool:
        return not self.high >> YIELD & 1


def instructions(cubin: bytes | bytearray, start: int, end: int) -> Iterator[Instruction]:
    """The instructions between two offsets, in order."""
    for offset in range(start, end, _INSTRUCTION.size):
        low, high = _INSTRUCTION.unpack_from(cubin, offset)
        yield Instruction(offset, low, high)


def _yield_in(cubin: bytearray, start: int, end: int, yields: Yields) -> None:
    multiply_adds = 0
    # Whether the instruction before is such a one and does not yield, multiplies apart.
    after_ffma = after_any = False
    for each in list(instructions(cubin, start, end)):
        if each.opcode in MULTIPLY:
            continue
        ffma, integer = each.opcode in PROMOTE, each.opcode & 0x1FF in INTEGER
        wanted: bool | None = None
        if 1 <= each.stall <= _MOST_STALL:
            if ffma and yields.every:
                multiply_adds += 1
                wanted = multiply_adds % yields.every == 0
            elif ffma:
                wanted = True if after_ffma else None  # what yields already goes on to
            elif integer or (each.opcode == I2FP and yields.conversions):
                wanted = after_any
            elif each.opcode == LDS:
                wanted = True
        if wanted is not None:
            _set(cubin, each, wanted)
        yielding = each.yields if wanted is None else wanted
        after_ffma = ffma and not yielding
        after_any = (ffma or integer or each.opcode == I2FP) and not yielding


def _set(cubin: bytearray, each: Instruction, yielding: bool) -> None:
    high = each.high & ~(1 << YIELD | 15 << REUSE) if yielding else each.high | 1 << YIELD
    _INSTRUCTION.pack_into(cubin, each.offset, each.low, high)
