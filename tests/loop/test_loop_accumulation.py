"""The gradients of a window are those of the big batch."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from loopline import Binding, Run, Trainer, at, loop
from loopline.testing import TinyTask


class Windows:
    """Collects the batches of each window, and the gradients that the optimizer is given for it."""

    def __init__(self):
        self.batches = []
        self.windows = []

    def bindings(self, run):
        yield Binding(at.STEP_START, self.begin, owner=self)
        yield Binding(at.AFTER_BACKWARD, self.collect, owner=self)
        yield Binding(at.BEFORE_OPTIMIZER_STEP, self.compare, owner=self)

    def begin(self, run):
        self.batches = []

    def collect(self, run):
        self.batches.append(run.batch.data)

    def compare(self, run):
        model = copy.deepcopy(run.model).double()
        grads = [p.grad.clone() for p in run.model.parameters()]
        self.windows.append((model, list(self.batches), grads))


def batches_of(sizes):
    source = torch.Generator().manual_seed(len(sizes))
    return [(torch.randn(size, 4, generator=source), torch.randint(2, (size,), generator=source)) for size in sizes]


def weights_for(kind, sizes):
    match kind:
        case "size":
            return [None] * len(sizes)
        case "number":
            return [0.5 + (3 * i + size) % 5 for i, size in enumerate(sizes)]
        case "whole tensor":  # a count of tokens, as mask.sum() gives it
            return [torch.tensor(1 + (3 * i + size) % 5) for i, size in enumerate(sizes)]
        case _:
            return [torch.tensor(0.5 + (3 * i + size) % 5) for i, size in enumerate(sizes)]


def big_batch_gradients(model, batches, weights):
    """Written for one batch that has everything in it, each sample with the share that it is due."""
    x = torch.cat([x for x, _ in batches]).double()
    y = torch.cat([y for _, y in batches])
    shares = [
        torch.full((len(x),), 1.0 if w is None else float(w) / len(x), dtype=torch.float64)
        for (x, _), w in zip(batches, weights, strict=True)
    ]
    share = torch.cat(shares)
    losses = cross_entropy(model(x), y, reduction="none")
    return torch.autograd.grad((losses * share).sum() / share.sum(), list(model.parameters()))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=7),
    accumulate=st.integers(2, 4),
    kind=st.sampled_from(["size", "number", "tensor", "whole tensor"]),
    unfinished=st.sampled_from(["step", "drop"]),
)
def test_a_windows_gradients_are_those_of_one_big_batch(sizes, accumulate, kind, unfinished):
    task, windows = TinyTask(), Windows()
    data, weights = batches_of(sizes), weights_for(kind, sizes)
    run = Run(model=task.model, optimizers=[task.optimizer], callbacks=[windows], accumulate=accumulate)
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for batch in loop.batches(run, data, unfinished=unfinished):
                loop.backward(run, task.train_step(batch, run)["loss"], weight=weights[run.batch.index])
                loop.optimizer_step(run)
    done = 0
    for model, batches, grads in windows.windows:
        expected = big_batch_gradients(model, batches, weights[done : done + len(batches)])
        done += len(batches)
        for grad, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad.double(), wanted, rtol=2e-5, atol=1e-6)
    full = len(sizes) // accumulate * accumulate
    assert done == (len(sizes) if unfinished == "step" else full)


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_accumulating_a_whole_epoch_is_one_step_of_gradient_descent_on_all_of_it(sizes):
    data, task, plain = batches_of(sizes), TinyTask(), TinyTask()
    Trainer(task, accumulate=10, progress=False).fit(data, epochs=1)
    together = (torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))
    plain.train_step(together, None)["loss"].backward()
    plain.optimizer.step()
    for ours, theirs in zip(task.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_a_window_without_any_weight_leaves_the_weights_as_they_are(zero):
    task = TinyTask()
    before = [p.tolist() for p in task.model.parameters()]
    run = Run(model=task.model, optimizers=[task.optimizer], accumulate=2)
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for batch in loop.batches(run, batches_of([2, 3])):
                loop.backward(run, task.train_step(batch, run)["loss"], weight=zero)
                loop.optimizer_step(run)
    assert [p.tolist() for p in task.model.parameters()] == before


def test_clipping_sees_the_mean_over_the_window_and_not_its_sum():
    task, windows = TinyTask(), Windows()
    sizes = [3, 3, 3, 3]
    Trainer(task, accumulate=4, clip_norm=1e6, callbacks=[windows], progress=False).fit(batches_of(sizes), epochs=1)
    model, batches, grads = windows.windows[0]
    expected = big_batch_gradients(model, batches, [None] * 4)
    torch.testing.assert_close([g.double() for g in grads], list(expected), rtol=2e-5, atol=1e-6)
