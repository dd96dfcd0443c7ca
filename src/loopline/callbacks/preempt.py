"""Leaving in good order when a scheduler, or somebody at the keyboard, wants the process to end."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable
from math import inf
from pathlib import Path
from signal import SIGINT, SIGTERM, SIGUSR1
from types import FrameType
from typing import Any

from ..core.callback import Callback
from ..core.errors import LooplineError
from ..core.run import Run

__all__ = ["Preempt"]

logger = logging.getLogger("loopline")

_CLOSING_S = 4.5  # whoever presses Ctrl-C twice waits five seconds; the stacks take the rest
_TELLING_S = 2.0
_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")


class Preempt(Callback):
    """Ends the run at the next safe point when a signal comes, so that it is saved; the process leaves with 128 + n.

    That is at the end of the step in hand. An evaluation is given up after its batch in hand, and done anew by the run
    that goes on. Then `loop.fit` and `Trainer.fit` raise `Preempted`, a SystemExit: 143 for SIGTERM, 138 for SIGUSR1,
    130 for SIGINT, and never 0.

    A second SIGINT raises KeyboardInterrupt at once: nothing is saved, and what is left to do at EXCEPTION and
    TEARDOWN has 5 seconds. A third one ends the process. An interactive session is not ended by any number of them.

    `grace_s` is how long the process has to live after the first signal. Where half of it goes by without a safe
    point, or all of it before TEARDOWN is over, the stacks of all threads are written to stderr, and to the file
    `stacks` if one is named, and the process is ended: what is saved by then is intact. Choose it shorter than the
    time that the scheduler gives, and longer than two steps.

    Signals reach the main thread alone. A run on another one is not watched; there `run.stop(reason)` is the way.
    """

    order = -(10**6)  # the first to be set up is the last to be torn down

    def __init__(
        self,
        signals: Iterable[int] = (SIGTERM, SIGUSR1, SIGINT),
        *,
        grace_s: float = 25.0,
        stacks: str | os.PathLike[str] | None = None,
    ) -> None:
        self.signals = tuple(map(_checked, [signals] if isinstance(signals, int) else signals))
        if not self.signals:
            raise ValueError("Preempt(signals=()) watches nothing; name a signal, such as signal.SIGTERM.")
        if isinstance(grace_s, bool) or not isinstance(grace_s, int | float) or not grace_s > 0:
            raise ValueError(f"Preempt(grace_s={grace_s!r}): give a number of seconds above 0.")
        self.grace_s = grace_s
        self.stacks = None if stacks is None else Path(stacks)
        self._watch: _Watch | None = None

    def on_setup(self, run: Run) -> None:
        """Begin to watch."""
        if threading.current_thread() is not threading.main_thread():
            logger.info("Preempt watches no signals: only the main thread gets any. run.stop(reason) ends this run.")
            return
        if self._watch is not None:
            raise LooplineError("This Preempt already watches a run; give the run inside it one of its own.")
        self._watch = _Watch(run, self.signals)
        self._watch.begin(self.grace_s, self.stacks)

    def on_teardown(self, run: Run) -> None:
        """Put everything back."""
        if self._watch is not None and self._watch.run is run:
            watch, self._watch = self._watch, None
            watch.end()


class _Watch:
    """The handlers of one run, and those that they stand in for."""

    def __init__(self, run: Run, signals: Iterable[signal.Signals]) -> None:
        self.run = run
        self._names = {int(number): number.name for number in signals}
        self._before: dict[int, Any] = {}
        self._interactive = hasattr(sys, "ps1")
        self._interrupts = 0
        self._over = False
        self._clock: _Clock | None = None

    def begin(self, grace_s: float, stacks: Path | None) -> None:
        in_child = weakref.WeakMethod(self._in_child)
        os.register_at_fork(after_in_child=lambda: (method := in_child()) and method())
        deadly = {number for number in self._names if not (number == SIGINT and self._interactive)}
        self._clock = _Clock(self.run, deadly, grace_s, stacks)
        for number in self._names:
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._heard)

    def end(self) -> None:
        for number in self._before:
            self._put_back(number)
        self._over = True
        if self._clock is not None:
            self._clock.stop()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """The handler. It comes between any two instructions, so nothing in here may wait for anything."""
        at_once = False
        if not self._over:
            run = self.run
            if run.interrupted is None:
                run.interrupted = number
                run.requests.stop = self._names[number]
            if number == SIGINT:
                self._interrupts += 1
                if self._interrupts > 2 and not self._interactive:
                    os._exit(128 + SIGINT)
                at_once = self._interrupts > 1 and run._open  # what TEARDOWN does is not cut off
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        if at_once:
            raise KeyboardInterrupt

    def _put_back(self, number: int) -> None:
        if signal.getsignal(number) == self._heard:  # else somebody came after, and stays
            before = self._before[number]
            # None stands for a handler that is not Python's; nobody can put that back
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _in_child(self) -> None:
        """In a fork of the process nothing is watched; what is sent to all of them is left to the parent."""
        if self._over or self._clock is None:
            return
        self._over = True
        self._clock.forget()
        if SIGTERM in self._before:
            self._put_back(SIGTERM)  # Process.terminate() sends it
            if _loads_data() and hasattr(signal, "sigwaitinfo"):
                signal.pthread_sigmask(signal.SIG_BLOCK, {SIGTERM})
                threading.Thread(target=_wait_for_parent, name="loopline-preempt", daemon=True).start()


class _Clock:
    """A thread that signals wake, even where the main thread is busy outside of Python; it ends the process in time."""

    def __init__(self, run: Run, signals: Iterable[int], grace_s: float, stacks: Path | None) -> None:
        self._run = run
        self._signals = frozenset(signals)
        self._grace_s = grace_s
        self._stacks = stacks
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._tick, name="loopline-preempt", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.forget()
        self._theirs.shutdown(socket.SHUT_RDWR)  # closing is not enough where a fork holds it open
        self._thread.join()
        self._theirs.close()
        self._ours.close()

    def forget(self) -> None:
        """Let signals wake whom they woke before."""
        now = signal.set_wakeup_fd(-1)
        if now != self._theirs.fileno():
            signal.set_wakeup_fd(now)  # somebody came after, and stays
        elif self._before != -1:
            with contextlib.suppress(OSError, ValueError):  # closed in the meantime
                signal.set_wakeup_fd(self._before)

    def _tick(self) -> None:
        first = steps = interrupts = 0
        half = end = closing = inf
        while heard := self._hear(min(half, end, closing)):
            now = time.monotonic()
            watched = [number for number in heard if number in self._signals]
            if watched and not first:
                first, steps = watched[0], self._run.progress.steps
                half, end = now + self._grace_s / 2, now + self._grace_s
            interrupts += watched.count(SIGINT)
            if interrupts > 2:
                os._exit(128 + SIGINT)
            if interrupts > 1 and closing == inf:
                closing = now + _CLOSING_S
            if now >= closing:
                self._leave(SIGINT, f"the run was not over {_CLOSING_S:g} s after the second SIGINT")
            if now >= end:
                self._leave(first, f"the run was not over {self._grace_s:g} s after the signal")
            if now >= half:
                if not self._is_on_its_way_out(steps):
                    self._leave(first, f"no safe point came within {self._grace_s / 2:g} s of the signal")
                half = inf

    def _hear(self, until: float) -> bytes:
        """The numbers of the next signals, or a 0 if none comes in time; nothing at all once the clock is stopped."""
        self._ours.settimeout(None if until == inf else max(0.001, until - time.monotonic()))
        try:
            heard = self._ours.recv(256)
        except TimeoutError:
            return b"\0"
        if heard and self._before != -1:
            with contextlib.suppress(OSError):  # full, and so awake already; or closed
                os.write(self._before, heard)
        return heard

    def _is_on_its_way_out(self, steps: int) -> bool:
        run = self._run
        return run._answering or run.ending or run.status != "running" or run.progress.steps != steps

    def _leave(self, number: int, why: str) -> None:
        """End the process, whatever it is doing; a pipe that nobody empties does not hold that up."""
        code = 128 + number
        said = f"loopline: {why}; leaving with exit code {code}. What is saved is intact. The stacks of all threads:\n"
        teller = threading.Thread(target=_tell, args=[said, self._stacks], daemon=True)
        try:
            teller.start()
            teller.join(_TELLING_S)
        finally:
            os._exit(code)


def _tell(said: str, stacks: Path | None) -> None:
    """By way of a file: faulthandler lets nobody else go on while it waits for a full pipe."""
    with tempfile.TemporaryFile() as file:
        file.write(said.encode())
        file.flush()
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read()
    if stacks is not None:
        with contextlib.suppress(OSError):
            stacks.write_bytes(text)
    with contextlib.suppress(OSError):
        os.write(2, text)


def _loads_data() -> bool:
    """Whether this process was forked a moment ago by a DataLoader, to be its worker."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") not in _LOADERS:
        frame = frame.f_back
    return frame is not None


def _wait_for_parent() -> None:
    """In a loader's worker: end when the parent says so. torch would end it as well when a scheduler tells everybody,
    and the parent would fail in the middle of the step that it is about to save."""
    while signal.sigwaitinfo({SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _checked(number: int) -> signal.Signals:
    try:
        known = signal.Signals(number)
    except ValueError as error:
        raise ValueError(f"Preempt(signals=...): {number!r} is no signal. Name some such as signal.SIGTERM.") from error
    if known in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"Preempt(signals=...): nobody is told of {known.name}, so it cannot be watched.")
    return known
