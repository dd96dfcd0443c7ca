"""What a Checkpointer does in a run that goes well, and in one that does not."""

from __future__ import annotations

import os
import random
import stat
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from loopline import Callback, Every, Never, Run, SupervisedTask, Trainer, at, loop, on
from loopline.checkpoint import All, Best, Checkpointer, Latest, identity
from loopline.core.errors import CannotSave, LooplineError, NoIntactCheckpoint, NotFinite, SaveFailed, StoreError
from loopline.stores import LocalStore, MemoryStore
from loopline.testing import TinyTask, tiny_loader


def fit(store, *, epochs=2, steps=None, callbacks=(), resume="auto", task=None, **given) -> Run:
    trainer = Trainer(
        task or TinyTask(), seed=1, progress=False, checkpoint=Checkpointer(store, **given), callbacks=callbacks
    )
    return trainer.fit(tiny_loader(), tiny_loader(2, seed=1), epochs=epochs, steps=steps, resume=resume)


def steps_of(store) -> list[int]:
    return [ref.step for ref in Checkpointer(store).shelf.refs()]


def test_checkpoints_are_taken_when_they_are_due_and_at_the_end():
    store = MemoryStore()
    fit(store, when=Every(steps=3), keep=All(), epochs=2)
    assert steps_of(store) == [3, 6, 9, 10]


def test_with_never_one_is_taken_only_where_it_is_asked_for():
    @on(at.STEP_END)
    def ask(run):
        if run.step == 3:
            run.save("because")

    store = MemoryStore()
    fit(store, when=Never(), keep=All(), callbacks=[ask])
    assert [
        (r.step, Checkpointer(store).shelf.get(r.name).manifest.reason) for r in Checkpointer(store).shelf.refs()
    ] == [(4, "because")]


def test_a_stop_inside_an_epoch_is_saved():
    @on(at.STEP_END)
    def stop(run):
        if run.step == 6:
            run.stop("enough")

    store = MemoryStore()
    fit(store, keep=All(), callbacks=[stop])
    assert steps_of(store) == [5, 7]


def test_the_newest_stay_and_the_best_by_its_metric():
    losses = iter([0.5, 0.1, 0.9, 0.8, 0.7])

    @on(at.EVAL_END)
    def log(run):
        if run.stage == "val":
            run.log({"val/score": next(losses)})

    store = MemoryStore()
    fit(store, epochs=5, keep=Latest(2) | Best(1, "val/score"), callbacks=[log])
    checkpointer = Checkpointer(store)
    best = checkpointer.shelf.get(checkpointer.shelf.pins()["best"]).manifest
    assert (steps_of(store), best.epochs) == ([10, 20, 25], 2)


def test_a_pinned_checkpoint_stays_until_it_is_unpinned():
    store = MemoryStore()
    fit(store, epochs=1)
    checkpointer = Checkpointer(store)
    checkpointer.pin("paper", checkpointer.latest())
    fit(store, epochs=4, keep=Latest(1))
    kept = steps_of(store)
    checkpointer.shelf.unpin("paper")
    fit(store, epochs=5, keep=Latest(1))
    assert (kept, steps_of(store)) == ([5, 20], [25])


def test_must_refuses_to_begin_anew_and_never_to_go_on():
    store = MemoryStore()
    with pytest.raises(NoIntactCheckpoint, match="no checkpoint"):
        fit(store, resume="must")
    first = fit(store, epochs=2)
    again = fit(store, epochs=3, resume="never")
    then = fit(store, epochs=4, resume="must")
    assert [r.progress.steps for r in (first, again, then)] == [10, 15, 20]
    # the first run's last two are still there, and belong to nobody's retention
    assert steps_of(store).count(10) >= 1


def test_what_cannot_be_kept_is_said_before_the_first_batch():
    class Odd(Callback):
        def state_dict(self):
            return {"deep": [{"file": Path()}]}

    with pytest.raises(CannotSave, match="callbacks/Odd/deep/0/file"):
        fit(MemoryStore(), callbacks=[Odd()])


def test_a_folder_that_cannot_be_written_is_said_before_the_first_batch(tmp_path):
    class ReadOnly(LocalStore):
        def put(self, key, data):
            raise StoreError("this one cannot be written")

    began = []

    @on(at.TRAIN_START)
    def note(run):
        began.append(1)

    with pytest.raises(StoreError, match="cannot be written"):
        fit(ReadOnly(tmp_path), callbacks=[note])
    assert began == []


