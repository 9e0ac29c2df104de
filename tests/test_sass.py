"""Yield hints: which instructions get them, and that nothing else of a cubin changes."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitgemm.errors import CompileError
from jitgemm.jit import sass
from jitgemm.jit.cache import KernelCache
from jitgemm.jit.nvrtc import Compiled, compile_cubin, nvrtc_info
from jitgemm.jit.sass import BadCubin, Yields, apply_yields, code_sections, instructions
from jitgemm.kernel.render import kernel_source
from jitgemm.kernel.spec import KernelSpec
from jitgemm.kernel.tactics import yields

FFMA, I2FP, LDS, MULTIPLY, LOP3, BRANCH = sass.FFMA, sass.I2FP, sass.LDS, 0xDF3, 0x812, 0x947
LOP3_REGISTERS, ZERO, ALWAYS = 0x212, 255, 7
HINTS = 1 << 109 | 15 << 122
"""The bits that may change: yield, and what is kept for the next instruction."""


def word(opcode: int, stall: int = 1, yielding: bool = False, keeps: int = 0, rest: int = 0) -> bytes:
    """An instruction; `rest` stands for its operands."""
    bits = opcode | rest << 12 | stall << 105 | (not yielding) << 109 | keeps << 122
    return bits.to_bytes(16, "little")


def of_registers(opcode: int, destination: int, a: int, b: int, *, predicate: int = ALWAYS, stall: int = 1) -> bytes:
    """An instruction by its registers."""
    return word(opcode, stall, rest=predicate | destination << 4 | a << 12 | b << 20)


def elf(code: bytes, other: bytes = b"") -> bytes:
    """The least of a cubin: a function's code beside another section."""
    names = b"\0.text.kernel\0.nv.info\0.shstrtab\0"
    bodies = [(1, code), (14, other), (23, names)]
    sections, data, start = [struct.pack("<IIQQQQ", 0, 0, 0, 0, 0, 0)], b"", 64
    for name, body in bodies:
        sections.append(struct.pack("<IIQQQQ", name, 1, 0, 0, start + len(data), len(body)))
        data += body
    padded = [section.ljust(64, b"\0") for section in sections]
    head = bytearray(b"\x7fELF\x02\x01\x01".ljust(64, b"\0"))
    struct.pack_into("<Q", head, 0x28, start + len(data))
    struct.pack_into("<HHH", head, 0x3A, 64, len(padded), 3)
    return bytes(head) + data + b"".join(padded)


def yielding(code: bytes, hints: Yields = Yields()) -> list[bool]:
    changed = apply_yields(elf(code), hints)
    return [each.yields for each in instructions(changed, *code_sections(changed)[0])]


def keeps(cubin: bytes, offset: int) -> int:
    """The operands that the instruction there keeps for the next one: a is 1, b is 2."""
    return int.from_bytes(cubin[offset : offset + 16], "little") >> 122 & 15


def keeping(code: bytes, every: int = 4) -> list[int]:
    changed = apply_yields(elf(code), Yields(every, keep=True))
    return [keeps(changed, each.offset) for each in instructions(changed, *code_sections(changed)[0])]


def test_every_other_multiply_add_of_a_run_yields():
    assert yielding(word(FFMA) * 5) == [False, True, False, True, False]


def test_a_multiply_does_not_end_a_run_and_another_instruction_does():
    assert yielding(word(FFMA) + word(MULTIPLY) + word(FFMA)) == [False, False, True]
    assert yielding(word(FFMA) + word(BRANCH) + word(FFMA)) == [False, False, False]


def test_a_multiply_add_that_yields_goes_on_to():
    """ptxas has set the hints already, since CUDA 12.9."""
    run = word(FFMA, yielding=True) + word(FFMA) + word(FFMA, yielding=True)
    assert yielding(run) == [True, False, True]


def test_one_multiply_add_in_so_many_yields_wherever_it_stands():
    mixed = (word(FFMA) + word(I2FP)) * 4 + word(FFMA, yielding=True)
    assert yielding(mixed, Yields(every=4, conversions=False))[::2] == [False, False, False, True, False]


def test_integer_instructions_and_conversions_yield_in_turn():
    run = word(LOP3) * 2 + word(I2FP) + word(FFMA)
    assert yielding(run) == [False, True, False, False]
    assert yielding(word(I2FP) * 3) == [False, True, False]
    assert yielding(word(I2FP) * 3, Yields(conversions=False)) == [False] * 3


def test_integer_instructions_are_known_whatever_their_operands_are():
    for opcode in (0x210, 0x810, 0x212, 0x812, 0x816, 0x819, 0x219):
        assert yielding(word(opcode) * 2) == [False, True]


def test_loads_from_shared_memory_yield_and_others_stay_as_they_are():
    assert yielding(word(LDS) * 2 + word(0x981) + word(0x981, yielding=True)) == [True, True, False, True]


def test_an_instruction_that_waits_long_by_itself_is_left_alone():
    assert yielding(word(FFMA) + word(FFMA, stall=5) + word(LDS, stall=0)) == [False, False, False]


