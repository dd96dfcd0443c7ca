"""States as text and tensors: what comes back is what was kept, to the last bit, or nothing is kept at all."""

import datetime as dt
import json
import math
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from loopline.checkpoint import register_codec, tree
from loopline.checkpoint.blocks import Blocks, tensors_of
from loopline.checkpoint.kinds import DIMENSIONS, KINDS
from loopline.checkpoint.tree import PARTS_LIMIT, TEXT_LIMIT, dumps, flatten, loads, unflatten
from loopline.core.errors import CannotSave, Damaged

DTYPES = list(KINDS.values())
ARRAYS = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8"]
ODD_FLOATS = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1]


def there_and_back(state):
    """Through the bytes of both files, as a checkpoint does it."""
    tensors = {}
    text = dumps(flatten("state", state, tensors))
    file = bytearray(b"".join(Blocks(tensors).chunks()))
    return unflatten(loads(text, "the text"), tensors_of(file, "the file"))


def told(value):
    """Everything that tells two states apart: types, bits, order, and which tensors are one and the same."""
    return _told(value, {})


def _told(value, known):
    kind = type(value)
    if isinstance(value, torch.Tensor):
        bits = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()
        return "tensor", value.dtype, tuple(value.shape), bits, known.setdefault(id(value), len(known))
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype.newbyteorder("="), value.shape, value.tolist().__repr__()
    if kind is float:
        return "float", "nan" if math.isnan(value) else struct.pack("d", value)
    if kind in (list, tuple, deque):
        return kind, getattr(value, "maxlen", None), [_told(item, known) for item in value]
    if kind in (dict, OrderedDict, Counter):
        return kind, [(_told(key, known), _told(item, known)) for key, item in value.items()]
    if kind in (set, frozenset):
        return kind, sorted(repr(_told(item, known)) for item in value)
    return kind, value


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape).clone()


@st.composite
def arrays(draw):
    kind = draw(st.sampled_from(ARRAYS))
    dtype = np.dtype(kind).newbyteorder(draw(st.sampled_from(["<", ">"])))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    source = np.random.default_rng(draw(st.integers(0, 99)))
    array = source.integers(0, 2 if kind == "?" else 100, shape).astype(dtype)
    return array[()] if draw(st.booleans()) and not shape else array


texts = st.text(st.characters(), max_size=8)  # with halves of surrogate pairs, which file names may have
numbers = st.integers() | st.integers(-(2**200), 2**200) | st.floats() | st.sampled_from(ODD_FLOATS)
plain = st.none() | st.booleans() | numbers | texts | st.binary(max_size=8) | st.complex_numbers(allow_nan=False)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
hashable = st.none() | st.integers() | texts | st.tuples(st.integers(), texts)
leaves = (
    plain
    | tensors()
    | arrays()
    | st.sets(hashable, max_size=3)
    | st.frozensets(hashable, max_size=3)
    | st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.float16, torch.int64])
    | st.lists(st.floats(), min_size=65, max_size=70)
    | st.lists(st.integers(-(2**64), 2**64), min_size=65, max_size=70)
    | st.dictionaries(hashable, st.integers(), max_size=3).map(Counter)
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(texts, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.tuples(st.lists(inner, max_size=3), st.none() | st.integers(3, 5)).map(lambda given: deque(*given))
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(states)
def test_every_state_comes_back_to_the_last_bit(state):
    assert told(there_and_back(state)) == told(state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 2), (2, 3, 2)], ids=str)
