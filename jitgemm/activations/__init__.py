"""Quantising activations.

Files::

    scheme     how activations become codes and what is computed first, by name
    call       the public call and its ops
    run        the call beneath, which layers of experts take
    arguments  their checks
    plan       from checked arguments to a launch
    kernel     the kernels, and their sources
    reference  the quantiser in PyTorch, which CPU tensors run
"""
