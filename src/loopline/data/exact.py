"""A loader whose batches follow from (seed, epoch, position), whoever reads them and from wherever they are begun."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from traceback import clear_frames
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..core.errors import BadLoader, LooplineError, Mismatch
from .fingerprint import fingerprint_of
from .keyed import InWorker, Keyed
from .position import has_state
from .recipes import Recipe, recipes_of
from .workers import end_workers, lost_workers

__all__ = ["Exact", "exactly"]

logger = logging.getLogger("loopline")


class Exact:
    """A map-style DataLoader whose order and randomness are a function, so that its whole state is where it stands.

    The sample at a position of an epoch, and what its reading draws from `random`, from NumPy's and torch's global
    streams on the CPU, follow from (seed, epoch, position). The number of workers, prefetching and persistent workers
    change nothing, and no stream of this process moves. `start_at` begins anywhere without reading what lies before
    it. `for batch in loader` is the next epoch, the first one at first.

    A shuffled loader is shuffled in an order of our own; a sampler of one's own draws from streams that follow from
    (seed, epoch). What a dataset draws from generators of its own is beyond this; `check_resumable` finds it out.

    `seed=None` takes a fresh one, or that of the state that is loaded. `allow` names what may differ from a state:
    "dataset", "batch_size", "drop_last", "seed", "order".

    >>> from torch.utils.data import DataLoader
    >>> loader = Exact(DataLoader(range(10), batch_size=4, shuffle=True), seed=7)
    >>> [batch.tolist() for batch in loader]
    [[4, 0, 5, 3], [2, 8, 1, 6], [9, 7]]
    >>> [batch.tolist() for batch in loader.start_at(epoch=0, index=1)]
    [[2, 8, 1, 6], [9, 7]]
    """

    def __init__(self, loader: DataLoader[Any], seed: int | None = None, *, allow: Collection[str] = ()) -> None:
        if not isinstance(loader, DataLoader):
            raise TypeError(f"Exact({type(loader).__qualname__}): give a torch.utils.data.DataLoader.")
        if refused := _refused(loader):
            raise BadLoader(f"Exact(loader): {refused}")
        if seed is not None and type(seed) is not int:
            raise TypeError(f"Exact(seed={seed!r}): give a whole number, or None for a fresh one.")
        if isinstance(allow, str) or not set(allow) <= set(_FIELDS):
            raise ValueError(f"Exact(allow={allow!r}): give a list of names out of {', '.join(_FIELDS)}.")
        self.loader = loader
        self.seed = random.SystemRandom().getrandbits(63) if seed is None else seed
        self.allow = frozenset(allow)
        self.next_epoch = 0
        self._seed_is_given = seed is not None
        self._recipes = recipes_of(loader)
        self._entry = _Entry()
        self._keyed = Keyed(loader.dataset, loader.collate_fn, alone=loader.batch_sampler is None)
        self._inner = self._new_inner()
        self._fingerprint: str | None = None
        self._pass: object = None

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def batch_size(self) -> int | None:
        return self._recipes.batch_size

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self.start_at(self.next_epoch, 0)

    def start_at(self, epoch: int, index: int) -> Iterator[Any]:
        """The batches of an epoch from the one at `index` on."""
        if epoch < 0 or index < 0:
            raise ValueError(f"start_at({epoch}, {index}): epochs and batches are counted from 0.")
        self.next_epoch = epoch + 1
        return _Pass(self, epoch, index)

    def sample(self, epoch: int, position: int) -> Any:
        """Read one sample again, alone and in this process, as it was read then: for looking into an error."""
        recipe = self._recipes.containing(self.seed, epoch, position) if position >= 0 else None
        if recipe is None:
            raise IndexError(f"sample({epoch}, {position}): no batch of the epoch has a sample at that position.")
        return self._keyed.sample(recipe, position - recipe.position)

    def state_dict(self) -> dict[str, Any]:
        """What must be the same where a run goes on. Where it stands is not in it: that is for `start_at`."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self.dataset)
        return {
            "dataset": {
                "class": type(self.dataset).__qualname__,
                "length": len(self.dataset),
                "fingerprint": self._fingerprint,
            },
            "batch_size": self.batch_size,
            "drop_last": self._recipes.drop_last,
            "seed": self.seed,
            "order": self._recipes.name,
            "first": self._recipes.first(self.seed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the seed if none was given; refuse a state of other data, or of another order, by Mismatch."""
        if missing := [name for name in (*_FIELDS, "first") if name not in state]:
            raise Mismatch(f"This is not the state of an Exact loader: it has no {', '.join(missing)}.")
        then, now = _facts(state), _facts(self.state_dict())
        if not self._seed_is_given:
            now["seed"] = then["seed"]
        for fact, value in then.items():
            if now[fact] != value:
                self._differs(fact, value, now[fact])
        alike = all(then[fact] == now[fact] for fact in _SHAPING)
        if alike and state["first"] is not None and "order" not in self.allow:
            self._recipes.expect(now["seed"], list(state["first"]))
        self.seed = now["seed"]

    def _differs(self, fact: str, then: object, now: object) -> None:
        name = fact.split()[0]
        said = f"{fact} was {then!r} when the state was saved and is {now!r} now."
        if name not in self.allow:
            raise Mismatch(f"{said} Give the data as it was, or allow it by name: allow=[{name!r}].")
        logger.warning("%s It is allowed, so training goes on with other data than it would have.", said)

    def _new_inner(self) -> DataLoader[Any]:
        loader = self.loader
        return DataLoader(
            self._keyed,  # type: ignore[arg-type]  # of a Dataset only __getitem__ is asked for
            batch_size=None,
            sampler=self._entry,
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            pin_memory=loader.pin_memory,
            pin_memory_device=loader.pin_memory_device,
            timeout=loader.timeout,
            worker_init_fn=InWorker(loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator(),  # else beginning a pass draws from the global stream
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def __repr__(self) -> str:
        return f"Exact({type(self.dataset).__qualname__} of {len(self.dataset)}, seed={self.seed})"


def exactly(loader: Any, seed: int | None = None, *, allow: Collection[str] = ()) -> Any:
    """The loader as one that can be begun anywhere, if it is not yet and can be made so; else as it is, with a note."""
    if hasattr(type(loader), "start_at") or has_state(loader) or isinstance(loader, Sequence):
        return loader
    refused = _refused(loader) if isinstance(loader, DataLoader) else f"{type(loader).__qualname__} has no position."
    if refused is None:
        return Exact(loader, seed, allow=set(allow) & set(_FIELDS))  # others name what is no loader's business
    logger.warning(
        "A run that goes on inside an epoch will read the batches before that place once more, and randomness in its "
        "data will not be that of the uninterrupted run: %s",
        refused,
    )
    return loader


_FIELDS = ("dataset", "batch_size", "drop_last", "seed", "order")
_SHAPING = ("dataset length", "batch_size", "drop_last", "seed", "order")


def _facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state's comparable parts, by the words in which a difference is told; each begins with its field's name."""
    dataset = state["dataset"]
    facts = {f"dataset {part}": dataset.get(part) for part in ("class", "length", "fingerprint")}
    return facts | {name: state[name] for name in _FIELDS[1:]}


def _refused(loader: DataLoader[Any]) -> str | None:
    """Why a loader cannot be made exact, if it cannot."""
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"{type(loader.dataset).__qualname__} is an IterableDataset, whose samples have no positions. Give a "
            "dataset with __getitem__ and __len__, or a loader that keeps its own place: with state_dict and "
            "load_state_dict, or with start_at(epoch, index)."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        return (
            f"{type(loader).__qualname__} makes its batches in a way of its own (it has an __iter__). Give the plain "
            "DataLoader, or let it have state_dict and load_state_dict, or start_at(epoch, index)."
        )
    return None


def _as_it_is(batch: Any) -> Any:
    return batch


class _Entry:
    """The sampler of the inner loader: whatever pass is begun finds its recipes here."""

    recipes: Iterator[Recipe] = iter(())

    def __iter__(self) -> Iterator[Recipe]:
        return self.recipes


class _Pass(Iterator[Any]):
    """The batches of an epoch, handed out; what goes wrong with the workers is told with the place in the epoch."""

    def __init__(self, exact: Exact, epoch: int, index: int) -> None:
        self.exact = exact
        self.epoch = epoch
        self.index = index
        self.waiting: deque[Recipe] = deque()
        exact._pass = self.mark = object()
        exact._entry.recipes = _noted(exact._recipes.recipes(exact.seed, epoch, index), self.waiting)
        self.batches: Iterator[Any] = iter(())
        try:
            self.batches = iter(exact._inner)
        except Exception as error:
            self._explain(error)
            raise

    def __next__(self) -> Any:
        exact = self.exact
        if exact._pass is not self.mark and exact._inner.persistent_workers:
            raise LooplineError(
                f"Another pass over this loader was begun, so that of epoch {self.epoch} cannot go on: with "
                "persistent_workers=True all passes share their workers. Finish one before the next is begun."
            )
        try:
            batch = next(self.batches)
        except StopIteration:
            raise
        except Exception as error:
            try:
                only_a_sample = not self._explain(error)
            except RuntimeError:  # torch's, of the signal that tells of a dead worker: it may come a moment later
                only_a_sample = not self._explain(error)
            if only_a_sample:
                self._count()  # who wants to goes on with the next batch
            if exact._inner.num_workers:
                clear_frames(error.__traceback__)  # a frame of torch's keeps the error, and so itself and the workers
            raise
        self._count()
        return batch

    def _count(self) -> None:
        self.index += 1
        if self.waiting:
            self.waiting.popleft()

    def _explain(self, error: Exception) -> bool:
        """Whether workers were lost, and not only a sample; if so it is told where, and no pass is given them again."""
        exact = self.exact
        if not exact._inner.num_workers or not lost_workers(error):
            return False
        end_workers(self.batches)
        place = f", position {self.waiting[0].position} in it" if self.waiting else ""
        workers, ahead = exact._inner.num_workers, exact._inner.prefetch_factor or 0
        error.add_note(
            f"waiting for batch {self.index} of epoch {self.epoch}{place}. A worker that was killed was short of "
            f"memory or of shared memory (/dev/shm), as a rule: num_workers={workers} and prefetch_factor={ahead} hold "
            f"{workers * ahead} batches; lower one of them. One that hangs waits for its data, or for a lock."
        )
        exact._inner = exact._new_inner()
        return True


def _noted(recipes: Iterator[Recipe], waiting: deque[Recipe]) -> Iterator[Recipe]:
    for recipe in recipes:
        waiting.append(recipe)
        yield recipe
