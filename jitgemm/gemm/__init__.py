"""The GEMM calls.

Files::

    call          the public calls
    run           what they run: three calls, and their ops
    problem       a GEMM's arguments, dense or grouped, and their checks
    launch        from a checked GEMM to a launch
    partial       the two steps of a GEMM whose k ranks share
    ranks         its last step over the GPUs of a host, by kernels alone
    explain       which kernel a call takes, and why
    grouped       others' ways to say which rows are which expert's
    int8_out      a GEMM whose result is 8-bit again
    exact         the exact GEMM, which CPU tensors run
    reference     its public calls
    bound         how far a result may be from the exact one
"""
