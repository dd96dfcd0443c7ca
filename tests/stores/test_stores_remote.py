"""What RemoteStore does on any filesystem: names, secrets, warnings, trying again."""

import io
import itertools
import logging
import random
import subprocess
import sys
import traceback
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from loopline.core.errors import NoSuchKey, StoreError
from loopline.stores import LocalStore, MemoryStore, RemoteStore, _retry, store_of
from loopline.stores._pieces import in_blocks
from loopline.stores._retry import Patience, passes

CANARY = "c4n4ry"
numbers = itertools.count()


class Sabotaged(MemoryFileSystem):
    """Fails as often as it is told to, with an error that shows its password."""

    protocol = "sabotaged"
    store, pseudo_dirs = {}, [""]

    def __init__(self, password=None, host=None, **options):
        super().__init__(**options)
        self.password, self.fails, self.calls = password, [], []

    @staticmethod
    def _get_kwargs_from_urls(url):
        user, _, host = url.partition("://")[2].partition("/")[0].rpartition("@")
        return {"password": user.partition(":")[2], "host": host} if user else {}

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.rpartition("://")[2].rpartition("@")[2].strip("/")

    def _fail(self, name):
        self.calls.append(name)
        if self.fails and isinstance(error := self.fails.pop(0), Exception):
            raise error

    def _open(self, path, mode="rb", **options):
        self._fail(f"open {mode}")
        return super()._open(path, mode, **options)

    def mv(self, *paths, **options):
        self._fail("mv")
        super().mv(*paths, **options)

    def info(self, path, **options):
        self._fail("info")
        return super().info(path, **options)

    def ls(self, path, detail=True, **options):
        self._fail("ls")
        return super().ls(path, detail, **options)


fsspec.register_implementation("sabotaged", Sabotaged, clobber=True)


def sabotaged(**options):
    """A store, and the filesystem under it."""
    options = {"deadline_s": 60.0, "first_wait_s": 0.001, **options}
    store = RemoteStore(f"sabotaged://{next(numbers)}", **options)
    return store, store._place._fs


def put(store, key, value=b"value"):
    store.put(key, io.BytesIO(value))


def test_its_name_has_no_user_and_no_password():
    store = RemoteStore(f"sabotaged://user:{CANARY}@host/runs/1/")
    assert (store.name, repr(store)) == ("sabotaged://host/runs/1", "RemoteStore('sabotaged://host/runs/1')")


@pytest.mark.parametrize(
    "url",
    [
        f"s3://user:{CANARY}@bucket/runs",
        f"s3://bucket/runs?X-Amz-Signature={CANARY}",
        f"simplecache::s3://u:{CANARY}@bucket/runs",
        f"nonsense://u:{CANARY}@bucket/runs",
    ],
)
def test_a_url_that_is_refused_is_shown_without_its_secrets(url):
    with pytest.raises(StoreError) as caught:
        RemoteStore(url)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert (CANARY in shown, "bucket/runs" in shown) == (False, True)


@pytest.mark.parametrize(
    "made",
    [
        lambda: RemoteStore(f"sabotaged://user:{CANARY}@host/{next(numbers)}"),
        lambda: RemoteStore(f"sabotaged://host/{next(numbers)}", password=CANARY),
        lambda: RemoteStore(f"sabotaged://host/{next(numbers)}", client={"deep": {"access_token": CANARY}}),
        lambda: RemoteStore(f"sabotaged://host/{next(numbers)}", endpoint_url=f"https://u:{CANARY}@proxy"),
    ],
)
@pytest.mark.parametrize("chained", [False, True])
def test_an_error_that_shows_a_secret_is_told_without_it(made, chained, caplog):
    store = made()
    error = PermissionError(f"401 for {CANARY}")
    if chained:
        error, error.__cause__ = PermissionError("refused"), error
    store._place._fs.fails = [ConnectionError(f"lost {CANARY}"), error]
    store._patience = store._place._patience = Patience(60, 0.001, store._say)
    with caplog.at_level(logging.DEBUG, "loopline"), pytest.raises(StoreError) as caught:
        store.open("a")
    told = caught.value
    assert CANARY not in "".join(traceback.format_exception(told)) + repr(told) + caplog.text
    assert (told.__cause__, told.__context__, "lost ***" in caplog.text) == (None, None, True)


