"""Ending a run whose metric has stopped improving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..core.callback import Callback
from ..core.run import Run
from ..metrics import Watched
from ._watching import Mode, check_mode, from_scratch, improves

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """Ends the run when a metric has not improved for `patience` evaluations in a row.

    An evaluation counts at the end of its epoch; epochs in which the metric has no new value are passed over. To
    improve, a value must be better than the best one by more than `min_delta`. With `patience=0`, as with 1, the first
    evaluation that does not improve ends the run. A value that is NaN or infinite ends it at once; with
    `check_finite=False` it counts as one that does not improve.

    `best` and `best_epoch` (an index, from 0) are None until a first value has come; `wait` counts the evaluations
    since. A run that completes without the metric ever having come ends with MissingMetric.

    >>> from loopline import Run, loop
    >>> stopping = EarlyStopping("val/loss", patience=2)
    >>> run = Run(callbacks=[stopping])
    >>> with loop.fit(run):
    ...     for epoch in loop.epochs(run, 10):
    ...         for _ in loop.evaluate(run, [epoch]):
    ...             run.log({"loss": [0.9, 0.5, 0.7, 0.6, 0.4][epoch]})
    >>> run.reason
    'val/loss has not improved for 2 evaluations (best 0.5 in epoch 2)'
    >>> stopping.best, stopping.best_epoch, stopping.wait
    (0.5, 1, 2)
    """

    def __init__(
        self,
        metric: str,
        *,
        mode: Mode = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        check_finite: bool = True,
    ) -> None:
        self._watched = Watched(metric)
        check_mode(self, mode)
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 0:
            raise ValueError(
                f"EarlyStopping(patience={patience!r}): give a whole number of evaluations, 0 or more. They are "
                "counted where the metric has a new value, not in epochs."
            )
        if not 0 <= min_delta < math.inf:
            raise ValueError(
                f"EarlyStopping(min_delta={min_delta!r}): give how much better a value must be, 0 or more, for both "
                "modes."
            )
        self.metric = metric
        self._watched = Watched(metric)
        self.mode: Mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self.check_finite = check_finite
        self.reads = frozenset({f"metrics/{metric}"})
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.wait = 0

    def on_train_start(self, run: Run) -> None:
        """Forget an earlier run, unless this one goes on from it."""
        self._watched = Watched(self.metric)
        if from_scratch(run):
            self.best, self.best_epoch, self.wait = None, None, 0

    def on_eval_end(self, run: Run) -> None:
        """Look at an evaluation's value, which may come in the middle of an epoch."""
        self._look(run, self._watched.measured(run))

    def on_epoch_end(self, run: Run) -> None:
        """Look at the epoch's value, if it brought one that was not seen yet."""
        self._look(run, self._watched.new(run))

    def _look(self, run: Run, value: float | None) -> None:
        if value is None:
            return
        if improves(value, self.best, mode=self.mode, min_delta=self.min_delta):
            self.best, self.best_epoch, self.wait = value, run.epoch, 0
            return
        self.wait += 1
        if self.check_finite and not math.isfinite(value):
            run.stop(f"{self.metric} is {value} in epoch {run.epoch + 1} ({self._said_best()})")
        elif self.wait >= self.patience:
            times = "1 evaluation" if self.wait == 1 else f"{self.wait} evaluations"
            run.stop(f"{self.metric} has not improved for {times} ({self._said_best()})")

    def on_train_end(self, run: Run) -> None:
        """Say so if there was never anything to watch."""
        if run.status == "completed":
            self._watched.must_have_come(run)

    @property
    def state_key(self) -> str:
        """One for each metric that is watched."""
        return f"EarlyStopping({self.metric})"

    def state_dict(self) -> dict[str, Any]:
        """The best value, its epoch, and how long ago it was."""
        best = {} if self.best is None else {"best": self.best, "best_epoch": self.best_epoch}
        return {"wait": self.wait, **best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self.best, self.best_epoch, self.wait = state.get("best"), state.get("best_epoch"), state["wait"]

    def _said_best(self) -> str:
        return (
            "no value before it was finite"
            if self.best is None or self.best_epoch is None
            else f"best {self.best:.4g} in epoch {self.best_epoch + 1}"  # counted from 1, as a progress bar does
        )
