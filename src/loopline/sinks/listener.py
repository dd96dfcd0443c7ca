"""The listener that makes records out of a run's metrics.

What happens here happens on the training thread; the thread between a run and its sinks is in `_writer.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..core.binding import Binding
from ..core.event import EPOCH_END, EVAL_END, FIT_START, METRICS, SAVING, SETUP, STEP_END, TEARDOWN
from ..core.when import Every, Watch, When
from ._writer import Writer
from .base import Record, Sink

if TYPE_CHECKING:
    from ..core.run import Run

__all__ = ["Sinks"]

logger = logging.getLogger("loopline")

_SAVING_WAIT_S = 1.0


class Sinks:
    """The listener that gives a run's metrics to its sinks; `Trainer(sinks=[...])` attaches one.

    On the training thread it reads the metrics that are due, in one wait for the device, and puts a record in a queue.
    A sink that is slow, stuck or broken never holds the run up: once `capacity` step records are waiting, the oldest
    of them are dropped and counted, and at the end the queue is given `deadline_s` seconds to empty. Epoch records are
    never dropped.

    A metric that computes itself (torchmetrics) may speak to the other ranks when it is asked. Only rank zero has
    sinks, so with several ranks such a metric is left out, unless it is final as after an evaluation.
    """

    state_key = "sinks"

    def __init__(self, sinks: Sequence[Sink], *, capacity: int = 1000, deadline_s: float = 10.0) -> None:
        self.sinks = _checked(sinks)
        if not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"Sinks(capacity={capacity!r}): give a whole number, 1 or more.")
        if not deadline_s >= 0:
            raise ValueError(f"Sinks(deadline_s={deadline_s!r}): give a number of seconds, 0 or more.")
        self.capacity = capacity
        self.deadline_s = deadline_s
        self._beats = _beats(self.sinks)
        self._epochs = _Means()
        self._writer: Writer | None = None
        self._opened = False
        self._unreadable: set[str] = set()

    def bindings(self, run: Run) -> Iterable[Binding]:
        """The moments of records, and those when sinks are opened, flushed and closed; on rank zero alone."""
        quiet = partial(Binding, owner=self, ranks="zero", on_error="disable", careful=True)
        # "raise": the errors that come out of these are those of METRICS handlers, which have a policy of their own;
        # and a guarded handler would cost every step two more calls
        recording = partial(Binding, owner=self, ranks="zero", reads=frozenset({"metrics"}))
        yield quiet(SETUP, self._setup)
        yield quiet(FIT_START, self._fit_start)
        if any(beat.by_steps for beat in self._beats):
            yield recording(STEP_END, _step_end(self._beats, self._record_step))
        yield recording(EVAL_END, self._record_evaluation)
        yield recording(EPOCH_END, self._record_epoch)
        yield quiet(SAVING, self._saving)
        yield quiet(TEARDOWN, self._teardown)

    def state_dict(self) -> dict[str, Any]:
        """What the sinks need to go on, and where each mean stood at its last record."""
        return {
            "sinks": {_key(i, sink): sink.state_dict() for i, sink in enumerate(self.sinks)},
            "steps": [beat.means.state_dict() for beat in self._beats],
            "epochs": self._epochs.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave; before FIT_START, where the sinks are opened."""
        for i, sink in enumerate(self.sinks):
            if (own := state["sinks"].get(_key(i, sink))) is not None:
                sink.load_state_dict(own)
        if len(state["steps"]) == len(self._beats):
            for beat, means in zip(self._beats, state["steps"], strict=True):
                beat.means.load_state_dict(means)
        self._epochs.load_state_dict(state["epochs"])

    def _setup(self, run: Run) -> None:
        for beat in self._beats:
            beat.watch = beat.when.watch()
        self._opened = False
        self._writer = Writer(self.sinks, capacity=self.capacity)

    def _fit_start(self, run: Run) -> None:
        self._open(run, training=True)

    def _open(self, run: Run, *, training: bool) -> None:
        """Not before FIT_START: only there is it certain from which step the run goes on."""
        if self._writer is None or self._opened:
            return
        self._opened = True
        start = run.progress.steps if training else None
        self._writer.open(run, start, resumed=start != 0)

    def _record_step(self, run: Run) -> None:
        count = run.step + 1
        due = [beat for beat in self._beats if beat.by_steps and beat.watch("steps", count)]
        if not due or self._writer is None:
            return
        fresh = self._read(run, run.metrics.fresh("train"))  # type: ignore[attr-defined]
        for beat in due:
            metrics = beat.means.since_last(fresh, run.epoch, only_changed=True)
            self._put(run, _record(run, "step", count, "train", metrics), beat.sinks)

    def _record_evaluation(self, run: Run) -> None:
        if run.stage in ("sanity", "predict"):
            return
        read = self._read(run, run.metrics.fresh(run.stage))  # type: ignore[attr-defined]
        metrics = _Means().since_last(read, run.epoch)
        self._put(run, _record(run, "epoch", run.progress.steps, run.stage, metrics), self.sinks)

    def _record_epoch(self, run: Run) -> None:
        others = {"val", "sanity", "test", "predict", *run.lengths, "train"}
        trained = set(run.metrics.fresh("train"))  # type: ignore[attr-defined]
        names = [name for name in run.metrics if name in trained or name.split("/")[0] not in others]
        metrics = self._epochs.since_last(self._read(run, names), run.epoch)
        self._put(run, _record(run, "epoch", run.progress.steps, "train", metrics), self.sinks)

    def _put(self, run: Run, record: Record, sinks: Sequence[Sink]) -> None:
        if self._writer is None:
            return
        run.record = record
        if run.heard(METRICS):
            run.emit(METRICS)
            record.metrics = {name: float(value) for name, value in record.metrics.items()}
        if not self._opened:
            self._open(run, training=run.limits.epochs is not None or run.limits.steps is not None)
        self._writer.put(record, sinks)

    def _read(self, run: Run, names: Sequence[str]) -> list[_Reading]:
        """Metrics as numbers, with one wait for the device; what cannot be read is left out."""
        metrics: Any = run.metrics
        entries = {name: metrics.entry(name) for name in names}
        means = [name for name, entry in entries.items() if hasattr(entry, "sums")]
        others: dict[str, Any] = {}
        for name in entries.keys() - set(means):
            if run.comm.world_size == 1 or not hasattr(entries[name], "compute"):
                try:
                    others[name] = metrics.value(name)
                except Exception as error:  # noqa: BLE001 - a metric that fails must not end the run
                    self._tell_once(name, error)
        values = metrics.settle(means, others)
        readings: list[_Reading] = []
        for name, entry in entries.items():
            total, weight = entry.sums() if name in means else (None, None)
            readings.append(_Reading(name, entry, total, weight, values.get(name)))
        return readings

    def _tell_once(self, name: str, error: Exception) -> None:
        if name not in self._unreadable:
            self._unreadable.add(name)
            said = "The metric %r cannot be read and is left out of the records: %s: %s"
            logger.warning(said, name, type(error).__name__, error, exc_info=error)

    def _saving(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.flush(min(_SAVING_WAIT_S, self.deadline_s))

    def _teardown(self, run: Run) -> None:
        writer, self._writer = self._writer, None
        for beat in self._beats:
            beat.means = _Means()
        self._epochs = _Means()
        self._unreadable.clear()
        if writer is not None:
            writer.close(self.deadline_s)
            if run._strict and (errors := writer.errors()):
                raise BaseExceptionGroup("sinks failed", errors)


@dataclass(slots=True)
class _Reading:
    """One metric as numbers: a sum and its weight, or a value."""

    name: str
    entry: Any
    total: float | None
    weight: float | None
    value: float | None


@dataclass(slots=True)
class _Last:
    """Where a mean stood at the last record. Its entry is unknown after a resume: None."""

    entry: Any
    epoch: int
    total: float
    weight: float


class _Means:
    """What each metric came to since the last time it was asked."""

    def __init__(self) -> None:
        self._last: dict[str, _Last] = {}
        self._values: dict[str, float] = {}

    def since_last(self, readings: Iterable[_Reading], epoch: int, *, only_changed: bool = False) -> dict[str, float]:
        found: dict[str, float] = {}
        for reading in readings:
            name = reading.name
            if reading.value is not None:
                if not only_changed or self._values.get(name) != reading.value:
                    found[name] = self._values[name] = reading.value
            elif reading.total is not None and reading.weight is not None:
                total, weight = self._before(reading, epoch)
                # 0: nothing was logged since; NaN passes, since it was
                if reading.weight - weight != 0:
                    found[name] = (reading.total - total) / (reading.weight - weight)
                self._last[name] = _Last(reading.entry, epoch, reading.total, reading.weight)
        return found

    def _before(self, reading: _Reading, epoch: int) -> tuple[float, float]:
        last = self._last.get(reading.name)
        if last is None:
            return 0.0, 0.0
        same = last.entry is reading.entry
        if last.entry is None:
            same = last.epoch == epoch and reading.weight is not None and reading.weight >= last.weight
        return (last.total, last.weight) if same else (0.0, 0.0)

    def state_dict(self) -> dict[str, Any]:
        means = {name: [last.epoch, last.total, last.weight] for name, last in self._last.items()}
        return {"means": means, "values": dict(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last = {name: _Last(None, *mean) for name, mean in state["means"].items()}
        self._values = dict(state["values"])


@dataclass(slots=True)
class _Beat:
    """The sinks that get their step records at the same moments, and so the same ones."""

    when: When
    sinks: list[Sink]
    watch: Watch
    means: _Means = field(default_factory=_Means)

    @property
    def by_steps(self) -> bool:
        return "steps" in getattr(self.when, "units", ("steps",))


def _beats(sinks: Sequence[Sink]) -> list[_Beat]:
    beats: list[_Beat] = []
    for sink in sinks:
        beat = next((beat for beat in beats if beat.when == sink.when), None)
        if beat is None:
            beats.append(_Beat(sink.when, [sink], sink.when.watch()))
        else:
            beat.sinks.append(sink)
    return beats


def _step_end(beats: Sequence[_Beat], record: Callable[[Run], None]) -> Callable[[Run], None]:
    """The handler of STEP_END, which for policies that count steps does one division at a step that is not due."""
    beats = [beat for beat in beats if beat.by_steps]
    counts = [beat.when.steps for beat in beats if isinstance(beat.when, Every) and beat.when.steps is not None]
    if len(counts) < len(beats):
        return record
    every = math.gcd(*counts)

    def step_end(run: Run) -> None:
        if (run.step + 1) % every == 0:
            record(run)

    return step_end


def _record(run: Run, kind: Literal["step", "epoch"], step: int, stage: str, metrics: dict[str, float]) -> Record:
    progress = run.progress
    return Record(kind, step, progress.batches, run.epoch, progress.samples, stage, time.time(), metrics)


def _key(index: int, sink: Sink) -> str:
    return f"{index}-{type(sink).__qualname__}"


def _checked(sinks: Any) -> tuple[Sink, ...]:
    if isinstance(sinks, Sink):
        raise TypeError(f"Sinks({sinks!r}): give a list of sinks, such as [{sinks!r}].")
    given: tuple[Any, ...] = tuple(sinks)
    for i, sink in enumerate(given):
        if not isinstance(sink, Sink):
            hint = " To write to a file, give JsonlSink(path)." if isinstance(sink, str) else ""
            raise TypeError(f"sinks[{i}] is {sink!r}, which is not an object of a class derived from Sink.{hint}")
        if not isinstance(sink.when, When):
            raise TypeError(f"sinks[{i}].when is {sink.when!r}: say when, for example Every(steps=50).")
        for other in given[:i]:
            if other is sink:
                raise ValueError(f"{sink!r} is given twice: the same object. Make two, or drop one.")
            path = getattr(sink, "path", None)
            if path is not None and path == getattr(other, "path", None):
                raise ValueError(f"{other!r} and {sink!r} would write over each other: give them different paths.")
    return given
