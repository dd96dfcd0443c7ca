"""Training with observers that fail, hang or are careless is, to the last bit, training without them."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopline import Binding, Callback, Every, Run, SupervisedTask, Trainer, at, loop
from loopline.callbacks import CallbackCosts, CatchMeddling, Lambda
from loopline.core.errors import BadStep, Meddling
from loopline.core.event import SEAMS
from loopline.sinks import Sink

FULL = os.environ.get("LOOPLINE_FULL") == "1"

EVENTS = [
    event
    for name, event in SEAMS.items()
    if name not in ("resumed", "sanity_start", "sanity_end", "saving", "loaded", "stopped", "exception")
]


class Task(SupervisedTask):
    """Draws from every random stream there is: whoever draws in between changes what is learned."""

    def __init__(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 2))
        model[1].eval()  # loop.epochs sets the mode of all, Frozen puts this one's back
        super().__init__(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
        self.losses = []

    def train_step(self, batch, run):
        x, y = batch
        x = x * random.uniform(0.9, 1.1) + float(np.random.normal(0, 0.1))
        said = super().train_step((x, y), run)
        self.losses.append((said if isinstance(said, torch.Tensor) else said["loss"]).detach().clone())
        return said


class Frozen(Callback):
    """Keeps the batch norm in evaluation mode, as one does in fine-tuning."""

    def on_epoch_start(self, run):
        run.model[1].eval()


class Memory(Sink):
    """So that METRICS is sent."""

    when = Every(steps=2)

    def write(self, record):
        pass


@dataclass
class Outcome:
    losses: list[float]
    weights: dict[str, list]
    streams: tuple = field(repr=False)


def fit(*observers, epochs=2):
    """All that a training comes to."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(14, 4, generator=source)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    task = Task()
    trainer = Trainer(task, callbacks=[Frozen(), *observers], sinks=[Memory()], progress=False, sanity=0)
    run = trainer.fit(DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=7), epochs=epochs)
    assert run.status == "completed"
    weights = {name: value.tolist() for name, value in task.model.state_dict().items()}
    return Outcome(
        torch.stack(task.losses).tolist(), weights, (random.random(), np.random.normal(), torch.rand(1).item())
    )


@pytest.fixture(autouse=True)
def gradients():
    """Some of the observers here switch them off."""
    yield
    torch.set_grad_enabled(True)


@pytest.fixture(scope="module")
def alone():
    """A training that nobody looks at."""
    return {epochs: fit(epochs=epochs) for epochs in (1, 2)}


class Observer:
    """Does something at some events, each time that they come."""

    def __init__(self, act, *events, careful=False):
        self.act, self.events, self.careful = act, events, careful
        self.acted = 0

    def bindings(self, run):
        for event in self.events:
            yield Binding(event, self.handle, owner=self, on_error="disable", careful=self.careful)

    def handle(self, run):
        self.acted += 1
        self.act(run)


def told(caplog, observer):
    """What is said of an observer at the end."""
    assert observer.acted > 0
    return [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("Observer failed ") and " in this run, " in record.getMessage()
    ]


def draws_from_python(run):
    random.random()
    random.gauss(0, 1)  # keeps a second number for the next time


def draws_from_numpy(run):
    np.random.normal()


def draws_from_torch(run):
    torch.rand(1)
    nn.functional.dropout(torch.ones(3))


def seeds(run):
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)


def evaluates(run):
    run.model.eval()


def evaluates_a_part(run):
    run.model[3].eval()


def trains(run):
    run.model.train()


def switches_gradients_off(run):
    torch.set_grad_enabled(False)


def fails_inside_an_evaluation(run):
    if run.stage != "train":
        return  # it hears what it does itself
    torch.rand(1)
    evaluation = loop.evaluate(run, [(torch.ones(2, 4), torch.ones(2).long())])  # the error keeps it alive
    for _ in evaluation:
        raise OSError("no display")


CARELESS = [
    draws_from_python,
    draws_from_numpy,
    draws_from_torch,
    seeds,
    evaluates,
    evaluates_a_part,
    trains,
]
BREAKING = [fails_inside_an_evaluation, switches_gradients_off]


@pytest.mark.parametrize("act", [*CARELESS, *BREAKING], ids=lambda act: act.__name__)
def test_a_careless_observer_changes_nothing(act, alone, caplog):
    observer = Observer(act, *EVENTS)
    assert (fit(observer), observer.acted > 0) == (alone[2], True)


@pytest.mark.parametrize("act", CARELESS, ids=lambda act: act.__name__)
def test_one_that_says_it_is_careful_and_is_not_changes_the_training(act, alone, caplog):
    """The control of the test above: the protection is what keeps the training the same."""
    assert fit(Observer(act, at.BATCH_START, careful=True)) != alone[2]


@pytest.mark.parametrize("act", [*CARELESS, switches_gradients_off], ids=lambda act: act.__name__)
def test_one_that_says_it_is_careful_and_is_not_is_caught_in_debugging(act):
    with pytest.raises(Meddling, match=r"^Observer changed .* at batch_start, epoch 0, step 0\."):
        fit(Observer(act, at.BATCH_START, careful=True), CatchMeddling())


