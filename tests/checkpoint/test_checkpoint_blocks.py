"""Files of tensors: what safetensors reads and writes, and nothing that lies about itself."""

import io
import json
import math
from contextlib import suppress

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as their_load
from safetensors.torch import load_file as their_load_file
from safetensors.torch import save as their_save

from loopline.checkpoint import Whole
from loopline.checkpoint.blocks import Blocks, header_of, tensors_of
from loopline.checkpoint.kinds import DIMENSIONS, KINDS
from loopline.checkpoint.staging import Stage, file_of
from loopline.checkpoint.tree import PARTS_LIMIT, TEXT_LIMIT
from loopline.core.errors import CannotSave, Damaged

THEIRS = [kind for kind in KINDS.values() if kind in safetensors.torch._TYPES.values()]


def content(tensors):
    """Every tensor's type, shape and bits."""
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, tensor in tensors.items()
    }


def file_with(header, body=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray((len(text) if length is None else length).to_bytes(8, "little") + text + body)


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@st.composite
def tensors(draw, dtypes=tuple(KINDS.values())):
    found = {}
    for name in draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=6), unique=True, max_size=5)):
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = math.prod(shape) * dtype.itemsize
        data = draw(st.binary(min_size=size, max_size=size))
        if dtype is torch.bool:
            data = bytes(byte & 1 for byte in data)
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
        tensor = flat.view(dtype).reshape(shape)
        found[name] = tensor.t() if len(shape) == 2 and draw(st.booleans()) else tensor
    return found


@given(tensors())
def test_a_file_holds_what_was_put_into_it(given):
    data = bytearray(b"".join(Blocks(given).chunks()))
    assert content(tensors_of(data, "it")) == content(given)


@given(tensors(tuple(THEIRS)))
def test_safetensors_reads_what_is_written_here(given):
    assert content(their_load(b"".join(Blocks(given).chunks()))) == content(given)


@given(tensors(tuple(THEIRS)))
def test_what_safetensors_writes_is_read_here(given):
    whole = {name: tensor.contiguous() for name, tensor in given.items()}
    assert content(tensors_of(bytearray(their_save(whole, {"format": "pt"})), "it")) == content(given)


def test_safetensors_reads_files_of_tensors_whose_sizes_do_not_fit_each_other(tmp_path):
    given = {"bytes": torch.arange(3, dtype=torch.int8), "doubles": torch.ones(2, dtype=torch.float64)}
    (tmp_path / "f").write_bytes(b"".join(Blocks(given).chunks()))
    assert content(their_load_file(tmp_path / "f")) == content(given)


@given(tensors(), st.integers(0, 5))
def test_a_staged_copy_makes_a_file_with_the_same_tensors(given, cut):
    prefixed = {f"{'x' * cut}{name}": tensor for name, tensor in given.items()}
    image = Stage().take("place", prefixed, cut)
    assert content(tensors_of(bytearray(b"".join(file_of(image).chunks())), "it")) == content(given)


@settings(max_examples=50)
@given(tensors(), st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 300)), max_size=5))
def test_a_file_can_be_read_from_anywhere_in_pieces(given, reads):
    file = Blocks(given)
    whole = b"".join(file.chunks())
    plain = io.BytesIO(whole)
    assert file.nbytes == len(whole)
    for at, count in reads:
        assert (file.seek(at), file.read(count), file.tell()) == (plain.seek(at), plain.read(count), plain.tell())
    assert (file.seek(-3, 2), file.read()) == (plain.seek(-3, 2), plain.read())
    assert (file.seek(0), file.readall()) == (0, whole)


def test_what_is_read_has_memory_of_its_own():
    data = bytearray(b"".join(Blocks({"a": torch.ones(3), "b": torch.ones(3)}).chunks()))
    found = tensors_of(data, "it")
    data[:] = bytes(len(data))
    found["a"].zero_()
    assert found["b"].tolist() == [1.0, 1.0, 1.0]


def test_complex_numbers_that_are_read_conjugated_are_written_so():
    number = torch.tensor([1 + 2j, 3 - 1j])
    data = bytearray(b"".join(Blocks({"conj": number.conj(), "neg": number.conj().imag}).chunks()))
    found = tensors_of(data, "it")
    assert (found["conj"].tolist(), found["neg"].tolist()) == ([1 - 2j, 3 + 1j], [-2.0, 1.0])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32], ids=str)
def test_a_type_that_the_format_does_not_have_is_refused_by_name(dtype):
    with pytest.raises(CannotSave, match=r"^model/w is a tensor of torch.complex"):
        Blocks({"model/w": torch.zeros(1, dtype=dtype)})


