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
├── RankMismatch           the ranks of one run do not hold the same listeners
├── Meddling               an observer changed what it may only look at
├── StoreError             bytes could not be written or read
│   └── NoSuchKey          nothing is stored under a key
├── CannotSave             a state holds something that a checkpoint cannot keep
├── SaveFailed             checkpoints could not be written, several times in a row
├── Damaged                a checkpoint is not what was committed, or not a checkpoint at all
├── Mismatch               a checkpoint belongs to another model, optimizer, dataset or seed
├── NewerFormat            a checkpoint was written by a later version, which this one cannot read
└── Exit                   an error with an exit code of its own
    ├── NotFinite          76: a loss, gradient or weight is NaN or infinite
    ├── NoIntactCheckpoint 74: there are checkpoints, and all of them are damaged
    └── RunLocked          75: another process writes into the run's folder

StopRun                    not an error: raised to leave a run at once
Preempted                  not an error: a signal ended the run; SystemExit with 128 + the signal's number
"""

from __future__ import annotations

__all__ = [
    "AttachError",
    "BadHandler",
    "BadLoader",
    "BadStep",
    "CannotSave",
    "Damaged",
    "DuplicateState",
    "Exit",
    "LooplineError",
    "Meddling",
    "Mismatch",
    "MissingMetric",
    "NewerFormat",
    "NoBatch",
    "NoIntactCheckpoint",
    "NoSuchKey",
    "NotAListener",
    "NotFinite",
    "OrderCycle",
    "Preempted",
    "RankMismatch",
    "RunLocked",
    "SaveFailed",
    "StopRun",
    "StoreError",
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


class RankMismatch(LooplineError, RuntimeError):
    """The ranks of one run were given different listeners and would wait for each other for ever."""


class Meddling(LooplineError, RuntimeError):
    """A callback with on_error="disable" changed what the training works on; it may only look."""


class StoreError(LooplineError):
    """A store could not write, read, list or delete; the cause says why."""


class NoSuchKey(StoreError, KeyError):
    """Nothing is stored under a key."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show the repr


class CannotSave(LooplineError, TypeError):
    """Something in a state is neither a number, text or tensor, nor made of these."""


class SaveFailed(LooplineError, RuntimeError):
    """Several checkpoints in a row could not be written."""


class Damaged(LooplineError, ValueError):
    """A checkpoint cannot be trusted: cut off, altered, or never one of ours."""


class Mismatch(LooplineError, ValueError):
    """A checkpoint does not belong to what is being trained."""


class NewerFormat(LooplineError, ValueError):
    """A checkpoint is of a format that a later version of loopline has brought."""


class Exit(LooplineError, SystemExit):
    """An error that, where nobody catches it, ends the process with a code of its own.

    Python prints nothing of such an error, so the run logs it as it leaves.
    """

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.code = 1


class NotFinite(Exit, ArithmeticError):
    """A loss, a gradient or a weight is NaN or infinite."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.code = 76


class NoIntactCheckpoint(Exit):
    """There are checkpoints, but none can be loaded. Training does not begin again from nothing by itself."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.code = 74


class RunLocked(Exit):
    """Another process writes into this run's folder, or has taken it over."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.code = 75


class Preempted(SystemExit):
    """A signal ended the run. What could be saved is saved; the same command goes on from there."""


class StopRun(Exception):
    """Raised in a handler or a loop's body to leave the run at once, without reaching a safe point.

    The run ends as *stopped*, not as failed. Where the step may be finished first, call `run.stop(reason)`.
    """

    def __init__(self, reason: str = "stopped") -> None:
        super().__init__(reason)
        self.reason = reason
