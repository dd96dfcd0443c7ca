"""A shuffle that is computed, place by place, where others draw it and keep it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .keys import digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Permutation", "VERSION"]

VERSION = "permutation/1"
"""Names the order; whoever changes what follows from a key must change this too."""

_ROUNDS = 16  # 12 still show in a test of all orders of six
_BLOCK = 4096
_FIRST = 64


class Permutation:
    """The numbers from 0 to n - 1 in an order that follows from a key, such as (seed, epoch).

    Any place can be read without those before it, and memory does not grow with n. The order is the same on every
    platform and in every release: a Feistel network over the next power of two, walked until it leads below n.

    >>> order = Permutation(10, 7, 0)
    >>> list(order), order[3], list(order.between(3, 6))
    ([4, 0, 5, 3, 2, 8, 1, 6, 9, 7], 3, [3, 2, 8])
    """

    def __init__(self, n: int, *key: int | str) -> None:
        if n < 0:
            raise ValueError(f"Permutation({n}): give a number of 0 or more.")
        self.n = n
        self.key = key
        bits = (n - 1).bit_length()
        low = bits // 2
        self._low = np.uint64(low)
        self._low_mask, self._high_mask = np.uint64((1 << low) - 1), np.uint64((1 << bits - low) - 1)
        parts = [digest(VERSION, *key, part, size=64) for part in range(_ROUNDS // 8)]
        self._rounds = np.frombuffer(b"".join(parts), dtype="<u8").astype(np.uint64)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, place: int) -> int:
        place = range(self.n)[place]
        return next(self.between(place, place + 1))

    def __iter__(self) -> Iterator[int]:
        return self.between(0, self.n)

    def between(self, start: int, stop: int) -> Iterator[int]:
        """The numbers at the places from `start` up to `stop`, computed some thousands at a time."""
        for begin in range(max(0, start), min(stop, self.n), _BLOCK):
            yield from self._at(begin, min(begin + _BLOCK, stop, self.n))

    def first(self) -> str:
        """A hash over the first numbers: another order has another one."""
        numbers = np.fromiter(self.between(0, _FIRST), dtype="<u8")
        return digest(numbers.tobytes().hex(), size=8).hex()

    def _at(self, start: int, stop: int) -> list[int]:
        numbers = self._once(np.arange(start, stop, dtype=np.uint64))
        outside = np.flatnonzero(numbers >= self.n)
        while outside.size:  # every walk comes back: it began below n, on a circle
            further = self._once(numbers[outside])
            numbers[outside] = further
            outside = outside[further >= self.n]
        found: list[int] = numbers.tolist()
        return found

    def _once(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low, high = numbers & self._low_mask, numbers >> self._low
        for of_high, of_low in self._rounds.reshape(-1, 2):
            high ^= _mixed(low, of_high) & self._high_mask
            low ^= _mixed(high, of_low) & self._low_mask
        high <<= self._low
        high |= low
        return high


def _mixed(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The last steps of splitmix64, modulo 2**64."""
    mixed = numbers + key
    mixed ^= mixed >> 30
    mixed *= 0xBF58476D1CE4E5B9
    mixed ^= mixed >> 27
    mixed *= 0x94D049BB133111EB
    mixed ^= mixed >> 31
    return mixed
