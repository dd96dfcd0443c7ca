"""Keeping gradients small."""

from __future__ import annotations

import math

from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from .. import loop
from ..core.callback import Callback
from ..core.run import Run

__all__ = ["ClipNorm", "ClipValue"]


class ClipNorm(Callback):
    """Scales all gradients together so that their norm is at most `max_norm`.

    The usual norm, `norm_type=2`, is taken in the strategy's way. With `log=True` the norm before clipping is noted as
    `train/grad_norm`, the latest one and not a mean over the epoch; `max_norm=math.inf` notes it and clips nothing.

    >>> import torch
    >>> from loopline import Run, loop
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = Run(model=model, optimizers=[sgd], callbacks=[ClipNorm(1.0, log=True)])
    >>> with loop.fit(run):
    ...     for _ in loop.epochs(run, 1):
    ...         for x in loop.batches(run, [torch.tensor([[3.0, 4.0]])]):
    ...             loop.backward(run, model(x).sum())
    ...             changed = loop.optimizer_step(run)
    >>> round(run.metrics["train/grad_norm"], 3), round(model.weight.grad.norm().item(), 3)
    (5.0, 1.0)
    """

    reads = frozenset({"grads"})
    writes = frozenset({"grads"})

    def __init__(self, max_norm: float, *, norm_type: float = 2.0, log: bool = False) -> None:
        if not max_norm > 0:
            raise ValueError(f"ClipNorm({max_norm!r}): the largest norm to allow is a number above 0.")
        if not norm_type > 0:
            raise ValueError(f"ClipNorm(norm_type={norm_type!r}): give a number above 0, 2 for the usual norm.")
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.log = log
        if log:
            self.writes = frozenset({"grads", "metrics/train/grad_norm"})

    def on_before_optimizer_step(self, run: Run) -> None:
        """Clip what the whole window has added up."""
        if self.norm_type == 2:
            norm = loop.clip_gradients(run, self.max_norm)
        else:
            norm = clip_grad_norm_(loop.parameters(run), self.max_norm, self.norm_type)
        if self.log:
            run.metrics["train/grad_norm"] = norm


class ClipValue(Callback):
    """Cuts every number of every gradient to lie between -`value` and `value`.

    Unlike ClipNorm this changes the direction of the step.

    >>> import torch
    >>> from loopline import Run, loop
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = Run(model=model, optimizers=[sgd], callbacks=[ClipValue(0.5)])
    >>> with loop.fit(run):
    ...     for _ in loop.epochs(run, 1):
    ...         for x in loop.batches(run, [torch.tensor([[-3.0, 0.25]])]):
    ...             loop.backward(run, model(x).sum())
    ...             changed = loop.optimizer_step(run)
    >>> model.weight.grad
    tensor([[-0.5000,  0.2500]])
    """

    reads = frozenset({"grads"})
    writes = frozenset({"grads"})

    def __init__(self, value: float) -> None:
        if not 0 < value < math.inf:
            raise ValueError(f"ClipValue({value!r}): the largest size to allow is a finite number above 0.")
        self.value = value

    def on_before_optimizer_step(self, run: Run) -> None:
        """Clip what the whole window has added up."""
        clip_grad_value_(loop.parameters(run), self.value)
