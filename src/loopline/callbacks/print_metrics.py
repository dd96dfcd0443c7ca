"""Metrics as lines of text, and how a number is written wherever people read it."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from ..core.binding import Binding
from ..core.callback import Callback
from ..core.event import STEP_END
from ..core.when import Every, When
from ..metrics import Mean, Metrics, Watched

if TYPE_CHECKING:
    from ..core.run import Run

__all__ = ["PrintMetrics", "number", "readable", "say"]


class PrintMetrics(Callback):
    """Prints a line with the latest metrics whenever it is due.

    `names` chooses the metrics and their order; without it, all are printed, in the order in which they first came.
    `write` is given each line with its line end; the default is standard output.

    >>> from loopline import Trainer
    >>> from loopline.testing import TinyTask, tiny_loader
    >>> lines = []
    >>> printer = PrintMetrics(names=["train/loss"], write=lines.append)
    >>> _ = Trainer(TinyTask(), callbacks=[printer], progress=False).fit(tiny_loader(), epochs=2)
    >>> [line.split()[:2] for line in lines]
    [['epoch', '1/2'], ['epoch', '2/2']]
    """

    ranks = "zero"
    reads = frozenset(["metrics"])
    on_error = "disable"
    careful = True

    def __init__(
        self,
        when: When = Every(epochs=1),
        names: Sequence[str] | None = None,
        *,
        write: Callable[[str], object] | None = None,
    ) -> None:
        if not isinstance(when, When):
            raise TypeError(f"PrintMetrics(when={when!r}): say when, for example Every(steps=100) or Every(epochs=1).")
        if isinstance(names, str):
            raise TypeError(f"PrintMetrics(names={names!r}): give a list of names, such as [{names!r}].")
        self.when = when
        self.names = None if names is None else list(names)
        self.write = write
        self._watched = [Watched(name) for name in self.names or ()]
        self._due = when.watch()
        self._shown: list[str] = []
        self._widths: dict[str, int] = {}

    def bindings(self, run: Run) -> Iterable[Binding]:
        """What every callback hears, but for the steps where `when` is about epochs alone."""
        steps = "steps" in getattr(self.when, "units", {"steps", "epochs"})
        return [binding for binding in super().bindings(run) if steps or binding.event is not STEP_END]

    def on_setup(self, run: Run) -> None:
        self._due = self.when.watch()
        self._shown = list(self.names or ())
        self._widths = {}

    def on_step_end(self, run: Run) -> None:
        if self._due("steps", run.step + 1):
            self._print(run, run.step + 1)

    def on_epoch_end(self, run: Run) -> None:
        for watched in self._watched:
            watched.new(run)  # says early that a name is wrong
        if self._due("epochs", run.epoch + 1):
            self._print(run, run.progress.steps)

    def on_train_end(self, run: Run) -> None:
        for watched in self._watched:
            watched.must_have_come(run)

    def _print(self, run: Run, steps: int) -> None:
        values = readable(run, self.names)
        if self.names is None:
            self._shown += [name for name in values if name not in self._shown]
        cells = [_place("epoch", run.epoch + 1, run.limits.epochs), _place("step", steps, run.limits.steps, least=5)]
        for name in self._shown:
            said = number(values[name]) if name in values else "-"
            width = self._widths[name] = max(self._widths.get(name, 6), len(said))
            cells.append(f"{name} {said:>{width}}")
        (self.write or say)("  ".join(cells) + "\n")


def number(value: float) -> str:
    """A measured value in about five characters.

    >>> [number(value) for value in (0.9612345, 12.34567, 1234.5, 2.5e-5, 3e7, float("nan"))]
    ['0.9612', '12.346', '1234.5', '2.50e-05', '3.00e+07', 'nan']
    """
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{value:.2e}"
    return f"{value:.{4 if size < 10 else 3 if size < 100 else 2 if size < 1000 else 1}f}"


def say(text: str) -> None:
    """Write to standard output; a reader that has gone is none of a run's business."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(text)


def readable(run: Run, names: Iterable[str] | None = None, *, elsewhere: bool = False) -> dict[str, float]:
    """The metrics that can be read here and now without asking anybody else.

    On several ranks an object with `compute` may start an exchange that the other ranks take no part in, and on
    another thread (`elsewhere`) it may be changed while it is read: it is left out there.
    """
    metrics = cast(Metrics, run.metrics)
    ask = not elsewhere and run.comm.world_size == 1
    wanted = [name for name in (metrics if names is None else names) if name in metrics]
    return metrics.read(name for name in wanted if _one_number(metrics.entry(name), ask))


def _one_number(entry: Any, ask: bool) -> bool:
    if isinstance(entry, Tensor):
        return entry.numel() == 1
    return isinstance(entry, Mean | int | float) or (ask and hasattr(entry, "compute"))


def _place(unit: str, count: int, of: int | None, *, least: int = 1) -> str:
    return f"{unit} {count:>{least}}" if of is None else f"{unit} {count:>{len(str(of))}}/{of}"
