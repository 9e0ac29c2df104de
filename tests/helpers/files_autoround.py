"""AutoRound layers and their config."""

from __future__ import annotations

CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "data_type": "int"}
