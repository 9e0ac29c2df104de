"""Packed: what the layers are made of, a packed weight whose tensors are a module's buffers; its parts in a state dict.

PyTorch replaces, moves, loads and copies buffers; the `Weight` is made again over them. Knows no calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from jitgemm.activations.kernel import check_correction
from jitgemm.activations.scheme import ACTIVATIONS, NAMED, activation_named
from jitgemm.dtypes import REAL_TYPES, torch_dtype
from jitgemm.kernel.formats import check_sums
from jitgemm.nn.report import by_reason
from jitgemm.runtime.dispatch import needs_dispatcher
from jitgemm.tensors import PLAIN, check_dtype, describe, dtype_name
from jitgemm.weight.packed import Weight
from jitgemm.weight.parts import check_permutation
from jitgemm.weight.state import TENSORS

LHS_DTYPES = {name: torch_dtype(activation.dtype) for name, activation in NAMED.items()}
"""The type that holds a layer's quantised input, by the name of its activation."""
ON_CPU = ("meta", "activation_type")
"""What describes a packed layer in its state dict, for all its experts at once."""


class Parts(NamedTuple):
    """What a `PackedLinear`, or a projection of a `PackedExperts`, is made of; see their constructors."""

    weight: Weight
    bias: torch.Tensor | None = None
    activation: str = "e4m3"
    input_scale: torch.Tensor | None = None


def state_dict_parts(tensors: Mapping[str, torch.Tensor], prefix: str = "") -> Parts:
    """The parts of the layer whose `state_dict(prefix=prefix)` is among `tensors`; memory is shared.

    Raises:
        ValueError: a tensor is missing, or has the wrong shape, type or value.
    """
    weight = Weight.from_state_dict(tensors, prefix)
    name = prefix + "activation_type"
    number = tensors[name].tolist() if name in tensors else None
    if not isinstance(number, list) or len(number) != 1 or not 0 <= number[0] < len(ACTIVATIONS):
        raise ValueError(f"state dict: expected {name!r} to hold one of 0..{len(ACTIVATIONS) - 1}, got {number}")
    sums = weight.row_sum
    if sums is not None and not sums.is_meta and not bool(sums.isfinite().all()):
        raise ValueError(
            f"state dict: {prefix}row_sum: expected finite numbers, got others: a scale is NaN or infinite"
        )
    bias, input_scale = tensors.get(prefix + "bias"), tensors.get(prefix + "input_scale")
    return Parts(weight, bias, ACTIVATIONS[int(number[0])], input_scale)


