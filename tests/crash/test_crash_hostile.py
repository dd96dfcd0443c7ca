"""A9: whatever a checkpoint says, all its hashes in order, nothing is executed and nothing outside of it is read."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import pickle
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import whole
from whole import BEFORE, NEWEST

from loopline.checkpoint import Best, Checkpointer, Latest
from loopline.checkpoint.blocks import Blocks
from loopline.checkpoint.dcp import Dcp
from loopline.checkpoint.shelf import Shelf
from loopline.checkpoint.tree import PARTS_LIMIT, TEXT_LIMIT
from loopline.core.errors import Mismatch, NewerFormat, StoreError
from loopline.stores import LocalStore, MemoryStore

FULL = os.environ.get("LOOPLINE_FULL") == "1"
FUZZED = 10_000 if FULL else 1000
MB = 2**20
GLOBAL, MINE = "global.json", "rank-00000.json"
MODEL, OPTIMIZER = "tensors/model.safetensors", "tensors/optimizer-0.safetensors"
FILES = [GLOBAL, "global.safetensors", MINE, "rank-00000.safetensors", MODEL, OPTIMIZER]


@pytest.fixture
def outside(tmp_path):
    """A folder that no run has anything to do with."""
    place = tmp_path / "outside"
    place.mkdir()
    return place


@pytest.fixture
def went_on(folder, caplog):
    """Trains to the end, and gives what that came to, from which step it went on, and what was set aside."""

    def run():
        with caplog.at_level(logging.INFO, "loopline"):
            found = whole.train(folder, whole.WHOLE)
        begun = [record.args[0][:12] for record in caplog.records if record.msg.startswith("Going on from checkpoint")]
        aside = folder / "quarantine"
        return found, begun, sorted(path.name[:12] for path in aside.iterdir()) if aside.exists() else []

    return run


def trees(place):
    """Everything in a folder: paths, kinds, contents and times."""
    found = {}
    for path in sorted(place.rglob("*")):
        status = path.lstat()
        found[path.relative_to(place)] = status.st_mtime_ns, path.read_bytes() if path.is_file() else status.st_mode
    return found


def text(said):
    return said if isinstance(said, bytes) else json.dumps(said).encode()


def tensors(header, body=b""):
    data = text(header)
    return len(data).to_bytes(8, "little") + data + body


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def said_globally(**sections):
    """What global.json says where some sections are otherwise, and no file of a codec is asked for."""
    return text({"sections": sections, "tensors": []})


class Payload:
    """Executes as soon as it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def pickled(marker, kind):
    if kind == "torch.save":
        stream = io.BytesIO()
        torch.save(Payload(marker), stream)
        return stream.getvalue()
    if kind == "torch.save before 1.6":
        stream = io.BytesIO()
        torch.save(Payload(marker), stream, _use_new_zipfile_serialization=False)
        return stream.getvalue()
    return pickle.dumps(Payload(marker), protocol=kind)


KINDS = [0, 2, 4, 5, "torch.save", "torch.save before 1.6"]


def test_the_hashes_of_what_is_forged_here_are_in_order(newest, uncut, went_on):
    """The check itself: a checkpoint that is written anew by its forger is taken."""
    whole.forge(newest, {GLOBAL: (newest / GLOBAL).read_bytes() + b" "})
    assert went_on() == (uncut, [NEWEST], [])


