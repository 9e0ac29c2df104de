"""The GEMM calls.

Files::

    names         the public calls
    call          what they have in common, and its op
    arguments     their checks
    plan          from checked operands to a launch
    grouped       the grouped calls and their op
    groups        which rows are which expert's, and its checks
    grouped_plan  from checked operands of a grouped call to a launch
    int8_out      a GEMM whose result is 8-bit again
    e8m0          scales of activations that are powers of two
    reference     the exact GEMM, which CPU tensors run
    bound         how far a result may be from the exact one
"""
