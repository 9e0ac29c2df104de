"""The table of types: one name, one size and one number, in Python, PyTorch and the kernels' headers."""

import re
import subprocess
import sys

import pytest
import torch

from jitgemm.dtypes import DTYPES, LHS_TYPES, REAL_TYPES, torch_dtype
from jitgemm.jit.source import headers
from jitgemm.tensors import TYPE_NAMES, check_dtype, describe, one_of


def test_numbers_are_those_of_the_headers():
    enum = re.search(r"enum RealType : i32 \{(.*?)\}", headers()["jitgemm/types.cuh"])
    numbers = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", enum[1])}
    assert numbers == {DTYPES[name].cpp_name: DTYPES[name].number for name in REAL_TYPES}


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


def test_the_table_is_read_without_torch():
    code = (
        "import sys, jitgemm_cli, jitgemm.dtypes; assert 'torch' not in sys.modules; jitgemm.dtypes.torch_dtype('bf16')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
