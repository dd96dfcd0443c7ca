"""What a failing handler does to the run, under each policy."""

import logging
from contextlib import contextmanager

import pytest

from loopline import Callback, Event, Run, StopRun, at, loop, on
from loopline.core.errors import BadHandler, Meddling


class Fails(Callback):
    """Fails in the given epochs, at the end of each of two steps."""

    on_error = "disable"

    def __init__(self, *epochs, error=ValueError):
        self.epochs, self.error, self.calls = epochs, error, []

    def on_step_end(self, run):
        self.calls.append(run.epoch)
        if run.epoch in self.epochs:
            raise self.error("no")


class Warns(Fails):
    on_error = "warn"


class Raises(Fails):
    on_error = "raise"


def through(run, epochs):
    """Two steps in every epoch."""
    for epoch in range(epochs):
        for step in (2 * epoch, 2 * epoch + 1):
            run.epoch, run.step = epoch, step
            run.emit(at.STEP_END)


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_disable_keeps_the_listener_off_until_the_next_epoch_and_tries_it_again(caplog):
    fails = Fails(0)
    through(Run(callbacks=[fails]), 3)
    assert fails.calls == [0, 1, 1, 2, 2]


def test_a_listener_that_fails_in_three_epochs_in_a_row_is_off_for_good(caplog):
    fails = Fails(0, 1, 2)
    through(Run(callbacks=[fails]), 6)
    assert fails.calls == [0, 1, 2]


def test_a_good_epoch_in_between_forgives_the_failures_before(caplog):
    fails = Fails(0, 1, 3, 4)
    through(Run(callbacks=[fails]), 6)
    assert fails.calls == [0, 1, 2, 2, 3, 4, 5, 5]


def test_what_goes_well_at_another_event_does_not_forgive_a_handler_that_never_does(caplog):
    class HalfGood(Callback):
        on_error = "disable"
        calls = 0

        def on_epoch_start(self, run): ...

        def on_epoch_end(self, run):
            self.calls += 1
            raise ValueError("no")

    half = HalfGood()
    run = Run(callbacks=[half])
    for run.epoch in range(6):
        run.emit(at.EPOCH_START)
        run.emit(at.EPOCH_END)
    assert half.calls == 3


def test_a_listener_is_off_as_a_whole(caplog):
    class Two(Callback):
        on_error = "disable"
        ends = 0

        def on_step_end(self, run):
            raise ValueError("no")

        def on_epoch_end(self, run):
            self.ends += 1

    two = Two()
    run = Run(callbacks=[two])
    run.emit(at.STEP_END)
    run.emit(at.EPOCH_END)
    assert two.ends == 0


def test_one_listener_being_off_leaves_another_of_its_class_alone(caplog):
    bad, good = Fails(0), Fails()
    through(Run(callbacks=[bad, good]), 1)
    assert (bad.calls, good.calls) == ([0], [0, 0])


def test_every_failure_is_said_once_with_what_follows(caplog):
    through(Run(callbacks=[Fails(0, 1, 2)]), 6)
    assert messages(caplog) == [
        "Fails failed at step_end, epoch 0, step 0: ValueError: no. "
        "It is switched off until the next epoch; training goes on.",
        "Fails failed at step_end, epoch 1, step 2: ValueError: no. "
        "It is switched off until the next epoch; training goes on.",
        "Fails failed at step_end, epoch 2, step 4: ValueError: no. "
        "It failed 3 times in a row and is switched off for the rest of this run.",
    ]


def test_only_the_first_failure_is_said_with_its_traceback(caplog):
    through(Run(callbacks=[Fails(0, 1)]), 3)
    assert [record.exc_info is not None and record.exc_info[0] for record in caplog.records] == [ValueError, False]


def test_a_failure_is_a_warning_of_loopline(caplog):
    through(Run(callbacks=[Fails(0)]), 1)
    assert [(record.name, record.levelno) for record in caplog.records] == [("loopline", logging.WARNING)]


def test_warn_goes_on_calling(caplog):
    warns = Warns(0, 1, 2, 3, 4)
    through(Run(callbacks=[warns]), 5)
    assert warns.calls == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_warn_warns_once_an_epoch(caplog):
    through(Run(callbacks=[Warns(0, 1, 2)]), 3)
    assert messages(caplog) == [
        f"Warns failed at step_end, epoch {epoch}, step {2 * epoch}: ValueError: no. Training goes on."
        for epoch in range(3)
    ]


def test_raise_takes_the_run_along_and_keeps_the_error_as_it_was():
    with pytest.raises(ValueError, match="no") as caught:
        through(Run(callbacks=[Raises(1)]), 3)
    assert (caught.value.args, caught.value.__notes__) == (("no",), ["raised by Raises at step_end, epoch 1, step 2"])


@pytest.mark.parametrize("policy", [Fails, Warns, Raises])
@pytest.mark.parametrize("error", [StopRun, KeyboardInterrupt, SystemExit, Meddling])
def test_a_stop_an_interrupt_and_meddling_pass_through(policy, error):
    with pytest.raises(error):
        through(Run(callbacks=[policy(0, error=error)]), 1)


