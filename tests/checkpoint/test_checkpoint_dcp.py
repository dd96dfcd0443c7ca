import json
import os
import pickle
import subprocess
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader  # noqa: TID251 - the negative control

from loopline import Every, Trainer, at, on
from loopline.checkpoint import Checkpointer, Dcp, Latest, Whole
from loopline.checkpoint import dcp as module
from loopline.checkpoint.blocks import KINDS
from loopline.checkpoint.dcp import METADATA
from loopline.checkpoint.manifest import File, Manifest
from loopline.checkpoint.shelf import Attempt, Shelf
from loopline.checkpoint.tree import flatten, unflatten
from loopline.core.errors import CannotSave, Damaged, Mismatch, StoreError
from loopline.stores import LocalStore, MemoryStore
from loopline.testing import TinyTask, run_ranks, tiny_loader

FULL = bool(os.environ.get("LOOPLINE_FULL"))
NAME = "000000000007-0123abcd"
RANK_0 = "tensors/rank-00000.safetensors"
WORKER = Path(__file__).with_name("dcp_ranks.py")
SHAPES = [(), (0,), (2, 0, 3), (5,), (3, 4)]


def committed(attempt):
    """What was put, as a checkpoint that can be read."""
    manifest = Manifest(
        run_id="run",
        name=attempt.name,
        parent=None,
        serial=1,
        fencing=0,
        step=7,
        epochs=0,
        samples=0,
        world_size=1,
        codec="dcp",
        hash=attempt.algorithm,
        files=attempt.files,
        metrics={},
        versions={},
        reason="test",
        created="",
    )
    attempt.commit(manifest)
    return Shelf(attempt.store).get(attempt.name)


def written(sections, codec=None):
    attempt = Attempt(MemoryStore(), NAME, "xxh3_128")
    (codec or Dcp()).write(sections, attempt)
    return committed(attempt)


def with_file(stored, path, data):
    """The same checkpoint with another file in it, whose hash and size the manifest has: nothing but it is wrong."""
    attempt = Attempt(MemoryStore(), NAME, "xxh3_128")
    for other in stored.paths:
        attempt.put_text(other, bytes(stored.read(other)))
    attempt.put_text(path, data)
    return committed(attempt)


def random_bits(kind, shape):
    raw = torch.randint(0, 2 if kind is torch.bool else 256, (torch.Size(shape).numel() * kind.itemsize,))
    return raw.to(torch.uint8).view(kind).reshape(shape)


def bits(tensors):
    return {
        name: (t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).tolist() if t.numel() else [])
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_tensors_of_every_kind_and_shape_come_back_bit_for_bit(kind):
    tensors = {f"model/{shape}": random_bits(kind, shape) for shape in SHAPES}
    tensors["model/turned"] = random_bits(kind, (4, 5)).T
    tensors["model/part"] = random_bits(kind, (4, 5))[1:3, ::2]
    tensors["model/wide"] = random_bits(kind, (1, 5)).expand(3, 5)
    assert bits(Dcp().read(["model"], written({"model": tensors}))) == bits(tensors)


def test_the_files_are_json_and_safetensors():
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    stored = written({"model": {"model/w": weight, "model/none": torch.empty(0)}, "optimizer/0": {}})
    assert (
        stored.paths,
        json.loads(stored.read(METADATA)),
        bits(safetensors.torch.load(bytes(stored.read(RANK_0)))),
    ) == (
        [METADATA, RANK_0],
        {
            "files": [RANK_0],
            "tensors": {
                "model/w": {"dtype": "F32", "size": [2, 3], "chunks": [[0, [0, 0], [2, 3]]]},
                "model/none": {"dtype": "F32", "size": [0], "chunks": []},
            },
        },
        bits({"model/w@0,0": weight}),
    )


def test_a_state_without_tensors_is_metadata_alone():
    stored = written({"model": {}})
    assert (stored.paths, Dcp().read(["model"], stored)) == ([METADATA], {})


def test_only_the_sections_that_are_asked_for_are_read():
    sections = {name: {f"{name}/step": torch.ones(2)} for name in ("model", "optimizer/1", "optimizer/10")}
    assert list(Dcp().read(["optimizer/1"], written(sections))) == ["optimizer/1/step"]


