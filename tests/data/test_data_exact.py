"""A loader whose batches follow from (seed, epoch, position)."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from loopline import Progress, Run, loop
from loopline.core.errors import BadLoader, Mismatch
from loopline.data import Exact, Permutation, exactly, keyed, keys, recipes


class Noisy(Dataset):
    """Samples with random augmentation from every stream."""

    def __init__(self, n, fails_at=None):
        self.n = n
        self.fails_at = fails_at

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index == self.fails_at:
            raise KeyError(f"no sample {index}")
        return torch.tensor([index, random.gauss(), np.random.randn(), torch.randn(()).item()], dtype=torch.float64)


class AtOnce(Noisy):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Mine(Sampler):
    """Draws by whatever function it is given."""

    def __init__(self, draw: Callable[[], Any]):
        self.draw = draw

    def __iter__(self):
        yield from self.draw()


class Buckets:
    """A batch sampler with batches of several sizes, over a sampler of its own."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        indices = iter(self.sampler)
        while batch := list(islice(indices, int(torch.randint(1, 5, ())))):
            yield batch


def generator():
    return torch.Generator().manual_seed(1)


def noisy_collate(samples):
    return torch.stack([*samples, torch.rand(4, dtype=torch.float64) + random.random()])


SAMPLERS: dict[str, Callable[[Dataset, int], dict[str, Any]]] = {
    "as it is": lambda data, size: {"batch_size": size},
    "shuffled": lambda data, size: {"batch_size": size, "shuffle": True},
    "shuffled, one by one": lambda data, size: {"batch_size": None, "shuffle": True},
    "a batch sampler": lambda data, size: {"batch_sampler": BatchSampler(RandomSampler(data), size, False)},
    "with replacement": lambda data, size: {"batch_size": size, "sampler": RandomSampler(data, replacement=True)},
    "some of it": lambda data, size: {
        "batch_size": size,
        "sampler": RandomSampler(data, num_samples=2 * len(data) + 1),
    },
    "its generator": lambda data, size: {
        "batch_size": size,
        "sampler": SubsetRandomSampler(range(0, len(data), 2), generator=generator()),
    },
    "weighted": lambda data, size: {
        "batch_size": size,
        "sampler": WeightedRandomSampler([1.0] * len(data), len(data) + 3),
    },
    "weighted, one by one": lambda data, size: {
        "batch_size": None,
        "sampler": WeightedRandomSampler([1.0] * len(data), len(data)),
    },
    "of two ranks": lambda data, size: {"batch_size": size, "sampler": DistributedSampler(data, 2, 1)},
    "by python": lambda data, size: {
        "batch_size": size,
        "sampler": Mine(lambda: random.sample(range(len(data)), len(data))),
    },
    "by numpy": lambda data, size: {
        "batch_size": size,
        "sampler": Mine(lambda: np.random.permutation(len(data)).tolist()),
    },
    "batches of its own": lambda data, size: {"batch_sampler": Buckets(RandomSampler(data, generator=generator()))},
    "indices of another kind": lambda data, size: {
        "batch_size": size,
        "sampler": Mine(lambda: torch.randperm(len(data))),
    },
}


@dataclass(frozen=True)
class Case:
    kind: str = "shuffled"
    n: int = 10
    batch_size: int = 3
    drop_last: bool = False
    seed: int = 7
    dataset: type = Noisy
    collate: Any = None

    def loader(self) -> DataLoader:
        data = self.dataset(self.n)
        arguments = SAMPLERS[self.kind](data, self.batch_size)
        if arguments.get("batch_size") is not None:
            arguments["drop_last"] = self.drop_last
        return DataLoader(data, collate_fn=self.collate, **arguments)


def read(batches, elsewhere=0):
    """The batches bit for bit, read where the streams stand somewhere, with a model that draws between them."""
    random.seed(elsewhere)
    np.random.seed(elsewhere)
    torch.manual_seed(elsewhere)
    found = []
    for batch in batches:
        found.append(batch.numpy().tobytes())
        torch.rand(elsewhere + 1)
    return found