def test_tensors_of_every_type_and_shape_come_back(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    assert told(there_and_back({"t": tensor})) == told({"t": tensor})


def test_the_two_zeros_and_what_is_no_number_come_back_alone_and_in_long_lists():
    state = {"alone": ODD_FLOATS, "many": ODD_FLOATS * 20, "tensor": torch.tensor(ODD_FLOATS)}
    assert told(there_and_back(state)) == told(state)


def test_tensors_that_are_not_in_one_piece_come_back():
    whole = torch.arange(24.0).reshape(4, 6)
    state = {"turned": whole.t(), "part": whole[::2, 1::2], "repeated": whole[0].expand(3, 6), "whole": whole}
    assert told(there_and_back(state)) == told(state)


def test_views_that_are_read_conjugated_or_negated_are_not_taken_for_what_they_view():
    number = torch.tensor([1 + 2j, 3 - 1j])
    state = {"z": number, "conj": number.conj(), "imag": number.imag, "neg": number.conj().imag}
    assert told(there_and_back(state)) == told(state)


def test_a_parameter_comes_back_as_a_tensor_that_asks_for_no_gradient():
    weight = nn.Parameter(torch.ones(2))
    assert told(there_and_back({"w": weight})) == told({"w": weight.detach()})


def test_one_tensor_at_two_places_is_one_tensor_again():
    weight = torch.ones(2)
    back = there_and_back({"in": weight, "out": [weight], "other": weight.clone()})
    assert (back["in"] is back["out"][0], back["in"] is back["other"]) == (True, False)


def test_a_tied_tensor_is_kept_once():
    found = {}
    flatten("model", {"in": torch.ones(2), "out": torch.ones(2)}, found)
    weight = torch.ones(2)
    flatten("tied", {"in": weight, "out": weight, "flat": weight.view(2)}, found)
    assert list(found) == ["model/in", "model/out", "tied/in"]


def test_keys_that_look_alike_are_told_apart():
    state = {1: torch.ones(1), "1": torch.zeros(1), 1.5: "float", "1.5": "text", None: 0, "None": 1, (1, "a"): 2}
    assert told(there_and_back(state)) == told(state)


def test_paths_that_look_alike_are_told_apart():
    state = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__metadata__": torch.ones(2)}
    assert told(there_and_back(state)) == told(state)


@pytest.mark.parametrize("order", [">", "<"])
@pytest.mark.parametrize("kind", ["u2", "i4", "f4", "f8", "c8"])
def test_arrays_come_back_with_their_values_whatever_the_order_of_their_bytes(kind, order):
    array = np.arange(6).reshape(2, 3).astype(np.dtype(kind).newbyteorder(order))
    assert told(there_and_back([array, array.T, array[::2]])) == told([array, array.T, array[::2]])


def test_an_array_that_is_read_only_comes_back_as_one_that_can_be_written():
    array = np.arange(3)
    array.flags.writeable = False
    back = there_and_back([array])[0]
    back[0] = 5
    assert back.tolist() == [5, 1, 2]


def test_whole_numbers_of_any_length_come_back():
    state = [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**5000, [10**5000] * 70, {10**20: 1}]
    assert there_and_back(state) == state


def test_half_of_a_surrogate_pair_stays_one_half():
    state = {"\ud83d\ude00": torch.ones(1), "text": "\ud83d\ude00", "name": "\udcff"}
    assert told(there_and_back(state)) == told(state)


def test_the_random_streams_come_back():
    from loopline.randomness import streams

    state = {**streams(), "generator": np.random.default_rng(3).bit_generator.state}
    assert told(there_and_back(state)) == told(state)


def test_the_state_of_torch_optimizers_comes_back():
    model = nn.Linear(3, 2)
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.LBFGS):
        optimizer = kind(model.parameters(), lr=0.1)
        optimizer.step(lambda: _backward(model))
        state = optimizer.state_dict()
        assert told(there_and_back(state)) == told(state)


def _backward(model):
    model.zero_grad()
    loss = model(torch.ones(1, 3)).square().sum()
    loss.backward()
    return loss


def test_the_same_state_makes_the_same_text():
    assert dumps(flatten("s", {"b": 1, "a": [0.1]}, {})) == dumps(flatten("s", {"b": 1, "a": [0.1]}, {}))


@dataclass
class Point:
    x: float
    y: float


@dataclass
class Other:
    """Nobody registers it."""

    x: float


class Pair(NamedTuple):
    first: int
    second: int


