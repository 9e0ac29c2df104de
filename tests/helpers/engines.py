"""The two engines as tests ask them: layers on any rank, made, loaded by the engine's own loaders, and run.

Where one of them is installed (scripts/vllm_contract.sh, scripts/sglang_contract.sh), tests ask that one; else both, on
stand-ins. SGLang's linears are there vLLM's, as are its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpt_oss_experts
import pytest
import sglang_layers
import torch
import vllm_layers
from safetensors.torch import save_file
from served_layers import BF16, SHARDS, header

import jitgemm.sglang
import jitgemm.vllm
from jitgemm.serving.served import ServedModel

vllm_layers.show()
jitgemm.vllm.register()
jitgemm.sglang.register()

# isort: split
import jitgemm.sglang.config
import jitgemm.sglang.experts
import jitgemm.sglang.linear
import jitgemm.vllm.config
import jitgemm.vllm.experts
import jitgemm.vllm.linear

EXPERTS = "m.experts"
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
TWO = [(0, 2), (1, 2)]
"""Each of two ranks, as (number, how many)."""
SPLITS = {"whole": [("tp", 0, 1)], **{split: [(split, *place) for place in TWO] for split in ("tp", "ep")}}
"""How ranks share experts: their parts, or which of them."""

Tensors = Mapping[str, torch.Tensor]


def load(layer: torch.nn.Module, tensors: Tensors, *shard: Any) -> None:
    """A file's layer, as the engine's models hand it over; shard: which of the joined layers."""
    params = dict(layer.named_parameters())
    for suffix, tensor in tensors.items():
        params[suffix].weight_loader(params[suffix], tensor, *shard)


def load_experts(layer: torch.nn.Module, name: str, tensors: Mapping[tuple[int, str], Tensors]) -> None:
    """Each tensor of each expert, by the parameter's name."""
    params = dict(layer.named_parameters())
    for (expert, proj), found in tensors.items():
        for suffix, tensor in found.items():
            part = "w2" if proj == "down_proj" else "w13"
            param, full = params[f"{part}_{suffix}"], f"{name}.{part}_{suffix}"
            param.weight_loader(param, tensor, full, shard_id=SHARDS[proj], expert_id=expert)


def process(layer: torch.nn.Module) -> Any:
    """The layer's packed module, once the engine has loaded all."""
    layer.quant_method.process_weights_after_loading(layer)
    return layer.jitgemm


