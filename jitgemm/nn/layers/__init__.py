"""The layers: a packed weight as a module, and the quantiser before it.

linear             PackedLinear: the call, state dicts, checkpoints
by_width           W4A8Linear and W8A8Linear: from floats, and without values
experts            W4A8Experts and W8A8Experts
batched_experts    the same over tokens that come sorted by expert
packed             what both are made of: a packed weight whose tensors are a module's buffers; its state dict
gate               the gate between an expert's two GEMMs
mark_ready         marks a model's weights as written
shard_weight       a rank's part of a packed weight and its bias
invariant          Linears with the same bits on any number of ranks
invariant_nvlink   their sums over the ranks of a host, by kernels
invariant_experts  experts with the same bits on any number of ranks
sharding           how layers and DTensors as their inputs are divided among ranks
expert_all_to_all  tokens' way to experts on other ranks and back
"""
