"""What `fuse_` puts into a model: a norm that runs the projections behind it, views of those, and an MLP.

Linears that read one input are `FusedProjections`: the input is quantised once, and Linears whose formats agree are one
GEMM, a `MergedLinear`, whose weight is theirs one below the other. Each becomes a `ProjectionView` of its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from jitgemm.activations.scheme import NORM, Gate, Prologue
from jitgemm.kernel.formats import STRIP_ROWS, Correction, WeightFormat
from jitgemm.nn.layers.linear import PackedLinear, input_rows, is_dtensor, on_parts, result_type
from jitgemm.nn.quantize.swap import UNFUSE, Fused
from jitgemm.runtime.checks import ALIGNMENT
from jitgemm.tensors import PLAIN
from jitgemm.weight import layout
from jitgemm.weight.packed import Weight
from jitgemm.weight.state import TENSORS


class ProjectionView(Fused, PackedLinear):
    """A Linear whose GEMM a `MergedLinear` runs: forward takes what that gave, and returns this Linear's columns of it.

    Attributes:
        start, width: first column and number of columns of the `FusedProjections`' output.
        order: in which the weight's codes stood.
        merged: the format of the `MergedLinear`'s weight.
    """

    prologues = ()

    def __init__(self, linear: PackedLinear, merged: WeightFormat, start: int, width: int):
        parts = linear.parts
        super().__init__(**parts._replace(weight=_in_order(parts.weight, merged.order))._asdict())
        self.start, self.width, self.order, self.merged = start, width, parts.weight.format.order, merged
        _set_like(self, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width], what `FusedProjections` gave -> [..., out_features], a view."""
        if x.shape[-1:] != (self.width,):
            raise ValueError(
                f"x: expected shape [..., {self.width}], what the preceding fused module computes, got {list(x.shape)}; "
                f"to call the Linear by itself, {UNFUSE}"
            )
        return x[..., self.start : self.start + self.out_features]

    def original(self) -> PackedLinear:
        """The Linear, with tensors of its own."""
        weight = _in_order(self.weight, self.order)
        weight = weight.with_tensors(*(_clone(getattr(weight, name)) for name in TENSORS))
        parts = self.parts._replace(weight=weight, bias=_clone(self.bias), input_scale=_clone(self.input_scale))
        return _set_like(PackedLinear.of_parts(parts), self)

    # ---- buffers: the `MergedLinear` moves and copies them -----------------------------------------------------------

    def prefer_sums(self, sums: str) -> str | None:
        raise ValueError(f"sums: expected them to be set before fuse_, got {sums!r} for a fused Linear; {UNFUSE}")

    def _make_powers(self) -> None:
        """None: the `MergedLinear` has them."""
        self._buffers["powers"] = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ProjectionView:
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return state | {"_buffers": dict.fromkeys(state["_buffers"])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        error_msgs = rest[-1]
        if local_metadata.get("assign_to_params_buffers", False):
            error_msgs.append(f"{prefix}blocks: expected assign=False for a fused layer, got True; or {UNFUSE}")
            return
        described = {prefix + "blocks", prefix + "meta"} <= state_dict.keys()
        if described and self._what_is_wrong(state_dict, prefix) is None:
            weight, merged = Weight.from_state_dict(state_dict, prefix), self.merged
            found = weight.format
            if found.complete and not merged.complete:
                error_msgs.append(
                    f"{prefix}meta: expected codes in the order {merged.order!r}, got {found.order!r}; {UNFUSE}"
                )
                return
            if merged.uniform_strip_scale and not found.uniform_strip_scale:
                expected = "expected one scale for every 64 rows, as the merged weight has"
                error_msgs.append(f"{prefix}meta: {expected}, got several; {UNFUSE}")
                return
            self.order = found.order
            state_dict = {**state_dict, **_in_order(weight, merged.order).state_dict(prefix)}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class MergedLinear(Fused, PackedLinear):
    """Linears that read one input as one GEMM. Its tensors are theirs, and in a state dict theirs alone.

    Attributes:
        slices: what stands for the Linears; their buffers are views of this one's.
    """

    def __init__(self, linears: Sequence[PackedLinear], start: int, width: int):
        first, merged = linears[0].parts, in_common([linear.weight.format for linear in linears])
        starts = accumulate((linear.out_features for linear in linears), initial=start)
        slices = tuple(ProjectionView(linear, merged, start, width) for linear, start in zip(linears, starts))
        tensors = {name: _below([part._buffers[name] for part in slices]) for name in _sizes(slices)}
        bias, n = tensors.pop("bias"), sum(part.out_features for part in slices)
        weight = replace(slices[0].weight, n=n, format=merged, **tensors)
        super().__init__(**first._replace(weight=weight, bias=bias)._asdict())
        self.batch_invariant, self.slices = linears[0].batch_invariant, slices  # a tuple: they are modules elsewhere
        self.prefer_sums(linears[0].call_sums)
        self._show()

    def _show(self) -> None:
        """Makes views of its tensors the slices' buffers."""
        sizes = _sizes(self.slices)
        for i, part in enumerate(self.slices):
            for name, tensor in self._buffers.items():
                if name == "powers":
                    continue
                divided = name in sizes and tensor is not None
                part._buffers[name] = tensor.split(sizes[name])[i] if divided else tensor
            part._bind(part._weight if isinstance(part._weight, torch.Tensor) else None)  # its `meta`, in a copy

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MergedLinear:
        super()._apply(fn, recurse)
        self._show()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._show()

    def _save_to_state_dict(self, *_: Any) -> None:
        pass

    def _load_from_state_dict(self, *_: Any) -> None:
        self._bind()  # marks what was loaded as ready into the views


class FusedProjections(torch.nn.Module):
    """Linears that read one input, which is quantised once; all columns of all of them in one tensor.

    Attributes:
        runs: a `MergedLinear` for each GEMM.
        in_features, width: columns of input and output.
    """

    def __init__(self, linears: Sequence[PackedLinear]):
        super().__init__()
        self.in_features, self.width = linears[0].in_features, sum(linear.out_features for linear in linears)
        groups, start = [[linears[0]]], 0
        for linear in linears[1:]:
            # A weight's rows come in strips: another's can only stand below a whole one.
            if _kind(groups[-1][0]) == _kind(linear) and groups[-1][-1].out_features % STRIP_ROWS == 0:
                groups[-1].append(linear)
            else:
                groups.append([linear])
        self.runs = torch.nn.ModuleList()
        for group in groups:
            self.runs.append(MergedLinear(group, start, self.width))
            start += self.runs[-1].out_features

    @property
    def slices(self) -> list[ProjectionView]:
        return [part for run in self.runs for part in run.slices]

    def forward(self, x: torch.Tensor, **norm: Any) -> torch.Tensor:
        """x [..., in_features] -> [..., width] of x's dtype, or of autocast's."""
        rows, dtype = input_rows(x, self.in_features), result_type(x)
        rows = rows if norm else rows.to(dtype)
        given: dict[Correction | None, tuple[torch.Tensor, ...]] = {}
        out = torch.empty((rows.shape[0], self.width), dtype=dtype, device=x.device)
        for run in self.runs:
            start, correction = run.slices[0].start, run.weight.correction
            if correction not in given:
                given[correction] = run.quantise(rows, **norm)
            run.multiply(given[correction], out if len(self.runs) == 1 else out[:, start : start + run.out_features])
        return out.view(*x.shape[:-1], self.width)


class FusedNorm(Fused, torch.nn.Module):
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
            run.prologues = (NORM,)
        self.replaced = (norm,)  # in a tuple: its weight is this module's
        self.train(norm.training)
        self._set_gain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x bf16, fp16 or fp32 [..., k] -> [..., joint.width]."""
        if is_dtensor(x):
            return on_parts(self.forward, x, self.joint.slices[0].split)
        gain = self._buffers["gain"]
        return self.joint.forward(x, rms_norm=self.weight.detach() if gain is None else gain, eps=self.eps)

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


class FusedMLP(Fused, torch.nn.Module):
    """down(act(gate(x)) * up(x)), product and quantiser in one kernel; gate and up in one GEMM.

    Has the children of the module that it replaces. Without a joint of its own, x is the output of the fused norm in
    prologue: gate and up.
    """

    def __init__(self, mlp: torch.nn.Module, down: str, gate: Gate, linears: Sequence[PackedLinear] = ()):
        super().__init__()
        self._modules.update(mlp._modules)
        self.down_name = down
        self._modules["joint"] = FusedProjections(linears) if linears else None
        self.prologue, self.replaced = Prologue(gate=gate), (mlp,)
        self.training = mlp.training

    def take_over(self) -> None:
        """Once it stands in the model: `replaced` holds no layers any longer, which would be resident twice."""
        self._down.prologues = (self.prologue,)
        self.replaced[0]._modules.clear()

    @property
    def _down(self) -> PackedLinear:
        return self._modules[self.down_name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., 2 * in_features of down], or with a joint [..., k] -> [..., out_features of down]."""
        joint, down = self._modules["joint"], self._down
        width = 2 * down.in_features
        if is_dtensor(x):
            if joint is None and down.split is not None:
                raise TypeError("x: expected a plain tensor, what the preceding fused norm computes, got a DTensor")
            return on_parts(self.forward, x, joint and joint.slices[0].split)
        y = x if joint is None else joint.forward(x)
        if y.shape[-1:] != (width,):
            expected = f"x: expected shape [..., {width}], what the preceding fused norm computes"
            raise ValueError(f"{expected}, got {list(y.shape)}; to call the MLP by itself, {UNFUSE}")
        rows = input_rows(y, width)
        out = torch.empty((rows.shape[0], down.out_features), dtype=y.dtype, device=y.device)
        down.multiply(down.quantise(rows, **self.prologue.keywords), out)
        return out.view(*y.shape[:-1], down.out_features)

    def original(self) -> torch.nn.Module:
        mlp = self.replaced[0]
        vars(self._down).pop("prologues", None)
        mlp._modules.update({name: child for name, child in self._modules.items() if name != "joint"})
        mlp.training = self.training
        return mlp


FUSED = (FusedNorm, FusedMLP, ProjectionView)


def _kind(linear: PackedLinear) -> tuple[Any, ...]:
    """What must agree for one GEMM; not what depends on values, as weights have a format in common."""
    weight, bias = linear.weight, linear.bias
    bias_dtype = None if bias is None else bias.dtype
    same = weight.format.for_any_values, weight.row_sum is None, bias_dtype
    return *same, linear.batch_invariant, linear.call_sums


def in_common(formats: Sequence[WeightFormat]) -> WeightFormat:
    """The format of one weight that holds all of these."""
    first = formats[0]
    zero_point, orders = any(each.zero_point for each in formats), {each.order for each in formats}
    order = first.order if len(orders) == 1 and not zero_point else first.for_any_values.order
    strips = all(each.uniform_strip_scale for each in formats)
    if first.powers:  # packed together, they get the fewest scales that hold all
        return replace(first, group_size=min((each.group_size for each in formats if each.group_size), default=0))
    return replace(first, zero_point=zero_point, order=order, uniform_strip_scale=strips)


def _in_order(weight: Weight, order: str) -> Weight:
    """The weight with its codes in this order, copied unless they are."""
    old, format = weight.format, replace(weight.format, order=order)
    if format == old:
        return weight
    blocks = weight.blocks.clone()
    layout.reorder_codes(blocks[None], old.code, old.order, order)
    found = replace(weight, blocks=blocks, format=format)
    found.named(weight.layer)
    return found


def _sizes(parts: Sequence[PackedLinear]) -> dict[str, list[int]]:
    """How long each of the tensors is that stand one below the other, by part."""
    rows = [part.out_features for part in parts]
    strips = [layout.strips_of(n) for n in rows]
    padded = [STRIP_ROWS * count for count in strips]
    return {"blocks": strips, "channel_scale": padded, "row_sum": padded, "bias": rows}


def _below(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """One below the other; None where there are none."""
    return tensors[0] if len(tensors) == 1 or tensors[0] is None else torch.cat(tensors)


def _set_like(linear: PackedLinear, other: PackedLinear) -> PackedLinear:
    """The Linear, set as the other is."""
    linear.batch_invariant, linear.split = other.batch_invariant, other.split
    linear.named(other.weight.layer)
    if isinstance(linear, ProjectionView):
        linear._sums = other.sums
    elif other.sums != "f32":
        linear.prefer_sums(other.sums)
    return linear.train(other.training)


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