def test_an_error_that_shows_none_is_kept_as_the_cause():
    store, fs = sabotaged(password=CANARY)
    error = PermissionError("refused")
    fs.fails = [error]
    with pytest.raises(StoreError, match=r"Cannot read 'a' in sabotaged://\d+: PermissionError: refused") as caught:
        store.open("a")
    assert caught.value.__cause__ is error


def test_what_may_pass_is_tried_again():
    store, fs = sabotaged()
    fs.fails = [TimeoutError(), "open", ConnectionResetError()]
    put(store, "a")
    calls = [call for call in fs.calls if call in ("open wb", "mv")]
    tries = ["open wb", "open wb", "mv", "open wb", "mv"]
    fs.fails = [ConnectionResetError()] * 3
    assert (calls, store.open("a").read(), list(store.keys(""))) == (tries, b"value", ["a"])


def test_what_is_large_is_read_once_and_not_tried_again():
    store, fs = sabotaged()
    put(store, "a", b"old")
    fs.fails = ["open", TimeoutError()]
    with pytest.raises(StoreError, match="Cannot write 'a'"):
        put(store, "a", bytes(20_000_000))
    assert (store.open("a").read(), list(store.keys("")), store.sweep()) == (b"old", ["a"], 0)


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty():
    store, fs = sabotaged()
    put(store, "a/b")
    fs.fails = ["ls", PermissionError("no")]
    with pytest.raises(StoreError, match="Cannot list ''"):
        store.keys("")


def test_without_conditional_writes_it_is_told_loudly_and_once(caplog):
    store, _ = sabotaged()
    said = [store.put_new("a", b"1"), store.put_new("a", b"2"), store.put_new("b", b"3")]
    told = [(record.name, record.levelname) for record in caplog.records if "cannot store a key only" in record.message]
    assert (said, told) == ([True, False, True], [("loopline", "WARNING")])


def test_a_put_new_whose_answer_was_lost_says_that_it_stored():
    store, fs = sabotaged()
    move = fs.mv

    def moved_without_an_answer(*paths, **options):
        move(*paths, **options)
        del fs.mv
        raise TimeoutError

    fs.mv = moved_without_an_answer
    assert (store.put_new("a", b"mine"), store.put_new("a", b"mine")) == (True, False)


def test_what_was_half_written_is_swept():
    store, fs = sabotaged()
    put(store, "a/b")
    fs.pipe_file(f"{store._place._root}/a/.c.0123456789abcdef.tmp", b"half")
    assert (store.sweep(), store.sweep(), list(store.keys(""))) == (1, 0, ["a/b"])


def test_names_that_are_no_keys_are_not_listed():
    store, fs = sabotaged()
    for name in ("a", "b c", ".d", "e/.f", "e/g", "ü"):
        fs.pipe_file(f"{store._place._root}/{name}", b"")
    assert list(store.keys("")) == ["a", "e/g"]


def test_blocks_grow_so_that_ten_thousand_hold_a_thousand_times_as_much():
    sizes = [len(block) for block in in_blocks([memoryview(b"x" * 1500), memoryview(b"y" * 3000)], 1)]
    assert sizes == [1] * 1000 + [2] * 1000 + [4] * 375
    assert b"".join(in_blocks([memoryview(b"abc"), memoryview(b"defg")], 2)) == b"abcdefg"


class Clock:
    """Time that passes only where it is slept."""

    def __init__(self):
        self.now, self.slept = 0.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_retry, "time", clock)
    return clock


def fails_for_ever():
    raise TimeoutError("no answer")


def test_pauses_double_up_to_a_limit_and_end_with_the_deadline(clock):
    with pytest.raises(TimeoutError) as caught:
        Patience(600, 0.5, str)("put", fails_for_ever)
    wanted = [min(0.5 * 2**i, 20.0) for i in range(len(clock.slept))]
    within = [low / 2 <= slept <= low for slept, low in zip(clock.slept[:-1], wanted, strict=False)]
    assert (all(within), clock.now, len(set(clock.slept)) > 30) == (True, pytest.approx(600), True)
    assert caught.value.__notes__ == [f"given up after {len(clock.slept) + 1} tries in 600.0 s"]


