"""Norms, residuals and gates computed by the quantisers behind them, in the graphs that vLLM compiles.

jitgemm's own pass runs among inductor's (`jitgemm.graph.inductor`), which is ahead of vLLM's: norms still are
operators of vLLM's IR there, which it is told of here; `SiluAndMul` is plain PyTorch. vLLM keeps compiled graphs in a
cache of its own, whose key holds the passes in its config: one that stands for jitgemm's is put there.
"""

from __future__ import annotations

import operator
from typing import cast

from torch._inductor import config as inductor_config
from torch.fx import Graph, Node
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import CompilationConfig, CompilationMode
from vllm.platforms import current_platform

from jitgemm.activations.scheme import Prologue
from jitgemm.graph import inductor
from jitgemm.graph.producers import PRODUCERS, Fold


class QuantiserPass(InductorPass):
    """Stands for jitgemm's pass in vLLM's cache keys, and runs the user's own pass.

    Args:
        other: the custom pass that the user's config names, or None.
    """

    def __init__(self, other: InductorPass | None = None):
        self.other = other

    def __call__(self, graph: Graph) -> None:
        if self.other is not None:
            self.other(graph)

    def uuid(self) -> str:
        inductor.register()
        mine = inductor_config.unsafe_marked_cacheable_functions[inductor.__name__]
        return mine if self.other is None else f"{mine} {self.other.uuid()}"


_reduced = False
"""Whether vLLM computes a norm as it sums over ranks."""


def install(config: CompilationConfig) -> bool:
    """Adds jitgemm's pass to a config's compilation. Returns whether vLLM compiles models at all."""
    if config.mode in (None, CompilationMode.NONE):
        return False
    import torch._inductor.fx_passes.post_grad  # noqa: F401  where the pass registers itself
    import vllm.ir.ops.layernorm  # noqa: F401  defines the operators

    global _reduced
    _reduced = bool(config.pass_config.fuse_allreduce_rms)
    options, key = config.inductor_compile_config, current_platform.pass_key
    if not isinstance(options.get(key), QuantiserPass):
        options[key] = QuantiserPass(options.get(key))
    operators = torch.ops.vllm_ir
    for target, producer in {operators.rms_norm: _norm, operators.fused_add_rms_norm: _add_norm}.items():
        if producer not in PRODUCERS.get(target.default, ()):
            inductor.add_producer(target.default, producer)
    inductor.register()
    return True


def _norm(value: Node) -> Fold | None:
    """rms_norm(x, weight, eps, variance_size=None)."""
    x, weight, eps, size = (*value.args, None)[:4]
    if weight is None or size is not None or _left_to_vllm(x):
        return None
    return Fold(x, Prologue(weight, eps), (value,))  # type: ignore[arg-type]


def _add_norm(value: Node) -> Fold | None:
    """The first result of fused_add_rms_norm(x, residual, weight, eps, variance_size=None); the second is the sum."""
    call = cast(Node, value.args[0])
    x, residual, weight, eps, size = (*call.args, None)[:5]
    first = value.target is operator.getitem and value.args[1] == 0
    if not first or weight is None or size is not None or _left_to_vllm(x):
        return None
    total = next((user for user in call.users if user.args[1] == 1), None)
    return Fold(x, Prologue(weight, eps, residual=residual), (call,), total)


def _left_to_vllm(x: object) -> bool:
    """True if vLLM sums this over ranks in one kernel with the norm."""
    return _reduced and getattr(getattr(x, "target", None), "_opname", "") == "all_reduce"
