"""Every call to the system that the store in a folder makes fails in turn: once, for ever, or after it has worked."""

import errno
import io
import itertools
import mmap
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from loopline.core.errors import NoSuchKey, StoreError
from loopline.stores import LocalStore

CALLS = (
    "close", "fstat", "fsync", "ftruncate", "link", "lseek", "mkdir", "open", "preadv", "replace", "rmdir", "scandir",
    "stat", "statvfs", "unlink", "write",
)  # fmt: skip
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS)
HOW = ("once", "for ever", "after it has worked")
OLD, NEW, LARGE = b"old" * 1000, b"new" * 2000, random.Random(2).randbytes(1_500_001)


@dataclass
class Operation:
    """What is done to the key `a/x`, what is there before, what it says, and what is there then."""

    name: str
    do: Callable[[LocalStore], object]
    before: bytes | None
    says: object
    after: bytes | None


class Pages:
    """A value in whole pages of memory, which a disk can fetch by itself."""

    nbytes = len(LARGE)

    def __init__(self):
        self._memory = mmap.mmap(-1, -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._memory[: self.nbytes] = LARGE

    def chunks(self):
        yield memoryview(self._memory)[: self.nbytes]

    def pages(self, at_once):
        whole = memoryview(self._memory)
        yield whole[: 1 << 20]
        yield whole[1 << 20 :]


def opened(store):
    with store.open("a/x") as file:
        return file.read()


OPERATIONS = [
    Operation("put the first", lambda store: store.put("a/x", io.BytesIO(NEW)), None, None, NEW),
    Operation("put another", lambda store: store.put("a/x", io.BytesIO(NEW)), OLD, None, NEW),
    Operation("put whole pages", lambda store: store.put("a/x", Pages()), OLD, None, LARGE),
    Operation("put_new", lambda store: store.put_new("a/x", NEW), None, True, NEW),
    Operation("put_new in vain", lambda store: store.put_new("a/x", NEW), OLD, False, OLD),
    Operation("delete", lambda store: store.delete("a/x"), OLD, None, None),
    Operation("open", opened, OLD, OLD, OLD),
    Operation("keys", lambda store: list(store.keys("a/")), OLD, ["a/x"], OLD),
    Operation("sweep", lambda store: store.sweep(), OLD, 0, OLD),
    Operation("free", lambda store: store.free() > 0, OLD, True, OLD),
]


# a rename cannot be taken back, unlike the link of put_new
MAY_FAIL_AND_HAVE_STORED = {
    **{operation.name: [] for operation in OPERATIONS},
    "put the first": [("fsync", how) for how in HOW] + [("replace", "after it has worked")],
    "put another": [("fsync", how) for how in HOW] + [("replace", "after it has worked")],
    "put whole pages": [("fsync", how) for how in HOW] + [("replace", "after it has worked")],
}


class Saboteur:
    """Makes the nth call of one function of `os` fail, if this thread makes it while told to; else it counts."""

    def __init__(self, monkeypatch):
        self.counts = Counter()
        self._at = (None, 0, 0, "")
        self._thread = None
        for name in CALLS:
            monkeypatch.setattr(os, name, self._made(name, getattr(os, name)))

    @contextmanager
    def failing(self, name, nth, number, how):
        self.counts.clear()
        self._at, self._thread = (name, nth, number, how), threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def counting(self):
        return self.failing(None, 0, 0, "")

    def _made(self, name, real):
        def call(*args, **options):
            if self._thread != threading.get_ident():
                return real(*args, **options)
            self.counts[name] += 1
            failing, nth, number, how = self._at
            if name != failing or self.counts[name] < nth or (self.counts[name] > nth and how != "for ever"):
                return real(*args, **options)
            if how == "after it has worked" or name == "close":  # what is not closed would be held for ever
                done = real(*args, **options)
                if name == "open":
                    close(done)
                elif name == "scandir":
                    done.close()
            raise OSError(number, os.strerror(number))

        close = os.close
        return call


@dataclass
class Found:
    """What became of an operation, and what is in the folder then."""

    says: object
    there: bytes | None
    keys: list[str]
    temporaries: int
    descriptors: int


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def tried(kind, operation, place, sabotage):
    """One operation in a new folder, while `sabotage` is on."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        sound, store = LocalStore(Path(folder) / "s"), kind(Path(folder) / "s")
        if operation.before is not None:
            sound.put("a/x", io.BytesIO(operation.before))
        before = descriptors()
        with sabotage:
            try:
                says = operation.do(store)
            except StoreError as error:
                says = type(error)
        held = descriptors() - before
        try:
            there = opened(sound)
        except NoSuchKey:
            there = None
        left = sum(1 for path in Path(folder).rglob("*") if path.name.startswith("."))
        return Found(says, there, list(sound.keys("")), left, held)


def complaint(operation, found, name, how):
    """What is wrong with what became of an operation when one function failed, if something is."""
    failed = found.says is StoreError
    if not failed and (found.says, found.there) != (operation.says, operation.after):
        return f"says {found.says!r:.60} and leaves {found.there!r:.20}"
    if found.there not in (operation.before, operation.after) or found.keys != ["a/x"] * (found.there is not None):
        return f"leaves {found.there!r:.20} and {found.keys}"
    stored = operation.name.startswith("put") and found.there == operation.after != operation.before
    if failed and stored and (name, how) not in MAY_FAIL_AND_HAVE_STORED[operation.name]:
        return "fails, and yet it is stored"
    if found.temporaries and name != "unlink":
        return f"leaves {found.temporaries} temporaries"
    if found.descriptors:
        return f"leaves {found.descriptors} open"
    return None


@pytest.fixture
def saboteur(monkeypatch):
    return Saboteur(monkeypatch)


@pytest.fixture
def place(tmp_path):
    """Where syncing costs nothing, if there is such a place."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else tmp_path


def sites(saboteur, operation, place, kind=LocalStore):
    """Each call that an operation makes when all is well."""
    found = tried(kind, operation, place, saboteur.counting())
    assert (found.says, found.there, found.temporaries, found.descriptors) == (operation.says, operation.after, 0, 0)
    return [(name, nth) for name in CALLS for nth in range(1, saboteur.counts[name] + 1)]


def complaints(saboteur, operation, place, kind=LocalStore):
    """All that goes wrong when each call in turn fails with each error in each way."""
    found = {}
    for (name, nth), how, number in itertools.product(sites(saboteur, operation, place, kind), HOW, ERRORS):
        became = tried(kind, operation, place, saboteur.failing(name, nth, number, how))
        if wrong := complaint(operation, became, name, how):
            found[name, nth, how, errno.errorcode[number]] = wrong
    return found


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_whatever_fails_is_an_error_or_nothing_and_no_value_is_half_there(saboteur, place, operation):
    assert complaints(saboteur, operation, place) == {}


def test_where_a_disk_refuses_to_fetch_pages_itself_they_are_written_as_others_are(saboteur, place):
    operation = next(known for known in OPERATIONS if known.name == "put whole pages")
    for nth in (1, 2):
        became = tried(LocalStore, operation, place, saboteur.failing("write", nth, errno.EINVAL, "once"))
        assert (became.says, became.there == LARGE, became.temporaries) == (None, True, 0)


def test_so_many_calls_are_failed(saboteur, place):
    counts = {operation.name: len(sites(saboteur, operation, place)) for operation in OPERATIONS}
    assert counts == {
        "put the first": 19,
        "put another": 12,
        "put whole pages": 14,
        "put_new": 20,
        "put_new in vain": 13,
        "delete": 7,
        "open": 8,
        "keys": 5,
        "sweep": 7,
        "free": 2,
    }


class InPlace(LocalStore):
    """Writes under the name itself."""

    def put(self, key, data):
        self.delete(key)
        with self._telling("write", key):
            super().put_new(key, b"")
            file = os.open(self.folder / key, os.O_WRONLY)
            try:
                os.write(file, data.read(100))
                os.write(file, data.read())
                os.fsync(file)
            finally:
                os.close(file)


class Untidy(LocalStore):
    """Leaves what it has begun."""

    def put(self, key, data):
        unlink = os.unlink
        os.unlink = lambda *_, **__: None
        try:
            super().put(key, data)
        finally:
            os.unlink = unlink


class Cheerful(LocalStore):
    """Does not look at errors."""

    def put(self, key, data):
        with suppress(StoreError):
            super().put(key, data)


class Stubborn(LocalStore):
    """Says that it failed and leaves it there."""

    def put_new(self, key, data):
        said = super().put_new(key, data)
        with self._telling("write", key):
            file = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        return said


class Raw(LocalStore):
    """Lets the system's errors through."""

    def _telling(self, *_):
        return contextmanager(lambda: (yield))()


@pytest.mark.parametrize(
    ("variant", "operation"),
    [
        (InPlace, "put another"),
        (Untidy, "put another"),
        (Cheerful, "put another"),
        (Stubborn, "put_new"),
        (Raw, "open"),
    ],
)
def test_weaker_variants_are_complained_of(saboteur, place, variant, operation):
    operation = next(known for known in OPERATIONS if known.name == operation)
    try:
        wrong = complaints(saboteur, operation, place, variant)
    except OSError as error:
        wrong = {"raised": error}
    assert wrong != {}
