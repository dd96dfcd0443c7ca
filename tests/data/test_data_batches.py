"""What can be said and done with a batch or a loader without knowing the task."""

import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from loopline.data import Placed, move, size_of, trusted_length

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


class Typed(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass
class Record:
    x: torch.Tensor
    name: str = "a"
    more: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


@dataclass
class Twice:
    x: torch.Tensor
    double: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.double = self.x * 2


class Graph:
    """Moves itself, as graph batches and tokenizers' outputs do."""

    def __init__(self, device="cpu"):
        self.device = device

    def to(self, device):
        return Graph(str(device))


def t(*shape):
    return torch.ones(*shape)


def places(batch):
    """The batch with a word in every tensor's place."""
    match batch:
        case torch.Tensor():
            return batch.device.type
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*map(places, batch))
        case tuple() | list():
            return type(batch)(map(places, batch))
        case dict() | UserDict():
            return {key: places(value) for key, value in batch.items()}
        case _:
            return batch


def test_a_tensor_moves():
    assert move(t(2), META).device == META


@pytest.mark.parametrize("plain", ["text", b"bytes", 3, 2.5, True, None])
def test_plain_values_stay_as_they_are(plain):
    assert move(plain, META) is plain


def test_tensors_move_in_lists_tuples_and_dicts_however_deep():
    batch = [t(1), (t(1), [t(1), "a", None]), {"x": t(1), "more": {"y": (t(1), 3)}}]
    assert places(move(batch, META)) == [
        "meta",
        ("meta", ["meta", "a", None]),
        {"x": "meta", "more": {"y": ("meta", 3)}},
    ]


@pytest.mark.parametrize("pair", [Pair(t(1), t(1)), Typed(t(1), "a")])
def test_a_named_tuple_keeps_its_class(pair):
    moved = move(pair, META)
    assert (type(moved), moved.x.device) == (type(pair), META)


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, types.MappingProxyType])
def test_a_mapping_keeps_its_class(kind):
    moved = move(kind({"x": t(1), "n": 1}), META)
    assert (type(moved), moved["x"].device, moved["n"]) == (kind, META, 1)


def test_a_dict_with_defaults_moves():
    batch = defaultdict(list, x=t(1))
    assert move(batch, META)["x"].device == META


def test_a_list_of_ones_own_class_moves():
    class Sequences(list):
        def __init__(self, items, name="mine"):
            super().__init__(items)
            self.name = name

    assert places(move(Sequences([t(1)]), META)) == ["meta"]


def test_a_size_is_a_size():
    assert move(t(2, 3).shape, META) == (2, 3)


def test_a_dataclass_keeps_its_class_and_what_is_no_tensor():
    moved = move(Record(t(1), "b", [t(1)]), META)
    assert (moved.x.device, moved.name, moved.more[0].device) == (META, "b", META)


def test_a_frozen_dataclass_moves():
    assert move(Frozen(t(1)), META).x.device == META


def test_a_field_that_is_computed_moves_too():
    assert move(Twice(t(1)), META).double.device == META


def test_an_object_that_can_move_is_asked_to():
    assert move({"graph": Graph()}, META)["graph"].device == "meta"


def test_an_object_that_cannot_move_is_left():
    thing = object()
    assert move([thing], META)[0] is thing


def test_the_batch_that_was_given_is_not_changed():
    batch = {"x": [t(1)]}
    move(batch, META)
    assert batch["x"][0].device.type == "cpu"


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (t(5, 2), 5),
        ((t(5, 2), t(4)), 5),
        ([t(5)], 5),
        (([t(5)], t(4)), 5),
        ({"x": t(5), "y": t(4)}, 5),
        (UserDict(x=t(5)), 5),
        (Pair(t(5), t(4)), 5),
        (Record(t(5)), 5),
        (["a", "b", t(5)], 5),
        ({"name": ["a"], "x": {"ids": t(5, 7)}}, 5),
        (([], t(5)), 5),
        (t(0, 3), 0),
        (torch.tensor(1.0), 1),
        ("text", 1),
        (None, 1),
        ([], 1),
        ({}, 1),
        (7, 1),
    ],
    ids=repr,
)
def test_a_batch_has_the_size_of_its_first_tensor(batch, size):
    assert size_of(batch) == size


class Stream(IterableDataset):
    """Says that it has ten, and has three."""

    def __iter__(self):
        return iter([t(1)] * 3)

    def __len__(self):
        return 10


@pytest.mark.parametrize(
    ("loader", "length"),
    [
        ([1, 2, 3], 3),
        ([], 0),
        (DataLoader(TensorDataset(t(5)), batch_size=2), 3),
        (DataLoader(TensorDataset(t(5)), batch_size=2, drop_last=True), 2),
        (DataLoader(Stream(), batch_size=2), None),
        (Placed(DataLoader(Stream(), batch_size=2), META), None),
        (Placed([1, 2], META), 2),
        (Placed(iter([1, 2]), META), None),
        ((n for n in range(3)), None),
    ],
)
def test_a_length_is_believed_unless_it_is_a_streams(loader, length):
    assert trusted_length(loader) == length


def test_a_length_that_is_not_written_yet_is_unknown():
    class Unwritten:
        def __len__(self):
            raise NotImplementedError

    assert trusted_length(Unwritten()) is None


def test_a_placed_loader_hands_out_batches_on_the_device():
    placed = Placed([(t(2), "a")] * 2, META)
    assert [[places(batch) for batch in placed] for _ in range(2)] == [[("meta", "a")] * 2] * 2


def test_a_placed_loader_moves_a_batch_only_when_it_is_asked_for():
    moved = []

    class Slow:
        def to(self, device):
            moved.append(device)
            return self

    iterator = iter(Placed([Slow(), Slow()], META))
    next(iterator)
    assert moved == [META]


def test_a_placed_loader_shows_its_dataset():
    dataset = TensorDataset(t(2))
    assert (Placed(DataLoader(dataset), META).dataset is dataset, Placed([], META).dataset) == (True, None)
