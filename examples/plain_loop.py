"""A hand-written loop with callbacks, and no Trainer: the functions of `loopline.loop` are all there is."""

import torch
from torch import nn

from loopline import Run, at, loop, on
from loopline.callbacks import ClipNorm, EarlyStopping


@on(at.EPOCH_END)
def say(run: Run) -> None:
    print(f"epoch {run.epoch}: train {run.metrics['train/loss']:.3f}, validation {run.metrics['val/loss']:.3f}")


def batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 16, 8, generator=generator)
    return [(x, x.sum(dim=1, keepdim=True).sign()) for x in inputs]


def main() -> Run:
    torch.manual_seed(0)
    train, validation = batches(40, seed=1), batches(10, seed=2)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()

    run = Run(
        model=model, optimizers=[optimizer], callbacks=[say, ClipNorm(1.0), EarlyStopping("val/loss", patience=2)]
    )
    with loop.fit(run):
        for _ in loop.epochs(run, 20):
            for x, y in loop.batches(run, train):
                loss = criterion(model(x), y)
                run.log({"loss": loss}, weight=len(x))
                loop.backward(run, loss)
                loop.optimizer_step(run)
            for x, y in loop.evaluate(run, validation):
                run.log({"loss": criterion(model(x), y)}, weight=len(x))
    print(f"{run.status} after {run.progress.epochs} epochs{f': {run.reason}' if run.reason else ''}")
    return run


if __name__ == "__main__":
    main()
