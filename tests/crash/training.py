"""A small real training that tests kill, in a process of its own, and what it must come to."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from loopline import Callback, Every, Run, Scheduled, SupervisedTask, Trainer, loop
from loopline.checkpoint import Checkpointer, Latest

STEPS_BETWEEN = 3
EPOCHS = 2


@dataclass(frozen=True)
class Config:
    """What differs between the trainings."""

    workers: int = 0
    augment: bool = False
    accumulate: int = 1

    @property
    def name(self) -> str:
        return f"workers-{self.workers}-augment-{int(self.augment)}-accumulate-{self.accumulate}"


CONFIGS = (Config(), Config(augment=True), Config(augment=True, accumulate=3), Config(workers=2, augment=True))


class Points(Dataset[Any]):
    """Forty points; with `augment`, drawn a little differently each time from all three random streams."""

    def __init__(self, *, augment: bool) -> None:
        self.augment = augment
        source = torch.Generator().manual_seed(0)
        self.x = torch.randn(40, 6, generator=source)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        if self.augment:
            x = x + 0.1 * torch.randn(6) + random.random() + float(np.random.rand())
        return x, int(self.x[index].sum() > 0)


class Losses(Callback):
    """Adds a line with each step's loss to a file, to the last bit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, run: Run) -> None:
        self.file = os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self.path.with_name("began").touch()

    def on_after_backward(self, run: Run) -> None:
        loss = float(run.batch.loss.detach())
        os.write(self.file, f"{run.progress.batches} {loss.hex()}\n".encode())

    def on_teardown(self, run: Run) -> None:
        os.close(self.file)


class Dies(Callback):
    """Kills its own process in the middle of a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_after_backward(self, run: Run) -> None:
        if run.progress.batches == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def streams_are_not_put_back() -> None:
    """A restore that is broken on purpose."""
    loop._put_back_streams = lambda run: None


def the_position_is_off_by_one() -> None:
    """A restore that is broken on purpose."""
    start = loop.start
    loop.start = lambda loader, epoch, index, state=None: start(loader, epoch, index + (index > 0), state)


def train(folder: Path, config: Config, *, dies_at: int | None = None, broken: Any = None, **given: Any) -> Run:
    """Train to the end, from the newest checkpoint that there is; the weights' hash is left in `done`."""
    torch.set_num_threads(1)
    if broken is not None:
        broken()
    folder.mkdir(exist_ok=True)
    data = Points(augment=config.augment)
    # by fork, as in a process that was started in the plain way
    context = "fork" if config.workers else None
    loader = DataLoader(data, 4, shuffle=True, num_workers=config.workers, multiprocessing_context=context)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
    task = SupervisedTask(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=Scheduled(scheduler=schedule, when=Every(steps=1)),
    )
    checkpointer = Checkpointer(
        given.pop("store", folder / "run"), when=Every(steps=STEPS_BETWEEN), keep=Latest(2), **given
    )
    trainer = Trainer(
        task,
        seed=7,
        accumulate=config.accumulate,
        checkpoint=checkpointer,
        callbacks=[Losses(folder / "losses.txt"), *([] if dies_at is None else [Dies(dies_at)])],
        progress=False,
    )
    run = trainer.fit(loader, [(data.x, (data.x.sum(dim=1) > 0).long())], epochs=EPOCHS)
    (folder / "done.tmp").write_text(digest(model))
    (folder / "done.tmp").rename(folder / "done")
    return run


def digest(model: nn.Module) -> str:
    """A hash over all weights."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def read(folder: Path) -> tuple[str, dict[int, set[str]], int]:
    """What a training came to: the weights' hash, the losses that each batch ever had, how many were computed."""
    lines = [line.split() for line in (folder / "losses.txt").read_text().splitlines()]
    losses: dict[int, set[str]] = {}
    for batch, loss in lines:
        losses.setdefault(int(batch), set()).add(loss)
    return (folder / "done").read_text(), losses, len(lines)


def in_a_process(target: Any, *given: Any, **named: Any) -> Any:
    """A process that has everything imported already, and that nothing was computed in."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["training", "torch", "loopline", "loopline.checkpoint", "loopline.callbacks"])
    process = context.Process(target=target, args=given, kwargs=named)
    process.start()
    return process


def kill(process: Any) -> None:
    """Kill a process at once, and wait until it is gone; its loader's workers find that out by themselves."""
    os.kill(process.pid, signal.SIGKILL)
    while Path(f"/proc/{process.pid}").exists():
        time.sleep(0.002)
