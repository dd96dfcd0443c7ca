"""Where the time of a run goes: callback by callback, phase by phase."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.binding import Binding, Handler, name_of
from ..core.callback import Callback
from ..core.event import (
    AFTER_BACKWARD,
    AFTER_OPTIMIZER_STEP,
    BATCH_START,
    BEFORE_BACKWARD,
    BEFORE_OPTIMIZER_STEP,
    EVAL_END,
    EVAL_START,
    FETCH_END,
    FETCH_START,
    LOSS_READY,
    SETUP,
    STEP_END,
    TEARDOWN,
    TRAIN_END,
    TRAIN_START,
    Event,
)
from .print_metrics import say

if TYPE_CHECKING:
    from ..core.run import Run

__all__ = ["CallbackCosts", "Cost"]

logger = logging.getLogger("loopline")

_WARM_UP_STEPS = 20
_LAST = sys.maxsize

_PHASES: tuple[tuple[str, Event, Event], ...] = (
    ("data wait", FETCH_START, FETCH_END),
    ("forward", BATCH_START, LOSS_READY),
    ("backward", BEFORE_BACKWARD, AFTER_BACKWARD),
    ("optimizer step", BEFORE_OPTIMIZER_STEP, AFTER_OPTIMIZER_STEP),
    ("evaluation", EVAL_START, EVAL_END),
)

_PER_STEP = frozenset(
    {
        "fetch_start",
        "fetch_end",
        "step_start",
        "batch_start",
        "before_zero_grad",
        "loss_ready",
        "before_backward",
        "after_backward",
        "before_optimizer_step",
        "after_optimizer_step",
        "batch_end",
        "step_end",
    }
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one callback cost at one event, or one phase of the loop, in seconds and as a share of the training time."""

    name: str
    event: str
    calls: int
    total_s: float
    share: float

    @property
    def mean_s(self) -> float:
        """Seconds per call."""
        return self.total_s / self.calls if self.calls else 0.0