def test_tensors_that_were_tied_are_tied_again():
    weight, tensors = torch.randn(3), {}
    form = flatten("model", {"a": weight, "b": weight}, tensors)
    state = unflatten(form, Dcp().read(["model"], written({"model": tensors})))
    assert state["a"] is state["b"]


def test_names_that_look_like_pieces_are_kept_apart():
    tensors = {"model/a": torch.ones(1), "model/a@0": torch.zeros(1), "model/a@0@0": torch.full((1,), 2.0)}
    assert bits(Dcp().read(["model"], written({"model": tensors}))) == bits(tensors)


def test_what_is_no_tensor_is_refused_before_anything_is_written():
    store = MemoryStore()
    with pytest.raises(CannotSave, match=r"model/epoch is no tensor"):
        Dcp().write({"model": {"model/w": torch.ones(1), "model/epoch": 3}}, Attempt(store, NAME, "xxh3_128"))
    assert list(store.keys("")) == []


def test_a_kind_of_tensor_that_cannot_be_kept_is_refused_by_name():
    with pytest.raises(CannotSave, match=r"^model/w is a tensor of torch.complex128, "):
        written({"model": {"model/w": torch.ones(1, dtype=torch.complex128)}})


def test_tensors_that_are_given_are_filled():
    tensors = {"model/w": torch.randn(3), "model/b": torch.randn(2)}
    place = nn.Parameter(torch.zeros(3))
    found = Dcp().read(["model"], written({"model": tensors}), into={"model/w": place})
    assert (found["model/w"] is place, bits(found)) == (True, bits(tensors))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"model/w": torch.zeros(4)}, r"model/w was torch.float32\[3\] and is torch.float32\[4\]"),
        ({"model/w": torch.zeros(3).half()}, r"model/w was torch.float32\[3\] and is torch.float16\[3\]"),
        ({"model/v": torch.zeros(3)}, "has no tensor 'model/v'"),
    ],
    ids=["shape", "kind", "name"],
)
def test_tensors_that_do_not_fit_are_not_filled(place, said):
    with pytest.raises(Mismatch, match=said):
        Dcp().read(["model"], written({"model": {"model/w": torch.ones(3)}}), into=place)


class Dropping(TinyTask):
    """Its training needs random numbers, and its optimizer has a state."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)


def trained(store=None, stop=None, codec=None, **settings):
    """What a run of three epochs of seven steps ends with, all bits of it."""

    @on(at.STEP_END)
    def cut(run):
        if run.step + 1 == stop:
            run.stop("cut")

    torch.manual_seed(5)
    task = Dropping()
    saving = Every(steps=2) | Every(epochs=1)
    checkpoint = None
    if store is not None:
        checkpoint = Checkpointer(store, when=saving, keep=Latest(2), codec=codec or Dcp(), **settings)
    trainer = Trainer(task, seed=3, progress=False, checkpoint=checkpoint, callbacks=[cut])
    run = trainer.fit(tiny_loader(7), epochs=3)
    tensors = {}
    flatten("state", {"model": task.model.state_dict(), "optimizer": task.optimizer.state_dict()}, tensors)
    return run.progress.steps, bits(tensors)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["thread", "inline"])
@pytest.mark.parametrize("stop", [1, 4, 7, 20] if FULL else [4, 7])
def test_a_run_that_is_cut_and_resumed_ends_as_the_uncut_one(stop, asynchronous):
    store = MemoryStore()
    cut, _ = trained(store, stop, asynchronous=asynchronous)
    assert (cut, trained(store, asynchronous=asynchronous)) == (stop, trained())


class Payload:
    """What a hostile file would have run: it makes a folder."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


def test_a_planted_pickle_is_never_opened(tmp_path):
    """The negative control is torch's own reader, on the same folder."""
    made = tmp_path / "made by the payload"
    trained(tmp_path / "run", stop=4)
    tensors = next((tmp_path / "run/checkpoints").glob("*/tensors"))
    for folder in (tmp_path / "run/checkpoints").glob("*/tensors"):
        (folder / ".metadata").write_bytes(pickle.dumps(Payload(made)))
    resumed = trained(tmp_path / "run")
    by_us = made.exists()
    with suppress(Exception):
        FileSystemReader(tensors).read_metadata()
    assert (resumed, by_us, made.exists()) == (trained(), False, True)


