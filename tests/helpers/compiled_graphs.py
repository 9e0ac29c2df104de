"""Functions that inductor compiles, and the graphs that it is given."""

from __future__ import annotations

from collections import Counter

import torch

K = 64


class Graphs:
    """A backend of torch.compile that keeps the graphs as inductor's passes leave them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []

    def __call__(self, gm, inputs):
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(enable_autograd_cache=False):  # else a graph compiled before is not passed
            return compile_fx(gm, inputs, inner_compile=self.passed)

    def passed(self, gm, inputs, **_):
        from torch._dynamo.utils import detect_fake_mode
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
        from torch._inductor.virtualized import V

        with V.set_fake_mode(detect_fake_mode(inputs)):
            view_to_reshape(gm)
            post_grad_passes(gm, True)
        gm.recompile()
        self.graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    @property
    def quantisers(self) -> Counter:
        """How many quantisers there are of each kind, in the one graph."""
        (graph,) = self.graphs
        plain, add = torch.ops.jitgemm.quantize_activations.default, torch.ops.jitgemm.add_quantize_activations.default
        return Counter(
            "add"
            if op is add
            else "norm"
            if node.args[7] is not None
            else "silu"
            if node.args[6]
            else (dict(enumerate(node.args)).get(11) or "plain")
            for op in (plain, add)
            for node in graph.find_nodes(op="call_function", target=op)
        )

    def count(self, target) -> int:
        (graph,) = self.graphs
        return len(graph.find_nodes(op="call_function", target=target))


def compiled(call, *inputs, **options):
    """(what `call` compiled gives, its graph)."""
    graphs = Graphs()
    return torch.compile(call, backend=graphs, fullgraph=True, **options)(*inputs), graphs


def inputs(dtype=torch.bfloat16, columns=K):
    torch.manual_seed(5)
    return torch.randn(2, 3, columns).to(dtype), torch.randn(K).to(dtype)
