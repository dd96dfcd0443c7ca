"""How the tensors of a model and its optimizers become files, and files tensors again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ..core.errors import CannotSave, Damaged
from .blocks import Blocks, tensors_of
from .staging import file_of

__all__ = ["Codec", "Reads", "Whole", "Writes", "whole_path"]

_MANY = 2**17  # an empty one takes half a KB in memory


class Writes(Protocol):
    """Where a codec puts its files."""

    def put(self, path: str, blocks: Blocks) -> None: ...
    def put_text(self, path: str, text: bytes) -> None: ...


class Reads(Protocol):
    """Where a codec finds its files again; what it reads has been verified."""

    @property
    def paths(self) -> Sequence[str]: ...
    def size(self, path: str) -> int: ...
    def read(self, path: str) -> bytearray: ...


class Codec(Protocol):
    """Writes and reads the tensors of some sections of a state, such as `model` and `optimizer/0`.

    A tensor's name begins with that of its section. Files lie under `tensors/`.
    """

    name: str

    def write(self, sections: Mapping[str, Mapping[str, Tensor]], to: Writes) -> None:
        """Put every tensor of this process into files. Called on a thread of its own, with tensors on the cpu."""
        ...

    def read(self, sections: Sequence[str], source: Reads) -> dict[str, Tensor]:
        """Every tensor of some sections."""
        ...


class Whole:
    """One safetensors file for each section, which any program can read: `tensors/model.safetensors` and so on."""

    name = "whole"

    def write(self, sections: Mapping[str, Mapping[str, Tensor]], to: Writes) -> None:
        if (count := sum(map(len, sections.values()))) > _MANY:
            raise CannotSave(f"The model and its optimizers have {count} tensors; {_MANY} can be kept.")
        for section, tensors in sections.items():
            to.put(whole_path(section), file_of(tensors, cut=len(section) + 1))

    def read(self, sections: Sequence[str], source: Reads) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for section in dict.fromkeys(sections):
            tensors = tensors_of(source.read(whole_path(section)), whole_path(section))
            found.update((f"{section}/{name}", tensor) for name, tensor in tensors.items())
            if len(found) > _MANY:
                raise Damaged(f"There are more than {_MANY} tensors.")
        return found


def whole_path(section: str) -> str:
    """Where `Whole` keeps a section."""
    return f"tensors/{section.replace('/', '-')}.safetensors"
