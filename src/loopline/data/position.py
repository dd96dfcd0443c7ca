"""Beginning a loader in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

__all__ = ["has_state", "start", "state_of"]


def start(loader: Any, epoch: int, index: int, state: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """The batches of an epoch from the one at `index` on; `state` is the loader's, as a checkpoint kept it.

    A loader with `start_at` is told where to begin. One that has only a state knows by it where it stands, and is
    given it. Of any other the batches before that place are read and dropped.
    """
    told = bool(state) and has_state(loader)
    if told:
        loader.load_state_dict(state)
    if hasattr(type(loader), "start_at"):
        batches: Iterator[Any] = loader.start_at(epoch, index)
        return batches
    batches = iter(loader)
    if not told:
        for _ in islice(batches, index):
            pass
    return batches


def state_of(loader: Any) -> dict[str, Any] | None:
    """What a checkpoint keeps of a loader, and `start` gives back to it; None if it has no state."""
    return loader.state_dict() or None if has_state(loader) else None


def has_state(loader: Any) -> bool:
    """Whether a loader can tell its state, and take it again."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
