"""Which checkpoints are kept: `Latest(2)`, `Best(3, "val/loss")`, `Each(epochs=10)`, or several with `|`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .manifest import Ref

__all__ = ["All", "Best", "Each", "Keep", "Latest"]


class Keep:
    """A policy that says which of a run's checkpoints stay. The newest stays in any case, and so do pinned ones."""

    __slots__ = ()

    def keep(self, refs: Sequence[Ref]) -> set[Ref]:
        """Those that stay, of all that there are, oldest first."""
        raise NotImplementedError(f"{type(self).__qualname__} has no keep(refs).")

    def __or__(self, other: Keep) -> Keep:
        """What either keeps."""
        return _Either((*_parts(self), *_parts(other))) if isinstance(other, Keep) else NotImplemented


@dataclass(frozen=True, slots=True)
class Latest(Keep):
    """The newest few."""

    count: int = 2

    def __post_init__(self) -> None:
        _check(f"Latest({self.count!r})", self.count)

    def keep(self, refs: Sequence[Ref]) -> set[Ref]:
        return set(refs[-self.count :])


@dataclass(frozen=True, slots=True)
class Best(Keep):
    """The best few by a metric that was known when they were taken; of equals the older."""

    count: int
    metric: str = "val/loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check(f"Best({self.count!r})", self.count)
        if self.mode not in ("min", "max"):
            raise ValueError(f"Best(mode={self.mode!r}): give 'min' or 'max'.")
        if not isinstance(self.metric, str) or "/" not in self.metric:
            raise ValueError(f"Best(metric={self.metric!r}): metrics have a stage in their name, such as 'val/loss'.")

    def keep(self, refs: Sequence[Ref]) -> set[Ref]:
        return set(self.ranked(refs)[: self.count])

    def ranked(self, refs: Sequence[Ref]) -> list[Ref]:
        """Those that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        known = [ref for ref in refs if math.isfinite(ref.metrics.get(self.metric, math.nan))]
        return sorted(known, key=lambda ref: sign * ref.metrics[self.metric])


@dataclass(frozen=True, slots=True)
class Each(Keep):
    """One for each so many steps or epochs: the first that was taken at or after each multiple."""

    steps: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"Each(steps={self.steps!r}, epochs={self.epochs!r}): give one of the two.")
        given = self.steps if self.steps is not None else self.epochs
        _check(f"Each({given!r})", given)

    def keep(self, refs: Sequence[Ref]) -> set[Ref]:
        first: dict[int, Ref] = {}
        for ref in refs:
            place = ref.step // self.steps if self.steps else ref.epochs // (self.epochs or 1)
            if place:
                first.setdefault(place, ref)
        return set(first.values())


@dataclass(frozen=True, slots=True)
class All(Keep):
    """Every one."""

    def keep(self, refs: Sequence[Ref]) -> set[Ref]:
        return set(refs)


@dataclass(frozen=True, slots=True)
class _Either(Keep):
    parts: tuple[Keep, ...]

    def keep(self, refs: Sequence[Ref]) -> set[Ref]:
        return {ref for part in self.parts for ref in part.keep(refs)}


def _parts(policy: Keep) -> tuple[Keep, ...]:
    return policy.parts if isinstance(policy, _Either) else (policy,)


def _check(said: str, count: object) -> None:
    if type(count) is not int or count < 1:
        raise ValueError(f"{said}: give a whole number, 1 or more.")