def test_after_so_many_failures_in_a_row_the_run_ends_and_before_that_it_goes_on(caplog):
    class Full(MemoryStore):
        def put(self, key, data):
            if key.startswith("checkpoints/") and self.full:
                raise StoreError("disk full")
            super().put(key, data)

    store = Full()
    store.full = True

    @on(at.EPOCH_END)
    def free(run):
        store.full = run.epoch < 1

    run = fit(store, epochs=3, callbacks=[free], max_failed_saves=3)
    assert (run.status, steps_of(store)[-1]) == ("completed", 15)
    store.full = True
    with pytest.raises(SaveFailed, match=r"3 checkpoints in a row.*disk full"):
        fit(store, epochs=9, callbacks=[], max_failed_saves=3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_that_is_not_finite_never_becomes_the_newest(asynchronous):
    """A16: with NaN in a weight, or an infinity."""

    @on(at.STEP_END)
    def poison(run):
        if run.step == 7:
            with torch.no_grad():
                run.model.weight[0, 0] = float("inf")

    store = MemoryStore()
    with pytest.raises((NotFinite, SaveFailed)):
        fit(store, epochs=9, when=Every(steps=2), keep=All(), callbacks=[poison], asynchronous=asynchronous)
    assert steps_of(store) == [2, 4, 6]


def test_an_infinite_buffer_is_no_failure_and_one_with_nan_is():
    def task(value):
        model = nn.Sequential(nn.Linear(4, 2))
        model.register_buffer("mask", torch.tensor([0.0, value]))
        return SupervisedTask(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    store = MemoryStore()
    fit(store, epochs=1, task=task(float("-inf")))
    with pytest.raises(LooplineError):
        fit(MemoryStore(), epochs=1, task=task(float("nan")))
    assert steps_of(store) == [5]


def test_files_and_folders_are_for_their_owner_alone(tmp_path):
    fit(tmp_path / "run", epochs=1)
    found = [path for path in (tmp_path / "run").rglob("*") if path.name != "LOCK"]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()}
    assert (modes, {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()}) == ({0o600}, {0o700})


def test_neither_the_clock_nor_the_files_times_decide_anything(tmp_path, monkeypatch):
    """A22: an hour or a year forwards or back."""
    plain, moved = tmp_path / "plain", tmp_path / "moved"
    source = random.Random(0)
    for folder in (plain, moved):
        for epochs in (1, 3, 4, 6):
            if folder is moved:
                for path in folder.rglob("*"):
                    away = time.time() + source.choice([-1, 1]) * source.choice([3600, 366 * 86400])
                    os.utime(path, (away, away))
                shift = source.choice([-1, 1]) * source.choice([3600, 366 * 86400])
                real = time.time()
                monkeypatch.setattr(time, "time", lambda at=real + shift: at)
                monkeypatch.setattr(identity, "now", lambda at=real + shift: str(at))
            fit(folder, epochs=epochs, keep=Latest(2) | Best(1, "val/loss"))
            monkeypatch.undo()
    found = [[(ref.step, ref.serial) for ref in Checkpointer(folder).shelf.refs()] for folder in (plain, moved)]
    assert (found[0], Checkpointer(plain).latest().step) == (found[1], Checkpointer(moved).latest().step)


def test_weights_alone_can_be_restored():
    store = MemoryStore()
    trained = fit(store, epochs=2)
    task = TinyTask(seed=9)
    checkpointer = Checkpointer(store)
    run = Run(model=task.model, optimizers=[task.optimizer])
    with loop.opened(run):
        checkpointer.restore(run, checkpointer.latest(), only=["model"])
    assert torch.equal(task.model.weight, trained.model.weight)
    assert run.progress.steps == 0


def test_a_run_killed_while_saving_leaves_what_it_began_and_the_next_one_clears_it_away(tmp_path, caplog):
    fit(tmp_path, epochs=1)
    begun = tmp_path / "checkpoints" / "000000000099-00000000"
    begun.mkdir()
    (begun / "global.json").write_text("{}")
    fit(tmp_path, epochs=2)
    assert (begun.exists(), steps_of(tmp_path)) == (False, [5, 10])


def test_a_callback_and_the_metrics_go_on_where_they_were():
    class Counts(Callback):
        def __init__(self):
            self.seen = []

        def on_step_end(self, run):
            self.seen.append((run.step, run.metrics["train/loss"]))

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    @on(at.STEP_END)
    def stop(run):
        if run.step == 6:
            run.stop("cut")

    whole, first, second = Counts(), Counts(), Counts()
    store = MemoryStore()
    fit(MemoryStore(), callbacks=[whole], epochs=3)
    fit(store, callbacks=[first, stop], epochs=3)
    fit(store, callbacks=[second], epochs=3)
    assert second.seen == whole.seen


def test_marks_that_count_calls_go_on_counting():
    def count(store, epochs):
        seen = []

        @on(at.EVAL_END, every=2)
        def note(run):
            seen.append(run.epoch)

        fit(store, callbacks=[note], epochs=epochs)
        return seen

    store = MemoryStore()
    assert (count(MemoryStore(), 6), count(store, 3) + count(store, 6)) == ([0, 2, 4], [0, 2, 4])


def test_a_fit_that_goes_on_from_an_earlier_run_of_the_process_stays_the_same_run():
    store, task = MemoryStore(), TinyTask()
    trainer = Trainer(task, seed=1, progress=False, checkpoint=Checkpointer(store, keep=All()))
    first = trainer.fit(tiny_loader(), epochs=1)
    trainer.fit(tiny_loader(), epochs=3, resume=first)
    assert (steps_of(store), list(store.keys("run"))) == ([5, 10, 15], ["run.json"])
