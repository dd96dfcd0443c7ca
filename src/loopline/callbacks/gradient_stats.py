"""How large the gradients are."""

from __future__ import annotations

import math

import torch

from ..core.callback import Callback
from ..core.run import Run
from ..core.when import Every, Watch, When
from ._gradients import names, norms, with_gradients

__all__ = ["GradientStats"]


class GradientStats(Callback):
    """Notes the norm, the largest and the mean size of the gradients, now and then.

    They are `train/grad/norm`, `train/grad/max` and `train/grad/mean_abs`; with `per_parameter=True` also the same
    three for each parameter, such as `train/grad/norm/encoder.weight`. The values are the latest ones and stay on the
    device until somebody reads them. Taken before the step and after callbacks that edit gradients, such as ClipNorm;
    the Trainer's own `clip_norm` comes later still, so its effect is not in them.

    >>> import torch
    >>> from loopline import Run, loop
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = Run(model=model, optimizers=[sgd], callbacks=[GradientStats(Every(steps=1))])
    >>> with loop.fit(run):
    ...     for _ in loop.epochs(run, 1):
    ...         for x in loop.batches(run, [torch.tensor([[-3.0, 4.0]])]):
    ...             loop.backward(run, model(x).sum())
    ...             changed = loop.optimizer_step(run)
    >>> dict(run.metrics)
    {'train/grad/norm': 5.0, 'train/grad/max': 4.0, 'train/grad/mean_abs': 3.5}
    """

    reads = frozenset({"grads"})
    writes = frozenset({"metrics/train/grad"})
    on_error = "disable"
    careful = True

    def __init__(self, when: When = Every(steps=50), *, per_parameter: bool = False) -> None:
        if not isinstance(when, When):
            raise TypeError(f"GradientStats({when!r}): say when, for example Every(steps=50).")
        if "steps" not in getattr(when, "units", {"steps"}):
            raise ValueError(f"GradientStats({when!r}) would never be due: gradients are there once per step.")
        self.when = when
        self.per_parameter = per_parameter
        self._due: Watch = when.watch()

    def on_train_start(self, run: Run) -> None:
        """Begin to count time, where `when` counts it."""
        self._due = self.when.watch()

    def on_before_optimizer_step(self, run: Run) -> None:
        """Measure, if it is time to."""
        if not self._due("steps", run.step + 1):
            return
        changing, gradients = with_gradients(run)
        if not gradients:
            return
        norm, largest, total = (norms(gradients, order) for order in (2.0, math.inf, 1.0))
        counts = [gradient.numel() for gradient in gradients]
        note = run.metrics.__setitem__
        note("train/grad/norm", torch.linalg.vector_norm(norm))
        note("train/grad/max", largest.max())
        note("train/grad/mean_abs", total.sum() / sum(counts))
        if not self.per_parameter:
            return
        for i, name in enumerate(names(run, changing)):
            note(f"train/grad/norm/{name}", norm[i])
            note(f"train/grad/max/{name}", largest[i])
            note(f"train/grad/mean_abs/{name}", total[i] / counts[i])
