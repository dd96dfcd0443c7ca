"""Callbacks driven through a small real run, with metrics and failures as a script wants them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .. import loop
from ..core.binding import Binding
from ..core.comm import ALONE, Comm
from ..core.event import SAVING, Event
from ..core.progress import Progress
from ..core.run import Run
from .recorder import LAST, Recorder
from .tiny import TinyTask, tiny_loader, tiny_stream

__all__ = ["Driven", "drive"]

_Script = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Driven:
    """A run that is over, what was recorded of it, and the saves that were asked for in it."""

    run: Run
    trace: Recorder
    task: TinyTask
    saves: list[str]


def drive(
    callbacks: object = (),
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batches: int = 4,
    metrics: _Script | None = None,
    accumulate: int = 1,
    unfinished: Literal["step", "drop"] = "step",
    sized: bool = True,
    fail_at: Event | None = None,
    fail_on: int = 1,
    error: BaseException | None = None,
    progress: Progress | None = None,
    task: TinyTask | None = None,
    comm: Comm = ALONE,
) -> Driven:
    """Run a callback, or a list of them, through a tiny training with an evaluation in every epoch.

    `metrics` says what is logged: one value for each epoch, None for none; names under `val/` are logged in the
    evaluation, others in the training batches. Without `epochs` there are as many as it has values, or else 3.
    The listeners of the `fail_on`-th `fail_at` are followed by `error`; the run then fails, and that error goes no
    further. `progress` makes it a run that goes on from there.

    >>> from loopline import Callback
    >>> class StopAbove(Callback):
    ...     def on_epoch_end(self, run):
    ...         if run.metrics["val/loss"] > 5:
    ...             run.stop("diverged")
    >>> run = drive(StopAbove(), metrics={"val/loss": [3, 9, 2]}).run
    >>> run.status, run.reason, run.progress.epochs
    ('stopped', 'diverged', 2)
    """
    epochs = _checked(metrics or {}, epochs, steps)
    script, task = metrics or {}, task or TinyTask()
    loader = tiny_loader(batches) if sized else tiny_stream(batches)
    validation = tiny_loader(2, seed=1)
    recorder = Recorder()
    given = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    failure = None if fail_at is None else _Failure(fail_at, fail_on, error or RuntimeError("a failure on purpose"))
    run = Run(
        model=task.model,
        optimizers=[task.optimizer],
        callbacks=[recorder, *given, *([failure] if failure else [])],
        accumulate=accumulate,
        progress=progress or Progress(),
        comm=comm,
        task=task,
    )
    saves: list[str] = []

    def save(run: Run, reason: str) -> None:
        run.emit(SAVING)
        saves.append(reason)

    def evaluation(run: Run) -> None:
        for batch in loop.evaluate(run, validation):
            run.batch.output = said = task.eval_step(batch, run)
            logged = {"val/loss": said["loss"], "val/accuracy": said["accuracy"], **_of(script, run.epoch, "val")}
            run.log({name: value for name, value in logged.items() if value is not None}, weight=run.batch.size)

    run.saver, run.evaluator = save, evaluation
    try:
        with loop.fit(run):
            for epoch in loop.epochs(run, epochs, steps=steps):
                for batch in loop.batches(run, loader, unfinished=unfinished):
                    run.batch.output = said = task.train_step(batch, run)
                    logged = {"train/loss": said["loss"], **_of(script, epoch, "train")}
                    run.log({name: value for name, value in logged.items() if value is not None})
                    loop.backward(run, said["loss"])
                    loop.optimizer_step(run)
                if not run.ending:
                    evaluation(run)
    except BaseException as raised:
        if failure is None or not _is_only(raised, failure.error):
            raise
    if failure is not None and failure.passed < failure.on:
        raise ValueError(
            f"drive(fail_at={failure.event.name}, fail_on={failure.on}): the run passed that event only "
            f"{failure.passed} times."
        )
    return Driven(run, recorder, task, saves)


class _Failure:
    """A listener that raises at the n-th time of an event, after everybody else has heard it."""

    def __init__(self, event: Event, on: int, error: BaseException) -> None:
        if on < 1:
            raise ValueError(f"drive(fail_on={on!r}): the first time is 1.")
        self.event, self.on, self.error = event, on, error
        self.passed = 0

    def bindings(self, run: Run) -> Iterable[Binding]:
        yield Binding(self.event, self._fail, owner=self, order=LAST)

    def _fail(self, run: Run, **payload: object) -> None:
        self.passed += 1
        if self.passed == self.on:
            raise self.error


def _checked(script: _Script, epochs: int | None, steps: int | None) -> int | None:
    if epochs is None and steps is None:
        epochs = max(map(len, script.values()), default=3)
    for name, values in script.items():
        if "/" not in name:
            raise ValueError(f"drive(metrics={{{name!r}: ...}}): names have a stage, such as 'val/loss'.")
        if epochs is not None and len(values) < epochs:
            raise ValueError(
                f"drive(metrics={{{name!r}: {list(values)!r}}}): {len(values)} values for {epochs} epochs. "
                "Give one for each epoch, None where nothing is logged."
            )
    return epochs


def _of(script: _Script, epoch: int, stage: str) -> dict[str, Any]:
    """What the script logs in an epoch's evaluation, or in its training batches."""
    return {
        name: values[epoch] if epoch < len(values) else None
        for name, values in script.items()
        if name.startswith("val/") is (stage == "val")
    }


def _is_only(raised: BaseException, error: BaseException) -> bool:
    if isinstance(raised, BaseExceptionGroup):
        return all(_is_only(part, error) for part in raised.exceptions)
    return raised is error
