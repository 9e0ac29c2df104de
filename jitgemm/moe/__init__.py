"""Mixtures of experts: routing, combining, and the fused layer of two grouped GEMMs between them.

Files::

    call       the fused layer, its op, and what CPU tensors run
    masked     the fused layer over tokens that other ranks sent sorted, and its op
    arguments  their checks
    exchange   tokens to the ranks of their experts and results back, by kernels alone, their buffers and launches
    route      routing and combining
    plan       from checked arguments to launches of routing and combining
    kernel     their kernels, and their sources
"""
