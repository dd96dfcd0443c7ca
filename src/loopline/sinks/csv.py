"""Records as rows of a table."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..core.when import Every, When
from ._files import FileSink, Lines, kept, replacing
from .base import AXES, Record

if TYPE_CHECKING:
    from ..core.run import Run

__all__ = ["CsvSink"]


class CsvSink(FileSink):
    """One row for each record: the axes, then the metrics in the order in which they first came.

    A metric that was not there before makes a new column, for which the file is written anew; who reads meanwhile sees
    the old table or the new one. Cells are empty where a record lacks a metric.

    A new run begins the file anew. A resumed one cuts it back to where it resumes, so that the file comes out as if
    nothing had happened. An evaluation outside training adds its record at the end.
    """

    def __init__(self, path: str | os.PathLike[str], when: When = Every(steps=50)) -> None:
        super().__init__(path, when)
        self._columns: dict[str, None] = {}  # a set that keeps its order

    def resume_from(self, step: int | None) -> None:
        """Cut the file back to the records up to a step."""
        self._append, self._records, self._columns = True, 0, {}
        if not self.path.exists():
            return
        columns, rows = self._table()
        if not columns:
            return
        if tuple(columns[: len(AXES)]) != AXES:
            raise ValueError(
                f"{self.path} was not written by a CsvSink: it begins with the columns {columns[: len(AXES)]}. "
                "Move it away, or give another path."
            )
        at = columns.index("step")
        rows = [row for i, row in enumerate(rows) if kept(i, int(row[at]), step, records=self._records_then)]
        # only rows that are cut away may have brought a column
        filled = [i for i in range(len(columns)) if i < len(AXES) or any(row[i] for row in rows)]
        self._columns = dict.fromkeys(columns[i] for i in filled) if rows else {}
        self._records = len(rows)
        self._replace([row[i] for i in filled] for row in rows)

    def open(self, run: Run) -> None:
        """Begin the file, or go on with what `resume_from` left of it."""
        if not self._append:
            self._columns = {}
        super().open(run)

    def write(self, record: Record) -> None:
        """Add one row to the file."""
        flat = record.flat()
        if any(name not in self._columns for name in flat):
            self._grow(flat)
        assert self._lines is not None
        self._lines.add(_row(flat.get(name, "") for name in self._columns))
        self._records += 1

    def _grow(self, names: Iterable[str]) -> None:
        _, rows = self._table()
        before = self._columns
        self._columns = {**before, **dict.fromkeys(names)}
        empty = [""] * (len(self._columns) - len(before))
        try:
            self._replace([*row, *empty] for row in rows)
        except BaseException:
            self._columns = before
            raise
        if self._lines is not None:
            self._lines.close()
        self._lines = Lines(self.path, append=True)

    def _replace(self, rows: Iterable[list[str]]) -> None:
        with replacing(self.path) as file:
            if self._columns:
                file.write(_row(self._columns))
            file.writelines(_row(row) for row in rows)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """The columns and the rows of the file, but for a last row that was never finished."""
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        rows = [row for row in csv.reader(io.StringIO(whole, newline="")) if row]
        return (rows[0], rows[1:]) if rows else ([], [])


def _row(cells: Iterable[Any]) -> str:
    line = io.StringIO(newline="")
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
