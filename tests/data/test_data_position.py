"""Beginning a loader in the middle of an epoch."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.data import DataLoader

from loopline import Progress, Run, loop
from loopline.data import Exact, Placed, exactly, start, state_of

META = torch.device("meta")


class ByPlace:
    """Can be begun anywhere; keeps a state besides."""

    def __init__(self):
        self.calls = []

    def start_at(self, epoch, index):
        self.calls.append(("start_at", epoch, index))
        return iter([f"batch {index} of epoch {epoch}"])

    def state_dict(self):
        return {"seed": 7}

    def load_state_dict(self, state):
        self.calls.append(("load", state))


class ByState:
    """Knows by its state where it stands."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 5:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self):
        return {"next": self.next} if self.next else {}

    def load_state_dict(self, state):
        self.next = state["next"]


class Reading:
    """Only ever begins at the beginning, and notes what it reads."""

    def __init__(self, *batches):
        self.batches = batches
        self.read = []

    def __iter__(self):
        for batch in self.batches:
            self.read.append(batch)
            yield batch


def test_a_loader_with_places_is_given_its_state_and_told_where_to_begin():
    loader = ByPlace()
    given = list(start(loader, 2, 3, {"seed": 7}))
    assert (given, loader.calls) == (["batch 3 of epoch 2"], [("load", {"seed": 7}), ("start_at", 2, 3)])


@pytest.mark.parametrize("state", [None, {}])
def test_without_a_state_a_loader_with_places_is_only_told_where_to_begin(state):
    loader = ByPlace()
    start(loader, 2, 3, state)
    assert loader.calls == [("start_at", 2, 3)]


def test_a_loader_that_knows_its_place_is_given_it_and_nothing_is_dropped():
    assert list(start(ByState(), 1, 3, {"next": 3})) == [3, 4]


def test_a_loader_that_knows_its_place_reads_up_to_it_where_no_state_was_kept():
    assert list(start(ByState(), 1, 3)) == [3, 4]


def test_any_other_loader_reads_up_to_the_place_at_once():
    loader = Reading(0, 1, 2, 3)
    batches = start(loader, 1, 2)
    at_once = list(loader.read)
    assert (at_once, list(batches)) == ([0, 1], [2, 3])


def test_a_state_that_a_loader_cannot_take_is_left_alone():
    assert list(start(Reading(0, 1, 2), 1, 2, {"next": 1})) == [2]


@pytest.mark.parametrize(
    ("loader", "state"),
    [
        (ByPlace(), {"seed": 7}),
        (ByState(), None),
        ([1], None),
        (Placed([1], META), None),
        (Placed(ByPlace(), META), {"seed": 7}),
    ],
)
def test_a_state_is_what_start_takes_back_or_none(loader, state):
    assert state_of(loader) == state


def test_a_placed_loader_passes_a_place_and_a_state_on():
    loader = ByPlace()
    given = list(start(Placed(loader, META), 2, 3, {"seed": 7}))
    assert (given, loader.calls) == (["batch 3 of epoch 2"], [("load", {"seed": 7}), ("start_at", 2, 3)])


def test_a_placed_loader_passes_a_state_on_to_one_that_knows_its_place():
    assert list(start(Placed(ByState(), META), 1, 3, {"next": 3})) == [3, 4]


def test_a_placed_loader_takes_a_state_once():
    placed = Placed(ByState(), META)
    list(start(placed, 0, 3, {"next": 3}))
    assert list(start(placed, 1, 0)) == [0, 1, 2, 3, 4]


def test_a_placed_loader_reads_up_to_the_place_where_the_one_inside_can_only_begin():
    assert list(start(Placed(Reading(0, 1, 2, 3), META), 1, 2)) == [2, 3]


def test_batches_of_a_placed_exact_loader_are_on_the_device():
    placed = Placed(Exact(DataLoader(torch.arange(6), batch_size=2), 7), META)
    assert [batch.device for batch in placed.start_at(0, 1)] == [META, META]


def test_a_placed_exact_loader_takes_over_the_seed():
    placed = Placed(Exact(DataLoader(torch.arange(6))), META)
    start(placed, 0, 0, Exact(DataLoader(torch.arange(6)), 7).state_dict())
    assert placed.loader.seed == 7


def test_a_loader_that_was_not_wrapped_is_iterated_and_nothing_else():
    loader = DataLoader(torch.arange(6), batch_size=2)
    assert type(start(loader, 0, 0)) is type(iter(loader))


def calls(batches):
    count = 0

    def seen(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        for _ in batches:
            pass
    finally:
        sys.setprofile(None)
    return count


def test_a_loader_that_was_not_wrapped_costs_no_call_more():
    batches = [torch.zeros(2)] * 50
    loader = DataLoader(torch.arange(100), batch_size=2)
    assert (calls(start(batches, 0, 0)), calls(start(loader, 0, 0))) == (calls(iter(batches)), calls(iter(loader)))


def test_a_list_stays_a_list_and_an_exact_loader_is_exact_once():
    batches, exact = [1, 2], Exact(DataLoader(torch.arange(6)), 7)
    assert (exactly(batches, 7) is batches, exactly(exact, 7) is exact) == (True, True)


def epochs_of(loader, progress, states):
    run = Run(progress=progress)
    run._loader_states = states
    with loop.fit(run):
        for _ in loop.epochs(run, 2):
            yield list(loop.batches(run, loader))
    assert run._loader_states == {}


@pytest.mark.parametrize("loader", [ByState(), Placed(ByState(), META)])
def test_a_run_gives_a_loader_its_state_once(loader):
    progress = Progress(batches=3, batches_in_epoch=3, steps=3)
    assert list(epochs_of(loader, progress, {"train": {"next": 3}})) == [[3, 4], [0, 1, 2, 3, 4]]
