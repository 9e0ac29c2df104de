"""The method of vLLM's linears: the checkpoint's tensors as vLLM's parameters, packed once all are loaded.

vLLM cuts and joins the tensors (tensor parallelism, q, k and v, gate and up); `jitgemm.checkpoint` reads the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor import parameter as parameters
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.kernel.formats import ceil_div
from jitgemm.nn.layers.linear import LINEARS, PackedLinear, as_rows
from jitgemm.checkpoint.layouts import PARTS, G
from jitgemm.nn.layers.packed import LHS_DTYPES
from jitgemm.nn.load.layer_source import LayerSource
from jitgemm.vllm.layouts import BLOCK, Layout, TensorLayout, Touched, floats
from jitgemm.weight.quantize import quantize_w4, quantize_w8

logger = init_logger("vllm." + __name__)
CHILD = "jitgemm"
"""What a layer calls the module of its packed weight."""


def noted(load: Callable[..., Any], place: Callable[..., frozenset[Any]]) -> Callable[..., Any]:
    """A loader that notes what it wrote; see `written`. place(loaded_weight, ...) says what."""

    @wraps(load)
    def loads(param: Any, loaded_weight: torch.Tensor, *where: Any, **named: Any) -> Any:
        result = load(param, loaded_weight, *where, **named)
        if not param.is_meta:  # where vLLM counts numbers
            param.written = written(param) | place(loaded_weight, *where, **named)
        return result

    loads.notes = True  # type: ignore[attr-defined]
    return loads


def written(param: Any) -> frozenset[Any]:
    """The joined layers, by number, or experts, that the loaders have written in a parameter; None stands for all."""
    replaced = not hasattr(getattr(param, "weight_loader", None), "notes")  # by a model's own loader
    return frozenset({None}) if replaced else getattr(param, "written", frozenset())


def part_of(loaded_weight: torch.Tensor, *shard: Any, **shards: Any) -> frozenset[int | None]:
    """Which of the joined layers a loader of linears is told to write."""
    part = next(iter((*shard, *shards.values())), None)
    part = "qkv".index(part) if part in ("q", "k", "v") else part
    return frozenset(part if isinstance(part, (tuple, list)) else [part if isinstance(part, int) else None])


def require_same_order(load: Callable[..., Any]) -> Callable[..., Any]:
    """A loader of the group of each column, which layers that are joined must have in common."""

    @wraps(load)
    def checked(param: Any, loaded_weight: torch.Tensor, *shard: Any, **shards: Any) -> Any:
        if param.is_meta:  # vLLM counts numbers, to pack the layer once it has all: those that are shared, once
            again, param.counted = getattr(param, "counted", False), True
            return None if again else load(param, loaded_weight, *shard, **shards)
        before = param.data.clone() if written(param) else None
        result = load(param, loaded_weight, *shard, **shards)
        if before is not None and not torch.equal(before, param.data):
            raise ValueError("g_idx: expected one activation order of layers that vLLM joins, got several")
        return result

    return checked


def require_exact(load: Callable[..., Any]) -> Callable[..., Any]:
    """A loader of scales that rather fails than rounds them."""

    @wraps(load)
    def checked(param: Any, loaded_weight: torch.Tensor, *shard: Any, **shards: Any) -> Any:
        kind, given = param.dtype, loaded_weight.dtype
        if kind != given and not torch.equal(loaded_weight.to(kind).float(), loaded_weight.float()):
            raise ValueError(f"scale: expected numbers that {kind} holds, as no header told their type, got {given}")
        return load(param, loaded_weight, *shard, **shards)

    return checked


def cut(
    load: Callable[..., Any],
    layout: TensorLayout,
    group_size: int,
    touched: Touched | None,
    ranks: int,
    rows: int | None = None,
) -> Callable[..., Any]:
    """A loader of what a rank cannot have by vLLM's share of the file's tensor: rows of blocks, columns of groups.

    Args:
        ranks: vLLM takes one of so many shares along k: all of them are the columns that the rank touches.
        rows: of the layer in the file; None for a loader that takes rows from its start.
    """
    axis = layout.axis("k", "G") if touched is not None else None
    if layout.repeated == 1 and axis is None:
        return load

    @wraps(load)
    def loads(param: Any, loaded_weight: torch.Tensor, *where: Any, **named: Any) -> Any:
        stacked = loaded_weight.dim() - len(layout.dims)  # experts in front
        if layout.repeated > 1:
            n = stacked + (layout.axis("n") or 0)
            loaded_weight = loaded_weight.repeat_interleave(layout.repeated, n)
            loaded_weight = loaded_weight.narrow(n, 0, rows or loaded_weight.shape[n])
        if axis is not None:
            each = group_size if layout.dims[axis] == G else layout.per(axis)
            start, stop = touched.start // each, ceil_div(touched.stop, each)
            mine = loaded_weight.narrow(stacked + axis, start, stop - start)
            shares = mine.unsqueeze(stacked + axis).expand(
                *mine.shape[: stacked + axis], ranks, *mine.shape[stacked + axis :]
            )
            loaded_weight = shares.flatten(stacked + axis, stacked + axis + 1)
        return load(param, loaded_weight, *where, **named)

    return loads


def parameter(name: str, layout: TensorLayout, sizes: Mapping[str, int], loader: Callable[..., Any]) -> Any:
    """An empty parameter of the class that cuts and joins such a tensor."""
    axes = {"output_dim": layout.axis("n"), "input_dim": layout.axis("k", "G")}
    kind: Any
    given: dict[str, Any] = {axis: dim for axis, dim in axes.items() if dim is not None}
    loader = require_exact(loader) if "scale" in name else loader
    if name.endswith("g_idx"):
        kind, loader = parameters.RowvLLMParameter, require_same_order(loader)
    elif layout.packed is not None:
        given["packed_dim"], given["packed_factor"] = layout.packed
        kind = parameters.PackedvLLMParameter if "input_dim" in given else parameters.PackedColumnParameter
    elif len(given) == 2:
        block, group = parameters.BlockQuantScaleParameter, parameters.GroupQuantScaleParameter
        scale = block if layout.per(0) > 1 else group if layout.axis("G") is not None else None
        kind = scale or parameters.ModelWeightParameter
    elif given:
        kind = parameters.ChannelQuantScaleParameter
    else:
        kind = parameters.PerTensorScaleParameter if PARTS in layout.dims else parameters.BasevLLMParameter
    return kind(data=unloaded(name, layout, sizes), weight_loader=noted(loader, part_of), **given)


def unloaded(name: str, layout: TensorLayout, sizes: Mapping[str, int]) -> torch.Tensor:
    """A tensor to load into; those that files may lack hold what their lack means: NaN is no input scale."""
    if name == "input_scale":
        return torch.full(layout.shape(sizes), torch.nan, dtype=layout.dtype)
    if name.endswith("g_idx"):
        return (torch.arange(sizes["k"]) // sizes["group"]).to(layout.dtype)
    return torch.empty(layout.shape(sizes), dtype=layout.dtype)


def of_dummies() -> bool:
    """Whether vLLM makes numbers up (--load-format dummy), and calls no loaders."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"