@pytest.mark.parametrize("kind", KINDS)
def test_the_payload_is_executed_by_who_unpickles_it(tmp_path, kind):
    """The check itself."""
    marker = tmp_path / "executed"
    if isinstance(kind, int):
        pickle.loads(pickled(marker, kind))
    else:
        torch.load(io.BytesIO(pickled(marker, kind)), weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_place_of_a_file_is_damage_and_not_executed(newest, tmp_path, folder, name, kind):
    whole.forge(newest, {name: pickled(tmp_path / "executed", kind)})
    said = whole.refused(LocalStore(folder), newest.name)
    assert (said is not None and name in said, (tmp_path / "executed").exists()) == (True, False)


@pytest.mark.parametrize("kind", [0, 4])
def test_a_pickle_within_a_file_is_damage_and_not_executed(newest, tmp_path, folder, kind):
    payload = pickled(tmp_path / "executed", kind)
    files = whole.content(newest)
    for name in FILES:
        whole.forge(newest, {**files, name: files[name] + payload})
        assert name in (whole.refused(LocalStore(folder), newest.name) or "")
    assert not (tmp_path / "executed").exists()


def test_a_run_with_a_pickle_in_every_file_of_its_newest_checkpoint_goes_on_from_the_one_before(
    newest, tmp_path, uncut, went_on
):
    whole.forge(newest, {name: pickled(tmp_path / "executed", 4) for name in FILES})
    assert (went_on(), (tmp_path / "executed").exists()) == ((uncut, [BEFORE], [NEWEST]), False)


def test_a_pickle_in_place_of_the_manifest_is_damage_and_not_executed(newest, tmp_path, uncut, went_on):
    (newest / "MANIFEST.json").write_bytes(pickled(tmp_path / "executed", 4))
    assert (went_on(), (tmp_path / "executed").exists()) == ((uncut, [BEFORE], [NEWEST]), False)


def test_a_pickle_in_place_of_the_runs_own_files_is_not_executed(folder, tmp_path):
    places = [path for path in whole.files(folder) if "checkpoints" not in path.parts and path.name != "LOCK"]
    (folder / "pins").mkdir(exist_ok=True)
    for path in [*places, folder / "pins" / "best.json", folder / "LOCK", folder / "LEASE-000009"]:
        path.write_bytes(pickled(tmp_path / "executed", 4))
    assert whole.in_a_child(whole.ended, folder).startswith("Damaged: run.json")
    assert not (tmp_path / "executed").exists()


BOMBS: dict[str, dict[str, bytes]] = {
    "deep lists": {GLOBAL: b"[" * 200_000 + b"]" * 200_000},
    "deep lists that nobody closes": {MINE: b"[" * 200_000},
    "deep dicts": {GLOBAL: b'{"a":' * 100_000 + b"1" + b"}" * 100_000},
    "deep forms": {GLOBAL: said_globally(progress=json.loads('{"tuple":[' * 300 + "1" + "]}" * 300))},
    "deep forms in a rank": {MINE: text({"rng": json.loads('{"map":{"a":' * 240 + "1" + "}}" * 240)})},
    "larger than is read": {GLOBAL: b" " * (TEXT_LIMIT + 1)},
    "empty lists": {GLOBAL: b"[" + b"[]," * (TEXT_LIMIT // 3 - 2) + b"1]"},
    "empty dicts": {MINE: b"[" + b"{}," * (TEXT_LIMIT // 3 - 2) + b"1]"},
    "brackets in a text": {GLOBAL: b'{"a":"' + b"[" * (TEXT_LIMIT - 100) + b'"}'},
    "numbers of many digits": {GLOBAL: b"[" + b",".join([b"9" * 4300] * 1900) + b"]"},
    "a number of all digits": {MINE: b"9" * (TEXT_LIMIT - 10)},
    "no number": {GLOBAL: b'{"sections":{"progress":NaN},"tensors":[]}'},
    "infinity": {GLOBAL: b'{"sections":{"progress":1e999},"tensors":[]}'},
    "keys that stand twice": {GLOBAL: b'{"sections":{},"sections":{},"tensors":[]}'},
    "nothing": {GLOBAL: b"", MINE: b"", MODEL: b"", OPTIMIZER: b""},
    "null": {GLOBAL: b"null"},
    "a list": {GLOBAL: b"[]"},
    "a rank that is a list": {MINE: b"[]"},
    "sections that are a list": {GLOBAL: b'{"sections":[],"tensors":[]}'},
    "tensors that are a text": {GLOBAL: b'{"sections":{},"tensors":"model"}'},
    "tensors of numbers": {GLOBAL: b'{"sections":{},"tensors":[1]}'},
    "tensors that are not there": {GLOBAL: b'{"sections":{},"tensors":["other"]}'},
    "tensors with a path": {GLOBAL: b'{"sections":{},"tensors":["../../../outside"]}'},
    "tensors with NUL": {GLOBAL: b'{"sections":{},"tensors":["\\u0000"]}'},
    "an object that nobody knows": {GLOBAL: said_globally(a={"object": ["os.system", "true"]})},
    "an object in a module": {GLOBAL: said_globally(a={"object": ["torch.nn.Linear", {"tuple": [1, 1]}]})},
    "an object to be called": {GLOBAL: said_globally(a={"object": ["builtins.eval", "1"]})},
    "an object with what it cannot take": {MINE: text({"a": {"object": ["deque", {"map": {}}]}})},
    "a tensor of another section's": {MINE: text({"a": {"tensor": "model/0.weight"}})},
    "one long list a thousand times": {
        "global.safetensors": b"".join(Blocks({"long": torch.zeros(MB, dtype=torch.int64)}).chunks()),
        GLOBAL: said_globally(**{f"s{i}": {"integers": "long"} for i in range(1000)}),
    },
    "bytes as a list of floats": {
        "global.safetensors": b"".join(Blocks({"long": torch.zeros(32 * MB, dtype=torch.uint8)}).chunks()),
        GLOBAL: said_globally(a={"floats": "long"}),
    },
    "one file a hundred thousand times": {GLOBAL: text({"sections": {"a": {"x": 1}}, "tensors": ["model"] * 100_000})},
    "a header longer than the file": {MODEL: (2**40).to_bytes(8, "little") + b"{}"},
    "a header of all ones": {MODEL: b"\xff" * 64},
    "a header as long as is read": {OPTIMIZER: tensors(b" " * TEXT_LIMIT)},
    "a header of empty lists": {OPTIMIZER: tensors(b"[" + b"[]," * (TEXT_LIMIT // 3 - 2) + b"1]")},
    "a petabyte": {MODEL: tensors({"0.weight": entry(shape=[2**50], offsets=[0, 2**50])})},
    "a product that wraps around": {MODEL: tensors({"0.weight": entry(shape=[2**32, 2**32], offsets=[0, 0])})},
    "a product that takes minutes": {MODEL: tensors({"0.weight": entry(shape=[2**47] * 100_000)})},
    "a shape of a hundred thousand ones": {
        MODEL: tensors({"0.weight": entry(shape=[1] * 100_000, offsets=[0, 1])}, b"1")
    },
    "a huge shape of nothing": {MODEL: tensors({"0.weight": entry(shape=[0, 2**62, 2**62], offsets=[0, 0])})},
    "offsets that overlap": {MODEL: tensors({"a": entry(), "b": entry()}, b"1234")},
    "offsets beyond the end": {MODEL: tensors({"a": entry(shape=[5], offsets=[0, 5])}, b"1234")},
    "offsets before the beginning": {MODEL: tensors({"a": entry(offsets=[-4, 0])}, b"1234")},
    "offsets of 4000 digits": {MODEL: tensors({"a": entry(offsets=[10**4000, 10**4000 + 4])}, b"1234")},
    "a type that there is not": {MODEL: tensors({"a": entry("OBJECT")}, b"1234")},
    "truth values that are neither": {MODEL: tensors({"a": entry("BOOL")}, b"1234")},
}


def manifests(checkpoint: Path) -> Iterator[tuple[str, bytes]]:
    """Manifests whose own hash fits, for the files that are there."""
    plain = json.loads((checkpoint / "MANIFEST.json").read_bytes())
    files = plain["files"]
    model = files[MODEL]
    for path in (
        "../model.safetensors",
        "../../../outside/model.safetensors",
        "/etc/passwd",
        "tensors/../../x",
        "..\\x",
        "C:\\x",
        "\\\\host\\x",
        ".hidden",
        ".",
        "..",
        "",
        "a\0b",
        "a\nb",
        "tensors/",
        "~/x",
        "file:///etc/passwd",
        "a" * 200,
        "a/" * 50 + "b",
        "MANIFEST.json",
    ):
        yield f"a file {path!r}", whole.signed({**plain, "files": {**files, path: model}})
    for name in ("../x", "/x", "", "000000000008-7f3a9c2e", "000000000008-7f3a9c2e\n", "0" * 21):
        yield f"the name {name!r}", whole.signed({**plain, "name": name})
    for size in (-1, 0, model["size"] - 1, model["size"] + 1, 2**62, 2**70, 1.5, "1", None, True, 10**4000):
        yield f"a size of {size!r:.40}", whole.signed({**plain, "files": {**files, MODEL: {**model, "size": size}}})
    for odd in ("", "0" * 32, "0" * 64, "x" * 32, 7, None, model["hash"].upper()):
        yield f"a hash {odd!r}", whole.signed({**plain, "files": {**files, MODEL: {**model, "hash": odd}}})
    for odd in ("md5", "crc32", "", None, 7, [], {}, "__class__", "sha256"):
        yield f"hashes made by {odd!r}", whole.signed({**plain, "hash": odd})
    for odd in (None, [], "", 7, {GLOBAL: None}, {GLOBAL: []}, {GLOBAL: {}}, {}):
        yield f"files {odd!r}", whole.signed({**plain, "files": odd})
    for odd in ([0, 0], [1], [], "1", None, [1, 0, 0], ["1", 0], [1.0, 0], [True, True], [-1, 0], {}):
        yield f"the format {odd!r}", whole.signed({**plain, "format": odd})
    for name in ("step", "serial", "fencing", "epochs", "samples", "world_size"):
        for odd in (-1, 1.5, "1", None, 10**4000, []):
            yield f"{name} {odd!r:.40}", whole.signed({**plain, name: odd})
    for odd in ({"a": "0x1p99999"}, {"a": 1.5}, {"a": None}, [], "a", {"a": "low"}):
        yield f"metrics {odd!r}", whole.signed({**plain, "metrics": odd})
    yield "a thousand files that are not there", whole.signed({**plain, "files": {f"f{i}": model for i in range(1000)}})
    yield (
        "more files than are read",
        whole.signed({**plain, "files": {f"f{i}": model for i in range(PARTS_LIMIT // 4)}}),
    )
    yield "a nested reason", whole.signed({**plain, "reason": json.loads("[" * 900 + "]" * 900)})
    yield "not a number in it", b'{"step":NaN,"self":""}'
    yield "an infinity in it", b'{"step":1e999,"self":""}'
    yield "deep lists", b"[" * 200_000
    yield "larger than is read", b" " * (TEXT_LIMIT + 1)
    yield "no object", b"[]"


def heavy(kind: str) -> dict[str, bytes]:
    """What may be in a checkpoint, at its heaviest: text that grows when it is parsed, many tensors, long lists."""
    dicts = [{"map": {"": 0}}] * (PARTS_LIMIT // 3 - 20)
    empty = torch.zeros(0, dtype=torch.uint8)
    many = b"".join(Blocks({f"{i}": empty for i in range(65_000)}).chunks())
    match kind:
        case "a long text":
            return {GLOBAL: said_globally(progress="a" * (TEXT_LIMIT - 100))}
        case "a wide text":
            return {
                GLOBAL: b'{"sections":{"a":"' + "\U0001f600".encode() + b"a" * (TEXT_LIMIT - 99) + b'"},"tensors":[]}'
            }
        case "a long number":
            return {MINE: text({"a": {"object": ["int", "f" * (TEXT_LIMIT - 100)]}})}
        case "small dicts":
            return {GLOBAL: said_globally(a=dicts), MINE: text({"a": dicts})}
        case "small tensors":
            return {MODEL: many, OPTIMIZER: many, GLOBAL: text({"sections": {}, "tensors": ["model", "optimizer/0"]})}
        case "small tensors everywhere":
            return {name: many for name in FILES if name.endswith(".safetensors")} | {
                GLOBAL: text({"sections": {}, "tensors": ["model", "optimizer/0"]})
            }
        case "more small tensors":
            sections = [f"s{i}" for i in range(20)]
            files = {f"tensors/{section}.safetensors": many for section in sections}
            return {**files, GLOBAL: text({"sections": {}, "tensors": sections})}
        case "a long list":
            numbers = b"".join(Blocks({"a": torch.arange(10**9, 10**9 + 7 * MB)}).chunks())
            return {"global.safetensors": numbers, GLOBAL: said_globally(a={"integers": "a"})}
        case "many pieces":
            pieces = [[0, [i], [1]] for i in range(100_000)]
            one = b"".join(Blocks({"a": torch.zeros(100_000, dtype=torch.uint8)}).chunks())
            said = {"model/0.weight": {"dtype": "U8", "size": [100_000], "chunks": pieces}}
            plan = text({"files": ["tensors/rank-00000.safetensors"], "tensors": said}).replace(b" ", b"")
            return {"tensors/METADATA.json": plan, "tensors/rank-00000.safetensors": one}
        case "many tensors in pieces":
            said = {f"model/{i}": {"dtype": "U8", "size": [0], "chunks": []} for i in range(130_000)}
            plan = text({"files": ["tensors/rank-00000.safetensors"], "tensors": said}).replace(b" ", b"")
            return {"tensors/METADATA.json": plan, "tensors/rank-00000.safetensors": many}
        case "a large model":
            return {MODEL: b"".join(Blocks({"a": torch.ones(40 * MB)}).chunks())}
    raise ValueError(kind)


HEAVY = ("a long text", "a wide text", "a long number", "small dicts", "small tensors", "small tensors everywhere")
HEAVY += ("more small tensors", "a long list", "a large model", "many pieces", "many tensors in pieces")


def weighed(folder, newest, files):
    """How loading a forged checkpoint ends, in a process of its own, and the memory it took above what it may."""
    for name, data in files.items():
        (newest / name).write_bytes(data)
    whole.forge(newest, codec="dcp" if "tensors/METADATA.json" in files else "whole")
    said, taken = whole.in_a_child(whole.weighed, folder, newest.name)
    size = sum(path.stat().st_size for path in whole.files(newest)) / MB
    print(f"{said:.100}: {taken:.0f} MB for files of {size:.0f} MB")
    return said.split(":")[0].split()[0], max(0.0, taken - 2 * size - 256)


@pytest.mark.parametrize("files", BOMBS.values(), ids=BOMBS)
def test_a_file_that_is_a_bomb_is_damage_and_takes_little_memory(newest, folder, files):
    assert weighed(folder, newest, files) == ("Damaged", 0.0)


@pytest.mark.parametrize("kind", HEAVY if FULL else ("small dicts", "small tensors", "a long list"))
def test_the_heaviest_that_may_be_there_takes_twice_its_size_and_256_mb_at_most(newest, folder, kind):
    ending, above = weighed(folder, newest, heavy(kind))
    assert (ending in ("loaded", "Damaged"), above) == (True, 0.0)


def outcome(store: Any, name: str) -> str:
    """How loading a checkpoint ends: `loaded`, or the name of the error's class, whatever that is."""
    try:
        whole.loaded(store, name)
    except Exception as error:  # noqa: BLE001 - which it is, is what is asked
        return type(error).__name__
    return "loaded"


def test_a_manifest_that_was_never_written_is_damage_though_its_own_hash_fits(newest, folder):
    found = {}
    for case, manifest in manifests(newest):
        (newest / "MANIFEST.json").write_bytes(manifest)
        found[case] = outcome(LocalStore(folder), newest.name)
    assert (len(found) > 100, {case: ending for case, ending in found.items() if ending != "Damaged"}) == (True, {})


def test_no_file_outside_is_opened_nothing_imported_and_no_process_or_socket_asked_for(newest, folder, outside):
    """A copy of the model lies where the manifest points to, so that whoever follows it finds what it expects."""
    shutil.copyfile(newest / MODEL, outside / "model.safetensors")
    plain = json.loads((newest / "MANIFEST.json").read_bytes())
    way = os.path.relpath(outside / "model.safetensors", newest)
    for path in (way, str(outside / "model.safetensors"), f"tensors/../{way}"):
        files = {**plain["files"], path: plain["files"][MODEL]}
        (newest / "MANIFEST.json").write_bytes(whole.signed({**plain, "files": files}))
        said, paths, asked = whole.in_a_child(whole.watched, folder, newest.name)
        names = {name for name in paths if name != str(folder)}
        assert (said.split(":")[0], {name for name in names if "/" in name or name in (".", "..")}, asked) == (
            "Damaged",
            set(),
            set(),
        )


def test_a_program_that_follows_what_a_file_says_is_caught(newest, folder, outside, monkeypatch):
    """The check itself: an intact checkpoint loads, and a read outside is seen."""
    said, paths, asked = whole.in_a_child(whole.watched, folder, newest.name)
    assert (said, asked) == ("loaded 10 sections", set())
    assert paths >= {str(folder), "MANIFEST.json", "global.json", "model.safetensors"}
    assert whole.in_a_child(whole.strayed, outside) == {str(outside / "x"), "subprocess.Popen", "compile", "exec"}


def link_to_a_copy(path, outside):
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def link_to_zeros(path, outside):
    path.unlink()
    path.symlink_to("/dev/zero")


def link_to_nothing(path, outside):
    path.unlink()
    path.symlink_to(outside / "nothing")


def link_to_itself(path, outside):
    path.unlink()
    path.symlink_to(path)


def pipe(path, outside):
    path.unlink()
    os.mkfifo(path)


def folder_of_that_name(path, outside):
    path.unlink()
    path.mkdir()
    (path / "file").write_bytes(b"x")


def unix_socket(path, outside):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        os.chdir(path.parent)  # the name of a socket has 108 bytes at most
        bound.bind(path.name)


IN_PLACE_OF_A_FILE = [
    link_to_a_copy,
    link_to_zeros,
    link_to_nothing,
    link_to_itself,
    pipe,
    folder_of_that_name,
    unix_socket,
]


@pytest.mark.parametrize("name", [MODEL, GLOBAL])
@pytest.mark.parametrize("put", IN_PLACE_OF_A_FILE)
def test_what_is_no_file_is_damage_and_no_link_is_followed(
    newest, uncut, went_on, outside, name, put, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    put(newest / name, outside)
    before = trees(outside)
    assert (went_on(), trees(outside)) == ((uncut, [BEFORE], [NEWEST]), before)


def test_a_folder_of_a_checkpoint_that_is_a_link_is_damage(newest, uncut, went_on, outside):
    (newest / "tensors").rename(outside / "tensors")
    (newest / "tensors").symlink_to(outside / "tensors")
    before = trees(outside)
    assert (went_on(), trees(outside)) == ((uncut, [BEFORE], [NEWEST]), before)


@pytest.mark.parametrize("put", IN_PLACE_OF_A_FILE)
def test_a_manifest_that_is_no_file_commits_nothing(newest, uncut, went_on, outside, put, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    put(newest / "MANIFEST.json", outside)
    before = trees(outside)
    assert (went_on(), trees(outside)) == ((uncut, [BEFORE], []), before)


def test_a_checkpoint_that_is_a_link_to_a_whole_one_elsewhere_is_none(newest, uncut, went_on, outside):
    newest.rename(outside / newest.name)
    newest.symlink_to(outside / newest.name)
    before = trees(outside)
    assert (went_on(), trees(outside)) == ((uncut, [BEFORE], []), before)


def test_a_folder_of_checkpoints_that_is_a_link_is_refused_by_name(folder, outside):
    (folder / "checkpoints").rename(outside / "checkpoints")
    (folder / "checkpoints").symlink_to(outside / "checkpoints")
    before = trees(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        whole.train(folder, whole.WHOLE)
    assert trees(outside) == before


def test_nothing_is_set_aside_through_a_link(folder, newest, uncut, outside, caplog):
    (newest / MODEL).unlink()
    (folder / "quarantine").symlink_to(outside)
    assert (whole.train(folder, whole.WHOLE), list(outside.iterdir()), newest.exists()) == (uncut, [], True)
    assert "could not be moved" in caplog.text


def test_a_link_in_place_of_the_runs_identity_is_refused(folder, outside):
    link_to_a_copy(folder / "run.json", outside)
    before = trees(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        whole.train(folder, whole.WHOLE)
    assert trees(outside) == before


def test_a_link_in_place_of_a_pin_pins_nothing(folder, newest, outside):
    (folder / "pins").mkdir(exist_ok=True)
    (outside / "best.json").write_text(json.dumps({"checkpoint": newest.name}))
    (folder / "pins" / "mine.json").symlink_to(outside / "best.json")
    assert "mine" not in Shelf(LocalStore(folder)).pins()


def test_removing_a_checkpoint_removes_nothing_that_it_points_to(folder, newest, outside):
    (newest / "tensors").rename(outside / "tensors")
    (newest / "tensors").symlink_to(outside / "tensors")
    link_to_a_copy(newest / GLOBAL, outside)
    before = trees(outside)
    Shelf(LocalStore(folder)).remove(newest.name)
    assert (trees(outside), newest.name in Shelf(LocalStore(folder)).committed()) == (before, False)


def test_a_hard_link_is_read_and_removed_and_never_written_to(folder, newest, uncut, went_on, outside):
    os.link(newest / MODEL, outside / "model.safetensors")
    before = (outside / "model.safetensors").read_bytes()
    assert went_on() == (uncut, [NEWEST], [])
    whole.train(LocalStore(folder), whole.WHOLE + 8, save=True)
    assert (newest.exists(), (outside / "model.safetensors").read_bytes()) == (False, before)


def test_a_file_that_never_ends_is_read_no_further_than_its_size(folder, newest):
    with (newest / MODEL).open("r+b") as file:
        file.truncate(2**40)  # it takes no room on the disk
    said, taken = whole.in_a_child(whole.weighed, folder, newest.name)
    assert (f"{MODEL} has 1009 bytes; it was written with 1008" in said, taken < 100) == (True, True)


def test_a_checkpoint_of_a_later_format_is_named_with_its_version_and_left_where_it_is(newest, folder, caplog):
    whole.forge(newest, format=[2, 0], versions={"loopline": "7.1.0"})
    with pytest.raises(NewerFormat, match=r"written by loopline '7\.1\.0'.*Load it with that version"):
        whole.train(folder, whole.WHOLE)
    assert (newest.exists(), (folder / "quarantine").exists()) == (True, False)


def test_a_metric_that_is_no_number_or_infinite_is_never_the_best(newest, folder):
    checkpointer = Checkpointer(folder, keep=Latest(1) | Best(1, "val/loss"))
    metrics = {"val/loss": "nan", "val/accuracy": "inf", "\x1b[2J": "0x0p+0"}
    whole.forge(newest, metrics=metrics)
    assert NEWEST not in {ref.name[:12] for ref in Best(3, "val/loss").keep(checkpointer.shelf.refs())}


def test_a_checkpoint_of_another_run_is_passed_over_and_left_where_it_is(newest, uncut, went_on):
    whole.forge(newest, run_id="another")
    assert (went_on(), newest.exists()) == ((uncut, [BEFORE], []), True)


def test_a_checkpoint_that_another_codec_wrote_is_a_mismatch_and_left_where_it_is(newest, folder):
    whole.forge(newest, codec="mine")
    with pytest.raises(Mismatch, match="mine"):
        whole.train(folder, whole.WHOLE)
    assert newest.exists()


def section(name, form):
    def change(said):
        said["sections"][name] = form

    return GLOBAL, change


def without(name):
    def change(said):
        del said["sections"][name]

    return GLOBAL, change


def option(name, form):
    def change(said):
        said["sections"]["optimizer/0"]["map"]["param_groups"][0]["map"][name] = form

    return GLOBAL, change


def rng(form):
    def change(said):
        said["rng"] = form

    return MINE, change


def progress(**counts):
    plain = {"epochs": 1, "steps": 8, "batches": 8, "samples": 16, "batches_in_epoch": 3}
    return section("progress", {"map": plain | counts})


# states that are well formed, and not what whoever takes them can take
MISSHAPEN = {
    "no progress": without("progress"),
    "progress that is a list": section("progress", []),
    "progress in words": progress(steps="many"),
    "progress below nought": progress(batches_in_epoch=-2),
    "progress without steps": section("progress", {"map": {"epochs": 1}}),
    "a setup that is a list": section("setup", [1]),
    "a setup that is nothing": section("setup", None),
    "calls that are a list": section("calls", [1]),
    "requests that are a list": section("requests", [1]),
    "no model": without("model"),
    "a model that is a list": section("model", [1]),
    "a model that is a number": section("model", 3),
    "no optimizer": without("optimizer/0"),
    "an optimizer that is a list": section("optimizer/0", []),
    "an optimizer without groups": section("optimizer/0", {"map": {}}),
    "a rate in words": option("lr", "high"),
    "betas that are a number": option("betas", 1),
    "parameters that are nothing": option("params", None),
    "parameters that are one": option("params", [0] * 6),
    "a scheduler that is a list": section("scheduler/0", [1]),
    "a scheduler with a number for a method": section("scheduler/0", {"map": {"step": 1}}),
    "a scheduler with a number for its optimizer": section("scheduler/0", {"map": {"optimizer": 1}}),
    "a callback's that is nothing": section("callbacks/Remembers", None),
    "metrics that are a list": section("metrics", [1]),
    "metrics of numbers": section("metrics", {"map": {"means": {"map": {"a": 1}}}}),
    "streams that are a list": rng([]),
    "no streams": rng({"map": {}}),
    "a stream that is a number": rng({"map": {"python": 1}}),
}


def test_a_state_that_its_taker_cannot_take_is_refused_with_an_error_of_ours(folder, newest, tmp_path):
    odd = {}
    for number, (case, (name, change)) in enumerate(MISSHAPEN.items()):
        copy = whole.copied(folder, tmp_path / f"{number}")
        whole.changed(whole.checkpoints(copy)[NEWEST], name, change)
        ending = whole.ended(copy)
        if ending.split(":")[0] not in ("Damaged", "Mismatch"):
            odd[case] = ending[:100]
    assert odd == {}


def test_an_optimizers_state_that_is_smaller_than_its_parameter_is_refused(folder, newest):
    """With `fused`, torch writes as many numbers into it as the parameter has, whatever lies there."""
    state = {}
    said = json.loads((newest / GLOBAL).read_bytes())
    for _, form in said["sections"]["optimizer/0"]["map"]["state"]["items"]:
        for kept in form["map"].values():
            state[kept["tensor"].removeprefix("optimizer/0/")] = torch.ones(())
    groups = said["sections"]["optimizer/0"]["map"]["param_groups"]
    groups[0]["map"]["fused"] = True
    data = b"".join(Blocks(state).chunks())
    whole.forge(newest, {GLOBAL: text(said), OPTIMIZER: data})
    assert whole.in_a_child(whole.ended, folder, timeout_s=20).split(":")[0] in ("Damaged", "Mismatch")


def test_sections_with_any_names_are_passed_over(folder, newest, uncut, went_on):
    def change(said):
        names = ("../../x", "/etc/passwd", "\0", "a\nb", "\x1b[2J", "", "model/..", "callbacks/../x", "é" * 1000)
        said["sections"].update(dict.fromkeys(names, 1))

    whole.changed(newest, GLOBAL, change)
    assert went_on() == (uncut, [NEWEST], [])


ODD_VALUES = st.sampled_from(
    [
        *(None, True, -1, 0, 2**64, 10**50, "", "model", "../x", "\0", [], {}, [[]], {"a": 1}),
        *({"tensor": "model/0.weight"}, {"map": {}}, {"tuple": []}, {"items": [[1, 2]]}, {"object": ["set", []]}),
        *({"float": "nan"}, {"integers": "x"}, {"array": "rng/cpu"}, {"number": "rng/cpu"}),
    ]
)


def places(said: Any) -> list[tuple[Any, Any]]:
    """Every container in a JSON tree, with each of its keys."""
    found: list[tuple[Any, Any]] = []
    waiting = [said]
    while waiting:
        inner = waiting.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        found.extend((inner, key) for key in keys)
        waiting.extend(inner[key] for key in keys)
    return found


def mutate(data, said: Any) -> None:
    """Change, remove, move or double some places of a JSON tree."""
    for _ in range(data.draw(st.integers(1, 3))):
        known = places(said)
        if not known:
            return
        inner, key = known[data.draw(st.integers(0, len(known) - 1))]
        match data.draw(st.sampled_from(["change", "remove", "rename", "move"])):
            case "change":
                inner[key] = copy.deepcopy(data.draw(ODD_VALUES))
            case "remove":
                del inner[key]
            case "rename" if isinstance(inner, dict):
                inner[data.draw(st.sampled_from(["map", "tensor", "array", "tuple", "x", "../x"]))] = inner.pop(key)
            case _:
                other, place = known[data.draw(st.integers(0, len(known) - 1))]
                inner[key] = copy.deepcopy(other[place]) if place in other or isinstance(other, list) else None


def mutated(data, content: bytes, name: str) -> bytes:
    """A file's bytes with something changed in what it says, or in its bytes wherever that is."""
    if data.draw(st.booleans()):
        return raw(data, content)
    if name.endswith(".json"):
        said = json.loads(content)
        mutate(data, said)
        return text(said)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    mutate(data, header)
    return tensors(header, content[8 + length :])


def raw(data, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed)))
        count = data.draw(st.integers(0, 8))
        changed[at : at + count] = data.draw(
            st.binary(max_size=8) | st.sampled_from([b"[", b"{", b'"', b"\\u0000", b"-"])
        )
    return bytes(changed)


@pytest.fixture(scope="module")
def stored(made):
    """A run's folder in memory, with the name of its newest checkpoint and what that consists of."""
    return in_memory(made)


@pytest.fixture(scope="module")
def in_pieces(tmp_path_factory):
    """As `stored`, written by the codec that cuts tensors into pieces."""
    return in_memory(whole.make(tmp_path_factory.mktemp("pieces") / "run", codec=Dcp()))


def in_memory(folder: Path) -> tuple[MemoryStore, str, dict[str, bytes], bytes]:
    newest = whole.checkpoints(folder)[NEWEST]
    return whole.in_memory(folder), newest.name, whole.content(newest), (newest / "MANIFEST.json").read_bytes()


@pytest.mark.timeout(1200)
@settings(max_examples=FUZZED, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_forged_it_is_loaded_or_refused_with_an_error_of_ours(stored, data):
    refuse_forged(stored, data)


@settings(max_examples=FUZZED // 4, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_forged_of_pieces_it_is_loaded_or_refused_with_an_error_of_ours(in_pieces, data):
    refuse_forged(in_pieces, data)


def refuse_forged(stored, data) -> None:
    """Change what some files of a checkpoint say, sign it anew, and load it."""
    store, name, files, manifest = stored
    changed = dict(files)
    for path in data.draw(st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=2, unique=True)):
        changed[path] = mutated(data, files[path], path)
    written = whole.forged(manifest, changed)
    if data.draw(st.integers(0, 4)) == 0:
        body = json.loads(written)
        mutate(data, body)
        written = whole.signed(body)
    put(store, name, changed, written)
    ending = outcome(store, name)
    event(ending)
    assert ending in ("loaded", "Damaged", "Mismatch", "NewerFormat")


def put(store: MemoryStore, name: str, files: dict[str, bytes], manifest: bytes) -> None:
    for path, data in files.items():
        store.put(f"checkpoints/{name}/{path}", io.BytesIO(data))
    store.put(f"checkpoints/{name}/MANIFEST.json", io.BytesIO(manifest))


def test_a_loader_that_lets_other_errors_through_is_caught(stored):
    """The check itself."""
    store, name, files, manifest = stored
    said = json.loads(files[GLOBAL])
    said["sections"]["progress"] = {"object": ["fails", 1]}
    put(store, name, files, whole.forged(manifest, files))
    assert outcome(store, name) == "loaded"
    changed = {**files, GLOBAL: text(said)}
    put(store, name, changed, whole.forged(manifest, changed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "load", lambda *given: {}["a key"])
        assert outcome(store, name) == "KeyError"
    assert outcome(store, name) == "Damaged"
