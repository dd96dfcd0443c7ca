"""A store that ends with its process."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..core.errors import NoSuchKey
from ._pieces import Pieces
from .base import Chunked, check_key, check_prefix

__all__ = ["MemoryStore"]


class MemoryStore:
    """Keeps its bytes in memory: for tests and notebooks.

    >>> store = MemoryStore()
    >>> store.put("a/b", io.BytesIO(b"bytes"))
    >>> store.put_new("a/b", b"others"), store.open("a/b").read(), list(store.keys("a/"))
    (False, b'bytes', ['a/b'])
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._change = threading.Lock()

    @property
    def name(self) -> str:
        """How messages call it."""
        return "memory"

    @property
    def folder(self) -> Path | None:
        """None: it has no folder."""
        return None

    def put(self, key: str, data: BinaryIO | Chunked) -> None:
        """Store what can be read from `data`."""
        check_key(key)
        value = b"".join(Pieces(data))
        with self._change:
            self._values[key] = value

    def put_new(self, key: str, data: bytes) -> bool:
        """Store only if nothing is there, and say whether it was stored."""
        check_key(key)
        with self._change:
            if key in self._values:
                return False
            self._values[key] = bytes(data)
            return True

    def open(self, key: str) -> BinaryIO:
        """Read what is stored."""
        check_key(key)
        with self._change:
            if key not in self._values:
                raise NoSuchKey(f"Nothing is stored under {key!r} in {self.name}.")
            return io.BytesIO(self._values[key])

    def keys(self, prefix: str) -> Iterator[str]:
        """The keys that begin with a prefix, sorted."""
        check_prefix(prefix)
        with self._change:
            return iter(sorted(key for key in self._values if key.startswith(prefix)))

    def delete(self, key: str) -> None:
        """Remove a key; one that is not there is no error."""
        check_key(key)
        with self._change:
            self._values.pop(key, None)

    def free(self) -> int | None:
        """None: nobody knows."""
        return None

    def sweep(self) -> int:
        """Nothing is ever half-written here."""
        return 0

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"
