"""vLLM's plug-in: `vllm serve MODEL --quantization jitgemm`, found by the entry point of the installed package.

    config   which layers are quantised, and how: the quantisation config that vLLM asks
    layouts  the tensors that a layer of each checkpoint format has, and how ranks cut them
    matrix   a weight of a layer: its tensors as vLLM's parameters, loaded by a rank, and packed
    saved    the same in a model that jitgemm packed and saved
    linear   the methods of vLLM's linears and of its output layer
    experts  the method of vLLM's fused experts
    lora     adapters' products added between the steps of experts
    eplb     packed experts as rows that vLLM moves between ranks
    fusion   norms, residuals and gates computed by quantisers, in the graphs that vLLM compiles
    warm     kernels, once the last layer is packed

vLLM is imported when it calls `register`, its layers when it builds a model.
"""

from __future__ import annotations


def register() -> None:
    """Registers the quantisation config "jitgemm"; vLLM calls it in each of its processes, before anything else."""
    import jitgemm.vllm.config  # noqa: F401  its class registers itself, once
