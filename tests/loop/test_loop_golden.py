"""What a whole fit sends, line by line; each golden file was read against the order that the events promise."""

from __future__ import annotations

import contextlib

import pytest

from loopline import Binding, Progress, Run, StopRun, Trainer, at
from loopline.testing import Recorder, TinyTask, tiny_loader


class Act:
    """Does something at the n-th time of an event."""

    def __init__(self, event, n, act):
        self.event, self.n, self.act = event, n, act
        self.times = 0

    def bindings(self, run):
        yield Binding(self.event, self.count, owner=self)

    def count(self, run):
        self.times += 1
        if self.times == self.n:
            self.act(run)


def raising(error):
    def act(run):
        raise error

    return act


def fit(*callbacks, batches=3, validation=None, resume=None, epochs=2, steps=None, **trainer):
    recorder = Recorder()
    trainer = Trainer(TinyTask(), callbacks=[recorder, *callbacks], progress=False, **trainer)
    held_out = None if validation is None else tiny_loader(validation, seed=1)
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        trainer.fit(tiny_loader(batches), held_out, epochs=epochs, steps=steps, resume=resume)
    return recorder


def test_a_fit_with_validation(golden):
    golden(fit(batches=2, validation=2, sanity=1), "fit_validation")


def test_a_fit_with_windows_of_two_over_five_batches(golden):
    golden(fit(batches=5, epochs=1, accumulate=2), "fit_accumulate")


def test_a_fit_stopped_in_an_epoch(golden):
    stop = Act(at.BATCH_START, 2, lambda run: run.stop("enough"))
    golden(fit(stop, validation=1, sanity=0), "fit_stop_asked")


def test_a_fit_left_at_once(golden):
    golden(fit(Act(at.AFTER_BACKWARD, 2, raising(StopRun("at once"))), validation=1, sanity=0), "fit_stop_run")


def test_a_fit_with_an_error_in_the_third_batch(golden):
    golden(fit(Act(at.BATCH_END, 3, raising(ValueError("broken")))), "fit_error")


def test_a_fit_interrupted_in_the_third_batch(golden):
    golden(fit(Act(at.AFTER_OPTIMIZER_STEP, 3, raising(KeyboardInterrupt()))), "fit_interrupt")


def test_a_fit_whose_last_step_is_inside_an_epoch(golden):
    golden(fit(validation=1, sanity=0, epochs=None, steps=4), "fit_steps")


def test_a_fit_that_goes_on_inside_an_epoch(golden):
    earlier = Run(progress=Progress(epochs=1, steps=4, batches=4, samples=8, batches_in_epoch=1))
    golden(fit(validation=1, resume=earlier), "fit_resume")


def test_an_error_in_the_third_batch_comes_out_as_it_is():
    with pytest.raises(ValueError, match="broken"):
        Trainer(TinyTask(), callbacks=[Act(at.BATCH_END, 3, raising(ValueError("broken")))], progress=False).fit(
            tiny_loader(), epochs=1
        )
