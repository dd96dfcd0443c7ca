"""What a handler can do to the run by failing, or by carelessness: all of it where `on_error` is "raise"."""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .binding import Binding, Handler, name_of
from .errors import Meddling, StopRun
from .event import TEARDOWN, Event
from .limit import within

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Circuit", "guarded", "kept_apart", "summarize_failures"]

logger = logging.getLogger("loopline")

_TRIES = 3
_LIMIT_S = 1.0
_LIMIT_AT_TEARDOWN_S = 10.0  # the last chance to write what is held back


@dataclass(slots=True)
class Circuit:
    """The failures of one listener. Open means: not called until the next epoch, or never again."""

    name: str
    failures: int = 0
    in_a_row: int = 0
    first_at: str = ""
    failed_at: Event | None = None
    disables: bool = False
    open_in_epoch: int | None = None

    @property
    def off(self) -> bool:
        return self.in_a_row >= _TRIES

    def blocks(self, epoch: int) -> bool:
        return self.off or self.open_in_epoch == epoch


def kept_apart(binding: Binding) -> Handler:
    """The handler of a binding; that of an observer which is not careful leaves no trace in the run, and ends."""
    handler = binding.handler
    if binding.on_error != "disable" or binding.careful:
        return handler
    limit_s = _LIMIT_AT_TEARDOWN_S if binding.event is TEARDOWN else _LIMIT_S

    def handler_apart(run: Run, **payload: object) -> None:
        with run._apart(run):
            try:
                within(limit_s, handler, run, **payload)
            except Exception as error:
                if not run._strict:  # else the run ends, and somebody may want to look at them
                    _end_frames(error)  # now: what they put back is not to be older than what is put back here
                raise

    return handler_apart


def _end_frames(error: BaseException | None) -> None:
    """Close what a failed handler left in the middle, such as an evaluation, before the run goes on."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def guarded(binding: Binding, run: Run, handler: Handler) -> Handler:
    """The handler as the plan calls it: with "warn" and "disable" its errors end here."""
    if binding.on_error == "raise" or binding.event is TEARDOWN:
        return handler  # teardowns are isolated from each other by the loop
    circuit = run._circuits.setdefault(id(binding.owner), Circuit(name_of(binding.owner)))
    disable = binding.on_error == "disable"

    def guarded_handler(run: Run, **payload: object) -> None:
        if disable and circuit.blocks(run.epoch):
            return
        try:
            handler(run, **payload)
        except (StopRun, Meddling):
            raise
        except Exception as error:
            if run._strict:
                raise
            _end_frames(error)
            circuit.failures += 1
            if circuit.open_in_epoch == run.epoch:
                return  # "warn" is told once an epoch, not once a step
            circuit.in_a_row += 1
            circuit.failed_at = binding.event
            circuit.open_in_epoch = run.epoch
            where = f"{binding.event.name}, epoch {run.epoch}, step {run.step}"
            circuit.first_at = circuit.first_at or where
            circuit.disables = disable
            if not disable:
                then = "Training goes on."
            elif circuit.off:
                then = f"It failed {_TRIES} times in a row and is switched off for the rest of this run."
            else:
                then = "It is switched off until the next epoch; training goes on."
            logger.warning(
                "%s failed at %s: %s: %s. %s",
                circuit.name,
                where,
                type(error).__name__,
                error,
                then,
                exc_info=error if circuit.failures == 1 else None,
            )
        else:
            if circuit.failed_at is binding.event and circuit.open_in_epoch != run.epoch:
                circuit.in_a_row = 0
                circuit.open_in_epoch = None

    return guarded_handler


def summarize_failures(run: Run) -> None:
    """Say of each listener that failed how often, where first, and what became of it; what is said is forgotten."""
    for circuit in run._circuits.values():
        if circuit.failures:
            times = "once" if circuit.failures == 1 else f"{circuit.failures} times"
            off = "off" if circuit.disables and circuit.blocks(run.epoch) else "on"
            said = "%s failed %s in this run, first at %s; it was %s at the end."
            logger.warning(said, circuit.name, times, circuit.first_at, off)
    run._circuits.clear()