def test_a_payload_reaches_a_guarded_handler():
    heard = []
    own = Event("own")

    @on(own, on_error="disable")
    def note(run, loss=None):
        heard.append(loss)

    Run(callbacks=[note]).emit(own, loss=3)
    assert heard == [3]


def test_a_failure_stays_known_when_more_listeners_come(caplog):
    fails = Fails(0)
    run = Run(callbacks=[fails])
    run.emit(at.STEP_END)
    run.listen(Callback())
    run.emit(at.STEP_END)
    assert fails.calls == [0]


def test_teardown_reaches_a_listener_that_is_off(caplog):
    class Off(Fails):
        torn_down = False

        def on_teardown(self, run):
            self.torn_down = True

    off = Off(0)
    with loop.opened(Run(callbacks=[off])) as run:
        run.emit(at.STEP_END)
    assert off.torn_down


def test_a_failing_teardown_of_a_listener_that_may_fail_is_a_warning(caplog):
    class Off(Callback):
        on_error = "disable"

        def on_teardown(self, run):
            raise ValueError("no")

    with loop.opened(Run(callbacks=[Off()])) as run:
        pass
    assert (run.status, [m.split(".<locals>.")[-1] for m in messages(caplog)]) == (
        "completed",
        ["Off failed at teardown: ValueError: no"],
    )


def test_an_own_event_named_teardown_is_guarded_like_any_other(caplog):
    own = Event("teardown")

    @on(own, on_error="disable")
    def fails(run):
        raise ValueError("no")

    assert Run(callbacks=[fails]).emit(own) is None


def summary(caplog):
    return [message for message in messages(caplog) if " in this run, " in message]


def test_at_the_end_each_listener_that_failed_is_named_once(caplog):
    with loop.opened(Run(callbacks=[Fails(0), Fails(), Warns(0, 1), Fails(0, 1, 2)])) as run:
        through(run, 4)
    run.close()
    assert summary(caplog) == [
        "Fails failed once in this run, first at step_end, epoch 0, step 0; it was on at the end.",
        "Warns failed 4 times in this run, first at step_end, epoch 0, step 0; it was on at the end.",
        "Fails failed 3 times in this run, first at step_end, epoch 0, step 0; it was off at the end.",
    ]


def test_who_failed_in_the_last_epoch_was_off_at_the_end(caplog):
    with loop.opened(Run(callbacks=[Fails(1), Warns(1)])) as run:
        through(run, 2)
    assert [message.rsplit("; ")[1] for message in summary(caplog)] == [
        "it was off at the end.",
        "it was on at the end.",
    ]


def test_of_a_run_without_failures_nothing_is_said(caplog):
    with loop.opened(Run(callbacks=[Fails(), Warns()])) as run:
        through(run, 2)
    assert messages(caplog) == []


class Notes(Callback):
    """Writes down who is called, and that it is kept apart."""

    def __init__(self, on_error="disable", careful=False):
        self.on_error, self.careful, self.log = on_error, careful, []

    def on_step_end(self, run):
        self.log.append("called")

    def attached(self, *others):
        run = Run(callbacks=[self, *others])
        run._apart = self.apart
        return run

    @contextmanager
    def apart(self, run):
        self.log.append("begin")
        yield
        self.log.append("end")


def test_an_observer_is_kept_apart():
    notes = Notes()
    notes.attached().emit(at.STEP_END)
    assert notes.log == ["begin", "called", "end"]


@pytest.mark.parametrize(("policy", "careful"), [("disable", True), ("warn", False), ("raise", False)])
def test_one_that_is_careful_or_may_steer_is_called_as_it_is(policy, careful):
    notes = Notes(policy, careful)
    notes.attached().emit(at.STEP_END)
    assert notes.log == ["called"]


def test_what_is_put_around_an_observer_is_around_what_keeps_it_apart():
    """So that what a wrapper sees is what the run sees, and what it measures holds the price of being kept apart."""

    class Wraps(Callback):
        def wrap_handler(self, run, binding, handler):
            def wrapped(run):
                notes.log.append("wrapper begins")
                handler(run)
                notes.log.append("wrapper ends")

            return wrapped

    notes = Notes()
    notes.attached(Wraps()).emit(at.STEP_END)
    assert notes.log == ["wrapper begins", "begin", "called", "end", "wrapper ends"]


def test_a_function_may_say_that_it_is_careful():
    @on(at.STEP_END, on_error="disable", careful=True)
    def careful(run): ...

    @on(at.STEP_END, on_error="disable")
    def careless(run): ...

    bindings = Run(callbacks=[careful, careless]).plan.bindings[at.STEP_END]
    assert [binding.careful for binding in bindings] == [True, False]


def test_careful_is_a_claim_and_no_method():
    class Wrong(Callback):
        def careful(self, run): ...

        def on_step_end(self, run): ...

    with pytest.raises(BadHandler, match=r"Wrong\.careful is <bound method .*>; it can be True or False\.$"):
        Run(callbacks=[Wrong()])