def parts(case, epoch, cut, *, exact=Exact):
    """An epoch in one go, and the same in two parts, as three processes read them."""
    whole = read(exact(case.loader(), case.seed).start_at(epoch, 0), 1)
    before = read(islice(exact(case.loader(), case.seed).start_at(epoch, 0), cut), 2)
    after = read(exact(case.loader(), case.seed).start_at(epoch, cut), 3)
    return whole, before + after


cases = st.builds(
    Case,
    kind=st.sampled_from(sorted(SAMPLERS)),
    n=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**64),
    dataset=st.sampled_from([Noisy, AtOnce]),
    collate=st.sampled_from([None, noisy_collate]),
).filter(lambda case: case.collate is None or "one by one" not in case.kind)


@settings(max_examples=1000 if os.environ.get("LOOPLINE_FULL") else 100)
@given(case=cases, epoch=st.integers(0, 3), cut=st.integers(0, 12))
@example(case=Case("of two ranks", 10), epoch=2, cut=1)
@example(case=Case(dataset=AtOnce), epoch=1, cut=2)
def test_an_epoch_is_what_was_read_before_a_cut_and_what_is_read_from_it_on(case, epoch, cut):
    whole, in_parts = parts(case, epoch, min(cut, len(read(Exact(case.loader(), case.seed)))))
    assert in_parts == whole


class OffByOne(Exact):
    def start_at(self, epoch, index):
        return super().start_at(epoch, max(0, index - 1))


def test_a_position_that_is_off_by_one_would_be_seen():
    whole, in_parts = parts(Case(), 0, 2, exact=OffByOne)
    assert in_parts != whole


def unkeyed(monkeypatch, what):
    """A loader that forgets one of its keys."""
    real = keys.seed_streams

    def others(*path):
        if path[0] != what:
            real(*path)

    monkeypatch.setattr(keyed, "seed_streams", others)
    monkeypatch.setattr(recipes, "seed_streams", others)


@pytest.mark.parametrize("what", ["sample", "sampler"])
def test_a_key_that_is_not_set_would_be_seen(monkeypatch, what):
    unkeyed(monkeypatch, what)
    whole, in_parts = parts(Case("weighted"), 0, 2)
    assert in_parts != whole


class Drawing(Noisy):
    """Draws as often as it is long, and shows nothing of it."""

    def __getitem__(self, index):
        torch.rand(self.n)
        return torch.zeros(4, dtype=torch.float64)


def noise_of_collating(n):
    return next(Exact(DataLoader(Drawing(n), batch_size=2, collate_fn=noisy_collate), 7).start_at(0, 0)).tolist()


def test_what_collating_draws_does_not_hang_on_what_the_samples_drew():
    assert noise_of_collating(3) == noise_of_collating(4)


def test_without_its_key_it_would(monkeypatch):
    unkeyed(monkeypatch, "collate")
    assert noise_of_collating(3) != noise_of_collating(4)


def test_a_key_that_forgets_the_position_would_give_samples_the_same_randomness():
    drawn = [row[1].item() for batch in Exact(Case("as it is", n=40).loader(), 7) for row in batch]
    assert len(set(drawn)) == 40


def test_each_epoch_has_an_order_and_a_randomness_of_its_own():
    exact = Exact(Case().loader(), 7)
    epochs = [torch.cat(list(exact.start_at(epoch, 0))) for epoch in range(3)]
    assert (len({tuple(e[:, 0].tolist()) for e in epochs}), len({tuple(e[:, 1].tolist()) for e in epochs})) == (3, 3)


def test_another_seed_is_another_order_and_another_randomness():
    first, second = (torch.cat(list(Exact(Case().loader(), seed))) for seed in (1, 2))
    assert (first[:, 0].tolist() != second[:, 0].tolist(), first[:, 1].tolist() != second[:, 1].tolist()) == (
        True,
        True,
    )


OF_ALL = [
    "as it is",
    "shuffled",
    "shuffled, one by one",
    "a batch sampler",
    "its generator",
    "of two ranks",
    "by python",
]


@pytest.mark.parametrize("kind", OF_ALL)
def test_an_epoch_has_the_samples_and_the_sizes_of_batches_that_the_loader_itself_gives(kind):
    case = Case(kind, n=13, batch_size=4)
    ours, theirs = list(Exact(case.loader(), 7)), list(case.loader())
    assert [batch.shape for batch in ours] == [batch.shape for batch in theirs]
    ours, theirs = (sorted(int(row[0]) for b in some for row in b.reshape(-1, 4)) for some in (ours, theirs))
    assert ours == theirs


