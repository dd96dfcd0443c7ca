"""A3: after a power cut at any moment what was committed is there, and nothing torn is loaded."""

from __future__ import annotations

import io
import os
import random
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import whole
from states import recording, trees

from loopline.checkpoint import Checkpointer
from loopline.checkpoint.collect import load
from loopline.checkpoint.saving import Flight
from loopline.checkpoint.shelf import Attempt, Shelf
from loopline.core.errors import LooplineError
from loopline.stores import LocalStore, MemoryStore, local

FULL = bool(os.environ.get("LOOPLINE_FULL"))
MOST = 400 if FULL else 24  # outcomes of one moment


def two_saves(folder: Path, weaken=None):
    """Save twice, with retention of one, and give what was asked of the system, marked where a commit was reported."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, recording(patch) as found:
        if weaken is not None:
            weaken(patch)
        root = found.node(str(folder))
        whole.two_saves(LocalStore(folder), found.note)
    return found, root


def violation(marks, tree) -> str | None:
    """What is wrong with what a power cut left, if anything is."""
    store = MemoryStore()
    for path, data in tree.items():
        if not any(part.startswith(".") for part in path.split("/")):
            store.put(path, io.BytesIO(data))
    checkpointer = Checkpointer(store)
    committed = max((step for (step,) in marks), default=0)
    try:
        stored, unreadable = checkpointer.shelf.stored()
        if not stored:
            return f"nothing there, and step {committed} was committed" if committed else None
        newest = stored[-1]
        loaded = load(newest, checkpointer.codec, 0)
    except LooplineError as error:
        return f"{type(error).__name__}: {error}"
    if unreadable:
        return f"unreadable: {unreadable}"
    step = newest.manifest.step
    if step < committed:
        return f"step {step} is the newest, and step {committed} was committed"
    weight = loaded.sections["model"]["weight"]
    return None if torch.equal(weight, torch.full((2, 2), float(step))) else f"step {step} has the wrong weights"


def violations(folder: Path, weaken=None) -> tuple[int, list[str]]:
    found, root = two_saves(folder, weaken)
    states, wrong = 0, []
    for marks, tree in trees(found, root, MOST, random.Random(0)):
        states += 1
        if said := violation(marks, tree):
            wrong.append(said)
    return states, wrong


def test_whatever_a_power_cut_leaves_the_newest_commit_is_there_and_whole(tmp_path):
    states, wrong = violations(tmp_path / "run")
    print(f"{states} states")
    assert (wrong, states > 100) == ([], True)


def no_file_is_synced(patch):
    real = os.fsync
    patch.setattr(os, "fsync", lambda fd: None if stat.S_ISREG(os.fstat(fd).st_mode) else real(fd))


def no_folder_is_synced(patch):
    real = os.fsync
    patch.setattr(os, "fsync", lambda fd: None if stat.S_ISDIR(os.fstat(fd).st_mode) else real(fd))


def only_the_last_folder_is_synced(patch):
    patch.setattr(local._Draft, "sync_folders", lambda draft: local._sync_folder(draft.folder))


def the_manifest_comes_first(patch):
    write = Flight._write

    def _write(flight, attempt, codec, owner):
        rehearsed = Attempt(MemoryStore(), attempt.name, attempt.algorithm)
        write(flight, rehearsed, codec, None)
        attempt.files.update(rehearsed.files)
        attempt.commit(replace(flight.draft, files=attempt.files))
        for path in attempt.files:
            key = f"checkpoints/{attempt.name}/{path}"
            attempt.store.put(key, rehearsed.store.open(key))

    patch.setattr(Flight, "_write", _write)


def the_old_one_goes_before_the_new_one_comes(patch):
    write = Flight._write

    def _write(flight, attempt, codec, owner):
        shelf = Shelf(attempt.store)
        for name in shelf.committed():
            shelf.remove(name)
        write(flight, attempt, codec, owner)

    patch.setattr(Flight, "_write", _write)


@pytest.mark.parametrize(
    "weaken",
    [
        no_file_is_synced,
        no_folder_is_synced,
        only_the_last_folder_is_synced,
        the_manifest_comes_first,
        the_old_one_goes_before_the_new_one_comes,
    ],
)
def test_a_weaker_protocol_is_found_out(weaken, tmp_path):
    _, wrong = violations(tmp_path / "run", weaken)
    assert wrong
