"""A loader whose batches arrive on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .batches import move

__all__ = ["Placed"]


class Placed:
    """Another loader's batches, moved to a device as they are handed out."""

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
