"""A recorded run sent once more to one callback, with no model at hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.binding import as_listener
from ..core.errors import LooplineError, StopRun
from ..core.event import EPOCH_END, EXCEPTION, FIT_END, SEAMS, STEP_END, STOPPED, TEARDOWN, TRAIN_END, Event
from ..core.progress import Batch, Progress, Requests
from ..core.run import Limits, Run
from ..metrics import Metrics

__all__ = ["Asked", "Replay", "replay"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One thing that a callback asked for, and the event at which it did."""

    reason: str
    event: str
    epoch: int
    step: int


@dataclass(slots=True)
class Replay:
    """What a callback asked for in a replayed run, and what it logged."""

    run: Run
    stop: Asked | None = None
    saves: list[Asked] = field(default_factory=list)
    evaluations: list[Asked] = field(default_factory=list)
    logged: list[tuple[str, str, Any]] = field(default_factory=list)


def replay(callback: object, stream: str | Path | Iterable[Mapping[str, Any]]) -> Replay:
    """Send a recorded stream, a `Recorder.stream` or the path of a saved one, to a callback.

    It ends where a run would have ended that the callback asked to stop: at the next safe point, with STOPPED,
    TRAIN_END, FIT_END and TEARDOWN. Batches have no data, metrics have the values that were recorded at EVAL_END and
    EPOCH_END. What an evaluation that the callback asks for would have given is not known, so none is sent.

    What would another threshold have done in a run of four epochs?

    >>> from loopline import Callback, at
    >>> from loopline.testing import Recorder, drive
    >>> class StopBelow(Callback):
    ...     def __init__(self, loss):
    ...         self.loss = loss
    ...     def on_epoch_end(self, run):
    ...         if run.metrics["val/loss"] < self.loss:
    ...             run.stop("good enough")
    >>> recorded = drive(StopBelow(0.1), metrics={"val/loss": [3.0, 2.0, 1.0, 0.5]}).trace.stream
    >>> replay(StopBelow(1.5), recorded).stop
    Asked(reason='good enough', event='epoch_end', epoch=2, step=11)
    """
    run = Run(callbacks=[callback])
    said = Replay(run)
    run.metrics = _Noting(said)
    run.saver = run.evaluator = _answered_by_nobody
    run.status = "running"
    theirs = {binding.event.name: binding.event for binding in as_listener(callback).bindings(run)}
    try:
        for entry in _entries(stream):
            _put(run, entry)
            event = SEAMS.get(entry["event"]) or theirs.get(entry["event"])
            if event is not None:
                _send(run, event, said)
            if said.stop is not None and event in (STEP_END, EPOCH_END):
                _catch_up(run, event)
                _end(run, said)
                break
    except StopRun as stop:
        said.stop = said.stop or Asked(stop.reason, entry["event"], run.epoch, run.step)
        _end(run, said)
    return said


class _Noting(Metrics):
    """Metrics that note what is logged while an event is being sent."""

    def __init__(self, said: Replay) -> None:
        super().__init__()
        self._said = said
        self.event: str | None = None

    def add(self, name: str, value: Any, weight: Any = 1) -> None:
        if self.event is not None:
            self._said.logged.append((self.event, name, value))
        super().add(name, value, weight)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.event is not None:
            self._said.logged.append((self.event, name, value))
        super().__setitem__(name, value)


def _send(run: Run, event: Event, said: Replay) -> None:
    metrics = run.metrics
    assert isinstance(metrics, _Noting)
    metrics.event = event.name
    try:
        run.emit(event)
    finally:
        metrics.event = None
    requests, place = run.requests, (event.name, run.epoch, run.step)
    if requests.stop is not None and said.stop is None:
        said.stop = Asked(requests.stop, *place)
    if requests.save is not None:
        said.saves.append(Asked(requests.save, *place))
    if requests.evaluate:
        said.evaluations.append(Asked("evaluate", *place))
    run.requests = Requests()


def _put(run: Run, entry: Mapping[str, Any]) -> None:
    """Make the run look as it did at a recorded event."""
    run.epoch, run.step, run.stage = entry["epoch"], entry["step"], entry["stage"]
    run.progress = Progress(**entry["progress"])
    run._batch = Batch(None, **entry["batch"]) if "batch" in entry else None
    run.status = entry.get("status", run.status)
    run.reason = entry.get("reason", run.reason)
    run.accumulate = entry.get("accumulate", run.accumulate)
    run.lengths = dict(entry.get("lengths", run.lengths))
    if "limits" in entry:
        run.limits = Limits(**entry["limits"])
    if entry["event"] == EXCEPTION.name:
        run.error = LooplineError(run.reason or "an error that was not recorded")
    metrics = run.metrics
    assert isinstance(metrics, Metrics)
    match entry["event"]:
        case "epoch_start":
            metrics.begin("train")
        case "eval_start":
            metrics.begin(entry["stage"])
        case "sanity_end":
            metrics.forget("sanity")
    given: Mapping[str, Any] = entry.get("metrics", {})
    for name in given:
        if name in metrics:
            del metrics[name]  # so that the value is seen to be a new one
    for name, value in given.items():
        metrics.add(name, float(value))


def _catch_up(run: Run, event: Event) -> None:
    done = run.progress
    if event is STEP_END:
        done.steps += 1
    else:
        done.epochs, done.batches_in_epoch = done.epochs + 1, 0


def _end(run: Run, said: Replay) -> None:
    run._batch = None
    run.stage = "train"
    run.status, run.reason, run.ending = "stopped", said.stop.reason if said.stop else None, True
    for event in (STOPPED, TRAIN_END, FIT_END, TEARDOWN):
        _send(run, event, said)


def _answered_by_nobody(*_: object) -> None:
    """A replay notes what is asked for; nobody is there to do it."""


def _entries(stream: str | Path | Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    where = f"{stream}, line" if isinstance(stream, str | Path) else "entry"
    raw: Iterable[Any] = Path(stream).read_text("utf-8").splitlines() if isinstance(stream, str | Path) else stream
    for number, given in enumerate(raw, start=1):
        try:
            entry = json.loads(given) if isinstance(given, str) else given
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} {number} is not JSON: {error}. A stream is what Recorder.save wrote.") from error
        wanted = ("event", "epoch", "step", "stage", "progress")
        if not isinstance(entry, Mapping) or any(name not in entry for name in wanted):
            raise ValueError(
                f"{where} {number} is not a recorded event: {given!r}. It needs {', '.join(wanted)}; "
                "a stream is what Recorder.stream holds and Recorder.save writes."
            )
        yield entry
