"""What a strategy is asked to do. Launching, precision, storage and logging are other objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.comm import Comm

__all__ = ["Parts", "Strategy", "Traits", "load_whole", "plain_name", "whole_state"]


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

    def load_state(self, parts: Parts, state: dict[str, Any], *, strict: bool = True) -> None:
        """Put back what `state` gave, or some sections of it; without `strict`, what fits of the model."""
        ...

    def close(self) -> None:
        """Release processes and groups."""
        ...


def whole_state(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The state of a model that is whole in this process, under the names that it has without `torch.compile`."""
    weights = {} if model is None else {plain_name(name): value for name, value in model.state_dict().items()}
    return {"model": weights, **{f"optimizer/{i}": optimizer.state_dict() for i, optimizer in enumerate(optimizers)}}


def load_whole(
    model: nn.Module | None, optimizers: Sequence[Optimizer], state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Put back what `whole_state` gave, or a part of it; without `strict`, the tensors that fit."""
    if "model" in state and model is not None:
        now, then = model.state_dict(), state["model"]
        found = {name: then[plain_name(name)] for name in now if plain_name(name) in then}
        if not strict:
            found = {name: value for name, value in found.items() if _fits(value, now[name])}
        model.load_state_dict(found, strict=strict)
    for i, optimizer in enumerate(optimizers):
        if f"optimizer/{i}" in state:
            optimizer.load_state_dict(state[f"optimizer/{i}"])


def plain_name(name: str) -> str:
    """A name in a model's state as it is without `torch.compile`, which puts a part of its own into it."""
    return name.replace("_orig_mod.", "")


def _fits(value: object, now: object) -> bool:
    return getattr(value, "shape", None) == getattr(now, "shape", None)