def test_the_order_of_a_shuffled_loader_is_the_permutation_of_seed_and_epoch():
    read_in = [int(i) for batch in Exact(Case(n=20).loader(), 7).start_at(3, 0) for i in batch[:, 0]]
    assert read_in == list(Permutation(20, 7, 3))


def test_what_is_read_is_the_same_for_ever():
    batch = next(Exact(Case(n=3, batch_size=2).loader(), 7).start_at(1, 1))
    assert batch[:, :3].tolist() == [[2.0, 0.8045579730844415, -0.3629247214977493]]


def test_a_sampler_with_set_epoch_is_told_the_epoch():
    def order(epoch):
        exact = Exact(Case("of two ranks", n=20).loader(), 7)
        return [int(i) for batch in exact.start_at(epoch, 0) for i in batch[:, 0]]

    sampler = DistributedSampler(Noisy(20), 2, 1)
    sampler.set_epoch(3)
    assert order(3) == list(sampler)


def test_reading_leaves_the_streams_of_the_process_where_they_were():
    def standing():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    left = {}
    for kind in SAMPLERS:
        exact = Exact(Case(kind, collate=None).loader(), 7)
        before = standing()
        for epoch in range(2):
            for _ in exact.start_at(epoch, 1):
                left[kind] = standing() == before
        exact.state_dict()
        exact.sample(0, 0)
        left[kind] &= standing() == before
    assert left == dict.fromkeys(SAMPLERS, True)


def test_a_sample_that_fails_leaves_the_streams_where_they_were():
    exact = Exact(DataLoader(Noisy(4, fails_at=2), batch_size=4), 7)
    before = random.getstate(), torch.get_rng_state().tolist()
    with pytest.raises(KeyError):
        list(exact)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_a_samplers_generator_is_left_where_it_was():
    mine = generator()
    exact = Exact(DataLoader(Noisy(9), batch_size=2, sampler=SubsetRandomSampler(range(9), generator=mine)), 7)
    list(exact)
    assert mine.get_state().equal(generator().get_state())


def test_a_position_is_entered_without_reading_what_lies_before():
    seen = []

    class Watched(Noisy):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    list(Exact(DataLoader(Watched(10), batch_size=2, sampler=SequentialSampler(range(10))), 7).start_at(0, 4))
    list(Exact(DataLoader(Watched(10), batch_size=2, sampler=Mine(lambda: range(10))), 7).start_at(0, 3))
    assert seen == [8, 9, 6, 7, 8, 9]


def test_without_a_loop_each_pass_is_the_next_epoch():
    exact, told = Exact(Case().loader(), 7), Exact(Case().loader(), 7)
    passes = [read(exact) for _ in range(3)]
    assert passes == [read(told.start_at(epoch, 0)) for epoch in range(3)]


def test_after_a_pass_that_was_begun_inside_an_epoch_the_next_epoch_comes():
    exact, told = Exact(Case().loader(), 7), Exact(Case().loader(), 7)
    list(exact.start_at(4, 2))
    assert read(exact) == read(told.start_at(5, 0))


def test_two_passes_at_once_do_not_disturb_each_other():
    exact, alone = Exact(Case().loader(), 7), Exact(Case().loader(), 7)
    pairs = list(zip(exact.start_at(0, 0), exact.start_at(1, 0), strict=True))
    assert (read(a for a, _ in pairs), read(b for _, b in pairs)) == (
        read(alone.start_at(0, 0)),
        read(alone.start_at(1, 0)),
    )


def test_an_exact_loader_has_the_length_dataset_and_batch_size_of_the_loader():
    loader = DataLoader(Noisy(10), batch_size=3, drop_last=True)
    exact = Exact(loader, 7)
    assert (len(exact), exact.dataset, exact.batch_size) == (3, loader.dataset, 3)


@pytest.mark.parametrize("index", [4, 5, 100])
def test_after_the_last_batch_there_is_nothing(index):
    assert list(Exact(Case().loader(), 7).start_at(0, index)) == []


@pytest.mark.parametrize("place", [(-1, 0), (0, -1)])
def test_a_place_before_the_beginning_is_refused(place):
    with pytest.raises(ValueError, match="counted from 0"):
        Exact(Case().loader(), 7).start_at(*place)


