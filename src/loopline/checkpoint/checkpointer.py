"""Takes checkpoints of a run, gives a run the newest intact one back, and keeps those that are wanted."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable
from dataclasses import astuple, replace
from functools import partial
from io import BytesIO
from os import PathLike
from typing import Any, Literal

from ..core.binding import Binding
from ..core.errors import Damaged, LooplineError, NoIntactCheckpoint, NotFinite, RunLocked, SaveFailed
from ..core.event import EPOCH_END, LOADED, SAVING, SETUP, STEP_END, TEARDOWN, TRAIN_END
from ..core.progress import Progress
from ..core.run import Run
from ..core.when import Every, Watch, When
from ..stores import Store, store_of
from .codec import Codec, Whole
from .collect import Loaded, known_metrics, load, take, weights_of
from .identity import identify, named_in, now, versions
from .keep import Keep, Latest
from .manifest import HASHES, Manifest, Ref
from .owner import Owner
from .restore import put_back
from .saving import Flight
from .shelf import Shelf, Stored
from .staging import Stage

__all__ = ["Checkpointer"]

logger = logging.getLogger("loopline")

_LAST = 1_000_000


class Checkpointer:
    """Keeps a run's checkpoints in a folder or bucket; `Trainer(checkpoint=...)` attaches one.

    A checkpoint is taken at the next safe point when `when` is due, when `run.save()` was called, when the run stops,
    and when training ends. The training waits while the state is copied; the rest happens on a thread, one checkpoint
    at a time. It exists from the moment that its manifest is there, with a hash of every file.

    At SETUP the newest intact checkpoint is restored, if there is one: `run.resume` says whether it may ("auto"),
    must ("must") or must not ("never") be. Damaged ones are set aside, and the next older is taken.

    `keep` says which checkpoints stay; the newest and pinned ones stay in any case. `allow` names differences that do
    not keep a checkpoint from being restored: "model", "optimizer", "schedulers", "seed", "accumulate", and what a
    loader checks, such as "dataset". After `max_failed_saves` failures in a row the run ends with SaveFailed.
    """

    def __init__(
        self,
        store: Store | str | PathLike[str],
        *,
        when: When = Every(epochs=1),
        keep: Keep = Latest(2),
        codec: Codec | None = None,
        asynchronous: bool = True,
        verify: Literal["hash", "size"] = "hash",
        checksums: str = "xxh3_128",
        max_failed_saves: int = 3,
        allow: Collection[str] = (),
    ) -> None:
        if not isinstance(when, When):
            raise TypeError(f"Checkpointer(when={when!r}): say when, for example Every(epochs=1).")
        if not isinstance(keep, Keep):
            raise TypeError(
                f"Checkpointer(keep={keep!r}): say what stays, for example Latest(2) | Best(1, 'val/loss')."
            )
        if verify not in ("hash", "size"):
            raise ValueError(f"Checkpointer(verify={verify!r}): give 'hash' or 'size'.")
        if checksums not in HASHES:
            raise ValueError(f"Checkpointer(checksums={checksums!r}): it can be {' or '.join(map(repr, HASHES))}.")
        if type(max_failed_saves) is not int or max_failed_saves < 1:
            raise ValueError(f"Checkpointer(max_failed_saves={max_failed_saves!r}): give a whole number, 1 or more.")
        if isinstance(allow, str):
            raise TypeError(f"Checkpointer(allow={allow!r}): give a list of names, such as allow=[{allow!r}].")
        self.store = store_of(store)
        self.shelf = Shelf(self.store)
        self.when, self.keep, self.codec = when, keep, codec or Whole()
        self.asynchronous, self.verify, self.checksums = asynchronous, verify, checksums
        self.max_failed_saves, self.allow = max_failed_saves, frozenset(allow)
        self.last: Ref | None = None
        self._due: Watch = when.watch()
        self._stage = Stage()
        self._owner: Owner | None = None
        self._run_id = ""
        self._flight: Flight | None = None
        self._failures = 0
        self._failed: BaseException | None = None
        self._saved_at: tuple[Any, ...] | None = None

    def bindings(self, run: Run) -> Iterable[Binding]:
        """Last at SETUP, so that every part is there, and first at the end, before weights are exchanged."""
        bound = partial(Binding, owner=self)
        yield bound(SETUP, self._setup, order=_LAST)
        if "steps" in self.when.units:
            yield bound(STEP_END, self._step_end)
        if "epochs" in self.when.units:
            yield bound(EPOCH_END, self._epoch_end)
        yield bound(TRAIN_END, self._train_end, order=-_LAST)
        yield bound(TEARDOWN, self._teardown, order=_LAST)

    def save(self, run: Run, reason: str = "asked for") -> Ref | None:
        """Take a checkpoint of a run that is at a safe point; `run.save()` asks for one at the next.

        Gives the newest that is committed, which an asynchronous save is not yet: `wait` waits for it.
        """
        self._settle()
        position = astuple(run.progress)
        if position != self._saved_at:
            run.emit(SAVING)
            taken = take(run)
            copied = taken.staged(self._stage) if self.asynchronous else taken.on_cpu()
            flight = Flight(self._draft(run, reason), copied, weights_of(run))
            self._flight, self._saved_at = flight, position
            flight.start(self.shelf, self.codec, self.keep, self._owner, asynchronous=self.asynchronous)
            if not self.asynchronous:
                self._settle()
        return self.last

    def wait(self) -> Ref | None:
        """Wait until the checkpoint that is being written is committed; the newest one that is."""
        self._settle()
        return self.last

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._flight is not None and self._flight.thread is not None and self._flight.thread.is_alive()

    def latest(self) -> Ref | None:
        """The newest checkpoint that is committed and intact: every file is read and compared."""
        for stored in reversed(self._of_this_run()):
            if (damage := self._checked(stored).damage()) is None:
                return stored.manifest.ref()
            logger.warning("Checkpoint %s is damaged: %s.", stored.manifest.name, damage)
        return None

    def restore(self, run: Run, ref: Ref | str, *, only: Collection[str] = ()) -> None:
        """Give a run the state of a checkpoint, or some sections of it: `only=["model"]` loads the weights alone."""
        stored = self._checked(self.shelf.get(ref if isinstance(ref, str) else ref.name))
        put_back(run, load(stored, self.codec, run.comm.rank), only=only, allow=self.allow)
        run.emit(LOADED)

    def pin(self, label: str, ref: Ref) -> None:
        """Keep a checkpoint under a label, whatever `keep` says of it."""
        self.shelf.pin(label, ref)

    def _setup(self, run: Run) -> None:
        if run.comm.world_size > 1:
            raise LooplineError("A Checkpointer serves runs of one process; this one has several.")
        self._due, self._failures, self._failed, self._saved_at = self.when.watch(), 0, None, None
        self._probe()
        self._owner = Owner.take(self.store)
        self.store.sweep()
        for name in self.shelf.sweep():
            logger.info("Checkpoint %s was begun and never finished; it is removed.", name)
        anew = run.resume == "never" and bool(self.shelf.committed())
        self._run_id = identify(self.shelf, anew=anew)
        self.last = next((stored.manifest.ref() for stored in reversed(self._of_this_run())), None)
        run.saver = self.save
        take(run)  # what cannot be kept is said now, not after the first epoch
        if run.progress == Progress() and run.resume != "never":
            self._resume(run)

    def _resume(self, run: Run) -> None:
        """Restore the newest checkpoint that is whole; it is an error if there are some, and none is."""
        found, damaged = self._newest(run)
        if found is None:
            if damaged:
                raise NoIntactCheckpoint(
                    f"None of the {len(damaged)} checkpoints in {self.store.name} can be loaded: {' '.join(damaged)} "
                    "Bring one back from a copy, or begin anew with resume='never'."
                )
            if run.resume == "must":
                raise NoIntactCheckpoint(
                    f"resume='must', and there is no checkpoint in {self.store.name}. Is the folder the right one?"
                )
            return
        stored, loaded = found
        put_back(run, loaded, allow=self.allow)
        self.last = stored.manifest.ref()
        self._saved_at = astuple(run.progress)
        run.emit(LOADED)
        logger.info(
            "Going on from checkpoint %s in %s: epoch %d, step %d.",
            stored.manifest.name,
            self.store.name,
            run.progress.epochs,
            run.progress.steps,
        )

    def _newest(self, run: Run) -> tuple[tuple[Stored, Loaded] | None, list[str]]:
        """The newest that is whole, and what is wrong with those that are not."""
        stored, unreadable = self.shelf.stored()
        damaged = {name: str(error) for name, error in unreadable.items()}
        for candidate in reversed([s for s in stored if s.manifest.run_id == self._run_id]):
            try:
                found = candidate, load(self._checked(candidate), self.codec, run.comm.rank)
            except Damaged as error:
                damaged[candidate.manifest.name] = str(error)
                continue
            for name, why in damaged.items():  # not if none is whole: the next start must find them, too
                self.shelf.set_aside(name, why)
            return found, []
        return None, list(damaged.values())

    def _step_end(self, run: Run) -> None:
        if self._due("steps", run.step + 1):
            run.save("due")

    def _epoch_end(self, run: Run) -> None:
        if self._due("epochs", run.epoch + 1):
            run.save("due")

    def _train_end(self, run: Run) -> None:
        """The end is saved, too, unless nothing is ever to be, and what is being written is waited for."""
        if self.when.units and run.status in ("completed", "stopped") and not run.mid_step:
            self.save(run, "the end of training")
        self._settle()
        if self._failed is not None:
            raise SaveFailed(
                f"The last checkpoint could not be written to {self.store.name}: {self._failed}"
            ) from self._failed

    def _teardown(self, run: Run) -> None:
        try:
            if self._flight is not None:
                self._flight.join()
        finally:
            self._flight = None
            if self._owner is not None:
                self._owner.release()
            self._owner = None

    def _draft(self, run: Run, reason: str) -> Manifest:
        """The manifest of a checkpoint that is about to be written; its files are not known yet."""
        progress, last = run.progress, self.last
        fencing = self._owner.fencing if self._owner else 0
        return Manifest(
            run_id=self._run_id,
            name=f"{progress.steps:012d}-{secrets.token_hex(4)}",
            parent=last.name if last else None,
            serial=last.serial + 1 if last else 1,
            fencing=max(fencing, last.fencing if last else 0),
            step=progress.steps,
            epochs=progress.epochs,
            samples=progress.samples,
            world_size=run.comm.world_size,
            codec=self.codec.name,
            hash=self.checksums,
            files={},
            metrics=known_metrics(run),
            versions=versions(),
            reason=reason,
            created=now(),
        )

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written, and answer for it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        flight.join()
        if flight.ref is not None:
            self.last, self._failures, self._failed = flight.ref, 0, None
            return
        self._failures, self._failed = self._failures + 1, flight.error
        self._saved_at = None
        if isinstance(flight.error, RunLocked) or not isinstance(flight.error, LooplineError | OSError):
            raise flight.error  # type: ignore[misc]  # one of the two is there
        if self._failures >= self.max_failed_saves:
            kind = NotFinite if isinstance(flight.error, NotFinite) else SaveFailed
            raise kind(
                f"{self._failures} checkpoints in a row could not be written to {self.store.name}: {flight.error}"
            ) from flight.error

    def _of_this_run(self) -> list[Stored]:
        """The checkpoints of the run in force, oldest first. Nothing is written to find that out."""
        found = self.shelf.stored()[0]
        run_id = self._run_id or named_in(self.store) or (found[-1].manifest.run_id if found else "")
        return [stored for stored in found if stored.manifest.run_id == run_id]

    def _checked(self, stored: Stored) -> Stored:
        return replace(stored, verify=self.verify == "hash")

    def _probe(self) -> None:
        """Find out before the first batch that nothing can be written, and not after the first epoch."""
        key = f"PROBE-{secrets.token_hex(4)}"
        self.store.put(key, BytesIO(b"loopline"))
        self.store.delete(key)
