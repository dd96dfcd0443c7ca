"""What a step costs, counted in calls: time is measured in benchmarks/, where nothing fails for a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from loopline import Callback, Every, Run, SupervisedTask, Trainer, at
from loopline.callbacks import LRMonitor, ProgressBar
from loopline.sinks import Sink

LOSS = nn.CrossEntropyLoss()


def batches(count):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 8, generator=generator), torch.zeros(4, dtype=torch.long)) for _ in range(count)]


def parts():
    model = nn.Linear(8, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def bare(loader):
    model, optimizer = parts()
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = LOSS(model(inputs), target)
        loss.backward()
        optimizer.step()


def fit(loader, **given):
    model, optimizer = parts()
    Trainer(SupervisedTask(model, loss=LOSS, optimizer=optimizer), progress=False, **given).fit(loader, epochs=1)


def calls(function: Callable[..., object], *args, **kwargs) -> int:
    """How many Python functions are entered, generators resumed included."""
    count = 0

    def seen(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        function(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return count


def calls_per_batch(function, *, make=dict) -> float:
    """Beyond what beginning and ending cost."""
    short, long = batches(100), batches(300)
    function(short, **make())  # what is done once in a process is done now
    return (calls(function, long, **make()) - calls(function, short, **make())) / 200


class Listening(Callback):
    def on_batch_start(self, run: Run) -> None:
        self.started = run.step

    def on_batch_end(self, run: Run) -> None:
        self.ended = run.step


class Nowhere(Sink):
    when = Every(steps=10**6)

    def write(self, record):
        pass


def test_a_batch_that_nobody_listens_to_costs_at_most_25_calls_over_a_bare_loop():
    assert calls_per_batch(fit) - calls_per_batch(bare) <= 25


@pytest.mark.parametrize(
    ("make", "handlers"),
    [
        (lambda: {"callbacks": [Callback() for _ in range(10)]}, 0),
        (lambda: {"callbacks": [Listening() for _ in range(10)]}, 20),
        (lambda: {"callbacks": [ProgressBar()]}, 0),
        (lambda: {"sinks": [Nowhere()]}, 1),
    ],
    ids=["ten that override nothing", "ten with two handlers each", "the progress bar", "a sink that is not due"],
)
def test_a_listener_costs_the_calls_of_its_handlers_and_an_event_that_is_heard_one_more(make, handlers):
    events = {0: 0, 1: 1, 20: 2}[handlers]
    assert round(calls_per_batch(fit, make=make) - calls_per_batch(fit), 1) == handlers + events


def test_an_event_that_nobody_hears_allocates_nothing():
    run = Run(callbacks=[LRMonitor()])
    run.emit(at.BATCH_END)
    before = sys.getallocatedblocks()
    for _ in range(1000):
        run.emit(at.BATCH_END)
    assert sys.getallocatedblocks() - before < 10
