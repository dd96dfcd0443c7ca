"""Failures that are passed over in a long run are errors in a test of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..core.binding import Binding
from ..core.callback import Callback

if TYPE_CHECKING:
    from ..core.run import Run

__all__ = ["Strict"]


class Strict(Callback):
    """Makes every failure of a callback an error that ends the run, whatever its `on_error` says.

    For tests and continuous integration. Nothing else changes: observers are called in the same way, so a run in which
    nothing fails is the same with it and without it. What fails on a thread, such as a sink, is raised at TEARDOWN.

    >>> from loopline import Run, loop
    >>> from loopline.callbacks import Lambda
    >>> typo = Lambda(on_epoch_end=lambda run: run.modle, on_error="disable")
    >>> with loop.fit(Run(callbacks=[typo, Strict()])) as run:
    ...     for _ in loop.epochs(run, 1):
    ...         pass
    Traceback (most recent call last):
        ...
    AttributeError: 'Run' object has no attribute 'modle'
    raised by Lambda at epoch_end, epoch 0, step 0
    """

    def bindings(self, run: Run) -> Iterable[Binding]:
        """None: being attached is all that it does."""
        run._strict = True
        return ()
