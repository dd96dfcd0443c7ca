"""What happened in a run: as lines for people and golden files, and as a stream that `replay` can send again."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from ..core.binding import Binding, Handler
from ..core.event import EPOCH_END, EVAL_END, EXCEPTION, FIT_END, SEAMS, STOPPED, TEARDOWN, TRAIN_END, Event
from ..core.run import Run, Stage
from ..metrics import Mean, Metrics

__all__ = ["Recorder"]

FIRST, LAST = -(10**9), 10**9
_STAGES = get_args(Stage)


class Recorder:
    """A listener that writes down every event that it hears, all seams where none are named.

    It is called before the other listeners of an event, and reads no tensor but at EVAL_END and EPOCH_END, where the
    stream gets the metrics that are new.

    >>> from loopline import Trainer, at
    >>> from loopline.testing import TinyTask, tiny_loader
    >>> recorder = Recorder([at.STEP_END, at.EPOCH_END])
    >>> run = Trainer(TinyTask(), callbacks=[recorder], progress=False).fit(tiny_loader(batches=2), epochs=1)
    >>> print(recorder.text, end="")
    step_end epoch=0 step=0 stage=train steps=0 batches=1
    step_end epoch=0 step=1 stage=train steps=1 batches=2
    epoch_end epoch=0 step=1 stage=train steps=2 batches=2
    """

    def __init__(self, events: Iterable[Event] | None = None) -> None:
        self.events = tuple(SEAMS.values()) if events is None else tuple(events)
        if wrong := [event for event in self.events if not isinstance(event, Event)]:
            raise TypeError(f"Recorder({wrong[0]!r}): an event is an object such as at.STEP_END.")
        self.lines: list[str] = []
        self.stream: list[dict[str, Any]] = []
        self._seen: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        self._unmeasured: list[dict[str, Any]] = []

    def bindings(self, run: Run) -> Iterable[Binding]:
        """A handler for each event, and a late one where metrics are read."""
        for event in self.events:
            yield Binding(event, self._writer(event), owner=self, order=FIRST)
            if event is EVAL_END or event is EPOCH_END:
                yield Binding(event, self._measure, owner=self, order=LAST)

    @property
    def text(self) -> str:
        """The lines as one text."""
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def names(self) -> list[str]:
        """The names of the events alone."""
        return [entry["event"] for entry in self.stream]

    def save(self, path: str | Path) -> None:
        """Write the stream as JSON lines, for `replay`."""
        lines = [json.dumps(entry, allow_nan=False) for entry in self.stream]
        Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def assert_equal(self, path: str | Path, *, rewrite: bool = False) -> None:
        """Compare with a golden file, or write it anew; what differs is shown as a diff."""
        path = Path(path)
        if rewrite:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.text, encoding="utf-8")
            return
        if not path.exists():
            raise AssertionError(
                f"There is no golden file {path}. To write it: pytest --regold, and read what it wrote."
            )
        golden = path.read_text(encoding="utf-8")
        if golden != self.text:
            diff = difflib.unified_diff(
                golden.splitlines(), self.lines, fromfile=str(path), tofile="this run", lineterm="", n=2
            )
            raise AssertionError(
                "The events are not those of the golden file. If these are right: pytest --regold\n" + "\n".join(diff)
            )

    def _writer(self, event: Event) -> Handler:
        def write(run: Run, **payload: object) -> None:
            self.lines.append(_line(event, run))
            entry = self._entry(event, run)
            self.stream.append(entry)
            if event is EVAL_END or event is EPOCH_END:
                self._unmeasured.append(entry)

        return write

    def _entry(self, event: Event, run: Run) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "event": event.name,
            "epoch": run.epoch,
            "step": run.step,
            "stage": run.stage,
            "progress": asdict(run.progress),
        }
        if run.in_batch:
            batch = run.batch
            entry["batch"] = {
                "index": batch.index,
                "size": batch.size,
                "first_of_window": batch.first_of_window,
                "last_of_window": batch.last_of_window,
            }
        facts = {
            "status": run.status,
            "reason": run.reason,
            "accumulate": run.accumulate,
            "limits": {"epochs": run.limits.epochs, "steps": run.limits.steps},
            "lengths": dict(run.lengths),
        }
        changed = {name: fact for name, fact in facts.items() if name not in self._told or self._told[name] != fact}
        self._told.update(changed)
        return entry | changed

    def _measure(self, run: Run) -> None:
        entry, metrics = self._unmeasured.pop(), run.metrics
        if not isinstance(metrics, Metrics):
            return
        found: dict[str, Any] = {}
        for stage in dict.fromkeys(name.split("/")[0] for name in metrics):
            if entry["event"] == EVAL_END.name and stage in _STAGES and stage != run.stage:
                continue  # of a pass that is still in progress, perhaps around this one
            for name in metrics.fresh(stage):
                value = metrics.entry(name)
                if self._seen.get(name) is value and isinstance(value, Mean):
                    continue
                if isinstance(value, Mean) or not hasattr(value, "compute"):
                    self._seen[name] = value
                    found[name] = value
        if found:
            entry["metrics"] = {name: _plain(value) for name, value in metrics.read(found).items()}


def _line(event: Event, run: Run) -> str:
    words = [event.name, f"epoch={run.epoch}", f"step={run.step}"]
    if run.in_batch:
        words.append(f"batch={run.batch.index}")
    words += [f"stage={run.stage}", f"steps={run.progress.steps}", f"batches={run.progress.batches}"]
    if event in (STOPPED, TRAIN_END, FIT_END, EXCEPTION, TEARDOWN):
        words.append(f"status={run.status}")
        if run.reason is not None:
            words.append(f"reason={run.reason!r}")
    return " ".join(words)


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no word for these
