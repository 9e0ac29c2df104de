"""Quantising activations: call, arguments, kernel, plan, reference."""
