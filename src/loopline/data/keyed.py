"""Reading samples under streams that follow from where the sample stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Subset, get_worker_info

from .keys import seed_streams, untouched
from .recipes import Recipe

__all__ = ["InWorker", "Keyed"]


class Keyed:
    """A dataset of batches, asked for by recipes: it reads each sample under its own key, then collates under another.

    A dataset that reads many samples at once (`__getitems__`) does so under the key of the first of them.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, alone: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self.alone = alone
        self.at_once = not alone and _reads_at_once(dataset)

    def __getitem__(self, recipe: Recipe) -> Any:
        if get_worker_info() is not None:
            return self._batch(recipe)
        with untouched():  # a worker's streams are nobody else's
            return self._batch(recipe)

    def sample(self, recipe: Recipe, place: int) -> Any:
        """One sample of a recipe, as it is before it is collated."""
        with untouched():
            return self._all(recipe)[place] if self.at_once else self._one(recipe, place)

    def _batch(self, recipe: Recipe) -> Any:
        if self.at_once:
            samples = self._all(recipe)
        else:
            samples = [self._one(recipe, place) for place in range(len(recipe.indices))]
        seed_streams("collate", recipe.seed, recipe.epoch, recipe.batch)
        try:
            return self.collate(samples[0] if self.alone else samples)
        except Exception as error:
            error.add_note(f"collating {_span(recipe)}")
            raise

    def _one(self, recipe: Recipe, place: int) -> Any:
        position = recipe.position + place
        seed_streams("sample", recipe.seed, recipe.epoch, position)
        try:
            return self.dataset[recipe.indices[place]]
        except Exception as error:
            error.add_note(
                f"reading dataset[{recipe.indices[place]!r}]: epoch {recipe.epoch}, position {position} in it, "
                f"{_where()}. Exact.sample({recipe.epoch}, {position}) reads it again, alone and in this process."
            )
            raise

    def _all(self, recipe: Recipe) -> Any:
        seed_streams("sample", recipe.seed, recipe.epoch, recipe.position)
        try:
            return self.dataset.__getitems__(recipe.indices)
        except Exception as error:
            error.add_note(f"reading dataset.__getitems__({recipe.indices!r}): {_span(recipe)}")
            raise


class InWorker:
    """What a worker does first: it shows the user's dataset in `get_worker_info()`, then calls the user's function."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self.then is not None:
            self.then(worker)


def _reads_at_once(dataset: Any) -> bool:
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset  # a Subset always has the method, and without need
    return callable(getattr(dataset, "__getitems__", None))


def _span(recipe: Recipe) -> str:
    last = recipe.position + len(recipe.indices) - 1
    return f"batch {recipe.batch} of epoch {recipe.epoch}, positions {recipe.position} to {last}, {_where()}"


def _where() -> str:
    info = get_worker_info()
    return "in the main process" if info is None else f"in worker {info.id}"
