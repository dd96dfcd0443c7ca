"""How often something happens: `Every(steps=500)`, `At(epochs=[10, 20])`, `Every(epochs=1) | Every(minutes=10)`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

__all__ = ["At", "Every", "Never", "Unit", "Watch", "When"]

Unit: TypeAlias = Literal["steps", "epochs"]
Watch: TypeAlias = Callable[[Unit, int], bool]

_STEPS: frozenset[Unit] = frozenset(["steps"])
_EPOCHS: frozenset[Unit] = frozenset(["epochs"])
_BOTH = _STEPS | _EPOCHS


class When:
    """A policy that says when something is due. It holds no state: `watch` starts one observer of it.

    The watch is asked after every step with `("steps", how many are done)` and after every epoch with
    `("epochs", how many are done)`, and need not be asked of a unit that is not among its `units`.
    """

    __slots__ = ()

    @property
    def units(self) -> frozenset[Unit]:
        """Of which it must be asked."""
        return _BOTH

    def watch(self) -> Watch:
        """Begin to observe; the answer holds the clocks, so that one policy may serve many."""
        raise NotImplementedError(f"{type(self).__qualname__} has no watch().")

    def __or__(self, other: When) -> When:
        """Due when either is."""
        if not isinstance(other, When):
            return NotImplemented
        return _Either((self, other))


@dataclass(frozen=True, slots=True)
class Every(When):
    """Due each time so many steps or epochs are done, or so much time has passed.

    >>> due = Every(steps=2).watch()
    >>> [due("steps", n) for n in (1, 2, 3, 4)]
    [False, True, False, True]
    """

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        given = [(f.name, v) for f in fields(self) if (v := getattr(self, f.name)) is not None]
        if len(given) != 1:
            said = ", ".join(f"{name}={value!r}" for name, value in given) or "nothing"
            raise ValueError(
                f"Every takes exactly one of steps, epochs, seconds, minutes; it was given {said}. "
                "Join two with |: Every(steps=500) | Every(minutes=10)."
            )
        name, value = given[0]
        if name in ("steps", "epochs") and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"Every({name}={value!r}): a number of {name} is a whole number.")
        if not isinstance(value, int | float):
            raise TypeError(f"Every({name}={value!r}): give a number of {name}.")
        if not value > 0:
            raise ValueError(f"Every({name}={value!r}) would never be due; give a number above 0.")

    @property
    def units(self) -> frozenset[Unit]:
        return _STEPS if self.steps else _EPOCHS if self.epochs else _BOTH

    def watch(self) -> Watch:
        unit: Unit = "steps" if self.steps is not None else "epochs"
        every = self.steps if self.steps is not None else self.epochs
        if every is not None:
            return lambda asked, count: asked == unit and count % every == 0
        return _timer(self.seconds if self.seconds is not None else 60.0 * (self.minutes or 0.0))


@dataclass(frozen=True, slots=True, init=False)
class At(When):
    """Due once at each of the given counts of steps or epochs.

    >>> due = At(epochs=[1, 3]).watch()
    >>> [due("epochs", n) for n in (1, 2, 3, 4)]
    [True, False, True, False]
    """

    steps: frozenset[int]
    epochs: frozenset[int]

    def __init__(self, *, steps: int | Iterable[int] = (), epochs: int | Iterable[int] = ()) -> None:
        for name, given in (("steps", steps), ("epochs", epochs)):
            counts = frozenset(given if isinstance(given, Iterable) else [given])
            if not all(type(count) is int for count in counts):
                raise TypeError(f"At({name}={given!r}): give whole numbers of {name}.")
            if wrong := sorted(count for count in counts if count < 1):
                raise ValueError(f"At({name}={wrong}) would never be due: the first count is 1.")
            object.__setattr__(self, name, counts)
        if not self.steps and not self.epochs:
            raise ValueError("At needs steps=... or epochs=..., as numbers done; for no time at all use Never().")

    @property
    def units(self) -> frozenset[Unit]:
        return (_STEPS if self.steps else frozenset()) | (_EPOCHS if self.epochs else frozenset())

    def watch(self) -> Watch:
        counts: dict[str, frozenset[int]] = {"steps": self.steps, "epochs": self.epochs}
        return lambda unit, count: count in counts[unit]


@dataclass(frozen=True, slots=True)
class Never(When):
    """Not due at any time."""

    @property
    def units(self) -> frozenset[Unit]:
        return frozenset()

    def watch(self) -> Watch:
        return lambda unit, count: False


@dataclass(frozen=True, slots=True)
class _Either(When):
    parts: tuple[When, ...]

    @property
    def units(self) -> frozenset[Unit]:
        return frozenset(unit for part in self.parts for unit in part.units)

    def watch(self) -> Watch:
        watches = [part.watch() for part in self.parts]

        def due(unit: Unit, count: int) -> bool:
            answers = [watch(unit, count) for watch in watches]  # every timer must hear the question
            return any(answers)

        return due


def _timer(seconds: float) -> Watch:
    last = time.monotonic()

    def due(unit: Unit, count: int) -> bool:
        nonlocal last
        now = time.monotonic()
        if now - last < seconds:
            return False
        last = now
        return True

    return due
