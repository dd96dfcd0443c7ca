"""What can be said of a batch or a loader without knowing the task."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

__all__ = ["move", "size_of", "trusted_length"]


def size_of(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of the first tensor in it; 1 where there is none."""
    kind = type(batch)
    first = batch[0] if (kind is tuple or kind is list) and batch else batch
    if type(first) is not Tensor:
        first = _first_tensor(batch)
        if first is None:
            return 1
    shape = first.shape
    return shape[0] if shape else 1


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device; whatever is not a container or a tensor is left as it is.

    An object with a `to` method of its own (a graph batch, a tokenizer's output) is asked to move itself.
    """
    match batch:
        case Tensor():
            return batch.to(device, non_blocking=True)
        case str() | bytes() | int() | float() | None:
            return batch
        case _ if callable(getattr(batch, "to", None)):
            return batch.to(device)
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(move(item, device) for item in batch))
        case tuple() | list():
            return type(batch)(move(item, device) for item in batch)
        case Mapping():
            moved = {key: move(value, device) for key, value in batch.items()}
            if not isinstance(batch, MutableMapping):
                return type(batch)(moved)  # type: ignore[call-arg]
            copied = copy.copy(batch)  # a mapping with settings of its own, such as a defaultdict, keeps them
            copied.update(moved)
            return copied
        case _ if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
            fields = {f.name: move(getattr(batch, f.name), device) for f in dataclasses.fields(batch) if f.init}
            return dataclasses.replace(batch, **fields)
        case _:
            return batch


def trusted_length(loader: Any) -> int | None:
    """How many batches a pass has, where that can be believed.

    The length of a stream's loader is a guess that torch itself warns about, so it counts as unknown.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _first_tensor(batch: Any) -> Any:
    if isinstance(batch, Tensor) or hasattr(batch, "shape"):
        return batch  # arrays of other libraries count their rows alike
    if isinstance(batch, Mapping):
        items = list(batch.values())
    elif isinstance(batch, tuple | list):
        items = list(batch)
    elif dataclasses.is_dataclass(batch):
        items = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:
        return None
    return next((found for item in items if (found := _first_tensor(item)) is not None), None)
