"""What callbacks that watch one metric have in common: the words and checks, not the acting."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from ..core.progress import Progress
from ..core.run import Run

__all__ = ["Mode", "check_mode", "from_scratch", "improves"]

Mode: TypeAlias = Literal["min", "max"]


def improves(value: float, best: float | None, *, mode: Mode, min_delta: float = 0.0) -> bool:
    """Whether a value is better than the best one so far, by more than `min_delta`. NaN and infinity never are."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if mode == "min" else value > best + min_delta


def check_mode(owner: object, mode: object) -> None:
    """Refuse, in a constructor, what is neither "min" nor "max"."""
    if mode not in get_args(Mode):
        raise ValueError(
            f"{type(owner).__qualname__}(mode={mode!r}): say 'min' where a smaller value is better, such as a loss, "
            "or 'max' where a larger one is, such as an accuracy."
        )


def from_scratch(run: Run) -> bool:
    """Whether a training begins with nothing done: what a callback remembers is then of another run."""
    return run.progress == Progress()
