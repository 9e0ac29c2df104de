"""Tensor parallel styles of packed Linears and experts.

styles  ColwiseParallel, RowwiseParallel, ExpertParallel: how one layer is divided
plan    which style divides which layer of a model that is being loaded
"""

from __future__ import annotations

from jitgemm.nn.parallel.styles import ColwiseParallel, ExpertParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "ExpertParallel", "RowwiseParallel"]
