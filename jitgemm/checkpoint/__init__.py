"""Checkpoints: reading files, and one module for each format of a quantised weight."""

from __future__ import annotations

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.checkpoint.reader import read_layer

__all__ = ["Checkpoint", "read_layer"]