class Described(torch.nn.Module):
    """A module whose state dict also holds what describes it, on the CPU. No buffers, which moves would take along and
    convert; and none may be called `meta`, which torch.export's modules have as an attribute."""

    def packed_parts(self, name: str) -> dict[str, Packed]:
        """The module itself, or its projections, by the names that they have where its own is this."""
        raise NotImplementedError

    def _description(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def _what_is_wrong(self, state_dict: Mapping[str, torch.Tensor], prefix: str) -> str | None:
        """Why these tensors are not this module's, so that nothing is copied or converted that should not be."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= {prefix + name: tensor for name, tensor in self._description().items()}

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        wrong = self._what_is_wrong(state_dict, prefix)
        if wrong is not None:
            error_msgs.append(wrong)
            return
        described = {prefix + name for name in self._description()}
        missing_keys += sorted(described - state_dict.keys()) if strict else []
        mine = {name: tensor for name, tensor in state_dict.items() if name not in described}
        super()._load_from_state_dict(mine, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


class Packed(Described):
    """A packed weight, dense or of several experts, with its bias and the kind of activations that it meets.

    Its buffers are as `PackedLinear` lists them. They are moved by `.to(device)`, but never converted to another
    type, whatever the model is.

    Attributes:
        activation: one of ACTIVATIONS.
        scheme: the same as an `Activation`, with a scale that is given where there is an `input_scale`, rotated as the
            weight is.
        lhs_dtype: of the activations' codes.
    """

    kind: ClassVar[type[Weight]] = Weight
    """The class of its weight."""
    bias: torch.Tensor | None
    input_scale: torch.Tensor | None

    def __init__(
        self, weight: Weight, bias: torch.Tensor | None = None, *, activation: str = "e4m3",
        input_scale: torch.Tensor | None = None,
    ):  # fmt: skip
        super().__init__()
        if not isinstance(weight, self.kind):
            raise TypeError(f"weight: expected a {self.kind.__name__}, got {type(weight).__name__}")
        scheme = activation_named(activation)._replace(rotation=weight.rotation)
        self.activation, self.lhs_dtype = activation, LHS_DTYPES[activation]
        self.scheme = scheme if input_scale is None else scheme.given
        self._sums = check_sums_of(weight.sums, activation)
        self._weight: Any = _lasting(weight)  # while a copy is made its `meta`: the buffers hold the rest of it
        buffers = {name: getattr(self._weight, name) for name in TENSORS}
        buffers["input_scale"], buffers["bias"] = _checked(weight, activation, input_scale, bias)
        # Absent ones last: torch.export (2.13, not strict) counts on it.
        for name, tensor in sorted(buffers.items(), key=lambda item: item[1] is None):
            self.register_buffer(name, tensor, persistent=name != "channel_scale" or weight.sums != "f16")

    @property
    def weight(self) -> Weight:
        """The packed weight; its tensors are the layer's buffers."""
        weight, buffers = self._weight, self._buffers
        # Each as a buffer first: a compiler then takes the tensors for the module's own, of fixed sizes and addresses.
        if (
            buffers["blocks"] is weight.blocks
            and buffers["channel_scale"] is weight.channel_scale
            and buffers["row_sum"] is weight.row_sum
            and buffers["permutation"] is weight.permutation
        ):
            return weight
        # Replaced without asking the module: for good, or under a tracer for as long as it traces.
        if needs_dispatcher(buffers["blocks"], buffers["blocks"]):
            return weight.with_tensors(*(buffers[name] for name in TENSORS))
        return self._bind()

    # ---- what kernels may add up in ----------------------------------------------------------------------------------

    @property
    def sums(self) -> str:
        """What kernels may add up in, see `Weight.with_sums`: "f32"; "f16" with the activation "e4m3", ValueError for
        weights whose scales f16 does not hold; "exact" with those of int8. Never in a state dict."""
        return self._sums

    @sums.setter
    def sums(self, sums: str) -> None:
        before = self._sums
        if (problem := self.prefer_sums(sums)) is not None:
            self.prefer_sums(before)
            raise ValueError(problem)

    def prefer_sums(self, sums: str) -> str | None:
        """Sets `sums`, also where f16 cannot be had for the weight: it is added up in fp32 then, and this says why."""
        self._sums = check_sums_of(sums, self.activation)
        return self._hold(self.weight, self._sums)

    @property
    def call_sums(self) -> str:
        """Those of the weight: "f32" where f16 cannot be had."""
        sums: str = self._weight.sums
        return sums

    def _hold(self, weight: Weight, sums: str) -> str | None:
        """Takes the weight with such sums, its tensors as buffers: powers in the memory of those before, which CUDA
        graphs may hold. Why they cannot be had: the weight is added up in fp32 then."""
        problem, before, buffers = None, self._powers, self._buffers
        try:
            weight = weight.with_sums(sums)
        except ValueError as error:
            problem, weight = str(error), weight.with_sums("f32")
        powers = weight.channel_scale if weight.sums == "f16" else None
        if powers is not None and before is not None and powers is not before and type(powers) in PLAIN:
            if (powers.shape, powers.device) == (before.shape, before.device):
                with torch.no_grad():
                    before.copy_(powers)
                weight = weight.with_tensors(weight.blocks, before, weight.row_sum, weight.permutation)
        self._weight = weight
        tensors = buffers | {name: getattr(weight, name) for name in TENSORS}
        buffers.clear()
        buffers.update(sorted(tensors.items(), key=lambda item: item[1] is None))
        self._non_persistent_buffers_set -= {"channel_scale"}
        self._non_persistent_buffers_set |= {"channel_scale"} if powers is not None else set()
        return problem

    @property
    def _powers(self) -> torch.Tensor | None:
        """Those of sums in f16, the scales that no state dict has."""
        return self._buffers["channel_scale"] if "channel_scale" in self._non_persistent_buffers_set else None

    @property
    def parts(self) -> Parts:
        """As a state dict has them: of sums they say nothing."""
        return Parts(self.weight.with_sums("f32"), self.bias, self.activation, self.input_scale)

    def packed_parts(self, name: str) -> dict[str, Packed]:
        return {name: self}

    def named(self, layer: str) -> None:
        """Sets the name of the layer, for messages of its weight."""
        self.weight.named(layer)

    def take(self, parts: Parts) -> None:
        """Puts these in the place of its own; the activation is the same."""
        other = type(self)(**parts._asdict())
        if other.scheme.rotation != self.scheme.rotation:
            raise ValueError(f"weight: expected rotation {self.scheme.rotation}, as before, got {parts.weight!r}")
        self._buffers, self._non_persistent_buffers_set = other._buffers, other._non_persistent_buffers_set
        self._fill(other.weight, False)

    # ---- buffers that are replaced, moved, loaded, copied ------------------------------------------------------------

    def _bind(self, meta: torch.Tensor | None = None, filled: bool = True) -> Weight:
        """Makes the weight again over the buffers as they are, which checks it and marks it ready; by `meta`, if given.

        filled: False where they came from the meta device and hold nothing yet.
        """
        powers = self._powers
        stored: dict[str, Any] = {**self._buffers, "channel_scale": None} if powers is not None else self._buffers
        if meta is None:
            weight = self._weight.with_sums("f32").with_tensors(*(stored[name] for name in TENSORS))
        else:
            weight = self.kind.from_state_dict(stored | {"meta": meta})
        weight = _lasting(weight)
        if filled or weight.blocks.is_meta:
            self._fill(weight, powers is not None and not powers.is_meta)
        else:
            self._hold(weight, "f32")
        return self._weight  # type: ignore[no-any-return]

    def _fill(self, weight: Weight, held: bool) -> None:
        """Takes a weight of other values; held: whether f16 held those before, whose powers CUDA graphs then have."""
        if (problem := self._hold(weight, self._sums)) is None:
            return
        if held:
            raise ValueError(f"{problem}; sums='f16' was set for values that it holds")
        warnings.warn(f"{problem}; kernels add up in fp32", stacklevel=2)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Packed:
        filled = not self.blocks.is_meta
        self._buffers.update({name: _moved(tensor, fn) for name, tensor in self._buffers.items() if tensor is not None})
        self._bind(filled=filled)
        return self

    def _description(self) -> dict[str, torch.Tensor]:
        activation_type = torch.tensor([ACTIVATIONS.index(self.activation)], device="cpu")
        return {"meta": self._weight.state_dict()["meta"], "activation_type": activation_type}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
        error_msgs = others[-1]
        errors = len(error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *others)
        if len(error_msgs) == errors:
            self._bind(None if self.blocks.is_meta else state_dict.get(prefix + "meta"))

    def _what_is_wrong(self, state_dict: Mapping[str, torch.Tensor], prefix: str) -> str | None:
        mine: Any
        order: Any = state_dict.get(prefix + "permutation")
        if prefix + "blocks" in state_dict and prefix + "meta" in state_dict:
            try:
                other = self.kind.from_state_dict(state_dict, prefix)
            except (TypeError, ValueError) as error:
                return str(error)
            mine = self._weight
            # What depends on values may differ, and takes as much memory.
            facts = {(w.shape, w.group_size, w.format.for_any_values, w.rotation) for w in (mine, other)}
            if len(facts) > 1:
                return f"{prefix}meta: expected {mine!r}, got {other!r}"
        elif type(order) in PLAIN and not order.is_meta:
            try:  # with strict=False it may come alone, and the quantiser reads where it says
                check_permutation(order, self._weight.k)
            except (TypeError, ValueError) as error:
                return f"state dict: {prefix}{error}"
        number, mine = state_dict.get(prefix + "activation_type"), [ACTIVATIONS.index(self.activation)]
        if number is not None and number.tolist() != mine:
            return f"{prefix}activation_type: expected {mine} ({self.activation}), got {number.tolist()}"
        for name in ("input_scale", "bias"):
            mine, stored = self._buffers[name], state_dict.get(prefix + name)
            if mine is not None and stored is not None and mine.dtype != stored.dtype:
                return f"{prefix}{name}: expected {dtype_name(mine.dtype)}, got {dtype_name(stored.dtype)}"
        return None

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Raises TypeError: what assigns a parameter ties or resizes a weight, which a packed one cannot be."""
        raise TypeError(
            f"{self._weight.layer or type(self).__name__}: expected no parameter, as packed weights are buffers, got "
            f"{name!r}; to tie or resize this weight, leave the layer out with filter=..."
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_weight": self._description()["meta"]}  # the buffers hold the rest of it

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind(state["_weight"])


def check_sums_of(sums: str, activation: str) -> str:
    """`sums` of layers with this activation; TypeError or ValueError for what they cannot be added up in."""
    scheme = activation_named(activation)
    wrong = {"f16": scheme.dtype != "e4m3" or scheme.block, "exact": scheme.dtype != "s8"}
    if wrong.get(check_sums(sums)):
        expected, other = ("e4m3", "f32") if sums == "f16" else ("int8 of any kind", "f32")
        raise ValueError(f"sums: expected {other!r} but with activation {expected}, got {sums!r} with {activation}")
    return sums


def _lasting(weight: Weight) -> Weight:
    """The weight; its records copied where they are an inference tensor, whose writes nothing counts."""
    if not weight.blocks.is_inference():
        return weight
    with torch.inference_mode(False):
        return weight.with_tensors(weight.blocks.clone(), *(getattr(weight, name) for name in TENSORS[1:]))


def _moved(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """fn(tensor) with the dtype kept: `model.half()` and its like convert floats and leave integers alone."""
    raw = tensor.view(torch.uint8)
    out = fn(raw)
    if out is raw:
        return tensor
    if out.dtype != torch.uint8:
        raise TypeError(
            f"packed weight: expected a move to another device, got a conversion to {dtype_name(out.dtype)}"
        )
    return out.view(tensor.dtype)


def _checked(
    weight: Weight, activation: str, input_scale: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """input_scale and bias as the calls take them: a bias of fp16 is widened to fp32, which is exact."""
    scheme, types = NAMED[activation], weight.format.lhs_types
    if scheme.dtype not in types:
        expected = " or ".join(name for name, each in NAMED.items() if each.dtype in types)
        raise ValueError(f"weight: expected activation {expected}, {weight.format.why_lhs()}, got {activation}")
    check_correction(weight.correction, scheme.dtype, scheme.block)
    if scheme.affine and weight.row_sum is None:
        raise ValueError(f"weight: expected row sums, which {activation} needs, got a weight without; pack it again")
    for name, tensor in (("input_scale", input_scale), ("bias", bias)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor or None, got {type(tensor).__name__}")
        if tensor is not None and tensor.device != weight.device:
            raise ValueError(f"{name}: expected the weight's device {weight.device}, got {tensor.device}")
    if input_scale is not None:
        if scheme.block or scheme.affine:
            raise ValueError(f"input_scale: expected None with {activation}, whose scales are found per token")
        if input_scale.dtype != torch.float32 or input_scale.numel() != 1:
            raise ValueError(f"input_scale: expected float32 of one element, got {describe(input_scale)}")
        if not input_scale.is_meta and not 0 < float(input_scale) < torch.inf:
            raise ValueError(f"input_scale: expected a positive, finite number, got {float(input_scale)}")
        input_scale = input_scale.detach().reshape(1)
    if bias is not None:
        check_dtype("bias", bias.dtype, REAL_TYPES)
        if bias.shape != weight.shape[:-1]:
            raise ValueError(f"bias: expected shape {list(weight.shape[:-1])}, got {list(bias.shape)}")
        bias = bias.detach().contiguous()
        bias = bias.to(torch.float32) if bias.dtype == torch.float16 else bias
    return input_scale, bias


# ---- what many layers may add up in ----------------------------------------------------------------------------------


def check_layers(sums: str, activations: Iterable[tuple[str, str]]) -> None:
    """Raises TypeError or ValueError unless layers of these names and activations can be added up so."""
    check_sums(sums)
    for name, activation in activations:
        try:
            check_sums_of(sums, activation)
        except ValueError as error:
            raise ValueError(f"{error} (layer {name})") from None


def put_sums(layers: Mapping[str, torch.nn.Module], sums: str, call: str) -> None:
    """`set_sums` and `warn_of_sums`, in the name of the caller's caller."""
    warn_of_sums(set_sums(layers, sums), call, stacklevel=4)


def warn_of_sums(problems: Mapping[str, str], call: str, stacklevel: int = 3) -> None:
    """One warning, in the caller's caller's name, for all weights that `set_sums` adds up in fp32; call: who warns."""
    if problems:
        count, lines = len(problems), "\n".join(by_reason(problems))
        text = f"{call}: {count} weights are added up in fp32, as sums in f16 cannot be had:\n{lines}"
        warnings.warn(text, stacklevel=stacklevel)


def set_sums(layers: Mapping[str, torch.nn.Module], sums: str) -> dict[str, str]:
    """Sets `sums` of layers with 4-bit weights; those of 8 bits are added up as before.

    Returns:
        {name: why} of the weights that are added up in fp32, as f16 cannot be had for them.

    Raises:
        TypeError, ValueError: sums cannot be had with a layer's activations.
    """
    described = [(name, layer) for name, layer in layers.items() if isinstance(layer, Described)]
    parts = {n: part for name, layer in described for n, part in layer.packed_parts(name).items()}
    parts = {name: part for name, part in parts.items() if part.weight.bits == 4}
    check_layers(sums, ((name, part.activation) for name, part in parts.items()))
    problems = {name: part.prefer_sums(sums) for name, part in parts.items()}
    return {name: _short(why) for name, why in problems.items() if why is not None}


def _short(problem: str) -> str:
    """What a weight's own error says, without its name."""
    return "scales that f16 does not hold" if "does not hold" in problem else problem.removeprefix("sums: ")
