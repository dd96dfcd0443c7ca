"""What is in a checkpoint, without loading it: the sections of its state, and the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..core.errors import Damaged, NoSuchKey
from .blocks import KINDS, header_length
from .codec import whole_path
from .collect import BESIDE, forms_of, rank_paths
from .shelf import Stored
from .tree import loads

__all__ = ["Shape", "contents"]

_PLAN = "tensors/METADATA.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """The type and sizes of a tensor."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return prod(self.sizes) * KINDS[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{str(KINDS[self.dtype]).removeprefix('torch.')} {list(self.sizes)}"


def contents(stored: Stored) -> dict[str, dict[str, Shape]]:
    """The tensors of each section, by their names in it; Damaged where files are not as they are written.

    Of files of tensors only the beginning is read, which does not show whether they are intact. Sections that each
    process has for itself are those of the first.
    """
    forms, big = forms_of(stored)
    shapes = _cut(stored) if _PLAN in stored.paths else _whole(stored, big)
    shapes |= _header(stored, BESIDE)
    text, beside = rank_paths(0)
    mine = loads(bytes(stored.read(text)), f"{stored.manifest.name}/{text}")
    if not isinstance(mine, dict):
        raise Damaged(f"{stored.manifest.name}/{text} is not as it is written.")
    own = _header(stored, beside)
    return {
        **{section: dict(_within(section, form, shapes)) for section, form in forms.items()},
        **{section: dict(_within(section, form, own)) for section, form in mine.items()},
    }


def _whole(stored: Stored, big: Sequence[str]) -> dict[str, Shape]:
    """What `Whole` wrote: a file for each section, in which names go without that of the section."""
    found: dict[str, Shape] = {}
    for section in big:
        found.update((f"{section}/{name}", shape) for name, shape in _header(stored, whole_path(section)).items())
    return found


def _cut(stored: Stored) -> dict[str, Shape]:
    """What `Dcp` wrote: its plan names every tensor whole."""
    said = loads(bytes(stored.read(_PLAN)), f"{stored.manifest.name}/{_PLAN}")
    return _shapes(said.get("tensors") if isinstance(said, dict) else None, "size", _PLAN)


def _header(stored: Stored, path: str) -> dict[str, Shape]:
    said = f"{stored.manifest.name}/{path}"
    if path not in stored.paths:
        return {}
    try:
        with stored.open(path) as stream:
            length = header_length(stream.read(8), stored.size(path), said)
            header = loads(stream.read(length), said)
    except NoSuchKey:
        raise Damaged(f"{said} is missing.") from None
    return _shapes(header, "shape", said)


def _shapes(entries: Any, key: str, said: str) -> dict[str, Shape]:
    try:
        return {
            name: Shape(_known(entry["dtype"]), tuple(map(_count, entry[key])))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{said} does not name tensors as it should: {error!r:.200}.") from error


def _within(section: str, form: Any, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """The tensors that a form refers to."""
    waiting = [form]
    while waiting:
        match waiting.pop():
            case list() as items:
                waiting.extend(reversed(items))
            case {"tensor": str(name)} | {"array": str(name)} | {"number": str(name)}:
                yield name.removeprefix(f"{section}/"), _of(shapes, name)
            case {"floats": str(name)} | {"integers": str(name)}:
                yield name.removeprefix(f"{section}/"), _of(shapes, name)
            case {"map": dict(inner)}:
                waiting.extend(reversed(inner.values()))
            case {"items": list(inner)} | {"tuple": list(inner)} | {"object": [str(), *inner]}:
                waiting.extend(reversed(inner))


def _of(shapes: Mapping[str, Shape], name: str) -> Shape:
    if name not in shapes:
        raise Damaged(f"a state refers to the tensor {name!r:.80}, which no file has.")
    return shapes[name]


def _known(dtype: Any) -> str:
    if dtype not in KINDS:
        raise ValueError(f"{dtype!r:.80} is no type of tensors")
    return str(dtype)


def _count(given: Any) -> int:
    if type(given) is not int or given < 0:
        raise ValueError(f"{given!r:.80} is no size")
    return given