@pytest.mark.parametrize("dataset", [Noisy, AtOnce])
@pytest.mark.parametrize("kind", ["shuffled", "weighted", "shuffled, one by one", "batches of its own"])
def test_any_sample_of_an_epoch_can_be_read_again(kind, dataset):
    exact = Exact(Case(kind, dataset=dataset).loader(), 7)
    samples = [row.tolist() for batch in exact.start_at(2, 0) for row in batch.reshape(-1, 4)]
    assert [exact.sample(2, position).tolist() for position in range(len(samples))] == samples


@pytest.mark.parametrize("position", [-1, 9, 10])
def test_a_sample_that_no_batch_has_cannot_be_read_again(position):
    with pytest.raises(IndexError, match="no batch of the epoch"):
        Exact(Case(drop_last=True).loader(), 7).sample(0, position)


def test_a_subset_reads_its_samples_each_under_its_key():
    class Whole(Noisy):
        pass

    subset = Subset(Whole(20), range(5, 15))
    small, large = (torch.cat(list(Exact(DataLoader(subset, batch_size=size), 7))) for size in (2, 5))
    assert small.equal(large)


def test_a_failing_sample_says_where_it_stands():
    exact = Exact(DataLoader(Noisy(10, fails_at=6), batch_size=4), 7)
    with pytest.raises(KeyError, match="no sample 6") as failed:
        list(exact.start_at(2, 0))
    assert failed.value.__notes__ == [
        "reading dataset[6]: epoch 2, position 6 in it, in the main process. Exact.sample(2, 6) reads it again, alone "
        "and in this process."
    ]


def test_a_sample_that_failed_fails_again_when_it_is_read_alone():
    with pytest.raises(KeyError, match="no sample 6"):
        Exact(DataLoader(Noisy(10, fails_at=6), batch_size=4), 7).sample(2, 6)


def test_samples_that_are_read_at_once_say_where_they_stand_when_they_fail():
    with pytest.raises(KeyError) as failed:
        list(Exact(DataLoader(AtOnce(10, fails_at=6), batch_size=4), 7))
    assert failed.value.__notes__ == [
        "reading dataset.__getitems__([4, 5, 6, 7]): batch 1 of epoch 0, positions 4 to 7, in the main process"
    ]


def test_a_batch_that_cannot_be_collated_says_where_it_stands():
    def refuse(samples):
        raise TypeError("no")

    with pytest.raises(TypeError) as failed:
        list(Exact(DataLoader(Noisy(10), batch_size=4, collate_fn=refuse), 7).start_at(1, 1))
    assert failed.value.__notes__ == ["collating batch 1 of epoch 1, positions 4 to 7, in the main process"]


def test_after_a_sample_that_failed_the_pass_goes_on_if_one_wants_it_to():
    batches = Exact(DataLoader(Noisy(6, fails_at=2), batch_size=2), 7).start_at(0, 0)
    got = [next(batches)[:, 0].tolist()]
    with pytest.raises(KeyError):
        next(batches)
    assert [*got, *(batch[:, 0].tolist() for batch in batches)] == [[0, 1], [4, 5]]


def test_what_is_sent_to_a_worker_can_be_pickled():
    exact = Exact(Case().loader(), 7)
    again = pickle.loads(pickle.dumps((exact._keyed, exact._inner.collate_fn, exact._inner.worker_init_fn)))
    recipe = next(exact._recipes.recipes(7, 0, 0))
    assert again[0][recipe].equal(exact._keyed[pickle.loads(pickle.dumps(recipe))])


def state(loader=None, seed: int | None = 7, **changed):
    return Exact(loader or Case().loader(), seed).state_dict() | changed


def test_a_state_is_small_and_plain():
    assert json.loads(json.dumps(state())) == {
        "dataset": {"class": "Noisy", "length": 10, "fingerprint": None},
        "batch_size": 3,
        "drop_last": False,
        "seed": 7,
        "order": "permutation/1",
        "first": [0, Permutation(10, 7, 0).first()],
    }


def test_without_a_seed_that_of_the_state_is_taken_over():
    saved = Exact(Case().loader())
    again = Exact(Case().loader())
    again.load_state_dict(saved.state_dict())
    assert (saved.seed != Exact(Case().loader()).seed, read(again)) == (True, read(saved))


