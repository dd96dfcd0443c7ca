"""What a step held is free before the next batch is fetched; gradients are cleared as the optimizer would."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD

from loopline import Run, SupervisedTask, Trainer, loop


class Watching(nn.Module):
    """A model that remembers, weakly, what it gave."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.gave = []

    def forward(self, x):
        output = self.layer(x)
        self.gave.append(weakref.ref(output))
        return output


def looked_at(alive, gave):
    """Batches of a loader that counts, at each fetch, which earlier batches and outputs still live."""
    made = []
    for _ in range(4):
        alive.append((sum(ref() is not None for ref in made), sum(ref() is not None for ref in gave)))
        x = torch.randn(5, 3)
        made.append(weakref.ref(x))
        yield x, torch.zeros(5, dtype=torch.long)
        del x


def with_trainer(model, loader):
    task = SupervisedTask(model, loss=nn.CrossEntropyLoss(), optimizer=SGD(model.parameters(), lr=0.1))
    Trainer(task, progress=False).fit(loader, epochs=1)


def keeping(model, loader):
    """The negative control: who keeps the batches is found out."""
    kept = []

    class Hoarding(SupervisedTask):
        def train_step(self, batch, run):
            said = super().train_step(batch, run)
            kept.append((batch, said))
            return said

    task = Hoarding(model, loss=nn.CrossEntropyLoss(), optimizer=SGD(model.parameters(), lr=0.1))
    Trainer(task, progress=False).fit(loader, epochs=1)


@pytest.mark.parametrize(("fit", "expected"), [(with_trainer, [(0, 0)] * 4), (keeping, [(n, n) for n in range(4)])])
def test_batch_and_output_are_free_before_the_next_fetch(fit, expected):
    alive, model = [], Watching()
    fit(model, looked_at(alive, model.gave))
    assert alive == expected


class Counting(SGD):
    def zero_grad(self, set_to_none=True):
        self.cleared = getattr(self, "cleared", 0) + 1
        super().zero_grad(set_to_none)


def gradients_at_forward(optimizer, model, *, also=None):
    """Which parameters have a gradient when the forward pass of each of three steps begins."""
    found = []
    run = Run(model=model, optimizers=[optimizer])
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for x in loop.batches(run, [torch.randn(4, 3) for _ in range(3)]):
                found.append([name for name, p in model.named_parameters() if p.grad is not None])
                loop.backward(run, model(x).sum())
                loop.optimizer_step(run)
                if also is not None:
                    also(optimizer)
    return found


def test_gradients_are_cleared_before_each_forward_pass():
    model = nn.Linear(3, 2)
    assert gradients_at_forward(SGD(model.parameters(), lr=0.1), model) == [[], [], []]


def test_a_group_added_on_the_way_is_cleared_as_well():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    def thaw(optimizer):
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model[1].parameters())})

    found = gradients_at_forward(SGD(model[0].parameters(), lr=0.1), model, also=thaw)
    assert found == [[], [], []]


def test_what_no_optimizer_holds_keeps_its_gradient():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    found = gradients_at_forward(SGD(model[0].parameters(), lr=0.1), model)
    assert found == [[], ["1.weight", "1.bias"], ["1.weight", "1.bias"]]


def test_an_optimizer_that_clears_in_its_own_way_is_asked():
    model = nn.Linear(3, 2)
    optimizer = Counting(model.parameters(), lr=0.1)
    assert (gradients_at_forward(optimizer, model), optimizer.cleared) == ([[], [], []], 3)


def test_an_object_whose_zero_grad_was_replaced_is_asked():
    model = nn.Linear(3, 2)
    optimizer, heard = SGD(model.parameters(), lr=0.1), []
    optimizer.zero_grad = lambda: heard.append("cleared")
    assert (gradients_at_forward(optimizer, model), heard) == (
        [[], ["weight", "bias"], ["weight", "bias"]],
        ["cleared"] * 3,
    )
