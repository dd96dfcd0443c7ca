"""A loader whose batches arrive on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .batches import move
from .position import start, state_of

__all__ = ["Placed"]


class Placed:
    """Another loader's batches, moved to a device as they are handed out. Whatever that loader can, this one can."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader = loader
        self.device = device

    @property
    def dataset(self) -> Any:
        return getattr(self.loader, "dataset", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return (move(batch, self.device) for batch in self.loader)

    def start_at(self, epoch: int, index: int) -> Iterator[Any]:
        """The batches of an epoch from the one at `index` on, in the way that the loader inside has for it."""
        batches = start(self.loader, epoch, index, self._state)
        self._state = None
        return (move(batch, self.device) for batch in batches)

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader inside; empty if it has none."""
        return state_of(self.loader) or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the loader inside its state when it is begun next: some begin where their state says, some are told."""
        self._state = state

    _state: Mapping[str, Any] | None = None
