"""The way of one checkpoint from memory to its commit, and what is removed when it is there."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..core.errors import LooplineError, NotFinite, StoreError
from .codec import Codec
from .collect import BESIDE, GLOBAL, Taken, rank_paths
from .finite import not_finite
from .keep import Best, Keep
from .manifest import Manifest, Ref
from .owner import Owner
from .shelf import Attempt, Shelf
from .staging import file_of
from .tree import dumps

__all__ = ["Flight", "tidy"]

logger = logging.getLogger("loopline")

_RANK = 0


@dataclass(slots=True)
class Flight:
    """One checkpoint on its way. When it has landed, either `ref` or `error` is there."""

    draft: Manifest
    taken: Taken
    weights: frozenset[str]
    ref: Ref | None = None
    error: BaseException | None = None
    thread: threading.Thread | None = None

    def start(self, shelf: Shelf, codec: Codec, keep: Keep, owner: Owner | None, *, asynchronous: bool) -> None:
        """Set out, on a thread of its own or here and now."""
        if asynchronous:
            self.thread = threading.Thread(
                target=self._go_quietly, args=(shelf, codec, keep, owner), name="loopline-save", daemon=True
            )
            self.thread.start()
        else:
            self._go(shelf, codec, keep, owner)

    def join(self) -> None:
        """Wait until it has landed."""
        if self.thread is not None:
            self.thread.join()

    def _go_quietly(self, *given: Any) -> None:
        """As `_go`, behind the training's threads: on Linux every thread has a priority of its own."""
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        self._go(*given)

    def _go(self, shelf: Shelf, codec: Codec, keep: Keep, owner: Owner | None) -> None:
        attempt = Attempt(shelf.store, self.draft.name, self.draft.hash)
        try:
            self._write(attempt, codec, owner)
            self.ref = replace(self.draft, files=attempt.files).ref()
        except BaseException as error:  # whoever waits for it takes it from here
            self.error = error
            logger.log(logging.ERROR, "Checkpoint %s was not written: %s", attempt.name, error, exc_info=_odd(error))
            attempt.abandon()
            return
        finally:
            self.taken = Taken()
        try:
            tidy(shelf, keep, self.draft.run_id)
        except LooplineError as error:
            logger.warning("Older checkpoints could not be removed: %s", error)

    def _write(self, attempt: Attempt, codec: Codec, owner: Owner | None) -> None:
        taken = self.taken
        if owner is not None:
            owner.check()
        if name := not_finite(self._numbers()):
            raise NotFinite(f"{name} holds NaN or infinite values at step {self.draft.step}; such a state is not kept.")
        _check_room(attempt, taken)
        codec.write(taken.sections, attempt)
        text, beside = rank_paths(_RANK)
        attempt.put_text(text, dumps(taken.mine))
        attempt.put(beside, file_of(taken.mine_small))
        attempt.put_text(GLOBAL, taken.global_text())
        attempt.put(BESIDE, file_of(taken.small))
        if owner is not None:
            owner.check()
        attempt.commit(replace(self.draft, files=attempt.files))

    def _numbers(self) -> Iterable[tuple[str, Tensor, bool]]:
        for section, tensors in self.taken.sections.items():
            for name, tensor in tensors.items():
                yield name, tensor, section == "model" and name not in self.weights


def tidy(shelf: Shelf, keep: Keep, run_id: str) -> None:
    """Remove this run's checkpoints that no policy and no pin keeps; never the newest, nor the last that is intact."""
    refs = [stored.manifest.ref() for stored in shelf.stored()[0] if stored.manifest.run_id == run_id]
    if not refs:
        return
    _pin_the_best(shelf, keep, refs)
    pinned = set(shelf.pins().values())
    kept = {ref.name for ref in keep.keep(refs)} | pinned | {refs[-1].name}
    victims = [ref for ref in refs if ref.name not in kept]
    if not victims:
        return
    if len(refs) - len(victims) == 1 and (damage := shelf.get(refs[-1].name).damage()):
        raise StoreError(f"the newest, {refs[-1].name}, is damaged ({damage}), so nothing older is removed.")
    for ref in victims:
        shelf.remove(ref.name)


def _pin_the_best(shelf: Shelf, keep: Keep, refs: list[Ref]) -> None:
    parts = getattr(keep, "parts", (keep,))
    best = next((part for part in parts if isinstance(part, Best)), None)
    ranked = best.ranked(refs) if best is not None else []
    if ranked and shelf.pins().get("best") != ranked[0].name:
        shelf.pin("best", ranked[0])


def _check_room(attempt: Attempt, taken: Taken) -> None:
    free = attempt.store.free()
    need = taken.nbytes
    if free is not None and free < need * 1.05 + 2**20:
        raise StoreError(
            f"The disk of {attempt.store.name} has {free} bytes left; checkpoint {attempt.name} needs {need}. Free "
            "some space, or keep fewer checkpoints."
        )


def _odd(error: BaseException) -> BaseException | None:
    return None if isinstance(error, LooplineError) else error
