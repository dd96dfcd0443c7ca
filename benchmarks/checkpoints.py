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
        for threads in sorted({1, torch.get_num_threads()}):
            stall(Path(folder) / f"{threads}", args.parameters, args.rounds, threads)


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


def stall(folder: Path, parameters: int, rounds: int, threads: int) -> None:
    """Saves of a large model while a small one trains on other work: the call, and what the training loses after it."""
    torch.set_num_threads(threads)
    model, optimizer, tensors = large(parameters)
    size = sum(tensor.nbytes for tensor in tensors)
    kept = [torch.empty_like(tensor) for tensor in tensors]
    train = small_training()
    checkpointer = Checkpointer(folder, when=Never(), keep=Latest(2))
    run = Run(model=model, optimizers=[optimizer], callbacks=[checkpointer])
    rows: list[tuple[float, ...]] = []
    with loop.fit(run):
        before = resident()
        for i in range(rounds + 1):
            copy = timed(lambda: torch._foreach_copy_(kept, tensors))
            idle = statistics.median(timed(train) for _ in range(200))
            run.progress.steps = i + 1
            call = timed(lambda: checkpointer.save(run))
            began, steps = time.perf_counter(), 0
            while checkpointer.busy:
                train()
                steps += 1
            lasted = time.perf_counter() - began
            checkpointer.wait()
            rows.append((copy, call, max(0.0, lasted - steps * idle), lasted))
        memory = resident() - before - size  # less `kept`, which the first copy has filled
    copy, call, lost, lasted = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    print(f"a state of {size / 1e9:.2f} GB, training on {threads} threads: a copy into kept buffers takes {copy:.3f} s")
    print(f"  first save, which gets the buffers: call {rows[0][1]:.3f} s")
    print(f"  call                      {call:.3f} s   {call / copy:5.2f} copies   (bar 1.3)")
    print(f"  call and lost in training {call + lost:.3f} s   {(call + lost) / copy:5.2f} copies   (bar 1.8)")
    print(f"  written within            {lasted:.3f} s")
    print(f"  memory kept between saves {memory / size:.2f} copies   (bar 1)")


def large(parameters: int) -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    """A model, Adam after a step, and all tensors of both."""
    model = nn.ModuleList(nn.Linear(2000, 2000, bias=False) for _ in range(max(1, parameters // 4_000_000)))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = [value for parts in optimizer.state.values() for value in parts.values()]
    return model, optimizer, [*model.parameters(), *state]


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
