"""What `fuse_` puts into a model: a norm that runs the projections behind it, views of those, and an MLP.

A joint runs Linears that read one input: that is quantised once, and those whose formats agree are one GEMM, whose
weight is theirs one below the other. The Linears become `ProjectionView`s, whose buffers are views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from jitgemm.kernel.formats import STRIP_ROWS, ceil_div
from jitgemm.nn.layers.linear import LINEARS, PackedLinear, as_rows, is_dtensor, on_parts, result_type
from jitgemm.runtime.checks import ALIGNMENT
from jitgemm.tensors import PLAIN
from jitgemm.weight import layout
from jitgemm.weight.packed import Weight

_VIEWS = ("blocks", "channel_scale", "row_sum", "bias", "permutation", "input_scale")
ADVICE = "call jitgemm.nn.unfuse_(model) first"


class ProjectionView(PackedLinear):
    """A Linear whose GEMM a joint runs: forward takes what that gave, and returns this Linear's columns of it.

    Attributes:
        start, width: first column and number of columns of the joint's output.
        codes: the order in which the weight's codes stood.
    """

    fronts = ()

    def __init__(self, linear: PackedLinear, start: int, width: int):
        input_scale = linear.input_scale
        super().__init__(linear.weight, linear.bias, activation=linear.activation, input_scale=input_scale)
        self.batch_invariant, self.start, self.width = linear.batch_invariant, start, width
        self.split = linear.split
        self.codes = linear.weight.format.codes
        self.named(linear.weight.layer)
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width], the joint's output -> [..., out_features], a view."""
        if x.shape[-1:] != (self.width,):
            raise ValueError(
                f"x: expected shape [..., {self.width}], what the fused module in front computes, got {list(x.shape)}; "
                f"to call the Linear by itself, {ADVICE}"
            )
        return x[..., self.start : self.start + self.out_features]

    def original(self) -> PackedLinear:
        """The Linear, with tensors of its own."""
        weight = self.weight
        tensors = [None if x is None else x.clone() for x in (weight.blocks, weight.channel_scale, weight.row_sum)]
        if self.codes != weight.format.codes:
            layout.reorder_codes(tensors[0][None], weight.format.codes, self.codes)
        format = replace(weight.format, codes=self.codes)
        sizes = (weight.n, weight.k, weight.group_size, format)
        weight = type(weight)(*tensors[:2], *sizes, row_sum=tensors[2], permutation=_clone(weight.permutation))
        kind, input_scale = LINEARS[weight.bits], _clone(self.input_scale)
        linear = kind(weight, _clone(self.bias), activation=self.activation, input_scale=input_scale)
        if self.batch_invariant != PackedLinear.batch_invariant:
            linear.batch_invariant = self.batch_invariant
        linear.split = self.split
        linear.named(self._weight.layer)
        return linear.train(self.training)

    def show(self, views: dict[str, torch.Tensor | None], meta: torch.Tensor | None) -> None:
        """Makes views of a run's tensors the buffers; meta: what describes them, None for what described the last."""
        self._buffers.update(views)
        if meta is None:
            self._bind()
        else:
            self._bind_described(meta)

    # ---- buffers: the run moves and copies them ----------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ProjectionView:
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return state | {"_buffers": state["_buffers"] | dict.fromkeys(_VIEWS)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)

    def _load_from_state_dict(  # type: ignore[no-untyped-def]
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            error_msgs.append(f"{prefix}blocks: expected assign=False for a fused layer, got True; or {ADVICE}")
            return
        if prefix + "blocks" in state_dict and self._what_is_wrong(state_dict, prefix) is None:
            codes, mine = Weight.from_state_dict(state_dict, prefix).format.codes, self.weight.format.codes
            if codes != mine != "any":
                error_msgs.append(f"{prefix}meta: expected codes in the order {mine!r}, got {codes!r}; {ADVICE}")
                return
            if codes != mine:
                blocks = state_dict[prefix + "blocks"].clone()
                layout.reorder_codes(blocks[None], codes, mine)
                state_dict = {**state_dict, prefix + "blocks": blocks, prefix + "meta": self._description()["meta"]}
            self.codes = codes
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class MergedLinear(PackedLinear):
    """Linears that read one input as one GEMM. Its tensors are theirs, and in a state dict theirs alone.

    Attributes:
        slices: what stands for the Linears; their buffers are views of the run's.
    """

    def __init__(self, linears: Sequence[PackedLinear], start: int, width: int):
        first = linears[0]
        bias = None if first.bias is None else torch.cat([linear.bias for linear in linears])
        weight = _stacked([linear.weight for linear in linears])
        super().__init__(weight, bias, activation=first.activation, input_scale=first.input_scale)
        self.batch_invariant = first.batch_invariant
        slices = []
        for linear in linears:
            slices.append(ProjectionView(linear, start, width))
            start += linear.out_features
        self.slices = tuple(slices)  # in a tuple: they are modules of the model elsewhere
        self._show([_meta(part, weight.format.codes) for part in self.slices])

    def _show(self, metas: Sequence[torch.Tensor | None]) -> None:
        row = 0
        for part, meta in zip(self.slices, metas):
            n = part.out_features
            padded = slice(row, row + STRIP_ROWS * layout.strips_of(n))
            blocks, channel_scale, row_sum, bias, permutation, input_scale = (self._buffers[name] for name in _VIEWS)
            views = {
                "blocks": blocks[padded.start // STRIP_ROWS : padded.stop // STRIP_ROWS],
                "channel_scale": None if channel_scale is None else channel_scale[padded],
                "row_sum": None if row_sum is None else row_sum[padded],
                "bias": None if bias is None else bias[row : row + n],
                "permutation": permutation,
                "input_scale": input_scale,
            }
            part.show(views, meta)
            row += n

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MergedLinear:
        super()._apply(fn, recurse)
        self._show([None] * len(self.slices))
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._show([part._weight for part in self.slices])  # as `Packed.__getstate__` left it

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:  # type: ignore[no-untyped-def]
        pass

    def _load_from_state_dict(self, *_: Any) -> None:
        self._bind()  # settles what was loaded into the slices


class FusedProjections(torch.nn.Module):
    """Linears that read one input, which is quantised once; all columns of all of them in one tensor.

    Attributes:
        runs: a `MergedLinear` for each GEMM.
        in_features, width: columns of input and output.
    """

    def __init__(self, linears: Sequence[PackedLinear]):
        super().__init__()
        self.in_features, self.width = linears[0].in_features, sum(linear.out_features for linear in linears)
        runs: list[list[PackedLinear]] = []
        for linear in linears:
            # A weight's rows come in strips: another's can only stand below a whole one.
            if runs and _kind(runs[-1][0]) == _kind(linear) and runs[-1][-1].out_features % STRIP_ROWS == 0:
                runs[-1].append(linear)
            else:
                runs.append([linear])
        made, start = [], 0
        for run in runs:
            made.append(MergedLinear(run, start, self.width))
            start += made[-1].out_features
        self.runs = torch.nn.ModuleList(made)

    @property
    def slices(self) -> list[ProjectionView]:
        return [part for run in self.runs for part in run.slices]

    def forward(self, x: torch.Tensor, **norm: Any) -> torch.Tensor:
        """x [..., in_features] -> [..., width] of x's dtype, or of autocast's."""
        rows, dtype = as_rows(x, self.in_features), result_type(x)
        first = self.runs[0]
        lhs = first.quantise(rows if norm else rows.to(dtype), **norm)
        out = torch.empty((rows.shape[0], self.width), dtype=dtype, device=x.device)
        if len(self.runs) == 1:
            first.multiply(lhs, out)
        else:
            start = 0
            for run in self.runs:
                run.multiply(lhs, out[:, start : start + run.out_features])
                start += run.out_features
        return out.view(*x.shape[:-1], self.width)


class FusedNorm(torch.nn.Module):
    """RMSNorm, quantiser and the projections that read the norm: x -> their outputs, side by side.

    `weight` is the norm's own parameter, under its own name. `gain` is what the norm multiplies by where that is
    another tensor: 1 + weight in fp32 for Gemma's.
    """

    def __init__(self, norm: torch.nn.Module, eps: float, one_plus: bool, linears: Sequence[PackedLinear]):
        super().__init__()
        self.weight, self.eps, self.one_plus = norm.weight, eps, one_plus
        self.register_buffer("gain", None, persistent=False)
        self.joint = FusedProjections(linears)
        for run in self.joint.runs:
            run.fronts = ({"rms_norm": True},)
        self.replaced = (norm,)  # in a tuple: its weight is this module's
        self.train(norm.training)
        self._set_gain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x bf16, fp16 or fp32 [..., k] -> [..., joint.width]."""
        if is_dtensor(x):
            return on_parts(self.forward, x, self.joint.slices[0].split)
        gain = self._buffers["gain"]
        return self.joint(x, rms_norm=self.weight.detach() if gain is None else gain, eps=self.eps)

    def original(self) -> torch.nn.Module:
        norm = self.replaced[0]
        norm._parameters["weight"] = self.weight
        return norm.train(self.training)

    def _set_gain(self) -> None:
        weight = self.weight.detach()
        gain = None
        if self.one_plus:
            gain = 1.0 + weight.float()
        elif type(weight) in PLAIN and weight.data_ptr() % ALIGNMENT:
            gain = weight.clone()
        self._buffers["gain"] = gain

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FusedNorm:
        super()._apply(fn, recurse)
        self._set_gain()
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._set_gain()

    def extra_repr(self) -> str:
        return f"{self.joint.in_features} -> {self.joint.width}, eps={self.eps}"


class FusedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)), product and quantiser in one kernel; gate and up in one GEMM.

    Has the children of the module that it replaces. Without a joint of its own, x is the output of the fused norm in
    front: gate and up. `gate`: the argument of `quantize_activations` for act.
    """

    def __init__(
        self,
        mlp: torch.nn.Module,
        down: str,
        gate: Mapping[str, Any],
        linears: Sequence[PackedLinear] = (),
    ):
        super().__init__()
        self._modules.update(mlp._modules)
        self.down_name = down
        self._modules["joint"] = FusedProjections(linears) if linears else None
        self.front = gate
        self._down.fronts = (gate,)
        self.replaced = (mlp,)
        self.training = mlp.training

    @property
    def _down(self) -> PackedLinear:
        return self._modules[self.down_name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2 * in_features of down], or with a joint [..., k] -> [..., out_features of down]."""
        joint, down = self._modules["joint"], self._down
        width = 2 * down.in_features
        if is_dtensor(x):
            if joint is None and down.split is not None:
                raise TypeError("x: expected a plain tensor, what the fused norm in front computes, got a DTensor")
            return on_parts(self.forward, x, joint and joint.slices[0].split)
        y = x if joint is None else joint(x)
        if y.shape[-1:] != (width,):
            expected = f"x: expected shape [..., {width}], what the fused norm in front computes"
            raise ValueError(f"{expected}, got {list(y.shape)}; to call the MLP by itself, {ADVICE}")
        rows = as_rows(y, width)
        out = torch.empty((rows.shape[0], down.out_features), dtype=y.dtype, device=y.device)
        down.multiply(down.quantise(rows, **self.front), out)
        return out.view(*y.shape[:-1], down.out_features)

    def original(self) -> torch.nn.Module:
        mlp = self.replaced[0]
        vars(self._down).pop("fronts", None)
        mlp._modules.clear()
        mlp._modules.update({name: child for name, child in self._modules.items() if name != "joint"})
        mlp.training = self.training
        return mlp


FUSED = (FusedNorm, FusedMLP, ProjectionView)


def quantised_alike(linears: Sequence[PackedLinear]) -> str | None:
    """Why one quantised input cannot serve all of these, or None."""
    first = linears[0]
    for other in linears[1:]:
        if other.activation != first.activation:
            return f"activations differ: {first.activation} and {other.activation}"
        for name in ("input_scale", "permutation"):
            a, b = first._buffers[name], other._buffers[name]
            if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
                return f"{name.replace('_', ' ')}s differ"
        if other.in_features != first.in_features or other.blocks.device != first.blocks.device:
            return "sizes or devices differ"
    return None


def _kind(linear: PackedLinear) -> tuple[Any, ...]:
    """What must agree for one GEMM; not what depends on values, as weights have a format in common."""
    weight, bias = linear.weight, linear.bias
    bias_dtype = None if bias is None else bias.dtype
    return weight.format.common, weight.row_sum is None, bias_dtype, linear.batch_invariant


def _stacked(weights: Sequence[Weight]) -> Weight:
    """The weights one below the other, in the order of codes that all have, or else in "any"."""
    first = weights[0]
    if len(weights) == 1:
        return first
    with torch.inference_mode(False), torch.no_grad():
        orders = {weight.format.codes for weight in weights}
        codes = first.format.codes if len(orders) == 1 else "any"
        blocks = torch.cat([weight.blocks for weight in weights])
        strip = 0
        for weight in weights:
            end = strip + ceil_div(weight.n, STRIP_ROWS)
            if weight.format.codes != codes:
                layout.reorder_codes(blocks[None, strip:end], weight.format.codes, codes)
            strip = end
        channel_scale = None if first.channel_scale is None else torch.cat([weight.channel_scale for weight in weights])
        row_sum = None if first.row_sum is None else torch.cat([weight.row_sum for weight in weights])
        n, strips = sum(weight.n for weight in weights), all(weight.format.strip_scales for weight in weights)
        format = replace(first.format, codes=codes, strip_scales=strips)
        sizes = (n, first.k, first.group_size, format)
        return type(first)(blocks, channel_scale, *sizes, row_sum=row_sum, permutation=first.permutation)


def _meta(part: ProjectionView, codes: str) -> torch.Tensor:
    """`meta` of the slice's weight with its codes in this order."""
    weight = part.weight
    other = object.__new__(type(weight))
    other.__dict__.update(weight.__dict__, format=replace(weight.format, codes=codes))
    return other.state_dict()["meta"]


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
