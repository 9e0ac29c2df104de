"""Plug-ins of engines for vllm_engine.py and sglang_engine.py: codes without files, and layers that share experts.

Engines' dummy loaders leave integers as they are, whose bytes may be zeros: a GPU computes those faster. Here codes are
random bytes, scales in floats positive, and those of bytes powers of two from 2^-9 to 2^-5. Embeddings and routers are
drawn wide enough that each token has experts of its own: routing is uniform.

A model in MXFP4, with all layers, is larger than what several engines have of one GPU. So layer i computes with the
experts of layer i % MADE_UP_EXPERTS, hundreds of megabytes later: no L2 cache holds them until then. All else is each
layer's own. Without that variable layers have their own experts, and vLLM's codes stay as they are. For vLLM 0.26,
whose FusedMoE is a function, and SGLang's gpt-oss.

With COPIED_EXPERTS jitgemm's experts of models in floats have the values of the first layer's: see `copy_experts`.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

VARIABLE, COPIED = "MADE_UP_EXPERTS", "COPIED_EXPERTS"
ROUTED = ("embed_tokens.weight", "embedding.weight", "mlp.gate.weight", "mlp.router.weight", "experts.gate.weight")


def register_vllm() -> None:
    if COPIED in os.environ:
        copy_experts()
    if VARIABLE not in os.environ:
        return
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("dummy")
    class MadeUp(DummyModelLoader):
        def load_model(self, *args: Any, **options: Any) -> Any:
            share(int(os.environ[VARIABLE]))
            return super().load_model(*args, **options)

        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            fill(model)


def register_sglang() -> None:
    from sglang.srt.model_loader import loader

    initialize = loader.initialize_dummy_weights

    def made_up(model: Any, *args: Any, **options: Any) -> None:
        initialize(model, *args, **options)
        fill(model)

    loader.initialize_dummy_weights = made_up
    if VARIABLE not in os.environ:
        return
    build = loader._initialize_model

    def built(*args: Any, **options: Any) -> Any:
        from sglang.srt.models import gpt_oss

        shared = cache(lambda kind: in_turn(kind, int(os.environ[VARIABLE])))
        kind_of = gpt_oss.get_moe_impl_class
        gpt_oss.get_moe_impl_class = lambda config: shared(kind_of(config))
        return build(*args, **options)

    loader._initialize_model = built


def copy_experts() -> None:
    """Has jitgemm quantise made-up experts for one layer; the others get copies of them, in memory of their own."""
    from jitgemm.serving.experts import CollectedExperts

    quantised, packed = CollectedExperts.random, {}

    def first_or_copy(self: Any, *sizes: int) -> Any:
        key = self.start, sizes
        if key not in packed:
            packed[key] = quantised(self, *sizes)
        return copy.deepcopy(packed[key])

    CollectedExperts.random = first_or_copy  # type: ignore[method-assign]


def share(distinct: int) -> None:
    """Has vLLM's models build so many layers of experts, and take them in turn."""
    from vllm.model_executor.layers import fused_moe

    whole = fused_moe.FusedMoE
    for module in list(sys.modules.values()):
        if getattr(module, "FusedMoE", None) is whole:
            module.FusedMoE = in_turn(whole, distinct)  # type: ignore[attr-defined]


def in_turn(make: Callable[..., Any], distinct: int) -> Callable[..., Any]:
    made: list[Any] = []
    calls = itertools.count()

    @wraps(make)  # SGLang asks for its name
    def made_or_again(*args: Any, **options: Any) -> Any:
        if len(made) < distinct:
            made.append(make(*args, **options))
        return made[next(calls) % distinct]

    return made_or_again


def fill(model: Any) -> None:
    """Gives codes, scales and routing of a model their values, see above."""
    import torch

    for name, param in model.named_parameters():
        last = name.rpartition(".")[2]
        if param.dtype in (torch.uint8, torch.int8, torch.float8_e8m0fnu):
            raw = param.data.view(torch.uint8)
            raw.random_(118, 123) if "scale" in last else raw.random_(0, 256)
        elif param.dtype == torch.int32 and last.endswith(("packed", "qweight")):
            param.data.random_(-(2**31), 2**31)
        elif "scale" in last:
            param.data.uniform_(5e-4, 1e-3)
        elif name.endswith(ROUTED):
            param.data.normal_()