def test_what_yields_keeps_no_operand_and_what_does_not_keeps_its_own():
    changed = apply_yields(elf(word(FFMA, keeps=2) * 2), Yields())
    assert [keeps(changed, each.offset) for each in instructions(changed, *code_sections(changed)[0])] == [2, 0]


FACTOR = 9
RUN = [of_registers(FFMA, 20 + index, 40 + index, FACTOR) for index in range(8)]
"""Multiply-adds by the same factor."""
BETWEEN = of_registers(LOP3, 70, 71, 72)


def test_multiply_adds_by_the_same_factor_keep_it_but_where_one_yields_or_the_run_ends():
    assert keeping(b"".join(RUN)) == [2, 2, 2, 0, 2, 2, 2, 0]
    assert yielding(b"".join(RUN), Yields(4, keep=True)) == [False, False, False, True] * 2
    assert keeping(b"".join(RUN[:3])) == [2, 2, 0]
    assert keeping(b"".join(RUN[:3]), every=2) == [2, 0, 0]


def test_the_factor_may_stand_in_either_place():
    swapped = [of_registers(FFMA, 20 + index, FACTOR, 40 + index) for index in range(3)]
    assert keeping(b"".join(swapped)) == [1, 1, 0]
    conversion = of_registers(I2FP, 70, ZERO, 71)
    assert keeping(conversion.join(swapped)) == [1, 0, 1, 0, 0]
    assert keeping(conversion.join(RUN[:2])) == [0, 0, 0]


def test_integer_instructions_with_an_immediate_may_stand_between_and_do_not_yield():
    code = RUN[0] + 2 * BETWEEN + RUN[1] + 2 * BETWEEN
    assert keeping(code) == [2, 0, 0, 0, 0, 0]
    assert yielding(code, Yields(4, keep=True)) == [False, False, False, False, True, False]


