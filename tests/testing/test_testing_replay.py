from __future__ import annotations

import math

import pytest

from loopline import Callback, Every, Run, StopRun, Trainer, at, on
from loopline.callbacks import EarlyStopping
from loopline.metrics import Watched
from loopline.testing import Recorder, TinyTask, drive, replay, tiny_loader


def recorded(losses, **given):
    return drive(metrics={"val/loss": losses}, **given).trace.stream


def lines_of(stream):
    """What a recorder hears of a replay."""
    recorder = Recorder()
    replay(recorder, stream)
    return recorder


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_early_stopping_asks_in_a_replay_where_it_asks_in_the_run(patience):
    losses = [3.0, 2.0, 2.5, 2.4, 2.3, 1.0]
    stopping = EarlyStopping("val/loss", patience=patience)
    run = drive(stopping, metrics={"val/loss": losses}).run
    again = replay(EarlyStopping("val/loss", patience=patience), recorded(losses))
    assert (again.stop.reason, again.stop.epoch, again.run.progress) == (run.reason, run.epoch, run.progress)


def test_a_replayed_run_of_which_nothing_is_asked_has_the_same_lines():
    trace = drive(epochs=2, batches=3, accumulate=2).trace
    assert lines_of(trace.stream).lines == trace.lines


def test_a_replayed_replay_is_the_same_stream():
    trace = drive(epochs=2, metrics={"val/loss": [1.0, math.nan]}).trace
    assert lines_of(trace.stream).stream == trace.stream


def test_a_stream_is_read_from_a_file(tmp_path):
    trace = drive(epochs=2, metrics={"val/loss": [math.inf, 1.0]}).trace
    trace.save(tmp_path / "stream.jsonl")
    assert lines_of(tmp_path / "stream.jsonl").stream == trace.stream
    assert lines_of(str(tmp_path / "stream.jsonl")).stream == trace.stream


def test_a_metric_counts_as_new_only_in_the_epochs_that_measured_it():
    class Sees(Callback):
        def __init__(self):
            self.watched, self.values = Watched("val/loss"), []

        def on_epoch_end(self, run):
            self.values.append(self.watched.new(run))

    recorder, live = Recorder(), Sees()
    trainer = Trainer(TinyTask(), evaluate=Every(epochs=2), callbacks=[recorder, live], progress=False)
    trainer.fit(tiny_loader(2), tiny_loader(1), epochs=4)
    again = Sees()
    replay(again, recorder.stream)
    assert (again.values, [value is None for value in again.values]) == (live.values, [True, False, True, False])


def test_a_stream_of_a_few_events_has_the_same_values():
    recorder = Recorder([at.EVAL_END, at.EPOCH_END])
    drive(recorder, metrics={"val/loss": [3.0, 1.0, 2.0]})
    seen = []

    @on(at.EPOCH_END)
    def see(run):
        seen.append(run.metrics["val/loss"])

    replay(see, recorder.stream)
    assert seen == [3.0, 1.0, 2.0]


def test_after_a_request_to_stop_the_run_goes_on_to_the_safe_point_and_ends():
    class Stop(Callback):
        def __init__(self):
            self.heard = []

        def on_batch_start(self, run):
            if run.progress.batches == 2:
                run.stop("enough")

        @on(at.BATCH_END)
        def note(self, run):
            self.heard.append(("batch_end", run.step))

        def on_step_end(self, run):
            self.heard.append(("step_end", run.step))

        def on_stopped(self, run):
            self.heard.append(("stopped", run.reason, run.status))

        def on_teardown(self, run):
            self.heard.append(("teardown", run.progress.steps))

    live, again = Stop(), Stop()
    drive(live, epochs=2)
    said = replay(again, recorded([1.0, 1.0]))
    assert (again.heard, said.stop.event, said.stop.step) == (live.heard, "batch_start", 2)


def test_a_raised_stop_run_ends_the_replay_at_once():
    class Stop(Callback):
        def on_after_backward(self, run):
            raise StopRun("at once")

        def on_batch_end(self, run):
            pytest.fail("this batch has no end")

    said = replay(Stop(), recorded([1.0, 1.0]))
    assert (said.stop.event, said.stop.reason, said.run.status) == ("after_backward", "at once", "stopped")


def test_saves_evaluations_and_what_is_logged_are_noted_with_their_place():
    class Asks(Callback):
        def on_step_end(self, run):
            if run.step == 1:
                run.save("now")
                run.evaluate()

        def on_epoch_end(self, run):
            run.log({"train/gap": run.metrics["val/loss"] * 2})

    said = replay(Asks(), recorded([1.0, 3.0], batches=2))
    assert (
        [(asked.reason, asked.event, asked.step) for asked in said.saves],
        [(asked.event, asked.step) for asked in said.evaluations],
        said.logged,
        said.stop,
    ) == (
        [("now", "step_end", 1)],
        [("step_end", 1)],
        [("epoch_end", "train/gap", 2.0), ("epoch_end", "train/gap", 6.0)],
        None,
    )


def test_a_failed_run_is_replayed_to_its_failure():
    class Sees(Callback):
        def on_exception(self, run):
            self.error = str(run.error)

    trace = drive(fail_at=at.BATCH_END, fail_on=2, error=ValueError("broken")).trace
    sees = Sees()
    said = replay(sees, trace.stream)
    assert (sees.error, said.run.status) == ("ValueError: broken", "failed")


def test_limits_and_lengths_are_those_of_the_recorded_run():
    class Sees(Callback):
        def on_step_end(self, run):
            self.seen = (run.limits.epochs, run.lengths["train"], run.accumulate)

    sees = Sees()
    replay(sees, drive(epochs=2, batches=5, accumulate=2).trace.stream)
    assert sees.seen == (2, 5, 2)


def test_an_error_of_the_callback_says_where():
    class Fails(Callback):
        def on_epoch_end(self, run):
            raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        replay(Fails(), recorded([1.0]))
    assert caught.value.__notes__[0].endswith("Fails at epoch_end, epoch 0, step 3")


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 1 is not JSON"), ('{"event": "x"}', "line 1 is not a recorded event"), ("3", "1 is")],
)
def test_what_is_no_stream_is_an_error_with_its_line(tmp_path, line, message):
    path = tmp_path / "stream.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        replay(Callback(), path)


def test_a_replay_needs_a_listener():
    with pytest.raises(TypeError, match="is not a listener"):
        replay(3, [])


def test_replaying_leaves_no_mark_on_the_stream():
    stream = recorded([2.0, 1.0])
    before = [dict(entry) for entry in stream]
    replay(Recorder(), stream)
    assert stream == before


def test_events_of_the_users_own_reach_a_callback_that_hears_them():
    from loopline import Event

    mine = Event("generator_step")
    recorder = Recorder([mine])
    Run(callbacks=[recorder]).emit(mine)
    heard = []

    @on(mine)
    def hear(run):
        heard.append(run.step)

    replay(hear, recorder.stream)
    assert heard == [0]
