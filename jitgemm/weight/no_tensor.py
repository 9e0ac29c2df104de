"""What a model may do to the weight of a torch.nn.Linear and cannot do to a packed one: an error that says so."""

from __future__ import annotations

from typing import Any, ClassVar


class NoTensor:
    """Base of weights that stand where models expect a tensor."""

    bits: ClassVar[int]
    layer: ClassVar[str]

    def no_tensor(self, use: str) -> str:
        return (
            f"{self.layer or 'weight'}: expected a tensor for {use}, got a packed {self.bits}-bit weight "
            f"({type(self).__name__}): something other than the layer's own call uses it; leave the layer out with "
            "filter=..., or call dequantize()"
        )

    def __matmul__(self, other: object) -> Any:
        raise TypeError(self.no_tensor("@"))

    __rmatmul__ = __matmul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of PyTorch that is given the weight."""
        values = [*args, *(kwargs or {}).values()]
        nested = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
        weight = next(item for item in nested if isinstance(item, cls))
        raise TypeError(weight.no_tensor(getattr(func, "__name__", str(func))))


def _of_tensors(name: str) -> property:
    """An attribute of tensors that models use and a packed weight does not have; `__getattr__` would slow down all."""

    def get(weight: NoTensor) -> Any:
        raise AttributeError(weight.no_tensor(f".{name}"))

    return property(get)


for _name in (
    "T", "bfloat16", "clone", "copy_", "data", "detach", "dim", "float", "half", "is_cuda", "numel", "requires_grad",
    "reshape", "size", "squeeze", "t", "transpose", "type", "unsqueeze", "view",
):  # fmt: skip
    setattr(NoTensor, _name, _of_tensors(_name))
