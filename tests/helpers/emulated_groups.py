"""Grouped problems for the emulator."""

from __future__ import annotations

import builders
import torch
from builders import weight_of_experts

import jitgemm
from jitgemm.gemm.problem import Gemm, Groups
from jitgemm.kernel.spec import KernelSpec
from jitgemm.weight.correction import with_sums


def grouped_problem(spec: KernelSpec, counts: list[int], gathered: bool, k: int = 416) -> tuple[Gemm, Groups]:
    f, n = spec.format, 136
    rows, tokens = sum(counts), sum(counts) // 3 if gathered else sum(counts)
    if f.bits == 8:
        parts = [builders.weight_parts(e, n, k, f.group_size, codes=f.order, bits=8) for e in range(len(counts))]
        stacks = (torch.stack([getattr(each, name) for each in parts]) for name in ("q", "scale"))
        q, scale = stacks
        scale = scale[:, ::128].contiguous() if spec.tokens_as_m else scale
        weight = jitgemm.pack_w8(q, scale, group_size=None if spec.tokens_as_m else f.group_size)
    else:
        form = {"": {}, "fp16": {"zero_point": True, "max_zero": 16}, "bf16": {"offset": True}}[f.correction]
        form |= {"correction": bool(f.correction), "codes": f.order, "scale_type": f.scale_type}
        weight = weight_of_experts(len(counts), n, k, f.group_size, **form)
        weight = weight.with_sums(spec.sums) if spec.sums == "f16" else weight
    offsets = torch.tensor([0, *(sum(counts[: i + 1]) for i in range(len(counts)))], dtype=torch.int32)
    index = torch.randint(0, tokens, (rows,), generator=builders.generator(4), dtype=torch.int32)
    if spec.lhs_group or spec.lhs == "e4m3":
        lhs = (*(builders.block_lhs if spec.lhs_group else builders.lhs)(3, tokens, k, spec.lhs), None)
    else:
        x, *scales = builders.affine_lhs(3, tokens, k)
        lhs = with_sums(x, weight.correction) if f.correction else x, *scales
    bias = torch.stack([builders.bias(e, n, torch.bfloat16 if gathered else torch.float32) for e in range(len(counts))])
    operands = Gemm(*lhs, weight, torch.empty(rows, n).bfloat16(), bias)
    return operands, Groups(offsets, index if gathered else None, 0, rows)
