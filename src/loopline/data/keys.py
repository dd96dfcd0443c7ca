"""Numbers that follow from a path alone, and random streams that are seeded by them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from struct import Struct
from typing import Any, NamedTuple

import torch

__all__ = ["Streams", "digest", "key", "put_back", "seed_streams", "streams", "untouched"]

_SEEDS = Struct("<QQL")


def key(*path: int | str) -> int:
    """A number of 64 bits that follows from a path such as ("sample", seed, epoch, position), the same for ever.

    >>> key("sample", 7, 0, 41)
    3455481975244355525
    """
    return int.from_bytes(digest(*path, size=8), "little")


def digest(*path: int | str, size: int) -> bytes:
    """So many bytes, at most 64, that follow from a path; text in a path has no slash."""
    return blake2b("/".join(map(str, path)).encode(), digest_size=size).digest()


def seed_streams(*path: int | str) -> None:
    """Seed this process's streams by a path: Python's, NumPy's where it is imported, and torch's on the CPU."""
    python, cpu, numpys = _SEEDS.unpack(digest(*path, size=20))
    random.seed(python)
    torch.default_generator.manual_seed(cpu)  # torch.manual_seed visits every device, which takes 100 times as long
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(numpys)


class Streams(NamedTuple):
    """Where the streams that `seed_streams` seeds stand."""

    python: Any
    cpu: torch.Tensor
    numpy: Any


def streams() -> Streams:
    """Where they stand now."""
    numpy = sys.modules.get("numpy")
    states = None if numpy is None else numpy.random.get_state()
    return Streams(random.getstate(), torch.default_generator.get_state(), states)


def put_back(states: Streams) -> None:
    """Make them go on from where they stood."""
    random.setstate(states.python)
    torch.default_generator.set_state(states.cpu)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)


@contextmanager
def untouched() -> Iterator[None]:
    """Whatever is seeded and drawn inside, the streams go on afterwards as if it had not been."""
    before = streams()
    try:
        yield
    finally:
        put_back(before)
