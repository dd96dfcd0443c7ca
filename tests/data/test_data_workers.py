"""Exact loaders whose samples are read by worker processes, some of which fail."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import signal
import time
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from loopline.core.errors import LooplineError
from loopline.data import Exact, keyed

FULL = bool(os.environ.get("LOOPLINE_FULL"))
COUNTS = (0, 1, 2, 4)
ALL = [(save, resume) for save in COUNTS for resume in COUNTS]
PAIRS = ALL if FULL else [(0, 2), (2, 1), (4, 0)]
LOST = (RuntimeError, ConnectionError, EOFError)  # which one is a matter of microseconds

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # four workers on a machine with two cores
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # torch's files, at a signal
]


class Noisy(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        self.trouble(index)
        return torch.tensor([index, random.gauss(), np.random.randn(), torch.randn(()).item()], dtype=torch.float64)

    def trouble(self, index):
        pass


class Raises(Noisy):
    def trouble(self, index):
        if index == 9:
            raise LookupError("nine is missing")


class Dies(Noisy):
    def trouble(self, index):
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Noisy):
    def trouble(self, index):
        if index == 9:
            time.sleep(600)


def collate(samples):
    return torch.stack([*samples, torch.rand(4, dtype=torch.float64)])


def exact(workers, dataset=None, **arguments):
    given = {"batch_size": 3, "shuffle": True, "num_workers": workers, "collate_fn": collate} | arguments
    return Exact(DataLoader(dataset or Noisy(), **given), 7)


def read(batches):
    return [batch.numpy().tobytes() for batch in batches]


def workers():
    return {child.pid for child in multiprocessing.active_children()}


def failure(loader, epoch=0):
    """What a pass fails with: its type, its words and its notes; an error that is kept would keep the workers."""
    try:
        list(loader.start_at(epoch, 0))
    except Exception as error:  # noqa: BLE001 - whatever it is
        return type(error), str(error), "\n".join(getattr(error, "__notes__", []))
    raise AssertionError("the pass did not fail")


@pytest.fixture(scope="module")
def uncut():
    return [read(exact(0).start_at(epoch, 0)) for epoch in range(4)]


@pytest.mark.parametrize(("save", "resume"), PAIRS)
def test_a_run_goes_on_with_any_number_of_workers(save, resume, uncut):
    before = read(islice(exact(save).start_at(1, 0), 3))
    assert before + read(exact(resume).start_at(1, 3)) == uncut[1]


def test_without_its_keys_another_number_of_workers_would_be_seen(monkeypatch, uncut):
    monkeypatch.setattr(keyed, "seed_streams", lambda *path: None)
    assert read(exact(1).start_at(1, 0)) != read(exact(2).start_at(1, 0))


@pytest.mark.parametrize("ahead", [1, 5])
def test_how_far_is_read_ahead_changes_nothing(ahead, uncut):
    assert read(exact(2, prefetch_factor=ahead).start_at(1, 3)) == uncut[1][3:]


def test_persistent_workers_read_every_epoch_as_it_is(uncut):
    kept = exact(2, persistent_workers=True)
    assert [read(kept) for _ in range(4)] == uncut


def test_persistent_workers_can_be_sent_anywhere_in_the_middle_of_a_pass(uncut):
    kept = exact(2, persistent_workers=True)
    begun = [read(islice(kept.start_at(epoch, index), 2)) for epoch, index in ((0, 0), (2, 3), (0, 4), (0, 4), (1, 1))]
    assert begun == [uncut[epoch][index : index + 2] for epoch, index in ((0, 0), (2, 3), (0, 4), (0, 4), (1, 1))]


def test_persistent_workers_follow_a_seed_that_is_taken_over(uncut):
    kept = Exact(DataLoader(Noisy(), 3, shuffle=True, num_workers=1, collate_fn=collate, persistent_workers=True))
    first = read(kept.start_at(0, 0))
    kept.load_state_dict(exact(0).state_dict())
    assert (first != uncut[0], read(kept.start_at(0, 0))) == (True, uncut[0])


def test_a_pass_whose_persistent_workers_went_to_another_one_says_so():
    kept = exact(1, persistent_workers=True)
    first = kept.start_at(0, 0)
    next(first)
    kept.start_at(1, 0)
    with pytest.raises(LooplineError, match="Another pass over this loader was begun"):
        next(first)


def test_batches_come_in_their_order_even_if_the_loader_does_not_insist(uncut):
    assert read(exact(2, in_order=False).start_at(0, 0)) == uncut[0]


def test_workers_leave_the_streams_of_the_process_where_they_were():
    def standing():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = standing()
    list(exact(2))
    assert standing() == before


class Open(Noisy):
    name = "closed"

    def __getitem__(self, index):
        return self.name


def open_it(worker):
    info = get_worker_info()
    info.dataset.name = f"opened by {worker} of {info.num_workers}"


def test_a_function_that_begins_a_worker_finds_the_dataset_there():
    loader = DataLoader(Open(), batch_size=11, num_workers=2, worker_init_fn=open_it)
    assert list(Exact(loader, 7)) == [["opened by 0 of 2"] * 11, ["opened by 1 of 2"] * 11]


def test_a_sample_that_fails_in_a_worker_keeps_its_type_and_says_where_it_stands():
    loader = exact(2, Raises())
    kind, words, _ = failure(loader, 3)
    said = re.search(r"reading dataset\[9\]: epoch 3, position (\d+) in it, in worker [01]\.", words)
    assert (kind, said is not None) == (LookupError, True), words
    with pytest.raises(LookupError, match="nine is missing"):
        loader.sample(3, int(said[1]))


def test_a_sample_that_fails_in_a_worker_does_not_keep_the_workers_alive():
    gc.collect()
    before = workers()
    gc.disable()
    try:
        failure(exact(2, Raises()))
        assert workers() - before == set()
    finally:
        gc.enable()


def test_a_sample_is_read_alone_as_a_worker_read_it():
    rows = [row for batch in exact(2).start_at(1, 0) for row in batch[:-1]]
    assert [exact(0).sample(1, position).tolist() for position in range(22)] == [row.tolist() for row in rows]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_is_killed_ends_the_pass_with_its_place_and_advice(persistent):
    before, began = workers(), time.monotonic()
    kind, _, notes = failure(exact(2, Dies(), persistent_workers=persistent), 3)
    assert issubclass(kind, LOST)
    assert re.search(r"waiting for batch \d of epoch 3, position \d+ in it\. .*shared memory.*lower one of", notes)
    assert (workers() - before, time.monotonic() - began < 30) == (set(), True)


def test_after_a_worker_was_killed_the_next_pass_has_new_ones(uncut):
    loader = exact(1, Dies(), persistent_workers=True, shuffle=False)
    failure(loader)
    assert read(loader.start_at(0, 4)) == read(exact(0, shuffle=False).start_at(0, 4))


def test_a_worker_that_hangs_ends_the_pass_with_its_place_and_advice():
    before, began = workers(), time.monotonic()
    kind, words, notes = failure(exact(1, Hangs(), shuffle=False, timeout=1))
    assert (kind, words) == (RuntimeError, "DataLoader timed out after 1 seconds")
    assert notes.startswith("waiting for batch 3 of epoch 0, position 9 in it. ")
    assert (workers() - before, time.monotonic() - began < 30) == (set(), True)


def test_an_error_of_a_sample_is_not_taken_for_a_dead_worker():
    class Confused(Noisy):
        def trouble(self, index):
            raise RuntimeError("DataLoader is a word in this message")

    kind, words, notes = failure(exact(1, Confused()))
    assert (kind, "is a word in this message" in words, notes) == (RuntimeError, True, "")
