"""Which samples make which batch of which epoch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from ..core.errors import Mismatch
from . import order
from .keys import digest, key, put_back, seed_streams, streams, untouched
from .order import Permutation

__all__ = ["Computed", "Drawn", "First", "Recipe", "recipes_of"]

First: TypeAlias = list[int | str]
"""An epoch, and a hash over the indices that it begins with."""

_FIRST = 64


class Recipe(NamedTuple):
    """What one batch is made of: the dataset's samples at `indices`, the first of them at `position` of the epoch."""

    seed: int
    epoch: int
    batch: int
    position: int
    indices: list[Any]


def recipes_of(loader: DataLoader[Any]) -> Computed | Drawn:
    """The recipes of a loader's batches: computed if its samplers are torch's plain ones, else drawn from its own."""
    batches, sampler = loader.batch_sampler, loader.sampler
    size: int | None = None
    drop_last = False
    if type(batches) is BatchSampler:
        sampler, size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
    elif batches is not None:
        return Drawn(batches, alone=False)
    whole = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)
    if whole or type(sampler) is SequentialSampler:
        return Computed(sampler, size, drop_last)
    return Drawn(sampler if batches is None else batches, alone=batches is None)


class Computed:
    """Recipes of an order that can be entered anywhere: as the dataset has it, or shuffled."""

    def __init__(self, sampler: Any, batch_size: int | None, drop_last: bool) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.name = order.VERSION if isinstance(sampler, RandomSampler) else "sequential"

    def recipes(self, seed: int, epoch: int, batch: int) -> Iterator[Recipe]:
        """Those of an epoch, from a batch on."""
        size, length = self.batch_size or 1, len(self.sampler)
        stop = length - length % size if self.drop_last else length
        indices = self._indices(seed, epoch, batch * size)
        for position in range(batch * size, stop, size):
            yield Recipe(seed, epoch, position // size, position, list(islice(indices, size)))

    def containing(self, seed: int, epoch: int, position: int) -> Recipe | None:
        """The one that has the sample at a position, if any has."""
        recipe = next(self.recipes(seed, epoch, position // (self.batch_size or 1)), None)
        return recipe if recipe is not None and position < recipe.position + len(recipe.indices) else None

    def first(self, seed: int) -> First | None:
        """What shows that a later release shuffles alike."""
        return None if self.name == "sequential" else [0, Permutation(len(self.sampler), seed, 0).first()]

    def expect(self, seed: int, first: First) -> None:
        """Refuse to shuffle differently than it was done then."""
        if first != self.first(seed):
            raise Mismatch(
                f"order: with seed {seed} the shuffle of epoch 0 begins with other samples now. It was made by another "
                "release, or the state is damaged. Use that release, or allow it: allow=['order']."
            )

    def _indices(self, seed: int, epoch: int, position: int) -> Iterator[int]:
        length = len(self.sampler)
        if self.name == "sequential":
            return iter(range(position, length))
        return Permutation(length, seed, epoch).between(position, length)


class Drawn:
    """Recipes of a sampler that must be asked from its beginning.

    It draws from streams that follow from (seed, epoch), its own torch generators included; to enter an epoch, its
    indices are skipped. A sampler that draws from anywhere else is found out when an epoch is entered again in another
    process: `first` is part of the state.
    """

    def __init__(self, sampler: Sampler[Any] | Iterable[Any], *, alone: bool) -> None:
        self.sampler: Any = sampler
        self.alone = alone
        self.batch_size: int | None = getattr(sampler, "batch_size", None)
        self.drop_last: bool = getattr(sampler, "drop_last", False)
        drawing = sampler.sampler if type(sampler) is BatchSampler else sampler
        self.name = f"drawn by {type(drawing).__qualname__}"
        self._expected: First | None = None
        self._first: First | None = None

    def recipes(self, seed: int, epoch: int, batch: int) -> Iterator[Recipe]:
        """Those of an epoch, from a batch on."""
        position = 0
        begins: list[Any] = []
        for place, drawn in enumerate(self._drawn(seed, epoch)):
            indices = [drawn] if self.alone else list(drawn)
            if len(begins) < _FIRST:
                begins += indices
                if len(begins) >= _FIRST:
                    self._note(epoch, begins)
            if place >= batch:
                yield Recipe(seed, epoch, place, position, indices)
            position += len(indices)
        if len(begins) < _FIRST:
            self._note(epoch, begins)

    def containing(self, seed: int, epoch: int, position: int) -> Recipe | None:
        """The one that has the sample at a position, if any has."""
        recipes = self.recipes(seed, epoch, 0)
        return next((recipe for recipe in recipes if position < recipe.position + len(recipe.indices)), None)

    def first(self, seed: int) -> First | None:
        """What the newest epoch began with, as far as it is drawn."""
        return self._first

    def expect(self, seed: int, first: First) -> None:
        """Refuse to draw differently than it was done then, as soon as that epoch is drawn again."""
        self._expected = first

    def _drawn(self, seed: int, epoch: int) -> Iterator[Any]:
        chain = list(_chain(self.sampler))
        generators = [g for sampler in chain if isinstance(g := getattr(sampler, "generator", None), torch.Generator)]
        drawing: Iterator[Any] | None = None
        theirs: Any = None
        while True:
            with untouched(), _kept(generators):
                if drawing is None:
                    seed_streams("sampler", seed, epoch)
                    for generator in generators:
                        generator.manual_seed(key("generator", seed, epoch))
                    for sampler in chain:
                        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                            set_epoch(epoch)
                    drawing = iter(self.sampler)
                else:
                    put_back(theirs[0])
                    _put_back(generators, theirs[1])
                drawn = list(islice(drawing, 1))
                theirs = streams(), [generator.get_state() for generator in generators]
            if not drawn:
                return
            yield drawn[0]

    def _note(self, epoch: int, begins: list[Any]) -> None:
        try:
            self._first = [epoch, digest(*map(operator.index, begins[:_FIRST]), size=8).hex()]
        except TypeError:
            return  # indices of another kind than numbers
        if self._expected is not None and self._expected[0] == epoch:
            expected, self._expected = self._expected, None
            if expected != self._first:
                raise Mismatch(
                    f"order: epoch {epoch}, {self.name}, begins with other indices than it did when the state was "
                    "saved, so they do not follow from the seed and the epoch alone. Let the sampler draw from random, "
                    "numpy.random, torch, or a torch.Generator that is its `generator`, or allow it: allow=['order']."
                )


def _chain(sampler: Any) -> Iterator[Any]:
    """A sampler and those that it draws from."""
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield sampler
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)


@contextmanager
def _kept(generators: list[torch.Generator]) -> Iterator[None]:
    """Whatever is drawn inside, the generators go on afterwards as if it had not been."""
    before = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        _put_back(generators, before)


def _put_back(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
