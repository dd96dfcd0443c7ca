"""What is done, what is in hand, and what has been asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Batch", "Progress", "Requests"]


@dataclass(slots=True)
class Progress:
    """What is done. Plural names count finished things; these five numbers are all that a resume needs."""

    epochs: int = 0
    steps: int = 0
    batches: int = 0
    samples: int = 0
    batches_in_epoch: int = 0

    def __post_init__(self) -> None:
        for name, count in asdict(self).items():
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"Progress({name}={count!r}): a count is a whole number, 0 or more.")


@dataclass(slots=True)
class Batch:
    """What is in hand, from BATCH_START to BATCH_END. One object serves a pass: take out of it what you keep."""

    data: Any
    index: int
    first_of_window: bool = True
    last_of_window: bool = True
    size: int = 1
    output: Any = None
    loss: Any = None


@dataclass(slots=True)
class Requests:
    """What callbacks have asked for. The loop answers at the next safe point, on all ranks at once."""

    stop: str | None = None
    save: str | None = None
    evaluate: bool = False