WHOLE = {
    "model/w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "model/b": torch.ones(4),
    "model/s": torch.ones(()),
}


def changed(path, value):
    """The metadata with one thing in it replaced; `path` leads there."""

    def change(said):
        *parts, last = path
        inner = said
        for part in parts:
            inner = inner[part]
        inner[last] = value
        return said

    return change


def entry(size):
    return {"dtype": "F32", "size": size, "chunks": [[0, [0] * len(size), size]]}


def pieces(*boxes):
    return changed(["tensors", "model/w", "chunks"], [[0, *box] for box in boxes])


SHAPE, GRID, CONTENT, FILES = (
    "is no shape",
    "do not make it up",
    "does not hold the pieces",
    "the manifest does not have",
)
HOSTILE = {
    "no object": (lambda said: [said], "TypeError"),
    "no files": (changed(["files"], None), "TypeError"),
    "no tensors": (changed(["tensors"], None), "AttributeError"),
    "files as text": (changed(["files"], RANK_0), FILES),
    "a file above the checkpoint": (changed(["files"], ["../../../../etc/passwd"]), FILES),
    "a file by its full path": (changed(["files"], ["/etc/passwd"]), FILES),
    "a file that is not in the manifest": (changed(["files"], ["tensors/rank-00001.safetensors"]), FILES),
    "a file that is not text": (changed(["files"], [["tensors"]]), "TypeError"),
    "another file": (changed(["files"], [METADATA]), "cannot hold|not a file of tensors|cannot have"),
    "no entry": (changed(["tensors", "model/w"], None), "TypeError"),
    "no dtype": (changed(["tensors", "model/w", "dtype"], None), "KeyError"),
    "an unknown dtype": (changed(["tensors", "model/w", "dtype"], "F128"), "KeyError"),
    "a dtype that is a list": (changed(["tensors", "model/w", "dtype"], ["F32"]), "TypeError"),
    "another dtype of the same size": (changed(["tensors", "model/w", "dtype"], "I32"), CONTENT),
    "a dtype of another size": (changed(["tensors", "model/w", "dtype"], "F16"), CONTENT),
    "another order of sizes": (changed(["tensors", "model/w"], entry([4, 3])), CONTENT),
    "a huge size": (changed(["tensors", "model/w"], entry([2**47])), "cannot hold 562949953421332 bytes"),
    "a size beyond all numbers": (changed(["tensors", "model/w", "size"], [2**4000, 4]), SHAPE),
    "a huge empty size": (changed(["tensors", "model/w", "size"], [0, 2**47, 2**47]), SHAPE),
    "too many dimensions": (changed(["tensors", "model/w"], entry([1] * 65)), SHAPE),
    "a size that is a float": (changed(["tensors", "model/w", "size"], [3.0, 4]), SHAPE),
    "a size that is a truth value": (changed(["tensors", "model/s"], entry([True])), SHAPE),
    "a negative size": (changed(["tensors", "model/w"], entry([-3, -4])), SHAPE),
    "a size that is text": (changed(["tensors", "model/w", "size"], "34"), SHAPE),
    "no chunks": (changed(["tensors", "model/w", "chunks"], []), GRID),
    "chunks for nothing": (changed(["tensors", "model/w", "size"], [0, 4]), GRID),
    "more chunks than are read": (changed(["tensors", "model/w", "chunks"], [0] * (2**17 + 1)), "more than 131072"),
    "no chunk of a scalar": (changed(["tensors", "model/s", "chunks"], []), GRID),
    "two chunks of a scalar": (changed(["tensors", "model/s", "chunks"], [[0, [], []], [0, [], []]]), GRID),
    "a missing chunk": (pieces([[0, 0], [2, 4]]), GRID),
    "a missing chunk in the middle": (pieces([[0, 0], [1, 4]], [[2, 0], [1, 4]]), GRID),
    "a missing corner": (pieces([[0, 0], [1, 2]], [[1, 0], [2, 2]], [[0, 2], [1, 2]]), GRID),
    "one corner for another": (
        pieces([[0, 0], [1, 2]], [[0, 0], [1, 2]], [[1, 2], [2, 2]], [[0, 2], [1, 2]]),
        GRID,
    ),
    "an overlap": (pieces([[0, 0], [2, 4]], [[1, 0], [2, 4]]), GRID),
    "an overlap that keeps the volume": (pieces([[0, 0], [2, 4]], [[1, 0], [1, 4]]), GRID),
    "the same chunk twice": (pieces([[0, 0], [3, 4]], [[0, 0], [3, 4]]), GRID),
    "an empty chunk beside the whole": (pieces([[0, 0], [3, 4]], [[0, 0], [0, 4]]), GRID),
    "a chunk of another rank": (pieces([[0], [12]]), "ValueError"),
    "an offset that is one too large": (pieces([[1, 0], [3, 4]]), GRID),
    "a chunk that is one too long": (pieces([[0, 0], [4, 4]]), GRID),
    "a negative offset": (pieces([[-1, 0], [4, 4]]), SHAPE),
    "pieces that the file does not have": (pieces([[0, 0], [2, 4]], [[2, 0], [1, 4]]), CONTENT),
    "a chunk without sizes": (changed(["tensors", "model/w", "chunks"], [[0, [0, 0]]]), "ValueError"),
    "a file number that is too large": (changed(["tensors", "model/w", "chunks", 0, 0], 1), "IndexError"),
    "a negative file number": (changed(["tensors", "model/w", "chunks", 0, 0], -1), SHAPE),
    "a file number that is a truth value": (changed(["tensors", "model/w", "chunks", 0, 0], False), SHAPE),
    "a tensor too many": (changed(["tensors", "model/x"], entry([1])), CONTENT),
    "a tensor too few": (lambda said: {**said, "tensors": {"model/w": said["tensors"]["model/w"]}}, CONTENT),
    "a name that stands for two pieces": (changed(["tensors", "model/w@0,0"], entry([])), CONTENT),
    "a key twice": (lambda said: b'{"files":[],"files":[],"tensors":{}}', "twice"),
    "deep nesting": (lambda said: b'{"files":[],"tensors":' + b"[" * 500_000, "deep"),
    "no number": (lambda said: b'{"files":[],"tensors":NaN}', "JSON"),
    "no text": (lambda said: b"\xff\xfe", "JSON"),
    "nothing": (lambda said: b"", "JSON"),
    "a pickle": (lambda said: pickle.dumps(said), "JSON"),
}


