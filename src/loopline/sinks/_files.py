"""Files that grow by whole lines, and files that are replaced whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from ..core.run import Run
from ..core.when import When
from .base import Sink

__all__ = ["FileSink", "Lines", "kept", "replacing"]


class FileSink(Sink):
    """What sinks that write one file have in common: the file is begun anew, gone on with, and closed."""

    def __init__(self, path: str | os.PathLike[str], when: When) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ValueError(
                f"{type(self).__qualname__}({str(path)!r}): that is a folder; give the path of a file in it."
            )
        self.when = when
        self._lines: Lines | None = None
        self._records = 0
        self._records_then: int | None = None
        self._append = False

    def open(self, run: Run) -> None:
        """Begin the file, or go on with what `resume_from` left of it."""
        append, self._append = self._append, False
        self._lines = Lines(self.path, append=append)
        self._records_then = None
        if not append:
            self._records = 0

    def flush(self) -> None:
        """Have the system put the file on the disk."""
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()
        self._lines = None

    def state_dict(self) -> dict[str, Any]:
        """How many records the file holds."""
        return {"records": self._records}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """How many records the file held then."""
        self._records_then = state["records"]

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({str(self.path)!r})"


class Lines:
    """A text file that grows by lines. Each is there whole, for every reader, as soon as it is added, or not at all."""

    def __init__(self, path: Path, *, append: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if append else os.O_TRUNC)
        self._file = os.open(path, flags, 0o600)

    def add(self, line: str) -> None:
        data = line.encode()
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)  # a full disk leaves half a line
            raise

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A new file to write, which takes the place of the one at `path` when it is complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def kept(index: int, step: int, upto: int | None, *, records: int | None) -> bool:
    """Whether a record stays when a file is cut back to a step.

    An epoch's last step, its evaluation and its end are recorded at one step, and a checkpoint may lie between them;
    how many records there were then decides.
    """
    if upto is None or step < upto:
        return True
    return step == upto and (records is None or index < records)