class Engine:
    """What tests ask of both; what each does in its own way VLLM says of it.

    Attributes:
        label, layers: how messages call it, and where its modules of layers are.
        mapper: which of a config's maps of names it applies.
        bias: what it calls experts' biases, behind "w13_".
        biased, gpt_oss: options of experts with biases, and of gpt-oss'.
        gates: options of experts with gates other than SiLU, by jitgemm's name.
        low_latency: options of experts to which DeepEP sends tokens sorted by expert.
    """

    def __init__(self) -> None:
        self.linears = import_module(f"{self}.{self.layers}.linear")
        ours = [import_module(f"jitgemm.{self}.{name}") for name in ("config", "linear", "experts")]
        self.Config, self.Linear, self.Experts = (
            vars(module)[name]
            for module, name in zip(ours, ("JitGemmConfig", "JitGemmLinearMethod", "JitGemmMoEMethod"))
        )

    def __str__(self) -> str:
        return self.label.lower()

    # ---- configs -----------------------------------------------------------------------------------------------------

    def config(self, checkpoint: Any, **options: Any) -> Any:
        """The engine's config for a checkpoint's, as it is if it is one; None: for floats."""
        if isinstance(checkpoint, ServedModel):
            return checkpoint
        with self.rank():
            found = self.Config(checkpoint, options)
        found.packed_modules_mapping = dict(FUSED)
        return found

    def told(self, checkpoint: Any, layers: Mapping[str, Any], **options: Any) -> Any:
        """The config, told of the headers of files with these layers: {name: tensors, or their types, by suffix}."""
        found = self.config(checkpoint, **options)
        tensors = {f"{name}.{suffix}": tensor for name, parts in layers.items() for suffix, tensor in parts.items()}
        found.read_headers({name: header(tensor) for name, tensor in tensors.items()})
        return found

    def of_folder(self, folder: Path, layers: Any = None, quantization: Any = None, **options: Any) -> Any:
        """The config of a model in a folder, whose file has these modules, or tensors by suffix, if given.

        quantization: of its config; None: of one that jitgemm saved.
        """
        if layers is not None:
            parts = {name: each if isinstance(each, Mapping) else each.state_dict() for name, each in layers.items()}
            tensors = {
                f"{name}.{s}": each.clone(memory_format=torch.contiguous_format)
                for name, found in parts.items()
                for s, each in found.items()
            }
            save_file(tensors, folder / "model.safetensors")
        found = self.read(folder, dict(quantization or {"quant_method": "jitgemm"}), options)
        found.packed_modules_mapping = dict(FUSED)
        return found

    def rename(self, config: Any, change: Callable[[str], str]) -> None:
        """Tells the config what the engine's model calls the files' layers."""
        mapper = SimpleNamespace(apply_dict=lambda names: {change(name): each for name, each in names.items()})
        getattr(config, f"apply_{self.mapper}")(mapper)

    def log(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What the engine's log says from now on."""
        said: list[str] = []
        for name in ("warning", "warning_once", "info_once"):
            add = lambda text, *given: said.append(text % given)  # noqa: E731
            monkeypatch.setattr(self.Config.logger, name, add, raising=False)
        return said

    def has_own(self, monkeypatch: pytest.MonkeyPatch, theirs: Any = None) -> None:
        """The engine's own config of any checkpoint is this one; None: it has none."""

        def own(config: Any, method: str) -> Any:
            if theirs is None:
                raise ValueError(method)
            return theirs

        monkeypatch.setattr(self.Config, "_own_config", own)

    # ---- linears -----------------------------------------------------------------------------------------------------

    def linear(self, kind: str, config: Any, *sizes: Any, parts: Any = None, at=(0, 1), prefix: str, bias=False) -> Any:
        """A rank's layer of one of the engine's classes, loaded with {which of the joined layers: tensors}; None: all."""
        with self.rank(*at):
            made = getattr(self.linears, kind)
            layer = made(*sizes, bias=bias, params_dtype=BF16, quant_config=self.config(config), prefix=prefix)
            for shard, tensors in (parts or {}).items():
                load(layer, tensors, *(() if shard is None else (shard,)))
        return layer

    def row(
        self, config: Any, k: int, n: int, tensors: Tensors | None = None, at=(0, 1), prefix="m.o_proj", bias=False
    ) -> Any:
        return self.linear(
            "RowParallelLinear", config, k, n, parts={None: tensors or {}}, at=at, prefix=prefix, bias=bias
        )

    def gate_up(self, config: Any, k: int, n: int, parts: Any = (), at=(0, 1), prefix="m.gate_up_proj") -> Any:
        """Two layers of n rows; parts: the tensors of each, or by number, or of both by None."""
        parts = parts if isinstance(parts, Mapping) else dict(enumerate(parts))
        return self.linear("MergedColumnParallelLinear", config, k, [n, n], parts=parts, at=at, prefix=prefix)

    def qkv(self, config: Any, k: int, parts: Any = None, at=(0, 1), heads=(64, 2, 2), prefix="m.qkv_proj") -> Any:
        """heads: rows of one, of q and of k and v."""
        return self.linear("QKVParallelLinear", config, k, *heads, parts=parts, at=at, prefix=prefix)

    def serves(self, config: Any, prefix: str, n: int = 64, k: int = 64) -> bool:
        """Whether a linear of this name is jitgemm's, and not the engine's own."""
        layer = self.linear("ReplicatedLinear", config, k, n, prefix=prefix)
        return isinstance(layer.quant_method, self.Linear)

    @staticmethod
    def run(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.quant_method.apply(layer, x, bias)

    # ---- experts -----------------------------------------------------------------------------------------------------

    def experts(
        self, config: Any, sizes: tuple[int, int, int], tensors: Any = None, at=("tp", 0, 1), prefix: str = EXPERTS,
        packed: bool = True, **more: Any,
    ) -> Any:  # fmt: skip
        """A rank's experts of (experts, hidden, inter), two for a token; loaded, and packed if `packed`.

        Args:
            tensors: {(expert, proj): tensors by suffix}, or what loads a layer.
            at: which of the ranks that share experts' parts ("tp") or experts ("ep"), and of how many.
        """
        with ExitStack() as stack:
            layer = self.made_experts(stack, self.config(config), sizes, at, prefix, more)
            tensors(layer) if callable(tensors) else load_experts(layer, prefix, tensors or {})
            if packed:
                process(layer)
        return layer

    def gpt_oss_experts(self, folder: Path, whole: gpt_oss_experts.Layer | None, inter: int, at=("tp", 0, 1)) -> Any:
        """A rank's experts as the engine's gpt-oss makes and loads them."""
        split, number, size = at
        config = self.read(folder, dict(gpt_oss_experts.CONFIG), {}, "gpt_oss")
        sizes = gpt_oss_experts.COUNT, gpt_oss_experts.HIDDEN, inter
        fill = (lambda layer: whole.load(layer, number, size, split == "ep")) if whole else None
        return self.experts(config, sizes, fill, at, **self.gpt_oss)


class VLLM(Engine):
    label, bias, layers, mapper = "vLLM", "bias", "model_executor.layers", "vllm_mapper"
    biased = {"has_bias": True}
    gpt_oss = {"has_bias": True, "activation": "swigluoai"}
    gates = {
        "swiglu_step": {"activation": "swiglustep"},
        "situ": {
            "activation": "situ", "more": {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
        },
        "relu2": {"activation": "relu2_no_mul"},
    }  # fmt: skip
    low_latency = {"all2all": "deepep_low_latency"}

    def rank(self, number=0, size=1, group=None):
        """Linears that are made and loaded inside are those of a rank of tensor parallelism; group: of these ranks."""
        return vllm_layers.rank(number, size, group)

    def read(self, folder, quantization, options, kind=""):
        """What the engine makes of a folder; kind: the model's type."""
        found = self.Config.from_config(quantization)
        found.maybe_update_config(str(folder), hf_config=SimpleNamespace(jitgemm=options, model_type=kind))
        return found

    def loads_as(self, monkeypatch, way):
        """--load-format."""
        said = SimpleNamespace(
            load_config=SimpleNamespace(load_format=way), scheduler_config=None, compilation_config=None
        )
        monkeypatch.setattr("jitgemm.vllm.config.get_current_vllm_config_or_none", lambda: said)

    def head(self, config, n, k, at=(0, 1)):
        """The output layer; ranks have rows of it."""
        with self.rank():
            return ParallelLMHead(config, n, k, n // at[1] * at[0], n // at[1] * (at[0] + 1))

    def rows_of_head(self, n, at):
        """How many of a rank's rows are the file's; zeros fill up the others."""
        return n // at[1]

    def renewed(self, layer, params):
        """The layer as the engine has it before it loads weights again; params: the ones it was made with."""
        for each in (*layer._parameters, *(name for name in layer._buffers if "expert_map" not in name)):
            delattr(layer, each)
        for name, param in params.items():
            layer.register_parameter(name, param)
            param.data.fill_(1)  # vLLM's are of anything then

    def made_experts(self, stack, config, sizes, at, prefix, more):
        """Experts of a rank in whose context `stack` then is."""
        split, *place = at
        stack.enter_context(self.rank())
        known = {each.value for each in import_module("vllm.model_executor.layers.fused_moe").MoEActivation}
        if more.get("activation", "silu") not in known:
            pytest.skip(f"a vLLM without {more['activation']}")
        return vllm_layers.experts(config, prefix, sizes, more.pop("top_k", 2), **{split: tuple(place)}, **more)

    def run_experts(self, layer, x, ids, weights):
        return layer.quant_method.apply(layer, x, weights, ids, None, None)

    def moving(self, config, sizes, tensors, at, physical, **more):
        """Experts that the engine copies and moves; physical: which of the model's each of all ranks' is."""
        tensors = self.numbered(tensors, physical) if isinstance(tensors, Mapping) else tensors
        return self.experts(config, sizes, tensors, at, eplb=len(physical) - sizes[0], **more)

    def numbered(self, tensors, physical):
        """Experts' tensors by the numbers by which the engine's models bring them."""
        return {
            (i, proj): found for i, e in enumerate(physical) for (mine, proj), found in tensors.items() if mine == e
        }

    def rows(self, layer, count=3):
        """What the engine moves: tensors with a row of each of `count` experts."""
        return list(layer.get_expert_weights())


class SGLang(Engine):
    label, bias, layers, mapper = "SGLang", "weight_bias", "srt.layers", "weight_name_mapper"
    biased = {"with_bias": True}
    gpt_oss = {
        "with_bias": True, "use_weight_loader_fused": False, "gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0,
    }  # fmt: skip
    gates = {
        "swiglu_step": {"gemm1_clamp_limit": 7.0},
        "situ": {"activation": "situ", "gemm1_clamp_limit": 25.0, "gemm1_alpha": 4.0},
        "relu2": {"activation": "relu2", "is_gated": False},
    }
    low_latency = {"deepep": True}

    @contextmanager
    def rank(self, number=0, size=1, group=None):
        with sglang_layers.running(number, size), pytest.MonkeyPatch.context() as patch:
            if group is not None:
                patch.setattr(self.Config, "group_of", lambda config, layer: group)
            yield

    def read(self, folder, quantization, options, kind=""):
        said = json.dumps({"jitgemm": options})
        with sglang_layers.running(json_model_override_args=said):
            model = SimpleNamespace(_name_or_path=str(folder), model_type=kind)
            return self.Config.from_config({**quantization, "hf_config": model})

    def loads_as(self, monkeypatch, way):
        module = import_module("jitgemm.sglang.config")
        plain = module.setting
        monkeypatch.setattr(module, "setting", lambda name: way if name == "load_format" else plain(name))

    def head(self, config, n, k, at=(0, 1)):
        if not sglang_layers.REAL:
            padded = -(-n // (64 * at[1])) * 64
            with self.rank():
                return ParallelLMHead(config, n, k, padded * at[0], padded * at[0] + self.rows_of_head(n, at))
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead as Head

        with self.rank(*at):
            return Head(n, k, params_dtype=BF16, quant_config=config, prefix="lm_head")

    def rows_of_head(self, n, at):
        """All are filled up behind the last rank's."""
        padded = -(-n // (64 * at[1])) * 64
        return min(padded, n - padded * at[0])

    def renewed(self, layer, params):
        with self.rank():
            layer.quant_method.restore_weights_before_loading(layer)

    def made_experts(self, stack, config, sizes, at, prefix, more):
        split, *place = at
        running = {name: more.pop(name) for name in ("deepep", "location", "enable_eplb") if name in more}
        stack.enter_context(sglang_layers.running(*place, ep=split == "ep", **running))
        return sglang_layers.experts(config, sizes, more.pop("top_k", 2), prefix, **more)

    def run_experts(self, layer, x, ids, weights):
        """As the dispatcher numbers experts: by those of this rank, others -1."""
        places = map(layer._map_global_expert_id_to_local_expert_id, range(layer.num_experts))
        mine = torch.tensor([*places], dtype=ids.dtype)[ids.long()]
        topk = SimpleNamespace(topk_ids=mine, topk_weights=weights)
        given = sglang_layers.dispatched("standard", hidden_states=x, hidden_states_scale=None, topk_output=topk)
        return layer.quant_method.apply(layer, given).hidden_states

    def moving(self, config, sizes, tensors, at, physical, **more):
        more |= {"location": sglang_layers.Location(physical), "enable_eplb": True}
        return self.experts(config, (len(physical), *sizes[1:]), tensors, at, **more)

    def numbered(self, tensors, physical):
        return tensors

    def rows(self, layer, count=3):
        """As SGLang's models list them."""
        return [each.data for each in layer.parameters() if each.data.ndim > 0 and len(each) == count]


class ParallelLMHead(torch.nn.Module):
    """Rows of one rank, of which the loader fills up the last with zeros."""

    def __init__(self, config: Any, n: int, k: int, start: int, stop: int) -> None:
        super().__init__()
        self.num_embeddings, self.range = n, slice(start, stop)
        self.quant_method = config.get_quant_method(self, "lm_head")
        padded = -(-(stop - start) // 64) * 64
        self.quant_method.create_weights(self, k, [padded], k, padded, params_dtype=BF16, weight_loader=self.fill)

    def fill(self, param: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        mine = tensor[self.range]
        param.data[: len(mine)], param.data[len(mine) :] = mine, 0


vllm, sglang = VLLM(), SGLang()
ENGINES: list[Any] = [vllm] if vllm_layers.REAL else [sglang] if sglang_layers.REAL else [vllm, sglang]
vllm_layers.hide()  # all that needs vLLM has been imported
each_engine = pytest.mark.parametrize("engine", ENGINES, ids=str)
first_engine = pytest.mark.parametrize("engine", ENGINES[:1], ids=str)


def in_turn(*values: Any) -> list[tuple[Any, ...]]:
    """(engine, value): each value with one of the engines."""
    return [(ENGINES[number % len(ENGINES)], value) for number, value in enumerate(values)]
