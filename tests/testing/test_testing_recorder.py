from __future__ import annotations

import json
import math

import pytest
import torch

from loopline import Binding, Callback, Event, Every, Run, StopRun, Trainer, at, loop
from loopline.core.event import SEAMS
from loopline.testing import Recorder, TinyTask, drive, no_sync, tiny_loader


def fitted(*callbacks, **given):
    trainer = Trainer(TinyTask(), callbacks=callbacks, progress=False, **given)
    trainer.fit(tiny_loader(3), tiny_loader(1), epochs=2)
    return trainer


def test_a_line_has_the_event_its_indices_and_the_counts():
    recorder = Recorder([at.BATCH_END, at.STEP_END, at.EPOCH_END, at.FIT_END])
    Trainer(TinyTask(), accumulate=2, callbacks=[recorder], progress=False).fit(tiny_loader(3), epochs=1)
    assert recorder.lines == [
        "batch_end epoch=0 step=0 batch=0 stage=train steps=0 batches=0",
        "batch_end epoch=0 step=0 batch=1 stage=train steps=0 batches=1",
        "step_end epoch=0 step=0 stage=train steps=0 batches=2",
        "batch_end epoch=0 step=1 batch=2 stage=train steps=1 batches=2",
        "step_end epoch=0 step=1 stage=train steps=1 batches=3",
        "epoch_end epoch=0 step=1 stage=train steps=2 batches=3",
        "fit_end epoch=0 step=1 stage=train steps=2 batches=3 status=completed",
    ]


def test_a_stop_is_told_with_its_reason():
    recorder = Recorder([at.STOPPED])
    run = Run(callbacks=[recorder])
    with loop.fit(run):
        raise StopRun("enough")
    assert recorder.text == "stopped epoch=0 step=0 stage=train steps=0 batches=0 status=stopped reason='enough'\n"


def test_without_names_every_seam_is_recorded():
    assert Recorder().events == tuple(SEAMS.values())


def test_a_name_in_place_of_an_event_is_an_error():
    with pytest.raises(TypeError, match=r"Recorder\('step_end'\): an event is an object such as at.STEP_END"):
        Recorder(["step_end"])


def test_events_of_the_users_own_are_recorded_with_whatever_they_carry():
    mine = Event("generator_step")
    recorder = Recorder([mine])
    Run(callbacks=[recorder]).emit(mine, loss=1.0)
    assert recorder.lines == ["generator_step epoch=0 step=0 stage=train steps=0 batches=0"]


def test_the_recorder_is_called_before_the_others_so_that_a_failure_is_recorded():
    class Fails(Callback):
        order = -100

        def on_batch_end(self, run):
            raise ValueError("broken")

    recorder = Recorder([at.BATCH_END, at.EXCEPTION])
    with pytest.raises(ValueError, match="broken"):
        fitted(Fails(), recorder)
    assert recorder.names == ["batch_end", "exception"]


def test_the_stream_has_metrics_where_an_evaluation_or_an_epoch_ends_and_nowhere_else():
    recorder = Recorder()
    fitted(recorder, evaluate=Every(epochs=2), sanity=1)
    with_metrics = [(e["event"], e["epoch"], sorted(e["metrics"])) for e in recorder.stream if "metrics" in e]
    assert with_metrics == [
        ("eval_end", 0, ["sanity/accuracy", "sanity/loss"]),
        ("epoch_end", 0, ["train/loss"]),
        ("eval_end", 1, ["val/accuracy", "val/loss"]),
        ("epoch_end", 1, ["train/loss"]),
    ]


def test_what_another_callback_adds_at_the_same_event_is_in_the_stream():
    class Adds(Callback):
        order = 50

        def on_eval_end(self, run):
            run.log({"val/f1": 0.5})

    recorder = Recorder([at.EVAL_END])
    fitted(recorder, Adds(), sanity=0)
    assert [entry["metrics"]["val/f1"] for entry in recorder.stream] == [0.5, 0.5]


def test_an_evaluation_inside_a_handler_at_the_end_of_another_is_recorded_with_its_own_metrics():
    class Nested(Callback):
        def on_eval_end(self, run):
            if run.stage == "val":
                for _ in loop.evaluate(run, [0], stage="test"):
                    run.log({"loss": 7.0})

    recorder = Recorder([at.EVAL_END])
    drive([Nested(), recorder], epochs=1, metrics={"val/loss": [3.0]})
    metrics = [(e["stage"], e["metrics"].get("val/loss"), e["metrics"].get("test/loss")) for e in recorder.stream]
    assert metrics == [("val", 3.0, None), ("test", None, 7.0)]


def test_the_recorder_reads_no_tensor_at_batches():
    recorder = Recorder([seam for seam in SEAMS.values() if seam not in (at.EVAL_END, at.EPOCH_END)])
    with no_sync():
        fitted(recorder)
    assert "batch_end" in recorder.names


def test_recording_changes_nothing_in_the_run():
    plain, recorded = fitted(), fitted(Recorder())
    assert (
        [p.tolist() for p in plain.task.model.parameters()],
        dict(plain.run.metrics),
    ) == (
        [p.tolist() for p in recorded.task.model.parameters()],
        dict(recorded.run.metrics),
    )


def test_recording_leaves_the_global_random_stream_alone():
    torch.manual_seed(3)
    fitted(Recorder())
    after = torch.rand(3).tolist()
    torch.manual_seed(3)
    fitted()
    assert after == torch.rand(3).tolist()


def test_a_saved_stream_is_one_json_object_a_line(tmp_path):
    recorder = Recorder()
    drive(recorder, epochs=1, metrics={"val/loss": [math.nan]})
    recorder.save(tmp_path / "stream.jsonl")
    lines = (tmp_path / "stream.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == recorder.stream
    assert next(e["metrics"]["val/loss"] for e in recorder.stream if e["event"] == "eval_end") == "nan"


def test_a_golden_file_that_is_the_same_says_nothing(tmp_path):
    recorder = Recorder([at.EPOCH_END])
    fitted(recorder)
    recorder.assert_equal(tmp_path / "new" / "golden.txt", rewrite=True)
    recorder.assert_equal(tmp_path / "new" / "golden.txt")


def test_a_golden_file_that_differs_is_shown_as_a_diff(tmp_path):
    recorder = Recorder([at.EPOCH_END])
    fitted(recorder)
    path = tmp_path / "golden.txt"
    path.write_text(recorder.text.replace("epoch=1", "epoch=9"))
    with pytest.raises(AssertionError) as caught:
        recorder.assert_equal(path)
    assert [line for line in str(caught.value).splitlines() if line[:1] in "-+"][2:] == [
        "-epoch_end epoch=9 step=5 stage=train steps=6 batches=6",
        "+epoch_end epoch=1 step=5 stage=train steps=6 batches=6",
    ]


def test_a_golden_file_that_is_missing_is_not_written_by_itself(tmp_path):
    with pytest.raises(AssertionError, match=r"There is no golden file .* pytest --regold"):
        Recorder().assert_equal(tmp_path / "golden.txt")
    assert list(tmp_path.iterdir()) == []


def test_two_recorders_may_listen_to_one_run():
    one, two = Recorder([at.STEP_END]), Recorder([at.STEP_END])
    fitted(one, two)
    assert one.lines == two.lines


def test_the_recorder_is_a_listener_with_bindings_for_its_events_only():
    recorder = Recorder([at.STEP_END])
    assert [type(b) for b in recorder.bindings(Run())] == [Binding]