def test_a_deadline_of_nothing_means_one_try(clock):
    with pytest.raises(TimeoutError):
        Patience(0, 0.5, str)("put", fails_for_ever)
    assert clock.slept == []


def test_only_what_fails_often_is_warned_of(clock, caplog):
    caplog.set_level(logging.INFO, "loopline")
    with pytest.raises(TimeoutError):
        Patience(5, 0.5, str)("put", fails_for_ever)
    levels = [record.levelname for record in caplog.records]
    assert (levels[:4], set(levels[3:])) == (["INFO"] * 3 + ["WARNING"], {"WARNING"})


def test_pauses_draw_nothing_from_pythons_random_stream(clock):
    random.seed(0)
    before = random.getstate()
    with pytest.raises(TimeoutError):
        Patience(5, 0.5, str)("put", fails_for_ever)
    assert random.getstate() == before


class Answered(Exception):
    """An error with the status of an HTTP answer, as several libraries have it."""

    def __init__(self, status):
        super().__init__(str(status))
        self.status = status


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        *((Answered(status), True) for status in (408, 429, 500, 502, 503, 504)),
        *((Answered(status), False) for status in (400, 401, 403, 404, 409, 412, 416, 501)),
        (caused(OSError("told"), Answered(503)), True),
        (caused(OSError("told"), Answered(403)), False),
        (caused(ConnectionResetError(), Answered(400)), True),
        (TimeoutError(), True),
        (BrokenPipeError(), True),
        (OSError(101, "Network is unreachable"), True),
        (OSError(28, "No space left on device"), False),
        (PermissionError(), False),
        (FileNotFoundError(), False),
        (ValueError(), False),
        (ConnectionError("[SSL: CERTIFICATE_VERIFY_FAILED]"), False),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_may_pass_by_itself_is_told_from_a_refusal(error, may_pass):
    assert passes(error) == may_pass


def test_a_store_is_taken_as_it_is():
    store = MemoryStore()
    assert store_of(store) is store


@pytest.mark.parametrize("given", ["{}/runs", "file://{}/runs", "local://{}/runs", "file://localhost{}/runs"])
def test_a_path_means_a_folder(tmp_path, given):
    assert store_of(given.format(tmp_path)).folder == tmp_path / "runs"


def test_a_pathlike_means_a_folder(tmp_path):
    assert isinstance(store_of(tmp_path / "runs"), LocalStore)


def test_an_escaped_path_is_unescaped():
    assert store_of("file:///tmp/a%20b").folder.name == "a b"


def test_two_stores_of_one_url_see_the_same():
    put(store_of("memory://same"), "a")
    assert store_of("memory://same").open("a").read() == b"value"


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (3, TypeError, "3 is not a store, nor a path or URL of one"),
        (None, TypeError, "None is not a store"),
        ("nonsense://x", StoreError, "nonsense://x: no filesystem is known for nonsense://"),
        ("file://host/runs", StoreError, "a folder of this one is file:///host/runs"),
        (Path("s3://bucket/runs"), StoreError, "was a URL before it was made a path"),
    ],
)
def test_what_is_no_place_is_refused(given, error, said):
    with pytest.raises(error) as caught:
        store_of(given)
    assert said in str(caught.value)


def test_fsspec_is_imported_for_a_remote_store_only_and_s3_says_what_it_needs():
    code = """
import sys
import torch
before = "fsspec" in sys.modules
from loopline.stores import LocalStore, MemoryStore, store_of
store_of("runs"), MemoryStore()
assert before or "fsspec" not in sys.modules
sys.modules["s3fs"] = None
try:
    store_of("s3://bucket/runs")
except Exception as error:
    sys.stdout.write(f"{type(error).__name__}: {error}")
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert said == "StoreError: s3://bucket/runs needs a package that is not installed: pip install 'loopline[s3]'"


def test_a_missing_key_has_a_name_even_where_the_filesystem_has_no_words():
    store, _ = sabotaged()
    with pytest.raises(NoSuchKey, match=r"Nothing is stored under 'a' in sabotaged://\d+\."):
        store.open("a")
