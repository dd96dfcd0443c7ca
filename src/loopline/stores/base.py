"""What a store is: a place for bytes under keys, be it a folder, a bucket or memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from ..core.errors import StoreError

__all__ = ["Chunked", "Store", "check_key", "check_prefix", "is_key", "is_temporary", "temporary_for"]

_PART = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,127}")
_TEMPORARY = re.compile(r"\.[A-Za-z0-9._=-]+\.[0-9a-f]{16}\.tmp")
_RULE = "Between its slashes stand letters, digits and . _ = -, one to 128 of them, of which the first is no dot."


class Chunked(Protocol):
    """Bytes that are given some MB at a time from where they lie, so that a store need not copy them."""

    @property
    def nbytes(self) -> int:
        """How many they are in all."""
        ...

    def chunks(self) -> Iterable[memoryview]:
        """They themselves; what is given stays as it is until the next is asked for."""
        ...


@runtime_checkable
class Store(Protocol):
    """Keys are text with '/', values are bytes. There is no append and there are no folders: object stores have none.

    A key's parts are made of letters, digits and `._=-`, at most 128 of them, and none begins with a dot. No key is
    the folder of another: where 'a/b' is stored, 'a' may be refused. What fails raises StoreError with the cause; a
    key that is not there, NoSuchKey. Methods may be called on any thread.
    """

    @property
    def name(self) -> str:
        """How messages call it: a path or URL, without secrets."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder on this machine that it keeps its bytes in, if it has one."""
        ...

    def put(self, key: str, data: BinaryIO | Chunked) -> None:
        """Store what can be read from `data`: durable when it returns, and at every moment whole or not there.

        An error that `data` raises passes through as it is, and what was stored stays.
        """
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Store only if nothing is there, and say whether it was stored: of several writers exactly one is told so.

        Where only the bytes can tell whose they are, after an answer that was lost, writers of equal bytes may all be
        told so. If it raises, the key is not there, or the store could not be asked.
        """
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

    def sweep(self) -> int:
        """Remove what killed writers left half-written, and say how many such there were.

        It is only for who alone writes: it would take from others what they are writing at this moment.
        """
        ...


def is_key(text: str) -> bool:
    """Whether something can be stored under this.

    >>> [is_key(text) for text in ("a/b.json", "/a", "a//b", "a/../b", ".a")]
    [True, False, False, False, False]
    """
    return all(_PART.fullmatch(part) for part in text.split("/"))


def check_key(key: str) -> None:
    """Refuse what is not a key, and so every path that would lead out of a store."""
    if not is_key(key):
        raise StoreError(f"{_shown(key)} is not a key. {_RULE}")


def check_prefix(prefix: str) -> None:
    """Refuse what no key can begin with."""
    *folders, last = prefix.split("/")
    if not (all(_PART.fullmatch(part) for part in folders) and (not last or _PART.fullmatch(last))):
        raise StoreError(f"No key begins with {_shown(prefix)}. {_RULE}")


def temporary_for(name: str) -> str:
    """A new name beside a name, for what is being written; no key has it."""
    return f".{name}.{os.urandom(8).hex()}.tmp"


def is_temporary(name: str) -> bool:
    """Whether this is the name of something that was being written."""
    return _TEMPORARY.fullmatch(name) is not None


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 300 else f"{text[:300]!r}... ({len(text)} characters)"
