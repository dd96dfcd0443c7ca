"""The random streams of this process: seeding them, and leaving them as they were found."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["put_back", "seed_everything", "streams", "untouched"]


def seed_everything(seed: int) -> None:
    """Seed torch on every device, Python's `random`, and NumPy where it has been imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def untouched() -> Iterator[None]:
    """Whatever is drawn inside, the streams go on afterwards as if it had not been."""
    before = streams()
    try:
        yield
    finally:
        put_back(before)


def streams() -> dict[str, Any]:
    """Where every random stream of this process stands; numbers, tuples, arrays and tensors, for a checkpoint."""
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def put_back(states: Mapping[str, Any]) -> None:
    """Make every random stream go on from where `streams` found it."""
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if "numpy" in states:
        import numpy as np  # perhaps not imported yet in a process that goes on

        np.random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "mps" in states:
        torch.mps.set_rng_state(states["mps"])
