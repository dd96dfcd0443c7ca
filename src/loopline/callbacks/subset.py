"""Trying things out on a few batches."""

from __future__ import annotations

from ..core.callback import Callback
from ..core.run import Run

__all__ = ["Subset"]


class Subset(Callback):
    """Takes only the first few batches of each pass: for a quick look whether everything works.

    The numbers are batches per pass, so `train=10` is ten batches in each epoch. A stage that is left out is whole,
    and a pass that is shorter, or that somebody has limited further, stays so.

    >>> import torch
    >>> from loopline import Run, loop
    >>> run = Run(callbacks=[Subset(train=2)])
    >>> with loop.fit(run):
    ...     for _ in loop.epochs(run, 3):
    ...         for batch in loop.batches(run, [torch.ones(1)] * 100):
    ...             pass
    >>> run.progress.batches
    6
    """

    def __init__(
        self, *, train: int | None = None, val: int | None = None, test: int | None = None, predict: int | None = None
    ) -> None:
        stages = {"train": train, "val": val, "test": test, "predict": predict}
        self.limits = {stage: limit for stage, limit in stages.items() if limit is not None}
        if not self.limits:
            raise ValueError("Subset() limits nothing; say how many batches, for example Subset(train=10, val=5).")
        for stage, limit in self.limits.items():
            if isinstance(limit, bool) or not isinstance(limit, int):
                raise TypeError(
                    f"Subset({stage}={limit!r}): give a whole number of batches. A share of the data cannot be taken, "
                    "because not every loader knows its length."
                )
            if limit < 1:
                raise ValueError(
                    f"Subset({stage}={limit}): a pass has at least one batch. To leave a stage out, do not give its "
                    "loader."
                )

    def on_setup(self, run: Run) -> None:
        """Limit the passes of this run."""
        for stage, limit in self.limits.items():
            run.limits.batches[stage] = min(limit, run.limits.batches.get(stage, limit))