def check_written(params: Mapping[str, Any], layout: Layout, names: Sequence[str]) -> list[int]:
    """Which of the joined layers no file holds.

    Args:
        params: a layer's, as they are loaded, by suffix.
        names: of each of the layers that it joins.

    Raises:
        ValueError: the files hold some of the tensors that a layer needs and lack others, or hold no layer.
    """
    missing = []
    for part, name in enumerate(names):
        lacking = [suffix for suffix in layout.needed if not written(params[suffix]) & {part, None}]
        if len(lacking) == len(layout.needed):
            missing.append(part)
        if lacking and (part not in missing or len(missing) == len(names)):
            raise ValueError(f"{', '.join(lacking)}: expected numbers, found none in the files (layer {name})")
    return missing


def fill_missing(params: Mapping[str, Any], layout: Layout, widths: Sequence[int], missing: Sequence[int]) -> None:
    """Zeros for joined layers that no file holds, and what the lack means of tensors that files may lack.

    Beside scales of zero, packed zero points are those of another layer: symmetric ones stay so.
    What vLLM loads again is of anything before.
    """
    for suffix, param in params.items():
        found, tensor = written(param), layout.tensors[suffix]
        if tensor.dims == (PARTS,) and found == {None}:  # one number for all
            param.data.fill_(param.data[0].item())
        elif suffix == "input_scale":
            param.data[sorted({*range(len(param))} - found)] = torch.nan
        elif suffix.endswith("g_idx") and not found:
            param.data.copy_(unloaded(suffix, tensor, layout.sizes(0, len(param))))
        elif missing and (rows := tensor.rows(widths)) is not None:
            parts = param.data.split(rows[1], rows[0])
            for part in missing:
                parts[part].zero_()
                if suffix == "qzeros":
                    parts[part].fill_(next(each for i, each in enumerate(parts) if i not in missing)[0, 0])


