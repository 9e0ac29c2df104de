"""scripts/emulate.py: kernels of a CUDA file and of jitgemm's, right ones and wrong ones, and what it says of wrong
arguments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from emulate import app
from marks import emulated
from typer.testing import CliRunner

SCALE = """
extern "C" __global__ void scale(float* out, const float* x, float a, int n) {
    __shared__ float tile[64];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = i < n ? x[i] : 0;
    __syncthreads();
    if (i < n) out[i] = a * tile[63 - threadIdx.x];
}
"""
LAUNCH = ["--grid", "2", "--block", "64"]
ARGUMENTS = [f"--arg={text}" for text in ("out=f32[128]", "x=f32[128]:arange", "a=f32:2.5", "n=i32:128")]
GEMM = "s8fast-g128-bf16-m16n64-s3"


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def file(tmp_path):
    def write(source: str) -> Path:
        (tmp_path / "scale.cu").write_text(source)
        return tmp_path / "scale.cu"

    return write


class TestCuda:
    pytestmark = emulated

    def test_what_a_kernel_wrote_is_shown(self, file):
        code, output = invoke("cuda", file(SCALE), *LAUNCH, *ARGUMENTS)
        assert code == 0 and "out: 157.5, 155, 152.5, 150, 147.5, 145, 142.5, 140, ..." in output
        assert "3 of 3 runs" in output and "x:" not in output

    def test_a_race_shows_as_a_difference_of_runs(self, file):
        code, output = invoke("cuda", file(SCALE.replace("__syncthreads();", "")), *LAUNCH, *ARGUMENTS, "--seeds", "9")
        assert code == 1 and re.search("seed [2-9]: [0-9]+ of 128 values of out differ from seed 1's", output)

    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            ("if (i < n) out[i] =", "out[i + 1] =", "4 bytes at 0x[0-9a-f]+ are outside of all tensors.*st.global"),
            ("63 - threadIdx.x", "20000", "shared memory: 0x[0-9a-f]+ is outside"),
            ("__syncthreads();", 'asm volatile("bar.sync 1, 96;");', "the kernel hangs: CTA 0 warp [01] at [0-9]+ bar.sync"),
            ("63 - threadIdx.x]", "0] * sinf(x[i])", "no such variable: __cudart_i2opi_f, an array"),
            ("__syncthreads();", "__nanosleep(10);", "no such opcode: nanosleep.u32"),
        ],
    )  # fmt: skip
    def test_a_fault_is_named(self, file, old, new, expected):
        code, output = invoke("cuda", file(SCALE.replace(old, new)), *LAUNCH, *ARGUMENTS)
        assert code == 1 and re.search(expected, output), output

    def test_headers_of_a_folder_are_found(self, file, tmp_path):
        (tmp_path / "some").mkdir()
        (tmp_path / "some" / "sizes.cuh").write_text("#define SIZE 64\n")
        path = file('#include "some/sizes.cuh"\n' + SCALE.replace("tile[64]", "tile[SIZE]"))
        assert invoke("cuda", path, *LAUNCH, *ARGUMENTS, "--include", tmp_path)[0] == 0

    @pytest.mark.parametrize(
        ("source", "arguments", "expected"),
        [
            ("no CUDA", [], "NVRTC does not compile it"),
            ("int x;", [], "expected one __global__ function, got 0"),
            (SCALE + SCALE.replace("scale", "twice"), [], "expected one __global__ function, got 2"),
            (SCALE, ARGUMENTS[1:], "arguments: expected 4, as the kernel has parameters, got 3"),
            (SCALE, ["--block", "40"], "--block: expected a multiple of 32, got 40"),
            (SCALE, ["--arg", "x"], "argument: expected NAME=TYPE:VALUE or NAME=TYPE[COUNT]:FILL"),
            (SCALE, ["--arg", "x=f8[3]"], "x: expected a type of f32, f16"),
            (SCALE, ["--arg", "x=f32"], "x: expected a value"),
            (SCALE, ["--arg", "x=f32[0]"], "x: expected a count of 1 or more, got 0"),
            (SCALE, ["--arg", "x=f32[4]:twos"], "x: expected one of zeros, ones, arange, random, nan or a number, got"),
            (SCALE, ["--include", "/no/folder"], "--include: expected a folder"),
        ],
    )
    def test_wrong_arguments_are_named(self, file, source, arguments, expected):
        code, output = invoke("cuda", file(source), *arguments)
        assert code == (3 if "NVRTC" in expected else 2) and expected in output, output


class TestGemm:
    pytestmark = emulated

    @pytest.mark.parametrize(
        "label",
        [
            GEMM, "e4m3fast-g128-bf16-m32n64-s6-f16", "e4m3w8-g128-fp32-b128-m128n128-s3-ss-tr",
            "e4m3nvnear-channel-m16n64-k1x2-s3", "e4m3nv-channel-m16n64-s3",
        ],
    )  # fmt: skip
    def test_a_right_one_is_within_its_bound(self, label):
        code, output = invoke("gemm", label, 20, 72, 416, "--seeds", 2)
        assert code == 0 and re.search("at most (0|0[.][0-9]+) of its bound", output), output

    @pytest.mark.parametrize(
        ("header", "old", "new", "expected"),
        [
            ("gemm/epilogue", "async_proxy_fence();", "", "without fence.proxy.async"),
            ("gemm/loop", "if (position.lane == 0) barrier_arrive(shared.empty(stage));", "", "the kernel hangs"),
            ("gemm/epilogue", "stored = (dense", "", "old: expected what stands once in jitgemm/gemm/epilogue.cuh"),
            ("gemm/none", "", "", "header: expected one of jitgemm/gemm/"),
            (
                "gemm/epilogue", "found.scale[half] = 1.0f;\n        if constexpr (Config::kRowScales) {",
                "if constexpr (false) {", "times as far from the exact result as its bound allows",
            ),
        ],
        ids=["fence", "hang", "old", "header", "scale"],
    )  # fmt: skip
    def test_a_planted_fault_shows(self, header, old, new, expected):
        label = "s8fast-channel-m16n64-s3" if "found.scale" in old else GEMM
        code, output = invoke("gemm", label, 20, 72, 1056, "--plant", header, old, new)
        assert code == (2 if "expected" in expected else 1) and expected in output, output

    @pytest.mark.parametrize(
        ("label", "expected"), [("m16", "m16"), (f"{GEMM}-e64", "LABEL: expected a dense kernel, got")]
    )
    def test_wrong_kernels_are_named(self, label, expected):
        code, output = invoke("gemm", label, 20, 72, 416)
        assert code == 2 and expected in output, output
