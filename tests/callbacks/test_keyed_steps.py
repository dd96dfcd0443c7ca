"""Randomness by step needs no memory of what was drawn before."""

import pytest
import torch
from torch import nn

from loopline import SupervisedTask, Trainer, at, on
from loopline.callbacks import KeyedSteps
from loopline.testing import tiny_loader


def weights(cut, *callbacks):
    """Train with dropout, with a cut after which the streams stand elsewhere; None is no cut."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = SupervisedTask(model, loss=nn.CrossEntropyLoss(), optimizer=optimizer)

    @on(at.STEP_END)
    def stop(run):
        if run.step + 1 == cut:
            run.stop("cut")

    run = Trainer(task, progress=False, accumulate=2, callbacks=[*callbacks, stop]).fit(tiny_loader(7), epochs=2)
    if cut is not None:
        torch.manual_seed(99)
        Trainer(task, progress=False, accumulate=2, callbacks=callbacks).fit(tiny_loader(7), epochs=2, resume=run)
    return [parameter.tolist() for parameter in model.parameters()]


def test_a_run_that_goes_on_with_other_streams_is_the_same():
    assert weights(2, KeyedSteps(seed=3)) == weights(None, KeyedSteps(seed=3))


def test_without_it_the_streams_matter():
    assert weights(2) != weights(None)


def test_another_seed_is_another_run():
    assert weights(None, KeyedSteps(seed=3)) != weights(None, KeyedSteps(seed=4))


def test_a_seed_is_a_whole_number():
    with pytest.raises(TypeError, match="whole number"):
        KeyedSteps(seed="1")
