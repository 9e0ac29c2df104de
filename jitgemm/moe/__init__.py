"""Mixtures of experts: routing, combining, and the fused layer of two grouped GEMMs between them."""
