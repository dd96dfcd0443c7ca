"""What tells one dataset from another without reading its data."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Subset

from .keys import digest

__all__ = ["fingerprint_of", "fingerprint_of_files"]


def fingerprint_of(dataset: Any) -> str | None:
    """What a dataset says of itself in its method or attribute `fingerprint`; of a Subset, which samples it has."""
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, dtype="<i8")
        return f"{digest(indices.tobytes().hex(), size=8).hex()} of {fingerprint_of(dataset.dataset)}"
    said = getattr(dataset, "fingerprint", None)
    if callable(said):
        said = said()
    return None if said is None else str(said)


def fingerprint_of_files(paths: Iterable[str | os.PathLike[str]]) -> str:
    """How many files there are, and a hash over their names and sizes; no file is opened.

    Names count from the folder that all of them are in, so that the files may be moved together. For a dataset's
    `fingerprint`:

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("a.txt", "b.txt"):
    ...     _ = (folder / name).write_text(name)
    >>> fingerprint_of_files(folder.iterdir())
    '2 files, b6b9f9ae3e2ed73e'
    """
    files = [Path(path).absolute() for path in paths]
    root = Path(os.path.commonpath([file.parent for file in files])) if files else Path()
    named = sorted(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}" for file in files)
    return f"{len(named)} files, {digest(chr(0).join(named), size=8).hex()}"
