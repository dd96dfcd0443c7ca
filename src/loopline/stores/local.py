"""A store in a folder of this machine, or of one that is mounted here."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..core.errors import NoSuchKey, StoreError
from ._direct import written_directly
from ._pieces import Pieces
from ._reading import reading
from .base import Chunked, check_key, check_prefix, is_key, is_temporary, temporary_for

__all__ = ["LocalStore"]

_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_BUFFER = 1 << 20
_TRIES = 100
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class LocalStore:
    """Keeps each key as a file under a folder, which is made when something is first put.

    What `put`, `put_new` and `delete` have done outlasts a power cut: the file is synced, and so is every folder from
    it up to the store's. Folders are made 0700 and files 0600; with `inherit_umask=True` the process's umask decides.
    Symbolic links below the folder are not followed.

    >>> import io, tempfile
    >>> store = LocalStore(tempfile.mkdtemp())
    >>> store.put("a/b", io.BytesIO(b"bytes"))
    >>> store.open("a/b").read(), list(store.keys(""))
    (b'bytes', ['a/b'])
    """

    def __init__(self, folder: str | os.PathLike[str], *, inherit_umask: bool = False) -> None:
        self._root = Path(folder).absolute()
        with suppress(PermissionError):
            if self._root.is_file():
                raise StoreError(f"{type(self).__qualname__}({str(folder)!r}): that is a file; give a folder.")
        self._inherit_umask = inherit_umask
        self._folder_mode, self._file_mode = (0o777, 0o666) if inherit_umask else (0o700, 0o600)

    @property
    def name(self) -> str:
        """How messages call it: the folder's path."""
        return str(self._root)

    @property
    def folder(self) -> Path | None:
        """The folder."""
        return self._root

    def put(self, key: str, data: BinaryIO | Chunked) -> None:
        """Store what can be read from `data`."""
        check_key(key)
        pieces = Pieces(data)
        with self._telling("write", key, pieces), self._draft(key) as draft:
            if not written_directly(draft.file, data):
                for piece in pieces:
                    draft.write(piece)
            os.fsync(draft.file)
            os.replace(draft.temporary, draft.name, src_dir_fd=draft.folder, dst_dir_fd=draft.folder)
            draft.is_done = True
            draft.sync_folders()

    def put_new(self, key: str, data: bytes) -> bool:
        """Store only if nothing is there, and say whether it was stored."""
        check_key(key)
        pieces = Pieces(io.BytesIO(data))
        with self._telling("write", key, pieces), self._draft(key) as draft:
            for piece in pieces:
                draft.write(piece)
            os.fsync(draft.file)
            try:
                # a link is never made over what is there, unlike a rename
                os.link(draft.temporary, draft.name, src_dir_fd=draft.folder, dst_dir_fd=draft.folder)
            except FileExistsError:
                if not draft.is_in_place():  # a server may have heard it twice
                    return False
            except OSError as error:
                draft.take_back()
                if error.errno in _NO_LINKS:
                    raise StoreError(
                        f"{self._root / key} cannot be written: it must be the first of its name, which needs hard "
                        "links, and this filesystem has none. Take a folder on another."
                    ) from error
                raise
            try:
                draft.remove_temporary()
                draft.sync_folders()
            except OSError:
                draft.take_back()
                raise
        return True

    def open(self, key: str) -> BinaryIO:
        """Read what is stored."""
        check_key(key)
        *parts, name = key.split("/")
        with self._telling("read", key):
            try:
                with ExitStack() as opened:
                    folder = self._open_folders(parts, opened)[-1]
                    # without O_NONBLOCK a FIFO would wait here for its writer
                    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            except OSError as error:
                if not self._says_absent(error, key):
                    raise
                raise self._no_such(key) from None
            try:
                found = os.fstat(file)
                if stat.S_ISDIR(found.st_mode):
                    raise self._no_such(key)
                if not stat.S_ISREG(found.st_mode):
                    raise StoreError(f"{self._root / key} cannot be read: it is not a regular file.")
            except BaseException:
                _close(file)
                raise

        def fetch(at: int, buffer: memoryview) -> int:
            with self._telling("read", key):
                return os.preadv(file, [buffer], at)

        return reading(fetch, found.st_size, buffer=_BUFFER, close=lambda: _close(file))

    def keys(self, prefix: str) -> Iterator[str]:
        """The keys that begin with a prefix, sorted."""
        check_prefix(prefix)
        above = prefix[: prefix.rfind("/") + 1]
        with self._telling("list", prefix), ExitStack() as opened:
            try:
                folder = self._open_folders(above.split("/")[:-1], opened)[-1]
            except OSError as error:
                if not self._says_absent(error, prefix):
                    raise
                return iter(())
            found = [above + path for path, _ in _files(folder)]
            return iter(sorted(key for key in found if key.startswith(prefix) and is_key(key)))

    def delete(self, key: str) -> None:
        """Remove a key, durably, and the folders that it leaves empty; one that is not there is no error."""
        check_key(key)
        *parts, name = key.split("/")
        with self._telling("delete", key), ExitStack() as opened:
            try:
                folders = self._open_folders(parts, opened)
                with suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(name, dir_fd=folders[-1])
            except OSError as error:
                if not self._says_absent(error, key):
                    raise
                return
            _sync_folder(folders[-1])
            _prune(parts, folders)

    def free(self) -> int | None:
        """How many bytes this user can still write into the folder."""
        with self._telling("measure", ""):
            return self._free()

    def sweep(self) -> int:
        """Remove what killed writers left half-written, and folders that are empty, and say how many files it were."""
        swept = 0
        with self._telling("sweep", ""), ExitStack() as opened:
            try:
                root = self._open_folders([], opened)[0]
            except FileNotFoundError:
                return 0
            for path, folder in _files(root, empty_folders_go=True):
                name = path.rpartition("/")[2]
                if is_temporary(name):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
                        swept += 1
        return swept

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({str(self._root)!r}{', inherit_umask=True' * self._inherit_umask})"

    @contextmanager
    def _draft(self, key: str) -> Iterator[_Draft]:
        """A new file beside the place of a key, under a name that no key has, and removed if it still is there."""
        *parts, name = key.split("/")
        temporary = temporary_for(name)
        with ExitStack() as opened:
            for tries_left in reversed(range(_TRIES)):
                try:
                    folders = self._open_folders(parts, opened, make=True)
                    file = _create(temporary, self._file_mode, folders[-1])
                    break
                except FileNotFoundError:
                    # somebody deleted the last key of a folder, and with it the folder that was just made or found
                    opened.close()
                    if not tries_left:
                        raise
            draft = _Draft(file, temporary, name, folders)
            opened.callback(draft.close)
            yield draft

    def _open_folders(self, parts: list[str], opened: ExitStack, *, make: bool = False) -> list[int]:
        """Descriptors of the store's folder and of each below it, which nobody can turn to another place meanwhile."""
        if make:
            self._make_root()
        folders = [os.open(self._root, _FOLDER)]
        opened.callback(_close, folders[0])
        for part in parts:
            try:
                folder = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folders[-1])
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(part, self._folder_mode, dir_fd=folders[-1])
                folder = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folders[-1])
            opened.callback(_close, folder)
            folders.append(folder)
        return folders

    def _make_root(self) -> None:
        missing = []
        place = self._root
        while not place.exists():
            missing.append(place)
            place = place.parent
        for place in reversed(missing):
            above = os.open(place.parent, _FOLDER)
            try:
                os.mkdir(place.name, self._folder_mode, dir_fd=above)
                try:
                    _sync_folder(above)
                except OSError:
                    # else the next put would find it and take it for durable
                    with suppress(OSError):
                        os.rmdir(place.name, dir_fd=above)
                    raise
            except FileExistsError:
                pass  # another was faster
            finally:
                _close(above)

    @contextmanager
    def _telling(self, doing: str, key: str, pieces: Pieces | None = None) -> Iterator[None]:
        """Errors of the system come out as StoreError, those of the data that is put as they are."""
        try:
            yield
        except OSError as error:
            if pieces is not None and error is pieces.failed:
                raise
            raise StoreError(f"Cannot {doing} {self._root / key}: {self._why(error, key, pieces)}.") from error

    def _why(self, error: OSError, key: str, pieces: Pieces | None) -> str:
        why = error.strerror or str(error)
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                size = pieces.size if pieces is not None else None
                needed = "" if size is None else f"{size} bytes are needed, "
                with suppress(OSError):
                    return f"disk full ({why}): {needed}{self._free()} are free"
            case errno.EACCES | errno.EPERM | errno.EROFS:
                return f"{why}; this process runs as user {os.getuid()}"
            case errno.ELOOP | errno.ENOTDIR:
                if link := self._link_on_the_way_to(key):
                    return f"{link} is a symbolic link, and below a store's folder none is followed"
        return why

    def _free(self) -> int:
        place = self._root
        while not place.exists():
            place = place.parent
        found = os.statvfs(place)
        return found.f_bavail * found.f_frsize

    def _says_absent(self, error: OSError, key: str) -> bool:
        """Whether an error means that nothing is stored there, and not that something stands in the way."""
        if isinstance(error, NotADirectoryError):
            return self._link_on_the_way_to(key) is None
        return isinstance(error, FileNotFoundError)

    def _link_on_the_way_to(self, key: str) -> Path | None:
        place = self._root
        with suppress(OSError):
            for part in key.split("/"):
                place /= part
                if place.is_symlink():
                    return place
        return None

    def _no_such(self, key: str) -> NoSuchKey:
        return NoSuchKey(f"Nothing is stored under {key!r} in {self.name}.")


