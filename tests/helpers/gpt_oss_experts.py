"""gpt-oss' experts in its own format, as engines' models bring them to their loaders: all of a layer as one tensor."""

from __future__ import annotations

import mxfp4
import torch
from moe_cases import activated

COUNT, HIDDEN, INTER = 4, 128, 192
GROUP = 32
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
"""What configs in MXFP4 say; vLLM calls the method gpt_oss_mxfp4, too."""


class Layer:
    """Random experts.

    Attributes:
        w13, w2: their parts in MXFP4.
        tensors: by what an engine calls them; bias: what stands behind "w13_" and "w2_" there.
        inter: an expert's size between the GEMMs.
    """

    def __init__(self, bias: str = "bias", inter: int = INTER):
        torch.manual_seed(0)
        self.inter = inter
        self.w13, self.w2 = (
            mxfp4.parts(i, n, k, experts=COUNT, shift=-14)
            for i, (n, k) in enumerate(((2 * inter, HIDDEN), (HIDDEN, inter)))
        )
        self.b13, self.b2 = torch.randn(COUNT, 2 * inter).bfloat16(), torch.randn(COUNT, HIDDEN).bfloat16()
        self.tensors = {"w13_weight": self.w13.canonical, "w13_weight_scale": self.w13.scales, f"w13_{bias}": self.b13}
        self.tensors |= {"w2_weight": self.w2.canonical, "w2_weight_scale": self.w2.scales, f"w2_{bias}": self.b2}

    def of_rank(self, number: int, size: int, ep: bool) -> dict[str, torch.Tensor]:
        """What a model cuts for a rank: between the scales of w2."""
        if ep:
            return {name: each.chunk(size)[number] for name, each in self.tensors.items()}
        most = -(-self.inter // size // GROUP) * GROUP
        first, last = most * number, min(most * (number + 1), self.inter)
        found = {}
        for name, each in self.tensors.items():
            if name.startswith("w13"):
                found[name] = each[:, 2 * first : 2 * last]
            elif name.endswith("bias"):
                found[name] = each if number == 0 else torch.zeros_like(each)
            else:
                per = 2 if name == "w2_weight" else GROUP
                found[name] = each[..., first // per : last // per]
        return found

    def load(self, layer: torch.nn.Module, number: int, size: int, ep: bool) -> None:
        """Calls the loaders of an engine's layer as its model does."""
        params = dict(layer.named_parameters())
        for name, each in self.of_rank(number, size, ep).items():
            params[name].weight_loader(params[name], each, weight_name=name, shard_id=None, expert_id=None)

    def check(self, modules: list, ep: bool) -> None:
        """Asserts that the ranks' packed experts together hold these, bit for bit."""
        rows, columns = (0, 0) if ep else (1, 2)
        first, second = ([getattr(each, part) for each in modules] for part in ("w13", "w2"))
        found = torch.cat([each.weight.dequantize().double() for each in first], rows)
        assert torch.equal(found, self.w13.dequantize_fp64())
        found = torch.cat([each.weight.dequantize().double() for each in second], columns)
        assert torch.equal(found, self.w2.dequantize_fp64())
        assert torch.equal(torch.cat([each.bias for each in first], rows), self.b13)

    def by_hand(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The layer's result, in fp64."""
        options = {"activation": "swiglu_oai", "order": "interleaved", "limit": 7.0}
        w13, w2 = self.w13.dequantize_fp64(), self.w2.dequantize_fp64()
        expected = torch.zeros(x.shape, dtype=torch.float64)
        for t in range(len(x)):
            for e, weight in zip(ids[t].tolist(), weights[t].double()):
                hidden = w13[e] @ x[t].double() + self.b13[e].double()
                expected[t] += weight * (w2[e] @ activated(hidden, options) + self.b2[e].double())
        return expected


def tokens(m: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their two experts, and the weights of these."""
    torch.manual_seed(3)
    ids = torch.stack([torch.randperm(COUNT)[:2] for _ in range(m)]).int()
    return torch.randn(m, HIDDEN).bfloat16(), ids, torch.rand(m, 2)