def hostile(change):
    stored = written({"model": WHOLE})
    said = change(json.loads(stored.read(METADATA)))
    return with_file(stored, METADATA, said if isinstance(said, bytes) else json.dumps(said).encode())


def test_metadata_that_is_written_anew_can_be_read():
    """The control of the next test: what it does besides its changes breaks nothing."""
    assert bits(Dcp().read(["model"], hostile(lambda said: said))) == bits(WHOLE)


@pytest.mark.parametrize(("change", "said"), HOSTILE.values(), ids=HOSTILE)
def test_metadata_that_was_not_written_so_is_damage(change, said):
    with pytest.raises(Damaged, match=f"tensors/.*({said})"):
        Dcp().read(["model"], hostile(change))


@pytest.mark.parametrize("path", ["../secret", "tensors/../../secret", "{folder}/secret", "tensors/linked"])
def test_no_file_is_asked_for_that_the_checkpoint_does_not_have(path, tmp_path):
    """From a source that would give any file that there is."""
    stored = written({"model": WHOLE})
    inside = tmp_path / "checkpoint"
    (inside / "tensors").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(stored.read(RANK_0))
    (inside / "tensors/linked").symlink_to(tmp_path / "secret")
    text = stored.read(METADATA).replace(RANK_0.encode(), path.format(folder=tmp_path).encode())
    (inside / METADATA).write_bytes(text)
    source = Anything(inside)
    with pytest.raises(Damaged, match=FILES):
        Dcp().read(["model"], source)
    assert source.asked == [METADATA]


