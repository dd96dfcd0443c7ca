"""Records as lines for people."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ..core.when import Every, When
from .base import Record, Sink

__all__ = ["ConsoleSink"]


class ConsoleSink(Sink):
    """One readable line for each record, on standard error or wherever `write` puts it.

    The line of a whole epoch's means says "in all". Epochs are numbered as everywhere else, from 0.

    >>> sink = ConsoleSink(write=print)
    >>> sink.write(Record("step", 1200, 1200, 3, 38400, "train", 0.0, {"train/loss": 0.41234, "train/lr": 1e-5}))
    epoch 3  step 1200  train/loss 0.4123  train/lr 1e-05
    """

    def __init__(self, write: Callable[[str], object] | None = None, when: When = Every(steps=50)) -> None:
        if write is not None and not callable(write):
            raise TypeError(f"ConsoleSink(write={write!r}): give a function that takes a line of text, such as print.")
        self.when = when
        self._write = _to_stderr if write is None else write

    def write(self, record: Record) -> None:
        """Say one record."""
        in_all = " in all" if record.kind == "epoch" and record.stage == "train" else ""
        metrics = [f"{name} {_short(value)}" for name, value in record.metrics.items()]
        self._write("  ".join([f"epoch {record.epoch}{in_all}", f"step {record.step}", *metrics]))


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


def _short(value: float) -> str:
    """Four digits that matter; large numbers without an exponent."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
