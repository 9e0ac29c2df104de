"""The GEMM calls: arguments, plan, reference."""
