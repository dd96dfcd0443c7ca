"""What commands have in common when they speak: failures, sizes, and text out of files that nobody vouches for."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from ..checkpoint import Written

__all__ = ["failed", "holding", "lines", "safe", "screen", "size_said"]

_WIDE = 100_000


def screen() -> Console:
    """Standard output; where that is no terminal, without colours and without an edge that lines break at."""
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else _WIDE, highlight=False, markup=False, emoji=False)


def lines(text: str) -> str:
    """A paragraph of help, for a parser that shows its examples as they are written."""
    return textwrap.fill(text, 78)


def failed(command: str, error: object, code: int = 1) -> int:
    """Say in one line why a command could not do it, and give its exit code."""
    print(f"loopline {command}: {safe(str(error))}", file=sys.stderr)
    return code


def holding(written: Written) -> str:
    """How much a file of weights holds."""
    return f"{len(written.names)} tensor{'s' * (len(written.names) != 1)} ({size_said(written.size)})"


def safe(text: str) -> str:
    """Text in which nothing moves the cursor, sets a title or hides what follows.

    >>> safe("red \\x1b[31mtext\\n")
    'red ?[31mtext?'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def size_said(size: int) -> str:
    """Bytes as people say them.

    >>> size_said(512), size_said(4_100), size_said(12_400_000_000)
    ('512 B', '4.1 kB', '12.4 GB')
    """
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"
