"""What is in a record, and when one is made."""

import copy
import math
import sys

import pytest
import torch

from loopline import Callback, Every, Never, Run, SupervisedTask, Trainer, at, loop, on
from loopline.core.when import At
from loopline.metrics import Metrics
from loopline.sinks import Record, Sink, Sinks
from loopline.testing import TinyTask, no_sync, tiny_loader


class Kept(Sink):
    """Keeps its records."""

    def __init__(self, when=Every(steps=1)):
        self.when = when
        self.records = []

    def write(self, record):
        self.records.append(record)

    @property
    def short(self):
        return [(r.kind, r.stage, r.step, r.metrics) for r in self.records]


def train(sinks, batches, *, epochs=1, log=None, callbacks=(), steps=None, accumulate=1):
    """A run whose batches are numbers, and whose loss is the number."""
    run = Run(callbacks=[*callbacks, sinks if isinstance(sinks, Sinks) else Sinks(sinks)])
    with loop.fit(run):
        for _ in loop.epochs(run, epochs, steps=steps):
            for x in loop.batches(run, batches, accumulate=accumulate):
                (log or (lambda run, x: run.log({"loss": x})))(run, x)
    return run


def test_a_step_record_has_the_means_since_the_last_one_and_an_epoch_record_those_of_the_epoch():
    kept = Kept(Every(steps=2))
    train([kept], [1, 2, 3, 4, 8], epochs=2)
    assert kept.short == [
        ("step", "train", 2, {"train/loss": 1.5}),
        ("step", "train", 4, {"train/loss": 3.5}),
        ("epoch", "train", 5, {"train/loss": 3.6}),
        ("step", "train", 6, {"train/loss": 1.0}),  # the 8 belongs to the epoch before
        ("step", "train", 8, {"train/loss": 2.5}),
        ("step", "train", 10, {"train/loss": 6.0}),
        ("epoch", "train", 10, {"train/loss": 3.6}),
    ]


def test_means_of_records_are_weighted():
    kept = Kept(Every(steps=2))
    train([kept], [1.0, 4.0, 7.0], log=lambda run, x: run.log({"loss": torch.tensor(x)}, weight=int(x)))
    assert kept.short == [
        ("step", "train", 2, {"train/loss": pytest.approx(17 / 5)}),
        ("epoch", "train", 3, {"train/loss": pytest.approx(66 / 12)}),
    ]


def test_weights_may_be_tensors_and_a_window_without_weight_gives_no_value():
    kept = Kept(Every(steps=1))
    weigh = {1: 3.0, 2: 0.0, 3: 1.0}
    train([kept], [1, 2, 3], log=lambda run, x: run.log({"loss": torch.tensor(x)}, weight=torch.tensor(weigh[x])))
    assert [r.metrics for r in kept.records] == [
        {"train/loss": 1.0},
        {},
        {"train/loss": 3.0},
        {"train/loss": 1.5},
    ]


def test_more_values_than_a_mean_keeps_waiting_are_all_in_the_record():
    kept = Kept(Every(steps=100))
    train([kept], list(range(200)), log=lambda run, x: run.log({"loss": torch.tensor(float(x))}))
    assert [r.metrics["train/loss"] for r in kept.records] == [49.5, 149.5, 99.5]


def test_each_sink_has_means_since_its_own_last_record():
    often, seldom = Kept(Every(steps=1)), Kept(Every(steps=3))
    train([often, seldom], [1, 2, 6])
    assert [[r.metrics["train/loss"] for r in kept.records] for kept in (often, seldom)] == [[1, 2, 6, 3], [3, 3]]


def test_a_metric_that_was_not_logged_since_the_last_record_is_not_in_it():
    kept = Kept(Every(steps=1))
    train([kept], [1, 2, 3], log=lambda run, x: run.log({"loss": x} if x != 2 else {"aux": x}))
    assert [r.metrics for r in kept.records] == [
        {"train/loss": 1},
        {"train/aux": 2},
        {"train/loss": 3},
        {"train/loss": 2, "train/aux": 2},
    ]


def test_a_plain_number_is_given_when_it_has_changed_and_at_the_end_of_the_epoch():
    kept = Kept(Every(steps=1))

    def log(run, x):
        run.metrics["train/lr"] = torch.tensor(0.5) if x < 3 else 0.25

    train([kept], [1, 2, 3, 4], log=log)
    assert [r.metrics for r in kept.records] == [{"train/lr": 0.5}, {}, {"train/lr": 0.25}, {}, {"train/lr": 0.25}]


def test_an_object_that_computes_is_asked_at_each_record():
    class Count:
        def __init__(self):
            self.n = 0

        def compute(self):
            return torch.tensor(float(self.n))

    kept, count = Kept(Every(steps=2)), Count()

    def log(run, x):
        count.n += x
        run.log({"count": count})

    train([kept], [1, 2, 3], log=log)
    assert [r.metrics for r in kept.records] == [{"train/count": 3}, {"train/count": 6}]


