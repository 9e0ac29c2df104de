"""What stands in two languages: types, with one name, one size and one number in Python, PyTorch and the kernels'
headers, and constants of Python and of the headers."""

import ast
import re
import struct

import pytest
import torch

from jitgemm.activations import kernel as quantizers
from jitgemm.dtypes import DTYPES, LHS_TYPES, REAL_TYPES, torch_dtype
from jitgemm.gemm import bound, launch, partial
from jitgemm.jit.source import headers
from jitgemm.kernel import formats, render
from jitgemm.moe import exchange
from jitgemm.moe import kernel as moe
from jitgemm.tensors import TYPE_NAMES, check_dtype, describe, one_of
from jitgemm.weight import correction


def test_numbers_are_those_of_the_headers():
    enum = re.search(r"enum RealType : i32 \{(.*?)\}", headers()["jitgemm/types.cuh"])
    numbers = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", enum[1])}
    assert numbers == {each.cpp_name: each.number for each in DTYPES.values() if each.number is not None}


CONSTANTS = {
    "gemm/types.cuh kBlockK": formats.BLOCK_K,
    "gemm/types.cuh kStripRows": formats.STRIP_ROWS,
    "gemm/types.cuh kSwizzledRow": formats.BLOCK_K,
    "gemm/types.cuh kSwizzleRows": launch.SWIZZLE_ROWS,
    "gemm/loop.cuh kF16Run": bound.F16_RECORDS,
    "gemm/loop.cuh kPartsRun": bound.PARTS_RECORDS,
    "gemm/scaling.cuh kBegin": bound.PARTS,
    "gemm/scaling.cuh kFloatOfSums": int.from_bytes(struct.pack(">f", bound.PARTS), "big"),
    "gemm/finish.cuh kFinishThreads": partial.FINISH_THREADS,
    "gemm/correction.cuh kCorrected": formats.CORRECTION_GROUPS,
    "gemm/codec.cuh S8TwosComplementCodes kOutputScale": 1 / correction.TIMES,
    "quantize/vector.cuh kVector": quantizers.VECTOR,
    "quantize/types.cuh kMaxWarps": quantizers.MAX_THREADS // 32,
    "quantize/types.cuh kBlockVectors": formats.LHS_GROUP // quantizers.VECTOR,
    "quantize/sums.cuh kSumsOfBlock": formats.CORRECTION_GROUPS,
    "quantize/sums.cuh kBlockBytes": formats.BLOCK_K,
    "moe/ranks.cuh kMaxRanks": moe.MAX_RANKS,
    "moe/ranks.cuh kStampAt": exchange.MOST_CHOICES.bit_length() - 1,
    "moe/combine.cuh kCombineThreads": moe.COMBINE_THREADS,
}
"""Header, its struct where several have the name, and the constant, to what Python has for it. Sizes of records and of
shared memory, and registers, are static assertions of every kernel."""


@pytest.mark.parametrize("where", CONSTANTS)
def test_constants_are_those_of_the_headers(where):
    header, *scope, name = where.split()
    text = headers(header.removesuffix(".cuh"))[f"jitgemm/{header}"]
    for outer in scope:
        text = text[text.index(f"struct {outer} ") :]
    assert ast.literal_eval(re.search(rf"\b{name} = ([\w.]+?)f?[,;]", text)[1]) == CONSTANTS[where]


def test_defaults_of_kernels_are_those_of_the_header():
    body = re.search(r"struct Defaults \{(.*?)\n\};", headers()["jitgemm/gemm/config.cuh"], re.DOTALL)[1]
    found = {
        f"{kind} {name}": value
        for kind, names in re.findall(r"static constexpr (\w+) (k.*?);", body)
        for name, value in re.findall(r"(\w+) = (\w+)", names)
    }
    assert found == {
        name: str(value).lower() if type(value) is bool else str(value) for name, value in render._DEFAULTS.items()
    }


@pytest.mark.parametrize("name", DTYPES)
def test_sizes_and_names_are_pytorch_s(name):
    dtype = torch_dtype(name)
    assert dtype.itemsize == DTYPES[name].bytes
    assert str(dtype) == f"torch.{DTYPES[name].torch_name}"
    assert TYPE_NAMES[dtype] == name


def test_a_wrong_dtype_is_named_beside_what_was_expected():
    assert check_dtype("x", torch.int8, LHS_TYPES) == "s8"
    for value in (torch.float64, torch.int32, "int8", None, [1]):
        with pytest.raises(TypeError, match=r"^x: expected bfloat16, float16 or float32, got "):
            check_dtype("x", value, REAL_TYPES)
    assert one_of(("fp32",)) == "float32" and one_of(LHS_TYPES) == "float8_e4m3fn or int8"
    assert describe(torch.zeros(2, 3, dtype=torch.int8)) == "int8 [2, 3]"
