"""What plug-ins of serving engines are made of. It imports no engine: `jitgemm.vllm` and `jitgemm.sglang` do.

    served          which layers are quantised, and how: what a checkpoint and a user say
    layouts         the tensors that a layer of each checkpoint format has, and how ranks cut them
    matrix          a weight of a layer: its tensors as the engine's parameters, loaded by a rank, and packed
    experts_matrix  the same of fused experts
    saved           the same in a model that jitgemm packed and saved
    packed_linear   a linear of an engine with a packed weight
    packed_experts  fused experts of an engine with packed weights
    warm            kernels, once the last layer is packed

What a format's codes mean is the business of `jitgemm.checkpoint`.
"""
