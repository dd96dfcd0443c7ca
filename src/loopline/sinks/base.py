"""What a sink is given, and what it must be able to do. Nothing here knows a file or a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..core.when import Every, When

if TYPE_CHECKING:
    from ..core.run import Run

__all__ = ["AXES", "Record", "Sink"]

AXES = ("kind", "step", "batch", "epoch", "samples", "stage", "time")


@dataclass(slots=True)
class Record:
    """What one moment of a run gives to the sinks: metrics, and where on every axis they stand.

    `step`, `batch` and `samples` count what is done; `epoch` is the index of the one in progress. A record may go to
    several sinks, so a sink must not change it.
    """

    kind: Literal["step", "epoch"]
    step: int
    batch: int
    epoch: int
    samples: int
    stage: str
    time: float
    metrics: dict[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        """Axes and metrics in one dict, the axes first."""
        axes = {name: getattr(self, name) for name in AXES}
        return {**axes, **self.metrics, **axes}


class Sink:
    """Somewhere metrics go. Write `write`, and of the others what you need.

    `when` says when a sink gets a *step* record: the means over the steps since its last one. *Epoch* records, the
    means of a whole epoch or evaluation, go to every sink. All methods but the two about state are called on a thread
    of their own, so they may be slow; if one raises, the run goes on without it.

    >>> class Losses(Sink):
    ...     when = Every(steps=2)
    ...     def __init__(self):
    ...         self.seen = []
    ...     def write(self, record):
    ...         self.seen.append((record.kind, record.step, record.metrics["train/loss"]))

    >>> from loopline import Run, loop
    >>> from loopline.sinks import Sinks
    >>> losses = Losses()
    >>> run = Run(callbacks=[Sinks([losses])])
    >>> with loop.fit(run):
    ...     for _ in loop.epochs(run, 1):
    ...         for batch in loop.batches(run, [1, 2, 3, 4]):
    ...             run.log({"loss": 10 * batch})
    >>> losses.seen
    [('step', 2, 15.0), ('step', 4, 35.0), ('epoch', 4, 25.0)]
    """

    when: When = Every(steps=50)

    def resume_from(self, step: int | None) -> None:
        """Called before `open` where something is gone on with: keep what was recorded up to this step.

        None is an evaluation outside training, which adds to whatever is there. Not called when a run starts afresh.
        """

    def open(self, run: Run) -> None:
        """Called once, before the first record. The run is already moving: read settings here, not counters."""

    def write(self, record: Record) -> None:
        """Take one record."""
        raise NotImplementedError(f"{type(self).__qualname__} has no write(record): write one.")

    def flush(self) -> None:
        """Called when a checkpoint is taken, and at the end: make sure of what was written."""

    def close(self) -> None:
        """Called once, at the end of the run."""

    def state_dict(self) -> dict[str, Any]:
        """What a later process needs to go on exactly here. Called on the training thread, after a flush."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave, before `resume_from`."""

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"