MEMORY = """
    import json, sys
    import torch
    from loopline.checkpoint import Dcp
    from loopline.core.errors import Damaged

    class Source:
        paths = ["tensors/METADATA.json", "tensors/a"]

        def __init__(self, text):
            self.text = text

        def size(self, path):
            return 2**30

        def read(self, path):
            return bytearray(self.text if path == self.paths[0] else b"")

    def text(size, boxes):
        return ('{"files":["tensors/a"],"tensors":{"model/w":{"dtype":"U8","size":[%d],"chunks":[%s]}}}'
                % (size, ",".join("[0,[%d],[%d]]" % box for box in boxes))).encode()

    def used():
        # not ru_maxrss, in which a process begins with the peak of the one that started it
        line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        return int(line.split()[1]) // 1024

    many = int(sys.argv[1])
    texts = [
        text(2**47, [(0, 2**47)]),
        text(2**29, [(0, 2**29)]),
        text(many, ((i, 1) for i in range(many))),
        text(4 * many, ((i, 1) for i in range(4 * many))),
        b'{"files":[],"tensors":' + b"[" * 2**22,
        b"[" + b"0," * 2**21 + b"0]",
        b" " * 2**25,
    ]
    before = used()
    damaged = 0
    for given in texts:
        try:
            Dcp().read(["model"], Source(given))
        except Damaged:
            damaged += 1
    ours = used() - before
    torch.ones(2**29, dtype=torch.uint8)  # what believing the second would take
    print(json.dumps([damaged, len(texts), ours, used() - before]))
"""


def test_hostile_metadata_takes_little_memory():
    """In MB; the last figure, of a reader that believes what it reads, is the negative control."""
    damaged, given, ours, believing = json.loads(fresh(MEMORY, str(2**17 if FULL else 2**14)))
    assert (damaged, ours < 256 < believing) == (given, True), (ours, believing)


def test_torchs_dcp_is_imported_only_by_those_who_want_it():
    said = fresh("""
        import sys, loopline, loopline.checkpoint
        before = "torch.distributed.checkpoint" in sys.modules
        print(before, loopline.checkpoint.Dcp.name, "torch.distributed.checkpoint" in sys.modules)
    """)
    assert said.split() == ["False", "dcp", "True"]


def fresh(code, *arguments):
    run = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout


def test_metadata_that_is_missing_is_damage():
    """So it is when another codec wrote the checkpoint."""
    with pytest.raises(Damaged, match="METADATA"):
        Dcp().read(["model"], written({"model": WHOLE}, Whole()))


def test_without_the_check_of_pieces_a_tensor_would_come_back_unfilled(monkeypatch):
    """The negative control of the check: one row of three is claimed by nobody, and nothing else notices."""
    attempt = Attempt(MemoryStore(), NAME, "xxh3_128")
    monkeypatch.setattr(module, "_make_up", lambda size, pieces: True)
    Dcp().write({"model": {"model/w": torch.ones(2, 4)}}, attempt)
    said = changed(["tensors", "model/w", "size"], [3, 4])(
        json.loads(b"".join(attempt.store.open(f"checkpoints/{NAME}/{METADATA}")))
    )
    attempt.put_text(METADATA, json.dumps(said).encode())
    stored = committed(attempt)
    unnoticed = Dcp().read(["model"], stored)["model/w"].shape
    monkeypatch.undo()
    with pytest.raises(Damaged, match="make it up"):
        Dcp().read(["model"], stored)
    assert unnoticed == (3, 4)


@dataclass
class Anything:
    """A source that checks nothing."""

    folder: Path
    paths: tuple[str, ...] = (METADATA, RANK_0)
    asked: list[str] = field(default_factory=list)

    def size(self, path):
        return (self.folder / path).stat().st_size

    def read(self, path):
        self.asked.append(path)
        return bytearray((self.folder / path).read_bytes())


@dataclass
class Failing:
    """An attempt whose disk fails."""

    files: dict[str, File] = field(default_factory=dict)

    def put(self, path, blocks):
        raise StoreError("the disk of this rank is full")

    put_text = put


