"""Whoever saw SETUP sees TEARDOWN, once, whatever happened where."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from loopline import Binding, Callback, Event, Every, Progress, Run, StopRun, Trainer, at, loop
from loopline.core.event import SEAMS
from loopline.testing import FakeComm, Recorder, TinyTask, tiny_loader


class Log(Callback):
    """Writes down its own setup and teardown."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def on_setup(self, run):
        self.log.append(("setup", self.name))

    def on_teardown(self, run):
        self.log.append(("teardown", self.name))


class Acting(Log):
    """Between two others; does something the first time that an event comes."""

    def __init__(self, event, act, log):
        super().__init__("acting", log)
        self.event, self.act, self.done = event, act, False

    def bindings(self, run):
        yield from super().bindings(run)
        yield Binding(self.event, self.once, owner=self)

    def once(self, run):
        if not self.done:
            self.done = True
            self.act(run)


class Sender(Callback):
    """Sends what a plain fit does not: a save, a load, a record for the sinks."""

    def on_setup(self, run):
        run.saver = lambda run, reason: run.emit(at.SAVING)

    def on_train_start(self, run):
        run.emit(at.LOADED)

    def on_step_end(self, run):
        run.save()
        run.emit(at.METRICS)


class Broken(Callback):
    def __init__(self, error, log):
        self.error, self.log = error, log

    def on_teardown(self, run):
        self.log.append(("teardown", str(self.error)))
        raise self.error


class BrokenTwice(Broken):
    def on_exception(self, run):
        raise self.error


class Fail(Callback):
    def on_epoch_end(self, run):
        raise ZeroDivisionError("first")


class Stop(Callback):
    def on_step_end(self, run):
        run.stop("to see stopped")


def raising(error, run):
    raise error


WAYS = {
    "RuntimeError": lambda: partial(raising, RuntimeError("on purpose")),
    "StopRun": lambda: partial(raising, StopRun("on purpose")),
    "KeyboardInterrupt": lambda: partial(raising, KeyboardInterrupt()),
    "SystemExit": lambda: partial(raising, SystemExit(3)),
    "run.stop": lambda: lambda run: run.stop("on purpose"),
}


def fitted(event, act, log):
    """A fit that passes `event`, with a callback that acts there between two that do not."""
    first, acting, last = Log("first", log), Acting(event, act, log), Log("last", log)
    extra = {at.EXCEPTION: [Fail()], at.STOPPED: [Stop()]}.get(event, [])
    recorder = Recorder()
    trainer = Trainer(TinyTask(), callbacks=[recorder, Sender(), first, acting, last, *extra], progress=False, sanity=1)
    resume = Run(progress=Progress(steps=1, batches=1, samples=2, batches_in_epoch=1)) if event is at.RESUMED else None
    error = None
    try:
        trainer.fit(tiny_loader(2), tiny_loader(1), epochs=1, resume=resume)
    except BaseException as raised:  # noqa: BLE001 - what came out is what is looked at
        error = raised
    assert acting.done, f"the fit did not pass {event.name}"
    return trainer.run, error, recorder