class CallbackCosts(Callback):
    """Times every callback at every event, and the phases of the loop; a table at the end says where the time went.

    A callback that takes more than `budget` of the time per step is warned about by name, once. `trace` is a file for
    the timeline, which chrome://tracing and ui.perfetto.dev open. Each moment is charged once: a handler's time is not
    part of the phase it interrupts. On a GPU the time is that which Python spent, not the device. A run without this
    callback is not timed and pays nothing. After another run has been set up, the numbers are that run's.
    """

    ranks = "zero"
    on_error = "warn"

    def __init__(
        self,
        budget: float = 0.05,
        trace: str | os.PathLike[str] | None = None,
        *,
        max_events: int = 200_000,
        write: Callable[[str], object] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if not 0 < budget <= 1:
            raise ValueError(f"CallbackCosts(budget={budget!r}): give a share of the time per step, such as 0.05.")
        if max_events < 1:
            raise ValueError(f"CallbackCosts(max_events={max_events!r}): the trace keeps at least one event.")
        self.budget = budget
        self.trace = None if trace is None else Path(trace)
        self.write = write
        self._clock = clock
        self._max_events = max_events
        self._cells: dict[tuple[object, str], _Cell] = {}
        self._begin()

    def bindings(self, run: Run) -> Iterable[Binding]:
        """The ends of each phase: after all handlers where it begins, before all where it ends."""
        for name, begins, ends in _PHASES:
            cell = self._cell(name, begins.name, None)
            yield self._binding(begins, self._starting(cell), _LAST)
            yield self._binding(ends, self._ending(cell), -_LAST)
        yield self._binding(SETUP, self._begin, -_LAST)
        yield self._binding(TRAIN_START, self._train_start, _LAST)
        yield self._binding(STEP_END, self._step_end, _LAST)
        yield self._binding(TRAIN_END, self._train_end, -_LAST)
        yield self._binding(TEARDOWN, self._teardown, _LAST)

    def wrap_handler(self, run: Run, binding: Binding, handler: Handler) -> Handler:
        """A handler that takes the time of another one."""
        if binding.owner is self or run.comm.rank != 0:
            return handler
        cell = self._cell(name_of(binding.owner), binding.event.name, binding.owner)

        def timed(run: Run, **payload: object) -> object:
            charged, began = self._charged, self._clock()
            try:
                return handler(run, **payload)
            finally:
                self._charge(cell, began, charged)

        return timed

    def rows(self) -> list[Cost]:
        """What has been measured so far, the most costly first."""
        whole = self._training_ns()
        costs = [
            Cost(cell.name, cell.event, cell.calls, cell.total / 1e9, cell.total / whole if whole else 0.0)
            for cell in self._cells.values()
            if cell.calls
        ]
        return sorted(costs, key=lambda cost: (-cost.total_s, cost.name, cost.event))

    def __str__(self) -> str:
        whole = self._training_ns()
        rows = self.rows()
        width = max([len("the loop and your own code"), *(len(row.name) for row in rows)])
        lines = [f"{'what':<{width}}  {'event':<21} {'calls':>8}  {'total':>9}  {'mean':>9}  {'share':>6}"]
        for row in rows:
            event = "" if row.name in _PHASE_NAMES else row.event
            lines.append(
                f"{row.name:<{width}}  {event:<21} {row.calls:>8,}  {_time(row.total_s):>9}  {_time(row.mean_s):>9}  "
                f"{row.share:>6.1%}"
            )
        if whole:
            rest = max(0, whole - self._charged_in_training())
            lines.append(
                f"{'the loop and your own code':<{width}}  {'':<21} {'':>8}  {_time(rest / 1e9):>9}  {'':>9}  "
                f"{rest / whole:>6.1%}"
            )
            lines.append(f"{'training':<{width}}  {'':<21} {'':>8}  {_time(whole / 1e9):>9}")
        return "\n".join(lines)

    def _begin(self, run: Run | None = None) -> None:
        for cell in self._cells.values():
            cell.clear()
        self._charged = 0  # nanoseconds given to some cell; each is given once
        self._charged_before = 0
        self._charged_after: int | None = None
        self._train_began: int | None = None
        self._train_ended: int | None = None
        self._steps = 0
        self._warm: int | None = None
        self._warned: set[int] = set()
        self._slices: list[tuple[_Cell, int, int]] = []
        self._left_out = 0

    def _binding(self, event: Event, handler: Handler, place: int) -> Binding:
        return Binding(event, handler, self, order=place, then=place, ranks=self.ranks, on_error=self.on_error)

    def _cell(self, name: str, event: str, owner: object) -> _Cell:
        key = (name if owner is None else id(owner), event)
        if key not in self._cells:
            if owner is not None:
                name = self._name(name, owner)
            self._cells[key] = _Cell(name, event, owner)
        return self._cells[key]

    def _name(self, name: str, owner: object) -> str:
        """Two callbacks of one class are told apart by a number."""
        alike = list(dict.fromkeys(id(c.owner) for c in self._cells.values() if name_of(c.owner) == name))
        place = alike.index(id(owner)) if id(owner) in alike else len(alike)
        return name if place == 0 else f"{name} #{place + 1}"

    def _charge(self, cell: _Cell, began: int, charged: int) -> None:
        now = self._clock()
        took = now - began - (self._charged - charged)
        self._charged += took
        cell.calls += 1
        cell.total += took
        if self._warm is not None:
            cell.since_warm += took
            cell.longest = max(cell.longest, took)
        if self.trace is not None:
            if len(self._slices) < self._max_events:
                self._slices.append((cell, began, now))
            else:
                self._left_out += 1

    def _starting(self, cell: _Cell) -> Handler:
        def start(run: Run) -> None:
            cell.open = self._charged, self._clock()

        return start

    def _ending(self, cell: _Cell) -> Handler:
        def end(run: Run) -> None:
            if cell.open is not None:
                charged, began = cell.open
                cell.open = None
                self._charge(cell, began, charged)

        return end

    def _train_start(self, run: Run) -> None:
        self._train_began = self._clock()
        self._charged_before = self._charged

    def _step_end(self, run: Run) -> None:
        self._steps += 1
        if self._steps == _WARM_UP_STEPS:
            self._warm = self._clock()
        elif self._warm is not None:
            self._warn(self._clock() - self._warm)

    def _warn(self, passed: int) -> None:
        """Warn of whoever is over the budget; one slow call by itself, a checkpoint say, is no alarm."""
        by_owner: dict[int, list[_Cell]] = {}
        for cell in self._cells.values():
            if cell.owner is not None and cell.event in _PER_STEP and id(cell.owner) not in self._warned:
                by_owner.setdefault(id(cell.owner), []).append(cell)
        for key, cells in by_owner.items():
            if sum(cell.since_warm - cell.longest for cell in cells) > self.budget * passed:
                self._warned.add(key)
                worst = max(cells, key=lambda cell: cell.since_warm)
                share = sum(cell.since_warm for cell in cells) / passed
                logger.warning(
                    "CallbackCosts: %s takes %.0f %% of the time per step, most of it at %s; the budget is %.0f %%.",
                    worst.name,
                    100 * share,
                    worst.event,
                    100 * self.budget,
                )

    def _train_end(self, run: Run) -> None:
        self._train_ended = self._clock()
        self._charged_after = self._charged

    def _teardown(self, run: Run) -> None:
        if self._train_ended is None:
            self._train_end(run)
        if self._train_began is not None:
            (self.write or say)(f"{self}\n")
        if self.trace is not None:
            self._write_trace(self.trace)

    def _training_ns(self) -> int:
        if self._train_began is None:
            return 0
        return (self._clock() if self._train_ended is None else self._train_ended) - self._train_began

    def _charged_in_training(self) -> int:
        return (self._charged if self._charged_after is None else self._charged_after) - self._charged_before

    def _write_trace(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            head = {"displayTimeUnit": "ms", "otherData": {"events left out": self._left_out}}
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            file.write(",\n".join(json.dumps(event) for event in self._trace_events()))
            file.write("\n]}\n")
        if self._left_out:
            logger.warning(
                "CallbackCosts: %s holds the first %d events; %d more were left out. Give a larger max_events.",
                path,
                len(self._slices),
                self._left_out,
            )

    def _trace_events(self) -> Iterator[dict[str, object]]:
        process = os.getpid()
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "loopline"}}
        start = min((began for _, began, _ in self._slices), default=0)
        for cell, began, ended in self._slices:
            yield {
                "ph": "X",
                "name": cell.name,
                "cat": "loop" if cell.owner is None else "callback",
                "ts": (began - start) / 1e3,
                "dur": (ended - began) / 1e3,
                "pid": process,
                "tid": 0,
                "args": {"event": cell.event},
            }


@dataclass(slots=True, eq=False)
class _Cell:
    """The time of one callback at one event, in nanoseconds; a phase has no owner."""

    name: str
    event: str
    owner: object
    calls: int = 0
    total: int = 0
    since_warm: int = 0
    longest: int = 0
    open: tuple[int, int] | None = None

    def clear(self) -> None:
        self.calls = self.total = self.since_warm = self.longest = 0
        self.open = None


_PHASE_NAMES = frozenset(name for name, _, _ in _PHASES)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.1f} us"
