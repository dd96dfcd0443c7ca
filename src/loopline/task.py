"""What is trained: a model, its optimizers, and what one batch means to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .core.errors import BadStep
from .core.run import Run, Scheduled
from .core.when import Every

__all__ = ["SupervisedTask", "Task", "schedules_of"]


class Task:
    """Subclass it and write `optimizers`, `train_step`, and what else you need.

    `train_step` returns the loss, or a mapping with "loss" in it. Its other scalars are logged, and all its values
    can be read by callbacks in `run.batch.output`. A "weight" says how much the batch counts (tokens, say); left out,
    it is the batch's size. A task with `manual = True` calls `loop.backward` and steps its optimizers by itself, as
    adversarial training needs it.
    """

    model: nn.Module
    manual: bool = False

    def optimizers(self) -> Optimizer | Sequence[Optimizer]:
        """The optimizers, made or kept by you; all of them step at the end of a window."""
        raise NotImplementedError(f"{type(self).__qualname__} has no optimizers(): return one, or a list of them.")

    def schedulers(self) -> Sequence[Scheduled]:
        """Learning-rate schedulers, each with its own `When`."""
        return ()

    def train_step(self, batch: Any, run: Run) -> Tensor | Mapping[str, Any]:
        """The forward pass and loss of one training batch."""
        raise NotImplementedError(f"{type(self).__qualname__} has no train_step(batch, run): return the loss.")

    def eval_step(self, batch: Any, run: Run) -> Mapping[str, Any]:
        """What is measured on one evaluation batch; its scalars are averaged by weight."""
        raise NotImplementedError(
            f"{type(self).__qualname__} has no eval_step(batch, run): return a mapping such as {{'loss': loss}}."
        )

    def predict_step(self, batch: Any, run: Run) -> Any:
        """What `Trainer.predict` collects for one batch."""
        raise NotImplementedError(f"{type(self).__qualname__} has no predict_step(batch, run).")


class SupervisedTask(Task):
    """Batches of (input, target): the model's output is compared with the target.

    `metrics` are functions of (output, target), averaged over the samples, or objects with `update`, `compute` and
    `reset` such as torchmetrics'; they are measured in evaluation. A bare scheduler moves at the end of an epoch, and
    ReduceLROnPlateau watches "val/loss"; give a `Scheduled` to choose.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[[Any, Any], Tensor],
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.schedulers()  # an error now, where the mistake is made
        self.metrics = dict(metrics or {})
        for name, metric in self.metrics.items():
            if name in ("loss", "output", "target", "weight"):
                raise ValueError(
                    f"metrics[{name!r}]: this name means something else in what a step returns; choose another."
                )
            if not callable(metric) and not hasattr(metric, "update"):
                raise TypeError(
                    f"metrics[{name!r}] is {metric!r}: give a function of (output, target), or an object with update, "
                    "compute and reset."
                )

    def optimizers(self) -> Optimizer | Sequence[Optimizer]:
        return self.optimizer

    def schedulers(self) -> Sequence[Scheduled]:
        if self.scheduler is None:
            return ()
        given = self.scheduler if isinstance(self.scheduler, list | tuple) else [self.scheduler]
        return [_scheduled(one) for one in given]

    def train_step(self, batch: Any, run: Run) -> Mapping[str, Any]:
        kind = type(batch)
        inputs, target = batch if (kind is tuple or kind is list) and len(batch) == 2 else _pair(batch)
        output = self.model(inputs)
        return {"loss": self.loss(output, target), "output": output, "target": target}

    def eval_step(self, batch: Any, run: Run) -> Mapping[str, Any]:
        inputs, target = _pair(batch)
        output = self.model(inputs)
        measured: dict[str, Any] = {}
        first = run.batch.index == 0
        for name, metric in self.metrics.items():
            if not hasattr(metric, "update"):
                measured[name] = _one_number(name, metric(output, target))
                continue
            if first:
                metric.reset()
            metric.update(output, target)
            measured[name] = metric
        return {"loss": self.loss(output, target), **measured, "output": output, "target": target}

    def predict_step(self, batch: Any, run: Run) -> Any:
        return self.model(batch[0] if isinstance(batch, tuple | list) else batch)


def schedules_of(task: Task) -> list[Scheduled]:
    """A task's schedulers, each with its When."""
    given: Any = task.schedulers()
    return [_scheduled(one) for one in (given if isinstance(given, Iterable) else [given])]


def _one_number(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise BadStep(
                f"metrics[{name!r}] gave a tensor of the shape {tuple(value.shape)} for a batch; it gives one number, "
                "so return its mean()."
            )
        return value.reshape(())
    return value


def _scheduled(given: Any) -> Scheduled:
    if isinstance(given, Scheduled):
        return given
    if isinstance(given, ReduceLROnPlateau):
        return Scheduled(scheduler=given, when=Every(epochs=1), metric="val/loss")
    if not callable(getattr(given, "step", None)):
        kind = "a function" if inspect.isroutine(given) else repr(given)
        raise TypeError(f"scheduler is {kind}: give a torch scheduler, or Scheduled(scheduler=..., when=...).")
    return Scheduled(scheduler=given, when=Every(epochs=1))


def _pair(batch: Any) -> Any:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch
    size = f" of {len(batch)} items" if isinstance(batch, tuple | list | dict) else ""
    raise BadStep(
        f"SupervisedTask wants batches of (input, target); this loader gives a {type(batch).__name__}{size}. "
        "Change the loader, or write a Task whose train_step knows your batches."
    )
