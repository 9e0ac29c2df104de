"""How many rows the experts of a grouped GEMM get, which only the device knows: a few routings drawn by seed.

Uniform over the experts. The same routings in every process and on every machine; no torch, no numpy.
"""

from __future__ import annotations

import math
from functools import lru_cache
from random import Random

from jitgemm.kernel.formats import ceil_div

ROUTINGS = 8
DRAWN_ROWS = 16
"""Up to so many rows an expert, the rows are drawn one by one; above, an expert's rows from a normal distribution."""


@lru_cache(maxsize=1024)
def routings(experts: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """Rows of every expert that has some, in each routing. Without experts all rows belong to one weight."""
    if experts <= 1:
        return ((rows,),)
    return tuple(_routing(experts, rows, Random(seed)) for seed in range(ROUTINGS))


def _routing(experts: int, rows: int, random: Random) -> tuple[int, ...]:
    counts = [0] * experts
    if rows <= DRAWN_ROWS * experts:
        for _ in range(rows):
            counts[int(random.random() * experts)] += 1
        return tuple(filter(None, counts))
    left = rows
    for expert in range(experts - 1):
        # What a multinomial draw leaves for this expert of the rows that are left, by Box and Muller.
        part = 1 / (experts - expert)
        normal = math.sqrt(-2 * math.log(1 - random.random())) * math.cos(2 * math.pi * random.random())
        count = round(left * part + normal * math.sqrt(left * part * (1 - part)))
        counts[expert] = max(0, min(left, count))
        left -= counts[expert]
    counts[-1] = left
    return tuple(filter(None, counts))


@lru_cache(maxsize=4096)
def token_tiles(experts: int, rows: int, block_m: int) -> tuple[int, ...]:
    """Tiles of `block_m` rows in each routing; a tile holds rows of one expert."""
    return tuple(sum(ceil_div(count, block_m) for count in routing) for routing in routings(experts, rows))


@lru_cache(maxsize=4096)
def filled(experts: int, rows: int, widths: tuple[int, ...]) -> float:
    """Part of the full width that an average tile multiplies, if a tile takes the narrowest of the widths that it fits;
    the last is the full one."""
    if len(widths) == 1:
        return 1.0
    full, multiplied, tiles = widths[-1], 0, 0
    for routing in routings(experts, rows):
        for count in routing:
            whole, rest = divmod(count, full)
            multiplied += whole * full + (next(width for width in widths if rest <= width) if rest else 0)
            tiles += whole + (rest > 0)
    return multiplied / (tiles * full)


@lru_cache(maxsize=1024)
def weights_read(experts: int, rows: int) -> float:
    """Experts that have rows, on average: weights that a call reads."""
    found = routings(experts, rows)
    return sum(map(len, found)) / len(found)


@lru_cache(maxsize=1024)
def most_rows(experts: int, rows: int) -> int:
    """Most rows that an expert has in any of the routings."""
    return max(map(max, routings(experts, rows)))