def test_what_all_ranks_hold_is_written_by_one():
    tensors = {f"model/{i}": torch.full((i + 1,), float(i)) for i in range(8)}
    store = MemoryStore()

    def write(comm):
        attempt = Attempt(store, NAME, "xxh3_128")
        Dcp().write({"model": tensors}, attempt, comm=comm)
        return attempt

    first, second = run_ranks(write, 2)
    alone = [set(a.files) for a in (first, second)]
    first.files.update(second.files)
    stored = committed(first)
    names = [n for path in stored.paths if path != METADATA for n in safetensors.torch.load(bytes(stored.read(path)))]
    assert (alone, sorted(names), bits(Dcp().read(["model"], stored))) == (
        [{METADATA, RANK_0}, {RANK_0.replace("0.", "1.")}],
        sorted(f"{name}@0" for name in tensors),
        bits(tensors),
    )


def test_a_rank_that_cannot_write_stops_the_others():
    def write(comm):
        to = Failing() if comm.rank == 1 else Attempt(MemoryStore(), NAME, "xxh3_128")
        try:
            Dcp().write({"model": {f"model/{i}": torch.ones(2) for i in range(4)}}, to, comm=comm)
        except StoreError as error:
            return str(error)

    assert run_ranks(write, 3) == [
        "Rank 1 could not write its pieces: StoreError: the disk of this rank is full",
        "the disk of this rank is full",
        "Rank 1 could not write its pieces: StoreError: the disk of this rank is full",
    ]


def ranks(what, size, folder):
    """What real processes say that meet over gloo."""
    meeting = folder / f"meeting-{what}"
    run = [sys.executable, "-W", "error", str(WORKER), what, str(folder / "store"), str(meeting)]
    started = [
        subprocess.Popen([*run, str(rank), str(size)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * size, said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.fixture(scope="module", params=[(2, 2), (4, 3), (2, 4), (3, 2)] if FULL else [(2, 2)], ids=str)
def cut_by_ranks(request, tmp_path_factory):
    """Tensors that several processes have cut, written by them and read by others, and what those found."""
    folder = tmp_path_factory.mktemp("ranks")
    writers, readers = request.param
    return folder, ranks("write", writers, folder), ranks("read", readers, folder)


def test_pieces_of_several_processes_are_read_whole_by_one(cut_by_ranks):
    sys.path.insert(0, str(WORKER.parent))
    try:
        import dcp_ranks
    finally:
        sys.path.remove(str(WORKER.parent))
    files = dcp_ranks.Files(LocalStore(cut_by_ranks[0] / "store"), "ours")
    found = Dcp().read(["model", "optimizer/0"], files)
    expected = dcp_ranks.whole()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).state_dict()
    expected.update({f"model/fsdp/{name}": tensor for name, tensor in model.items()})
    assert bits(found) == {name: bits(expected)[name] for name in found}
    assert set(found) == set(expected)


def test_pieces_of_several_processes_are_read_by_others_that_cut_differently(cut_by_ranks):
    found = [(said["differ"], said["filled"]) for said in cut_by_ranks[2]]
    assert found == [([], True)] * len(found)


def test_pieces_that_are_put_one_place_off_are_found_by_the_same_comparison(cut_by_ranks):
    """The negative control of the test above."""
    assert all(said["off by one"] for said in cut_by_ranks[2])


def test_torchs_own_save_and_load_do_the_same_through_our_storage(cut_by_ranks):
    folder, _, readers = cut_by_ranks
    checkpoints = folder / "store/checkpoints"
    ours, theirs = (
        {path.name: path.read_bytes() for path in (checkpoints / name / "tensors").iterdir()}
        for name in ("ours", "by-torch")
    )
    assert (ours, [said["by torch"] for said in readers]) == (theirs, [[] for _ in readers])


def test_a_rank_that_writes_without_the_others_is_told_so(cut_by_ranks):
    assert {said["alone"][-60:] for said in cut_by_ranks[1]} == {
        "do not make it up. Did every rank write that holds some of it?"[-60:]
    }
