"""The manifest: what a checkpoint consists of, with a hash for every file. It is written last, and makes it one."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from ..core.errors import CannotSave, Damaged, NewerFormat
from .tree import dumps, loads

__all__ = ["FORMAT", "File", "HASHES", "Hash", "MANIFEST", "Manifest", "NAME", "Ref", "digest", "new_hash"]

FORMAT = (1, 0)
MANIFEST = "MANIFEST.json"
NAME = re.compile(r"[0-9]{12}-[0-9a-f]{8}")

_PATH = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,127}(/[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,127}){0,3}")
_DIGEST = re.compile(r"[0-9a-f]{32,64}")


class Hash(Protocol):
    """What hashlib and xxhash make."""

    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


HASHES: dict[str, Callable[[], Hash]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint."""

    size: int
    hash: str


@dataclass(frozen=True, slots=True)
class Ref:
    """One committed checkpoint, as policies and people see it. Counts are of what was done when it was taken."""

    name: str
    step: int
    epochs: int
    samples: int
    fencing: int
    serial: int
    size: int
    metrics: Mapping[str, float] = field(hash=False, compare=False)
    digest: str = ""

    @property
    def age(self) -> tuple[int, int]:
        """What orders checkpoints of one run: who wrote it, and which of his it is. No clock is asked."""
        return self.fencing, self.serial


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The commit record of a checkpoint."""

    run_id: str
    name: str
    parent: str | None
    serial: int
    fencing: int
    step: int
    epochs: int
    samples: int
    world_size: int
    codec: str
    hash: str
    files: Mapping[str, File]
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    reason: str
    created: str
    format: tuple[int, int] = FORMAT

    @property
    def size(self) -> int:
        """The bytes of all its files."""
        return sum(file.size for file in self.files.values())

    def to_bytes(self) -> bytes:
        """As it is written: JSON, with a hash over all the rest under `self`."""
        body = {name: getattr(self, name) for name in self.__slots__}
        body["files"] = {path: {"size": file.size, "hash": file.hash} for path, file in sorted(self.files.items())}
        body["metrics"] = {name: float(value).hex() for name, value in sorted(self.metrics.items())}
        body["versions"] = dict(self.versions)
        body["format"] = list(self.format)
        return dumps({**body, "self": digest(body)})

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Manifest:
        """Read one, believing nothing: Damaged if it is not what was committed."""
        said = f"The manifest of checkpoint {name}"
        body = loads(data, said)
        if not isinstance(body, dict):
            raise Damaged(f"{said} is no JSON object.")
        try:
            # in every format: else one flipped bit would make a damaged manifest one of a later version
            if body.pop("self", None) != digest(body):
                raise Damaged(f"{said} was altered: its own hash does not fit.")
            _check_format(body.get("format"), body, said)
            found = _checked(body)
        except (Damaged, NewerFormat):
            raise
        except (CannotSave, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise Damaged(f"{said} is not as manifests are written: {error!r:.300}.") from error
        if found.name != name:
            raise Damaged(f"{said} is that of {found.name}: it was copied here.")
        return found

    def ref(self) -> Ref:
        """What policies see of it."""
        return Ref(
            self.name,
            self.step,
            self.epochs,
            self.samples,
            self.fencing,
            self.serial,
            self.size,
            self.metrics,
            hashlib.sha256(self.to_bytes()).hexdigest(),
        )


def new_hash(name: str) -> Hash:
    """A hash to feed, by the name that manifests have for it."""
    if name not in HASHES:
        raise Damaged(f"the hash {name!r} is not known; known are {', '.join(HASHES)}.")
    return HASHES[name]()


def digest(body: Mapping[str, Any]) -> str:
    """A hash over JSON, whatever the order of its keys."""
    return hashlib.sha256(dumps({key: body[key] for key in sorted(body)})).hexdigest()


def _check_format(given: Any, body: Mapping[str, Any], said: str) -> None:
    if not (isinstance(given, list) and len(given) == 2 and all(type(n) is int for n in given) and given[0] > 0):
        raise Damaged(f"{said} names no format.")
    if given[0] > FORMAT[0]:
        versions = body.get("versions")
        writer = versions.get("loopline", "a later version") if isinstance(versions, dict) else "a later version"
        raise NewerFormat(
            f"{said} has the format {given[0]}.{given[1]}, written by loopline {writer!r:.40}; this version reads up "
            f"to {FORMAT[0]}. Load it with that version."
        )


def _checked(body: Mapping[str, Any]) -> Manifest:
    files = {_path(path): File(_count(f["size"]), _match(_DIGEST, f["hash"])) for path, f in body["files"].items()}
    if body["hash"] not in HASHES:
        raise ValueError(f"the hash {body['hash']!r} is not known")
    metrics = {str(name): float.fromhex(value) for name, value in body["metrics"].items()}
    if any(math.isnan(value) for value in metrics.values()):
        metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
    counts = ("serial", "fencing", "step", "epochs", "samples", "world_size")
    plain: dict[str, Any] = {name: _count(body[name]) for name in counts}
    plain.update({name: _text(body[name]) for name in ("run_id", "codec", "hash", "reason", "created")})
    return Manifest(
        **plain,
        name=_match(NAME, body["name"]),
        parent=None if body["parent"] is None else _match(NAME, body["parent"]),
        files=files,
        metrics=metrics,
        versions={str(name): _text(version) for name, version in body["versions"].items()},
        format=(body["format"][0], body["format"][1]),
    )


def _path(given: Any) -> str:
    path = _match(_PATH, given)
    if path == MANIFEST:
        raise ValueError("the manifest cannot list itself")
    return path


def _match(pattern: re.Pattern[str], given: Any) -> str:
    if not isinstance(given, str) or not pattern.fullmatch(given):
        raise ValueError(f"{given!r:.80} does not fit {pattern.pattern}")
    return given


def _count(given: Any) -> int:
    if type(given) is not int or not 0 <= given < 2**63:
        raise ValueError(f"{given!r:.80} is no count")
    return given


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{given!r:.80} is no text")
    return given
