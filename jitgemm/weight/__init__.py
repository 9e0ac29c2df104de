"""4-bit weights: quantising, packing, the order of bytes."""
