"""Several ranks in one process: threads that really wait for each other."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["FakeComm", "run_ranks"]

T = TypeVar("T")


class FakeComm:
    """A Comm of a process that plays one rank of several.

    Those of one `FakeComm.world(n)` meet each other, each on a thread of its own: see `run_ranks`. One made by itself
    is answered as if all ranks had said the same. `calls` holds what was called, in order.

    >>> FakeComm(rank=1, world_size=3).gather("x")
    ['x', 'x', 'x']
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, *, local_rank: int | None = None, meeting: _Meeting | None = None
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"FakeComm(rank={rank}, world_size={world_size}): ranks go from 0 to {world_size - 1}.")
        self.rank = rank
        self.world_size = world_size
        self.local_rank = rank if local_rank is None else local_rank
        self.calls: list[tuple[str, Any]] = []
        self._meeting = meeting

    @classmethod
    def world(cls, size: int, *, timeout_s: float = 10.0) -> list[FakeComm]:
        """The comms of all ranks. Whoever waits longer than the timeout is told who did not come, and to what."""
        meeting = _Meeting(size, timeout_s)
        return [cls(rank, size, meeting=meeting) for rank in range(size)]

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag: is it true on any rank?"""
        all_flags = self._meet("any", flags, f"any of {len(flags)} flags")
        return tuple(any(of_ranks) for of_ranks in zip(*all_flags, strict=True))

    def gather(self, value: object) -> list[object]:
        """A copy of every rank's value, in the order of the ranks."""
        return self._meet("gather", value, "gather")

    def broadcast(self, value: T, src: int = 0) -> T:
        """A copy of the value of rank `src`."""
        if not 0 <= src < self.world_size:
            raise ValueError(f"broadcast(src={src}): ranks go from 0 to {self.world_size - 1}.")
        return cast(T, self._meet("broadcast", value, f"broadcast from rank {src}")[src])

    def barrier(self, why: str) -> None:
        """Wait for all ranks."""
        self._meet("barrier", why, f"barrier({why!r})")

    def leave(self, how: str) -> None:
        """Say that this rank will come to nothing any more, so that nobody waits for it."""
        if self._meeting is not None:
            self._meeting.leave(self.rank, how)

    def _meet(self, name: str, value: Any, place: str) -> list[Any]:
        self.calls.append((name, value))
        parcel = pickle.dumps(value)  # what travels between processes is a copy
        parcels = [parcel] * self.world_size
        if self._meeting is not None:
            parcels = self._meeting.meet(self.rank, place, parcel)
        return [pickle.loads(parcel) for parcel in parcels]


def run_ranks(function: Callable[[FakeComm], T], size: int, *, timeout_s: float = 10.0) -> list[T]:
    """Call `function(comm)` for every rank, each on its own thread; give what each returned.

    An error is raised as it is, with a note that names its rank; the other ranks do not wait for that one.

    >>> run_ranks(lambda comm: comm.gather(comm.rank * 10), 3)
    [[0, 10, 20], [0, 10, 20], [0, 10, 20]]
    """
    comms = FakeComm.world(size, timeout_s=timeout_s)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def play(comm: FakeComm) -> None:
        try:
            results[comm.rank] = function(comm)
        except BaseException as error:  # noqa: BLE001 - raised on the thread that asked
            errors[comm.rank] = error
            comm.leave(f"failed with {type(error).__name__}: {error}")
        else:
            comm.leave("has finished")

    threads = [threading.Thread(target=play, args=[comm], name=f"rank {comm.rank}", daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise _worst(errors)
    return [results[rank] for rank in range(size)]


class _LeftAlone(RuntimeError):
    """A rank waited for one that had left."""


class _Meeting:
    """Where the ranks of one world wait for each other."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.here: dict[int, tuple[str, bytes]] = {}
        self.last: dict[int, tuple[str, bytes]] = {}
        self.gone: dict[int, str] = {}
        self.rounds = 0
        self.broken: BaseException | None = None

    def meet(self, rank: int, place: str, parcel: bytes) -> list[bytes]:
        with self.changed:
            self._check(place)
            round_before = self.rounds
            self.here[rank] = (place, parcel)
            if len(self.here) == self.size:
                self._all_have_come()
            elif not self.changed.wait_for(lambda: self._settled(round_before), self.timeout_s):
                missing = _ranks(set(range(self.size)) - set(self.here))
                self._break(
                    TimeoutError(
                        f"{missing} did not come to {place} within {self.timeout_s:g} s; "
                        f"there {_waits(self.here)} {_ranks(self.here).lower()}."
                    )
                )
            if self.rounds == round_before:
                self._check(place)
            # the next round cannot end before this rank comes to it, so `last` is still this round's
            return [self.last[r][1] for r in range(self.size)]

    def leave(self, rank: int, how: str) -> None:
        with self.changed:
            self.gone[rank] = how
            self.changed.notify_all()

    def _settled(self, round_before: int) -> bool:
        return self.rounds > round_before or self.broken is not None or bool(self.gone)

    def _all_have_come(self) -> None:
        if len({place for place, _ in self.here.values()}) > 1:
            met = "; ".join(f"rank {rank} at {self.here[rank][0]}" for rank in sorted(self.here))
            self._break(
                RuntimeError(f"The ranks met at different calls: {met}. All ranks must call the same, in order.")
            )
            return
        self.last, self.here = self.here, {}
        self.rounds += 1
        self.changed.notify_all()

    def _check(self, place: str) -> None:
        if self.broken is not None:
            raise type(self.broken)(*self.broken.args)
        if self.gone:
            lost = "; ".join(f"rank {rank} {how}" for rank, how in sorted(self.gone.items()))
            raise _LeftAlone(f"Nobody can meet at {place} any more: {lost}.")

    def _break(self, error: BaseException) -> None:
        self.broken = error
        self.changed.notify_all()


def _worst(errors: dict[int, BaseException]) -> BaseException:
    """The error of the lowest rank that failed by itself; the others are told of in its notes."""
    own = {rank: error for rank, error in errors.items() if not isinstance(error, _LeftAlone)} or errors
    first = min(own)
    own[first].add_note(f"on rank {first}")
    for rank, error in sorted(own.items()):
        if rank != first:
            own[first].add_note(f"rank {rank} failed too: {type(error).__name__}: {error}")
    return own[first]


def _ranks(ranks: Any) -> str:
    return ("Rank " if len(ranks) == 1 else "Ranks ") + ", ".join(map(str, sorted(ranks)))


def _waits(ranks: Any) -> str:
    return "waits" if len(ranks) == 1 else "wait"
