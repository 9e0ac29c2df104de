"""Yield hints: which instructions get them, and that nothing else of a cubin changes."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitgemm.jit import sass
from jitgemm.jit.cache import KernelCache
from jitgemm.jit.nvrtc import Compiled, compile_cubin
from jitgemm.jit.sass import BadCubin, Yields, apply_yields, code_sections, instructions
from jitgemm.kernel.formats import WeightFormat
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import yields

FFMA, I2FP, LDS, MULTIPLY, LOP3, BRANCH = sass.FFMA, sass.I2FP, sass.LDS, 0xDF3, 0x812, 0x947
HINTS = 1 << 109 | 15 << 122
"""The bits that may change: yield, and operands for the reuse cache."""


def word(opcode: int, stall: int = 1, yielding: bool = False, reuse: int = 0, rest: int = 0) -> bytes:
    """An instruction; `rest` stands for its operands."""
    bits = opcode | rest << 12 | stall << 105 | (not yielding) << 109 | reuse << 122
    return bits.to_bytes(16, "little")


def elf(code: bytes, other: bytes = b"") -> bytes:
    """The least of a cubin: a function's code beside another section."""
    names = b"\0.text.kernel\0.nv.info\0.shstrtab\0"
    bodies = [(1, code), (14, other), (23, names)]
    sections, data, start = [struct.pack("<IIQQQQ", 0, 0, 0, 0, 0, 0)], b"", 64
    for name, body in bodies:
        sections.append(struct.pack("<IIQQQQ", name, 1, 0, 0, start + len(data), len(body)))
        data += body
    padded = [section.ljust(64, b"\0") for section in sections]
    head = bytearray(b"\x7fELF\x02\x01\x01\x33\x07".ljust(64, b"\0"))
    struct.pack_into("<H", head, 0x12, sass.EM_CUDA)
    struct.pack_into("<I", head, 0x30, 0x5A0D5A)
    struct.pack_into("<Q", head, 0x28, start + len(data))
    struct.pack_into("<HHH", head, 0x3A, 64, len(padded), 3)
    return bytes(head) + data + b"".join(padded)


def yielding(code: bytes, hints: Yields = Yields()) -> list[bool]:
    changed = apply_yields(elf(code), hints)
    return [each.yields for each in instructions(changed, *code_sections(changed)[0])]


def reused(cubin: bytes, offset: int) -> int:
    """The operands of the instruction there that go to the reuse cache: a is 1, b is 2."""
    return int.from_bytes(cubin[offset : offset + 16], "little") >> 122 & 15


MIXED = (word(FFMA) + word(I2FP)) * 4 + word(FFMA, yielding=True)
NO_CONVERSIONS = Yields(conversions=False)
YIELDING = {
    "every other multiply-add of a run": (word(FFMA) * 5, [0, 1, 0, 1, 0]),
    "a multiply does not end a run": (word(FFMA) + word(MULTIPLY) + word(FFMA), [0, 0, 1]),
    "another instruction does": (word(FFMA) + word(BRANCH) + word(FFMA), [0, 0, 0]),
    "as ptxas has set them": (word(FFMA, yielding=True) + word(FFMA) + word(FFMA, yielding=True), [1, 0, 1]),
    "one in so many, wherever it stands": (MIXED, [0, 0, 0, 0, 0, 0, 1, 0, 0], Yields(every=4, conversions=False)),
    "integer instructions and conversions in turn": (word(LOP3) * 2 + word(I2FP) + word(FFMA), [0, 1, 0, 0]),
    "conversions": (word(I2FP) * 3, [0, 1, 0]), "no conversions": (word(I2FP) * 3, [0, 0, 0], NO_CONVERSIONS),
    "loads from shared memory alone": (word(LDS) * 2 + word(0x981) + word(0x981, yielding=True), [1, 1, 0, 1]),
    "not what waits long by itself": (word(FFMA) + word(FFMA, stall=5) + word(LDS, stall=0), [0, 0, 0]),
    **{hex(opcode): (word(opcode) * 2, [0, 1]) for opcode in (0x210, 0x810, 0x212, 0x812, 0x816, 0x819, 0x219)},
}  # fmt: skip


@pytest.mark.parametrize("which", YIELDING)
def test_instructions_yield_and_others_do_not(which):
    code, expected, *hints = YIELDING[which]
    assert yielding(code, *hints) == [bool(each) for each in expected]


def test_what_yields_reuses_no_operand_and_what_does_not_reuses_its_own():
    changed = apply_yields(elf(word(FFMA, reuse=2) * 2), Yields())
    assert [reused(changed, each.offset) for each in instructions(changed, *code_sections(changed)[0])] == [2, 0]


OPCODES = st.sampled_from([FFMA, I2FP, LDS, MULTIPLY, LOP3, 0x219, 0x210, BRANCH, 0x981])
WORDS = st.builds(
    word, OPCODES, st.integers(0, 15), st.booleans(), st.integers(0, 15), st.integers(0, 2**93 - 1)
)  # fmt: skip