@dataclass(slots=True)
class _Draft:
    """A file that is being written, and the folders from the store's to its own."""

    file: int
    temporary: str
    name: str
    folders: list[int]
    is_done: bool = False

    @property
    def folder(self) -> int:
        return self.folders[-1]

    def write(self, data: memoryview) -> None:
        while len(data):
            data = data[os.write(self.file, data) :]

    def sync_folders(self) -> None:
        """Make the new entry durable.

        The folders above are synced each time, also where they were found: whoever made them may have been killed
        before he came to it.
        """
        for folder in reversed(self.folders):
            _sync_folder(folder)

    def is_in_place(self) -> bool:
        """Whether what is under the name is this file."""
        found = os.stat(self.name, dir_fd=self.folder, follow_symlinks=False)
        return os.path.samestat(found, os.fstat(self.file))

    def take_back(self) -> None:
        """Remove this file from under the name: who is told of an error must not find it stored."""
        with suppress(OSError):
            if self.is_in_place():
                os.unlink(self.name, dir_fd=self.folder)

    def remove_temporary(self) -> None:
        if not self.is_done:
            with suppress(OSError):
                os.unlink(self.temporary, dir_fd=self.folder)
                self.is_done = True

    def close(self) -> None:
        self.remove_temporary()
        _close(self.file)


