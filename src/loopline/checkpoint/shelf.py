"""The checkpoints of a run as they lie in a store: their names, whether they are whole, and how one is removed."""

from __future__ import annotations

import io
import json
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..core.errors import Damaged, NoSuchKey, StoreError
from ..stores import Store
from .blocks import Blocks
from .manifest import MANIFEST, NAME, File, Manifest, Ref, new_hash
from .tree import TEXT_LIMIT, loads

__all__ = ["Attempt", "Shelf", "Stored"]

logger = logging.getLogger("loopline")

_ROOM = "checkpoints"
_CHUNK = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Shelf:
    """All checkpoints of one run's folder."""

    store: Store

    def attempts(self) -> dict[str, bool]:
        """Every attempt by step, and whether it is committed: of one listing, so that the two fit."""
        found: dict[str, bool] = {}
        for key in self.store.keys(f"{_ROOM}/"):
            _, name, *path = key.split("/")
            if path and NAME.fullmatch(name):
                found[name] = found.get(name, False) or path == [MANIFEST]
        return dict(sorted(found.items()))

    def committed(self) -> list[str]:
        """Those that have a manifest, by step."""
        return [name for name, committed in self.attempts().items() if committed]

    def refs(self) -> list[Ref]:
        """The committed ones whose manifest can be read, oldest first."""
        return [stored.manifest.ref() for stored in self.stored()[0]]

    def stored(self) -> tuple[list[Stored], dict[str, Damaged]]:
        """The committed ones, oldest first, and why the others cannot be read."""
        found: list[Stored] = []
        unreadable: dict[str, Damaged] = {}
        for name in self.committed():
            try:
                found.append(self.get(name))
            except NoSuchKey:
                continue  # removed a moment ago
            except Damaged as error:
                unreadable[name] = error
        return sorted(found, key=lambda stored: (stored.manifest.fencing, stored.manifest.serial)), unreadable

    def get(self, name: str) -> Stored:
        """One by its name; Damaged where its manifest cannot be believed."""
        if not NAME.fullmatch(name):
            raise NoSuchKey(f"{name!r:.80} is not the name of a checkpoint; they look like 000000001500-7f3a9c2e.")
        data = _read(self.store, f"{_ROOM}/{name}/{MANIFEST}", TEXT_LIMIT)
        return Stored(self.store, Manifest.from_bytes(bytes(data), name))

    def remove(self, name: str) -> None:
        """Take the manifest away first: from then on it is none, however far the rest comes."""
        self.store.delete(f"{_ROOM}/{name}/{MANIFEST}")
        for key in list(self.store.keys(f"{_ROOM}/{name}/")):
            self.store.delete(key)

    def sweep(self) -> list[str]:
        """Remove what was begun and never committed. Only for the one who has the right to write."""
        begun = [name for name, committed in self.attempts().items() if not committed]
        for name in begun:
            self.remove(name)
        return begun

    def set_aside(self, name: str, why: str) -> None:
        """Put a damaged one where it is not looked for again, but can be looked at. In a bucket it stays."""
        logger.warning("Checkpoint %s in %s is damaged and not used: %s", name, self.store.name, why)
        if self.store.folder is None:
            return
        target = self.store.folder / "quarantine"
        try:
            target.mkdir(mode=0o700, exist_ok=True)
            if target.is_symlink():
                raise NotADirectoryError("it is a symbolic link")
            (self.store.folder / _ROOM / name).rename(_free(target, name))
        except OSError as error:
            logger.warning("It could not be moved to %s: %s", target, error)

    def pin(self, label: str, ref: Ref) -> None:
        """Note which checkpoint a label stands for; a pinned one is not removed."""
        said = {"checkpoint": ref.name, "manifest_sha256": ref.digest}
        self.store.put(f"pins/{label}.json", io.BytesIO(json.dumps(said).encode()))

    def unpin(self, label: str) -> None:
        """Forget a label."""
        self.store.delete(f"pins/{label}.json")

    def pins(self) -> dict[str, str]:
        """The names that labels stand for; what cannot be read says nothing."""
        found: dict[str, str] = {}
        for key in list(self.store.keys("pins/")):
            label = key.removeprefix("pins/").removesuffix(".json")
            try:
                said = loads(bytes(_read(self.store, key, TEXT_LIMIT)), key)
                if isinstance(said, dict) and NAME.fullmatch(str(said.get("checkpoint"))):
                    found[label] = said["checkpoint"]
            except (StoreError, Damaged) as error:
                logger.warning("The pin %s cannot be read: %s", key, error)
        return found


