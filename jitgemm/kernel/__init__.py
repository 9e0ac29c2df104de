"""What a GEMM kernel is: formats, the spec of its constants, the rules that set them, and its rendered source. No torch."""
