import math
import os
import stat

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from loopline import Run, Trainer, loop
from loopline.callbacks import Lambda, SaveBest
from loopline.callbacks import save_best as room
from loopline.core.errors import LooplineError, MissingMetric
from loopline.core.progress import Progress
from loopline.strategies import Parts, Single, Traits
from loopline.testing import TinyTask, run_ranks, tiny_loader


def scripted(values, *callbacks, model=None, begin=0, epochs=None, weights=None, **parts):
    """In epoch n every weight of the model is n, or `weights[n]`, and val/loss is `values[n]`."""
    model = nn.Linear(2, 1) if model is None else model
    run = Run(model=model, callbacks=callbacks, progress=Progress(epochs=begin), **parts)
    with loop.fit(run):
        for epoch in loop.epochs(run, len(values) if epochs is None else epochs):
            for parameter in model.parameters():
                nn.init.constant_(parameter, epoch if weights is None else weights[epoch])
            if values[epoch] is not None:
                for _ in loop.evaluate(run, [epoch]):
                    run.log({"loss": values[epoch]})
    return run


def epochs_in(folder):
    """Which epoch's weights each file holds."""
    return {path.name: load_file(path)["weight"].unique().tolist() for path in sorted(folder.iterdir())}


def metadata(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_best_and_last_weights_are_kept(tmp_path):
    best = SaveBest(tmp_path)
    scripted([0.9, 0.3, 0.5, 0.4], best)
    assert (epochs_in(tmp_path), best.best_value, best.best_epoch) == (
        {"best.safetensors": [1.0], "last.safetensors": [3.0]},
        0.3,
        1,
    )


def test_with_mode_max_the_largest_value_is_the_best(tmp_path):
    scripted([0.3, 0.9, 0.5], SaveBest(tmp_path, mode="max"))
    assert epochs_in(tmp_path)["best.safetensors"] == [1.0]


def test_of_equal_values_the_first_is_kept(tmp_path):
    scripted([0.3, 0.3], SaveBest(tmp_path, last=False))
    assert epochs_in(tmp_path) == {"best.safetensors": [0.0]}


def test_weights_that_others_change_when_the_epoch_ends_are_saved_as_changed(tmp_path):
    def average(run):
        nn.init.constant_(run.model.weight, 8.0)

    scripted([0.5], SaveBest(tmp_path), Lambda(on_epoch_end=average, writes={"weights"}))
    assert epochs_in(tmp_path) == {"best.safetensors": [8.0], "last.safetensors": [8.0]}


def test_an_epoch_without_a_value_is_only_the_last(tmp_path):
    scripted([0.3, None], SaveBest(tmp_path))
    assert (epochs_in(tmp_path), "value" in metadata(tmp_path / "last.safetensors")) == (
        {"best.safetensors": [0.0], "last.safetensors": [1.0]},
        False,
    )


def test_the_file_says_what_it_holds(tmp_path):
    task = TinyTask()
    best = SaveBest(tmp_path, "val/accuracy", mode="max", last=False)
    Trainer(task, callbacks=[best], progress=False).fit(tiny_loader(5), tiny_loader(seed=1), epochs=1)
    assert metadata(tmp_path / "best.safetensors") == {
        "metric": "val/accuracy",
        "value": repr(best.best_value),
        "epoch": "0",
        "step": "4",
        "format": "pt",
    }


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_is_never_the_best(tmp_path, bad):
    best = SaveBest(tmp_path, last=False)
    scripted([bad, 0.5, bad], best)
    assert (epochs_in(tmp_path), best.best_value) == ({"best.safetensors": [1.0]}, 0.5)


def test_weights_that_are_not_finite_are_never_the_best(tmp_path, caplog):
    best = SaveBest(tmp_path)
    scripted([0.5, 0.1, 0.3], best, weights=[0.0, math.nan, 2.0])
    assert (epochs_in(tmp_path)["best.safetensors"], best.best_value, len(caplog.records)) == ([2.0], 0.3, 1)


def test_only_the_owner_may_read_the_files(tmp_path):
    before = os.umask(0)
    try:
        scripted([0.5], SaveBest(tmp_path))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_crash_while_writing_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    def half(tensors, path, metadata):
        path.write_bytes(b"half a fi")
        raise OSError("disk full")

    best = SaveBest(tmp_path)
    scripted([0.5], best)
    monkeypatch.setattr("safetensors.torch.save_file", half)
    with pytest.raises(OSError, match="disk full"):
        scripted([0.9, 0.1], best, begin=1)
    assert (epochs_in(tmp_path), best.best_epoch) == ({"best.safetensors": [0.0], "last.safetensors": [0.0]}, 0)


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    (tmp_path / ".best.safetensors.part").write_bytes(b"half a file")
    (tmp_path / ".last.safetensors.part").symlink_to(tmp_path / "elsewhere")
    scripted([0.5], SaveBest(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.safetensors", "last.safetensors"]


def test_a_file_is_on_the_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    done = []
    replace, sync = room.Path.replace, os.fsync

    def seen_replace(path, target):
        done.append("replace")
        return replace(path, target)

    def seen_sync(descriptor):
        done.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        sync(descriptor)

    monkeypatch.setattr(room.Path, "replace", seen_replace)
    monkeypatch.setattr(os, "fsync", seen_sync)
    scripted([0.5], SaveBest(tmp_path, last=False))
    assert done == ["sync file", "replace", "sync folder"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("part", self.table.weight.detach()[1:])
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())


def test_tied_weights_and_views_come_back_from_the_file(tmp_path):
    scripted([0.5], SaveBest(tmp_path), model=Tied())
    fresh = Tied()
    fresh.load_state_dict(load_file(tmp_path / "best.safetensors"))
    assert (fresh.head.weight.unique().tolist(), fresh.head.weight is fresh.table.weight, fresh.turned.tolist()) == (
        [0.0],
        True,
        [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
    )


def test_a_compiled_model_is_saved_under_its_own_names_and_restored(tmp_path):
    inner = nn.Sequential(nn.Linear(2, 1))
    inner[0] = torch.compile(inner[0], backend="eager")
    model = torch.compile(inner, backend="eager")
    scripted([0.1, 0.5], SaveBest(tmp_path, restore=True), model=model)
    assert (sorted(load_file(tmp_path / "best.safetensors")), inner.state_dict()["0._orig_mod.weight"].tolist()) == (
        ["0.bias", "0.weight"],
        [[0.0, 0.0]],
    )


class Remembering(nn.Linear):
    def get_extra_state(self):
        return {"words": ["not", "a", "tensor"]}

    def set_extra_state(self, state):
        self.given = state


def test_what_is_not_a_tensor_stays_in_the_model(tmp_path):
    model = Remembering(2, 1)
    scripted([0.1, 0.5], SaveBest(tmp_path, restore=True), model=model)
    assert (sorted(load_file(tmp_path / "best.safetensors")), model.given, model.weight.tolist()) == (
        ["bias", "weight"],
        {"words": ["not", "a", "tensor"]},
        [[0.0, 0.0]],
    )


def test_eight_bit_floats_can_be_saved(tmp_path):
    model = nn.Linear(2, 1)
    model.register_buffer("small", torch.ones(2).to(torch.float8_e4m3fn))
    scripted([0.5], SaveBest(tmp_path), model=model)
    assert load_file(tmp_path / "best.safetensors")["small"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(("restore", "weight"), [(True, 1.0), (False, 2.0)])
def test_restore_ends_training_with_the_best_weights(tmp_path, restore, weight):
    model = nn.Linear(2, 1)
    scripted([0.9, 0.3, 0.5], SaveBest(tmp_path, restore=restore), model=model)
    assert model.weight.unique().tolist() == [weight]


def test_a_run_that_was_stopped_is_restored_too(tmp_path):
    model = nn.Linear(2, 1)
    run = Run(model=model, callbacks=[SaveBest(tmp_path, restore=True)])
    with loop.fit(run):
        for epoch in loop.epochs(run, 9):
            nn.init.constant_(model.weight, epoch)
            for _ in loop.evaluate(run, [epoch]):
                run.log({"loss": epoch})
            if epoch == 2:
                run.stop("enough")
    assert (run.status, model.weight.unique().tolist()) == ("stopped", [0.0])


def test_with_nothing_saved_there_is_nothing_to_restore(tmp_path):
    model = nn.Linear(2, 1)
    scripted([math.nan], SaveBest(tmp_path, restore=True), model=model, weights=[7.0])
    assert model.weight.unique().tolist() == [7.0]


def test_a_best_file_that_is_gone_is_an_error_that_says_so(tmp_path):
    best = SaveBest(tmp_path, restore=True)
    best.load_state_dict({"best_value": 0.1, "best_epoch": 4})
    with pytest.raises(
        LooplineError, match=r"best.safetensors is gone; it held the weights of epoch 4, with val/loss 0.1"
    ):
        scripted([0.5] * 6, best, begin=5)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_resumed_run_keeps_what_the_uncut_one_keeps(tmp_path, cut):
    values = [0.5, 0.2, 0.4, 0.3]
    uncut = SaveBest(tmp_path / "uncut")
    scripted(values, uncut)
    first, second = SaveBest(tmp_path / "cut"), SaveBest(tmp_path / "cut")
    scripted(values, first, epochs=cut)
    second.load_state_dict(first.state_dict())
    scripted(values, second, begin=cut)
    assert (epochs_in(tmp_path / "cut"), second.state_dict()) == (epochs_in(tmp_path / "uncut"), uncut.state_dict())


def test_a_second_run_from_scratch_begins_with_nothing(tmp_path):
    best = SaveBest(tmp_path)
    scripted([0.1], best)
    scripted([0.9, 0.8], best)
    assert (epochs_in(tmp_path)["best.safetensors"], best.best_value) == ([1.0], 0.8)


def test_on_several_ranks_the_first_writes_and_all_are_restored(tmp_path):
    def rank(comm):
        model = nn.Linear(2, 1)
        folder = tmp_path / f"rank{comm.rank}"
        folder.mkdir()
        scripted([0.1, 0.5], SaveBest(folder, restore=True), model=model, comm=comm)
        return len(list(folder.iterdir())), model.weight.unique().tolist()

    assert run_ranks(rank, 2) == [(2, [0.0]), (0, [0.0])]


def test_weights_that_are_spread_over_processes_are_refused_at_the_start(tmp_path):
    strategy = Single("cpu")
    strategy.traits = Traits(shards_parameters=True)
    with pytest.raises(LooplineError, match="spreads the weights"):
        scripted([0.5], SaveBest(tmp_path), strategy=strategy, parts=Parts(nn.Linear(1, 1)))


def test_the_folder_is_made_when_training_starts(tmp_path):
    best = SaveBest(tmp_path / "a" / "b")
    made = (tmp_path / "a").exists()
    scripted([0.5], best)
    assert (made, len(epochs_in(tmp_path / "a" / "b"))) == (False, 2)


def test_a_metric_that_never_came_is_an_error_at_the_end(tmp_path):
    with pytest.raises(MissingMetric):
        scripted([None], SaveBest(tmp_path))


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(NotADirectoryError, match="taken"):
        SaveBest(tmp_path / "taken")


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mode='best'"):
        SaveBest(tmp_path, mode="best")
