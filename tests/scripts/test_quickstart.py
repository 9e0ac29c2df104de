"""scripts/quickstart.py where there is no GPU, with a small layer."""

from __future__ import annotations

import pytest
import quickstart


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"LLAMA_8B": ("512,256",), "N": 512, "K": 256, "MAX_M": 128}.items():
        monkeypatch.setattr(quickstart, name, value)


@pytest.mark.nvrtc
def test_without_a_gpu_kernels_are_compiled_and_the_gemm_runs(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("JITGEMM_CACHE_DIR", str(tmp_path))
    assert quickstart.without_gpu() == 0
    printed, said = capfd.readouterr()
    compiled = len(list(tmp_path.glob("*.jgk")))
    table = printed.partition("$ jitgemm warmup")[2].partition("$ jitgemm cache")[0].strip().splitlines()[1:]
    assert compiled > 3 and len(table) == 1 + 3 + 1 and table[0].startswith("kernel") and table[-1] == "  ..."
    assert f"{compiled} kernels, {compiled} compiled" in said and "relative RMS difference" in printed


def test_a_wrong_result_fails(monkeypatch, capfd):
    monkeypatch.setattr("jitgemm.cli.main", lambda argv: None)
    monkeypatch.setattr(quickstart.jitgemm, "gemm_w4a8_bf16_nt", lambda lhs, rhs, out: out.zero_())
    assert quickstart.without_gpu() == 1
