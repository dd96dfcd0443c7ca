"""The thread between a run and its sinks, and what becomes of a sink that fails."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .base import Record, Sink

if TYPE_CHECKING:
    from ..core.run import Run

__all__ = ["Writer"]

logger = logging.getLogger("loopline")

_TRIES = 3


class Writer:
    """One thread that feeds all sinks of a run, in the order in which things were put.

    Only `flush` and `close` wait, and no longer than they are told to.
    """

    def __init__(self, sinks: Sequence[Sink], *, capacity: int) -> None:
        self._channels = {id(sink): _Channel(sink) for sink in sinks}
        self._capacity = capacity
        self._change = threading.Condition()
        # two queues, so that the oldest step record is found at once; `order` says which of them is next
        self._steps: deque[tuple[int, Record, Sequence[Sink]]] = deque()
        self._others: deque[tuple[int, Record | Callable[[], None], Sequence[Sink]]] = deque()
        self._order = itertools.count()
        self._closing = False
        self._abandoned = False
        self._busy: _Channel | None = None
        self._in_hand = 0
        self._flushed = threading.Event()
        self._flushed.set()
        self._thread = threading.Thread(target=self._work, name="loopline-sinks", daemon=True)
        self._thread.start()

    def open(self, run: Run, start: int | None, *, resumed: bool) -> None:
        """Open every sink; if the run is `resumed`, from the step `start`."""

        def open_all() -> None:
            for channel in self._channels.values():
                channel.opener = lambda sink: _open(sink, run, start, resumed)
                self._try(channel, "open", channel.ensure_open)

        self._add(open_all)

    def put(self, record: Record, sinks: Sequence[Sink]) -> None:
        """Pass a record on to some of the sinks. Where too many step records wait, the oldest is dropped."""
        if record.kind != "step":
            self._add(record, sinks)
            return
        with self._change:
            if len(self._steps) >= self._capacity:
                _, _, meant_for = self._steps.popleft()
                for sink in meant_for:
                    self._channels[id(sink)].dropped += 1
            self._steps.append((next(self._order), record, sinks))
            self._change.notify()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put is written; say whether it is. While an earlier flush hangs, nothing waits."""
        if not self._flushed.is_set():
            return False
        flushed = self._flushed = threading.Event()

        def flush_all() -> None:
            for channel in self._channels.values():
                if channel.is_open and not channel.resting:
                    self._try(channel, "flush", channel.sink.flush)
            flushed.set()

        self._add(flush_all)
        return flushed.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what waits, close the sinks, end the thread; after the deadline leave it, and say what was left."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._change:
                self._abandoned = True
                left = [item for _, item, _ in (*self._steps, *self._others) if not callable(item)]
                busy = self._busy
                count = len(left) + self._in_hand
            logger.warning(
                "%r was not done within %g s at the end of the run: %d records were not written.",
                busy.sink if busy is not None else "A sink",
                timeout_s,
                count,
            )
        for channel in self._channels.values():
            if channel.dropped:
                logger.warning("%r was too slow: %d step records were dropped.", channel.sink, channel.dropped)
            if channel.lost:
                logger.warning("%r failed: %d records were not written to it.", channel.sink, channel.lost)

    def errors(self) -> list[BaseException]:
        """The first failure of each sink that failed."""
        return [channel.error for channel in self._channels.values() if channel.error is not None]

    def _add(self, item: Record | Callable[[], None], sinks: Sequence[Sink] = ()) -> None:
        with self._change:
            self._others.append((next(self._order), item, sinks))
            self._change.notify()

    def _work(self) -> None:
        while (next_item := self._next()) is not None:
            item, sinks = next_item
            if callable(item):
                item()
            else:
                for sink in sinks:
                    self._write(self._channels[id(sink)], item)
            self._in_hand = 0
        for channel in self._channels.values():
            if channel.is_open:
                self._try(channel, "flush", channel.sink.flush)
                self._try(channel, "close", channel.sink.close)

    def _next(self) -> tuple[Any, Sequence[Sink]] | None:
        with self._change:
            while not (self._steps or self._others or self._closing):
                self._change.wait()
            if self._abandoned or not (self._steps or self._others):
                return None
            queue: deque[Any] = self._steps if self._steps else self._others
            if self._steps and self._others and self._others[0][0] < self._steps[0][0]:
                queue = self._others
            _, item, sinks = queue.popleft()
            self._in_hand = 0 if callable(item) else 1
            return item, sinks

    def _write(self, channel: _Channel, record: Record) -> None:
        if channel.off or (channel.resting and record.kind == "step"):
            channel.lost += 1
            return

        def write() -> None:
            channel.ensure_open()
            channel.sink.write(record)

        if self._try(channel, "write", write):
            channel.resting, channel.in_a_row = False, 0
        else:
            channel.lost += 1

    def _try(self, channel: _Channel, doing: str, action: Callable[[], None]) -> bool:
        if self._abandoned:
            return False
        self._busy = channel
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - on this thread there is nobody else to take it
            channel.failed(doing, error)
            return False
        else:
            return True
        finally:
            self._busy = None


@dataclass(slots=True)
class _Channel:
    """One sink and how it is doing. Resting means: not asked until the next epoch record."""

    sink: Sink
    opener: Callable[[Sink], None] | None = None
    is_open: bool = False
    resting: bool = False
    in_a_row: int = 0
    warned: bool = False
    error: BaseException | None = None
    dropped: int = 0
    lost: int = 0

    @property
    def off(self) -> bool:
        return self.in_a_row >= _TRIES

    def ensure_open(self) -> None:
        if not self.is_open and self.opener is not None:
            self.opener(self.sink)
            self.is_open = True

    def failed(self, doing: str, error: BaseException) -> None:
        self.error = self.error or error
        self.in_a_row += 1
        self.resting = True
        if self.off:
            then = f"It failed {_TRIES} times in a row and is switched off for the rest of this run."
        elif self.warned:
            return
        else:
            then = "It is left alone until the next epoch record; training goes on."
        first = None if self.warned else error
        self.warned = True
        logger.warning(
            "%r failed to %s: %s: %s. %s", self.sink, doing, type(error).__name__, error, then, exc_info=first
        )


def _open(sink: Sink, run: Run, start: int | None, resumed: bool) -> None:
    if resumed:
        sink.resume_from(start)
    sink.open(run)
