"""Ending a run that is good enough."""

from __future__ import annotations

import math

from ..core.callback import Callback
from ..core.run import Run
from ..metrics import Watched

__all__ = ["StopAt"]


class StopAt(Callback):
    """Ends the run when a metric reaches a threshold: `above` for what should grow, `below` for what should shrink.

    The threshold itself is enough. The metric is looked at when an epoch ends, if it has a new value. A run that
    completes without the metric ever having come ends with MissingMetric.

    >>> from loopline import Run, loop
    >>> run = Run(callbacks=[StopAt("val/accuracy", above=0.9)])
    >>> with loop.fit(run):
    ...     for epoch in loop.epochs(run, 10):
    ...         for _ in loop.evaluate(run, [epoch]):
    ...             run.log({"accuracy": [0.5, 0.8, 0.93, 0.95][epoch]})
    >>> run.reason
    'val/accuracy is 0.93 in epoch 3; 0.9 or above was asked for'
    """

    def __init__(self, metric: str, *, above: float | None = None, below: float | None = None) -> None:
        self._watched = Watched(metric)
        if (above is None) is (below is None):
            raise ValueError(
                f"StopAt({metric!r}, above={above!r}, below={below!r}): give exactly one of above and below. For two "
                "thresholds attach two of them."
            )
        threshold = below if above is None else above
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not math.isfinite(threshold):
            raise ValueError(f"StopAt({metric!r}): the threshold {threshold!r} is not a finite number.")
        self.metric = metric
        self._watched = Watched(metric)
        self.above = above
        self.below = below
        self.reads = frozenset({f"metrics/{metric}"})

    def on_train_start(self, run: Run) -> None:
        """Forget an earlier run's value."""
        self._watched = Watched(self.metric)

    def on_eval_end(self, run: Run) -> None:
        """Compare an evaluation's value, which may come in the middle of an epoch."""
        self._compare(run, self._watched.measured(run))

    def on_epoch_end(self, run: Run) -> None:
        """Compare the epoch's value, if it brought one that was not seen yet."""
        self._compare(run, self._watched.new(run))

    def _compare(self, run: Run, value: float | None) -> None:
        if value is None:
            return
        if self.above is not None and value >= self.above:
            run.stop(f"{self.metric} is {value:.4g} in epoch {run.epoch + 1}; {self.above:g} or above was asked for")
        if self.below is not None and value <= self.below:
            run.stop(f"{self.metric} is {value:.4g} in epoch {run.epoch + 1}; {self.below:g} or below was asked for")

    def on_train_end(self, run: Run) -> None:
        """Say so if there was never anything to compare."""
        if run.status == "completed":
            self._watched.must_have_come(run)
