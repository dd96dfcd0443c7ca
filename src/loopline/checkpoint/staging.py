"""Memory on the cpu that a state is copied into, so that training goes on while it is written."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from .blocks import Blocks, header_of

__all__ = ["Image", "Stage", "file_of", "layout_of"]


class Image(Mapping[str, Tensor]):
    """A file of tensors as it will lie on the disk, in one piece of memory that tensors are copied into."""

    def __init__(self, tensors: Mapping[str, Tensor], cut: int = 0) -> None:
        # the widest first, so that each begins at a multiple of its size
        names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
        header = header_of({name[cut:]: tensors[name] for name in names})
        size = len(header) + sum(tensors[name].nbytes for name in names)
        memory = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)  # getting the memory is most of what the first save costs
        memory[: len(header)] = header
        self.layout = layout_of(tensors)
        self.file = _Pages(memory, size)
        self._tensors: dict[str, Tensor] = {}
        at = len(header)
        for name in names:
            given = tensors[name]
            count = given.numel()
            flat = torch.frombuffer(memory, dtype=given.dtype, count=count, offset=at) if count else given.cpu()
            self._tensors[name] = flat.reshape(given.shape)
            at += given.nbytes

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into their places."""
        pairs = [(self._tensors[name], tensor) for name, tensor in tensors.items() if tensor.numel()]
        if pairs:
            torch._foreach_copy_([place for place, _ in pairs], [tensor for _, tensor in pairs], non_blocking=True)
        for kind in {tensor.device.type for tensor in tensors.values()} & {"cuda", "mps", "xpu"}:
            getattr(torch, kind).synchronize()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _Pages(Blocks):
    """A file in memory that begins at a page and ends with one, so that a disk can fetch it by itself."""

    def __init__(self, memory: mmap.mmap, size: int) -> None:
        self._memory = memory
        self._of([memoryview(memory)[:size]])

    def pages(self, at_once: int) -> Iterator[memoryview]:
        """All of it in whole pages; what follows the last of its bytes is no part of it."""
        whole = memoryview(self._memory)
        for start in range(0, len(whole), at_once):
            yield whole[start : start + at_once]


class Stage:
    """One copy of a state, whose memory is kept between saves: getting it anew would cost more than the copy."""

    def __init__(self) -> None:
        self._images: dict[str, Image] = {}

    def take(self, place: str, tensors: Mapping[str, Tensor], cut: int = 0) -> Image:
        """The tensors as they are now. What an earlier call gave for this place is overwritten.

        In the file `cut` letters are missing at the beginning of each name.
        """
        kept = self._images.get(place)
        if kept is None or kept.layout != layout_of(tensors):
            self._images.pop(place, None)  # before memory is got for another
            kept = self._images[place] = Image(tensors, cut)
        kept.fill(tensors)
        return kept


def file_of(tensors: Mapping[str, Tensor], cut: int = 0) -> Blocks:
    """The file that tensors on the cpu make, from where they lie."""
    if isinstance(tensors, Image):
        return tensors.file
    return Blocks({name[cut:]: tensor for name, tensor in tensors.items()})


def layout_of(tensors: Mapping[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    """What an image must have been made for to be filled with these."""
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
