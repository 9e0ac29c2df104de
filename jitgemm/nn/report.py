"""What `quantize_` and `load_` did: a list of names that also says what was skipped, and why."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping


class Report(list[str]):
    """The names of the layers that were converted, in the model's order. Prints as a summary.

    Attributes:
        skipped: {name: reason} of modules and parameters that might have been replaced.
        ignored: {name: reason} of tensors of the checkpoint that have no place in the model, or no effect.
        kept: {name: reason} of tensors of the model that the checkpoint does not fill.
        otherwise: {name: how} of layers that were quantised, and not as the others.
        mxfp4: {name: which powers of two its weights have for scales} of MXFP4 layers.
    """

    def __init__(
        self, names: Iterable[str] = (), skipped: Mapping[str, str] | None = None,
        ignored: Mapping[str, str] | None = None, kept: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(names)
        self.skipped, self.ignored, self.kept = dict(skipped or {}), dict(ignored or {}), dict(kept or {})
        self.mxfp4: dict[str, str] = {}
        self.otherwise: dict[str, str] = {}

    def __repr__(self) -> str:
        first = f"converted: {len(self)}" + (f" ({some(self)})" if self else "")
        parts = {"skipped": self.skipped, "tensors of the file ignored": self.ignored, "not filled": self.kept}
        return "\n".join([first, *_sections({"MXFP4": self.mxfp4, "unlike the others": self.otherwise} | parts)])


def by_reason(found: Mapping[str, str]) -> list[str]:
    """A line for each reason: how many, and examples."""
    groups: dict[str, list[str]] = {}
    for name, reason in found.items():
        groups.setdefault(reason, []).append(name)
    return [f"  {len(names)} {reason}: {some(names)}" for reason, names in groups.items()]


def _sections(parts: Mapping[str, Mapping[str, str]]) -> list[str]:
    return [line for what, layers in parts.items() if layers for line in (f"{what}: {len(layers)}", *by_reason(layers))]


def some(names: Iterable[str], count: int = 3) -> str:
    """The first of several names."""
    listed = list(names)
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(listed[:count]) + more


def warn_if_nothing(report: Report, call: str, why: str, stacklevel: int = 3) -> None:
    """Warns, in the name of the caller's caller, where nothing was converted."""
    if not report:
        reasons = "\n".join(["; skipped:", *by_reason(report.skipped)]) if report.skipped else ""
        warnings.warn(f"{call} converted no layer: {why}{reasons}", stacklevel=stacklevel)
