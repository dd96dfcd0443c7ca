"""Who may write into a run's folder: one process at a time. Every taking has a number, and the highest is in force."""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from ..core.errors import NoSuchKey, RunLocked, StoreError
from .card import CARD_LIMIT, card, locked_by, parsed, who
from .folder_lock import FolderLock

if TYPE_CHECKING:
    from ..stores import Store

__all__ = ["Owner"]

logger = logging.getLogger("loopline")

_FAREWELL_S = 5.0


class Owner:
    """The right to write into a run's folder, held by one process until it releases it or dies.

    Where the folder's file system has locks that hold, the kernel keeps it, and a process that is killed has lost it at
    once. Elsewhere the owner gives a sign of life every `beat_s` seconds, on a thread of its own.

    `fencing` says which taking of the run this is: what an owner with a lower number writes is not in force.
    """

    def __init__(
        self, store: Store, fencing: int, lock: FolderLock | None, card: bytes, *, beat_s: float, stale_s: float
    ) -> None:
        self.fencing = fencing
        self._store, self._lock, self._card = store, lock, card
        self._beat_s, self._stale_s = beat_s, stale_s
        self._pid = os.getpid()
        self._counts = itertools.count()
        self._beaten = time.monotonic()
        self._lost: str | None = None
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def take(
        cls,
        store: Store,
        *,
        about: Mapping[str, str] | None = None,
        beat_s: float = 60.0,
        patience_s: float | None = None,
        stale_s: float | None = None,
    ) -> Owner:
        """Take a run, or raise RunLocked, which names the owner.

        Where no lock holds and the last owner has not released the run, this first waits `patience_s` (two and a half
        beats) for a sign of life. An owner that could give none for `stale_s` (five beats) counts itself as lost.
        Whoever finds the run taken is told `about`, host, process and command, without their secrets.
        """
        mine = card(about or {})
        # Path.is_dir raises where it may not look
        if store.folder is not None and not os.path.isdir(store.folder):  # noqa: PTH112
            store.put(_beat(0), io.BytesIO())  # so that the folder is made as this store makes folders
        lock = None if store.folder is None else FolderLock.take(store.folder, mine)
        try:
            last = _newest(store)
            if last and not _has(store, _free(last)):
                patience_s = 2.5 * beat_s if patience_s is None else patience_s
                _succeed(store, last, patience_s, min(beat_s, patience_s / 30), locked=lock is not None)
            key = _lease(last + 1)
            # a reply that was lost can make a store deny what it has stored itself
            if not store.put_new(key, mine) and _read(store, key) != mine:
                raise locked_by(store.name, parsed(_read(store, key)))
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        owner = cls(store, last + 1, lock, mine, beat_s=beat_s, stale_s=5 * beat_s if stale_s is None else stale_s)
        try:
            owner._begin()
        except BaseException:
            owner.release()
            raise
        return owner

    @property
    def lost(self) -> bool:
        """Whether the run is known to be lost. Asks nobody, and so is for every step; before a commit, `check`."""
        return self._lost is not None

    def check(self) -> None:
        """Raise RunLocked if another process has taken the run over, or may have. Asks the store."""
        if self._lost is None:
            self._look()
        if self._lost is not None:
            raise RunLocked(self._lost)

    def release(self) -> None:
        """Let the next one take the run at once. Never raises, and may be called again."""
        if self._released.is_set() or os.getpid() != self._pid:  # a forked child does not own what its parent does
            return
        self._released.set()
        if self._thread is None:
            self._say_free()
        else:
            self._thread.join(_FAREWELL_S)
            if self._thread.is_alive():
                logger.warning("%s does not answer, and the next run in it will have to wait.", self._store.name)
        if self._lock is not None:
            self._lock.release()

    def _begin(self) -> None:
        if self._lock is None:
            self._beat()
            self._thread = threading.Thread(target=self._live, name="loopline-owner", daemon=True)
            self._thread.start()
        self.check()  # one who was slow may have put a number that others are long past
        with suppress(StoreError):
            for key, number in [found for kind in ("LEASE", "BEAT", "FREE") for found in _numbered(self._store, kind)]:
                if number < self.fencing:
                    self._store.delete(key)

    def _live(self) -> None:
        """Give signs of life until the run is released or lost, and then say that it is free."""
        failing = False
        while self._lost is None and not self._released.wait(self._beat_s):
            try:
                self._look()
                failing = False
            except Exception as error:  # noqa: BLE001 - on this thread there is nobody else to take it
                if not failing:
                    logger.warning("%s could not be told that its owner lives: %s. Trying on.", self._store.name, error)
                failing = True
        self._released.wait()
        self._say_free()

    def _look(self) -> None:
        """See whether the highest number is still one's own, and give a sign of life if one is due."""
        late_s = time.monotonic() - self._beaten if self._lock is None else 0.0
        try:
            newest = _newest(self._store)
            # a store whose put_new is not exclusive may have let another one have the same number
            found = _read(self._store, _lease(newest)) if newest else None
            if found == self._card and late_s > self._beat_s / 2:
                self._beat()  # even when it is late: one who was only suspended may go on if nobody came meanwhile
        except StoreError as error:
            if late_s <= self._stale_s:
                raise
            self._lost = (
                f"{self._store.name} could not be told for {late_s:.0f} s that its owner lives, so another process may "
                f"have taken it over: {error}. The same command goes on from the last checkpoint."
            )
            return
        if found is None:
            self._lost = (
                f"{_lease(self.fencing)} in {self._store.name} is gone, so another process may have taken it over. "
                "Never remove it by hand. The same command goes on from the last checkpoint."
            )
        elif found != self._card:
            self._lost = (
                f"{self._store.name} was taken over by {who(parsed(found))}. This process writes into it no more: two "
                "writers would mix their checkpoints."
            )

    def _beat(self) -> None:
        now = time.monotonic()
        self._store.put(_beat(self.fencing), io.BytesIO(b"%d" % next(self._counts)))
        self._beaten = now

    def _say_free(self) -> None:
        if self._lost is not None:
            return
        try:
            self._store.put_new(_free(self.fencing), b"")
            self._store.delete(_beat(self.fencing))
        except Exception as error:  # noqa: BLE001 - a run must not fail at its end because its store has died
            logger.warning("%s could not be told that it is free: %s", self._store.name, error)


