"""What `jitgemm.serving` asks of an engine. Its plug-in's config answers; knows no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import torch

from jitgemm.checkpoint.files import Checkpoint

if TYPE_CHECKING:
    from jitgemm.nn.layers.sharding import EngineSharding


class Logger(Protocol):
    """An engine's logger; `_once` says the same text with the same values only once."""

    def info(self, msg: str, *args: object) -> None: ...
    def info_once(self, msg: str, *args: object) -> None: ...
    def warning(self, msg: str, *args: object) -> None: ...
    def warning_once(self, msg: str, *args: object) -> None: ...


class Engine:
    """An engine, as its plug-in's config knows it.

    Attributes:
        engine, logger: its name in messages, and its logger.
        adapted: vLLM's layers of experts that have adapters (LoRA).
        experts_over_nvlink: True if jitgemm's kernels may send experts' tokens between its ranks.
        tp_invariant: True if layers are to have the same bits on any number of ranks (`jitgemm.nn.layers.invariant`).
        packed_modules_mapping: {layer of the engine's: the layers of the files that it joins}.
    """

    engine: str
    logger: Logger
    adapted: WeakSet[torch.nn.Module]
    experts_over_nvlink = False
    tp_invariant: bool | int = False
    packed_modules_mapping: dict[str, list[str]]

    @property
    def elastic(self) -> bool:
        """True if its number of ranks may change while it serves."""
        return False

    @property
    def model_type(self) -> str:
        """The model's type by its config.json; "" if the engine does not say."""
        return ""

    @property
    def parameter_classes(self) -> Any:
        """The engine's module of parameters that cut and join themselves."""
        raise NotImplementedError

    @property
    def loads_biases(self) -> bool:
        """True if the engine's model calls the loaders of experts' biases."""
        raise NotImplementedError

    @property
    def makes_weights_up(self) -> bool:
        """True if the engine calls no loaders (--load-format dummy)."""
        raise NotImplementedError

    @property
    def reuses_memory(self) -> bool:
        """True if the engine reads tensors into the memory of earlier ones."""
        raise NotImplementedError

    @property
    def captures_graphs(self) -> bool:
        """True if the engine may capture CUDA graphs of the model."""
        raise NotImplementedError

    @staticmethod
    def keep(module: torch.nn.Module) -> None:
        """Has the engine leave a layer's packed weights where they are when it loads the layer again."""
        raise NotImplementedError

    def ranks_that_share(self, layer: torch.nn.Module) -> int | None:
        """How many ranks the engine adds up the outputs of: of experts, and of linears that ranks may have parts of the
        columns of; None for others."""
        raise NotImplementedError

    def shares_whole_experts(self, layer: torch.nn.Module) -> bool:
        """True if each of a layer's ranks has whole experts, and all have the same tokens."""
        return False

    def group_of(self, layer: torch.nn.Module) -> torch.distributed.ProcessGroup:
        """The process group of the ranks that share such a layer."""
        raise NotImplementedError

    def warn_of_others(self) -> None:
        """Names the engine's own kernels that may have other bits on other numbers of GPUs."""

    def check_invariant(self, layer: torch.nn.Module, prefix: str, got: str) -> None:
        """Raises ValueError for a layer that ranks share, and jitgemm does not serve with tp_invariant."""
        ranks = self.ranks_that_share(layer) if self.tp_invariant else None
        if ranks is not None and ranks > 1:
            wanted = "a linear that jitgemm serves, or experts that are whole on a rank and get the same tokens on each"
            raise ValueError(f"{prefix}: expected {wanted}, as {ranks} ranks share it with tp_invariant, got {got}")

    def sharding_of_experts(self, layer: torch.nn.Module) -> EngineSharding | None:
        """How ranks divide a layer's experts with tp_invariant; None where they do not."""
        ranks = self.ranks_that_share(layer) if self.tp_invariant else None
        if ranks is None or ranks == 1:
            return None
        import torch.distributed as dist

        from jitgemm.nn.layers.sharding import EngineSharding

        group = self.group_of(layer)
        return EngineSharding(group, dist.get_rank(group), ranks)

    def reads_files_for(self, layer: torch.nn.Module) -> None:
        """Notes a layer whose weights are read from the files."""
        raise NotImplementedError

    def files(self) -> Checkpoint:
        """The checkpoint's files, once they are on this machine."""
        raise NotImplementedError
