"""A7, A8: whatever happens to the bytes of a checkpoint, a run goes on from one that is intact, and says why."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import whole
from whole import BEFORE, NEWEST, OLDEST

from loopline.checkpoint import Checkpointer
from loopline.checkpoint.shelf import Shelf
from loopline.core.errors import Damaged, NoIntactCheckpoint
from loopline.stores import LocalStore

FULL = os.environ.get("LOOPLINE_FULL") == "1"
CUTS = 64
FLIPS = 1000 if FULL else 200
FLIPPED_RUNS = 50 if FULL else 5
MANIFEST = "MANIFEST.json"
FILES = [
    MANIFEST,
    "global.json",
    "global.safetensors",
    "rank-00000.json",
    "rank-00000.safetensors",
    "tensors/model.safetensors",
    "tensors/optimizer-0.safetensors",
]


@pytest.fixture
def went_on(folder, caplog):
    """Trains to the end, and gives what that came to, from which step it went on, and what was set aside."""

    def run(store=None):
        with caplog.at_level(logging.INFO, "loopline"):
            found = whole.train(store or folder, whole.WHOLE)
        begun = [record.args[0][:12] for record in caplog.records if record.msg.startswith("Going on from checkpoint")]
        return found, begun, set_aside(folder)

    return run


def set_aside(folder):
    aside = folder / "quarantine"
    return sorted(path.name[:12] for path in aside.iterdir()) if aside.exists() else []


def flip(data, position):
    flipped = bytearray(data)
    flipped[position // 8] ^= 1 << position % 8
    return bytes(flipped)


def flips(paths, count, seed=0):
    """Bits drawn from all bytes of some files, each as likely as any other."""
    bits = [(path, position) for path in paths for position in range(8 * path.stat().st_size)]
    return random.Random(seed).sample(bits, count)


def ruin(checkpoint):
    (checkpoint / "tensors" / "model.safetensors").write_bytes(b"ruined")


def test_a_checkpoint_has_the_files_that_are_damaged_here(newest):
    assert [path.relative_to(newest).as_posix() for path in whole.files(newest)] == FILES


def test_undamaged_a_run_goes_on_from_the_newest(went_on, uncut):
    assert went_on() == (uncut, [NEWEST], [])


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_off_at_any_64th_is_noticed_and_named(folder, newest, name):
    data = (newest / name).read_bytes()
    reasons = []
    for part in range(CUTS):
        (newest / name).write_bytes(data[: len(data) * part // CUTS])
        reasons.append(whole.refused(LocalStore(folder), newest.name) or "")
    named = f"manifest of checkpoint {newest.name}" if name == MANIFEST else f"{newest.name}/{name} has "
    assert [reason for reason in reasons if named not in reason] == []


@pytest.mark.parametrize("part", range(CUTS) if FULL else (0, 63))
@pytest.mark.parametrize("name", FILES)
def test_a_run_whose_newest_checkpoint_is_cut_off_goes_on_from_the_one_before(newest, uncut, went_on, name, part):
    os.truncate(newest / name, (newest / name).stat().st_size * part // CUTS)
    assert went_on() == (uncut, [BEFORE], [NEWEST])


@pytest.mark.parametrize("name", FILES[1:])
def test_a_run_whose_newest_checkpoint_lacks_a_file_goes_on_from_the_one_before(newest, uncut, went_on, name, caplog):
    (newest / name).unlink()
    assert went_on() == (uncut, [BEFORE], [NEWEST])
    assert f"{newest.name}/{name} is missing" in caplog.text


def test_a_checkpoint_without_its_manifest_was_never_one(folder, newest, uncut, went_on, caplog):
    (newest / MANIFEST).unlink()
    assert (went_on(), newest.exists()) == ((uncut, [BEFORE], []), False)
    assert f"{newest.name} was begun and never finished" in caplog.text


@pytest.mark.parametrize("name", FILES)
def test_a_run_whose_newest_checkpoint_has_a_file_of_another_goes_on_from_the_one_before(
    folder, newest, uncut, went_on, name, caplog
):
    other = whole.checkpoints(folder)[BEFORE]
    shutil.copyfile(other / name, newest / name)
    assert went_on() == (uncut, [BEFORE], [NEWEST])
    reason = f"is that of {other.name}" if name == MANIFEST else f"{newest.name}/{name} "
    assert reason in caplog.text


def test_a_run_goes_back_as_far_as_it_must(folder, uncut, went_on):
    found = whole.checkpoints(folder)
    ruin(found[NEWEST])
    (found[BEFORE] / "rank-00000.json").unlink()
    assert went_on() == (uncut, [OLDEST], [BEFORE, NEWEST])


def test_in_a_store_without_a_folder_a_damaged_one_is_passed_over(folder, newest, uncut, went_on):
    ruin(newest)
    assert went_on(whole.in_memory(folder)) == (uncut, [BEFORE], [])


def test_a_damaged_checkpoint_can_be_looked_at_where_it_was_set_aside(folder, newest, went_on):
    ruin(newest)
    before = {path.relative_to(newest): path.read_bytes() for path in whole.files(newest)}
    went_on()
    aside = folder / "quarantine" / newest.name
    assert {path.relative_to(aside): path.read_bytes() for path in whole.files(aside)} == before


def test_a_checkpoint_that_was_brought_back_damaged_is_set_aside_again(folder, newest, went_on):
    ruin(newest)
    went_on()
    shutil.copytree(folder / "quarantine" / newest.name, newest)
    went_on()
    assert set_aside(folder) == [NEWEST, NEWEST]


def test_a_run_without_an_intact_checkpoint_names_each_and_does_not_begin_anew(folder):
    for checkpoint in whole.checkpoints(folder).values():
        ruin(checkpoint)
    with pytest.raises(NoIntactCheckpoint) as raised:
        whole.train(folder, whole.WHOLE)
    said = str(raised.value)
    assert (raised.value.code, [step in said for step in (OLDEST, BEFORE, NEWEST)]) == (74, [True] * 3)


def test_a_run_without_an_intact_checkpoint_does_not_begin_anew_when_it_is_started_again(folder):
    for checkpoint in whole.checkpoints(folder).values():
        ruin(checkpoint)
    for _ in range(3):
        with pytest.raises(NoIntactCheckpoint):
            whole.train(folder, whole.WHOLE)


def test_a_process_without_an_intact_checkpoint_leaves_with_74(folder):
    for checkpoint in whole.checkpoints(folder).values():
        ruin(checkpoint)
    program = f"import whole; whole.train({str(folder)!r}, whole.WHOLE)"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, "model.safetensors has 6 bytes" in ended.stderr) == (74, True)


def test_a_run_that_is_told_to_begin_anew_does_so_whatever_is_damaged(folder, uncut):
    for checkpoint in whole.checkpoints(folder).values():
        ruin(checkpoint)
    assert whole.train(folder, whole.WHOLE, resume="never") == uncut


def test_restoring_a_damaged_checkpoint_by_its_name_is_refused_before_anything_is_touched(folder, newest):
    from loopline import Run, loop

    ruin(newest)
    model = torch.nn.Linear(1, 1)
    weight = model.weight.detach().clone()
    checkpointer = Checkpointer(folder)
    with loop.fit(Run(model=model)) as run, pytest.raises(Damaged, match=r"model\.safetensors has 6 bytes"):
        checkpointer.restore(run, newest.name)
    assert torch.equal(model.weight, weight)


def test_the_newest_that_is_intact_is_told_without_a_run(folder, newest):
    ruin(newest)
    assert Checkpointer(folder).latest().name[:12] == BEFORE


def test_every_flipped_bit_of_a_checkpoint_is_noticed(newest, folder):
    store = LocalStore(folder)
    silent = []
    for path, position in flips(whole.files(newest), FLIPS):
        data = path.read_bytes()
        path.write_bytes(flip(data, position))
        if whole.refused(store, newest.name) is None or whole.damage(store, newest.name) is None:
            silent.append((path.name, position))
        path.write_bytes(data)
    assert silent == []


@pytest.mark.parametrize("number", range(FLIPPED_RUNS))
def test_a_run_whose_newest_checkpoint_has_a_flipped_bit_goes_on_from_the_one_before(newest, uncut, went_on, number):
    ((path, position),) = flips(whole.files(newest), 1, seed=number)
    path.write_bytes(flip(path.read_bytes(), position))
    assert went_on() == (uncut, [BEFORE], [NEWEST])


def test_a_flipped_bit_in_the_format_of_a_manifest_is_damage_and_not_a_later_version(newest, uncut, went_on):
    data = (newest / MANIFEST).read_bytes()
    (newest / MANIFEST).write_bytes(data.replace(b'"format":[1,', b'"format":[9,'))
    assert went_on() == (uncut, [BEFORE], [NEWEST])


def test_a_flipped_bit_in_a_pin_changes_nothing_that_is_trained(folder, uncut, went_on):
    checkpointer = Checkpointer(folder)
    checkpointer.pin("best", checkpointer.latest())
    pin = folder / "pins" / "best.json"
    data = pin.read_bytes()
    pinned = []
    for position in range(0, 8 * len(data), 1 if FULL else 16):
        pin.write_bytes(flip(data, position))
        pinned.append(set(Shelf(LocalStore(folder)).pins().values()))
    assert {len(names) for names in pinned} <= {0, 1}
    assert went_on() == (uncut, [NEWEST], [])


def test_every_flipped_bit_in_the_identity_of_a_run_is_noticed(folder):
    path = folder / "run.json"
    data = path.read_bytes()
    silent = []
    for position in range(0, 8 * len(data), 1 if FULL else 7):
        path.write_bytes(flip(data, position))
        with suppress(Damaged):
            silent.append((position, Checkpointer(folder).latest()))
    assert silent == []


def test_the_identity_of_a_run_cut_off_at_any_64th_is_noticed(folder):
    path = folder / "run.json"
    data = path.read_bytes()
    silent = []
    for part in range(CUTS):
        path.write_bytes(data[: len(data) * part // CUTS])
        with suppress(Damaged):
            silent.append((part, Checkpointer(folder).latest()))
    assert silent == []


def test_a_run_whose_identity_is_damaged_does_not_begin_anew(folder):
    (folder / "run.json").write_bytes((folder / "run.json").read_bytes()[:-20])
    for _ in range(2):
        with pytest.raises(Damaged, match=r"run\.json"):
            whole.train(folder, whole.WHOLE)


def test_a_run_whose_identity_is_lost_goes_on_from_the_newest(folder, uncut, went_on):
    (folder / "run.json").unlink()
    assert went_on() == (uncut, [NEWEST], [])


def test_a_reader_of_the_identity_that_does_not_ask_for_its_hash_is_caught(folder):
    """The check itself: most flipped bits leave it JSON, and many the id of another run."""
    data = (folder / "run.json").read_bytes()
    taken = []
    for position in range(8 * len(data)):
        with suppress(ValueError, KeyError):
            taken.append(json.loads(flip(data, position))["run_id"])
    assert len(set(taken)) > 100


def test_with_verify_size_a_flipped_bit_in_a_tensor_is_taken_as_its_documentation_says(folder, newest):
    path = newest / "tensors" / "model.safetensors"
    path.write_bytes(flip(path.read_bytes(), 8 * path.stat().st_size - 1))
    assert whole.train(folder, whole.SAVED, verify="size") is not None


def test_a_reader_that_does_not_compare_hashes_is_caught(newest, folder):
    """The check itself: without hashes most flipped bits would be taken silently, and some would not load at all."""
    store, silent = LocalStore(folder), 0
    for path, position in flips(whole.files(newest)[1:], 100):
        data = path.read_bytes()
        path.write_bytes(flip(data, position))
        silent += whole.refused(store, newest.name, verify=False) is None
        path.write_bytes(data)
    assert 20 < silent < 100


def test_a_run_that_begins_anew_is_caught(folder, uncut, went_on):
    """The check itself: a run that goes on from nowhere says so, though it comes to the same weights."""
    shutil.rmtree(folder / "checkpoints")
    assert went_on() == (uncut, [], [])
