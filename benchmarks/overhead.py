"""What loopline costs per step, over a bare PyTorch loop that does the same work.

All variants run in one process on one thread, a short stretch of each in turn, forwards and backwards, so that what
else the machine does falls on all of them alike. Time is CPU time of the whole process, threads included. Reported is
the lower quartile of each variant less that of the bare loop, and beside it the median of the paired differences.

    make bench            # or: python benchmarks/overhead.py --rounds 40 --json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from loopline import Callback, Every, Run, SupervisedTask, Trainer, loop
from loopline.callbacks import ProgressBar
from loopline.sinks import CsvSink

BATCHES = [
    (torch.randn(8, 32), torch.randint(10, (8,))) for _ in range(1000)
] * 4  # beginning and ending a fit is no step
LOSS = nn.CrossEntropyLoss()


class Listening(Callback):
    """Hears the two events that every batch passes, and does nothing: what is measured is being called."""

    def on_batch_start(self, run: Run) -> None:
        pass

    def on_batch_end(self, run: Run) -> None:
        pass


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def bare(*, clear_by_hand: bool = False) -> float:
    model, optimizer = parts()
    model.train()
    weights = list(model.parameters())
    began = time.process_time_ns()
    for inputs, target in BATCHES:
        if clear_by_hand:  # spares zero_grad's record for the profiler: docs/decisions/0008
            for weight in weights:
                weight.grad = None
        else:
            optimizer.zero_grad()
        loss = LOSS(model(inputs), target)
        loss.backward()
        optimizer.step()
    return per_step(began)


def by_hand() -> float:
    model, optimizer = parts()
    run = Run(model=model, optimizers=[optimizer])
    began = time.process_time_ns()
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for inputs, target in loop.batches(run, BATCHES):
                loop.backward(run, LOSS(model(inputs), target))
                loop.optimizer_step(run)
    return per_step(began)


def trainer(callbacks: int = 0, *, typical: bool = False) -> float:
    model, optimizer = parts()
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        seen = [ProgressBar(console=Console(file=nowhere, force_terminal=True, width=100))] if typical else []
        made = Trainer(
            SupervisedTask(model, loss=LOSS, optimizer=optimizer),
            callbacks=[*seen, *(Listening() for _ in range(callbacks))],
            sinks=[CsvSink(Path(folder) / "metrics.csv", when=Every(steps=50))] if typical else [],
            progress=False,
        )
        began = time.process_time_ns()
        made.fit(BATCHES, epochs=1)
        return per_step(began)


VARIANTS: dict[str, Callable[[], float]] = {
    "bare loop": bare,
    "bare loop again": lambda: bare(),
    "bare, no zero_grad": lambda: bare(clear_by_hand=True),
    "loop by hand": by_hand,
    "nothing attached": trainer,
    "ten callbacks": lambda: trainer(10),
    "typical": lambda: trainer(10, typical=True),
}
BARS_US = {"nothing attached": 5.0, "ten callbacks": 8.0, "typical": 15.0}


def per_step(began: int) -> float:
    return (time.process_time_ns() - began) / len(BATCHES) / 1000


def measure(rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for run_once in VARIANTS.values():
        run_once()
    for turn in range(rounds):
        gc.collect()
        for name in list(VARIANTS) if turn % 2 == 0 else list(VARIANTS)[::-1]:
            times[name].append(VARIANTS[name]())
    return times


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    times = measure(args.rounds)
    base = times["bare loop"]
    rows = [
        {
            "variant": name,
            "us_per_step": quantile(found, 0.25),
            "over_bare_us": quantile(found, 0.25) - quantile(base, 0.25),
            "paired_us": quantile([mine - theirs for mine, theirs in zip(found, base, strict=True)], 0.5),
            "ratio": quantile(found, 0.25) / quantile(base, 0.25),
            "bar_us": BARS_US.get(name),
        }
        for name, found in times.items()
    ]
    if args.json:
        json.dump({"torch": torch.__version__, "python": sys.version.split()[0], "rows": rows}, sys.stdout, indent=2)
        return 0
    print(f"{'':18} {'us/step':>8} {'over bare':>10} {'paired':>8} {'ratio':>6} {'bar':>5}")
    for row in rows:
        bar = "" if row["bar_us"] is None else f"{row['bar_us']:.0f}"
        print(
            f"{row['variant']:18} {row['us_per_step']:8.1f} {row['over_bare_us']:10.1f} {row['paired_us']:8.1f} "
            f"{row['ratio']:6.3f} {bar:>5}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
