"""The small training, which here goes on only when it is told to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import training


def train(folder: Path, at: float) -> None:
    """Begin when the clock that all processes share says so, and read data when there is a file `go`."""

    class Points(training.Points):
        def __getitem__(self, index: int) -> Any:
            while not (folder / "go").exists():
                time.sleep(0.01)
            return super().__getitem__(index)

    training.Points = Points
    while time.monotonic() < at:
        pass
    training.train(folder, training.Config())
