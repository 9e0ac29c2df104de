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
from vllm.logger import init_logger
from vllm.model_executor import parameter as parameters
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

from jitgemm.checkpoint.files import Checkpoint
from jitgemm.kernel.formats import ceil_div
from jitgemm.nn.linear import LINEARS, PackedLinear, as_rows
from jitgemm.nn.read import CODES, layer_of, read
from jitgemm.vllm.layouts import BLOCK, Layout, TensorLayout, floats
from jitgemm.weight.quantize import quantize_w4, quantize_w8

logger = init_logger("vllm." + __name__)
CHILD = "jitgemm"
"""What a layer calls the module of its packed weight."""


def one_order(load: Callable[..., Any]) -> Callable[..., Any]:
    """A loader of the group of each column, which layers that are joined must have in common."""

    @wraps(load)
    def checked(param: Any, loaded_weight: torch.Tensor, *shard: Any, **shards: Any) -> Any:
        if param.is_meta:  # vLLM counts numbers, to pack the layer once it has all: those that are shared, once
            again, param.counted = getattr(param, "counted", False), True
            return None if again else load(param, loaded_weight, *shard, **shards)
        before = param.data.clone() if getattr(param, "loaded", False) else None
        result = load(param, loaded_weight, *shard, **shards)
        if before is not None and not torch.equal(before, param.data):
            raise ValueError("g_idx: expected one activation order of layers that vLLM joins, got several")
        param.loaded = True
        return result

    return checked


def exact(load: Callable[..., Any]) -> Callable[..., Any]:
    """A loader of scales that rather fails than rounds them."""

    @wraps(load)
    def checked(param: Any, loaded_weight: torch.Tensor, *shard: Any, **shards: Any) -> Any:
        kind, given = param.dtype, loaded_weight.dtype
        if kind != given and not torch.equal(loaded_weight.to(kind).float(), loaded_weight.float()):
            raise ValueError(f"scale: expected numbers that {kind} holds, as no header told their type, got {given}")
        param.loaded = not param.is_meta
        return load(param, loaded_weight, *shard, **shards)

    return checked


def parameter(name: str, layout: TensorLayout, sizes: Mapping[str, int], loader: Callable[..., Any]) -> Any:
    """An empty parameter of the class that cuts and joins such a tensor."""
    axes = {"output_dim": layout.axis("n"), "input_dim": layout.axis("k", "G")}
    kind: Any
    given: dict[str, Any] = {axis: dim for axis, dim in axes.items() if dim is not None}
    loader = exact(loader) if "scale" in name else loader
    if name.endswith("g_idx"):
        kind, loader = parameters.RowvLLMParameter, one_order(loader)
    elif layout.packed is not None:
        given["packed_dim"], given["packed_factor"] = layout.packed
        kind = parameters.PackedvLLMParameter if "input_dim" in given else parameters.PackedColumnParameter
    elif len(given) == 2:
        block, group = parameters.BlockQuantScaleParameter, parameters.GroupQuantScaleParameter
        scale = block if " / " in layout.dims[0] else group if "G" in layout.dims else None
        kind = scale or parameters.ModelWeightParameter
    elif given:
        kind = parameters.ChannelQuantScaleParameter
    else:
        kind = parameters.PerTensorScaleParameter if "parts" in layout.dims else parameters.BasevLLMParameter
    return kind(data=unloaded(name, layout, sizes), weight_loader=loader, **given)


