"""Looking up and checking settings of a quantization_config. Knows no format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jitgemm.kernel.formats import ceil_div

Config = Mapping[str, Any] | None
"""A quantization_config."""


def setting(config: Config, *names: str, default: Any = None) -> Any:
    """The first of several names that a config has, other than null."""
    for name in names:
        value = (config or {}).get(name)
        if value is not None:
            return value
    return default


def check_setting(config: Config, expected: Any, *names: str) -> None:
    """Raises ValueError for a config that has another value under one of the names."""
    found = setting(config, *names, default=expected)
    if found != expected:
        raise ValueError(f"{names[0]}: expected {expected}, got {found!r}")


def check_one_of(config: Config, name: str, known: Sequence[str]) -> None:
    """Raises ValueError for a setting that is given, not null and none of `known`, in whatever case."""
    found = (config or {}).get(name)
    if found is not None and str(found).lower() not in [each.lower() for each in known]:
        raise ValueError(f"{name}: expected {' or '.join(known)}, got {found!r}")


def flag(config: Config, name: str) -> bool | None:
    """A setting that is true or false, None where the config has none. Raises ValueError for another value."""
    value = setting(config, name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {value!r}")
    return value


def group_size_of(k: int, groups: int, given: Any, name: str) -> int:
    """Columns of a group, from the number of groups that tensor `name` has and the config's group_size.

    Args:
        given: the config's; -1, or k and more, for one group a row; None where no config says, and groups divide k.

    Raises:
        ValueError: they contradict each other.
    """
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < -1 or given == 0):
        raise ValueError(f"group_size: expected a positive integer, or -1 for one group a row, got {given!r}")
    if given is None:
        if groups < 1 or k % groups:
            raise ValueError(f"{name}: expected a number of groups that divides k = {k}, got {groups}")
        return k // groups
    size = k if given == -1 or given > k else given
    if ceil_div(k, size) != groups:
        raise ValueError(
            f"{name}: expected {ceil_div(k, size)} groups for k = {k} and group_size {given}, got {groups}"
        )
    return size
