from __future__ import annotations

import pytest
import torch

from loopline import Callback, Progress, at
from loopline.core.event import SEAMS
from loopline.testing import FakeComm, Recorder, TinyTask, drive, run_ranks, tiny_loader, tiny_stream


class Sees(Callback):
    """Notes a metric at the end of each epoch."""

    def __init__(self, name):
        self.name, self.values = name, []

    def on_epoch_end(self, run):
        self.values.append(run.metrics.get(self.name))


def test_metrics_are_those_of_the_script_epoch_by_epoch():
    val, train = Sees("val/loss"), Sees("train/loss")
    drive([val, train], metrics={"val/loss": [3, 2, 1], "train/loss": [0.3, 0.2, 0.1]})
    assert (val.values, train.values) == ([3, 2, 1], pytest.approx([0.3, 0.2, 0.1]))


def test_a_metric_that_is_none_is_not_logged_in_that_epoch():
    class Fresh(Callback):
        seen = ()

        def on_epoch_end(self, run):
            self.seen = (*self.seen, "val/f1" in run.metrics.fresh("val"))

    fresh = Fresh()
    drive(fresh, metrics={"val/f1": [None, 0.5, None]})
    assert fresh.seen == (False, True, False)


def test_the_run_is_a_real_one():
    driven = drive(epochs=2, batches=5, accumulate=2)
    run = driven.run
    trained = [p.tolist() for p in driven.task.model.parameters()] != [
        p.tolist() for p in TinyTask().model.parameters()
    ]
    assert (run.status, run.progress, trained) == (
        "completed",
        Progress(epochs=2, steps=6, batches=10, samples=20, batches_in_epoch=0),
        True,
    )


def test_an_unsized_loader_gives_the_same_weights():
    sized, unsized = drive(batches=5, accumulate=2), drive(batches=5, accumulate=2, sized=False)
    assert [p.tolist() for p in sized.task.model.parameters()] == [p.tolist() for p in unsized.task.model.parameters()]
    assert unsized.run.lengths["train"] is None


NOT_SENT = {"resumed", "sanity_start", "sanity_end", "saving", "loaded", "metrics", "stopped", "exception"}


@pytest.mark.parametrize("event", [s for s in SEAMS.values() if s.name not in NOT_SENT], ids=lambda event: event.name)
def test_a_failure_comes_where_it_is_wanted_and_goes_no_further(event):
    error = ValueError("on purpose")
    driven = drive(Recorder(), fail_at=event, error=error)
    last = [name for name in driven.trace.names if name not in ("exception", "teardown")][-1]
    if event is at.TEARDOWN:  # the run itself ended well
        assert (driven.run.status, driven.trace.names[-1]) == ("completed", "teardown")
    else:
        assert (driven.run.status, driven.run.error is error, last) == ("failed", True, event.name)


def test_a_failure_comes_at_the_n_th_time():
    driven = drive(fail_at=at.BATCH_END, fail_on=3)
    assert (driven.trace.names.count("batch_end"), driven.run.progress.batches) == (3, 2)


def test_an_interrupt_may_be_the_failure():
    driven = drive(fail_at=at.STEP_END, error=KeyboardInterrupt())
    assert driven.run.status == "interrupted"


def test_another_error_than_the_wanted_one_goes_through():
    class Broken(Callback):
        def on_step_end(self, run):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        drive(Broken(), fail_at=at.EPOCH_END)


def test_a_failure_that_never_comes_is_an_error():
    with pytest.raises(ValueError, match=r"fail_at=epoch_end, fail_on=9\): the run passed that event only 3 times"):
        drive(fail_at=at.EPOCH_END, fail_on=9)


def test_saves_are_answered_and_noted():
    class Saves(Callback):
        def on_epoch_end(self, run):
            run.save(f"epoch {run.epoch}")

    driven = drive(Saves(), epochs=2)
    assert (driven.saves, driven.trace.names.count("saving")) == (["epoch 0", "epoch 1"], 2)


def test_evaluations_that_are_asked_for_are_done():
    class Asks(Callback):
        def on_step_end(self, run):
            run.evaluate()

    assert drive(Asks(), epochs=1, batches=3).trace.names.count("eval_end") == 4


def test_a_run_goes_on_from_its_progress():
    driven = drive(epochs=2, batches=3, progress=Progress(epochs=1, steps=4, batches=4, samples=8, batches_in_epoch=1))
    assert ("resumed" in driven.trace.names, driven.trace.names.count("step_end")) == (True, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": {"val/loss": [1.0]}, "epochs": 2}, "1 values for 2 epochs. Give one for each epoch"),
        ({"metrics": {"loss": [1.0]}}, "names have a stage, such as 'val/loss'"),
        ({"fail_at": at.STEP_END, "fail_on": 0}, r"fail_on=0\): the first time is 1"),
    ],
)
def test_a_script_that_cannot_be_followed_is_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        drive(**given)


def test_a_comm_is_passed_to_the_run():
    statuses = run_ranks(lambda comm: drive(comm=comm, epochs=1, batches=2).run.comm.rank, 2)
    assert (statuses, drive(comm=FakeComm(1, 2), epochs=1).run.comm.rank) == ([0, 1], 1)


def test_a_stop_on_one_rank_stops_all_at_the_same_step():
    class Stop(Callback):
        def on_step_end(self, run):
            if run.comm.rank == 1 and run.step == 2:
                run.stop("rank 1 has had enough")

    def play(comm):
        run = drive(Stop(), comm=comm, epochs=2, batches=5).run
        return run.status, run.reason, run.progress.steps

    assert run_ranks(play, 3) == [("stopped", "rank 1 has had enough", 3)] * 3


def test_making_a_task_and_loaders_draws_nothing_from_the_global_random_stream():
    before = torch.get_rng_state()
    TinyTask(), tiny_loader(), tiny_stream()
    assert torch.equal(before, torch.get_rng_state())


def test_the_same_seed_gives_the_same_task_and_batches_and_another_seed_others():
    def weights(seed):
        return [p.tolist() for p in TinyTask(seed).model.parameters()]

    def batches(seed):
        return [(x.tolist(), y.tolist()) for x, y in tiny_loader(seed=seed)]

    assert (weights(0) == weights(0), weights(0) == weights(1), batches(0) == batches(0), batches(0) == batches(1)) == (
        True,
        False,
        True,
        False,
    )


def test_a_stream_has_no_length_and_can_be_read_twice():
    stream = tiny_stream(3)
    read = [[x.tolist() for x, _ in stream] for _ in range(2)]
    assert (hasattr(stream, "__len__"), read[0], len(read[0])) == (False, read[1], 3)


def test_a_tiny_task_learns():
    driven = drive(epochs=30, task=TinyTask(lr=0.5))
    assert driven.run.metrics["train/loss"] < 0.35