def test_a_fresh_seed_is_not_drawn_from_the_streams_of_the_training():
    seeds = set()
    for _ in range(2):
        random.seed(1)
        torch.manual_seed(1)
        np.random.seed(1)
        seeds.add(Exact(Case().loader()).seed)
    assert len(seeds) == 2


def test_a_state_of_the_same_data_is_taken_whatever_the_workers():
    exact = Exact(DataLoader(Noisy(10), batch_size=3, shuffle=True, num_workers=2, prefetch_factor=4), 7)
    exact.load_state_dict(state())
    assert exact.seed == 7


class Told(Noisy):
    def __init__(self, n, said):
        super().__init__(n)
        self.said = said

    def fingerprint(self):
        return self.said


def loader_of(data, **arguments):
    return DataLoader(data, **({"batch_size": 3, "shuffle": True} | arguments))


DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "dataset length": (loader_of(Noisy(10)), loader_of(Noisy(11)), "dataset length was 10 .* and is 11 now"),
    "dataset class": (loader_of(Noisy(10)), loader_of(AtOnce(10)), "dataset class was 'Noisy' .* is 'AtOnce' now"),
    "dataset fingerprint": (
        loader_of(Told(10, "a")),
        loader_of(Told(10, "b")),
        "dataset fingerprint was 'a' .* is 'b' now",
    ),
    "dataset subset": (
        loader_of(Subset(Noisy(20), range(10))),
        loader_of(Subset(Noisy(20), range(10, 20))),
        "dataset fingerprint was",
    ),
    "batch_size": (loader_of(Noisy(10)), loader_of(Noisy(10), batch_size=2), "batch_size was 3 .* and is 2 now"),
    "drop_last": (loader_of(Noisy(10)), loader_of(Noisy(10), drop_last=True), "drop_last was False .* is True now"),
    "order": (loader_of(Noisy(10)), loader_of(Noisy(10), shuffle=False), "order was 'permutation/1' .* 'sequential'"),
    "order drawn": (
        loader_of(Noisy(10)),
        loader_of(Noisy(10), shuffle=None, sampler=RandomSampler(Noisy(10), replacement=True)),
        "order was 'permutation/1' .* is 'drawn by RandomSampler' now",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_other_data_is_refused_with_what_differs(what):
    then, now, said = DIFFERENCES[what]
    with pytest.raises(Mismatch, match=said):
        Exact(now, 7).load_state_dict(state(then))


@pytest.mark.parametrize("what", DIFFERENCES)
def test_other_data_is_taken_if_that_is_allowed_by_name_and_is_logged(what, caplog):
    then, now, said = DIFFERENCES[what]
    with caplog.at_level(logging.WARNING, "loopline"):
        Exact(now, 7, allow=[what.split()[0]]).load_state_dict(state(then))
    assert said.split()[0] in caplog.text


@pytest.mark.parametrize("what", DIFFERENCES)
def test_the_same_data_is_taken_silently(what, caplog):
    then, _, _ = DIFFERENCES[what]
    Exact(then, 7).load_state_dict(state(then))
    assert caplog.text == ""


def test_another_seed_is_refused():
    with pytest.raises(Mismatch, match="seed was 7 when the state was saved and is 8 now"):
        Exact(Case().loader(), 8).load_state_dict(state())


def test_another_seed_that_is_allowed_is_the_one_that_counts():
    exact = Exact(Case().loader(), 8, allow=["seed"])
    exact.load_state_dict(state())
    assert exact.seed == 8


def test_a_release_that_shuffles_otherwise_is_refused():
    with pytest.raises(Mismatch, match="order: with seed 7 the shuffle of epoch 0 begins with other samples"):
        Exact(Case().loader(), 7).load_state_dict(state(first=[0, "0123456789abcdef"]))


def test_a_state_that_is_refused_changes_nothing():
    exact = Exact(Case().loader())
    seed = exact.seed
    with pytest.raises(Mismatch):
        exact.load_state_dict(state(Case(n=11).loader()))
    assert exact.seed == seed


def test_the_state_of_another_loader_is_refused():
    with pytest.raises(Mismatch, match="has no dataset, batch_size"):
        Exact(Case().loader(), 7).load_state_dict({"position": 3})


def test_a_sampler_that_draws_from_elsewhere_is_found_out_when_its_epoch_is_drawn_again():
    def loader(own):
        return loader_of(Noisy(10), shuffle=None, sampler=Mine(lambda: own.permutation(10).tolist()))

    first = Exact(loader(np.random.default_rng(1)), 7)
    first_pass = first.start_at(0, 0)
    list(islice(first_pass, 4))
    again = Exact(loader(np.random.default_rng(2)), 7)
    list(first_pass)
    again.load_state_dict(first.state_dict())
    with pytest.raises(Mismatch, match="epoch 0, drawn by Mine, begins with other indices"):
        list(again.start_at(0, 2))


def test_a_sampler_that_draws_from_the_keys_is_not_suspected():
    first, again = (Exact(Case("weighted", n=100).loader(), 7) for _ in range(2))
    list(first.start_at(1, 0))
    again.load_state_dict(first.state_dict())
    assert read(again.start_at(1, 2)) == read(first.start_at(1, 2))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Peculiar(DataLoader):
    def __iter__(self):
        return iter([])


class Stateful:
    def __iter__(self):
        return iter([])

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(Stream()), "Stream is an IterableDataset, whose samples have no positions"),
        (Peculiar([1]), "Peculiar makes its batches in a way of its own"),
    ],
)
def test_a_loader_that_cannot_be_exact_is_refused_with_what_to_do(loader, said):
    with pytest.raises(BadLoader, match=said):
        Exact(loader, 7)


