"""What a store is: a place for bytes under keys, be it a folder, a bucket or memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

__all__ = ["Store"]


class Store(Protocol):
    """Keys are text with '/', values are bytes. There is no append and there are no folders: object stores have none.

    A key's parts are made of letters, digits and `._=-`, at most 128 of them, and none begins with a dot. What fails
    raises StoreError with the cause; a key that is not there, NoSuchKey. Methods may be called on any thread.
    """

    @property
    def name(self) -> str:
        """How messages call it: a path or URL, without secrets."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder on this machine that it keeps its bytes in, if it has one."""
        ...

    def put(self, key: str, data: BinaryIO) -> None:
        """Store what can be read from `data`: durable when it returns, and at every moment whole or not there."""
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Store only if nothing is there, and say whether it was stored: of several writers exactly one is told so."""
        ...

    def open(self, key: str) -> BinaryIO:
        """Read what is stored."""
        ...

    def keys(self, prefix: str) -> Iterator[str]:
        """The keys that begin with a prefix, sorted. What is being written is not among them."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key, durably; one that is not there is no error."""
        ...

    def free(self) -> int | None:
        """How many bytes can still be written, where that is known."""
        ...
