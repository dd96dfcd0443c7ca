"""What a strategy is asked to do. Launching, precision, storage and logging are other objects."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.comm import Comm

__all__ = ["Parts", "Strategy", "Traits"]


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts that others may branch on. Where an isinstance on a strategy seems needed, a fact is missing here."""

    shards_parameters: bool = False
    saving_is_collective: bool = False


@dataclass(slots=True)
class Parts:
    """What a strategy places: the model and whatever holds its parameters."""

    model: nn.Module
    optimizers: list[Optimizer] = field(default_factory=list)


class Strategy(Protocol):
    """Where the parts live and how the processes of a run share the work."""

    @property
    def comm(self) -> Comm: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def traits(self) -> Traits: ...

    def place(self, parts: Parts) -> Parts:
        """Move, wrap or shard the parts, once, before anything runs."""
        ...

    def unfinished_window(self, parts: Parts) -> AbstractContextManager[None]:
        """Around a backward pass that is not the last of its window: gradients need not meet yet."""
        ...

    def clip(self, parts: Parts, max_norm: float) -> Tensor:
        """Scale the gradients down to a total norm; give the norm that they had."""
        ...

    def state(self, parts: Parts) -> dict[str, Any]:
        """The parts' state, whole or sharded: the strategy's own business."""
        ...

    def load_state(self, parts: Parts, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        ...

    def close(self) -> None:
        """Release processes and groups."""
        ...
