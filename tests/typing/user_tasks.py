"""Tasks and trainers, as users write them; checked by mypy --strict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from loopline import At, Bf16, Every, Never, Run, Scheduled, Single, SupervisedTask, Task, Trainer, When
from loopline.core.when import Unit, Watch


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


class Words(Task):
    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def optimizers(self) -> Optimizer | Sequence[Optimizer]:
        return [self.optimizer]

    def schedulers(self) -> Sequence[Scheduled]:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer)
        return [Scheduled(scheduler=scheduler, when=Every(epochs=1), metric="val/loss")]

    def train_step(self, batch: tuple[Tensor, Tensor], run: Run) -> Mapping[str, Any]:
        words, mask = batch
        return {"loss": (self.model(words).sum(1) * mask).mean(), "weight": mask.sum()}

    def eval_step(self, batch: tuple[Tensor, Tensor], run: Run) -> Mapping[str, Any]:
        return self.train_step(batch, run)


class EvenEpochs(When):
    @property
    def units(self) -> frozenset[Unit]:
        return frozenset(["epochs"])

    def watch(self) -> Watch:
        return lambda unit, count: unit == "epochs" and count % 2 == 0


model = nn.Linear(2, 2)
task = SupervisedTask(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=torch.optim.AdamW(model.parameters()),
    scheduler=torch.optim.lr_scheduler.ConstantLR(torch.optim.AdamW(model.parameters())),
    metrics={"accuracy": accuracy},
)
loader = [(torch.ones(2, 2), torch.ones(2, dtype=torch.long))]
even: When = EvenEpochs()
trainer = Trainer(
    task,
    strategy=Single("cpu"),
    precision=Bf16(),
    accumulate=2,
    clip_norm=1.0,
    evaluate=Every(steps=10) | At(epochs=[1, 2]) | Never() | EvenEpochs(),
    seed=0,
)
run: Run = trainer.fit(loader, loader, epochs=1, steps=3)
again: Run = Trainer(Words(), strategy="cpu", precision="fp32").fit(loader, steps=3, resume=run)
losses: dict[str, float] = trainer.validate(loader)
predictions: list[Any] = trainer.predict(loader)
