"""What is put, piece by piece, however it was given."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from .base import Chunked

__all__ = ["Pieces", "in_blocks"]

_READ = 4 << 20
_WRITE = 16 << 20


class Pieces:
    """The bytes of what is put, in buffers of some MB.

    `failed` is the error that reading them raised: that is the giver's, not the store's.
    """

    def __init__(self, data: BinaryIO | Chunked) -> None:
        self.failed: Exception | None = None
        self._data: Any = data

    def __iter__(self) -> Iterator[memoryview]:
        chunks: Callable[[], Iterable[Any]] = getattr(self._data, "chunks", self._read)
        try:
            for chunk in chunks():
                view = memoryview(chunk)
                view = view.cast("B") if view.nbytes else memoryview(b"")  # what is empty cannot be cast
                for start in range(0, len(view), _WRITE):
                    yield view[start : start + _WRITE]
        except Exception as error:
            self.failed = error
            raise

    @property
    def size(self) -> int | None:
        """How many bytes there are in all, where that can be known."""
        size = getattr(self._data, "nbytes", None)
        if size is None and not hasattr(self._data, "chunks"):
            try:
                size = self._data.seek(0, io.SEEK_END)
            except (OSError, ValueError, AttributeError):
                return None
        return size

    def _read(self) -> Iterator[bytes]:
        while piece := self._data.read(_READ):
            yield piece


def in_blocks(pieces: Iterable[memoryview], size: int) -> Iterator[bytes]:
    """The same bytes in blocks of one size, of which the last may be smaller.

    From the thousandth on they double with each thousand, so that ten thousand blocks of 8 MB hold 8 TB.
    """
    number = 0
    block = bytearray()
    for piece in pieces:
        left = piece
        while len(left):
            room = (size << number // 1000) - len(block)
            block += left[:room]
            left = left[room:]
            if len(block) == size << number // 1000:
                yield bytes(block)
                number += 1
                block = bytearray()
    if block:
        yield bytes(block)
