"""What an exact order costs per sample, over a plain DataLoader that reads the same dataset.

Everything is read in the main process, where it is dearest: there the streams of the model are put back after each
batch. The dataset does nothing but index tensors. One process, one thread, the variants in turn, forwards and
backwards; CPU time; reported is the lower quartile.

    python benchmarks/data_keys.py --rounds 40
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from loopline.data import Exact, Permutation, start
from loopline.data.keys import seed_streams

SAMPLES = 8192
DATASET = TensorDataset(torch.randn(SAMPLES, 8), torch.randint(10, (SAMPLES,)))
BAR_US = 20.0


def plain(batch: int) -> DataLoader[Any]:
    return DataLoader(DATASET, batch_size=batch, shuffle=True)


def read(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def keys() -> None:
    for position in range(SAMPLES):
        seed_streams("sample", 7, 0, position)


VARIANTS: dict[str, Callable[[], object]] = {}
for size in (64, 128):
    VARIANTS |= {
        f"plain, batch {size}": lambda size=size: read(plain(size)),
        f"plain, as the loop begins it, batch {size}": lambda size=size: read(start(plain(size), 0, 0)),
        f"Exact, batch {size}": lambda size=size: read(Exact(plain(size), seed=7)),
    }
VARIANTS |= {"of that the order": lambda: read(Permutation(SAMPLES, 7, 0)), "of that the keys": keys}


def measure(rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(rounds + 1):
        gc.collect()
        for name in list(VARIANTS) if turn % 2 == 0 else list(VARIANTS)[::-1]:
            began = time.process_time_ns()
            VARIANTS[name]()
            if turn:
                times[name].append((time.process_time_ns() - began) / SAMPLES / 1000)
    return {name: sorted(found)[len(found) // 4] for name, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    times = measure(args.rounds)
    base = 0.0
    print(f"{'':42} {'us/sample':>10} {'over plain':>11} {'bar':>5}")
    for name, took in times.items():
        if name.startswith("plain, batch"):
            base = took
        over = f"{took - base:.2f}" if "batch" in name else ""
        bar = f"{BAR_US:.0f}" if name.startswith("Exact") else ""
        print(f"{name:42} {took:10.2f} {over:>11} {bar:>5}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
