"""Sinks that are slow, stuck or broken, and what a run owes to the others."""

import threading

import pytest

from loopline import Every, Run, at, loop, on
from loopline.sinks import Record, Sink, Sinks


class Kept(Sink):
    when = Every(steps=1)

    def __init__(self):
        self.seen = []

    def write(self, record):
        self.seen.append((record.kind, record.step))

    def flush(self):
        self.seen.append("flush")

    def close(self):
        self.seen.append("close")


class Stuck(Kept):
    """Holds its first record until it is let go."""

    def __init__(self):
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def write(self, record):
        self.entered.set()
        assert self.go.wait(60)
        super().write(record)


class Broken(Kept):
    """Raises at the calls with these numbers, counted from 1."""

    def __init__(self, *fails, method="write"):
        super().__init__()
        self.fails, self.calls, self.method = fails, 0, method

    def open(self, run):
        self.call("open")

    def write(self, record):
        self.call("write")
        super().write(record)

    def flush(self):
        self.call("flush")

    def close(self):
        self.call("close")

    def call(self, method):
        if method == self.method:
            self.calls += 1
            if self.calls in self.fails:
                raise OSError(f"{method} {self.calls}")


def train(sinks, *, batches=4, epochs=1, callbacks=(), body=None, saver=None):
    run = Run(callbacks=[*callbacks, sinks if isinstance(sinks, Sinks) else Sinks(sinks)], saver=saver)
    with loop.fit(run):
        for _ in loop.epochs(run, epochs):
            for x in loop.batches(run, list(range(batches))):
                if body:
                    body(run, x)
    return run


def steps(*numbers):
    return [("step", n) for n in numbers]


def told(caplog):
    return [record.getMessage() for record in caplog.records]


def sink_threads():
    return [thread for thread in threading.enumerate() if thread.name == "loopline-sinks"]


def test_all_sinks_of_a_run_share_one_thread_that_ends_with_it():
    alive = []
    train([Kept(), Kept()], body=lambda run, x: alive.append(len(sink_threads())))
    assert (alive, sink_threads()) == ([1, 1, 1, 1], [])


def test_at_the_end_everything_is_written_flushed_and_closed():
    kept = Kept()
    train([kept])
    assert kept.seen == [*steps(1, 2, 3, 4), ("epoch", 4), "flush", "close"]


def test_what_came_before_a_failure_of_the_run_is_written():
    kept = Kept()

    def body(run, x):
        if x == 3:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train([kept], body=body)
    assert kept.seen == [*steps(1, 2, 3), "flush", "close"]


def test_a_run_that_fails_before_it_fits_opens_no_sink():
    opened = Broken(method="open")

    @on(at.FIT_START, order=-1)
    def fails(run):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train([opened], callbacks=[fails])
    assert (opened.calls, opened.seen, sink_threads()) == (0, [], [])


def test_a_stuck_sink_does_not_hold_the_run_up_and_loses_its_oldest_step_records(caplog):
    stuck = Stuck()

    def body(run, x):
        if x == 1 and run.epoch == 0:
            assert stuck.entered.wait(60)  # step 1 is in the sink's hand, and all others wait

    @on(at.TRAIN_END)
    def let_go(run):
        stuck.go.set()

    train(Sinks([stuck], capacity=2), epochs=2, body=body, callbacks=[let_go])
    assert stuck.seen == [*steps(1), ("epoch", 4), *steps(7, 8), ("epoch", 8), "flush", "close"]
    assert told(caplog) == ["Stuck() was too slow: 5 step records were dropped."]


def test_a_sink_that_stays_stuck_is_left_at_the_deadline_and_the_rest_is_counted(caplog):
    stuck = Stuck()

    def body(run, x):
        if x == 1:
            assert stuck.entered.wait(60)

    run = train(Sinks([stuck], deadline_s=0.05), body=body)
    (thread,) = sink_threads()
    stuck.go.set()
    thread.join(60)
    assert run.status == "completed"
    assert stuck.seen == steps(1)  # nothing more after the run's end
    assert told(caplog) == ["Stuck() was not done within 0.05 s at the end of the run: 5 records were not written."]


