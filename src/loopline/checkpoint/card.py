"""What the owner of a run's folder leaves there about itself, and how messages say it."""

from __future__ import annotations

import datetime as dt
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Any

from ..core.errors import RunLocked
from ..core.redact import redacted, redacted_command

__all__ = ["CARD_LIMIT", "card", "locked_by", "parsed", "who"]

CARD_LIMIT = 64 * 1024

_LONGEST = 2000
_UNITS = ((86400, "days"), (3600, "h"), (60, "min"))


def card(about: Mapping[str, str]) -> bytes:
    """This process, for people, without secrets. Two cards are never equal: a taking is known by its card."""
    said = {
        **redacted(dict(about)),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": " ".join(redacted_command(sys.argv)),
        "taking": secrets.token_hex(8),
    }
    return json.dumps({name: str(value)[:_LONGEST] for name, value in said.items()}).encode()


def parsed(data: bytes | None) -> dict[str, Any]:
    """What a card says; nothing if it is none."""
    try:
        said = json.loads(data or b"")
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def who(about: Mapping[str, Any]) -> str:
    """An owner in words. What a card says need not be fit for a terminal."""
    if not about:
        return "another process, which has not said who it is"
    said = {_printable(name): _printable(value) for name, value in about.items()}
    host, pid = said.pop("host", "?"), said.pop("pid", "?")
    started, command = said.pop("started", ""), said.pop("command", "?")
    said.pop("taking", None)
    rest = "".join(f", {name} {value}" for name, value in said.items())
    return f"process {pid} on {host}{rest}, started {_since(started)}: {command}"


def locked_by(name: str, about: Mapping[str, Any]) -> RunLocked:
    """The error of one who finds a folder taken."""
    return RunLocked(
        f"{name} is being written by {who(about)}. Wait for it or stop it, or give this run a folder of its own."
    )


def _printable(text: object) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(text)[:300])


def _since(started: str) -> str:
    try:
        age = dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(started)
    except (ValueError, TypeError):
        return "at an unknown time"
    seconds = max(age.total_seconds(), 0)  # clocks differ
    size, unit = next((known for known in _UNITS if seconds >= 2 * known[0]), (1, "s"))
    return f"{started} ({seconds / size:.0f} {unit} ago)"
