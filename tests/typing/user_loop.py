"""A training loop written by hand; checked by mypy --strict."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loopline import Every, Run, Scheduled, StopRun, loop


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Run:
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run = Run(
        model=model,
        optimizers=[optimizer],
        schedulers=[Scheduled(scheduler=scheduler, when=Every(steps=10) | Every(epochs=1))],
    )
    with loop.fit(run) as opened:
        for epoch in loop.epochs(opened, 10, steps=100):
            for x, y in loop.batches(opened, data, accumulate=2, unfinished="drop"):
                loss = nn.functional.mse_loss(model(x), y)
                loop.backward(opened, loss, weight=len(x))
                changed: bool = loop.optimizer_step(opened, clip_norm=1.0)
                if not changed and epoch > 5:
                    raise StopRun("nothing changes")
            for x, y in loop.evaluate(opened, data):
                opened.log({"loss": nn.functional.mse_loss(model(x), y)}, weight=len(x))
    return run


finished = train(nn.Linear(1, 1), [(torch.ones(2, 1), torch.ones(2, 1))])
reason: str | None = finished.reason
steps: int = finished.progress.steps
loss: float = finished.metrics["val/loss"]
