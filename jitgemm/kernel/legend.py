"""What the parts of a kernel's label mean, in words: "k2x2" is two warpgroups along k times two CTAs.

Text over labels; no torch, no CUDA. `KernelSpec.label`, `QuantizeSpec.label` and those of `moe/kernel.py` make labels.
"""

from __future__ import annotations

import re

GEMM = (
    ("e4m3, s8", r"(e4m3|s8)", "activations of type {0}; 4-bit codes in the order for both types of activations"),
    ("e4m3fast, s8fast", r"(e4m3|s8)fast", "activations of type {0}; 4-bit codes in {0}'s fastest order"),
    ("e4m3w8, s8w8", r"(e4m3|s8)w8", "activations and 8-bit weights of type {0}"),
    ("e4m3mx", r"(e4m3)mx", "activations of type {0}; MXFP4 weights"),
    ("e4m3nv, e4m3nvnear", r"(e4m3)nv(?:near)?",
     "activations of type {0}; NVFP4 weights, near: a row's scales are near one another"),
    ("s8tl", r"(s8)tl", "activations of type {0}; weights of two levels"),
    ("", r"(e4m3|s8)(\w+)", "activations of type {0}; weights of the code {1}"),
    ("channel", r"channel", "one scale per row of the weight"),
    ("g128", r"g(\d+)", "one scale per row and {0} values of k"),
    ("g128z, g128o", r"(?:channel|g(\d+))(z?)(o?)", "scales per row and group, with zero points (z) or offsets (o)"),
    ("bf16, fp16, fp32", r"(bf16|fp16|fp32)", "type of the weight's scales: {0}"),
    ("b128, b128e", r"b128e?", "activations have one scale per token and 128 k; e: packed powers of two"),
    ("tofp32", r"to(fp16|fp32)", "type of the result: {0}; bf16 is not named"),
    ("m16n64", r"m(\d+)n(\d+)", "a tile of {0} tokens and {1} rows of the weight"),
    ("m256hn128", r"m(\d+)hn(\d+)", "a tile of {0} tokens, multiplied in two halves, and {1} rows of the weight"),
    ("k2x2", r"k(\d+)x(\d+)", "k is split among {0} warpgroups of a CTA and {1} CTAs of a cluster; one CTA stores all"),
    ("k2x2s", r"k(\d+)x(\d+)s", "k is split among {0} warpgroups and {1} CTAs; each CTA stores its tokens"),
    ("mc2lhs", r"mc(\d+)lhs", "{0} CTAs of a cluster share their activations by multicast"),
    ("s8", r"s(\d+)", "a pipeline of {0} stages"),
    ("c2", r"c(\d+)", "{0} CTAs per SM"),
    ("d", r"d", "the consumers copy the first activations"),
    ("ss", r"ss", "wgmma reads the weights from shared memory"),
    ("tr", r"tr", "tokens are wgmma's rows"),
    ("f16", r"f16", "groups are added up in f16"),
    ("parts", r"parts", "int8 groups are added up unconverted"),
    ("xfp16", r"x(bf16|fp16)", "zero points or offsets are corrections, with factors of type {0}"),
    ("e256", r"e(\d+)", "a grouped GEMM, for up to {0} experts"),
    ("debug", r"debug", "barrier waits trap instead of hanging"),
)  # fmt: skip
"""(examples, pattern of a part, what it says) of GEMM kernels' labels; the first pattern that fits counts."""

OTHER = (
    ("quantize", r"quantize", "quantises activations; then the input's type and the codes' type"),
    ("route", r"route", "sorts choices of experts; with quantize behind it quantises too"),
    ("combine", r"combine", "adds up the experts' results; then the types of rows and result"),
    ("bf16, fp16, fp32", r"(bf16|fp16|fp32)", "{0}"),
    ("e4m3, s8, s8z", r"(e4m3|s8)(z?)", "codes of type {0}; z: with a zero point per token"),
    ("static", r"static", "with a scale that is given"),
    ("silumul, gelumul", r"(\w+)mul", "of {0}(gate) · up"),
    ("relu2", r"relu2", "of relu(x)²"),
    ("upgate, interleaved", r"(upgate|interleaved)", "order of gate and up: {0}"),
    ("limited", r"limited", "gate and up are limited first"),
    ("residual", r"residual", "adds a residual first"),
    ("rmsnorm", r"rmsnorm", "of RMSNorm of the input"),
    ("permuted", r"permuted", "with k permuted"),
    ("rotated", r"rotated", "with blocks of 128 k rotated by a Hadamard matrix"),
    ("block", r"block", "one scale per token and 128 k"),
    ("gathered", r"gathered", "rows are gathered by index"),
    ("masked", r"masked", "rows behind an expert's last are left alone"),
    ("sums32bf16", r"sums(\d+)(bf16|fp16)", "sums of groups of {0} behind a row's codes, in {1}"),
    ("v4r8hc2", r"v(\d+)(?:r\d+)?h?(?:c\d+)?",
     "{0} vectors a thread; r: rows a CTA works on, h: the permutation is held, c: CTAs a row"),
    ("c8", r"c(\d+)", "{0} CTAs share the work"),
)  # fmt: skip
"""The same for quantisers, routing and combining."""


ROTATED = "the weight is rotated: its kernels are those of others, and quantisers rotate activations by blocks of 128"


def legend(label: str) -> list[tuple[str, str]]:
    """(part, what it says) for each part of a kernel's label, in its order.

    Raises:
        ValueError: a part is none that a kernel has.
    """
    parts = label.split("-")
    known = OTHER if parts[0] in ("quantize", "route", "combine") else GEMM
    lines = []
    for at, part in enumerate(parts):
        # Types of activations stand first, and only there: s8 behind a tile is a number of stages.
        rows = [row for row in known if known is OTHER or row[1].startswith(("(e4m3", "(s8")) == (at == 0)]
        matches = ((re.fullmatch(pattern, part), text) for _, pattern, text in rows)
        match = next(((match, text) for match, text in matches if match), None)
        if match is None:
            raise ValueError(f"label: expected a kernel's label such as e4m3-g128-bf16-m16n64-s8, got {label!r}")
        lines.append((part, match[1].format(*match[0].groups())))
    return lines