def test_the_name_that_the_format_has_for_itself_is_refused():
    with pytest.raises(CannotSave, match="__metadata__"):
        Blocks({"__metadata__": torch.zeros(1)})


def test_names_longer_than_are_read_are_not_written():
    with pytest.raises(CannotSave, match=f"{TEXT_LIMIT} bytes"):
        header_of({"a" * TEXT_LIMIT: torch.zeros(1)})


def test_more_tensors_than_are_read_from_a_file_are_not_written():
    one = torch.zeros(0, dtype=torch.uint8)
    with pytest.raises(CannotSave, match=f"{PARTS_LIMIT} parts"):
        header_of({f"{i}": one for i in range(PARTS_LIMIT // 6)})


def test_more_tensors_than_are_read_are_not_written():
    one = torch.zeros(0, dtype=torch.uint8)
    sections = {f"optimizer/{i}": {f"optimizer/{i}/{j}": one for j in range(2**16)} for i in range(3)}
    with pytest.raises(CannotSave, match="tensors; 131072 can be kept"):
        Whole().write(sections, None)


BODY = b"\x01\x02\x03\x04"
LIES = {
    "nothing": bytearray(),
    "seven bytes": bytearray(7),
    "a header longer than the file": file_with({"a": entry()}, BODY, length=10_000),
    "a header of 2**63 bytes": file_with({"a": entry()}, BODY, length=2**63),
    "a header shorter than it is": file_with({"a": entry()}, BODY, length=20),
    "a header longer than it is": file_with({"a": entry()}, BODY, length=len(json.dumps({"a": entry()})) + 2),
    "a header longer than is read": bytearray((TEXT_LIMIT + 8).to_bytes(8, "little") + b" " * (TEXT_LIMIT + 8)),
    "no header": file_with(b""),
    "a pickle": bytearray(b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94."),
    "a header that is a list": file_with([]),
    "a header that is a number": file_with(b"7"),
    "a header with a name twice": file_with(b'{"a":{},"a":{}}'),
    "a header nested deeply": file_with(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "an entry that is a list": file_with({"a": []}),
    "an entry that is a text": file_with({"a": "U8"}),
    "an entry that is nothing": file_with({"a": None}),
    "an entry without a type": file_with({"a": {"shape": [4], "data_offsets": [0, 4]}}, BODY),
    "an entry without a shape": file_with({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, BODY),
    "an entry without offsets": file_with({"a": {"dtype": "U8", "shape": [4]}}, BODY),
    "a type that there is not": file_with({"a": entry("F33")}, BODY),
    "a type that is a list": file_with({"a": entry(["U8"])}, BODY),
    "a type by its name in torch": file_with({"a": entry("uint8")}, BODY),
    "a shape that is a text": file_with({"a": {"dtype": "U8", "shape": "4", "data_offsets": [0, 4]}}, BODY),
    "a shape that is a dict": file_with({"a": {"dtype": "U8", "shape": {}, "data_offsets": [0, 1]}}, b"1"),
    "a shape that is a number": file_with({"a": {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]}}, BODY),
    "a shape of text": file_with({"a": entry(shape=["4"])}, BODY),
    "a shape of floats": file_with({"a": entry(shape=[4.0])}, BODY),
    "a shape of truth values": file_with({"a": entry(shape=[True, 4])}, BODY),
    "a negative shape": file_with({"a": entry(shape=[-2, -2])}, BODY),
    "a shape that is too large": file_with({"a": entry(shape=[5])}, BODY),
    "a shape that is too small": file_with({"a": entry(shape=[3])}, BODY),
    "a shape whose product wraps around to fit": file_with({"a": entry(shape=[2**32, 2**32 + 1])}, BODY),
    "a huge shape of nothing": file_with({"a": entry(shape=[0, 2**47, 2**47], offsets=(0, 0))}),
    "a huge number in a shape of nothing": file_with({"a": entry(shape=[10**4000, 0], offsets=(0, 0))}),
    "a shape of 100 000 dimensions": file_with({"a": entry(shape=[1] * 100_000, offsets=(0, 1))}, b"1"),
    "a product that takes minutes": file_with({"a": entry(shape=[2**47 - 1] * 50_000)}, BODY),
    "a dimension more than torch has": file_with({"a": entry(shape=[1] * (DIMENSIONS + 1), offsets=(0, 1))}, b"1"),
    "an offset too few": file_with({"a": entry(offsets=[4])}, BODY),
    "an offset too many": file_with({"a": entry(offsets=[0, 4, 4])}, BODY),
    "offsets of text": file_with({"a": entry(offsets=["0", "4"])}, BODY),
    "offsets that are a text": file_with({"a": {"dtype": "U8", "shape": [4], "data_offsets": "04"}}, BODY),
    "offsets of lists": file_with({"a": entry(offsets=[[0], [4]])}, BODY),
    "offsets that are None": file_with({"a": {"dtype": "U8", "shape": [4], "data_offsets": None}}, BODY),
    "negative offsets": file_with({"a": entry(offsets=[-4, 0])}, BODY),
    "offsets backwards": file_with({"a": entry(offsets=[4, 0])}, BODY),
    "offsets beyond the end": file_with({"a": entry(shape=[8], offsets=[0, 8])}, BODY),
    "offsets far beyond the end": file_with({"a": entry(shape=[2**50], offsets=[0, 2**50])}, BODY),
    "offsets that do not begin at nought": file_with({"a": entry(shape=[3], offsets=[1, 4])}, BODY),
    "offsets with a gap": file_with(
        {"a": entry(shape=[1], offsets=[0, 1]), "b": entry(shape=[1], offsets=[3, 4])}, BODY
    ),
    "two tensors at one place": file_with({"a": entry(), "b": entry()}, BODY),
    "two tensors that overlap": file_with(
        {"a": entry(shape=[3], offsets=[0, 3]), "b": entry(shape=[2], offsets=[2, 4])}, BODY
    ),
    "offsets of two kinds": file_with({"a": entry(), "b": entry(offsets=["0", None])}, BODY),
    "bytes that belong to nobody": file_with({"a": entry()}, BODY + b"more"),
    "bytes and no tensors": file_with({}, BODY),
    "a body cut off": file_with({"a": entry()}, BODY[:3]),
    "a truth value of 2": file_with({"a": entry("BOOL")}, BODY),
    "half a float": file_with({"a": entry("F32", shape=[1], offsets=[0, 2])}, BODY[:2]),
    "more parts than are read": file_with(b"[" + b"[]," * (PARTS_LIMIT // 2) + b"0]"),
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_a_file_that_lies_about_itself_is_damage_that_says_which_file(data):
    with pytest.raises(Damaged, match=r"^the file "):
        tensors_of(data, "the file")


def test_every_file_cut_off_anywhere_is_damage():
    data = b"".join(Blocks({"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.int16)}).chunks())
    for length in range(len(data)):
        with pytest.raises(Damaged):
            tensors_of(bytearray(data[:length]), "it")


SEED = b"".join(Blocks({"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.bool)}).chunks())
TOKENS = [
    b'"U8"',
    b'"F64"',
    b'"BOOL"',
    b"-1",
    b"0",
    b"1e3",
    b"99999999999",
    b"[]",
    b"{}",
    b"null",
    b"\x00",
    b'"a"',
    b",",
]


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(SEED)), st.integers(0, 6), st.sampled_from(TOKENS)), max_size=5))
def test_whatever_is_done_to_a_file_it_is_a_file_of_tensors_or_damage(changes):
    data = bytearray(SEED)
    for at, count, token in changes:
        data[at : at + count] = token
    with suppress(Damaged):
        tensors_of(data, "it")


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from([*KINDS, "X", None]),
                "shape": st.lists(st.integers(-1, 4) | st.sampled_from([2**47, 2**64, 10**30]), max_size=4),
                "data_offsets": st.lists(st.integers(-1, 40) | st.just(2**47), min_size=1, max_size=3),
            }
        ),
    ),
    st.binary(max_size=40),
)
def test_whatever_a_header_says_it_is_a_file_of_tensors_or_damage(header, body):
    with suppress(Damaged):
        found = tensors_of(file_with(header, body), "it")
        assert sum(tensor.nbytes for tensor in found.values()) == len(body)


def test_a_reader_that_trusts_the_header_is_caught():
    """The check itself: lies that a reader which believes shapes, offsets and lengths takes for files."""
    believed = []
    for name, data in LIES.items():
        with suppress(Exception):
            _trusting(data)
            believed.append(name)
    assert set(believed) >= {
        "a shape that is too small",
        "two tensors at one place",
        "two tensors that overlap",
        "offsets that do not begin at nought",
        "offsets with a gap",
        "bytes that belong to nobody",
        "a shape of 100 000 dimensions",
        "a truth value of 2",
    }


def _trusting(data):
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    found = {}
    for name, said in header.items():
        start, stop = said["data_offsets"]
        flat = torch.frombuffer(bytearray(body[start:stop]), dtype=KINDS[said["dtype"]])
        found[name] = flat.as_strided(said["shape"], [1] * len(said["shape"]))
    return found
