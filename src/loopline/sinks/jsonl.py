"""Records as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

from ..core.when import Every, When
from ._files import FileSink, kept, replacing
from .base import Record

if TYPE_CHECKING:
    pass

__all__ = ["JsonlSink"]


class JsonlSink(FileSink):
    """One line of JSON for each record, readable as soon as it is written.

    A number that is not finite is written as the text "NaN", "Infinity" or "-Infinity": JSON has no such numbers, and
    in most languages these texts turn back into them, as with Python's `float`.

    A new run begins the file anew. A resumed one cuts it back to where it resumes, so that the file comes out as if
    nothing had happened. An evaluation outside training adds its record at the end.
    """

    def __init__(self, path: str | os.PathLike[str], when: When = Every(steps=50)) -> None:
        super().__init__(path, when)

    def resume_from(self, step: int | None) -> None:
        """Cut the file back to the records up to a step."""
        self._append, self._records = True, 0
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8", errors="replace") as old, replacing(self.path) as new:
            for index, line in enumerate(old):
                # the last line is not whole if the process was killed while it was written
                at = _step_of(line) if line.endswith("\n") else None
                if at is not None and kept(index, at, step, records=self._records_then):
                    new.write(line)
                    self._records += 1

    def write(self, record: Record) -> None:
        """Add one line to the file."""
        assert self._lines is not None
        flat = {name: _strict(value) for name, value in record.flat().items()}
        self._lines.add(json.dumps(flat, allow_nan=False) + "\n")
        self._records += 1


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _step_of(line: str) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None
