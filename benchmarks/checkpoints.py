"""What checkpoints cost: how long training stands still, what it loses while one is written, memory, the hash.

make bench            # or: python benchmarks/checkpoints.py --parameters 100_000_000 --rounds 7
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from torch import nn

from loopline import Every, Never, Run, SupervisedTask, Trainer, loop
from loopline.checkpoint import Checkpointer, Latest
from loopline.core.when import When


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder otherwise")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        hashing()
        every_fifty_steps(Path(folder))
        stall(Path(folder), args.parameters, args.rounds)


def hashing() -> None:
    data = memoryview(bytearray(256 * 2**20))
    for name, kind in (("xxh3_128", xxhash.xxh3_128), ("sha256", hashlib.sha256)):
        began = time.process_time()
        kind().update(data)
        print(f"hashing, {name:10} {len(data) / (time.process_time() - began) / 1e9:8.2f} GB/s per core   (bar 1)")


def every_fifty_steps(folder: Path) -> None:
    """The MLP 784-256-10, wall clock, one checkpoint for each fifty steps against none."""
    batches = [(torch.randn(128, 784), torch.randint(10, (128,))) for _ in range(500)]

    def once(when: When, name: str) -> float:
        torch.manual_seed(0)
        model = mlp()
        task = SupervisedTask(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam(model.parameters()))
        trainer = Trainer(task, progress=False, checkpoint=Checkpointer(folder / name, when=when, keep=Latest(2)))
        began = time.perf_counter()
        trainer.fit(batches, epochs=1, resume="auto")
        return time.perf_counter() - began

    times = [(once(Never(), f"never-{i}"), once(Every(steps=50), f"fifty-{i}")) for i in range(6)][1:]
    without, with_them = (statistics.median(column) for column in zip(*times, strict=True))
    cost = (with_them - without) / 10
    print(
        f"MLP 784-256-10, 500 steps: {without * 1e3:.0f} ms without, {with_them * 1e3:.0f} ms with a checkpoint every "
        f"50 steps: {cost * 1e3:.1f} ms for each, {(with_them / without - 1):.1%}"
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def stall(folder: Path, parameters: int, rounds: int) -> None:
    """One save of a large model while a small one trains on the other work: the call, and the time lost after it."""
    layers = max(1, parameters // 4_000_000)
    model = nn.ModuleList(nn.Linear(2000, 2000, bias=False) for _ in range(layers))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if v.numel() > 1)]
    size = sum(tensor.nbytes for tensor in tensors)

    copy = copying(tensors, rounds)

    train = small_training()
    idle = statistics.median(timed(train) for _ in range(300))
    checkpointer = Checkpointer(folder / "large", when=Never(), keep=Latest(1))
    run = Run(model=model, optimizers=[optimizer], callbacks=[checkpointer])
    calls, losses, lasted, memory = [], [], [], []
    with loop.fit(run):
        before = resident()
        for i in range(rounds + 1):
            run.progress.steps = i + 1
            calls.append(timed(lambda: checkpointer.save(run)))
            began, steps = time.perf_counter(), 0
            while checkpointer.busy:
                train()
                steps += 1
            lasted.append(time.perf_counter() - began)
            losses.append(max(0.0, lasted[-1] - steps * idle))
            checkpointer.wait()
            memory.append(resident() - before)
    call, lost = statistics.median(calls[1:]), statistics.median(losses[1:])
    print(f"a state of {size / 1e9:.2f} GB: one copy into kept buffers takes {copy:.3f} s")
    print(f"  first save, which gets the buffers: call {calls[0]:.3f} s")
    print(f"  call                      {call:.3f} s   {call / copy:5.2f} copies   (bar 1.3)")
    print(f"  call and lost in training {call + lost:.3f} s   {(call + lost) / copy:5.2f} copies   (bar 1.8)")
    print(f"  written after             {statistics.median(lasted[1:]):.3f} s")
    print(f"  memory kept between saves {memory[-1] / size:.2f} copies   (bar 1)")


def copying(tensors: list[torch.Tensor], rounds: int) -> float:
    kept = [torch.empty_like(tensor) for tensor in tensors]
    return statistics.median([timed(lambda: torch._foreach_copy_(kept, tensors)) for _ in range(rounds + 1)][1:])


def small_training() -> Callable[[], None]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y, criterion = torch.randn(128, 784), torch.randint(10, (128,)), nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
