"""Every error that loopline raises.

LooplineError
├── AttachError            a listener cannot be attached
│   ├── NotAListener       an object with no bindings, of no known dialect
│   ├── UnknownHook        a method named on_..., which no event calls
│   ├── BadHandler         a handler that cannot be called as handler(run)
│   ├── OrderCycle         reads and writes that no order can satisfy
│   └── DuplicateState     two listeners whose state would overwrite each other
├── NoBatch                run.batch was read when no batch is in hand
├── BadLoader              a loader that gave nothing, or not what its length says
├── BadStep                a step that returned no usable loss
├── MissingMetric          a metric is watched, but was never logged
├── NotFinite              a loss or gradient is NaN or infinite
└── RankMismatch           the ranks of one run do not hold the same listeners

StopRun                    not an error: raised to leave a run at once
"""

from __future__ import annotations

__all__ = [
    "AttachError",
    "BadHandler",
    "BadLoader",
    "BadStep",
    "DuplicateState",
    "LooplineError",
    "MissingMetric",
    "NoBatch",
    "NotAListener",
    "NotFinite",
    "OrderCycle",
    "RankMismatch",
    "StopRun",
    "UnknownHook",
]


class LooplineError(Exception):
    """The base of every error that loopline raises on its own account."""


class AttachError(LooplineError):
    """A listener cannot be attached; the run has not started."""


class NotAListener(AttachError, TypeError):
    """An object was given as a callback, but nothing tells how to call it."""


class UnknownHook(AttachError, AttributeError):
    """A method is named like a hook, but no event has that name: it would never be called."""


class BadHandler(AttachError, TypeError):
    """A handler cannot be called with the run as its only argument."""


class OrderCycle(AttachError, ValueError):
    """Some callbacks each need what another of them writes, so none of them can be first."""


class DuplicateState(AttachError, ValueError):
    """Two listeners would save their state under one name, or one object was attached twice."""


class NoBatch(LooplineError, AttributeError):
    """`run.batch` was read while no batch is in hand."""


class BadLoader(LooplineError, ValueError):
    """A loader gave no batch, or another number of batches than its length promised."""


class BadStep(LooplineError, ValueError):
    """A training step returned something that cannot be trained on."""


class MissingMetric(LooplineError, KeyError):
    """A metric is watched that nobody has logged."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show the repr


class NotFinite(LooplineError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class RankMismatch(LooplineError, RuntimeError):
    """The ranks of one run were given different listeners and would wait for each other for ever."""


class StopRun(Exception):
    """Raised in a handler or a loop's body to leave the run at once, without reaching a safe point.

    The run ends as *stopped*, not as failed. Where the step may be finished first, call `run.stop(reason)`.
    """

    def __init__(self, reason: str = "stopped") -> None:
        super().__init__(reason)
        self.reason = reason
