"""What is in the files, and that a resumed run's are those of a run that never stopped."""

import copy
import csv
import json
import math
import os
import stat

import pytest
import torch

from loopline import Every, Progress, Run, Trainer, at, loop, on
from loopline.metrics import Mean, Metrics
from loopline.sinks import ConsoleSink, CsvSink, JsonlSink, Record, Sinks
from loopline.testing import TinyTask, tiny_loader

FILES = [JsonlSink, CsvSink]


def record(step, metrics=None, *, kind="step", stage="train"):
    return Record(kind, step, step, 0, step, stage, 0.0, metrics or {})


def write(sink, *records, resume=()):
    if resume:
        sink.resume_from(*resume)
    sink.open(None)
    for one in records:
        sink.write(one)
    sink.flush()
    sink.close()


def steps_in(path):
    if path.suffix == ".csv":
        return [int(row["step"]) for row in csv.DictReader(path.read_text().splitlines())]
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def content(path):
    """What a file holds, but for the times."""
    if path.suffix == ".csv":
        header, *rows = csv.reader(path.read_text().splitlines())
        return [header, *([cell for i, cell in enumerate(row) if i != 6] for row in rows)]
    return [list({**json.loads(line), "time": 0}.items()) for line in path.read_text().splitlines()]


def test_jsonl_holds_one_object_for_each_record(tmp_path):
    sink = JsonlSink(tmp_path / "log.jsonl", Every(steps=2))
    Trainer(TinyTask(), progress=False, sinks=[sink]).fit(tiny_loader(3), tiny_loader(1), epochs=1)
    lines = [json.loads(line) for line in sink.path.read_text().splitlines()]
    assert [list(line) for line in lines] == [
        ["kind", "step", "batch", "epoch", "samples", "stage", "time", "train/loss"],
        ["kind", "step", "batch", "epoch", "samples", "stage", "time", "val/loss", "val/accuracy"],
        ["kind", "step", "batch", "epoch", "samples", "stage", "time", "train/loss"],
    ]


def test_jsonl_is_strict_json_whatever_the_numbers(tmp_path):
    def refuse(constant):
        raise ValueError(constant)

    sink = JsonlSink(tmp_path / "log.jsonl")
    write(sink, record(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e300}))
    line = json.loads(sink.path.read_text(), parse_constant=refuse)
    assert [line[name] for name in "abcd"] == ["NaN", "Infinity", "-Infinity", 1e300]


def test_each_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    sinks = [JsonlSink(tmp_path / "log.jsonl"), CsvSink(tmp_path / "log.csv")]
    seen = []
    for sink in sinks:
        sink.open(None)
        for step in (1, 2):
            sink.write(record(step))
            seen.append(steps_in(sink.path))
        sink.close()
    assert seen == [[1], [1, 2]] * 2


@pytest.mark.parametrize("kind", FILES)
def test_parent_folders_are_made_and_only_the_owner_may_read(tmp_path, kind):
    sink = kind(tmp_path / "new" / "deep" / "log")
    write(sink, record(1, {"a": 1.0}), record(2, {"b": 1.0}))
    assert stat.S_IMODE(sink.path.stat().st_mode) == 0o600
    assert list(sink.path.parent.iterdir()) == [sink.path]


@pytest.mark.parametrize("kind", FILES)
def test_a_folder_as_path_is_refused_at_once(tmp_path, kind):
    with pytest.raises(ValueError, match="is a folder"):
        kind(tmp_path)


def test_two_sinks_on_one_file_are_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="write over each other"):
        Sinks([JsonlSink(tmp_path / "log"), CsvSink(str(tmp_path / "log"))])


@pytest.mark.parametrize("kind", FILES)
def test_a_new_run_begins_the_file_anew(tmp_path, kind):
    sink = kind(tmp_path / ("log" + (".csv" if kind is CsvSink else "")), Every(steps=1))
    trainer = Trainer(TinyTask(), progress=False, sinks=[sink])
    trainer.fit(tiny_loader(3), epochs=1)
    trainer.fit(tiny_loader(2), epochs=1)
    assert steps_in(sink.path) == [1, 2, 2]


