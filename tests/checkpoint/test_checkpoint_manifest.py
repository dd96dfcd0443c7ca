"""The commit record: it comes back as it was written, or it is damaged."""

import hashlib
import json
import math
import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopline.checkpoint.manifest import FORMAT, HASHES, File, Manifest, new_hash
from loopline.checkpoint.tree import PARTS_LIMIT, TEXT_LIMIT
from loopline.core.errors import CannotSave, Damaged, NewerFormat

NAME = "000000000012-7f3a9c2e"
PLAIN = Manifest(
    run_id="a run",
    name=NAME,
    parent="000000000010-00000000",
    serial=7,
    fencing=1,
    step=12,
    epochs=1,
    samples=24,
    world_size=1,
    codec="whole",
    hash="xxh3_128",
    files={"global.json": File(10, "0" * 32), "tensors/model.safetensors": File(20, "f" * 32)},
    metrics={"val/loss": 0.1, "val/best": -math.inf},
    versions={"loopline": "0.1.0"},
    reason="due",
    created="2020-01-01T00:00:00+00:00",
)

counts = st.integers(0, 2**63 - 1)
names = st.from_regex(r"[0-9]{12}-[0-9a-f]{8}", fullmatch=True, alphabet=st.characters(codec="ascii"))
parts = st.from_regex(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,9}", fullmatch=True, alphabet=st.characters(codec="ascii"))
paths = st.lists(parts, min_size=1, max_size=4).map("/".join).filter(lambda path: path != "MANIFEST.json")
digests = st.binary(min_size=16, max_size=32).map(bytes.hex)
texts = st.text(max_size=10)
manifests = st.builds(
    Manifest,
    run_id=texts,
    name=names,
    parent=st.none() | names,
    serial=counts,
    fencing=counts,
    step=counts,
    epochs=counts,
    samples=counts,
    world_size=counts,
    codec=texts,
    hash=st.sampled_from(list(HASHES)),
    files=st.dictionaries(paths, st.builds(File, counts, digests), max_size=5),
    metrics=st.dictionaries(texts, st.floats(allow_nan=False), max_size=5),
    versions=st.dictionaries(texts, texts, max_size=3),
    reason=texts,
    created=texts,
)


def forged(**changes):
    """A manifest with whatever content, whose own hash fits all the same; None takes a field away."""
    body = json.loads(PLAIN.to_bytes())
    del body["self"]
    body |= changes
    return signed({name: value for name, value in body.items() if value is not None or name == "parent"})


def signed(body):
    canonical = json.dumps({name: body[name] for name in sorted(body)}, separators=(",", ":")).encode()
    return json.dumps({**body, "self": hashlib.sha256(canonical).hexdigest()}, separators=(",", ":")).encode()


@given(manifests)
def test_a_manifest_comes_back_as_it_was_written(manifest):
    back = Manifest.from_bytes(manifest.to_bytes(), manifest.name)
    assert (back, back.to_bytes()) == (manifest, manifest.to_bytes())


def test_a_metric_that_is_no_number_is_not_known_when_it_is_read():
    data = replace(PLAIN, metrics={"val/loss": math.nan, "val/best": 0.5}).to_bytes()
    assert Manifest.from_bytes(data, NAME).metrics == {"val/best": 0.5}


def test_a_later_minor_format_with_fields_of_its_own_is_read():
    assert Manifest.from_bytes(forged(format=[FORMAT[0], 9], news="yes"), NAME).step == 12


def test_a_later_major_format_is_told_with_the_version_that_wrote_it():
    with pytest.raises(NewerFormat, match=r"format 2.3, written by loopline '7.1'.*Load it with that version"):
        Manifest.from_bytes(signed({"format": [2, 3], "versions": {"loopline": "7.1"}}), NAME)


@pytest.mark.parametrize("versions", [None, [], {}, "7.1", {"loopline": [1]}])
def test_a_later_major_format_is_told_whatever_else_it_has(versions):
    with pytest.raises(NewerFormat):
        Manifest.from_bytes(signed({"format": [2, 0], "versions": versions, "files": 7}), NAME)


def test_a_flipped_bit_does_not_make_it_one_of_a_later_version():
    data = PLAIN.to_bytes()
    with pytest.raises(Damaged, match="was altered"):
        Manifest.from_bytes(data.replace(b'"format":[1,', b'"format":[9,'), NAME)