@pytest.mark.parametrize(
    "code",
    [
        RUN[0] + of_registers(FFMA, 21, 41, FACTOR + 1),
        RUN[0] + of_registers(LOP3_REGISTERS, 70, 71, 72) + RUN[1],
        RUN[0] + of_registers(LOP3, FACTOR, 71, 72) + RUN[1],
        RUN[0] + 3 * BETWEEN + RUN[1],
        RUN[0] + of_registers(LDS, 70, 71, 0) + RUN[1],
        RUN[0] + word(BRANCH) + RUN[1],
        RUN[0] + word(MULTIPLY) + RUN[1],
        of_registers(FFMA, FACTOR, 40, FACTOR) + RUN[1],
        of_registers(FFMA, 20, 40, ZERO) + of_registers(FFMA, 21, 41, ZERO),
        of_registers(FFMA, 20, 40, FACTOR, predicate=0) + RUN[1],
        RUN[0] + of_registers(FFMA, 21, 41, FACTOR, predicate=0),
    ],
    ids="factor register-between factor-written too-many load branch multiply own zero predicated next".split(),
)
def test_what_ends_a_run(code):
    assert keeping(code) == [0] * (len(code) // 16)


def test_a_multiply_add_that_waits_long_keeps_nothing_itself():
    slow = of_registers(FFMA, 21, 41, FACTOR, stall=9)
    assert keeping(RUN[0] + slow + RUN[2]) == [2, 0, 0]


def test_what_is_kept_needs_one_that_yields():
    with pytest.raises(ValueError, match="every: expected 2 or more .* got 1"):
        Yields(every=1, keep=True)


READS = {FFMA: (0, 1), I2FP: (1,), LDS: (0,), LOP3: (0,), LOP3_REGISTERS: (0, 1), BRANCH: (), MULTIPLY: (0,)}
"""Slots of a and b that an instruction reads."""
REGISTERS = st.sampled_from([1, 2, 3, ZERO])


@given(
    st.lists(
        st.builds(
            of_registers,
            st.sampled_from([FFMA] * 6 + list(READS)),
            REGISTERS,
            REGISTERS,
            st.sampled_from([4, 4, 4, 1, ZERO]),
            predicate=st.sampled_from([ALWAYS, ALWAYS, ALWAYS, 0]),
            stall=st.sampled_from([1, 1, 1, 2, 9]),
        ),
        min_size=2,
        max_size=40,
    ),
    st.integers(2, 4),
)
def test_what_is_kept_is_read_by_the_next_that_reads_there_and_is_still_the_same(words, every):
    """As if the machine kept an operand until another took its place, and read it without looking."""
    code = apply_yields(elf(b"".join(words)), Yields(every, keep=True))
    kept: dict[int, int] = {}
    for each in instructions(code, *code_sections(code)[0]):
        read = {slot: each.operand(slot) for slot in READS[each.opcode]}
        for slot, register in list(kept.items()):
            if slot in read:
                assert read[slot] == register
                del kept[slot]
            assert each.opcode not in (BRANCH, MULTIPLY, LDS)
        assert each.destination not in kept.values()
        kept.update({slot: each.operand(slot) for slot in (0, 1) if keeps(code, each.offset) >> slot & 1})
    assert not kept


OPCODES = st.sampled_from([FFMA, I2FP, LDS, MULTIPLY, LOP3, 0x219, 0x210, BRANCH, 0x981])
WORDS = st.builds(
    word, OPCODES, st.integers(0, 15), st.booleans(), st.integers(0, 15), st.integers(0, 2**93 - 1)
)  # fmt: skip


@given(
    st.lists(WORDS, min_size=1, max_size=60), st.binary(max_size=40), st.sampled_from([0, 2, 4]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_only_hints_change_and_only_once(words, other, every, conversions, keep):
    before, hints = elf(b"".join(words), other), Yields(every, conversions, keep and every > 0)
    after = apply_yields(before, hints)
    ((start, end),) = code_sections(before)
    assert before[:start] == after[:start] and before[end:] == after[end:]
    for old, new in zip(instructions(before, start, end), instructions(after, start, end)):
        bits = [int.from_bytes(each[old.offset : old.offset + 16], "little") for each in (before, after)]
        assert bits[0] & ~HINTS == bits[1] & ~HINTS
        assert not (new.yields and not old.yields and keeps(after, new.offset))
        assert new.stall == old.stall and new.opcode == old.opcode
    assert apply_yields(after, hints) == after


@pytest.mark.parametrize(
    "cubin", [b"", b"\x7fELF\x01" + bytes(80), elf(b"")[:100], elf(word(FFMA) + b"\0"), elf(word(FFMA))[:-150]]
)
def test_what_is_no_cubin_is_refused(cubin):
    with pytest.raises(BadCubin, match="cubin: "):
        apply_yields(cubin, Yields())


def test_a_file_without_code_is_refused():
    with pytest.raises(BadCubin, match="no code"):
        apply_yields(elf(word(FFMA)).replace(b".text.kernel", b".data.kernel"), Yields())


# ---- real kernels ---------------------------------------------------------------------------------------------------

KERNELS = [
    KernelSpec("e4m3", 128, False, "bf16", 128, 128, 4, codes="e4m3"),
    KernelSpec("s8", 128, False, "bf16", 128, 128, 4, codes="s8"),
    KernelSpec("s8", 32, False, "bf16", 64, 128, 4),
    KernelSpec("s8", 128, True, "bf16", 64, 128, 4),
    KernelSpec("e4m3", 128, False, "bf16", 176, 128, 4, codes="e4m3"),
    KernelSpec("e4m3", 64, False, "bf16", 128, 128, 4, halves=2),
    KernelSpec("e4m3", 32, False, "bf16", 96, 128, 4),
]


def main_loop(cubin: bytes) -> list[sass.Instruction]:
    """The instructions from the first multiply to the last."""
    found = list(instructions(cubin, *code_sections(cubin)[0]))
    multiplies = [index for index, each in enumerate(found) if each.opcode in sass.MULTIPLY]
    return found[multiplies[0] : multiplies[-1]]


def in_main_loop(cubin: bytes, opcode: int) -> list[bool]:
    """Whether the instructions of this opcode there yield."""
    return [each.yields for each in main_loop(cubin) if each.opcode == opcode]


@pytest.mark.nvrtc
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.label)
def test_a_kernel_s_cubin_is_what_nvrtc_built_but_for_its_hints(spec, tmp_path):
    request = kernel_source(spec)
    assert request.yields == yields(spec)
    built = compile_cubin(request.source, request.headers, request.options, name=spec.label).cubin
    entry, _ = KernelCache([tmp_path]).get_or_compile(kernel_source(spec))
    assert entry.cubin == apply_yields(built, request.yields) != built
    assert entry.metadata["yields"] == str(request.yields)


@pytest.mark.nvrtc
def test_the_hints_are_there_whatever_nvrtc_sets_itself(tmp_path):
    e4m3, s8, short, zeros, *keeping = (KernelCache([tmp_path]).get_or_compile(kernel_source(spec))[0].cubin for spec in KERNELS)
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
    for cubin in keeping:
        found = in_main_loop(cubin, FFMA)
        kept = [keeps(cubin, each.offset) for each in main_loop(cubin) if each.opcode == FFMA]
        assert 0.1 < sum(found) / len(found) < 0.3
        assert sum(map(bool, kept)) / len(kept) > 0.55


def test_hints_are_part_of_the_key(monkeypatch):
    request, nvrtc = kernel_source(KERNELS[0]), nvrtc_info()
    others = [None, Yields(every=2), Yields(conversions=False), Yields(every=2, keep=True)]
    keys = {request.key(nvrtc), *(replace(request, yields=other).key(nvrtc) for other in others)}
    monkeypatch.setattr(sass, "VERSION", 999)
    assert len(keys | {request.key(nvrtc)}) == 6


def test_a_cubin_without_code_is_a_failed_build(monkeypatch):
    request = kernel_source(KERNELS[0])
    broken = Compiled(b"\x7fELF\x02", log="", seconds=0.0, registers=0, spill_bytes=0, stack_bytes=0, smem_static=0)
    monkeypatch.setattr("jitgemm.jit.source.compile_cubin", lambda *_, **__: broken)
    with pytest.raises(CompileError, match="broken section headers"):
        request.compile()
