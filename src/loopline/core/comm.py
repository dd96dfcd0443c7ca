"""How the processes of one run talk to each other, in words that need no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

__all__ = ["ALONE", "Alone", "Comm"]

T = TypeVar("T")


@runtime_checkable
class Comm(Protocol):
    """The processes of one run. Every method but the numbers must be called by all ranks, in one order."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag: is it true on any rank? One exchange for all flags."""
        ...

    def gather(self, value: object) -> list[object]:
        """The value of every rank, in the order of the ranks, on every rank."""
        ...

    def broadcast(self, value: T, src: int = 0) -> T:
        """The value of rank `src`, on every rank."""
        ...

    def barrier(self, why: str) -> None:
        """Wait for all ranks; `why` is named if one of them does not come."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """One process: every answer is known at once."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    def any(self, *flags: bool) -> tuple[bool, ...]:
        return flags

    def gather(self, value: object) -> list[object]:
        return [value]

    def broadcast(self, value: T, src: int = 0) -> T:
        return value

    def barrier(self, why: str) -> None:
        return None


ALONE = Alone()
