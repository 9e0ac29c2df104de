"""vLLM's plug-in: `vllm serve MODEL --quantization jitgemm`, found by the entry point of the installed package.

    config       the quantisation config that vLLM asks
    linear       the methods of vLLM's linears and of its output layer
    experts      the method of vLLM's fused experts
    exchange     experts' tokens sent between data-parallel ranks by jitgemm's kernels
    warm_graphs  what vLLM says of tokens and graphs to `jitgemm.serving.warm`
    fusion       norms, residuals and gates computed by quantisers, in the graphs that vLLM compiles
    lora         adapters' products added between the steps of experts

What a checkpoint and a user say, what the files hold and its packing are `jitgemm.serving`'s. vLLM is imported when
it calls `register`, its layers when it builds a model.
"""

from __future__ import annotations


def register() -> None:
    """Registers the quantisation config "jitgemm"; vLLM calls it in each of its processes, before anything else."""
    import jitgemm.vllm.config  # noqa: F401  its class registers itself, once
