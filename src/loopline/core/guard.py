"""What a failing handler does to the run: nothing here where `on_error` is "raise"."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .binding import Binding, Handler, name_of
from .errors import StopRun
from .event import TEARDOWN, Event

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Circuit", "guarded"]

logger = logging.getLogger("loopline")

_TRIES = 3


@dataclass(slots=True)
class Circuit:
    """The failures of one listener. Open means: not called until the next epoch, or never again."""

    failures: int = 0
    in_a_row: int = 0
    failed_at: Event | None = None
    open_in_epoch: int | None = None

    @property
    def off(self) -> bool:
        return self.in_a_row >= _TRIES

    def blocks(self, epoch: int) -> bool:
        return self.off or self.open_in_epoch == epoch


def guarded(binding: Binding, run: Run, handler: Handler) -> Handler:
    """The handler as the plan calls it: with "warn" and "disable" its errors end here."""
    if binding.on_error == "raise" or binding.event is TEARDOWN:
        return handler  # teardowns are isolated from each other by the loop
    circuit = run._circuits.setdefault(id(binding.owner), Circuit())
    disable = binding.on_error == "disable"

    def guarded_handler(run: Run, **payload: object) -> None:
        if disable and circuit.blocks(run.epoch):
            return
        try:
            handler(run, **payload)
        except StopRun:
            raise
        except Exception as error:
            circuit.failures += 1
            if circuit.open_in_epoch == run.epoch:
                return  # "warn" is told once an epoch, not once a step
            circuit.in_a_row += 1
            circuit.failed_at = binding.event
            circuit.open_in_epoch = run.epoch
            where = f"{name_of(binding.owner)} failed at {binding.event.name}, epoch {run.epoch}, step {run.step}"
            if not disable:
                then = "Training goes on."
            elif circuit.off:
                then = f"It failed {_TRIES} times in a row and is switched off for the rest of this run."
            else:
                then = "It is switched off until the next epoch; training goes on."
            first = error if circuit.failures == 1 else None
            logger.warning("%s: %s: %s. %s", where, type(error).__name__, error, then, exc_info=first)
        else:
            if circuit.failed_at is binding.event and circuit.open_in_epoch != run.epoch:
                circuit.in_a_row = 0
                circuit.open_in_epoch = None

    return guarded_handler
