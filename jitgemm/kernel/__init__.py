"""What a GEMM kernel is: formats, its constants, the rules that set them, and its rendered source. No torch."""
