"""SGLang's plug-in: `python -m sglang.launch_server --model-path MODEL --quantization jitgemm`, found by the entry
point of the installed package.

    arguments  SGLang's arguments, as they are in effect
    config     the quantisation config that SGLang asks
    linear     the methods of SGLang's linears and of its output layer
    experts    the method of SGLang's fused experts

What a checkpoint and a user say, what the files hold and its packing are `jitgemm.serving`'s. SGLang is imported
when it calls `register`.
"""

from __future__ import annotations


def register() -> None:
    """Registers the quantisation "jitgemm"; SGLang calls it in each of its processes, before it reads its arguments."""
    from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.server_args import add_quantization_method_choices

    from jitgemm.serving.served import NAME
    from jitgemm.sglang.config import JitGemmConfig

    if NAME in QUANTIZATION_METHODS:
        return
    # The first that wants a checkpoint gets it, and some of SGLang's own want theirs whatever the user says.
    others = dict(QUANTIZATION_METHODS)
    QUANTIZATION_METHODS.clear()
    QUANTIZATION_METHODS.update({NAME: JitGemmConfig, **others})
    WEIGHT_LOADER_V2_SUPPORTED.append("JitGemmLinearMethod")
    add_quantization_method_choices([NAME])
