import math

import pytest
import torch
from torch import nn

from loopline import At, Every, Never, Run, loop
from loopline.callbacks import ClipNorm, GradientStats, Lambda
from loopline.testing import no_sync


class Two(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.unused = nn.Parameter(torch.zeros(1))


def stepped(*callbacks, steps=1, gradients=((3.0, -4.0), (12.0,)), dtype=torch.float32, quietly=False):
    model = Two(dtype)

    def give(run):
        for parameter, gradient in zip((model.a, model.b), gradients, strict=True):
            parameter.grad = torch.tensor(gradient, dtype=dtype)

    run = Run(
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
        callbacks=[*callbacks, Lambda(on_before_optimizer_step=give, writes={"grads"})],
    )
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [1] * steps):
                loop.backward(run, model.a.sum() + model.b.sum())
                if quietly:
                    with no_sync():
                        loop.optimizer_step(run)
                else:
                    loop.optimizer_step(run)
    return run


ALL = {"train/grad/norm": 13.0, "train/grad/max": 12.0, "train/grad/mean_abs": pytest.approx(19 / 3)}


def test_norm_largest_and_mean_size_of_all_gradients_are_noted():
    assert dict(stepped(GradientStats(Every(steps=1))).metrics) == ALL


def test_each_parameter_has_its_own_figures_on_request():
    assert dict(stepped(GradientStats(Every(steps=1), per_parameter=True)).metrics) == {
        **ALL,
        "train/grad/norm/a": 5.0,
        "train/grad/max/a": 4.0,
        "train/grad/mean_abs/a": 3.5,
        "train/grad/norm/b": 12.0,
        "train/grad/max/b": 12.0,
        "train/grad/mean_abs/b": 12.0,
    }


def test_nothing_is_read():
    run = stepped(GradientStats(Every(steps=1), per_parameter=True), quietly=True)
    assert {type(run.metrics.entry(name)) for name in run.metrics} == {torch.Tensor}


@pytest.mark.parametrize(
    ("when", "noted_in"), [(Every(steps=2), [1, 3]), (At(steps=3), [2]), (Never() | Every(steps=4), [3])]
)
def test_it_measures_when_it_is_due(when, noted_in):
    steps = []

    def look(run):
        if "train/grad/norm" in run.metrics:
            steps.append(run.step)
            del run.metrics["train/grad/norm"]

    stepped(GradientStats(when), Lambda(on_step_end=look), steps=4)
    assert steps == noted_in


def test_it_sees_gradients_as_clipping_leaves_them():
    run = stepped(GradientStats(Every(steps=1)), ClipNorm(1.0))
    assert run.metrics["train/grad/norm"] == pytest.approx(1.0, rel=1e-5)


def test_half_precision_is_added_up_without_overflow():
    run = stepped(GradientStats(Every(steps=1)), gradients=((60000.0, 60000.0), (60000.0,)), dtype=torch.float16)
    expected = [60000 * math.sqrt(3), 60000.0, 60000.0]
    assert list(run.metrics.values()) == pytest.approx(expected, rel=1e-3)


def test_nan_is_shown_and_not_hidden():
    run = stepped(GradientStats(Every(steps=1)), gradients=((math.nan, 1.0), (2.0,)))
    assert [math.isnan(value) for value in run.metrics.values()] == [True, True, True]


def test_a_sparse_gradient_counts_as_what_is_stored():
    table = nn.Embedding(10, 1, sparse=True)
    run = Run(
        model=table,
        optimizers=[torch.optim.SGD(table.parameters(), lr=0.1)],
        callbacks=[GradientStats(Every(steps=1))],
    )
    with torch.sparse.check_sparse_tensor_invariants(enable=False), loop.fit(run):
        for _ in loop.epochs(run, 1):
            for rows in loop.batches(run, [torch.tensor([3, 3, 5, 5, 5])]):
                loop.backward(run, table(rows).sum())
                loop.optimizer_step(run)
    assert dict(run.metrics) == {
        "train/grad/norm": pytest.approx(math.sqrt(13)),
        "train/grad/max": 3.0,
        "train/grad/mean_abs": 2.5,
    }


@pytest.mark.parametrize("when", [Every(epochs=1), Never()])
def test_a_time_that_never_comes_is_refused(when):
    with pytest.raises(ValueError, match="would never be due"):
        GradientStats(when)


def test_a_number_is_not_a_time():
    with pytest.raises(TypeError, match="Every"):
        GradientStats(50)