@given(
    st.lists(WORDS, min_size=1, max_size=60), st.binary(max_size=40), st.sampled_from([0, 2, 4]), st.booleans()
)  # fmt: skip
def test_only_hints_change_and_only_once(words, other, every, conversions):
    before, hints = elf(b"".join(words), other), Yields(every, conversions)
    after = apply_yields(before, hints)
    ((start, end),) = code_sections(before)
    assert before[:start] == after[:start] and before[end:] == after[end:]
    for old, new in zip(instructions(before, start, end), instructions(after, start, end)):
        bits = [int.from_bytes(each[old.offset : old.offset + 16], "little") for each in (before, after)]
        assert bits[0] & ~HINTS == bits[1] & ~HINTS
        assert not (new.yields and not old.yields and reused(after, new.offset))
        assert new.stall == old.stall and new.opcode == old.opcode
    assert apply_yields(after, hints) == after


OF_ANOTHER = bytearray(elf(word(FFMA)))
struct.pack_into("<H", OF_ANOTHER, 0x12, 62)


@pytest.mark.parametrize("cubin, message", [
    *((each, "cubin: ") for each in (
        b"", b"\x7fELF\x01" + bytes(80), elf(b"")[:100], elf(word(FFMA) + b"\0"), elf(word(FFMA))[:-150])),
    (elf(word(FFMA)).replace(b".text.kernel", b".data.kernel"), "no code"),
    (bytes(OF_ANOTHER), "expected code for sm_90, got ELF machine 62"),
])  # fmt: skip
def test_what_is_no_cubin_of_hopper_s_is_refused(cubin, message):
    with pytest.raises(BadCubin, match=message):
        apply_yields(cubin, Yields())


# ---- real kernels ---------------------------------------------------------------------------------------------------

KERNELS = [
    KernelSpec("e4m3", WeightFormat(128, False, "bf16", "e4m3"), 128, 128, 4),
    KernelSpec("s8", WeightFormat(128, False, "bf16", "s8"), 128, 128, 4),
    KernelSpec("s8", WeightFormat(32, False, "bf16"), 64, 128, 4),
    KernelSpec("s8", WeightFormat(128, True, "bf16"), 64, 128, 4),
    KernelSpec("e4m3", WeightFormat(128, False, "bf16", "e4m3"), 176, 128, 4),
    KernelSpec("e4m3", WeightFormat(128, False, "fp32", "e4m3", code="e4m3"), 128, 128, 4),
]


def main_loop(cubin: bytes) -> list[sass.Instruction]:
    """The instructions from the first multiply to the last."""
    found = list(instructions(cubin, *code_sections(cubin)[0]))
    multiplies = [index for index, each in enumerate(found) if each.opcode in sass.MULTIPLY]
    return found[multiplies[0] : multiplies[-1]]


def in_main_loop(cubin: bytes, opcode: int) -> list[bool]:
    """Whether the instructions of this opcode there yield."""
    return [each.yields for each in main_loop(cubin) if each.opcode == opcode]


@pytest.fixture(scope="module")
def built():
    """(cubin as NVRTC built it, the same with hints) of KERNELS."""
    found = []
    for spec in KERNELS:
        request = kernel_source(spec)
        cubin = compile_cubin(request.source, request.headers, request.options, name=spec.label).cubin
        found.append((cubin, apply_yields(cubin, request.yields)))
    return found


# ---- what a disassembler reads ---------------------------------------------------------------------------------------

_WHEELS = ("nvidia/cu13/bin", "triton/backends/nvidia/bin", "nvidia/cuda_nvcc/bin")


def nvdisasm() -> str | None:
    """NVIDIA's disassembler: on the path, or in a wheel that brings it."""
    folders = os.pathsep.join(
        [os.environ.get("PATH", ""), *(os.path.join(f, w) for f in sys.path if f for w in _WHEELS)]
    )
    return shutil.which("nvdisasm", path=folders)