def test_a_manifest_copied_to_another_name_is_damaged():
    with pytest.raises(Damaged, match="it was copied here"):
        Manifest.from_bytes(PLAIN.to_bytes(), "000000000014-00000000")


FIELDS = [name for name in json.loads(PLAIN.to_bytes()) if name not in ("self", "parent")]


@pytest.mark.parametrize("field", FIELDS)
def test_without_one_of_its_fields_it_is_damaged(field):
    with pytest.raises(Damaged):
        Manifest.from_bytes(forged(**{field: None}), NAME)


HOSTILE = {
    "up": {"files": {"../global.json": {"size": 1, "hash": "0" * 32}}},
    "up from below": {"files": {"tensors/../../x": {"size": 1, "hash": "0" * 32}}},
    "from the root": {"files": {"/etc/passwd": {"size": 1, "hash": "0" * 32}}},
    "of a windows disk": {"files": {"C:\\x": {"size": 1, "hash": "0" * 32}}},
    "with a backslash": {"files": {"..\\x": {"size": 1, "hash": "0" * 32}}},
    "of a server": {"files": {"//host/x": {"size": 1, "hash": "0" * 32}}},
    "a dot": {"files": {".": {"size": 1, "hash": "0" * 32}}},
    "two dots": {"files": {"..": {"size": 1, "hash": "0" * 32}}},
    "hidden": {"files": {".bashrc": {"size": 1, "hash": "0" * 32}}},
    "hidden below": {"files": {"tensors/.x": {"size": 1, "hash": "0" * 32}}},
    "with NUL": {"files": {"a\0b": {"size": 1, "hash": "0" * 32}}},
    "with a newline": {"files": {"a\nb": {"size": 1, "hash": "0" * 32}}},
    "ending with a newline": {"files": {"a\n": {"size": 1, "hash": "0" * 32}}},
    "with an escape": {"files": {"a\x1b[2Jb": {"size": 1, "hash": "0" * 32}}},
    "with a tilde": {"files": {"~root/x": {"size": 1, "hash": "0" * 32}}},
    "with a percent sign": {"files": {"%2e%2e/x": {"size": 1, "hash": "0" * 32}}},
    "of a URL": {"files": {"s3://bucket/x": {"size": 1, "hash": "0" * 32}}},
    "in other letters": {"files": {"\uff0e\uff0e/x": {"size": 1, "hash": "0" * 32}}},
    "empty": {"files": {"": {"size": 1, "hash": "0" * 32}}},
    "of a folder": {"files": {"tensors/": {"size": 1, "hash": "0" * 32}}},
    "with nothing in between": {"files": {"tensors//x": {"size": 1, "hash": "0" * 32}}},
    "too deep": {"files": {"a/b/c/d/e": {"size": 1, "hash": "0" * 32}}},
    "too long": {"files": {"a" * 129: {"size": 1, "hash": "0" * 32}}},
    "of itself": {"files": {"MANIFEST.json": {"size": 1, "hash": "0" * 32}}},
    "negative size": {"files": {"x": {"size": -1, "hash": "0" * 32}}},
    "size of text": {"files": {"x": {"size": "1", "hash": "0" * 32}}},
    "size that is true": {"files": {"x": {"size": True, "hash": "0" * 32}}},
    "huge size": {"files": {"x": {"size": 2**63, "hash": "0" * 32}}},
    "size of 4000 digits": {"files": {"x": {"size": 10**4000, "hash": "0" * 32}}},
    "hash of text": {"files": {"x": {"size": 1, "hash": "x" * 32}}},
    "hash that is short": {"files": {"x": {"size": 1, "hash": "0" * 31}}},
    "hash that is a number": {"files": {"x": {"size": 1, "hash": 0}}},
    "files without hash": {"files": {"x": {"size": 1}}},
    "files that are a list": {"files": ["global.json"]},
    "files of numbers": {"files": {"x": 1}},
    "files of None": {"files": {"x": None}},
    "unknown hash": {"hash": "crc32"},
    "hash of nothing": {"hash": []},
    "hash by its name in a module": {"hash": "hashlib.sha256"},
    "format of text": {"format": "1.0"},
    "format of one": {"format": [1]},
    "format of truth values": {"format": [True, False]},
    "format of floats": {"format": [1.0, 0.0]},
    "format nought": {"format": [0, 1]},
    "negative format": {"format": [-1, 0]},
    "negative step": {"step": -1},
    "step that is a float": {"step": 1.5},
    "serial of 4000 digits": {"serial": 10**4000},
    "name of nothing": {"name": ".."},
    "name with a path": {"name": f"../{NAME}"},
    "name that is a number": {"name": 12},
    "parent with a path": {"parent": f"../{NAME}"},
    "parent that is a list": {"parent": []},
    "metrics that are a list": {"metrics": []},
    "metric of JSON": {"metrics": {"val/loss": 0.5}},
    "metric of text": {"metrics": {"val/loss": "low"}},
    "metric too large": {"metrics": {"val/loss": "0x1p99999"}},
    "versions of numbers": {"versions": {"loopline": 1}},
    "versions that are text": {"versions": "1.0"},
    "codec that is a list": {"codec": ["whole"]},
    "reason that is None": {"reason": {}},
    "run that is a number": {"run_id": 7},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_what_was_never_written_is_damage_though_its_own_hash_fits(changes):
    with pytest.raises(Damaged, match=f"^The manifest of checkpoint {NAME} is not|^The manifest .* names no format"):
        Manifest.from_bytes(forged(**changes), NAME)


NO_MANIFEST = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"7",
    "a pickle": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    "infinite": b'{"step":1e999,"self":""}',
    "no number": b'{"step":NaN,"self":""}',
    "not the letters that are written": '{"reason":"é","self":""}'.encode("latin-1"),
    "letters that would be longer as they are written": b'{"reason":"'
    + b"\xc3\xa9" * (TEXT_LIMIT // 3)
    + b'","self":""}',
    "nested": b'{"a":' * 900 + b"1" + b"}" * 900,
    "nested deeper": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "larger than any": b" " * (TEXT_LIMIT + 1),
    "of more parts than any": b"[" + b"0," * PARTS_LIMIT + b"0]",
    "without a hash": b'{"step":1}',
    "a hash that is a number": b'{"self":1}',
}


@pytest.mark.parametrize("data", NO_MANIFEST.values(), ids=NO_MANIFEST)
def test_what_is_no_manifest_is_damage(data):
    with pytest.raises(Damaged, match=f"^The manifest of checkpoint {NAME} "):
        Manifest.from_bytes(data, NAME)


def test_every_bit_of_a_manifest_counts():
    data = PLAIN.to_bytes()
    silent = []
    for position in random.Random(0).sample(range(8 * len(data)), 2000):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with suppress(Damaged):
            Manifest.from_bytes(bytes(flipped), NAME)
            silent.append(position)
    assert silent == []


def test_a_manifest_cut_off_anywhere_is_damage():
    data = PLAIN.to_bytes()
    for length in range(len(data)):
        with pytest.raises(Damaged):
            Manifest.from_bytes(data[:length], NAME)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "parent", "x"]), json_values, max_size=4))
