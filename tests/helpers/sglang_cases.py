"""Layers of SGLang's with files of each format: made and loaded."""

from __future__ import annotations

from sglang_layers import BF16

import jitgemm.sglang

jitgemm.sglang.register()

# isort: split
from sglang.srt.layers.linear import RowParallelLinear

from jitgemm.sglang.config import JitGemmConfig


def made(checkpoint, **options):
    return JitGemmConfig(checkpoint, options)


def row(config, k, n, prefix="m.o_proj"):
    return RowParallelLinear(k, n, bias=False, params_dtype=BF16, quant_config=config, prefix=prefix)


GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