class Level(IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class Mute:
    def __repr__(self):
        raise RuntimeError("it cannot even say what it is")


def itself():
    state = []
    state.append({"again": state})
    return state


def deep(levels):
    state = 1
    for _ in range(levels):
        state = [state]
    return state


CANNOT = {
    "object": lambda: object(),
    "lambda": lambda: lambda: 0,
    "function": lambda: deep,
    "partial": lambda: partial(deep, 1),
    "class": lambda: Other,
    "module": lambda: math,
    "path": lambda: Path("somewhere"),
    "datetime": lambda: dt.datetime(2020, 1, 1),
    "timedelta": lambda: dt.timedelta(1),
    "defaultdict": lambda: defaultdict(int),
    "dataclass": lambda: Other(1.0),
    "named tuple": lambda: Pair(1, 2),
    "enum": lambda: Level.LOW,
    "text of a class of its own": lambda: Text("a"),
    "range": lambda: range(3),
    "generator": lambda: (i for i in range(3)),
    "bytearray": lambda: bytearray(3),
    "exception": lambda: ValueError("a"),
    "mute": Mute,
    "torch generator": torch.Generator,
    "layer": lambda: nn.Linear(1, 1),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse csr": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.ones(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "lazy": lambda: nn.LazyLinear(2).weight,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "masked tensor": lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    "complex128": lambda: torch.ones(1, dtype=torch.complex128),
    "complex32": lambda: torch.ones(1, dtype=torch.complex32),
    "dimensions": lambda: torch.ones([1] * (DIMENSIONS + 1)),
    "array of objects": lambda: np.array([object()]),
    "array of text": lambda: np.array(["a"]),
    "array of dates": lambda: np.array(["2020"], dtype="M8[Y]"),
    "array of fields": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "array of complex128": lambda: np.zeros(1, dtype=complex),
    "array of longdouble": lambda: np.zeros(1, dtype=np.longdouble),
    "masked array": lambda: np.ma.array([1, 2], mask=[0, 1]),
    "matrix": lambda: np.matrix([1, 2]),
    "record array": lambda: np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    "numpy text": lambda: np.str_("a"),
    "numpy date": lambda: np.datetime64("2020"),
    "itself": itself,
    "too deep": lambda: deep(102),
    "key of bytes": lambda: {b"a": 1},
    "key that is a numpy number": lambda: {np.int64(1): 1},
    "key that is an object": lambda: {object(): 1},
    "key that is a tensor": lambda: {torch.ones(1): 1},
    "key with an object in it": lambda: {(1, (2, object())): 1},
    "key with a tensor in it": lambda: {(1, torch.ones(1)): 1},
    "key that is a frozenset": lambda: {frozenset([1]): 1},
    "key that is an enum": lambda: {Level.LOW: 1},
    "in a set": lambda: {Level.LOW},
    "in a deque": lambda: deque([object()]),
}


# some of these kinds of tensors and arrays are prototypes or deprecated
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("made", CANNOT.values(), ids=CANNOT)
def test_what_cannot_be_kept_is_refused_with_its_path(made):
    with pytest.raises(CannotSave, match=r"^callbacks/Mine/history/2/last[ /]"):
        flatten("callbacks/Mine", {"history": [1, 2, {"last": made()}]}, {})


def test_what_cannot_be_kept_is_told_without_what_looks_like_a_secret():
    @dataclass
    class Config:
        hub_token: str

    with pytest.raises(CannotSave) as raised:
        flatten("callbacks/Mine", {"config": Config(hub_token="c4n4ry")}, {})
    assert "c4n4ry" not in str(raised.value)


def test_more_text_than_is_read_is_not_written():
    with pytest.raises(CannotSave, match="bytes of text"):
        dumps(flatten("s", ["a" * TEXT_LIMIT], {}))


def test_more_parts_than_are_read_are_not_written():
    with pytest.raises(CannotSave, match="Hold what is large as tensors or arrays"):
        dumps([[]] * PARTS_LIMIT)


def test_long_lists_of_numbers_are_no_text():
    found = {}
    form = flatten("s", {"floats": [0.5] * 10**5, "integers": list(range(10**5))}, found)
    assert (len(dumps(form)) < 200, [tensor.dtype for tensor in found.values()]) == (
        True,
        [torch.float64, torch.int64],
    )


@pytest.fixture
def known(monkeypatch):
    """What is registered in a test is forgotten after it."""
    monkeypatch.setattr(tree, "_BY_TYPE", dict(tree._BY_TYPE))
    monkeypatch.setattr(tree, "_BY_NAME", dict(tree._BY_NAME))


@pytest.mark.usefixtures("known")
def test_a_class_that_is_registered_can_be_kept():
    register_codec(Point, lambda p: {"xy": torch.tensor([p.x, p.y])}, lambda t: Point(*t["xy"].tolist()))
    assert there_and_back([Point(1.0, 2.0)]) == [Point(1.0, 2.0)]


@pytest.mark.usefixtures("known")
def test_what_a_codec_gives_must_be_fit_to_be_kept_as_well():
    register_codec(Point, lambda p: [object()], lambda t: None)
    with pytest.raises(CannotSave, match="s/at/0 is <object"):
        flatten("s", {"at": Point(1.0, 2.0)}, {})


def test_a_class_that_the_reader_has_not_registered_is_named_with_what_to_do():
    with pytest.raises(Damaged, match=r"'mine.Point'; call loopline.checkpoint.register_codec for it first"):
        unflatten({"object": ["mine.Point", 1]}, {})


@pytest.mark.usefixtures("known")
def test_a_codec_that_fails_on_what_it_reads_says_what_it_was():
    register_codec(Point, lambda p: [p.x, p.y], lambda t: Point(*t), name="point")
    with pytest.raises(Damaged, match=r"'point'.*TypeError"):
        unflatten({"object": ["point", [1, 2, 3]]}, {})


MALFORMED = {
    "unknown kind": {"eval": "1 + 1"},
    "two kinds": {"map": {}, "tuple": []},
    "no kind": {},
    "float of JSON": 1.5,
    "float of text": {"float": "one"},
    "float of a number": {"float": 1},
    "float too large": {"float": "0x1p99999"},
    "tensor that is not there": {"tensor": "model/none"},
    "tensor without a name": {"tensor": ["t"]},
    "array that is not there": {"array": "none"},
    "array of bfloat16": {"array": "bf16"},
    "number that is not there": {"number": "none"},
    "floats of bytes": {"floats": "u8"},
    "floats of a matrix": {"floats": "matrix"},
    "integers of bytes": {"integers": "u8"},
    "integers of floats": {"integers": "f64"},
    "tuple of a number": {"tuple": 1},
    "map of a list": {"map": [1]},
    "items of a number": {"items": 1},
    "items of triples": {"items": [[1, 2, 3]]},
    "items with a list as key": {"items": [[[1], 2]]},
    "items with a tensor as key that is not there": {"items": [[{"tensor": "none"}, 2]]},
    "object of text": {"object": "set"},
    "object of one": {"object": ["set"]},
    "object of a list": {"object": [["set"], []]},
    "object that is a module": {"object": ["os.system", "true"]},
    "object that is built in": {"object": ["builtins.eval", "1"]},
    "bytes that are none": {"object": ["bytes", "zz"]},
    "bytes of a number": {"object": ["bytes", 1]},
    "int of a list": {"object": ["int", [1]]},
    "int that is none": {"object": ["int", "0xzz"]},
    "text that is none": {"object": ["text", "ff"]},
    "set of lists": {"object": ["set", [[1]]]},
    "set of a number": {"object": ["set", 1]},
    "frozenset of lists": {"object": ["frozenset", [[1]]]},
    "deque of a number": {"object": ["deque", 1]},
    "deque of negative length": {"object": ["deque", {"tuple": [[], -1]}]},
    "deque of a text as length": {"object": ["deque", {"tuple": [[], "a"]}]},
    "counter of a number": {"object": ["counter", 1]},
    "ordered of a number": {"object": ["ordered", 1]},
    "complex of three": {"object": ["complex", {"tuple": [1, 2, 3]}]},
    "complex of None": {"object": ["complex", {"tuple": [None, 2]}]},
    "size of text": {"object": ["size", ["a"]]},
    "size of a number": {"object": ["size", 1]},
    "device that is none": {"object": ["device", "abacus"]},
    "device of a list": {"object": ["device", []]},
    "dtype that is none": {"object": ["dtype", "float33"]},
    "dtype of a function": {"object": ["dtype", "load"]},
    "dtype of a list": {"object": ["dtype", []]},
}


@pytest.mark.parametrize("form", MALFORMED.values(), ids=MALFORMED)
def test_a_form_that_nothing_stands_for_is_damage(form):
    held = {"u8": torch.zeros(9, dtype=torch.uint8), "f64": torch.zeros(9, dtype=torch.float64)}
    held |= {"bf16": torch.zeros(9, dtype=torch.bfloat16), "matrix": torch.zeros(3, 3, dtype=torch.float64)}
    with pytest.raises(Damaged):
        unflatten({"map": {"a": [form]}}, held)


MANGLED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["float", "tensor", "array", "number", "floats", "tuple", "map", "items", "object", "x"]),
            inner,
            max_size=2,
        )
        | st.tuples(st.sampled_from(list(tree._BY_NAME)), inner).map(lambda pair: {"object": list(pair)})
    ),
    max_leaves=15,
)


