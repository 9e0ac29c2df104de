"""What stands for a module while transformers loads the rest of a model, see `jitgemm.hf`."""

from __future__ import annotations

from typing import Any

import torch

from jitgemm.nn.quantize.swap import HOOKS


class Placeholder(torch.nn.Module):
    """Stands for a module that transformers is not to load (`jitgemm.hf`), and takes about as much memory as its layer.

    transformers counts the buffer for `device_map="auto"` and puts it where the module belongs. It is not persistent:
    no tensor of a file has its name, and no key is missing.
    """

    room: torch.Tensor

    def __init__(self, module: torch.nn.Module, size: int, device: torch.device):
        super().__init__()
        self.module = (module,)  # in a tuple, where PyTorch does not see its parameters
        self._is_hf_initialized = True
        self.register_buffer("room", torch.empty(size, dtype=torch.uint8, device=device), persistent=False)
        for hooks in HOOKS:
            setattr(self, hooks, getattr(module, hooks))
        self.train(module.training)

    def __getattr__(self, name: str) -> Any:
        """What others ask of the module, such as its sizes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["module"][0], name)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Nothing: models that tie weights assign them, and `tie_weights` runs again after loading."""

    def vacate(self) -> tuple[torch.nn.Module, torch.device]:
        """The module, and the device on which its layer goes, whose room is free from now on."""
        (module,), device = self.module, self.room.device
        del self.room
        if "_hf_hook" in vars(self):  # accelerate's, where a device_map names the layer itself: it moves the input
            module.register_forward_pre_hook(
                lambda _, args: tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in args)
            )
        return module, device