def test_a_record_stands_on_every_axis():
    kept = Kept(Every(steps=2))
    train([kept], [torch.zeros(3)] * 8, epochs=2, log=lambda run, x: None, accumulate=2)
    axes = [(r.kind, r.step, r.batch, r.epoch, r.samples, r.stage) for r in kept.records]
    assert axes == [
        ("step", 2, 4, 0, 12, "train"),
        ("step", 4, 8, 0, 24, "train"),
        ("epoch", 4, 8, 0, 24, "train"),
        ("step", 6, 12, 1, 36, "train"),
        ("step", 8, 16, 1, 48, "train"),
        ("epoch", 8, 16, 1, 48, "train"),
    ]


def test_flat_has_the_axes_first_and_no_metric_hides_one():
    record = Record("step", 1, 2, 3, 4, "train", 5.0, {"train/loss": 0.5, "step": 9})
    assert list(record.flat().items()) == [
        ("kind", "step"),
        ("step", 1),
        ("batch", 2),
        ("epoch", 3),
        ("samples", 4),
        ("stage", "train"),
        ("time", 5.0),
        ("train/loss", 0.5),
    ]


def test_the_trainer_records_evaluations_and_epochs_and_no_sanity_check():
    kept = Kept(Every(epochs=1))
    Trainer(TinyTask(), progress=False, sinks=[kept]).fit(tiny_loader(3), tiny_loader(2, seed=1), epochs=2)
    assert [(r.kind, r.stage, r.step, r.epoch, list(r.metrics)) for r in kept.records] == [
        ("epoch", "val", 3, 0, ["val/loss", "val/accuracy"]),
        ("epoch", "train", 3, 0, ["train/loss"]),
        ("epoch", "val", 6, 1, ["val/loss", "val/accuracy"]),
        ("epoch", "train", 6, 1, ["train/loss"]),
    ]


def test_the_records_of_a_trainer_are_the_metrics_that_it_measured():
    kept = Kept(Every(steps=2))
    trainer = Trainer(TinyTask(), progress=False, sinks=[kept], seed=0)
    run = trainer.fit(tiny_loader(4), tiny_loader(2, seed=1), epochs=1)
    steps, (val, train_record) = kept.records[:2], kept.records[2:]
    halves = sum(record.metrics["train/loss"] for record in steps) / 2
    assert {**val.metrics, **train_record.metrics} == pytest.approx(dict(run.metrics))
    assert halves == pytest.approx(run.metrics["train/loss"])


def test_an_evaluation_at_a_step_is_recorded_at_that_step():
    kept = Kept(Never())
    Trainer(TinyTask(), progress=False, sinks=[kept], sanity=0, evaluate=Every(steps=2)).fit(
        tiny_loader(5), tiny_loader(1), epochs=1
    )
    assert [(r.stage, r.step, r.batch, r.samples) for r in kept.records] == [
        ("val", 2, 2, 4),
        ("val", 4, 4, 8),
        ("train", 5, 5, 10),
    ]


def test_a_test_alone_is_recorded_and_a_prediction_is_not():
    kept = Kept()
    trainer = Trainer(TinyTask(), progress=False, sinks=[kept])
    trainer.predict(tiny_loader(1))
    trainer.test(tiny_loader(1))
    assert [(r.kind, r.stage, list(r.metrics)) for r in kept.records] == [
        ("epoch", "test", ["test/loss", "test/accuracy"])
    ]


def test_metrics_of_no_stage_are_in_the_epoch_record_as_means_since_the_last():
    kept = Kept(Never())
    train([kept], [1, 2], epochs=2, log=lambda run, x: run.log({"machine/load": x * (run.epoch + 1)}))
    assert [r.metrics for r in kept.records] == [{"machine/load": 1.5}, {"machine/load": 3.0}]


def test_handlers_of_metrics_hear_each_record_once_and_may_edit_it():
    heard = []

    @on(at.METRICS)
    def edit(run):
        heard.append((run.record.kind, run.record.step))
        run.record.metrics["train/perplexity"] = math.exp(run.record.metrics["train/loss"])
        run.record.metrics["train/copy"] = torch.tensor(run.record.metrics.pop("train/loss"))

    one, other = Kept(Every(steps=2)), Kept(Every(steps=2))
    train([one, other], [0, 0], callbacks=[edit])
    edited = {"train/perplexity": 1.0, "train/copy": 0.0}
    assert heard == [("step", 2), ("epoch", 2)]
    assert one.short == other.short == [("step", "train", 2, edited), ("epoch", "train", 2, edited)]
    assert {type(value) for record in one.records for value in record.metrics.values()} == {float}


def test_an_error_of_a_metrics_handler_is_not_swallowed():
    @on(at.METRICS)
    def fails(run):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train([Kept()], [1], callbacks=[fails])


def test_writers_of_metrics_come_before_the_record_wherever_they_are_attached():
    class Late(Callback):
        writes = frozenset({"metrics"})

        def on_step_end(self, run):
            run.log({"late": 1})

    kept = Kept()
    run = Run(callbacks=[Sinks([kept]), Late()])
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [1]):
                pass
    assert kept.records[0].metrics == {"train/late": 1}