@cache
def disassembled(cubin: bytes) -> list[str]:
    """The instructions of its only function, without .reuse, which is a hint."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.run([nvdisasm(), file.name], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    assert [int(offset, 16) for offset, _ in found] == list(range(0, 16 * len(found), 16))
    return [instruction.replace(".reuse", "") for _, instruction in found]


needs_nvdisasm = pytest.mark.skipif(nvdisasm() is None, reason="needs nvdisasm (pip install nvidia-cuda-nvdisasm)")


@pytest.mark.nvrtc
@needs_nvdisasm
@pytest.mark.parametrize("index", range(len(KERNELS)), ids=[spec.label for spec in KERNELS])
def test_a_disassembler_reads_the_same_instructions_with_hints_as_without(built, index):
    plain, hinted = built[index]
    assert plain != hinted and disassembled(plain) == disassembled(hinted)


@pytest.mark.nvrtc
@needs_nvdisasm
def test_a_disassembler_calls_instructions_what_this_module_takes_them_for(built):
    names = {sass.FFMA: {"FFMA"}, sass.I2FP: {"I2FP"}, sass.LDS: {"LDS"}}
    names |= dict.fromkeys(sass.MULTIPLY, {"QGMMA", "IGMMA"})
    integer = {0x010: {"IADD3"}, 0x012: {"LOP3"}, 0x016: {"PRMT"}, 0x019: {"SHF"}}
    assert integer.keys() == sass.INTEGER
    seen = set()
    for cubin, _ in built:
        texts = disassembled(cubin)
        for each, text in zip(instructions(cubin, *code_sections(cubin)[0]), texts, strict=True):
            name = re.sub(r"^@!?U?P\w+ ", "", text).partition(" ")[0].partition(".")[0]
            expected = names.get(each.opcode) or integer.get(each.opcode & 0x1FF)
            if expected:
                assert name in expected, (hex(each.opcode), text)
                seen.add(name)
            else:  # not one of them under another opcode
                assert name not in {"FFMA", "I2FP", "QGMMA", "IGMMA", *integer}, (hex(each.opcode), text)
    assert seen == {"FFMA", "I2FP", "LDS", "QGMMA", "IGMMA", "IADD3", "LOP3", "PRMT", "SHF"}


@pytest.mark.nvrtc
def test_the_hints_are_there_whatever_nvrtc_sets_itself(built):
    e4m3, s8, short, zeros, *more = (hinted for _, hinted in built)
    shares = {}
    for name, cubin, opcode in (("e4m3", e4m3, FFMA), ("s8", s8, FFMA), ("short", short, I2FP), ("zeros", zeros, I2FP)):
        found = in_main_loop(cubin, opcode)
        assert len(found) >= 64
        shares[name] = sum(found) / len(found)
    assert 0.3 < shares["e4m3"] < 0.7 and 0.2 < shares["s8"] < 0.3
    assert shares["short"] < 0.1 < 0.5 < shares["zeros"]
    # What waits long by itself is left alone.
    loads = [each for each in main_loop(e4m3) if each.opcode == LDS and each.stall <= sass._MOST_STALL]
    assert len(loads) > 4 and all(each.yields for each in loads)
    for cubin in more:
        found = in_main_loop(cubin, FFMA)
        assert 0.3 < sum(found) / len(found) < 0.7


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120"])
def test_only_hopper_s_cubins_are_touched(arch):
    """Elsewhere the same bits mean other things."""
    source = 'extern "C" __global__ void half(float* x) { x[threadIdx.x] *= 0.5f; }'
    cubin = compile_cubin(source, {}, (f"-arch={arch}", "--ptxas-options=-v"), name=arch).cubin
    if arch.startswith("sm_90"):
        assert len(apply_yields(cubin, Yields())) == len(cubin)
    else:
        with pytest.raises(BadCubin, match=f"expected code for sm_90, got {arch.rstrip('a')}$"):
            apply_yields(cubin, Yields())


@pytest.mark.nvrtc
def test_hints_can_be_switched_off_and_the_dump_holds_both(monkeypatch, tmp_path):
    monkeypatch.setenv("JITGEMM_DUMP_DIR", str(tmp_path / "dump"))
    cache = KernelCache([tmp_path / "cache"])
    hinted, _ = cache.get_or_compile(kernel_source(KERNELS[0]))
    assert hinted.metadata["yields"] == str(yields(KERNELS[0]))
    monkeypatch.setenv("JITGEMM_YIELDS", "0")
    plain, compiled = cache.get_or_compile(kernel_source(KERNELS[0]))
    assert compiled and plain.key != hinted.key and plain.metadata["yields"] == "None"
    assert plain.cubin != hinted.cubin == apply_yields(plain.cubin, yields(KERNELS[0]))
    dumped = {path.name: path.read_bytes() for path in (tmp_path / "dump").glob("*.cubin")}
    stem = KERNELS[0].label
    assert dumped == {
        f"{stem}-{hinted.key[:12]}.cubin": hinted.cubin,
        f"{stem}-{hinted.key[:12]}.unpatched.cubin": plain.cubin,
        f"{stem}-{plain.key[:12]}.cubin": plain.cubin,
    }


def test_a_cubin_that_takes_no_hints_runs_without_them_and_says_so(monkeypatch):
    request = kernel_source(KERNELS[0])
    strange = Compiled(b"\x7fELF\x02", log="", seconds=0.0, registers=0, spill_bytes=0, stack_bytes=0, smem_static=0)
    monkeypatch.setattr("jitgemm.jit.source.compile_cubin", lambda *_, **__: strange)
    with pytest.warns(UserWarning, match=f"kernel {KERNELS[0].label} runs without yield hints.*broken headers"):
        assert request.compile() == strange
