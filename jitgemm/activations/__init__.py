"""Quantising activations.

Files::

    call       the public call and its ops
    arguments  their checks
    plan       from checked arguments to a launch
    kernel     the kernels, and their sources
    reference  the quantiser in PyTorch, which CPU tensors run
"""
