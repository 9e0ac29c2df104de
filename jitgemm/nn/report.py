"""What `quantize_` and `load_` did: a list of names that also says what was skipped, and why."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

UNCALIBRATED = (
    "from the weights alone: calibration=batches, a few thousand tokens of text, makes a 4-bit model far better "
    "(docs/quantize.md)"
)


class Report(list[str]):
    """The names of the layers that were converted, in the model's order. Prints as a summary.

    Attributes:
        skipped: {name: reason} of modules and parameters that might have been replaced.
        ignored: {name: reason} of tensors of the checkpoint that have no place in the model, or no effect.
        kept: {name: reason} of tensors of the model that the checkpoint does not fill.
        mxfp4: {name: which powers of two its weights have for scales} of MXFP4 layers.
    """

    def __init__(
        self, names: Iterable[str] = (), skipped: Mapping[str, str] | None = None,
        ignored: Mapping[str, str] | None = None, kept: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(names)
        self.skipped, self.ignored, self.kept = dict(skipped or {}), dict(ignored or {}), dict(kept or {})
        self.mxfp4: dict[str, str] = {}

    def __repr__(self) -> str:
        first = f"converted: {len(self)}" + (f" ({some(self)})" if self else "")
        parts = {"skipped": self.skipped, "tensors of the file ignored": self.ignored, "not filled": self.kept}
        return "\n".join([first, *_sections({"MXFP4": self.mxfp4} | parts)])


class QuantisationReport(Report):
    """What `quantize_` did. Prints as a summary.

    Attributes:
        calibrated: whether calibration was given.
        errors: {name: the squared error of the layer's results over their squares}, for calibration's inputs; without
            calibration that of the weight. Activations' rounding is not in it.
        kept_8bit: {name: its error in 4 bits} of layers that `keep_8bit` left in 8 bits.
        unreached: layers that no batch of calibration reached: quantised from their weights alone.
    """

    def __init__(self, names: Iterable[str], skipped: Mapping[str, str], calibrated: bool):
        super().__init__(names, skipped)
        self.calibrated = calibrated
        self.errors: dict[str, float] = {}
        self.kept_8bit: dict[str, float] = {}
        self.unreached: list[str] = []

    @property
    def worst(self) -> list[str]:
        """The layers by error, the largest first."""
        return sorted(self.errors, key=lambda name: -self.errors[name])

    def __repr__(self) -> str:
        lines = [super().__repr__()]
        if self.errors:
            what = "results" if self.calibrated else "weights"
            largest = ", ".join(f"{name} {self.errors[name]:.2%}" for name in self.worst[:3])
            median = self.errors[self.worst[len(self.errors) // 2]]
            lines.append(f"squared error of {what}: median {median:.2%}; largest: {largest}")
        if self.kept_8bit:
            lines.append(f"kept in 8 bits: {len(self.kept_8bit)} ({some(self.kept_8bit)})")
        if self.unreached:
            lines.append(f"not reached by calibration: {len(self.unreached)} ({some(self.unreached)})")
        if self and not self.calibrated:
            lines.append(UNCALIBRATED)
        return "\n".join(lines)


def by_reason(found: Mapping[str, str]) -> list[str]:
    """A line for each reason: how many, and examples."""
    groups: dict[str, list[str]] = {}
    for name, reason in found.items():
        groups.setdefault(reason, []).append(name)
    return [f"  {len(names)} {reason}: {some(names)}" for reason, names in groups.items()]


def _sections(parts: Mapping[str, Mapping[str, str]]) -> list[str]:
    return [line for what, found in parts.items() if found for line in (f"{what}: {len(found)}", *by_reason(found))]


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
