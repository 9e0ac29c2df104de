"""`jitgemm.explain`, and the words for each part of a kernel's label."""

import re
from pathlib import Path

import builders
import pytest
import torch

import jitgemm
from jitgemm.activations.kernel import quantize_specs
from jitgemm.jit.source import function_name
from jitgemm.kernel.formats import WeightFormat
from jitgemm.kernel.legend import GEMM, OTHER, legend
from jitgemm.kernel.render import render
from jitgemm.kernel.spec import KernelSpec
from jitgemm.moe.kernel import CombineSpec, RouteSpec
from jitgemm.select.choose import kernels_for
from jitgemm.select.devices import device_spec

H200 = device_spec("h200")
K, E4M3 = 1024, torch.float8_e4m3fn
PARTS = builders.weight_parts(1, 256, K, 128, codes="e4m3")


def explained(m: int = 3, weight: jitgemm.W4Weight = PARTS.packed, **options) -> jitgemm.gemm.explain.Explanation:
    lhs = jitgemm.quantize_activations(torch.ones(m, K), torch.float8_e4m3fn)
    return jitgemm.explain(lhs, weight, torch.empty(m, 256, dtype=torch.bfloat16), **options)


def test_the_kernel_is_the_one_that_a_call_takes():
    (kernel,) = kernels_for(256, K, "e4m3", PARTS.packed.format, H200, 3)
    found = explained()
    text = str(found)
    assert found.on_cpu and text.startswith(
        "on the CPU the exact reference runs, and no kernel; on a GPU it would be:\n"
    )
    assert all(words in text for words in (found.kernel, found.function, found.why, *dict(found.legend).values()))
    assert f"\n{found.function}(" in render(KernelSpec.from_label(found.kernel))
    assert found.function == function_name(found.kernel) and found.function.startswith("jitgemm_e4m3")
    with pytest.raises(ValueError, match=r"lhs\[0\] \(x\): expected at least one row, got shape \[0, 1024\]"):
        explained(0)
    assert (found.kernel, found.device, found.rows) == (kernel.label, "h200", (1, 8))
    assert found.predicted_us > 0 and found.candidates > 1 and found.kernel in found.why


def test_a_weight_s_rotation_is_said_and_changes_no_kernel():
    x, out = torch.randn(3, K), torch.empty(3, 64)
    weights = [jitgemm.quantize_w4_two_level(torch.randn(64, K), rotation=size) for size in (0, 128)]
    lhs = [jitgemm.quantize_activations(x, torch.int8, rotation=weight.rotation) for weight in weights]
    found = [jitgemm.explain(*given, out) for given in zip(lhs, weights)]
    assert found[0].kernel == found[1].kernel and [each.rotation for each in found] == [0, 128]
    assert "rotated" not in str(found[0]) and str(found[1]).endswith("rotate activations by blocks of 128")
    with pytest.raises(ValueError, match="lhs: expected jitgemm.Rotated for a rotated weight"):
        jitgemm.explain(lhs[0], weights[1], out)


@pytest.mark.gpu
def test_a_profile_shows_the_function_that_is_explained():
    weight = builders.weight_parts(1, 256, K, 128, codes="e4m3", device="cuda").packed
    lhs = jitgemm.quantize_activations(torch.ones(3, K, device="cuda"), torch.float8_e4m3fn)
    out = torch.empty(3, 256, dtype=torch.bfloat16, device="cuda")
    jitgemm.gemm_w4a8_bf16_nt(lhs, weight, out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        jitgemm.gemm_w4a8_bf16_nt(lhs, weight, out)
        torch.cuda.synchronize()
    found = jitgemm.explain(lhs, weight, out)
    assert found.function in {event.key for event in profile.key_averages()}
    assert not found.on_cpu and str(found).startswith(found.kernel)


def test_the_weight_s_sums_and_the_environment_count(monkeypatch):
    wide = explained(4096)
    assert not wide.kernel.endswith("f16") and explained(4096, PARTS.packed.with_f16_sums()).kernel.endswith("f16")
    monkeypatch.setenv("JITGEMM_DEBUG", "1")
    assert explained(4096).kernel == f"{wide.kernel}-debug"


@pytest.mark.parametrize(
    ("dtype", "group_size", "said"), [(torch.int8, 128, True), (torch.int8, "channel", False), (E4M3, 128, False)]
)
def test_int8_with_float_scales_in_groups_is_said_to_be_slower_in_prefill(dtype, group_size, said):
    weight = jitgemm.quantize_w4(torch.ones(64, 256), group_size=group_size, lhs_dtype=dtype)
    lhs = jitgemm.quantize_activations(torch.ones(3, 256), dtype)
    found = jitgemm.explain(lhs, weight, torch.empty(3, 64))
    assert bool(found.faster_instead) == ("two levels or e4m3 are faster in prefill" in str(found)) == said


def test_every_label_has_a_legend():
    formats = [
        ("e4m3", WeightFormat(128, False, "bf16", "e4m3")), ("s8", WeightFormat(32, True, "fp16", "any")),
        ("s8", WeightFormat(0, False, "fp32", "two_level", code="two_level")),
        ("e4m3", WeightFormat(0, False, "fp32", "near", code="nvfp4")),
        ("e4m3", WeightFormat(32, False, "bf16", "e2m1", code="e2m1")),
    ]  # fmt: skip
    labels = [spec.label for lhs, format in formats for spec in kernels_for(4096, 4096, lhs, format, H200, 4096)]
    labels += [spec.label for x in ("bf16", "fp32") for spec in quantize_specs(4096, x, "s8")]
    labels += ["s8-g64z-fp16-b128e-tofp32-m256hn128-mc2lhs-s4-debug", "e4m3w8-channel-m64n128-s4-ss-tr-e256"]
    labels += ["quantize-bf16-s8-rmsnorm-rotated-v4c2", "quantize-bf16-s8z-silumul-permuted-v4"]
    labels += ["route-quantize-bf16-e4m3-v4"]
    for label in (*labels, RouteSpec(8).label, CombineSpec("bf16", "fp32").label):
        assert "-".join(part for part, _ in legend(label)) == label
    with pytest.raises(ValueError, match="label: expected a kernel's label such as .*, got 'e4m3-what'"):
        legend("e4m3-what")


def described(rows) -> list[str]:
    """The rows of a page's table."""
    lines = []
    for examples, pattern, text in rows:
        if examples:
            for part in examples.split(", "):
                lines.append(f"| `{part}` | {text.format(*re.fullmatch(pattern, part).groups())} |")
    return lines


def test_the_cache_s_page_has_the_legend():
    page = (Path(__file__).resolve().parents[2] / "docs" / "cache.md").read_text(encoding="utf-8")
    assert [line for line in (*described(GEMM), *described(OTHER)) if line not in page.splitlines()] == []
