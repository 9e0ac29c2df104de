"""vLLM's plug-in: `vllm serve MODEL --quantization jitgemm`, found by the entry point of the installed package.

    served         which layers are quantised, and how: what a checkpoint and a user say
    layouts        the tensors that a layer of each checkpoint format has, and how ranks cut them
    matrix         a weight of a layer: its tensors as the engine's parameters, loaded by a rank, and packed
    saved          the same in a model that jitgemm packed and saved
    packed_linear  a linear of an engine with a packed weight
    warm           kernels, once the last layer is packed
    config         the quantisation config that vLLM asks
    linear         the methods of vLLM's linears and of its output layer
    experts        the method of vLLM's fused experts
    warm_graphs    what vLLM says of tokens and graphs to `warm`
    fusion         norms, residuals and gates computed by quantisers, in the graphs that vLLM compiles
    lora           adapters' products added between the steps of experts
    eplb           packed experts as rows that vLLM moves between ranks

The first six know no engine: SGLang's plug-in is made of them, too. vLLM is imported when it calls `register`, its layers when it builds a model.
"""

from __future__ import annotations


def register() -> None:
    """Registers the quantisation config "jitgemm"; vLLM calls it in each of its processes, before anything else."""
    import jitgemm.vllm.config  # noqa: F401  its class registers itself, once
