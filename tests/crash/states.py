"""What a disk may hold after a power cut: records what a program asks of the system, and enumerates the outcomes.

The model is stricter than any one filesystem. A file has what was synced of it, or all, or half of what was written.
A folder has the entries that were synced, and of the later changes to it as many of the first as one likes, whatever
other folders have.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Disk:
    """Files and folders by number, as they are and as they are synced."""

    data: dict[int, bytes] = field(default_factory=dict)
    synced: dict[int, bytes] = field(default_factory=dict)
    entries: dict[int, dict[str, int]] = field(default_factory=dict)
    pending: dict[int, list[dict[str, int | None]]] = field(default_factory=dict)

    def apply(self, operation: tuple[Any, ...]) -> None:
        match operation:
            case ("folder", node):
                self.entries[node], self.pending[node] = {}, []
            case ("file", node):
                self.data[node] = self.synced[node] = b""
            case ("write", node, data):
                self.data[node] += data
            case ("cut", node, size):
                self.data[node] = self.data[node][:size].ljust(size, b"\0")
            case ("enter", folder, changes):
                self.pending[folder].append(changes)
            case ("sync", node) if node in self.data:
                self.synced[node] = self.data[node]
            case ("sync", node):
                for changes in self.pending[node]:
                    _change(self.entries[node], changes)
                self.pending[node] = []

    def outcomes(self, root: int, most: int, source: random.Random) -> Iterator[dict[str, bytes]]:
        """The trees, path by path, that a power cut at this moment may leave."""
        folders = [node for node, pending in self.pending.items() if pending]
        files = [node for node, data in self.data.items() if data != self.synced[node]]
        choices = [range(len(self.pending[node]) + 1) for node in folders] + [range(3) for _ in files]
        every = list(itertools.islice(itertools.product(*choices), 20_000))
        for chosen in every if len(every) <= most else source.sample(every, most):
            reached = dict(zip(folders, chosen, strict=False))
            kept = dict(zip(files, chosen[len(folders) :], strict=False))
            yield dict(self._tree(root, "", reached, kept))

    def _tree(self, node: int, path: str, reached: dict[int, int], kept: dict[int, int]) -> Iterator[tuple[str, bytes]]:
        entries = dict(self.entries[node])
        for changes in self.pending[node][: reached.get(node, 0)]:
            _change(entries, changes)
        for name, child in entries.items():
            if child in self.entries:
                yield from self._tree(child, f"{path}{name}/", reached, kept)
            else:
                written = self.data[child]
                half = written[: len(written) // 2]
                yield path + name, (self.synced[child], half, written)[kept.get(child, 2)]


def _change(entries: dict[str, int], changes: dict[str, int | None]) -> None:
    for name, node in changes.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


@contextmanager
def recording(patch: Any) -> Iterator[Recording]:
    """Record every change to files and folders that goes through the module `os`."""
    found = Recording()
    for name in ("open", "write", "fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "ftruncate"):
        patch.setattr(os, name, getattr(found, name)(getattr(os, name)))
    yield found
    patch.undo()


class Recording:
    """The operations, in order; `note` puts a mark between them."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self._nodes: dict[tuple[int, int], int] = {}
        self._count = itertools.count()
        self._stat = os.stat
        self._exists = os.path.lexists

    def note(self, *mark: Any) -> None:
        self.operations.append(("mark", *mark))

    def node(self, path: Any, dir_fd: int | None = None, *, new: str = "") -> int:
        found = os.fstat(path) if isinstance(path, int) else self._stat(path, dir_fd=dir_fd, follow_symlinks=False)
        key = (found.st_dev, found.st_ino)
        if new or key not in self._nodes:
            self._nodes[key] = next(self._count)
            kind = "folder" if os.path.stat.S_ISDIR(found.st_mode) else "file"
            self.operations.append((kind, self._nodes[key]))
        return self._nodes[key]

    def _folder(self, path: Any, dir_fd: int | None) -> tuple[int, str]:
        """The node of the folder that a path is in, and its name there."""
        above, name = os.path.split(os.fspath(path))
        if dir_fd is None:
            return self.node(above or "."), name
        return (self.node(dir_fd) if not above else self.node(above, dir_fd)), name

    def open(self, call: Any) -> Any:
        def recorded(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            fresh = False
            if flags & os.O_CREAT:
                try:
                    self._stat(path, dir_fd=dir_fd, follow_symlinks=False)
                except FileNotFoundError:
                    fresh = True
            file: int = call(path, flags, mode, dir_fd=dir_fd)
            if fresh:
                node = self.node(file, new="file")
                folder, name = self._folder(path, dir_fd)
                self.operations.append(("enter", folder, {name: node}))
            return file

        return recorded

    def write(self, call: Any) -> Any:
        def recorded(file: int, data: Any) -> int:
            done: int = call(file, data)
            if os.path.stat.S_ISREG(os.fstat(file).st_mode):
                self.operations.append(("write", self.node(file), bytes(data[:done])))
            return done

        return recorded

    def ftruncate(self, call: Any) -> Any:
        def recorded(file: int, size: int) -> None:
            call(file, size)
            self.operations.append(("cut", self.node(file), size))

        return recorded

    def fsync(self, call: Any) -> Any:
        def recorded(file: int) -> None:
            call(file)
            self.operations.append(("sync", self.node(file)))

        return recorded

    def replace(self, call: Any) -> Any:
        def recorded(old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            node = self.node(old, src_dir_fd)
            source, name = self._folder(old, src_dir_fd)
            target, new_name = self._folder(new, dst_dir_fd)
            call(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if source == target:
                self.operations.append(("enter", source, {name: None, new_name: node}))
            else:
                self.operations += [("enter", target, {new_name: node}), ("enter", source, {name: None})]

        return recorded

    rename = replace

    def link(self, call: Any) -> Any:
        def recorded(old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            call(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            target, name = self._folder(new, dst_dir_fd)
            self.operations.append(("enter", target, {name: self.node(old, src_dir_fd)}))

        return recorded

    def unlink(self, call: Any) -> Any:
        def recorded(path: Any, *, dir_fd: int | None = None) -> None:
            call(path, dir_fd=dir_fd)
            folder, name = self._folder(path, dir_fd)
            self.operations.append(("enter", folder, {name: None}))

        return recorded

    rmdir = unlink

    def mkdir(self, call: Any) -> Any:
        def recorded(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            call(path, mode, dir_fd=dir_fd)
            folder, name = self._folder(path, dir_fd)
            node = self.node(path, dir_fd, new="folder")
            self.operations.append(("enter", folder, {name: node}))

        return recorded


def trees(
    recording: Recording, root: int, most: int, source: random.Random
) -> Iterator[tuple[list[Any], dict[str, bytes]]]:
    """For every moment of a recording: what was marked before it, and each tree that a cut may leave; no tree twice."""
    disk, marks = Disk(), []
    seen: set[Any] = set()
    for operation in recording.operations:
        if operation[0] == "mark":
            marks = [*marks, operation[1:]]
        else:
            disk.apply(operation)
        if root not in disk.entries:
            continue
        for tree in disk.outcomes(root, most, source):
            key = (len(marks), hash(frozenset(tree.items())))
            if key not in seen:
                seen.add(key)
                yield marks, tree