def read_parts(tensors: dict[str, torch.Tensor], layout: Layout, widths: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """What vLLM loaded, as the reader takes it: one layer of the joined rows.

    Args:
        widths: rows of each layer that was joined; empty for one.
    """
    found = {suffix: tensor for suffix, tensor in tensors.items() if suffix != "weight_shape"}  # the whole layer's
    for suffix, tensor in tensors.items():
        if suffix.endswith("g_idx"):
            # A rank's columns in order begin with a later group; -1 says that they stand in order.
            found[suffix] = tensor - tensor.min().clamp(min=0)
        elif suffix == "input_scale":
            del found[suffix]
            if len(given := tensor[~tensor.isnan()]):
                found[suffix] = given.max().reshape(1)
        elif layout.tensors[suffix].dims == (PARTS,):
            rows = torch.tensor(widths, device=tensor.device)
            found[suffix] = tensor.reshape(-1).repeat_interleave(rows)[:, None]
    return found


@register_weight_loader_v2_supported_method
class JitGemmLinearMethod(LinearMethodBase):
    """A linear with a packed weight, activations quantised to 8 bits on the way in.

    Attributes:
        config: the model's `JitGemmConfig`.
        names: what the checkpoint calls the layers that are joined; the first speaks for all.
        layout: how they are stored.
    """

    def __init__(self, config: Any, names: list[str], layout: Layout):
        self.config, self.names, self.layout = config, names, layout
        self.touched: Touched | None = None
        self.dtype, self.dummies = torch.bfloat16, False
        self.uses_meta_device = layout.format is None

    @classmethod
    def of(cls, config: Any, layer: torch.nn.Module, names: list[str]) -> JitGemmLinearMethod:
        """The method for a layer of vLLM's. Raises Unsupported for one that jitgemm cannot serve as it is cut."""
        k = getattr(layer, "input_size_per_partition", layer.input_size)
        layout = config.layout(names, layer.input_size, layer.params_dtype)
        layout = layout.cut(layer.output_partition_sizes, layer.output_size, k, layer.input_size)
        config.check_readable(layout, names, layer.input_size)
        return cls(config, names, layout)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.dtype, self.dummies = params_dtype, of_dummies()
        k, ranks = input_size_per_partition, input_size // input_size_per_partition
        touched = self.touched = self.layout.touched(k, input_size, layer.tp_rank if ranks > 1 else 0)
        k = k if touched is None else touched.stop - touched.start
        sizes = self.layout.sizes(sum(output_partition_sizes), k, len(output_partition_sizes))
        with torch.device("meta") if self.uses_meta_device else nullcontext():
            for name, each in self.layout.tensors.items():
                loader = cut(extra_weight_attrs["weight_loader"], each, self.layout.group_size, touched, ranks)
                layer.register_parameter(self.layout.parameters()[name], parameter(name, each, sizes, loader))
        if self.layout.scheme == "block":
            layer.weight_block_size = [BLOCK, BLOCK]  # vLLM's loaders ask
        self.config.warmer.expect(layer, params_dtype)
        if self.uses_meta_device:
            quantise_while_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        names = self.layout.parameters()
        params = loaded(layer, names)
        if params is None:
            return
        widths = getattr(layer, "output_partition_sizes", ())
        self._check_written(params, widths)
        self.install(layer, self._packed(taken(layer, params, names), widths))

    def install(self, layer: torch.nn.Module, module: PackedLinear) -> None:
        """Gives a layer its packed weight."""
        module.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        put(layer, module)
        # Where vLLM's LoRA looks for a layer's device, and MLA for the type of its input; equal to no other weight.
        here = next(module.buffers()).new_full((1,), torch.nan, dtype=self.dtype)
        layer.register_buffer("weight", here, persistent=False)
        self.config.warmer.packed(layer, getattr(layer, CHILD))

    def _check_written(self, params: Mapping[str, Any], widths: Sequence[int]) -> None:
        """Raises ValueError for what no file holds, but for joined layers all of whose tensors lack: zeros."""
        if self.dummies and not any(map(written, params.values())):
            return
        names = self.names if len(self.names) == len(widths) else self.names[:1] * len(widths)
        missing = check_written(params, self.layout, names)
        fill_missing(params, self.layout, widths, missing)
        if missing:  # as k and v of layers that share others'
            logger.warning_once("jitgemm: no file holds %s: zeros", ", ".join(names[i] for i in missing))

    def _packed(self, tensors: dict[str, torch.Tensor], widths: Sequence[int]) -> PackedLinear:
        activation = self.config.activation(self.layout)
        if self.layout.format is None:
            activation = activation or "e4m3"
            weight = quantised(tensors["weight"], activation, self.config.options)
            return LINEARS[weight.bits](weight, activation=activation)
        found = read_parts(tensors, self.layout, widths)
        named = {f"{self.names[0]}.{suffix}": tensor for suffix, tensor in found.items()}
        checkpoint = Checkpoint(named, self.layout.config_of(self.config.checkpoint))
        layer = LayerSource.find(checkpoint, self.names[0], activation, self.layout.format)
        columns = None if self.touched is None else self.touched.own
        parts = layer.read(next(iter(found.values())).device, columns=columns)
        return LINEARS[layer.bits](**parts._replace(input_scale=self.static(parts.input_scale))._asdict())

    def static(self, input_scale: torch.Tensor | None) -> torch.Tensor | None:
        """The static scale, but of kv_b_proj: vLLM's MLA takes its weight from the product with an identity."""
        return None if self.names[0].rpartition(".")[2] == "kv_b_proj" else input_scale

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        module = getattr(layer, CHILD)
        rows = as_rows(x, module.in_features)
        out = torch.empty((rows.shape[0], module.out_features), dtype=x.dtype, device=x.device)
        if bias is not None and bias.dtype == torch.float16:
            bias = bias.float()
        module.multiply(module.quantise(rows), out, bias)
        return out.view(*x.shape[:-1], module.out_features)


class JitGemmHeadMethod(JitGemmLinearMethod):
    """The output layer in 8 bits, quantised once it is loaded; a tied embedding keeps its own weight."""

    def __init__(self, config: Any, layer: torch.nn.Module):
        super().__init__(config, [], floats(torch.get_default_dtype()))
        self.uses_meta_device = False

    def _packed(self, tensors: dict[str, torch.Tensor], widths: Sequence[int]) -> PackedLinear:
        activation = self.config.options["lm_head"]
        return LINEARS[8](quantize_w8(tensors["weight"], LHS_DTYPES[activation]), activation=activation)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        layer.weight = embed_tokens.weight
        return layer


def quantised(weight: torch.Tensor, activation: str, options: Mapping[str, Any]) -> Any:
    """A weight in floats, packed as the user's options say."""
    if options["bits"] == 8:
        return quantize_w8(weight, LHS_DTYPES[activation])
    k = weight.shape[-1]
    group_size = options["group_size"] if 0 < options["group_size"] < k else k
    symmetric, codes = options["symmetric"], LHS_DTYPES[activation]
    return quantize_w4(weight, group_size, symmetric=symmetric, lhs_dtype=codes)


def quantise_while_loading(layer: torch.nn.Module) -> None:
    """Has vLLM pack a layer as soon as its weights are read: a model in floats never is on the GPU as a whole."""
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

    initialize_online_processing(layer)


def loaded(layer: torch.nn.Module, names: Mapping[str, str]) -> dict[str, Any] | None:
    """A layer's parameters, of {key: name}; None where they were taken before."""
    params = {key: layer._parameters.get(name) for key, name in names.items()}
    return None if any(param is None for param in params.values()) else params


def taken(layer: torch.nn.Module, params: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The data of these parameters, which the layer no longer has."""
    for key, param in params.items():
        delattr(layer, names[key])
        param.written = frozenset()
    return {name: param.data for name, param in params.items()}


def put(layer: torch.nn.Module, module: torch.nn.Module) -> None:
    """Gives a layer its packed weights; if it has some, into the same memory, which CUDA graphs hold."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES

    SKIP_MODULES.update(type(each).__name__ for each in module.modules())  # else a layer that is loaded again loses it
    old = layer._modules.get(CHILD)
    if old is None:
        layer.add_module(CHILD, module)
    else:
        old.load_state_dict(module.state_dict())
