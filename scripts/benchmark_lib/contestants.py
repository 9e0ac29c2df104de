"""Everybody who can take part, and who of them is asked to."""

from __future__ import annotations

from collections.abc import Sequence

from .cells import DEFAULT_FORMATS, Format
from .contestant import Contestant
from .other_peers import other_peers
from .ours import ours
from .torch_peers import torch_peers


def all_peers() -> list[Contestant]:
    return torch_peers() + other_peers()


def pick(formats: Sequence[Format] = DEFAULT_FORMATS, peers: Sequence[str] = ("all",)) -> list[Contestant]:
    """Our formats and the peers of these names; "all" and "none" are names too, "torch", "humming" and "quack" stand
    for a library's.

    Raises:
        ValueError: there is no such peer.
    """
    known = all_peers()
    groups = {
        "all": known,
        "none": [],
        "torch": torch_peers(),
        "humming": [each for each in known if each.package == "humming-kernels"],
        "quack": [each for each in known if each.package == "quack-kernels"],
    } | {each.name: [each] for each in known}
    names: list[str] = []
    for name in peers:
        if name not in groups:
            raise ValueError(f"--peer: expected one of {', '.join(groups)}, got {name!r}")
        names += [each.name for each in groups[name]]
    return [ours(fmt) for fmt in dict.fromkeys(formats)] + [each for each in known if each.name in names]
