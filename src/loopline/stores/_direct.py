"""Writing past the system's cache, where the data lies in whole pages and the filesystem can fetch it from there.

A large file that is written through the cache costs the processor a copy, which a training on the same machine misses:
for 1.2 GB, between 0.3 and 3 s were measured, against 0.03 s.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from typing import Any

__all__ = ["written_directly"]

_AT_ONCE = 32 << 20
_LEAST = 1 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def written_directly(file: int, data: Any) -> bool:
    """Write what has `pages` and `nbytes` to a new file, and say whether that was possible; if not, it is empty."""
    if not _O_DIRECT or not hasattr(data, "pages") or data.nbytes < _LEAST:
        return False
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | _O_DIRECT)
    except OSError:
        return False
    try:
        _write(file, data.pages(_AT_ONCE))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        return False
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    os.ftruncate(file, data.nbytes)
    return True


def _write(file: int, pages: Iterator[memoryview]) -> None:
    for page in pages:
        left = page
        while len(left):
            left = left[os.write(file, left) :]
