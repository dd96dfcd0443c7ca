"""Tensors as bytes in the safetensors format, written from where they lie and read without trust.

The package safetensors builds a whole file in memory before it writes; here a file is a header and the tensors' own
memory, so that a save needs no second copy. What is written here, safetensors reads.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..core.errors import CannotSave, Damaged
from .kinds import DIMENSIONS, KINDS, NAMES
from .tree import PARTS_LIMIT, TEXT_LIMIT, loads, parts_of

__all__ = ["Blocks", "KINDS", "NAMES", "header_length", "header_of", "tensors_of"]

_CHUNK = 32 * 2**20


class Blocks(io.RawIOBase):
    """A file of tensors that are on the cpu, to be read once or several times; `chunks` gives it without copying."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._of([memoryview(header_of(tensors)), *map(_bytes, tensors.values())])

    def _of(self, blocks: list[memoryview]) -> None:
        self._blocks = blocks
        self._starts = [0]
        for block in self._blocks:
            self._starts.append(self._starts[-1] + len(block))
        self._at = 0

    @property
    def nbytes(self) -> int:
        """How many bytes the file has."""
        return self._starts[-1]

    def chunks(self) -> Iterator[memoryview]:
        """The bytes, some MB at a time."""
        for block in self._blocks:
            for start in range(0, len(block), _CHUNK):
                yield block[start : start + _CHUNK]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self.nbytes)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        done = 0
        for block, (start, end) in zip(self._blocks, pairwise(self._starts), strict=True):
            if start <= self._at < end and done < len(into):
                piece = block[self._at - start : self._at - start + len(into) - done]
                into[done : done + len(piece)] = piece
                done += len(piece)
                self._at += len(piece)
        return done


def tensors_of(data: bytearray, said: str) -> dict[str, Tensor]:
    """The tensors in a file's bytes, each in memory of its own."""
    view = memoryview(data)
    length = header_length(bytes(view[:8]), len(view), said)
    header = loads(bytes(view[8 : 8 + length]), said)
    body = view[8 + length :]
    found: dict[str, Tensor] = {}
    try:
        entries = [(*entry["data_offsets"], name, entry) for name, entry in header.items() if name != "__metadata__"]
        end = 0
        for start, stop, name, entry in sorted(entries, key=lambda entry: entry[:2]):
            kind, shape = KINDS[entry["dtype"]], entry["shape"]
            if not _are_counts([start, stop]) or not _is_shape(shape) or start != end:
                raise ValueError(f"{name!r:.80} does not lie where it can")
            if stop - start != prod(shape) * kind.itemsize or stop > len(body):
                raise ValueError(f"{name!r:.80} has not the size of its shape")
            found[name] = _tensor(body[start:stop], kind, shape)
            end = stop
        if end != len(body):
            raise ValueError("there are bytes that belong to no tensor")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{said} is not a file of tensors: {error!s:.200}.") from error
    return {name: found[name] for name in header if name in found}


def header_length(start: bytes, size: int, said: str) -> int:
    """How many bytes of header follow the first eight of a file."""
    if len(start) < 8:
        raise Damaged(f"{said} is too short to hold tensors.")
    length = int.from_bytes(start, "little")
    if length > min(TEXT_LIMIT, size - 8):
        raise Damaged(f"{said} says that its header has {length} bytes, which it cannot have.")
    return length


def _are_counts(given: list[Any]) -> bool:
    return all(type(n) is int and n >= 0 for n in given)


def _is_shape(given: Any) -> bool:
    if not isinstance(given, list) or len(given) > DIMENSIONS or not _are_counts(given):
        return False
    return prod(n or 1 for n in given) < 2**60  # torch counts strides so, also where there is nothing


def _tensor(data: memoryview, kind: torch.dtype, shape: list[int]) -> Tensor:
    tensor = torch.empty(shape, dtype=kind)  # memory that torch has aligned
    if len(data):
        given = torch.frombuffer(data, dtype=torch.uint8)
        if kind is torch.bool and given.max() > 1:
            raise ValueError("a truth value is neither 0 nor 1")
        tensor.reshape(-1).view(torch.uint8).copy_(given)
    return tensor


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """What a file of these tensors, in this order, begins with."""
    entries: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES or name == "__metadata__":
            raise CannotSave(f"{name} is a tensor of {tensor.dtype}, which a file cannot keep under this name.")
        end = at + tensor.numel() * tensor.dtype.itemsize
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    if len(text) > TEXT_LIMIT or parts_of(text) > PARTS_LIMIT:
        raise CannotSave(
            f"The names and shapes of {len(tensors)} tensors come to {len(text)} bytes with {parts_of(text)} parts; "
            f"{TEXT_LIMIT} bytes and {PARTS_LIMIT} parts can be kept in a file."
        )
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
