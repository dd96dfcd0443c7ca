"""The kernel's lock on a folder: it ends with the process that holds it, however that dies."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import StoreError
from .card import CARD_LIMIT, locked_by, parsed

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["FolderLock"]

logger = logging.getLogger("loopline")

_TRIES = 40
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})


class FolderLock:
    """A lock that is held on a folder's file `LOCK`, in which its owner's card lies meanwhile."""

    def __init__(self, path: Path, held: BaseFileLock) -> None:
        self._path, self._held = path, held

    @classmethod
    def take(cls, folder: Path, card: bytes) -> FolderLock | None:
        """Lock a folder, or raise RunLocked; None where the file system has no locks, or they do not hold."""
        from filelock import FileLock

        path = folder / "LOCK"
        try:
            mode = 0o660 if folder.stat().st_mode & stat.S_IWGRP else 0o600
            # it opens no symbolic link, and closes the file in forked children, who would keep a dead parent's lock
            held, probe = (
                FileLock(path, timeout=0, mode=mode, thread_local=False, fallback_to_soft=False) for _ in range(2)
            )
            with ExitStack() as undo:
                _acquire(held, path)
                undo.callback(held.release)
                if _holds(probe):
                    _write(path, card)
                    undo.pop_all()
                    return cls(path, held)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError(f"{path} cannot be written: disk full ({error.strerror}). Free some space.") from error
            if error.errno not in _NO_LOCKS:
                raise StoreError(
                    f"{path} cannot be locked, so nothing can be written into this folder: {error}. It must be an "
                    f"ordinary file, and writable for user {os.getuid()}, as must the folder."
                ) from error
        logger.warning("The file system of %s has no locks that hold: signs of life will tell its owner.", folder)
        return None

    def release(self) -> None:
        """Give it back."""
        try:
            _write(self._path, b"")  # nobody holds it, so nobody is to be named
        except OSError as error:
            logger.warning("%s could not be emptied: %s", self._path, error)
        self._held.release()


def _acquire(lock: BaseFileLock, path: Path) -> None:
    """Acquire a lock, or raise RunLocked, which names its owner."""
    from filelock import Timeout

    about: dict[str, Any] = {}
    for _ in range(_TRIES):
        try:
            lock.acquire()
        except Timeout:
            about = _card(path)
        else:
            return
        if about and _may_live(about):
            break
        # a new owner is about to write its card over a dead one's, or a fork of the dead one to close what it inherited
        time.sleep(0.025)
    raise locked_by(str(path.parent), about)


def _holds(probe: BaseFileLock) -> bool:
    """Whether a lock that is held keeps another one out; on some network file systems it does not."""
    from filelock import Timeout

    try:
        probe.acquire()
    except Timeout:
        return True
    probe.release()
    return False


def _write(path: Path, data: bytes) -> None:
    handle = _opened(path, os.O_WRONLY)
    try:
        os.ftruncate(handle, 0)
        os.write(handle, data)
    finally:
        os.close(handle)


def _opened(path: Path, flags: int) -> int:
    """An ordinary file without a second name: what is written here must not land elsewhere."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(handle)
        raise OSError(errno.EMLINK, "Not an ordinary file with one name", str(path))
    return handle


def _card(path: Path) -> dict[str, Any]:
    try:
        handle = _opened(path, os.O_RDONLY)
    except OSError:
        return {}
    try:
        return parsed(os.read(handle, CARD_LIMIT))
    finally:
        os.close(handle)


def _may_live(about: Mapping[str, Any]) -> bool:
    if about.get("host") != socket.gethostname():
        return True
    try:
        os.kill(int(about["pid"]), 0)
    except ProcessLookupError:
        return False
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return True
    return True
