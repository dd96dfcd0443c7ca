"""Where bytes go: a folder, memory, or a bucket."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from ..core.errors import StoreError
from .base import Chunked, Store, check_key, check_prefix, is_key
from .local import LocalStore
from .memory import MemoryStore
from .remote import RemoteStore

__all__ = [
    "Chunked",
    "LocalStore",
    "MemoryStore",
    "RemoteStore",
    "Store",
    "check_key",
    "check_prefix",
    "is_key",
    "store_of",
]


def store_of(given: Store | str | os.PathLike[str]) -> Store:
    """The store that is meant: by itself, by the path of a folder, or by a URL.

    >>> store_of("/tmp/runs"), store_of("file:///tmp/runs"), store_of("memory://runs")
    (LocalStore('/tmp/runs'), LocalStore('/tmp/runs'), RemoteStore('memory://runs'))
    """
    if isinstance(given, Store):
        return given
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{given!r} is not a store, nor a path or URL of one")
    place = os.fspath(given)
    if not isinstance(given, str) and re.match(r"[a-z][a-z0-9+.]+:/[^/]", place):
        raise StoreError(f"{given!r} was a URL before it was made a path; give it as text.")
    scheme, separator, rest = place.partition("://")
    if not separator:
        return LocalStore(place)
    if scheme not in ("file", "local"):
        return RemoteStore(place)
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise StoreError(
            f"{place} lacks a slash, or means another machine; a folder of this one is {scheme}:///{path}."
        )
    return LocalStore(unquote(path))
