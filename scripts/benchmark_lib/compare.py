"""The regression gate: a new result document against a baseline.

The rule. A cell of ours is slower when

    new_us > base_us * (1 + max(floor, base_spread + new_spread))

where spread is what its replays varied by, from the 10th to the 90th percentile over the median, in each of the two
files, and floor is what two runs on one machine differ by anyway (clocks, temperature, placement in memory). Peers
are no part of the gate; how much they moved is shown beside, since a chip that runs slower today slows them too.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from .cells import Cell, from_record
from .results import names_of

NOISE_FLOOR = 0.04


@dataclass(frozen=True)
class Change:
    """One contestant in one cell, in both documents.

    Attributes:
        ratio: new over base, above 1 is slower.
        allowed: the ratio up to which it counts as noise.
        verdict: "slower", "faster", "same", or "lost" when the new document could not time it.
    """

    n: int
    k: int
    m: int
    name: str
    base_us: float
    new_us: float | None
    ratio: float
    allowed: float
    verdict: str


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    peers_ratio: float | None
    missing: int

    @property
    def regressions(self) -> list[Change]:
        return [change for change in self.changes if change.verdict in ("slower", "lost")]


def compare(base: dict[str, Any], new: dict[str, Any], noise_floor: float = NOISE_FLOOR) -> Comparison:
    """Our formats in the cells that the new document has.

    Returns:
        changes: the worst first. peers_ratio: median of new over base among the peers of those cells. missing: cells
        of the baseline that were not measured this time; a part may be compared.

    Raises:
        ValueError: the documents cannot be compared, or have no cell in common.
    """
    if base["mode"] != new["mode"]:
        raise ValueError(f"--compare: the baseline is {base['mode']}, this is {new['mode']}; measure both the same way")
    base_device, new_device = base["environment"].get("device"), new["environment"].get("device")
    if base_device != new_device:
        raise ValueError(f"--compare: the baseline was measured on {base_device}, this on {new_device}")
    ours = set(names_of(new, ours=True))
    by_key = {_key(cell): cell for cell in new["cells"]}
    changes, peers, missing = [], [], 0
    for old_cell in base["cells"]:
        cell = by_key.get(_key(old_cell))
        if cell is None:
            missing += 1
            continue
        for name, old in old_cell["results"].items():
            result = cell["results"].get(name)
            if result is None or old.get("us") is None:
                continue
            if name not in ours:
                if result.get("us") is not None:
                    peers.append(result["us"] / old["us"])
                continue
            allowed = 1 + max(noise_floor, old["spread"] + result.get("spread", 0.0))
            ratio, verdict = float("inf"), "lost"
            if result.get("us") is not None and result.get("correct", True):
                ratio = result["us"] / old["us"]
                verdict = "slower" if ratio > allowed else "faster" if ratio < 1 / allowed else "same"
            changes.append(
                Change(cell["n"], cell["k"], cell["m"], name, old["us"], result.get("us"), ratio, allowed, verdict)
            )
    if not changes:
        raise ValueError("--compare: no cell was timed in both the baseline and this run")
    changes.sort(key=lambda change: -change.ratio)
    return Comparison(changes, statistics.median(peers) if peers else None, missing)


def _key(cell: dict[str, Any]) -> Cell:
    return replace(from_record(cell), layer="")