def _create(name: str, mode: int, folder: int) -> int:
    try:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)  # a server may have made it and its answer been lost
        raise


def _files(folder: int, above: str = "", *, empty_folders_go: bool = False) -> Iterator[tuple[str, int]]:
    """The path of each regular file below a folder, and a descriptor of the one it is in; no link is followed."""
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_file(follow_symlinks=False):
            yield above + entry.name, folder
        elif entry.is_dir(follow_symlinks=False):
            try:
                below = os.open(entry.name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            except FileNotFoundError:
                continue  # deleted meanwhile
            try:
                yield from _files(below, f"{above}{entry.name}/", empty_folders_go=empty_folders_go)
            finally:
                _close(below)
            if empty_folders_go:
                with suppress(OSError):
                    os.rmdir(entry.name, dir_fd=folder)


def _prune(parts: list[str], folders: list[int]) -> None:
    """Remove the folders that are empty now. After a power cut they may be there again, which harms nobody."""
    for part, above in zip(reversed(parts), reversed(folders[:-1]), strict=True):
        try:
            os.rmdir(part, dir_fd=above)
        except OSError:
            return


def _sync_folder(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network filesystems cannot sync a folder; there is nothing else to do
            raise


def _close(file: int) -> None:
    with suppress(OSError):  # of what was synced, and of what was only read, nothing is lost
        os.close(file)
