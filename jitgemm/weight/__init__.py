"""Packed weights of 4 and 8 bits.

quantize   from a float weight
quantize_mxfp4  the same to MXFP4
quantize_two_level  the same in two levels
search     scales and zero points of least error
gptq       codes of least error of the result, where the inputs are known
pack       from codes, scales, zero points and offsets
mxfp4      from MXFP4's codes and scales
nvfp4      from NVFP4's codes and scales
two_level  from codes with integer scales and zero points under a scale for a row
e2m1       MXFP4's numbers: values, bases and exponents
terms      NVFP4's numbers as two FP8 terms, and its scales in records
levels     codes in two levels as integers of 8 bits, and their factors in records
codes      the bytes and numbers of codes, the twin of kernel/codes.py
packed     W4Weight and W8Weight, checked: views of experts, back to codes and scales
correction  factors for zero points and offsets in blocks behind those of codes, and back
f16_sums   a weight with a power of two for each row, for kernels that add up in f16
parts      PackedWeight, their tensors: their checks, and what sizes and group sizes there are
state      their state dict
ready      whether a kernel in flight may still write a weight
layout     the order of bytes
"""
