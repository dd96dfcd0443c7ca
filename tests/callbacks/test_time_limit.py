import pytest

from loopline import Run, Trainer, loop
from loopline.callbacks import TimeLimit
from loopline.core.progress import Progress
from loopline.testing import TinyTask, tiny_loader


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def stepping(limit, clock, *, seconds_per_batch, batches=10, begin=0):
    """An epoch of batches that each take so long."""
    run = Run(callbacks=[limit], progress=Progress(steps=begin, batches=begin, batches_in_epoch=begin))
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, list(range(batches))):
                clock.now += seconds_per_batch
    return run


def test_the_run_ends_after_the_step_in_which_the_time_is_used_up():
    clock = Clock()
    run = stepping(TimeLimit(seconds=5, clock=clock), clock, seconds_per_batch=2)
    assert (run.progress.steps, run.status, run.reason) == (3, "stopped", "the time limit of 5 seconds is used up")


@pytest.mark.parametrize(
    ("limit", "steps", "said"),
    [
        ({"seconds": 90}, 2, "the time limit of 90 seconds is used up"),
        ({"minutes": 1.5}, 2, "the time limit of 1.5 minutes is used up"),
        ({"hours": 0.1}, 6, "the time limit of 0.1 hours is used up"),
        ({"minutes": 1}, 1, "the time limit of 1 minute is used up"),
    ],
)
def test_time_is_given_in_seconds_minutes_or_hours(limit, steps, said):
    clock = Clock()
    run = stepping(TimeLimit(**limit, clock=clock), clock, seconds_per_batch=60)
    assert (run.progress.steps, run.reason) == (steps, said)


def test_a_run_that_is_done_in_time_is_left_alone():
    clock = Clock()
    limit = TimeLimit(seconds=21, clock=clock)
    run = stepping(limit, clock, seconds_per_batch=2)
    assert (run.status, run.reason, limit.used) == ("completed", None, 20.0)


def test_the_clock_stands_still_between_runs():
    clock = Clock()
    limit = TimeLimit(seconds=100, clock=clock)
    stepping(limit, clock, seconds_per_batch=2)
    clock.now += 5000
    assert limit.used == 20.0


def test_time_used_before_a_resume_counts():
    clock = Clock()
    first = TimeLimit(seconds=10, clock=clock)
    stepping(first, clock, seconds_per_batch=2, batches=3)
    clock.now = 5.0  # a new machine, whose clock began anew
    second = TimeLimit(seconds=10, clock=clock)
    second.load_state_dict(first.state_dict())
    run = stepping(second, clock, seconds_per_batch=2, begin=3)
    assert (run.progress.steps, run.reason, second.used) == (5, "the time limit of 10 seconds is used up", 10.0)


def test_a_state_that_is_loaded_while_the_clock_runs_counts_from_there():
    clock = Clock()
    limit = TimeLimit(seconds=10, clock=clock)
    run = Run(callbacks=[limit])
    with loop.fit(run):
        clock.now += 3
        limit.load_state_dict({"used": 4.0})
        clock.now += 1
        used = limit.used
    assert used == 5.0


def test_a_second_run_from_scratch_has_the_whole_time():
    clock = Clock()
    limit = TimeLimit(seconds=25, clock=clock)
    stepping(limit, clock, seconds_per_batch=2)
    assert stepping(limit, clock, seconds_per_batch=2).status == "completed"


def test_time_spent_in_an_evaluation_counts():
    clock = Clock()
    run = Run(callbacks=[TimeLimit(seconds=5, clock=clock)])
    asked_after = []
    with loop.fit(run):
        for _ in loop.epochs(run, 3):
            for i in loop.evaluate(run, [0, 1, 2, 3]):
                asked_after += [] if run.requests.stop is None else [i]
                clock.now += 3
    assert (run.progress.epochs, asked_after) == (1, [2, 3])


def test_an_evaluation_outside_a_fit_is_not_limited():
    limit = TimeLimit(seconds=5, clock=Clock())
    limit.load_state_dict({"used": 6.0})
    trainer = Trainer(TinyTask(), callbacks=[limit], progress=False)
    trainer.validate(tiny_loader())
    assert trainer.run.requests.stop is None


def test_by_default_the_clock_is_one_that_nobody_can_set(monkeypatch):
    monkeypatch.setattr("time.time", lambda: pytest.fail("the wall clock was asked"))
    run = Run(callbacks=[TimeLimit(hours=1000)])
    with loop.fit(run):
        for _ in loop.epochs(run, 2):
            pass
    assert run.status == "completed"


@pytest.mark.parametrize("given", [{}, {"seconds": 1, "hours": 1}, {"minutes": 0}, {"seconds": -1}, {"hours": "2"}])
def test_anything_but_one_positive_amount_is_refused(given):
    with pytest.raises(ValueError, match="TimeLimit"):
        TimeLimit(**given)
