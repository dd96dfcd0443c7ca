"""Keys as files of any filesystem that fsspec knows, of which no more is taken for granted than a rename."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from ._pieces import Pieces, in_blocks
from ._reading import Fetch
from ._retry import Again, Patience
from .base import is_temporary, temporary_for

__all__ = ["PlainPlace"]

logger = logging.getLogger("loopline")

_BLOCK = 8 << 20
_ABSENT = (FileNotFoundError, NotADirectoryError)

# one for all: two stores of one process may be of one place
_WRITING_NEW = threading.Lock()


class PlainPlace:
    """A folder of a filesystem. What is put is written beside its place and moved there when it is complete.

    What the filesystem calls a move decides whether there is a moment in which neither the old nor the new is there.
    """

    def __init__(self, fs: Any, root: str, name: str, patience: Patience) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._name = name
        self._patience = patience
        self._warned = False

    def put(self, key: str, pieces: Pieces) -> None:
        """Written beside its place and moved. Only what is small can be tried again: the rest is read only once."""
        blocks = in_blocks(pieces, _BLOCK)
        first, second = next(blocks, b""), next(blocks, None)
        if second is None:
            self._patience("put", lambda: self._write(key, [first]))
        else:
            self._write(key, chain((first, second), blocks))

    def put_new(self, key: str, data: bytes) -> bool:
        """A look, and then a put: between the two another process may come, of which it warns."""
        with _WRITING_NEW:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s cannot store a key only where there is none: two processes that write a key at once may both "
                    "be told that they were the first. Let only one run write there at a time.",
                    self._name,
                )
            if self._is_there(key):
                return False
            self._patience("put", lambda: self._write(key, [data]))
            return True

    def open(self, key: str) -> tuple[Fetch, int]:
        """A small file whole, a large one by ranges."""
        path = self._path(key)

        def attempt() -> tuple[int, bytes]:
            found = self._fs.info(path)
            if found["type"] != "file":
                raise FileNotFoundError(path)
            if found["size"] > _BLOCK:
                return found["size"], b""
            data: bytes = self._fs.cat_file(path)
            return len(data), data

        self._fs.invalidate_cache()
        try:
            size, whole = self._patience("read", attempt)
        except NotADirectoryError:
            raise FileNotFoundError(path) from None

        def fetch(at: int, buffer: memoryview) -> int:
            count = min(len(buffer), _BLOCK)

            def attempt() -> bytes:
                data: bytes = self._fs.cat_file(path, start=at, end=at + count)
                if len(data) != count:
                    raise Again(f"{len(data)} bytes came instead of {count}")
                return data

            data = whole[at : at + count] or self._patience("read", attempt)
            buffer[: len(data)] = data
            return len(data)

        return fetch, size

    def keys(self, prefix: str) -> list[str]:
        """What is under a prefix."""
        return [path for path in self._paths(prefix.rpartition("/")[0]) if path.startswith(prefix)]

    def delete(self, key: str) -> None:
        """Remove it; the folders stay."""
        self._remove(key)

    def sweep(self) -> int:
        """Remove what was written beside its place and never moved."""
        found = [path for path in self._paths("") if is_temporary(path.rpartition("/")[2])]
        for path in found:
            self._remove(path)
        return len(found)

    def _is_there(self, key: str) -> bool:
        self._fs.invalidate_cache()
        try:
            self._patience("look", lambda: self._fs.info(self._path(key)))
        except _ABSENT:
            return False
        return True

    def _remove(self, path: str) -> None:
        def attempt() -> None:
            with suppress(*_ABSENT):
                if self._fs.info(self._path(path))["type"] == "file":
                    self._fs.rm_file(self._path(path))

        self._fs.invalidate_cache()
        self._patience("delete", attempt)

    def _write(self, key: str, blocks: Iterable[bytes]) -> None:
        folder, _, name = self._path(key).rpartition("/")
        temporary = f"{folder}/{temporary_for(name)}"
        with suppress(OSError, NotImplementedError):  # some have no folders to make
            self._fs.makedirs(folder, exist_ok=True)
        try:
            with self._fs.open(temporary, "wb") as file:
                for block in blocks:
                    file.write(block)
            self._fs.mv(temporary, self._path(key))
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _paths(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        found = self._patience("list", lambda: list(self._files(self._path(folder) if folder else self._root)))
        return [path.removeprefix(f"{self._root}/") for path in found]

    def _files(self, folder: str) -> Iterator[str]:
        # not `find`: where a folder cannot be listed, that says it is empty
        try:
            entries = self._fs.ls(folder, detail=True)
        except _ABSENT:
            return
        for entry in entries:
            if entry["type"] == "file":
                yield entry["name"]
            elif entry["name"].rstrip("/") != folder:
                yield from self._files(entry["name"].rstrip("/"))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"
