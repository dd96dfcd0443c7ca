"""A run: its parts, its progress, and the one line on which events travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .binding import Handler, Listener, as_listener, name_of
from .comm import ALONE, Comm
from .errors import LooplineError, NoBatch
from .event import SETUP, Event
from .guard import Circuit, summarize_failures
from .plan import Plan, compile_plan
from .progress import Batch, Progress, Requests
from .when import Watch, When

__all__ = ["Limits", "Resume", "Run", "Scheduled", "Stage", "Status"]

Stage: TypeAlias = Literal["train", "sanity", "val", "test", "predict"]
Resume: TypeAlias = Literal["auto", "must", "never"]
Status: TypeAlias = Literal["new", "running", "completed", "stopped", "interrupted", "failed"]


@dataclass(slots=True, kw_only=True)
class Scheduled:
    """A learning-rate scheduler, when it moves, and the metric it is given, if it wants one."""

    scheduler: Any
    when: When
    metric: str | None = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.scheduler, "step", None)):
            raise TypeError(f"Scheduled(scheduler={self.scheduler!r}): a scheduler has a method step().")
        if not isinstance(self.when, When):
            raise TypeError(f"Scheduled(when={self.when!r}): say when it moves, for example Every(epochs=1).")


@dataclass(slots=True)
class Limits:
    """How far the run is meant to go, and how many batches a pass of each stage may take."""

    epochs: int | None = None
    steps: int | None = None
    batches: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One training run: what every handler is given.

    `epoch` and `step` are the indices of what is in progress; `progress` counts what is done. Between the handlers of
    a seam and the safe point that follows it, the counts catch up with the indices.
    """

    model: Any = None
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Scheduled] = ()
    scaler: Any = None
    callbacks: Sequence[object] = ()
    accumulate: int = 1
    comm: Comm = ALONE
    progress: Progress = field(default_factory=Progress)
    requests: Requests = field(default_factory=Requests)
    limits: Limits = field(default_factory=Limits)
    metrics: MutableMapping[str, Any] = field(default_factory=dict)
    epoch: int = 0
    step: int = 0
    stage: Stage = "train"
    status: Status = "new"
    reason: str | None = None
    skipped: str | None = None
    interrupted: int | None = None
    ending: bool = False
    mid_step: bool = False
    error: BaseException | None = None
    record: Any = None
    task: Any = None
    strategy: Any = None
    parts: Any = None
    seed: int | None = None
    resume: Resume = "auto"
    evaluator: Any = None
    saver: Any = None
    loaders: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int | None] = field(default_factory=dict)
    scratch: dict[Any, Any] = field(default_factory=dict)
    listeners: list[Listener] = field(init=False, default_factory=list)
    _plan: Plan = field(init=False, repr=False)
    _batch: Batch | None = field(init=False, default=None, repr=False)
    _unreached: set[int] = field(init=False, default_factory=set, repr=False)
    _always_ask: bool = field(init=False, default=False, repr=False)
    _weight: Any = field(init=False, default=0, repr=False)
    _open: bool = field(init=False, default=False, repr=False)
    _in_pass: bool = field(init=False, default=False, repr=False)
    _training: bool = field(init=False, default=False, repr=False)
    _told: bool = field(init=False, default=False, repr=False)
    _answering: bool = field(init=False, default=False, repr=False)
    _may_give_up: bool = field(init=False, default=False, repr=False)
    _streams: Any = field(init=False, default=None, repr=False)
    _loader_states: dict[str, Any] = field(init=False, default_factory=dict, repr=False)
    _gave: set[str] = field(init=False, default_factory=set, repr=False)
    _calls: dict[str, int] = field(init=False, default_factory=dict, repr=False)
    _owners: dict[str, list[int]] = field(init=False, default_factory=dict, repr=False)
    _schedule: list[tuple[Scheduled, Watch, Any]] = field(init=False, default_factory=list, repr=False)
    _circuits: dict[int, Circuit] = field(init=False, default_factory=dict, repr=False)
    _apart: Callable[[Run], AbstractContextManager[object]] = field(init=False, default=nullcontext, repr=False)
    _strict: bool = field(init=False, default=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("callbacks", "optimizers", "schedulers"):
            given = getattr(self, name)
            if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
                raise TypeError(f"Run({name}={given!r}): give a list, such as {name}=[...].")
        self.epoch = self.progress.epochs
        self.step = max(0, self.progress.steps - 1)
        self.listeners = [as_listener(given) for given in self.callbacks]
        self._plan = compile_plan(self.listeners, self)

    def emit(self, event: Event, /, **payload: object) -> None:
        """Call everybody who listens for `event`, in the plan's order."""
        plan = self._plan
        try:
            if payload:
                for handler in plan[event]:
                    handler(self, **payload)
            else:
                for handler in plan[event]:
                    handler(self)
        except Exception as error:
            error.add_note(self._blame(plan, event, handler))
            raise

    def heard(self, event: Event) -> bool:
        """Whether anybody listens for `event`; ask before preparing something costly."""
        return bool(self._plan[event])

    def listen(self, *more: object) -> None:
        """Attach more listeners. Emissions under way finish on the old plan; a SETUP that is over is made up for."""
        old = {id(binding.owner) for binding in self._plan.bindings.get(SETUP, ())}
        listeners = [*self.listeners, *(as_listener(given) for given in more)]
        self._plan = compile_plan(listeners, self)
        self.listeners = listeners
        if self._open:
            late = self._plan.bindings.get(SETUP, ())
            self._unreached |= {id(binding.owner) for binding in late if id(binding.owner) not in old}
            self._set_up()

    def _set_up(self) -> None:
        """SETUP, for everybody whom it has not reached yet."""
        plan, waiting = self._plan, set(self._unreached)
        for binding, handler in zip(plan.bindings.get(SETUP, ()), plan[SETUP], strict=True):
            if id(binding.owner) in waiting:
                self._unreached.discard(id(binding.owner))
                try:
                    handler(self)
                except Exception as error:
                    error.add_note(self._blame(plan, SETUP, handler))
                    raise

    @property
    def plan(self) -> Plan:
        """Who is called when; `run.plan.describe()` prints it."""
        return self._plan

    @property
    def batch(self) -> Batch:
        """The batch in hand."""
        if self._batch is None:
            raise NoBatch(
                "No batch is in hand: run.batch can be read from batch_start to batch_end, and from eval_batch_start "
                "to eval_batch_end. To keep something of a batch for later, take it at batch_end."
            )
        return self._batch

    @property
    def training(self) -> bool:
        """Whether the run is between TRAIN_START and TRAIN_END, evaluations in it included."""
        return self._training

    @property
    def in_pass(self) -> bool:
        """Whether the training batches of an epoch are under way: false from PASS_END on."""
        return self._in_pass

    @property
    def in_batch(self) -> bool:
        """Whether a batch is in hand, so that `run.batch` can be read."""
        return self._batch is not None

    def log(self, values: Mapping[str, Any], *, weight: Any = 1) -> None:
        """Note scalars; inside an epoch they become weighted means that stay on the device.

        A name without a slash belongs to the stage: `loss` is `train/loss` in training and `val/loss` in validation.
        """
        add = getattr(self.metrics, "add", None)
        if add is None:
            raise LooplineError(
                "run.log works in a run that is open: put the loop inside `with loop.fit(run):` or "
                "`with loop.opened(run):`."
            )
        for name, value in values.items():
            add(name if "/" in name else f"{self.stage}/{name}", value, weight)

    def stop(self, reason: str) -> None:
        """End the run at the next safe point. `raise StopRun(reason)` leaves it now, in the middle of the step."""
        if self.requests.stop is None:
            self.requests.stop = reason

    def save(self, reason: str = "asked for") -> None:
        """Take a checkpoint at the next safe point."""
        if self.saver is None:
            raise LooplineError("run.save() needs somewhere to save to, and this run has no checkpointer.")
        if self.requests.save is None:
            self.requests.save = reason

    def evaluate(self) -> None:
        """Evaluate at the next safe point."""
        if self.evaluator is None:
            raise LooplineError("run.evaluate() needs validation data; give it to Trainer.fit, or set run.evaluator.")
        self.requests.evaluate = True

    def skip_step(self, reason: str) -> None:
        """Leave the weights as they are at the end of this window; its gradients are thrown away."""
        self.skipped = reason

    def _key(self, owner: object, what: str) -> str:
        """A name for something of an owner's that is the same in the next process."""
        name = name_of(owner)
        twins = self._owners.setdefault(name, [])
        if id(owner) not in twins:
            twins.append(id(owner))
        return f"{name}.{twins.index(id(owner))}/{what}"

    def _blame(self, plan: Plan, event: Event, handler: Handler) -> str:
        owner = name_of(plan.binding(event, handler).owner)
        return f"raised by {owner} at {event.name}, epoch {self.epoch}, step {self.step}"

    def close(self) -> None:
        """Let go of the plan and of what listeners kept on the run: long runs switch the garbage collector off."""
        summarize_failures(self)
        self._plan = Plan({}, {})
        self._batch = None
        self.scratch.clear()
