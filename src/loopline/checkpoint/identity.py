"""Which run a folder belongs to: one immutable file for each run that was begun in it, the newest in force."""

from __future__ import annotations

import datetime as dt
import json
import platform
import re
import uuid
from importlib.metadata import version

import torch

from ..core.errors import Damaged
from ..stores import Store
from .manifest import FORMAT, digest
from .shelf import Shelf
from .tree import TEXT_LIMIT, loads

__all__ = ["identify", "named_in", "now", "versions"]

_NAME = re.compile(r"run(-([0-9]{1,6}))?\.json")


def identify(shelf: Shelf, *, anew: bool = False) -> str:
    """The id of the run whose folder this is; a new one where there is none, or where training begins anew."""
    newest = _newest(shelf.store)
    if newest is not None and not anew:
        return _read(shelf.store, newest)
    refs = shelf.refs()
    run_id = str(uuid.uuid4())
    if newest is None and refs and not anew:
        run_id = shelf.get(refs[-1].name).manifest.run_id  # somebody copied the checkpoints without run.json
    said = {"run_id": run_id, "format": list(FORMAT), "versions": versions(), "created": now()}
    key = "run.json" if newest is None else f"run-{_number(newest) + 1}.json"
    shelf.store.put_new(key, json.dumps({**said, "self": digest(said)}, indent=2).encode())
    return _read(shelf.store, key)


def named_in(store: Store) -> str | None:
    """The id that the newest run file of a folder names, if there is one. Nothing is written."""
    newest = _newest(store)
    return None if newest is None else _read(store, newest)


def versions() -> dict[str, str]:
    """What a checkpoint was written with."""
    return {"loopline": version("loopline"), "torch": torch.__version__, "python": platform.python_version()}


def now() -> str:
    """When, for people: nothing is ever decided by it."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def _newest(store: Store) -> str | None:
    return max((key for key in store.keys("run") if _NAME.fullmatch(key)), key=_number, default=None)


def _number(key: str) -> int:
    found = _NAME.fullmatch(key)
    return int(found[2] or 1) if found else 0


def _read(store: Store, key: str) -> str:
    with store.open(key) as stream:
        said = loads(stream.read(TEXT_LIMIT), key)
    own = said.pop("self", None) if isinstance(said, dict) else None
    if own is None or own != digest(said) or not isinstance(said.get("run_id"), str):
        raise Damaged(
            f"{key} in {store.name} was altered, and does not say which run this is. Bring it back from a copy, or "
            "remove it: then the checkpoints say it."
        )
    return str(said["run_id"])
