"""Ending a run that has used up its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..core.callback import Callback
from ..core.run import Run
from ._watching import from_scratch

__all__ = ["TimeLimit"]


class TimeLimit(Callback):
    """Ends the run at the first safe point after so much time; a resumed run goes on with what is left.

    Counted from FIT_START to TEARDOWN, evaluations included, on a clock that nobody can set. `used` is the number of
    seconds so far. Give exactly one of `seconds`, `minutes` and `hours`.

    >>> from loopline import Run, loop
    >>> seconds = iter(range(100))
    >>> run = Run(callbacks=[TimeLimit(seconds=5, clock=lambda: next(seconds))])
    >>> with loop.fit(run):
    ...     for _ in loop.epochs(run, 1000):
    ...         pass
    >>> run.progress.epochs, run.reason
    (5, 'the time limit of 5 seconds is used up')
    """

    order = 100

    def __init__(
        self,
        *,
        seconds: float | None = None,
        minutes: float | None = None,
        hours: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        amounts = {"seconds": seconds, "minutes": minutes, "hours": hours}
        given = {unit: amount for unit, amount in amounts.items() if amount is not None}
        if len(given) != 1:
            said = ", ".join(f"{unit}={amount!r}" for unit, amount in given.items()) or "nothing"
            raise ValueError(
                f"TimeLimit takes exactly one of seconds, minutes, hours; it was given {said}. "
                "A part of one is a fraction: hours=1.5."
            )
        unit, amount = next(iter(given.items()))
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0:
            raise ValueError(f"TimeLimit({unit}={amount!r}): give an amount of time above 0.")
        self.limit = amount * {"seconds": 1, "minutes": 60, "hours": 3600}[unit]
        self._said = f"the time limit of {amount:g} {unit.removesuffix('s') if amount == 1 else unit} is used up"
        self._clock = clock
        self._before = 0.0
        self._since: float | None = None

    @property
    def used(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return self._before if self._since is None else self._before + self._clock() - self._since

    def on_fit_start(self, run: Run) -> None:
        """Start the clock."""
        if from_scratch(run):
            self._before = 0.0
        self._since = self._clock()

    def on_step_end(self, run: Run) -> None:
        """Look at the clock."""
        self._look(run)

    def on_eval_batch_end(self, run: Run) -> None:
        """Look at the clock."""
        self._look(run)

    def on_epoch_end(self, run: Run) -> None:
        """Look at the clock."""
        self._look(run)

    def on_teardown(self, run: Run) -> None:
        """Stop the clock, and keep what it showed."""
        self._before, self._since = self.used, None

    def state_dict(self) -> dict[str, Any]:
        """The seconds used up."""
        return {"used": self.used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with or without the clock running."""
        self._before = state["used"]
        if self._since is not None:
            self._since = self._clock()

    def _look(self, run: Run) -> None:
        if self._since is not None and self.used >= self.limit:  # not in an evaluation outside a fit
            run.stop(self._said)
