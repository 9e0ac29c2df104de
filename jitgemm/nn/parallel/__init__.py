"""Tensor parallel styles of packed Linears and experts.

styles  ColwiseParallel, RowwiseParallel, ExpertParallel, and how `load_` divides a model by them
"""

from __future__ import annotations

from jitgemm.nn.parallel.styles import ColwiseParallel, ExpertParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "ExpertParallel", "RowwiseParallel"]
