"""A20: a checkpoint is not given to another training than its own; a difference is named, and can be allowed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopline import Every, Scheduled, SupervisedTask, Trainer
from loopline.checkpoint import Checkpointer
from loopline.core.errors import Mismatch
from loopline.stores import MemoryStore


@dataclass(frozen=True)
class Setting:
    width: int = 8
    dtype: torch.dtype = torch.float32
    optimizer: Any = torch.optim.Adam
    groups: int = 1
    scheduler: Any = None
    seed: int | None = 3
    accumulate: int = 1
    samples: int = 16
    batch_size: int = 4
    drop_last: bool = False
    shuffle: bool = True
    workers: int = 0
    epochs: int = 1


def fit(store: MemoryStore, setting: Setting, **given: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, setting.width), nn.Linear(setting.width, 2)).to(setting.dtype)
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()]}]
    optimizer = setting.optimizer(groups if setting.groups == 2 else model.parameters(), lr=0.01)
    schedule = setting.scheduler
    task = SupervisedTask(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=Scheduled(scheduler=schedule(optimizer, 0.9), when=Every(epochs=1)) if schedule else None,
    )
    data = TensorDataset(torch.randn(setting.samples, 4, dtype=setting.dtype), torch.randint(2, (setting.samples,)))
    loader = DataLoader(
        data,
        batch_size=setting.batch_size,
        shuffle=setting.shuffle,
        drop_last=setting.drop_last,
        num_workers=setting.workers,
    )
    trainer = Trainer(
        task,
        seed=setting.seed,
        accumulate=setting.accumulate,
        progress=False,
        checkpoint=Checkpointer(store, **given),
    )
    return trainer.fit(loader, epochs=setting.epochs)


THEN = Setting(scheduler=torch.optim.lr_scheduler.ExponentialLR)
CHANGES = [
    ("model", {"width": 9}, ["model", "optimizer"]),
    ("model", {"dtype": torch.float64}, ["model", "optimizer"]),
    ("optimizer", {"optimizer": torch.optim.SGD}, ["optimizer"]),
    ("optimizer", {"groups": 2}, ["optimizer"]),
    ("schedulers", {"scheduler": None}, ["schedulers"]),
    ("seed", {"seed": 4}, ["seed"]),
    ("accumulate", {"accumulate": 2}, ["accumulate"]),
    ("dataset", {"samples": 20}, ["dataset"]),
    ("batch_size", {"batch_size": 5}, ["batch_size"]),
    ("drop_last", {"drop_last": True}, ["drop_last"]),
    ("order", {"shuffle": False}, ["order"]),
]


@pytest.fixture
def saved() -> MemoryStore:
    store = MemoryStore()
    fit(store, THEN)
    return store


@pytest.mark.parametrize(("field", "change", "allow"), CHANGES, ids=lambda given: str(given)[:40])
def test_what_differs_is_refused_by_its_name_and_can_be_allowed_by_it(field, change, allow, saved):
    now = replace(THEN, epochs=2, **change)
    with pytest.raises(Mismatch, match=field):
        fit(saved, now)
    assert fit(saved, now, allow=allow).progress.epochs == 2


@pytest.mark.parametrize("change", [{"epochs": 3}, {"workers": 1}, {"seed": None}], ids=str)
def test_what_may_differ_is_no_matter(change, saved):
    run = fit(saved, replace(THEN, **{"epochs": 2, **change}))
    assert (run.status, run.progress.steps) == ("completed", 4 * run.progress.epochs)
