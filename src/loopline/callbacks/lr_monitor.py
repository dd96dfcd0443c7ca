"""Learning rates among the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..core import event as at
from ..core.callback import Callback, on
from ..core.run import Run

__all__ = ["LRMonitor"]


class LRMonitor(Callback):
    """Notes the learning rate that each step is taken with, for sinks to write down when they write.

    One optimizer with one group of parameters gives `train/lr`; otherwise `train/lr/<optimizer>/<group>`, by index, or
    by the group's "name" where it has one of its own. With `momentum=True` there is `train/momentum` likewise, for
    Adam its first beta. The values are the latest ones, not means over the epoch.

    A rate is taken just before the optimizer steps, after whoever writes "lr" there; schedulers move later. In a step
    that calls its optimizers by itself, and never `loop.optimizer_step`, it is the rate at the step's end.

    >>> import torch
    >>> from loopline import Run, loop, on, at
    >>> model = torch.nn.Linear(1, 1)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> seen = []
    >>> @on(at.STEP_END, reads={"metrics"})
    ... def see(run):
    ...     seen.append(run.metrics["train/lr"])
    >>> run = Run(model=model, optimizers=[sgd], callbacks=[see, LRMonitor()])
    >>> with loop.fit(run):
    ...     for _ in loop.epochs(run, 1):
    ...         for x in loop.batches(run, [torch.ones(1, 1)] * 3):
    ...             loop.backward(run, model(x).sum())
    ...             changed = loop.optimizer_step(run)
    ...             sgd.param_groups[0]["lr"] /= 2
    >>> seen
    [0.5, 0.25, 0.125]
    """

    reads = frozenset({"lr"})
    writes = frozenset({"metrics/train/lr", "metrics/train/momentum"})

    def __init__(self, *, momentum: bool = False) -> None:
        self.momentum = momentum
        self._names: list[str] = []
        self._noted: int | None = None

    def on_train_start(self, run: Run) -> None:
        """Look at the groups anew."""
        self._names = []
        self._noted = None

    def on_before_optimizer_step(self, run: Run) -> None:
        """Take the rates while they are those of this step."""
        self._note(run)
        self._noted = run.step

    @on(at.STEP_END, reads=())
    def on_step_end(self, run: Run) -> None:
        """Take the rates if this step had no moment for it."""
        if self._noted != run.step:
            self._note(run)

    def _note(self, run: Run) -> None:
        groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
        if len(groups) != len(self._names):
            self._rename(run)
        metrics = run.metrics
        for name, group in zip(self._names, groups, strict=True):
            metrics[f"train/lr{name}"] = _as_it_is(group["lr"])
            if self.momentum and (momentum := _momentum(group)) is not None:
                metrics[f"train/momentum{name}"] = _as_it_is(momentum)

    def _rename(self, run: Run) -> None:
        for old in self._names:  # groups were added: `train/lr` is now several
            for kind in ("lr", "momentum"):
                run.metrics.pop(f"train/{kind}{old}", None)
        self._names = list(_names(run))


def _names(run: Run) -> Iterator[str]:
    several = sum(len(optimizer.param_groups) for optimizer in run.optimizers) > 1
    for index, optimizer in enumerate(run.optimizers):
        own = [group.get("name") for group in optimizer.param_groups]
        for place, name in enumerate(own):
            mine = name if name is not None and own.count(name) == 1 else place
            yield f"/{index}/{mine}" if several else ""


def _momentum(group: dict[str, Any]) -> Any:
    return group["betas"][0] if "betas" in group else group.get("momentum")


def _as_it_is(value: Any) -> Any:
    # a scheduler moves a tensor in place; copying it waits for nothing
    return value.detach().clone() if isinstance(value, Tensor) else value