def test_a_sink_that_fails_rests_until_the_next_epoch_record(caplog):
    broken, kept = Broken(2), Kept()
    train([broken, kept], epochs=2, batches=3)
    assert broken.seen == [("step", 1), ("epoch", 3), *steps(4, 5, 6), ("epoch", 6)]
    assert kept.seen == [*steps(1, 2, 3), ("epoch", 3), *steps(4, 5, 6), ("epoch", 6), "flush", "close"]
    assert told(caplog) == [
        "Broken() failed to write: OSError: write 2. It is left alone until the next epoch record; training goes on.",
        "Broken() failed: 2 records were not written to it.",
    ]


def test_a_sink_that_fails_three_times_in_a_row_is_switched_off(caplog):
    broken = Broken(*range(1, 100))
    train([broken], epochs=5, batches=1)
    assert (broken.calls, broken.seen) == (3, [])
    assert told(caplog) == [
        "Broken() failed to write: OSError: write 1. It is left alone until the next epoch record; training goes on.",
        "Broken() failed to write: OSError: write 3. It failed 3 times in a row and is switched off for the rest of "
        "this run.",
        "Broken() failed: 10 records were not written to it.",
    ]


def test_a_success_starts_the_count_of_failures_anew(caplog):
    broken = Broken(1, 2, 4, 5)
    train([broken], epochs=5, batches=1)
    # 1: step, 2: epoch, 3: epoch; 4: step, 5: epoch, 6: epoch
    assert broken.seen == [("epoch", 2), ("epoch", 4), ("step", 5), ("epoch", 5)]


def test_a_sink_that_cannot_be_opened_is_tried_again_at_the_next_epoch_record(caplog):
    broken = Broken(1, method="open")
    train([broken], epochs=2, batches=2)
    assert broken.seen == [("epoch", 2), *steps(3, 4), ("epoch", 4)]


@pytest.mark.parametrize("method", ["flush", "close"])
def test_a_sink_that_fails_at_the_end_is_named_and_the_others_are_closed(caplog, method):
    broken, kept = Broken(1, method=method), Kept()
    train([broken, kept], batches=1)
    assert kept.seen[-1] == "close"
    assert told(caplog) == [
        f"Broken() failed to {method}: OSError: {method} 1. It is left alone until the next epoch record; training "
        "goes on."
    ]


def test_even_an_exit_raised_by_a_sink_ends_neither_run_nor_thread(caplog):
    class Exits(Kept):
        def write(self, record):
            raise SystemExit(1)

    kept = Kept()
    run = train([Exits(), kept], batches=1)
    assert (run.status, kept.seen) == ("completed", [("step", 1), ("epoch", 1), "flush", "close"])


def test_a_checkpoint_waits_for_what_came_before_it():
    kept, at_saving = Kept(), []

    def save(run, reason):
        run.emit(at.SAVING)
        at_saving.append(list(kept.seen))

    @on(at.STEP_END, every=2)
    def ask(run):
        run.save()

    train([kept], saver=save, callbacks=[ask])
    assert at_saving == [[*steps(1, 2), "flush"], [*steps(1, 2), "flush", *steps(3, 4), "flush"]]


def test_a_checkpoint_does_not_wait_for_long_and_not_twice_for_a_stuck_sink(monkeypatch):
    stuck, waits = Stuck(), []
    wait = threading.Event.wait

    def watched(event, timeout):
        if threading.current_thread() is not threading.main_thread():
            return wait(event, timeout)
        waits.append(timeout)
        return wait(event, 0.01)

    def save(run, reason):
        assert stuck.entered.is_set() or wait(stuck.entered, 60)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Event, "wait", watched)
            run.emit(at.SAVING)

    @on(at.STEP_END)
    def ask(run):
        run.save()

    @on(at.TRAIN_END)
    def let_go(run):
        stuck.go.set()

    train([stuck], saver=save, callbacks=[ask, let_go])
    assert waits == [1.0]


def test_a_sink_that_writes_nothing_says_what_it_lacks():
    with pytest.raises(NotImplementedError, match="has no write"):
        Sink().write(Record("step", 1, 1, 0, 1, "train", 0.0, {}))


def test_nobody_but_a_run_starts_a_thread():
    Run(callbacks=[Sinks([Kept()])])
    assert sink_threads() == []
