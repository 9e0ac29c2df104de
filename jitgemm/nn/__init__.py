"""Layers: a Linear, and a layer's experts, with weights of 4 or 8 bits and 8-bit activations; putting them into models.

In three lines::

    import jitgemm.nn
    jitgemm.nn.quantize_(model)            # or, from a quantised checkpoint: jitgemm.nn.load_(model, folder)
    jitgemm.nn.warmup(model, max_m=8192)   # compiles every kernel that the model can need

Packages and files::

    layers    the layers
    recipe    how weights in floats are quantised
    quantize  replacing a model's layers, from floats
    load      filling a model from a quantised checkpoint
    save      a folder in floats, quantised, as a checkpoint
    parallel  layers and models divided among ranks
    warm      compiling ahead
    report    what the calls say of layers
"""

from __future__ import annotations

from jitgemm.activations.scheme import ACTIVATIONS, Gate
from jitgemm.nn.layers.by_width import W4A8Linear, W8A8Linear
from jitgemm.nn.layers.experts import PackedExperts, W4A8Experts, W8A8Experts
from jitgemm.nn.layers.linear import PackedLinear
from jitgemm.nn.layers.mark_ready import mark_ready
from jitgemm.nn.load.load import load_
from jitgemm.nn.quantize.quantize import QuantisationReport, quantize_
from jitgemm.nn.report import Report
from jitgemm.nn.warm.warm import warmup

__all__ = [
    "ACTIVATIONS", "Gate", "PackedExperts", "PackedLinear", "QuantisationReport", "Report", "W4A8Experts", "W4A8Linear",
    "W8A8Experts", "W8A8Linear", "load_", "mark_ready", "quantize_", "warmup",
]  # fmt: skip