@dataclass(frozen=True, slots=True)
class Stored:
    """A committed checkpoint, and its files. Nothing is given out that does not fit the manifest."""

    store: Store
    manifest: Manifest
    verify: bool = True

    @property
    def paths(self) -> Sequence[str]:
        """The files it has."""
        return list(self.manifest.files)

    def size(self, path: str) -> int:
        """How many bytes one of its files has."""
        return self.manifest.files[path].size

    def read(self, path: str) -> bytearray:
        """A file, verified."""
        said = f"{self.manifest.name}/{path}"
        if (file := self.manifest.files.get(path)) is None:
            raise Damaged(f"{self.manifest.name}: {path!r:.80} is needed, and the manifest does not have it.")
        with self._there(path):
            data = _read(self.store, self._key(path), file.size)
        if len(data) != file.size:
            raise Damaged(f"{said} has {len(data)} bytes; it was written with {file.size}.")
        if self.verify:
            found = new_hash(self.manifest.hash)
            found.update(data)
            self._compare(path, found.hexdigest())
        return data

    def open(self, path: str) -> BinaryIO:
        """A file as it lies there, not verified: to look at, not to go on from."""
        return self.store.open(self._key(path))

    def damage(self) -> str | None:
        """What is wrong with it, if anything is: every file is read and compared, a piece at a time."""
        for path, file in self.manifest.files.items():
            try:
                self._check(path, file)
            except Damaged as error:
                return str(error)
        return None

    def _check(self, path: str, file: File) -> None:
        found, size = new_hash(self.manifest.hash), 0
        with self._there(path), self.open(path) as stream:
            while piece := stream.read(_CHUNK):
                size += len(piece)
                if size > file.size:
                    break
                found.update(piece)
        if size != file.size:
            raise Damaged(f"{path} has {size} bytes; it was written with {file.size}.")
        self._compare(path, found.hexdigest())

    @contextmanager
    def _there(self, path: str) -> Iterator[None]:
        """A file that is missing, or a link or pipe in its place, is damage; a store that cannot be read is none."""
        try:
            yield
        except StoreError as error:
            if self._key(path) in self.store.keys(f"{_ROOM}/{self.manifest.name}/"):
                raise
            said = "is missing" if isinstance(error, NoSuchKey) else f"is not there as a file: {error}"
            raise Damaged(f"{self.manifest.name}/{path} {said}.") from error

    def _compare(self, path: str, found: str) -> None:
        if found != self.manifest.files[path].hash:
            raise Damaged(f"{self.manifest.name}/{path} was altered: its {self.manifest.hash} does not fit.")

    def _key(self, path: str) -> str:
        return f"{_ROOM}/{self.manifest.name}/{path}"


@dataclass(slots=True)
class Attempt:
    """A checkpoint that is being written. Until `commit` says yes there is none."""

    store: Store
    name: str
    algorithm: str
    files: dict[str, File] = field(default_factory=dict)

    def put(self, path: str, blocks: Blocks) -> None:
        """Write a file and note its hash."""
        found = new_hash(self.algorithm)
        for chunk in blocks.chunks():
            found.update(chunk)
        self.store.put(f"{_ROOM}/{self.name}/{path}", blocks)
        self.files[path] = File(blocks.nbytes, found.hexdigest())

    def put_text(self, path: str, text: bytes) -> None:
        """Write a small file and note its hash."""
        found = new_hash(self.algorithm)
        found.update(text)
        self.store.put(f"{_ROOM}/{self.name}/{path}", io.BytesIO(text))
        self.files[path] = File(len(text), found.hexdigest())

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest: from here on the checkpoint exists, however the process ends."""
        if not self.store.put_new(f"{_ROOM}/{self.name}/{MANIFEST}", manifest.to_bytes()):
            raise StoreError(f"Checkpoint {self.name} has a manifest already, which this process did not write.")

    def abandon(self) -> None:
        """Remove what was written, as far as that can be done."""
        try:
            Shelf(self.store).remove(self.name)
        except StoreError as error:
            logger.warning("What was written of checkpoint %s could not be removed: %s", self.name, error)


def _read(store: Store, key: str, limit: int) -> bytearray:
    """What is stored under a key, but no more than a byte above the limit."""
    data = bytearray()
    with store.open(key) as stream:
        while len(data) <= limit and (piece := stream.read(min(_CHUNK, limit + 1 - len(data)))):
            data += piece
    return data


def _free(folder: Path, name: str) -> Path:
    """A path that nothing has: one name may be set aside again after somebody brought it back."""
    return next(path for path in _candidates(folder, name) if not path.exists())


def _candidates(folder: Path, name: str) -> Iterator[Path]:
    yield folder / name
    while True:
        yield folder / f"{name}.{secrets.token_hex(4)}"
