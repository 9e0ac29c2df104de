"""Packed weights of 4 and 8 bits.

quantize   from a float weight
quantize_mxfp4  the same to MXFP4
quantize_two_level  the same in two levels
search     scales and zero points of least error
gptq       codes of least error of the result, where the inputs are known
codes      what a code needs of torch, `CodeOps`, the twin of kernel/codes.py; nibbles
given      what packers ask of tensors, and sums of rows
pack       from codes, scales, zero points and offsets; int4 and bytes as codes
mxfp4      MXFP4: its numbers, from its codes and scales
nvfp4      NVFP4: its two terms, from its codes and scales
two_level  two levels: their integers, from codes with integer scales and zero points under a scale for a row
rotation   a Hadamard matrix along k
no_tensor  what packed weights cannot do where models expect a tensor
packed     W4Weight and W8Weight, checked: views of experts, back to codes and scales
stack      a weight of experts out of dense ones
correction  factors for zero points and offsets in blocks behind those of codes, and back
f16_sums   a weight with a power of two for each row, for kernels that add up in f16
parts      PackedWeight, their tensors: their checks, and what sizes and group sizes there are
state      their state dict
ready      whether a kernel in flight may still write a weight
layout     the order of bytes
"""

# Each registers its codes.
from jitgemm.weight import mxfp4, nvfp4, pack, two_level  # noqa: F401
