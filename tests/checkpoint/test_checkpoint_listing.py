import pytest
import torch
from safetensors.torch import load_file

from loopline import Every, Trainer
from loopline.checkpoint import All, Checkpointer, Dcp, Whole, export_weights, list_checkpoints, listing
from loopline.checkpoint.listing import find
from loopline.checkpoint.shelf import Shelf
from loopline.core.errors import LooplineError, NoIntactCheckpoint, NoSuchKey
from loopline.stores import LocalStore, MemoryStore
from loopline.testing import TinyTask, tiny_loader


def trained(store, *, epochs=2, codec=None):
    saving = Checkpointer(store, when=Every(epochs=1), keep=All(), codec=codec, asynchronous=False)
    task = TinyTask()
    Trainer(task, checkpoint=saving, seed=1, progress=False).fit(tiny_loader(2), epochs=epochs)
    return saving, task.model


class Tidied(LocalStore):
    """A folder in which a checkpoint is removed by somebody else at the moment when one of its files is opened."""

    step, file = 4, ""

    def open(self, key):
        if key.startswith(f"checkpoints/{self.step:012d}") and key.endswith(self.file):
            Shelf(LocalStore(self.folder)).remove(key.split("/")[1])
        return super().open(key)


def tidied(folder, step, file):
    store = Tidied(folder)
    store.step, store.file = step, file
    return store


def steps(found):
    return [(one.step, one.state) for one in found]


@pytest.mark.parametrize("file", ["MANIFEST.json", "global.json", "model.safetensors"])
def test_what_is_removed_while_it_is_looked_at_is_not_listed(tmp_path, file):
    trained(tmp_path)
    found = list_checkpoints(tidied(tmp_path, 4, file), verify=True)
    assert (steps(found), [one.newest for one in found]) == ([(2, "committed")], [True])


def test_without_a_second_look_a_removed_one_would_seem_damaged(tmp_path, monkeypatch):
    trained(tmp_path)
    monkeypatch.setattr(listing, "is_there", lambda stored: True)
    assert steps(list_checkpoints(tidied(tmp_path, 4, "global.json"), verify=True)) == [
        (2, "committed"),
        (4, "damaged"),
    ]


class Overtaken(LocalStore):
    """A folder whose only checkpoint is followed by the next, and removed, between listing and reading."""

    overtaken = False

    def open(self, key):
        if not self.overtaken:
            self.overtaken = True
            trained(self.folder)
            Shelf(LocalStore(self.folder)).remove(key.split("/")[1])
        return super().open(key)


def test_a_run_that_goes_on_meanwhile_is_never_listed_as_empty(tmp_path):
    trained(tmp_path, epochs=1)
    assert steps(list_checkpoints(Overtaken(tmp_path))) == [(4, "committed")]


@pytest.mark.parametrize("file", ["MANIFEST.json", "global.json", "model.safetensors"])
def test_the_latest_is_exported_although_the_newest_vanishes(tmp_path, file):
    trained(tmp_path / "run")
    written = export_weights(tidied(tmp_path / "run", 4, file), "latest", tmp_path / "w.safetensors")
    assert written.source.startswith("000000000002-")


def test_one_that_vanishes_while_it_is_exported_was_removed_and_not_damaged(tmp_path):
    trained(tmp_path / "run")
    with pytest.raises(NoSuchKey, match="was removed while it was read"):
        export_weights(tidied(tmp_path / "run", 4, "global.json"), "4", tmp_path / "w.safetensors")


@pytest.mark.parametrize("given", ["checkpointer", "store", "path"])
def test_weights_are_exported_from_whatever_knows_the_checkpoints(tmp_path, given):
    saving, model = trained(tmp_path / "run")
    source = {"checkpointer": saving, "store": saving.store, "path": str(tmp_path / "run")}[given]
    written = export_weights(source, "latest", tmp_path / "w.safetensors")
    model.load_state_dict(load_file(written.path))
    assert (written.names, written.left_out, written.size) == (
        ("weight", "bias"),
        {},
        (tmp_path / "w.safetensors").stat().st_size,
    )


@pytest.mark.parametrize("codec", [Whole, Dcp])
def test_weights_are_exported_whatever_codec_wrote_them(tmp_path, codec):
    saving, model = trained(MemoryStore(), codec=codec())
    weights = load_file(export_weights(saving.store, "latest", tmp_path / "w.safetensors").path)
    assert {name: value.tolist() for name, value in weights.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }


def test_a_ref_says_which_checkpoint_is_exported(tmp_path):
    saving, _ = trained(MemoryStore())
    ref = find(saving.store, "2").manifest.ref()
    assert export_weights(saving, ref, tmp_path / "w.safetensors").source == ref.name


def test_the_weights_of_an_early_step_are_those_it_had_then(tmp_path):
    saving, _ = trained(MemoryStore())
    _, model = trained(MemoryStore(), epochs=1)
    weights = load_file(export_weights(saving, "2", tmp_path / "w.safetensors").path)
    assert torch.equal(weights["weight"], model.weight)


def test_of_two_with_one_step_the_intact_and_younger_is_meant(tmp_path):
    saving, _ = trained(tmp_path, epochs=1)
    older = find(saving.store, "2").manifest
    Trainer(TinyTask(), checkpoint=saving, seed=1, progress=False).fit(tiny_loader(2), epochs=1, resume="never")
    names = {one.name: one.state for one in list_checkpoints(tmp_path)}
    assert (names[older.name], names[find(saving.store, "2").manifest.name]) == ("of another run", "committed")


def test_a_store_without_checkpoints_lists_none_and_exports_nothing(tmp_path):
    with pytest.raises(NoSuchKey, match="There is no committed checkpoint in memory"):
        export_weights(MemoryStore(), "latest", tmp_path / "w.safetensors")
    assert list_checkpoints(MemoryStore()) == []


def test_the_file_is_refused_before_anything_is_read(tmp_path):
    store = MemoryStore()
    store.keys = pytest.fail
    (tmp_path / "w.safetensors").mkdir()
    with pytest.raises(LooplineError, match="is a folder"):
        export_weights(store, "latest", tmp_path / "w.safetensors", force=True)


def test_if_no_weights_are_intact_that_is_told_and_not_that_there_are_none(tmp_path):
    saving, _ = trained(MemoryStore(), epochs=1)
    (key,) = [key for key in saving.store.keys("checkpoints/") if key.endswith("model.safetensors")]
    saving.store.delete(key)
    with pytest.raises(NoIntactCheckpoint, match=r"model\.safetensors is missing"):
        export_weights(saving, "latest", tmp_path / "w.safetensors")
