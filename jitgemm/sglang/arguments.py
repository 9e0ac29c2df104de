"""SGLang's arguments, as they are in effect."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_context, get_server_args


def setting(name: str) -> Any:
    """One of SGLang's arguments, as it is in effect; None for one that it has not."""
    context = get_context()
    if hasattr(context, "config_leaf"):
        try:
            return context.config_leaf(name)
        except ValueError:  # of no namespace
            pass
    return getattr(get_server_args(), name, None)


def most_tokens() -> int:
    """Of a forward pass, as the scheduler makes it: a prefill, which ranks of data-parallel attention add up."""
    ranks = (setting("dp_size") or 1) if setting("enable_dp_attention") else 1
    return max(setting("chunked_prefill_size") or 0, setting("max_prefill_tokens") or 0, 1) * ranks
