"""Checkpoints: reading files, and one module for each format of a 4-bit weight."""
