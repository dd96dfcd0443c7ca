"""Files that are read by asking for the bytes at a position."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, BinaryIO

__all__ = ["Fetch", "reading"]

Fetch = Callable[[int, memoryview], int]
"""Fills the buffer, or a part of it, with the bytes from a position on, and says how many these are; never none."""


def reading(fetch: Fetch, size: int, *, buffer: int, close: Callable[[], None] | None = None) -> BinaryIO:
    """A file of this many bytes, which are fetched when they are read."""
    return io.BufferedReader(_Raw(fetch, size, close), buffer)


class _Raw(io.RawIOBase):
    def __init__(self, fetch: Fetch, size: int, close: Callable[[], None] | None) -> None:
        self._fetch = fetch
        self._size = size
        self._at = 0
        self._close = close

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        count = self._fetch(self._at, view) if len(view) else 0
        self._at += count
        return count

    def readall(self) -> bytes:
        # what is inherited would ask for 8 KB at a time
        view = memoryview(bytearray(max(0, self._size - self._at)))
        done = 0
        while done < len(view) and (count := self.readinto(view[done:])):
            done += count
        return bytes(view[:done])

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"seek({offset}, {whence}) leads to {start + offset}, before the beginning")
        self._at = start + offset
        return self._at

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._close is not None:
                self._close()