def test_a_metric_that_cannot_be_read_is_left_out_and_told_once(caplog):
    class Broken:
        def compute(self):
            raise RuntimeError("no value")

    broken, kept = Broken(), Kept()
    train([kept], [1, 2], log=lambda run, x: run.log({"loss": torch.tensor(x), "bad": broken}))
    assert [r.metrics for r in kept.records] == [{"train/loss": 1}, {"train/loss": 2}, {"train/loss": 1.5}]
    assert [r.getMessage() for r in caplog.records] == [
        "The metric 'train/bad' cannot be read and is left out of the records: RuntimeError: no value"
    ]


def test_no_value_is_read_at_a_step_that_is_not_due():
    class Watching(Callback):
        """Lets values be read in the step that is due, and in no other."""

        def on_step_start(self, run):
            if run.step != 4:
                self.guard = no_sync()
                self.guard.__enter__()

        @on(at.STEP_END, order=10, reads={"metrics"})
        def leave(self, run):
            if run.step != 4:
                self.guard.__exit__(None, None, None)

    kept = Kept(Every(steps=5) | At(steps=5))
    even = Kept(Every(steps=5))
    task = TinyTask()
    callbacks = [Watching()]
    Trainer(task, progress=False, sinks=[kept, even], callbacks=callbacks).fit(tiny_loader(7), epochs=1)
    assert [r.step for r in kept.records] == [5, 7]


def test_all_metrics_of_all_sinks_are_read_in_one_wait(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append("tolist") or tolist(tensor))
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: reads.append("item"))
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: reads.append("float"))
    sinks = [Kept(Every(steps=2)), Kept(Every(steps=4)), Kept(At(steps=4))]
    names = ("loss", "a", "b")
    train(sinks, [1, 2, 3, 4], log=lambda run, x: run.log({n: torch.tensor(x) for n in names}, weight=torch.tensor(x)))
    assert reads == ["tolist"] * 2  # steps 2 and 4; the epoch's means are known by then


def test_a_step_that_is_not_due_costs_one_call():
    calls = []
    run = Run(callbacks=[Sinks([Kept(Every(steps=10)), Kept(Every(steps=15))])])
    (handler,) = run.plan[at.STEP_END]

    def count(frame, event, arg):
        if event == "call":
            calls.append(frame.f_code.co_name)

    run.step = 6
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        handler(run)
    finally:
        sys.setprofile(before)
    assert calls == ["step_end"]


def test_sinks_without_step_records_do_not_listen_to_steps():
    run = Run(callbacks=[Sinks([Kept(Every(epochs=1)), Kept(Never())])])
    assert not run.heard(at.STEP_END)


def test_an_event_outside_an_open_run_records_nothing():
    kept = Kept()
    run = Run(callbacks=[Sinks([kept])], metrics=Metrics())
    run.emit(at.STEP_END)
    assert kept.records == []


def test_on_several_ranks_rank_zero_alone_has_sinks():
    from loopline.testing import FakeComm

    bound = [Run(callbacks=[Sinks([Kept()])], comm=FakeComm(rank, 2)).plan.bindings for rank in (0, 1)]
    assert [bool(bindings) for bindings in bound] == [True, False]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (["log.jsonl"], TypeError, "JsonlSink"),
        ([Kept], TypeError, r"sinks\[0\] is <class"),
        (Kept(), TypeError, "give a list"),
        ([Kept(when=50)], TypeError, r"sinks\[0\].when is 50"),
        ([kept := Kept(), kept], ValueError, "given twice"),
    ],
)
def test_what_is_not_a_list_of_sinks_is_refused_at_once(given, error, words):
    with pytest.raises(error, match=words):
        Sinks(given)


@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity": 1.5}, {"deadline_s": -1}, {"deadline_s": math.nan}])
def test_impossible_limits_are_refused_at_once(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sinks([], **options)


def test_one_listener_serves_several_runs():
    kept = Kept(Every(steps=2))
    sinks = Sinks([kept])
    for _ in range(2):
        train(sinks, [1, 2], log=lambda run, x: run.metrics.update({"train/lr": 0.5}))
    assert [r.metrics for r in kept.records] == [{"train/lr": 0.5}] * 4


def test_state_of_means_can_be_copied_and_put_back():
    sinks = Sinks([Kept(Every(steps=2))])
    states = []

    @on(at.STEP_END, every=3)
    def take(run):
        states.append(copy.deepcopy(sinks.state_dict()))

    train(sinks, [1, 2, 3], callbacks=[take])
    other = Sinks([Kept(Every(steps=2))])
    other.load_state_dict(states[0])
    assert other.state_dict() == states[0]


def test_a_supervised_task_needs_nothing_more():
    model = torch.nn.Linear(4, 2)
    kept = Kept(Every(steps=2))
    task = SupervisedTask(
        model, loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    Trainer(task, progress=False, sinks=[kept]).fit(tiny_loader(2), epochs=1)
    assert [(r.kind, list(r.metrics)) for r in kept.records] == [("step", ["train/loss"]), ("epoch", ["train/loss"])]
