"""How long a call may take: ending one that hangs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

__all__ = ["TookTooLong", "within"]

_HAS_ALARM = hasattr(signal, "setitimer")


class TookTooLong(BaseException):
    """Raised in the middle of a call whose time is up; no Exception, so that a retry loop does not swallow it."""


def within(limit_s: float, function: Callable[..., object], /, *given: object, **named: object) -> None:
    """Call a function; once it has taken so many seconds, end it and raise TimeoutError.

    What ends is what Ctrl-C would end: sleeping, computing in Python, waiting for a socket or a lock. A computation
    outside of Python is waited for, and a function that catches everything is asked again every `limit_s` seconds.
    There is no limit outside of the main thread, nor where a system has no alarm signal. An alarm that somebody else
    has set is put off until the function is over.
    """
    if not _HAS_ALARM or threading.current_thread() is not threading.main_thread():
        function(*given, **named)
        return
    theirs = signal.getsignal(signal.SIGALRM)
    if theirs is None:  # set by something that is not Python, which could not be given back
        function(*given, **named)
        return
    counting, rang = True, False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rang
        if counting and not _in_debugger(frame):
            rang = True
            raise TookTooLong

    began = time.monotonic()
    wait_s, every_s = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
        function(*given, **named)
        if rang:  # it took the alarm for an error of its own
            raise TookTooLong
    except TookTooLong as cut:
        counting = False  # before anything that could be interrupted
        raise TimeoutError(
            f"took longer than {limit_s:g} s and was cut off; to lift the limit, set careful = True on the observer"
        ) from cut
    finally:
        counting = False
        if signal.getsignal(signal.SIGALRM) is ring:  # else the function keeps an alarm of its own
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, theirs)
            if wait_s:
                left_s = wait_s - (time.monotonic() - began)
                signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-6), every_s)


def _in_debugger(frame: FrameType | None) -> bool:
    """Whether somebody is stepping through the code, which takes its time."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "bdb":
            return True
        frame = frame.f_back
    return False
