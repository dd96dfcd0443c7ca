"""The weights after a fit are, to the last bit, those of a loop written in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from loopline import Every, Run, Scheduled, SupervisedTask, Trainer, loop

OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.01),
}
EPOCHS = 3


def dataset(samples=22, seed=0):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=source)
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


def new_parts(optimizer):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 2))
    return model, OPTIMIZERS[optimizer](model.parameters())


def train_loader():
    return DataLoader(dataset(), batch_size=5, shuffle=True)


def plain(optimizer, schedule, *, clip_norm=None, validating=False):
    """Nobody's library."""
    model, optimizer = new_parts(optimizer)
    scheduler = ExponentialLR(optimizer, 0.9)
    loss_of = nn.CrossEntropyLoss()
    loader = train_loader()
    torch.manual_seed(11)
    for _ in range(EPOCHS):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            if schedule == "steps":
                scheduler.step()
        if schedule == "epochs":
            scheduler.step()
    return model


def scheduled(optimizer, schedule):
    if schedule is None:
        return None
    when = Every(steps=1) if schedule == "steps" else Every(epochs=1)
    return Scheduled(scheduler=ExponentialLR(optimizer, 0.9), when=when)


def state(model):
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [None, "steps", "epochs"])
@pytest.mark.parametrize("validation", [None, "shuffled"])
def test_a_fit_gives_the_weights_of_a_plain_loop(optimizer, schedule, validation):
    model, steps = new_parts(optimizer)
    task = SupervisedTask(model, loss=nn.CrossEntropyLoss(), optimizer=steps, scheduler=scheduled(steps, schedule))
    held_out = None if validation is None else DataLoader(dataset(9, seed=1), batch_size=4, shuffle=True)
    trainer = Trainer(task, evaluate=Every(steps=2) | Every(epochs=1), progress=False, seed=11)
    trainer.fit(train_loader(), held_out, epochs=EPOCHS)
    assert state(model) == state(plain(optimizer, schedule))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_is_that_of_torch(optimizer):
    model, steps = new_parts(optimizer)
    task = SupervisedTask(model, loss=nn.CrossEntropyLoss(), optimizer=steps)
    Trainer(task, clip_norm=0.1, progress=False, seed=11).fit(train_loader(), epochs=EPOCHS)
    assert state(model) == state(plain(optimizer, None, clip_norm=0.1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_by_hand_gives_the_weights_of_a_plain_loop(optimizer):
    model, steps = new_parts(optimizer)
    loader, held_out = train_loader(), DataLoader(dataset(9, seed=1), batch_size=4, shuffle=True)
    run = Run(model=model, optimizers=[steps], schedulers=[scheduled(steps, "epochs")])
    loss_of = nn.CrossEntropyLoss()
    torch.manual_seed(11)
    with loop.fit(run):
        for _ in loop.epochs(run, EPOCHS):
            for x, y in loop.batches(run, loader):
                loop.backward(run, loss_of(model(x), y))
                loop.optimizer_step(run)
            for x, y in loop.evaluate(run, held_out):
                run.log({"loss": loss_of(model(x), y)}, weight=len(x))
    assert state(model) == state(plain(optimizer, "epochs"))


def test_a_plateau_scheduler_moves_as_one_stepped_by_hand():
    def rates(values):
        parameter = nn.Parameter(torch.zeros(()))
        optimizer = SGD([parameter], lr=1.0)
        return optimizer, ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    losses = [3.0, 2.0, 2.5, 2.4, 1.0, 1.5]
    optimizer, plateau = rates(losses)
    expected = []
    for loss in losses:
        plateau.step(loss)
        expected.append(optimizer.param_groups[0]["lr"])

    optimizer, plateau = rates(losses)
    run = Run(
        optimizers=[optimizer], schedulers=[Scheduled(scheduler=plateau, when=Every(epochs=1), metric="val/loss")]
    )
    seen = []
    with loop.fit(run):
        for epoch in loop.epochs(run, len(losses)):
            if epoch:
                seen.append(optimizer.param_groups[0]["lr"])
            for _ in loop.evaluate(run, [0]):
                run.log({"loss": losses[epoch]})
    seen.append(optimizer.param_groups[0]["lr"])
    assert seen == expected