@pytest.mark.parametrize("kind", FILES)
def test_an_evaluation_alone_adds_to_the_file(tmp_path, kind):
    path = tmp_path / ("log" + (".csv" if kind is CsvSink else ""))
    sink = kind(path, Every(steps=1))
    trainer = Trainer(TinyTask(), progress=False, sinks=[sink])
    trainer.fit(tiny_loader(2), epochs=1)
    trainer.test(tiny_loader(1))
    trainer.predict(tiny_loader(1))
    assert steps_in(path) == [1, 2, 2, 0]


@pytest.mark.parametrize("kind", FILES)
def test_a_run_of_one_process_goes_on_in_its_file(tmp_path, kind):
    path = tmp_path / ("log" + (".csv" if kind is CsvSink else ""))
    trainer = Trainer(TinyTask(), progress=False, sinks=[kind(path, Every(steps=1))])
    first = trainer.fit(tiny_loader(2), epochs=1)
    trainer.fit(tiny_loader(2), epochs=2, resume=first)
    assert steps_in(path) == [1, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize("kind", FILES)
def test_what_a_killed_process_left_is_cut_back(tmp_path, kind, missing):
    path = tmp_path / ("log" + (".csv" if kind is CsvSink else ""))
    write(kind(path), *(record(step, {"a": 0.5, "b": step / 8}) for step in (1, 2, 3, 4)))
    whole = path.read_text()
    path.write_text(whole[:-missing])  # the end of the last line, or also of the last number
    write(kind(path), record(4, {"a": 0.5, "b": 0.5}), resume=[4])
    assert path.read_text() == whole
    write(kind(path), record(3, {"a": 0.5, "b": 3 / 8}), record(4, {"a": 0.5, "b": 0.5}), resume=[2])
    assert path.read_text() == whole


@pytest.mark.parametrize("kind", FILES)
def test_a_resumed_run_whose_file_is_gone_begins_one(tmp_path, kind):
    path = tmp_path / ("log" + (".csv" if kind is CsvSink else ""))
    write(kind(path), record(5), resume=[4])
    assert steps_in(path) == [5]


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    sink = JsonlSink(tmp_path / "log.jsonl")
    real, left = os.write, [10]

    def full(file, data):
        if not left:
            raise OSError(28, "No space left on device")
        return real(file, data[: left.pop()])

    sink.open(None)
    sink.write(record(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            sink.write(record(2))
    sink.write(record(3))
    sink.close()
    assert steps_in(sink.path) == [1, 3]


def test_csv_columns_grow_in_order_of_appearance(tmp_path):
    sink = CsvSink(tmp_path / "log.csv")
    write(
        sink,
        record(1, {"train/loss": 0.5}),
        record(1, {"val/loss": 0.25, "val, odd": math.nan}, kind="epoch", stage="val"),
        record(2, {"train/lr": 0.1, "train/loss": 0.1 + 0.2}),
    )
    assert sink.path.read_text() == (
        'kind,step,batch,epoch,samples,stage,time,train/loss,val/loss,"val, odd",train/lr\n'
        "step,1,1,0,1,train,0.0,0.5,,,\n"
        "epoch,1,1,0,1,val,0.0,,0.25,nan,\n"
        "step,2,2,0,2,train,0.0,0.30000000000000004,,,0.1\n"
    )


def test_csv_is_written_anew_only_for_a_new_column(tmp_path):
    sink = CsvSink(tmp_path / "log.csv")
    sink.open(None)
    files = []
    for metrics in ({"a": 1.0}, {"a": 2.0}, {}, {"b": 1.0}, {"a": 1.0, "b": 1.0}):
        sink.write(record(1, metrics))
        files.append(sink.path.stat().st_ino)
    sink.close()
    assert files[0] == files[1] == files[2] != files[3] == files[4]


def test_csv_columns_that_only_cut_rows_filled_are_cut_too(tmp_path):
    sink = CsvSink(tmp_path / "log.csv")
    write(sink, record(1, {"a": 1.0}), record(2, {"b": 1.0}), record(3, {"c": 1.0}))
    write(sink, record(2, {"c": 1.0}), resume=[1])
    assert sink.path.read_text().splitlines()[0].split(",")[7:] == ["a", "c"]


def test_a_table_of_somebody_else_is_not_gone_on_with(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("name,step\nx,1\n")
    with pytest.raises(ValueError, match="not written by a CsvSink"):
        CsvSink(path).resume_from(3)
    assert path.read_text() == "name,step\nx,1\n"


def test_a_failed_rewriting_leaves_the_old_table(tmp_path, monkeypatch):
    sink = CsvSink(tmp_path / "log.csv")
    sink.open(None)
    sink.write(record(1, {"a": 1.0}))
    before = sink.path.read_text()

    def fails(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="No space"):
            sink.write(record(2, {"b": 1.0}))
    assert (sink.path.read_text(), list(tmp_path.iterdir())) == (before, [sink.path])
    sink.write(record(3, {"a": 2.0}))
    sink.close()
    assert sink.path.read_text() == before + "step,3,3,0,3,train,0.0,2.0\n"


class Checkpoints:
    """Everything that a checkpoint must keep for the files to come out the same, copied at each save."""

    def __init__(self, task, sinks):
        self.task, self.sinks, self.taken = task, sinks, []

    def save(self, run, reason):
        run.emit(at.SAVING)
        entries = {n: run.metrics.entry(n) for n in run.metrics if n in run.metrics.fresh(n.split("/")[0])}
        self.taken.append(
            copy.deepcopy(
                {
                    "model": self.task.model.state_dict(),
                    "progress": run.progress,
                    "metrics": {n: e.state_dict() if isinstance(e, Mean) else e for n, e in entries.items()},
                    "sinks": self.sinks.state_dict(),
                }
            )
        )


def restored(metrics):
    back = Metrics()
    for name, state in metrics.items():
        back.add(name, 0.0)
        if isinstance(state, dict):
            back.entry(name).load_state_dict(copy.deepcopy(state))
        else:
            back[name] = state
    return back


def fit(task, sinks, *, epochs, checkpoints=None, die_at=None, **parts):
    """Three epochs of five steps, an evaluation at each second step and after each pass, and a save at each step."""

    @on(at.STEP_END)
    def ask(run):
        run.save()
        if (run.step + 1) % 2 == 0:
            run.evaluate()
        if run.step + 1 == die_at:
            raise KeyboardInterrupt

    @on(at.EPOCH_END)
    def ask_again(run):
        run.save()

    def evaluation(run):
        for batch in loop.evaluate(run, tiny_loader(2, seed=1)):
            run.log({"loss": task.eval_step(batch, run)["loss"]})

    run = Run(
        model=task.model,
        optimizers=[task.optimizer],
        callbacks=[sinks, ask, ask_again],
        saver=(checkpoints or Checkpoints(task, sinks)).save,
        evaluator=evaluation,
        **parts,
    )
    with loop.fit(run):
        for _ in loop.epochs(run, epochs):
            for batch in loop.batches(run, tiny_loader(5)):
                loss = task.train_step(batch, run)["loss"]
                run.log({"loss": loss, "machine/load": run.step}, weight=run.step + 1)
                run.metrics["train/lr"] = 0.1 if run.step < 8 else 0.01
                loop.backward(run, loss)
                loop.optimizer_step(run)
            evaluation(run)


def file_sinks(folder):
    sinks = [JsonlSink(folder / "log.jsonl", Every(steps=3)), CsvSink(folder / "log.csv", Every(steps=2))]
    return Sinks(sinks), [sink.path for sink in sinks]


def resumed_files(folder, state, written):
    """The files of a run that goes on from a checkpoint, where a killed one left its own."""
    folder.mkdir()
    sinks, paths = file_sinks(folder)
    for path, text in zip(paths, written, strict=True):
        path.write_text(text)
    sinks.load_state_dict(copy.deepcopy(state["sinks"]))
    task = TinyTask()
    task.model.load_state_dict(state["model"])
    fit(
        task,
        sinks,
        epochs=3,
        progress=copy.copy(state["progress"]),
        metrics=restored(state["metrics"]),
    )
    return [content(path) for path in paths]


def test_the_files_of_a_resumed_run_are_those_of_an_uninterrupted_one_from_every_checkpoint(tmp_path):
    (tmp_path / "uncut").mkdir()
    sinks, paths = file_sinks(tmp_path / "uncut")
    task = TinyTask()
    checkpoints = Checkpoints(task, sinks)
    fit(task, sinks, epochs=3, checkpoints=checkpoints)
    uncut = [content(path) for path in paths]
    written = [path.read_text() for path in paths]
    # the worst case: the dead run had already written everything that was to come
    resumed = [
        resumed_files(tmp_path / str(i), state, written)
        for i, state in enumerate(checkpoints.taken)
        if state["progress"].steps < 15
    ]
    assert len(resumed) == 16  # 14 steps and 2 epochs
    assert resumed == [uncut] * 16


def test_the_files_of_a_run_that_was_interrupted_inside_a_step_are_cut_back_by_the_step_alone(tmp_path):
    sinks, paths = file_sinks(tmp_path)
    task = TinyTask()
    with pytest.raises(KeyboardInterrupt):
        fit(task, sinks, epochs=3, die_at=9)
    before = [steps_in(path) for path in paths]
    again, _ = file_sinks(tmp_path)
    fit(task, again, epochs=1, progress=Progress(steps=5, batches=5, samples=10, epochs=1))
    assert before == [[2, 3, 4, 5, 5, 6, 6, 8, 9], [2, 2, 4, 4, 5, 5, 6, 6, 8, 8]]
    assert [steps_in(path) for path in paths] == [[2, 3, 4, 5, 5], [2, 2, 4, 4, 5, 5]]


def test_console_lines_are_short_and_say_where_they_stand():
    lines = []
    sink = ConsoleSink(lines.append)
    metrics = {"train/loss": 0.41237, "train/accuracy": 0.91, "train/lr": 1e-5, "n": 1234567.0, "bad": math.nan}
    sink.write(record(1200, metrics))
    sink.write(record(1200, {"train/loss": 1.0}, kind="epoch"))
    sink.write(record(1200, {"val/loss": -12345.6}, kind="epoch", stage="val"))
    assert lines == [
        "epoch 0  step 1200  train/loss 0.4124  train/accuracy 0.91  train/lr 1e-05  n 1234567  bad nan",
        "epoch 0 in all  step 1200  train/loss 1",
        "epoch 0  step 1200  val/loss -12346",
    ]


def test_console_goes_to_standard_error(capsys):
    Trainer(TinyTask(), progress=False, sinks=[ConsoleSink()]).fit(tiny_loader(2), epochs=1)
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0].split("  ")[:2]) == ("", ["epoch 0 in all", "step 2"])


def test_console_refuses_what_cannot_be_called_at_once():
    with pytest.raises(TypeError, match="function that takes a line"):
        ConsoleSink(write="stderr")


def test_a_tensor_on_another_type_of_float_is_written_in_full(tmp_path):
    sink = JsonlSink(tmp_path / "log.jsonl", Every(steps=1))
    run = Run(callbacks=[Sinks([sink])])
    with loop.fit(run):
        for _ in loop.epochs(run, 1):
            for _ in loop.batches(run, [1]):
                run.log({"half": torch.tensor(0.5, dtype=torch.bfloat16), "whole": torch.tensor(3)})
    line = json.loads(sink.path.read_text().splitlines()[0])
    assert (line["train/half"], line["train/whole"]) == (0.5, 3.0)