def torn_down(log):
    return [name for what, name in log if what == "teardown"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("event", SEAMS.values(), ids=SEAMS)
def test_teardown_comes_once_to_each_in_reverse(event: Event, way, caplog):
    log: list[tuple[str, str]] = []
    caplog.set_level(logging.CRITICAL, "loopline")
    fitted(event, WAYS[way](), log)
    reached = ["first", "acting"] if event is at.SETUP and way != "run.stop" else ["first", "acting", "last"]
    assert torn_down(log) == reached[::-1]


INSIDE = [seam for seam in SEAMS.values() if seam not in (at.EXCEPTION, at.TEARDOWN)]


@pytest.mark.parametrize("event", INSIDE, ids=lambda event: event.name)
def test_an_error_keeps_its_type_and_says_whose_it_is(event):
    run, error, recorder = fitted(event, WAYS["RuntimeError"](), [])
    assert (type(error), error.args, error.__notes__[0], run.status, recorder.names[-2:]) == (
        RuntimeError,
        ("on purpose",),
        f"raised by Acting at {event.name}, epoch {run.epoch}, step {run.step}",
        "failed",
        ["exception", "teardown"],
    )


@pytest.mark.parametrize("way", ["KeyboardInterrupt", "SystemExit"])
@pytest.mark.parametrize("event", INSIDE, ids=lambda event: event.name)
def test_what_is_no_error_goes_through_and_the_run_is_interrupted(event, way):
    run, error, recorder = fitted(event, WAYS[way](), [])
    assert (type(error).__name__, run.status, run.error is error, recorder.names[-2:]) == (
        way,
        "interrupted",
        True,
        ["exception", "teardown"],
    )


@pytest.mark.parametrize("event", INSIDE, ids=lambda event: event.name)
def test_stop_run_ends_a_run_in_good_order_from_everywhere(event):
    run, error, recorder = fitted(event, WAYS["StopRun"](), [])
    assert (error, run.status, run.reason, recorder.names[-1]) == (None, "stopped", "on purpose", "teardown")


@pytest.mark.parametrize("event", INSIDE, ids=lambda event: event.name)
def test_stop_run_tells_of_the_stop_and_of_the_end_of_training_once(event):
    _, _, recorder = fitted(event, WAYS["StopRun"](), [])
    names = recorder.names
    started = "train_start" in names
    assert (names.count("stopped"), names.count("train_end")) == (
        1 if event not in (at.SETUP, at.FIT_END) else names.count("stopped"),
        int(started),
    )


ANSWERED = [seam for seam in INSIDE if seam not in (at.STOPPED, at.TRAIN_END, at.FIT_END)]


@pytest.mark.parametrize("event", ANSWERED, ids=lambda event: event.name)
def test_a_stop_asked_for_anywhere_is_answered_at_the_next_safe_point(event):
    run, error, recorder = fitted(event, WAYS["run.stop"](), [])
    stopped_at = recorder.names.index("stopped") if "stopped" in recorder.names else None
    safe = {"step_end", "epoch_end", "metrics", "saving"}  # the last two are what Sender sends at a safe point
    assert (error, run.status, run.reason, stopped_at and recorder.names[stopped_at - 1] in safe) == (
        None,
        "stopped",
        "on purpose",
        True,
    )


class AtEvalEnd(Callback):
    def __init__(self, act):
        self.act = act

    def on_eval_end(self, run):
        if run.stage == "val":
            self.act(run)


def test_a_stop_asked_for_in_an_evaluation_at_a_safe_point_is_not_lost():
    callbacks = [AtEvalEnd(lambda run: run.stop("good enough"))]
    trainer = Trainer(TinyTask(), callbacks=callbacks, evaluate=Every(steps=2), progress=False)
    run = trainer.fit(tiny_loader(8), tiny_loader(1), epochs=1)
    assert (run.status, run.reason, run.progress.steps) == ("stopped", "good enough", 2)


def test_a_save_asked_for_in_an_evaluation_at_a_safe_point_is_not_lost():
    class Saver(Callback):
        def on_setup(self, run):
            run.saver = lambda run, reason: saved.append((reason, run.progress.steps))

    saved: list[tuple[str, int]] = []
    callbacks = [Saver(), AtEvalEnd(lambda run: run.save("best"))]
    trainer = Trainer(TinyTask(), callbacks=callbacks, evaluate=Every(steps=2), progress=False)
    trainer.fit(tiny_loader(4), tiny_loader(1), epochs=1)
    assert saved == [("best", 2), ("best", 4)]


def test_errors_at_teardown_come_together_after_a_good_run():
    log: list[tuple[str, str]] = []
    run = Run(callbacks=[Log("first", log), Broken(ValueError("a"), log), Broken(KeyError("b"), log), Log("last", log)])
    with pytest.raises(ExceptionGroup) as caught, loop.fit(run):
        pass
    group = [(type(error), error.args, error.__notes__) for error in caught.value.exceptions]
    assert (torn_down(log), group, run.status) == (
        ["last", "'b'", "a", "first"],
        [(KeyError, ("b",), ["Broken failed at teardown"]), (ValueError, ("a",), ["Broken failed at teardown"])],
        "completed",
    )


def test_errors_at_teardown_are_notes_on_the_error_that_came_first(caplog):
    caplog.set_level(logging.CRITICAL, "loopline")
    run = Run(callbacks=[BrokenTwice(ValueError("second"), [])])
    with pytest.raises(ZeroDivisionError) as caught, loop.fit(run):
        raise ZeroDivisionError("first")
    assert caught.value.__notes__ == [
        "then BrokenTwice failed at exception: ValueError: second",
        "then BrokenTwice failed at teardown: ValueError: second",
    ]


def test_an_error_in_the_body_gets_no_name_of_a_callback():
    run = Run(callbacks=[Recorder()])
    with pytest.raises(ValueError, match="mine") as caught, loop.fit(run):
        raise ValueError("mine")
    assert not hasattr(caught.value, "__notes__")


def test_a_listener_attached_while_the_run_is_open_is_torn_down_with_the_others():
    log: list[tuple[str, str]] = []
    run = Run(callbacks=[Log("first", log)])
    with loop.fit(run):
        run.listen(Log("late", log))
    assert log == [("setup", "first"), ("setup", "late"), ("teardown", "late"), ("teardown", "first")]


def test_whoever_is_not_of_this_rank_sees_neither_setup_nor_teardown():
    log: list[tuple[str, str]] = []
    only_zero = Log("zero", log)
    only_zero.ranks = "zero"
    run = Run(callbacks=[Log("all", log), only_zero], comm=FakeComm(rank=1, world_size=2))
    with loop.fit(run):
        pass
    assert log == [("setup", "all"), ("teardown", "all")]


class Hears(Callback):
    """Writes down every event that it hears."""

    def __init__(self):
        self.heard = []

    def bindings(self, run):
        for seam in SEAMS.values():
            yield Binding(seam, lambda run, name=seam.name: self.heard.append(name), owner=self)


def test_whom_setup_did_not_reach_hears_nothing_of_a_run_that_was_stopped_there():
    class Stop(Callback):
        def on_setup(self, run):
            raise StopRun("not today")

    first, last = Hears(), Hears()
    Trainer(TinyTask(), callbacks=[first, Stop(), last], progress=False).fit(tiny_loader(1), epochs=1)
    assert (first.heard[0], first.heard[-1], last.heard) == ("setup", "teardown", [])


def test_a_listener_attached_at_one_event_hears_the_next():
    heard = []

    class Late(Callback):
        def on_batch_start(self, run):
            heard.append(("batch_start", run.batch.index))

        def on_step_end(self, run):
            heard.append(("step_end", run.step))

    class Attach(Callback):
        def on_step_start(self, run):
            if run.step == 0:
                run.listen(Late())

    Trainer(TinyTask(), callbacks=[Attach()], progress=False).fit(tiny_loader(1), epochs=1)
    assert heard == [("batch_start", 0), ("step_end", 0)]


def test_a_stop_without_words_is_a_stop():
    class Stop(Callback):
        def on_batch_end(self, run):
            run.stop("")

    run = Trainer(TinyTask(), callbacks=[Stop()], progress=False).fit(tiny_loader(3), epochs=1)
    assert (run.status, run.progress.steps) == ("stopped", 1)
