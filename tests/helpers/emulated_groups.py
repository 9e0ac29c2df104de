"""Grouped problems for the emulator."""

from __future__ import annotations

import builders
import torch
from builders import weight_of_experts

from jitgemm.gemm.problem import Gemm, Groups
from jitgemm.kernel.spec import KernelSpec
from jitgemm.weight.correction import with_sums


def grouped_problem(spec: KernelSpec, counts: list[int], gathered: bool, k: int = 416) -> Gemm:
    f, n = spec.format, 136
    rows, tokens = sum(counts), sum(counts) // 3 if gathered else sum(counts)
    form = {"": {}, "fp16": {"zero_point": True, "max_zero": 16}, "bf16": {"offset": True}}[f.correction]
    form |= {"correction": bool(f.correction), "codes": f.order, "scale_type": f.scale_type, "bits": f.bits}
    weight = weight_of_experts(len(counts), n, k, f.group_size, uniform_strip_scale=spec.tokens_as_m, **form)
    weight = weight.with_sums(spec.sums) if spec.sums == "f16" else weight
    offsets = torch.tensor([0, *(sum(counts[: i + 1]) for i in range(len(counts)))], dtype=torch.int32)
    index = torch.randint(0, tokens, (rows,), generator=builders.generator(4), dtype=torch.int32)
    if spec.lhs_group or spec.lhs == "e4m3":
        lhs = (*(builders.block_lhs if spec.lhs_group else builders.lhs)(3, tokens, k, spec.lhs), None)
    else:
        x, *scales = builders.affine_lhs(3, tokens, k)
        lhs = with_sums(x, weight.correction) if f.correction else x, *scales
    bias = torch.stack([builders.bias(e, n, torch.bfloat16 if gathered else torch.float32) for e in range(len(counts))])
    groups = Groups(offsets, index if gathered else None, 0, rows)
    return Gemm(*lhs, weight, torch.empty(rows, n).bfloat16(), bias, groups=groups)
