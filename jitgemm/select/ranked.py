"""What `jitgemm explain` says of a choice: every legal kernel with its prediction, and why the choice is one.

No call needs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jitgemm.kernel.codes import CODES
from jitgemm.kernel.formats import Problem
from jitgemm.kernel.spec import KernelSpec
from jitgemm.select.choose import _as_asked, _considered, _rank, choose, seen
from jitgemm.select.cost import Costs, costs, times
from jitgemm.select.devices import DeviceSpec

TERMS = {
    "memory": "bytes from memory",
    "fetch": "waiting for stages to arrive",
    "tensor": "the tensor cores",
    "issue": "issuing instructions",
    "latency": "the way of one record after the other",
    "epilogue": "epilogues between tiles",
    "fixed": "start, sum over k and last epilogue",
}
"""What a prediction is made of, in words; the names are `Times`' fields."""


@dataclass(frozen=True)
class Candidate:
    """A kernel and what the model says of it.

    Attributes:
        kernel: the kernel.
        predicted_us: predicted microseconds of one call in a chain of calls.
        terms: the prediction's parts in microseconds, `TERMS`. memory, tensor, issue, latency and fetch overlap;
            epilogue, of all tiles but a CTA's last, is added to the consumers' work; fixed is added to the whole.
        waves: rounds of tiles, the last one perhaps not full.
        ctas: CTAs launched.
    """

    kernel: KernelSpec
    predicted_us: float
    terms: dict[str, float]
    waves: int
    ctas: int

    @property
    def bound_by(self) -> str:
        """The part of the prediction that takes longest; `fixed` comes on top of it whatever it is."""
        return max((name for name in self.terms if name != "fixed"), key=self.terms.__getitem__)


def predict(spec: KernelSpec, problem: Problem, device: DeviceSpec, of: Costs | None = None) -> Candidate:
    """Predicted time of `problem` on `device` with this kernel, of these costs if they are known."""
    found, waves, ctas = times(spec, of or costs(spec, device), problem, device)
    return Candidate(spec, found.total, found._asdict(), math.ceil(waves), ctas)


def candidates(problem: Problem, device: DeviceSpec) -> list[Candidate]:
    """Every legal kernel for the problem with its prediction: the choice, then the others, best first (`_rank`)."""
    problem = seen(problem)
    found = [predict(spec, problem, device, of) for spec, of in _considered(problem, device)]
    found = [replace(c, kernel=_as_asked(c.kernel, problem)) for c in found]
    chosen = choose(problem, device) if found else None
    return sorted(found, key=lambda c: (c.kernel != chosen, _rank(c.predicted_us, c.kernel)))


def why(ranked: list[Candidate]) -> str:
    """One sentence on the winner against the runner-up."""
    winner = ranked[0]
    if len(ranked) == 1:
        return f"{winner.kernel.label} is the only one that fits"
    second = ranked[1]
    lead = second.predicted_us - winner.predicted_us
    if lead < 0:
        other = f"{second.kernel.label} takes {-lead:.2f} us less"
        return f"{winner.kernel.label} is the fastest of its band's and the three before's; {other}"
    if lead < 0.005:
        ties = "ties go to the smaller tile, to sums that all splits reduce, to shared activations, then by name"
        return f"{winner.kernel.label} ties with {second.kernel.label}; {ties}"
    reasons = [
        f"{TERMS[name]} {winner.terms[name]:.2f} us instead of {second.terms[name]:.2f}"
        for name in dict.fromkeys((second.bound_by, "fixed"))
        if second.terms[name] - winner.terms[name] > 0.005
    ]
    because = f": {', '.join(reasons)}" if reasons else ""
    return f"{winner.kernel.label} won over {second.kernel.label} by {lead:.2f} us{because}"


def faster_instead(problem: Problem) -> str:
    """What is faster in prefill than int8 times a float scale for each group of 4-bit codes; "" for other problems."""
    return CODES[problem.format.code].faster.get(problem.lhs, "") if problem.format.group_size else ""