def test_whatever_a_signed_manifest_says_it_is_one_or_damage_or_newer(changes):
    with suppress(Damaged, NewerFormat):
        back = Manifest.from_bytes(forged(**changes), NAME)
        assert Manifest.from_bytes(back.to_bytes(), NAME) == back
        back.ref()


def test_more_than_is_read_is_not_written():
    with pytest.raises(CannotSave, match="bytes of text"):
        replace(PLAIN, reason="a" * TEXT_LIMIT).to_bytes()


@pytest.mark.parametrize(("name", "length"), [("xxh3_128", 32), ("sha256", 64)])
def test_known_hashes_are_made_by_name(name, length):
    assert len(new_hash(name).hexdigest()) == length


def test_an_unknown_hash_is_told_with_those_that_are_known():
    with pytest.raises(Damaged, match="'md5' is not known; known are xxh3_128, sha256"):
        new_hash("md5")


def test_a_reader_that_does_not_ask_for_the_own_hash_is_caught():
    """The check itself: what json and the rules for fields alone let through."""
    data = PLAIN.to_bytes()
    silent = 0
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with suppress(ValueError):
            body = json.loads(flipped)
            body.pop("self", None)
            with suppress(Damaged, NewerFormat):
                Manifest.from_bytes(signed(body), NAME)
                silent += 1
    assert silent > 1000
