"""Trying out whether a loader can be gone on with from anywhere."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from loopline.core.errors import BadLoader
from loopline.data import Exact, Placed, Report, check_resumable

TRIED = (
    "at batch 0",
    "in the middle of an epoch",
    "before the last batch",
    "after the last batch",
    "at the edge of an epoch",
)
TWICE = "twice within one epoch"
KEPT = "after a pass that was broken off, with the same persistent workers"


class Noisy(Dataset):
    def __init__(self, n=12):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


class OwnGenerator(Noisy):
    def __init__(self, n=12):
        super().__init__(n)
        self.rng = np.random.default_rng(1)

    def __getitem__(self, index):
        return torch.tensor([index, self.rng.random()])


class Shuffling:
    """A loader that keeps its place, reads ahead, and shuffles; whatever a subclass breaks."""

    def __init__(self, batches=9):
        self.batches = batches
        self.epoch = 0
        self.index = 0

    def order(self):
        return random.Random(self.epoch).sample(range(self.batches), self.batches)

    def __iter__(self):
        ahead = list(enumerate(self.order()))[self.index :]
        for place, batch in ahead:
            self.index = place + 1
            yield torch.tensor([self.epoch, batch])
        self.epoch, self.index = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state):
        self.epoch, self.index = state["epoch"], state["index"]


class Sized(Shuffling):
    def __len__(self):
        return self.batches


class ForgetsWhatItReadAhead(Shuffling):
    """Counts batches when they are read, two before they are handed out."""

    def state_dict(self):
        return {"epoch": self.epoch, "index": min(self.index + 2, self.batches) if self.index else 0}


class ShufflesAnew(Shuffling):
    def order(self):
        return random.sample(range(self.batches), self.batches)


class OffByOne(Shuffling):
    def load_state_dict(self, state):
        super().load_state_dict(state | {"index": max(0, state["index"] - 1)})


class CountsFromWhereItWasResumed(Shuffling):
    """Right after the first resume, wrong after the second."""

    resumed = 0

    def state_dict(self):
        return {"epoch": self.epoch, "index": self.index - self.resumed}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.resumed = state["index"]


class ForgetsTheEpoch(Shuffling):
    def load_state_dict(self, state):
        super().load_state_dict(state | {"epoch": 0})


class LosesTheEdge(Shuffling):
    """At the end of an epoch it believes that it has not begun it."""

    def load_state_dict(self, state):
        super().load_state_dict(state | {"index": state["index"] % self.batches})


class LoadsNothing(Shuffling):
    def load_state_dict(self, state):
        pass


class PlaceIgnored(Exact):
    def start_at(self, epoch, index):
        return super().start_at(epoch, 0)


class PlaceOffByOne(Exact):
    def start_at(self, epoch, index):
        return super().start_at(epoch, index + bool(index))


def plain(**arguments):
    return DataLoader(Noisy(), **({"batch_size": 2, "shuffle": True} | arguments))


@dataclass
class Sample:
    x: torch.Tensor
    name: str
    value: float


@pytest.mark.parametrize(
    "make",
    [
        lambda: Exact(plain(), 7),
        lambda: Exact(plain(num_workers=2), 7),
        lambda: Placed(Exact(plain(), 7), torch.device("cpu")),
        lambda: Shuffling(),
        lambda: Sized(),
        lambda: [torch.zeros(2), {"a": (1, "b", None)}, np.arange(3), Sample(torch.ones(1), "n", 0.5), {1, 2}, b"x"],
        lambda: DataLoader(list(range(9)), batch_size=2),
    ],
    ids=["exact", "exact in workers", "placed", "by state", "by state, sized", "a list", "without randomness"],
)
@pytest.mark.parametrize("anew", [False, True], ids=["one loader", "a new one each time"])
def test_a_loader_that_can_be_gone_on_with_passes(make, anew):
    report = check_resumable(make if anew else make())
    assert (report.tried, len(report.not_tried)) == ((*TRIED, TWICE), 1)


def test_a_loader_with_persistent_workers_is_tried_with_them():
    report = check_resumable(Exact(plain(num_workers=1, persistent_workers=True), 7))
    assert report == Report((*TRIED, TWICE, KEPT), (), 6)


def test_an_epoch_of_one_batch_is_interrupted_once_at_most():
    report = check_resumable([torch.zeros(1)])
    assert (report.tried, report.batches) == (TRIED, 1)


BROKEN = {
    ForgetsWhatItReadAhead: "Resumed in the middle of an epoch, batch 4 of epoch 0 is another one",
    ShufflesAnew: "Resumed in the middle of an epoch, batch 4 of epoch 0 is another one",
    OffByOne: "Resumed in the middle of an epoch, batch 4 of epoch 0 is another one",
    CountsFromWhereItWasResumed: "Resumed twice within one epoch, batch 6 of epoch 0 is another one",
    ForgetsTheEpoch: "Resumed at the edge of an epoch, batch 0 of epoch 1 is another one",
    LosesTheEdge: "Resumed after the last batch, batch 9 of epoch 0 is one too many",
    LoadsNothing: "Resumed in the middle of an epoch, batch 4 of epoch 0 is another one",
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_loader_whose_state_is_broken_is_found_out_with_the_first_batch_that_differs(kind):
    with pytest.raises(BadLoader, match=f"{kind.__name__} does not go on .*{BROKEN[kind]}.*Its state_dict must count"):
        check_resumable(kind)


@pytest.mark.parametrize(
    "kind", [k for k in BROKEN if k not in (CountsFromWhereItWasResumed,)], ids=lambda k: k.__name__
)
def test_it_is_found_out_too_where_one_loader_is_used_again_and_again(kind):
    with pytest.raises(BadLoader, match=kind.__name__):
        check_resumable(kind())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PlaceIgnored(plain(), 7), "batch 3 of epoch 0 is another one. What start_at"),
        (lambda: PlaceOffByOne(plain(), 7), "batch 3 of epoch 0 is another one. What start_at"),
        (lambda: Exact(DataLoader(OwnGenerator(), batch_size=2), 7), "not from generators of its own"),
        (lambda: plain(), "batch 3 of epoch 0 is another one. It has no position. Wrap a DataLoader in Exact"),
        (lambda: plain(shuffle=False, num_workers=2), "It has no position"),
        (lambda: iter([1, 2, 3, 4]), "batch 0 of epoch 0 is missing"),
    ],
    ids=["place ignored", "off by one", "its own generator", "shuffled anew", "random in workers", "read once"],
)
def test_a_loader_that_cannot_be_gone_on_with_is_told_what_to_do(make, said):
    with pytest.raises(BadLoader, match=said):
        check_resumable(make())


def test_a_loader_with_nothing_in_it_is_refused():
    with pytest.raises(BadLoader, match="list gave no batch"):
        check_resumable([])


def test_an_error_of_the_loader_is_told_with_the_attempt():
    class Fails(Shuffling):
        def load_state_dict(self, state):
            raise KeyError("epoch")

    with pytest.raises(KeyError) as failed:
        check_resumable(Fails())
    assert failed.value.__notes__[0].endswith("Fails was resumed at batch 0")


def test_the_edge_of_an_epoch_needs_two_epochs():
    with pytest.raises(ValueError, match="2 epochs at least"):
        check_resumable([1], epochs=1)


def test_the_check_leaves_the_streams_where_they_were():
    before = random.getstate(), torch.get_rng_state().tolist()
    check_resumable(Exact(plain(), 7))
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
