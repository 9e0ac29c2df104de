"""Everybody who can take part, and who of them is asked to."""

from __future__ import annotations

from collections.abc import Sequence

from .cells import DEFAULT_FORMATS, Format
from .contestant import Contestant
from .moe import moe_contestants
from .other_peers import other_peers
from .ours import ours
from .torch_peers import torch_peers


def pick(
    formats: Sequence[Format] = DEFAULT_FORMATS, peers: Sequence[str] = ("all",), *, moe: bool = False
) -> list[Contestant]:
    """Our formats and the peers of these names; "all" and "none" are names too, "torch" and "humming" stand for
    a library's. With `moe` the peers that multiply by experts.

    Raises:
        ValueError: there is no such peer.
    """
    formats = list(dict.fromkeys(formats))
    everybody = moe_contestants(formats) if moe else [*map(ours, formats), *torch_peers(), *other_peers()]
    known = [each for each in everybody if not each.ours]
    groups = {"all": known, "none": []} | {each.name: [each] for each in known}
    for name, package in {"torch": "torch", "humming": "humming-kernels"}.items():
        groups[name] = [each for each in known if each.package == package]
    names: list[str] = []
    for name in peers:
        if name not in groups:
            raise ValueError(f"--peer: expected one of {', '.join(groups)}, got {name!r}")
        names += [each.name for each in groups[name]]
    return [each for each in everybody if each.ours or each.name in names]
