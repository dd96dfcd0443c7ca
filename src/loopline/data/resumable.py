"""Trying out whether a loader can be gone on with from anywhere."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from ..core.errors import BadLoader
from .batches import trusted_length
from .keys import Streams, put_back, seed_streams, streams, untouched
from .position import has_state, start, state_of

__all__ = ["Report", "check_resumable"]


@dataclass(frozen=True, slots=True)
class Report:
    """Of a loader that passed: what was tried, what could not be, and how many batches an epoch has."""

    tried: tuple[str, ...]
    not_tried: tuple[str, ...]
    batches: int


def check_resumable(loader: Any, *, epochs: int = 2) -> Report:
    """Whether a loader goes on, from anywhere in an epoch, as if it had not been interrupted; BadLoader if it does not.

    Some epochs are read in one go, and then from several places on, as a run reads them that goes on from a
    checkpoint; what is handed out must be the same bit for bit. That takes about eight times these epochs, so give
    a small dataset. `loader` may also be a function that makes a loader: each attempt then gets a new one, as in a new
    process. The random streams of this process are left as they were.

    >>> from torch.utils.data import DataLoader
    >>> from loopline.data import Exact
    >>> check_resumable(Exact(DataLoader(range(10), batch_size=2, shuffle=True), seed=7)).batches
    5
    >>> check_resumable(DataLoader(range(10), batch_size=2, shuffle=True))
    Traceback (most recent call last):
    loopline.core.errors.BadLoader: DataLoader does not go on as if uninterrupted. Resumed ...
    """
    if epochs < 2:
        raise ValueError(f"check_resumable(epochs={epochs}): an epoch's edge needs 2 epochs at least.")
    makes = isinstance(loader, type) or (callable(loader) and not hasattr(loader, "__iter__"))
    new: Callable[[], Any] = loader if makes else lambda: loader
    with untouched():
        seed_streams("check_resumable")
        uncut = _uncut(new(), epochs)
        batches = uncut.batches
        for case, place in _places(batches).items():
            _compare(one := new(), case, uncut, place, _resumed(one, uncut.cuts[place], epochs))
        tried, not_tried = [*_places(batches)], []
        if batches > 1:
            tried.append(_TWICE)
            once, twice = _of_twice(batches)
            again = _interrupted(new(), uncut.cuts[0, once], twice)
            _compare(one := new(), _TWICE, uncut, (0, twice), _resumed(one, again, epochs))
        else:
            not_tried.append(f"{_TWICE}: an epoch has one batch")
        if _keeps_workers(one := new()):
            tried.append(_KEPT)
            for place in ((0, 0), (0, batches // 2), (1, 0)):
                _interrupted(one, uncut.cuts[0, 0], (batches + 1) // 2)
                _compare(one, _KEPT, uncut, place, _resumed(one, uncut.cuts[place], epochs))
        else:
            not_tried.append(f"{_KEPT}: this loader has none")
    return Report(tuple(tried), tuple(not_tried), batches)


_TWICE = "twice within one epoch"
_KEPT = "after a pass that was broken off, with the same persistent workers"


@dataclass(slots=True)
class _Cut:
    """A place between two batches, and what a checkpoint taken there keeps."""

    epoch: int
    index: int
    state: Any
    streams: Streams


@dataclass(slots=True)
class _Uncut:
    """Some epochs read in one go."""

    digests: list[tuple[tuple[int, int], str]]
    cuts: dict[tuple[int, int], _Cut]

    @property
    def batches(self) -> int:
        """How many the first epoch has."""
        return sum(epoch == 0 for (epoch, _), _ in self.digests)


def _places(batches: int) -> dict[str, tuple[int, int]]:
    return {
        "at batch 0": (0, 0),
        "in the middle of an epoch": (0, batches // 2),
        "before the last batch": (0, batches - 1),
        "after the last batch": (0, batches),
        "at the edge of an epoch": (1, 0),
    }


def _of_twice(batches: int) -> tuple[int, int]:
    """Where to interrupt the first time and the second."""
    return batches // 3, max(batches // 3 + 1, 2 * batches // 3)


def _uncut(loader: Any, epochs: int) -> _Uncut:
    uncut = _Uncut([], {})
    length = trusted_length(loader)
    wanted = None if length is None else {*(index for _, index in _places(length).values()), *_of_twice(length)}
    for epoch in range(epochs):
        uncut.cuts[epoch, 0] = _cut(loader, epoch, 0)
        for index, batch in enumerate(start(loader, epoch, 0), 1):
            uncut.digests.append(((epoch, index - 1), _digest(batch)))
            if epoch == 0 and (wanted is None or index in wanted):
                uncut.cuts[epoch, index] = _cut(loader, epoch, index)
    if not uncut.batches:
        raise BadLoader(f"{_name(loader)} gave no batch in its first epoch.")
    return uncut


def _cut(loader: Any, epoch: int, index: int) -> _Cut:
    return _Cut(epoch, index, copy.deepcopy(state_of(loader)), streams())


def _resumed(loader: Any, cut: _Cut, epochs: int) -> Iterator[tuple[tuple[int, int], str]]:
    """What is handed out from a cut on."""
    for epoch in range(cut.epoch, epochs):
        batches = _begun(loader, cut) if epoch == cut.epoch else start(loader, epoch, 0)
        for index, batch in enumerate(batches, cut.index if epoch == cut.epoch else 0):
            yield (epoch, index), _digest(batch)


def _interrupted(loader: Any, cut: _Cut, index: int) -> _Cut:
    """Go on from a cut up to a batch of the same epoch, and leave the rest where it is."""
    batches = _begun(loader, cut)
    for _ in range(cut.index, index):
        next(batches, None)
    return _cut(loader, cut.epoch, index)


def _begun(loader: Any, cut: _Cut) -> Iterator[Any]:
    """As the loop begins it: the streams are put back before an epoch, and inside one when the loader has begun."""
    seed_streams("another process", cut.epoch, cut.index)
    if cut.index == 0:
        put_back(cut.streams)
    batches = start(loader, cut.epoch, cut.index, copy.deepcopy(cut.state))
    if cut.index:
        put_back(cut.streams)
    return batches


def _compare(
    loader: Any, case: str, uncut: _Uncut, place: tuple[int, int], resumed: Iterator[tuple[tuple[int, int], str]]
) -> None:
    expected = [batch for batch in uncut.digests if batch[0] >= place]
    try:
        for wanted, found in zip_longest(expected, resumed):
            if wanted == found:
                continue
            if wanted is None or (found is not None and found[0] < wanted[0]):
                (epoch, index), wrong = found[0], "is one too many"
            elif found is None or found[0] > wanted[0]:
                (epoch, index), wrong = wanted[0], "is missing"
            else:
                (epoch, index), wrong = wanted[0], "is another one"
            raise BadLoader(
                f"{_name(loader)} does not go on as if uninterrupted. Resumed {case}, batch {index} of epoch {epoch} "
                f"{wrong}. {_advice(loader)}"
            )
    except BadLoader:
        raise
    except Exception as error:
        error.add_note(f"while {_name(loader)} was resumed {case}")
        raise


def _advice(loader: Any) -> str:
    if hasattr(type(loader), "start_at"):
        return (
            "What start_at(epoch, index) gives must be the end of what start_at(epoch, 0) gives, and the dataset may "
            "draw only from random, numpy.random and torch's global stream, not from generators of its own."
        )
    if has_state(loader):
        return (
            "Its state_dict must count the batches that were handed out, not those read ahead, and keep what shuffles "
            "an epoch as that was when the epoch began."
        )
    return (
        "It has no position. Wrap a DataLoader in Exact(loader, seed=...), or give the loader start_at(epoch, index), "
        "or state_dict and load_state_dict."
    )


def _name(loader: Any) -> str:
    return type(loader).__qualname__


def _keeps_workers(loader: Any) -> bool:
    while (inner := getattr(loader, "loader", None)) is not None:  # in an Exact or Placed
        loader = inner
    return bool(getattr(loader, "persistent_workers", False))


def _digest(batch: Any) -> str:
    """A hash over everything in a batch, of which tensors, arrays and numbers count bit for bit."""
    hashed = blake2b(digest_size=16)
    for part in _parts(batch):
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.hexdigest()


def _parts(thing: Any) -> Iterator[bytes]:
    yield type(thing).__qualname__.encode()
    match thing:
        case torch.Tensor():
            thing = thing.detach().cpu().contiguous()
            yield f"{thing.dtype} {tuple(thing.shape)}".encode()
            yield thing.reshape(-1).view(torch.uint8).numpy().tobytes()
        case np.ndarray() if not thing.dtype.hasobject:
            yield f"{thing.dtype} {thing.shape}".encode()
            yield thing.tobytes()
        case None | bool() | int() | str():
            yield repr(thing).encode()
        case float():
            yield thing.hex().encode()
        case Mapping():
            for name, value in thing.items():
                yield from _parts(name)
                yield from _parts(value)
        case tuple() | list():
            yield str(len(thing)).encode()
            for item in thing:
                yield from _parts(item)
        case _ if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            for field in dataclasses.fields(thing):
                yield from _parts(getattr(thing, field.name))
        case _:
            yield pickle.dumps(thing)