@given(MANGLED)
def test_whatever_a_form_is_it_is_a_state_or_damage(form):
    with suppress(Damaged):
        unflatten(form, {"x": torch.zeros(2), "": torch.zeros(1, dtype=torch.bfloat16)})


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode()))
def test_whatever_bytes_are_they_are_json_or_damage(data):
    with suppress(Damaged):
        loads(data, "it")


NOT_JSON = {
    "empty": b"",
    "pickle": b"\x80\x04K\x01.",
    "nan": b'{"a":NaN}',
    "infinity": b"[-Infinity]",
    "infinite by its exponent": b"[1e999]",
    "a key twice": b'{"a":1,"b":{"c":1,"c":2}}',
    "a number of 5000 digits": b"[" + b"9" * 5000 + b"]",
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep lists without an end": b"[" * 100_000,
    "deep dicts": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "too long": b" " * (TEXT_LIMIT + 1),
    "too many parts": b"[" + b"0," * PARTS_LIMIT + b"0]",
    "utf-16": '{"a":1}'.encode("utf-16"),
    "utf-32": '{"a":1}'.encode("utf-32"),
    "a byte-order mark": b"\xef\xbb\xbf{}",
    "latin-1": b'{"a":"\xe9"}',
    "half a surrogate pair as bytes": b'["\xed\xa0\x80"]',
    "more after it": b"{} {}",
    "cut off": b'{"a":[1,2',
    "NUL": b'{"a":\0}',
}


@pytest.mark.parametrize("data", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_not_json_as_it_is_written_here_is_damage_that_says_whose(data):
    with pytest.raises(Damaged, match=r"^the file "):
        loads(data, "the file")


def test_a_state_that_is_nested_deeper_than_any_is_written_is_damage():
    form = 1
    for _ in range(400):
        form = {"tuple": [form]}
    with pytest.raises(Damaged, match="nested too deeply"):
        unflatten(form, {})


def test_a_long_list_can_be_asked_for_once():
    with pytest.raises(Damaged, match="cannot be read"):
        unflatten([{"floats": "long"}, {"floats": "long"}], {"long": torch.zeros(100, dtype=torch.float64)})


def test_a_file_that_names_a_part_of_torch_does_not_have_it_imported():
    code = """
import sys
from loopline.checkpoint.tree import unflatten
from loopline.core.errors import Damaged
before = set(sys.modules)
for name in ("onnx", "_dynamo", "_inductor", "_export"):
    try:
        unflatten({"object": ["dtype", name]}, {})
    except Damaged:
        print(sorted(set(sys.modules) - before))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n" * 4


def test_a_reader_that_takes_what_json_gives_is_caught():
    """The check itself: plain json lets through what `loads` refuses."""
    taken = []
    for name, data in NOT_JSON.items():
        try:
            json.loads(data)
            taken.append(name)
        except (ValueError, RecursionError):
            pass
    assert set(taken) >= {"nan", "infinity", "infinite by its exponent", "a key twice", "too many parts", "utf-16"}
