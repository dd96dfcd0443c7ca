"""A model's weights alone, as one safetensors file that any program can load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..core.errors import CannotSave, LooplineError, StoreError

__all__ = ["Written", "apart", "check_target", "write_weights"]


@dataclass(frozen=True, slots=True)
class Written:
    """A file of weights that was written: what it was made of, which tensors it has, and what was left out, and why."""

    path: Path
    source: str
    names: tuple[str, ...]
    size: int
    left_out: Mapping[str, str]


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the cpu, none of which shares memory with another: tied ones are there under each name."""
    found: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, given in tensors.items():
        tensor = given.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages:
            tensor = tensor.clone()
        storages.add(storage)
        found[name] = tensor
    return found


def check_target(path: Path, *, force: bool) -> None:
    """Refuse at once what could not be written after everything was read."""
    if path.suffix != ".safetensors":
        raise LooplineError(f"{path} is to be a safetensors file; give a name that ends with .safetensors.")
    if path.is_dir():
        raise LooplineError(f"{path} is a folder; give the path of a file in it.")
    if not path.absolute().parent.is_dir():
        raise LooplineError(f"There is no folder {path.parent} to write {path.name} into.")
    if os.path.lexists(path) and not force:
        raise LooplineError(f"{path} is there already; choose another name, or replace it with force (--force).")


def write_weights(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Put a file in the place of another so that at every moment one of the two is there, whole and on the disk."""
    from safetensors import SafetensorError  # not needed before something is saved
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.part")
    temporary.unlink(missing_ok=True)  # of a process that was killed
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        try:
            save_file(dict(weights), temporary, dict(about))
        except KeyError as error:
            raise CannotSave(f"A safetensors file cannot hold tensors of {error.args[0]}.") from error
        except SafetensorError as error:
            raise StoreError(f"{path} cannot be written: {error}.") from error
        temporary.chmod(0o600)
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
