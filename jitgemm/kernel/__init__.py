"""What a GEMM kernel is. No torch.

Files::

    codes    what codes there are
    formats  the packed weight's format, and the problem
    spec     a kernel's constants, and what follows from them
    tactics  the rules that measurements set
    render   spec to source
    legend   what the parts of a label mean
"""
