"""Mistakes that a type checker must find: an ignore that is not needed is an error of mypy --strict."""

from __future__ import annotations

import torch
from torch import nn

from loopline import At, Callback, Every, Run, SupervisedTask, Trainer, at, loop, on

model = nn.Linear(1, 1)
task = SupervisedTask(model, loss=nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters()))

Trainer(model)  # type: ignore[arg-type]
Trainer(task, epochs=3)  # type: ignore[call-arg]
Trainer(task, evaluate=1)  # type: ignore[arg-type]
Trainer(task, "cpu")  # type: ignore[call-arg]
Trainer(task).fit([1], [1], 3)  # type: ignore[call-arg]
SupervisedTask(model, loss=3, optimizer=torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
Every(steps=1.5)  # type: ignore[arg-type]
At(steps=[1.5])  # type: ignore[list-item]
Every(steps=1) | 5  # type: ignore[operator]
Run(model)  # type: ignore[call-arg]
Run().log([1.0])  # type: ignore[arg-type]
Run().emit("step_end")  # type: ignore[arg-type]
Run().stop()  # type: ignore[call-arg]
loop.batches(Run(), [1], unfinished="keep")  # type: ignore[arg-type]
misspelt = at.STEP_ENDS  # type: ignore[attr-defined]
at.STEP_END.name = "other"  # type: ignore[misc]
on("step_end")  # type: ignore[arg-type]
on(at.STEP_END, ranks="main")  # type: ignore[arg-type]


class Wrong(Callback):
    on_error = "ignore"  # type: ignore[assignment]
    ranks = "main"  # type: ignore[assignment]

    def on_step_end(self, run: Run, batch: int) -> None: ...  # type: ignore[override]
