import math

import pytest
import torch
from torch.nn.utils import get_total_norm

from loopline import Callback, Run, Trainer, loop
from loopline.callbacks import ClipNorm, ClipValue
from loopline.testing import TinyTask, no_sync, tiny_loader


class Given(Callback):
    """Puts known gradients where the backward pass has put its own."""

    writes = frozenset({"grads"})

    def __init__(self, *gradients):
        self.gradients = gradients

    def on_before_optimizer_step(self, run):
        parameters = [p for o in run.optimizers for g in o.param_groups for p in g["params"]]
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = torch.tensor(gradient)


def step(*callbacks, quietly=False):
    """One step of two parameters; their gradients as the optimizer took them."""
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    run = Run(optimizers=[torch.optim.SGD([first], lr=1.0), torch.optim.SGD([second], lr=1.0)], callbacks=callbacks)
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [1]):
                loop.backward(run, first.sum() + second.sum())
                if quietly:
                    with no_sync():
                        loop.optimizer_step(run)
                else:
                    loop.optimizer_step(run)
    return [[-x for x in parameter.tolist()] for parameter in (first, second)], run


GRADIENTS = ([2.0, 3.0], [-6.0])  # their norm is 7


def test_gradients_are_scaled_together_to_the_largest_norm_allowed():
    (first, second), _ = step(Given(*GRADIENTS), ClipNorm(3.5))
    assert first + second == pytest.approx([1.0, 1.5, -3.0], rel=1e-5)


def test_a_norm_that_is_small_enough_is_left_to_the_last_bit():
    assert step(Given(*GRADIENTS), ClipNorm(7.1))[0] == [[2.0, 3.0], [-6.0]]


@pytest.mark.parametrize(("norm_type", "norm"), [(1.0, 11.0), (math.inf, 6.0), (2.0, 7.0)])
def test_other_norms_can_be_asked_for(norm_type, norm):
    (first, second), run = step(Given(*GRADIENTS), ClipNorm(1.0, norm_type=norm_type, log=True))
    clipped = get_total_norm([torch.tensor(first), torch.tensor(second)], norm_type).item()
    assert (clipped, run.metrics["train/grad_norm"]) == (pytest.approx(1.0, rel=1e-5), norm)


def test_the_norm_before_clipping_is_logged_and_not_read():
    _, run = step(Given(*GRADIENTS), ClipNorm(1.0, log=True), quietly=True)
    assert (isinstance(run.metrics.entry("train/grad_norm"), torch.Tensor), run.metrics["train/grad_norm"]) == (
        True,
        7.0,
    )


def test_nothing_is_logged_unless_asked_for():
    assert dict(step(Given(*GRADIENTS), ClipNorm(1.0))[1].metrics) == {}


def test_the_logged_norm_is_that_of_the_latest_step():
    task = TinyTask()
    run = Trainer(task, callbacks=[ClipNorm(math.inf, log=True)], progress=False).fit(tiny_loader(), epochs=1)
    last = get_total_norm([p.grad for p in task.model.parameters()])
    assert run.metrics["train/grad_norm"] == last.item()


def test_an_infinite_max_norm_clips_nothing():
    assert step(Given(*GRADIENTS), ClipNorm(math.inf, log=True))[0] == [[2.0, 3.0], [-6.0]]


def test_it_clips_as_the_trainer_does():
    weights = []
    for how in ({"callbacks": [ClipNorm(0.1)]}, {"clip_norm": 0.1}):
        task = TinyTask()
        Trainer(task, progress=False, accumulate=2, **how).fit(tiny_loader(), epochs=2)
        weights.append(task.model.weight.tolist())
    assert weights[0] == weights[1]


def test_each_number_is_cut_to_the_largest_size_allowed():
    assert step(Given([2.0, -0.25], [-6.0]), ClipValue(0.5))[0] == [[0.5, -0.25], [-0.5]]


def test_two_clippers_act_in_the_order_of_attachment():
    norm_first = step(Given([3.0, 4.0], [0.0]), ClipNorm(1.0), ClipValue(0.7))[0][0]
    value_first = step(Given([3.0, 4.0], [0.0]), ClipValue(0.7), ClipNorm(1.0))[0][0]
    assert norm_first + value_first == pytest.approx([0.6, 0.7, 0.7, 0.7], rel=1e-5)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan])
def test_a_largest_norm_that_is_not_above_0_is_refused(wrong):
    with pytest.raises(ValueError, match="ClipNorm"):
        ClipNorm(wrong)


def test_a_kind_of_norm_that_is_not_above_0_is_refused():
    with pytest.raises(ValueError, match="norm_type=0"):
        ClipNorm(1.0, norm_type=0)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf])
def test_a_largest_value_that_is_not_above_0_and_finite_is_refused(wrong):
    with pytest.raises(ValueError, match="ClipValue"):
        ClipValue(wrong)