def unloaded(name: str, layout: TensorLayout, sizes: Mapping[str, int]) -> torch.Tensor:
    """A tensor to load into; those that files may lack say that they were not loaded, or what their lack means."""
    if "scale" in name:
        return torch.full(layout.shape(sizes), torch.nan, dtype=layout.dtype)
    if name.endswith("g_idx"):
        return (torch.arange(sizes["k"]) // sizes["group"]).to(layout.dtype)
    make = torch.zeros if layout.dtype.itemsize == 1 else torch.empty  # of 8 bits not all are codes
    return make(layout.shape(sizes), dtype=layout.dtype)


def zero_missing(tensors: Mapping[str, torch.Tensor], layout: Layout, widths: Sequence[int]) -> list[int]:
    """Makes joined layers that no file holds zeros, and says which.

    Raises:
        ValueError: no file holds any.
    """
    for suffix in (each for each in tensors if "scale" in each and each != "input_scale"):
        dims, scale = layout.tensors[suffix].dims, tensors[suffix]
        if dims == ("parts",):
            parts = scale.split(1)
        else:
            axis = layout.tensors[suffix].axis("n") or 0
            rows = BLOCK if " / " in dims[axis] else 1
            parts = scale.split([ceil_div(width, rows) for width in widths] or scale.shape[axis], axis)
        missing = [i for i, part in enumerate(parts) if bool(part.isnan().all())]
        if len(missing) == len(parts):
            raise ValueError(f"{suffix}: expected numbers, found none in the files, or NaN alone")
        for i in missing:
            parts[i].zero_()
        return missing
    return []


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
        elif layout.tensors[suffix].dims == ("parts",):
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
        self.sizes: dict[str, int] = {}
        self.dtype = torch.bfloat16
        self.uses_meta_device = layout.format is None

    @classmethod
    def of(cls, config: Any, layer: torch.nn.Module, names: list[str]) -> JitGemmLinearMethod:
        """The method for a layer of vLLM's. Raises Unsupported for one that jitgemm cannot serve as it is cut."""
        k = getattr(layer, "input_size_per_partition", layer.input_size)
        layout = config.layout(names, layer.input_size, layer.params_dtype)
        layout.check_cut(layer.output_partition_sizes, k, k == layer.input_size)
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
        self.dtype = params_dtype
        parts = len(output_partition_sizes)
        sizes = self.sizes = self.layout.sizes(sum(output_partition_sizes), input_size_per_partition, parts)
        loader = extra_weight_attrs["weight_loader"]
        with torch.device("meta") if self.uses_meta_device else nullcontext():
            for name, each in self.layout.tensors.items():
                layer.register_parameter(name, parameter(name, each, sizes, loader))
        if self.layout.scheme == "block":
            layer.weight_block_size = [BLOCK, BLOCK]  # vLLM's loaders ask
        self.config.warmer.expect(layer, params_dtype)
        if self.uses_meta_device:
            quantise_while_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        orders = [each for name, each in layer._parameters.items() if name.endswith("g_idx")]
        if self.layout.ordered and not all(getattr(each, "loaded", False) for each in orders):
            raise ValueError(f"g_idx: expected the activation order of {self.names[0]}, as its config says, found none")
        anew(layer, {name: unloaded(name, each, self.sizes) for name, each in self.layout.tensors.items()})
        tensors = taken(layer, self.layout.tensors)
        if tensors is not None:
            module = self._packed(tensors, getattr(layer, "output_partition_sizes", ()))
            module.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
            put(layer, module)
            # Where vLLM's LoRA looks for a layer's device, and MLA for the type of its input; equal to no other weight.
            here = next(module.buffers()).new_full((1,), torch.nan, dtype=self.dtype)
            layer.register_buffer("weight", here, persistent=False)
            self.config.warmer.packed(layer, getattr(layer, CHILD))

    def _packed(self, tensors: dict[str, torch.Tensor], widths: Sequence[int]) -> PackedLinear:
        activation = self.config.activation(self.layout)
        if self.layout.format is None:
            activation = activation or "e4m3"
            weight = quantised(tensors["weight"], activation, self.config.options)
            return LINEARS[weight.bits](weight, activation=activation)
        try:
            missing = zero_missing(tensors, self.layout, widths)
        except ValueError as error:
            raise ValueError(f"{error} (layer of {self.names[0]})") from error
        if missing:  # as k and v of layers that share others'
            names = ", ".join(self.names[i] for i in missing if i < len(self.names))
            logger.warning_once("jitgemm: no file holds %s: zeros", names)
        found = read_parts(tensors, self.layout, widths)
        named = {f"{self.names[0]}.{suffix}": tensor for suffix, tensor in found.items()}
        checkpoint = Checkpoint(named, self.config.checkpoint)
        layer = layer_of(checkpoint, self.names[0], activation, self.layout.format)
        parts = read(checkpoint, layer, next(iter(found.values())).device)
        if self.names[0].rpartition(".")[2] == "kv_b_proj":
            # vLLM's MLA takes the weight from the product with an identity, which no static scale gives exactly.
            parts = parts._replace(input_scale=None)
        return LINEARS[layer.bits](**parts._asdict())

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
        return LINEARS[8](quantize_w8(tensors["weight"], CODES[activation]), activation=activation)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        layer.weight = embed_tokens.weight
        return layer


def quantised(weight: torch.Tensor, activation: str, options: Mapping[str, Any]) -> Any:
    """A weight in floats, packed as the user's options say."""
    if options["bits"] == 8:
        return quantize_w8(weight, CODES[activation])
    k = weight.shape[-1]
    group_size = options["group_size"] if 0 < options["group_size"] < k else k
    symmetric, codes = options["symmetric"], CODES[activation]
    return quantize_w4(weight, group_size, symmetric=symmetric, lhs_dtype=codes)


def quantise_while_loading(layer: torch.nn.Module) -> None:
    """Has vLLM pack a layer as soon as its weights are read: a model in floats never is on the GPU as a whole."""
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

    initialize_online_processing(layer)


def anew(layer: torch.nn.Module, initial: Mapping[str, torch.Tensor]) -> None:
    """Of a layer that vLLM loads again, makes what no file holds what it was the first time."""
    for name, value in initial.items() if CHILD in layer._modules else ():
        param = layer._parameters.get(name)
        if param is not None and ("scale" in name or name.endswith("g_idx")) and not getattr(param, "loaded", False):
            param.data.copy_(value)


def taken(layer: torch.nn.Module, names: Sequence[str] | Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """A layer's parameters, which it no longer has; None where they were taken before."""
    if any(name not in layer._parameters for name in names):
        return None
    found = {name: layer._parameters[name].data for name in names}
    for name in names:
        delattr(layer, name)
    return found


def put(layer: torch.nn.Module, module: torch.nn.Module) -> None:
    """Gives a layer its packed weights; if it has some, into the same memory, which CUDA graphs hold."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES

    SKIP_MODULES.update(type(each).__name__ for each in module.modules())  # else a layer that is loaded again loses it
    old = layer._modules.get(CHILD)
    if old is None:
        layer.add_module(CHILD, module)
    else:
        old.load_state_dict(module.state_dict())