def test_the_gradient_mode_that_an_observer_leaves_behind_would_end_the_training():
    with pytest.raises(BadStep, match="no gradient"):
        fit(Observer(switches_gradients_off, at.BATCH_START, careful=True))


@pytest.mark.parametrize("policy", ["disable", "warn"])
def test_an_evaluation_that_a_failure_leaves_in_the_middle_is_over_at_once(policy, caplog):
    after = []
    fails = Lambda(on_batch_start=fails_inside_an_evaluation, on_error=policy, careful=True)
    look = Lambda(on_batch_start=lambda run: after.append((run.stage, run.model.training, torch.is_grad_enabled())))
    fit(fails, look, epochs=1)
    assert set(after) == {("train", True, True)}


def edits_the_batch(run):
    if run.in_batch:
        run.batch.data[0].mul_(2)


def test_an_observer_that_edits_the_batch_changes_the_training(alone):
    """No copy is made of what it is given: this is found in debugging."""
    assert fit(Observer(edits_the_batch, at.BATCH_START)) != alone[2]


def test_an_observer_that_edits_the_batch_is_caught_in_debugging():
    said = r"^Observer changed run\.batch\.data\[0\] at batch_start, epoch 0, step 0\."
    with pytest.raises(Meddling, match=said):
        fit(Observer(edits_the_batch, at.BATCH_START), CatchMeddling())


@pytest.mark.parametrize("wrapper", [CatchMeddling, lambda: CallbackCosts(write=lambda text: None)])
@pytest.mark.parametrize("act", [*CARELESS, switches_gradients_off], ids=lambda act: act.__name__)
def test_what_an_observer_is_kept_from_is_no_meddling(act, wrapper, alone):
    assert fit(Observer(act, *EVENTS), wrapper()) == alone[2]


def fails(run):
    raise OSError("the service is gone")


def has_a_typo(run):
    run.progres  # noqa: B018


@pytest.mark.parametrize("act", [fails, has_a_typo], ids=lambda act: act.__name__)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_an_observer_that_always_fails_changes_nothing_and_is_named_at_the_end(act, event, alone, caplog):
    observer = Observer(act, event)
    outcome, said = fit(observer), told(caplog, observer)
    failed = [] if event is at.TEARDOWN else [f"first at {event.name}"]
    assert (outcome, [line.split(", ")[1] for line in said]) == (alone[2], failed)


def test_the_summary_says_how_often_since_when_and_whether_it_is_off(caplog):
    observer = Observer(fails, at.BATCH_END, at.EPOCH_END)
    fit(observer, epochs=5)
    assert (told(caplog, observer), observer.acted) == (
        ["Observer failed 3 times in this run, first at batch_end, epoch 0, step 0; it was off at the end."],
        3,
    )


def test_of_who_never_fails_nothing_is_said(caplog):
    observer = Observer(lambda run: None, *EVENTS)
    fit(observer)
    assert told(caplog, observer) == []


def sleeps(run):
    time.sleep(60)


def computes(run):
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        pass


def reads_a_socket(run):
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.recv(1)


HANGS = [
    (act, event)
    for act in (sleeps, computes, reads_a_socket)
    for event in (EVENTS if FULL else [at.BATCH_START, at.EVAL_BATCH_END])
    if event is not at.TEARDOWN
]


@pytest.mark.parametrize(("act", "event"), HANGS, ids=lambda given: getattr(given, "name", None) or given.__name__)
def test_an_observer_that_hangs_changes_nothing_and_is_named_at_the_end(act, event, alone, caplog):
    observer = Observer(act, event)
    outcome, said = fit(observer, epochs=1), told(caplog, observer)
    assert (outcome, observer.acted, [line.split(", ")[:2] for line in said]) == (
        alone[1],
        1,
        [["Observer failed once in this run", f"first at {event.name}"]],
    )


@pytest.mark.skipif(not FULL, reason="ten seconds")
def test_an_observer_that_hangs_at_teardown_does_not_keep_the_run(alone, caplog):
    assert (fit(Observer(sleeps, at.TEARDOWN), epochs=1), "took longer than 10 s" in caplog.text) == (alone[1], True)


def test_what_hung_and_where_is_said_at_once(caplog):
    fit(Observer(sleeps, at.STEP_END), epochs=1)
    first = caplog.records[0]
    assert first.levelno == logging.WARNING
    assert first.getMessage().startswith(
        "Observer failed at step_end, epoch 0, step 0: TimeoutError: took longer than 1 s and was cut off"
    )
    assert "time.sleep(60)" in caplog.text


def test_on_another_thread_an_observer_is_kept_apart_as_well(alone):
    outcomes = []
    observer = Observer(seeds, *EVENTS)
    thread = threading.Thread(target=lambda: outcomes.append(fit(observer)))
    thread.start()
    thread.join()
    assert outcomes == [alone[2]]


def test_after_a_fit_the_alarm_is_who_it_was():
    before = signal.getsignal(signal.SIGALRM)
    fit(Observer(draws_from_torch, *EVENTS), epochs=1)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_run_that_is_not_open_calls_an_observer_all_the_same():
    observer = Observer(evaluates, at.STEP_END)
    run = Run(model=nn.Linear(1, 1), callbacks=[observer])
    run.emit(at.STEP_END)
    assert observer.acted == 1