@pytest.mark.parametrize("given", [[1, 2], Noisy(3), Exact(Case().loader(), 7)])
def test_what_is_no_dataloader_is_refused(given):
    with pytest.raises(TypeError, match=type(given).__name__):
        Exact(given, 7)


@pytest.mark.parametrize("wrong", [{"seed": 1.5}, {"seed": True}])
def test_a_seed_that_is_no_whole_number_is_refused(wrong):
    with pytest.raises(TypeError, match="seed"):
        Exact(Case().loader(), **wrong)


@pytest.mark.parametrize("allow", ["dataset", ["data"]])
def test_a_name_that_cannot_be_allowed_is_refused(allow):
    with pytest.raises(ValueError, match="dataset, batch_size, drop_last, seed, order"):
        Exact(Case().loader(), 7, allow=allow)


def test_a_dataloader_is_made_exact_where_that_is_wanted():
    loader = Case().loader()
    exact = exactly(loader, 7, allow=["seed", "model"])
    assert (type(exact), exact.loader, exact.seed, exact.allow) == (Exact, loader, 7, {"seed"})


@pytest.mark.parametrize(
    "given", [[1, 2], (1, 2), Stateful(), Exact(Case().loader(), 7)], ids=lambda g: type(g).__name__
)
def test_a_loader_that_has_its_place_already_is_left_as_it_is(given, caplog):
    assert (exactly(given, 7), caplog.text) == (given, "")


@pytest.mark.parametrize("given", [DataLoader(Stream()), Peculiar([1]), iter([1])], ids=lambda g: type(g).__name__)
def test_a_loader_without_a_place_is_left_as_it_is_with_one_note(given, caplog):
    assert (exactly(given, 7) is given, len(caplog.records)) == (True, 1)


def trained(loader, progress=None, states=None, stop_after=None):
    """The batches that a run sees; stopped after so many steps."""
    torch.manual_seed(5 if progress is None else 6)
    seen = []
    run = Run(model=None, progress=progress or Progress())
    run._loader_states = dict(states or {})
    with loop.fit(run):
        for _ in loop.epochs(run, 2):
            for batch in loop.batches(run, loader):
                seen.append(batch.numpy().tobytes())
                torch.rand(3)
                if len(seen) == stop_after:
                    run.stop("cut")
    return seen, run


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_run_cut_at_any_step_goes_on_with_the_batches_that_it_would_have_had(cut):
    whole, _ = trained(first := Exact(Case().loader()))
    again = Exact(Case().loader(), first.seed)
    before, run = trained(again, stop_after=cut)
    after, _ = trained(Exact(Case().loader()), run.progress, {"train": again.state_dict()})
    assert before + after == whole
