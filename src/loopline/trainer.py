"""The Trainer: it puts the parts together and writes its loop with the public functions of `loop`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from . import loop
from .core.binding import Binding, recognised
from .core.errors import BadStep, MissingMetric
from .core.event import STEP_END
from .core.progress import Progress, Requests
from .core.run import Resume, Run, Stage
from .core.when import Every, Watch, When
from .data import Placed, exactly
from .metrics import Intake, Metrics
from .randomness import seed_everything
from .sinks import Sink, Sinks
from .strategies import Parts, Precision, Strategy, precision_of, strategy_of
from .task import Task, schedules_of

if TYPE_CHECKING:
    from .checkpoint import Checkpointer

__all__ = ["Trainer"]

logger = logging.getLogger("loopline")


@dataclass(kw_only=True)
class Trainer:
    """Trains a task. Whatever it calls, anyone may call: there is no private door.

    >>> from loopline.testing import TinyTask, tiny_loader
    >>> run = Trainer(TinyTask(), progress=False).fit(tiny_loader(), epochs=2)
    >>> run.status, run.progress.epochs
    ('completed', 2)
    """

    task: Task = field(kw_only=False)
    strategy: Strategy | str = "auto"
    precision: Precision | str = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None
    evaluate: When = Every(epochs=1)
    sanity: int = 2
    callbacks: Sequence[object] = ()
    sinks: Sequence[Sink] = ()
    progress: bool = True
    seed: int | None = None
    checkpoint: Checkpointer | str | PathLike[str] | None = None
    run: Run | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.task, Task):
            raise TypeError(
                f"Trainer({type(self.task).__name__}): the first argument is a Task. For a model with a loss and an "
                "optimizer, give SupervisedTask(model, loss=..., optimizer=...)."
            )
        for name, least in (("accumulate", 1), ("sanity", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"Trainer({name}={value!r}): give a whole number, {least} or more.")
        if self.clip_norm is not None and not (isinstance(self.clip_norm, int | float) and self.clip_norm > 0):
            raise ValueError(f"Trainer(clip_norm={self.clip_norm!r}): give a norm above 0, or None.")
        if self.seed is not None and type(self.seed) is not int:
            raise TypeError(f"Trainer(seed={self.seed!r}): give a whole number, or None.")
        if isinstance(self.callbacks, str) or not isinstance(self.callbacks, Iterable):
            raise TypeError(f"Trainer(callbacks={self.callbacks!r}): give a list, such as callbacks=[...].")
        self.callbacks = tuple(self.callbacks)
        for given in self.callbacks:
            recognised(given)  # an error now, where the mistake is made
        if not isinstance(self.evaluate, When):
            raise TypeError(f"Trainer(evaluate={self.evaluate!r}): say when, for example Every(epochs=1).")
        if self.checkpoint is not None and not hasattr(type(self.checkpoint), "bindings"):
            from .checkpoint import Checkpointer  # read where it is used, as callbacks are

            self.checkpoint = Checkpointer(self.checkpoint)  # type: ignore[arg-type]
        self.strategy = strategy_of(self.strategy)
        self.precision = precision_of(self.precision)
        scaled = self.precision.scaler(self.strategy.device) is not None
        for name, asked in (("accumulate", self.accumulate > 1), ("clip_norm", self.clip_norm), ("precision", scaled)):
            if self.task.manual and asked:
                raise ValueError(
                    f"Trainer({name}={getattr(self, name)!r}): a task with manual = True makes its steps by itself, so "
                    "the Trainer cannot do this for it. Do it in train_step."
                )

    def fit(
        self,
        train: Iterable[Any],
        validation: Iterable[Any] | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        resume: Resume | Run | None = "auto",
    ) -> Run:
        """Train up to so many epochs or optimizer steps; the run that comes back says how it ended.

        `validation` is evaluated as `evaluate` says, and once more where `steps` ends the run inside an epoch.

        With a `checkpoint`, the run goes on from the newest intact one that is there, so that the same command line
        starts and restarts; `resume="must"` refuses to begin anew, and "never" to go on. The training loader's order
        and randomness then follow from the seed and the position. A signal (SIGTERM, SIGUSR1, SIGINT) lets the step
        finish, saves, and leaves with Preempted. Given an earlier run of this process as `resume`, counting goes on
        where that one stopped.
        """
        loop.check_limits(epochs, steps)
        resume = "auto" if resume is None else resume
        earlier = resume if isinstance(resume, Run) else None
        if earlier is None and resume not in ("auto", "must", "never"):
            raise ValueError(f"fit(resume={resume!r}): it can be 'auto', 'must', 'never', or an earlier Run.")
        if resume == "must" and self.checkpoint is None:
            raise ValueError("fit(resume='must') needs Trainer(checkpoint=...), where the checkpoints are.")
        if self.seed is not None and earlier is None:
            seed_everything(self.seed)
        run = self._new_run(training=True, earlier=earlier)
        run.resume = resume if isinstance(resume, str) else "auto"
        train = self._placed(train if self.checkpoint is None else self._exact(train))
        due = self.evaluate.watch()
        if validation is not None:
            self._set_up_evaluation(run, self._placed(validation), due)
        _check_watched(run)
        train_step, manual, clip_norm = self._forward(self.task.train_step), self.task.manual, self.clip_norm
        with loop.fit(run):
            log = Intake(run, "train")
            if validation is not None and self.sanity and run.progress == Progress() and not run.ending:
                run.limits.batches.setdefault("sanity", self.sanity)
                self._evaluate(run, run.loaders["val"], "sanity")
            for _ in loop.epochs(run, epochs, steps=steps):
                for batch in loop.batches(run, train):
                    said = train_step(batch, run)
                    if type(said) is not dict or (not manual and "loss" not in said):
                        said = _mapping(said, run)
                    run._batch.output = said  # type: ignore[union-attr]  # run.batch, without a call
                    loss, weight = said.get("loss"), said.get("weight")
                    if not manual:
                        loop.backward(run, loss, weight=weight)
                    log.take(said, weight)
                    if not manual:
                        loop.optimizer_step(run, clip_norm=clip_norm)
                    del batch, said  # all but the loss is freed before the next batch is fetched
                if run.evaluator is not None and (self._was_cut_short(run) or _agreed(run, due)):
                    run.evaluator(run)
        return run

    def validate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Evaluate the task on a loader; the metrics have the names that they have in training, such as val/loss."""
        return self._evaluate_alone(loader, "val")

    def test(self, loader: Iterable[Any]) -> dict[str, float]:
        """Evaluate the task on a loader under the names of a test, such as test/loss."""
        return self._evaluate_alone(loader, "test")

    def predict(self, loader: Iterable[Any]) -> list[Any]:
        """What the task's `predict_step` says of each batch, in order."""
        run = self._new_run(training=False)
        step = self._forward(self.task.predict_step)
        said: list[Any] = []
        with loop.opened(run):
            for batch in loop.evaluate(run, self._placed(loader), stage="predict"):
                run.batch.output = step(batch, run)
                said.append(run.batch.output)
        return said

    def _new_run(self, *, training: bool, earlier: Run | None = None) -> Run:
        strategy, task = self._strategy, self.task
        optimizers = _optimizers(task) if training else []
        parts = strategy.place(Parts(task.model, optimizers))
        if earlier is not None and earlier.mid_step:
            logger.warning("The run that is gone on with ended inside a step, whose work may be half done.")
        self.run = Run(
            model=parts.model,
            optimizers=parts.optimizers,
            schedulers=schedules_of(task) if training else [],
            scaler=self._precision.scaler(strategy.device) if training else None,
            accumulate=self.accumulate,
            comm=strategy.comm,
            progress=Progress() if earlier is None else copy.copy(earlier.progress),
            requests=Requests(evaluate=earlier is not None and earlier.requests.evaluate),  # one that was given up
            metrics={} if earlier is None else _gone_on(earlier.metrics),
            task=task,
            strategy=strategy,
            parts=parts,
            seed=self.seed,
            callbacks=[*self._bar(), *self.callbacks, *self._sinks(), *(self._saving() if training else [])],
        )
        return self.run

    def _set_up_evaluation(self, run: Run, loader: Iterable[Any], due: Watch) -> None:
        """What the run does when it is asked to evaluate, and who asks it at steps."""

        run.loaders["val"] = loader
        run.evaluator = lambda run: self._evaluate(run, loader, "val")
        if "steps" in self.evaluate.units:
            run.listen(_AskForEvaluation(due))

    def _was_cut_short(self, run: Run) -> bool:
        """Whether the last step came inside an epoch, so that the final weights are still to be evaluated."""
        cut = run.ending and run.status == "running"
        return cut and bool(self.evaluate.units) and not self.evaluate.watch()("steps", run.progress.steps)

    def _evaluate(self, run: Run, loader: Iterable[Any], stage: Stage) -> None:
        step = self._forward(self.task.eval_step)
        log = Intake(run, stage)
        for batch in loop.evaluate(run, loader, stage=stage):
            said = step(batch, run)
            if not isinstance(said, Mapping):
                raise BadStep(
                    f"{type(self.task).__qualname__}.eval_step returned {type(said).__name__}; it returns a mapping "
                    "of names to values, such as {'loss': loss}."
                )
            run.batch.output = said
            log.take(said, said.get("weight"))

    def _evaluate_alone(self, loader: Iterable[Any], stage: Stage) -> dict[str, float]:
        run = self._new_run(training=False)
        with loop.opened(run):
            self._evaluate(run, self._placed(loader), stage)
        return {name: value for name, value in run.metrics.items() if name.startswith(f"{stage}/")}

    def _forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._precision.forward(function, self._strategy.device)

    def _placed(self, loader: Iterable[Any]) -> Iterable[Any]:
        device = self._strategy.device
        return loader if device.type == "cpu" else Placed(loader, device)

    def _bar(self) -> list[object]:
        from .callbacks import ProgressBar  # callbacks are read when they are used

        wanted = self.progress and not any(isinstance(given, ProgressBar) for given in self.callbacks)
        return [ProgressBar()] if wanted else []

    def _sinks(self) -> list[object]:
        return [Sinks(self.sinks)] if self.sinks else []

    def _saving(self) -> list[object]:
        """Who takes checkpoints, and who sees to it that one is taken when a signal comes."""
        if self.checkpoint is None:
            return []
        from .callbacks import Preempt

        watched = any(isinstance(given, Preempt) for given in self.callbacks)
        return [self.checkpoint] if watched else [Preempt(), self.checkpoint]

    def _exact(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The loader, such that its batches follow from the seed and the position."""
        exact: Iterable[Any] = exactly(loader, self.seed, allow=self.checkpoint.allow)  # type: ignore[union-attr]
        return exact

    @property
    def _strategy(self) -> Strategy:
        return strategy_of(self.strategy)

    @property
    def _precision(self) -> Precision:
        return precision_of(self.precision)


class _AskForEvaluation:
    """Asks for an evaluation at the steps when it is due."""

    def __init__(self, due: Watch) -> None:
        self.due = due

    def bindings(self, run: Run) -> Iterable[Binding]:
        yield Binding(STEP_END, self._ask, owner=self)

    def _ask(self, run: Run) -> None:
        if self.due("steps", run.step + 1):
            run.evaluate()


def _mapping(said: Any, run: Run) -> Mapping[str, Any]:
    """What a training step returned, as a mapping; an error where the loss is missing."""
    manual, step = run.task.manual, f"{type(run.task).__qualname__}.train_step"
    if said is None and manual:
        return {}
    if said is None:
        raise BadStep(f"{step} returned None; return the loss, or a mapping with it, or set manual = True on the task.")
    if not isinstance(said, Mapping):
        return {"loss": said}
    if "loss" not in said and not manual:
        names = ", ".join(map(repr, said)) or "nothing"
        raise BadStep(f'{step} returned a mapping without "loss" (it has {names}). Return {{"loss": loss, ...}}.')
    return said


def _optimizers(task: Task) -> list[Optimizer]:
    if not any(parameter.requires_grad for parameter in task.model.parameters()):
        raise BadStep(
            f"{type(task.model).__name__} has no parameter that requires a gradient, so there is nothing to train. "
            "To measure it as it is, call validate or test."
        )
    given = task.optimizers()
    optimizers = [given] if isinstance(given, Optimizer) else list(given or ())
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise TypeError(f"{type(task).__qualname__}.optimizers() gave {given!r}: return a torch optimizer, or a list.")
    return optimizers


def _agreed(run: Run, due: Watch) -> bool:
    """Whether an evaluation is due after the pass: clocks differ between ranks, so they ask each other."""
    return run.status == "running" and not run.ending and run.comm.any(due("epochs", run.epoch + 1))[0]


def _gone_on(metrics: Any) -> Any:
    return metrics.gone_on() if isinstance(metrics, Metrics) else dict(metrics)


def _check_watched(run: Run) -> None:
    """A scheduler that waits for what nobody will measure is a mistake, seen before anything is trained."""
    for scheduled in run.schedulers:
        if scheduled.metric is not None and scheduled.metric.startswith("val/") and run.evaluator is None:
            raise MissingMetric(
                f"{type(scheduled.scheduler).__name__} watches {scheduled.metric!r}, but there is no validation data. "
                "Give some to fit, or watch a metric of training: Scheduled(..., metric='train/loss')."
            )
