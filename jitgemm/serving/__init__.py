"""What plug-ins of serving engines are made of. It imports no engine: `jitgemm.vllm` and `jitgemm.sglang` do.

    engine          what all of this asks of an engine: its plug-in's config answers
    served          which layers are quantised, and how: what a checkpoint and a user say
    stored          how the files hold the layers that an engine joins, as their headers tell
    collected       a weight of a linear: its tensors as the files have them, and the packed weight once all are there
    experts         the same of fused experts
    saved           the same of experts in a model that jitgemm packed and saved
    packing         a layer of weights: its parameters, and when it is packed; a linear with a packed weight
    packed_experts  fused experts of an engine with packed weights
    warm            kernels, once the last layer is packed

What the tensors mean is the business of `jitgemm.checkpoint`, whose readers are the engines' too: a new format works in
them as it is.
"""