def _succeed(store: Store, last: int, patience_s: float, pause_s: float, *, locked: bool) -> None:
    """Return when an owner that has not released the run is dead, or free after all; RunLocked when it lives."""
    lease = _read(store, _lease(last))
    beat = _last_beat(store, last)
    owner = who(parsed(lease))
    if not locked or beat is not None:  # its beat tells that the lock did not hold where it ran
        logger.warning("%s was taken by %s. Waiting %g s for a sign of life.", store.name, owner, patience_s)
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            time.sleep(pause_s)
            if _has(store, _free(last)):
                return
            if (newest := _newest(store)) != last or _last_beat(store, last) != beat:
                raise locked_by(store.name, parsed(_read(store, _lease(newest))))
    logger.warning("%s was not released by %s. It is dead, and the run is taken over.", store.name, owner)


def _last_beat(store: Store, number: int) -> bytes | None:
    """The last sign of life. It may be replaced while it is read, and not every store can go on reading then."""
    for _ in range(2):
        with suppress(StoreError):
            return _read(store, _beat(number))
    return _read(store, _beat(number))


def _lease(number: int) -> str:
    return f"LEASE-{number:06d}"


def _beat(number: int) -> str:
    return f"BEAT-{number:06d}"


def _free(number: int) -> str:
    return f"FREE-{number:06d}"


def _newest(store: Store) -> int:
    return max((number for _, number in _numbered(store, "LEASE")), default=0)


def _numbered(store: Store, kind: str) -> list[tuple[str, int]]:
    found = ((key, re.fullmatch(rf"{kind}-([0-9]{{6,12}})", key)) for key in store.keys(f"{kind}-"))
    return [(key, int(number[1])) for key, number in found if number]


def _has(store: Store, key: str) -> bool:
    return key in store.keys(key)


def _read(store: Store, key: str) -> bytes | None:
    try:
        with store.open(key) as stream:
            return stream.read(CARD_LIMIT)
    except NoSuchKey:
        return None
