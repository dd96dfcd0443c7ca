"""The store in a folder: what is on the disk, who may read it, and what does not lead out of it."""

import errno
import io
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from loopline.core.errors import StoreError
from loopline.stores import LocalStore

FULL = os.environ.get("LOOPLINE_FULL") == "1"


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


def put(store, key, value=b"value"):
    store.put(key, io.BytesIO(value))


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_files_and_folders_are_their_owners_alone(tmp_path, umask):
    os.umask(0)
    store = LocalStore(tmp_path / "runs" / "1")
    put(store, "a/b")
    store.put_new("a/c", b"")
    made = ["runs", "runs/1", "runs/1/a", "runs/1/a/b", "runs/1/a/c"]
    assert [oct(mode(tmp_path / path)) for path in made] == ["0o700"] * 3 + ["0o600"] * 2


def test_with_inherit_umask_the_umask_decides(tmp_path, umask):
    store = LocalStore(tmp_path / "store", inherit_umask=True)
    put(store, "a/b")
    store.put_new("a/c", b"")
    assert [oct(mode(store.folder / path)) for path in ("", "a", "a/b", "a/c")] == ["0o750"] * 2 + ["0o640"] * 2


def test_a_folder_that_was_there_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    put(LocalStore(tmp_path), "a")
    assert mode(tmp_path) == 0o755


def test_name_and_folder_are_the_whole_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    store = LocalStore("runs/1")
    monkeypatch.chdir("/")
    assert (store.name, store.folder) == (str(tmp_path / "runs/1"), tmp_path / "runs/1")


def test_nothing_is_made_before_something_is_put(store):
    list(store.keys("")), store.delete("a"), store.sweep(), store.free()
    assert not store.folder.exists()


def test_a_file_in_the_place_of_the_folder_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="that is a file; give a folder"):
        LocalStore(tmp_path / "file")


@pytest.fixture
def calls(monkeypatch):
    """The calls to the system that change something, each with the name of what it is about."""
    made = []

    def recorded(name):
        real = getattr(os, name)

        def call(*args, **options):
            about = Path(f"/proc/self/fd/{args[0]}").readlink() if isinstance(args[0], int) else Path(args[0])
            made.append(f"{name} {'new file' if about.suffix == '.tmp' else about.name}")
            return real(*args, **options)

        return call

    for name in ("mkdir", "write", "fsync", "replace", "link", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, recorded(name))
    return made


def test_put_syncs_the_file_before_it_is_renamed_and_then_every_folder_up_to_the_stores(store, calls):
    put(store, "a/b")
    put(store, "a/b")
    first_time = ["mkdir store", f"fsync {store.folder.parent.name}", "mkdir a"]
    each_time = ["write new file", "fsync new file", "replace new file", "fsync a", "fsync store"]
    assert calls == [*first_time, *each_time, *each_time]


def test_put_new_syncs_the_file_before_it_is_linked_and_then_every_folder(store, calls):
    store.put_new("a", b"value")
    del calls[:2]
    store.put_new("a", b"value")
    new = ["write new file", "fsync new file", "link new file", "unlink new file"]
    assert calls == [*new, "fsync store", *new]


def test_delete_syncs_the_folder_before_it_is_pruned(store, calls):
    put(store, "a/b/c")
    calls.clear()
    store.delete("a/b/c")
    store.delete("a/b/c")
    assert calls == ["unlink c", "fsync b", "rmdir b", "rmdir a"]


def test_what_is_left_empty_is_pruned_up_to_the_stores_folder(store):
    for key in ("a/b/c", "a/b/d", "a/e"):
        put(store, key)
    seen = []
    for key in ("a/b/c", "a/b/d", "a/e"):
        store.delete(key)
        seen.append(sorted(str(path.relative_to(store.folder)) for path in store.folder.rglob("*")))
    assert (seen, store.folder.is_dir()) == ([["a", "a/b", "a/b/d", "a/e"], ["a", "a/e"], []], True)


def test_one_puts_into_a_folder_while_others_prune_it(store):
    rounds = 300 if FULL else 50
    failed = []

    def use(number):
        try:
            for i in range(rounds):
                put(store, f"a/b/c/{number}", b"%d" % i)
                assert store.open(f"a/b/c/{number}").read() == b"%d" % i
                store.delete(f"a/b/c/{number}")
        except BaseException as error:  # noqa: BLE001 - a thread has nobody else to tell
            failed.append(error)

    threads = [threading.Thread(target=use, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (failed, list(store.folder.iterdir())) == ([], [])


def forked(work):
    """A child process that does its work and ends, without pytest's help."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(99)
    return child


def test_of_many_processes_exactly_one_is_told_that_it_stored(store):
    rounds, writers = (200 if FULL else 20), 6

    def race(number):
        for i in range(rounds):
            if store.put_new(f"race/{i}", b"%d" % number):
                put(store, f"won/{i}/{number}")

    children = [forked(lambda number=number: race(number)) for number in range(writers)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * writers
    winners = [[key.rpartition("/")[2] for key in store.keys(f"won/{i}/")] for i in range(rounds)]
    assert winners == [[store.open(f"race/{i}").read().decode()] for i in range(rounds)]


def temporaries(folder):
    return list(folder.rglob(".*.tmp"))


def test_a_key_is_whole_or_not_there_after_a_kill(store):
    """A writer that is killed at any moment leaves the old value or the new, and nothing else that is listed."""
    put(store, "a/x", bytes(3_000_000))

    def write():
        for number in range(1, 256):
            put(store, "a/x", bytes([number]) * 3_000_000)
            store.put_new(f"a/new-{number}", bytes([number]) * 3_000_000)

    def is_whole(key):
        value = store.open(key).read()
        return value == value[:1] * 3_000_000

    torn, left, swept = [], [], []
    for i in range(100 if FULL else 10):
        child = forked(write)
        time.sleep(0.005 + i % 10 * 0.004)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += [key for key in store.keys("") if not is_whole(key)]
        left.append(len(temporaries(store.folder)))
        swept.append(store.sweep())
        for key in store.keys("a/new"):
            store.delete(key)
    assert (torn, swept, temporaries(store.folder), any(left)) == ([], left, [], True)


def test_sweeping_takes_what_is_half_written_and_empty_folders_and_nothing_else(store):
    for key in ("a/b", "a/c/d"):
        put(store, key)
    for path in (".x.0123456789abcdef.tmp", "a/c/.d.0123456789abcdef.tmp", "e/.f.0123456789abcdef.tmp"):
        (store.folder / path).parent.mkdir(exist_ok=True)
        (store.folder / path).write_bytes(b"half")
    for kept in (".hidden", "a/.b.tmp", "a/.b.0123.tmp"):
        (store.folder / kept).write_bytes(b"another's")
    (store.folder / "empty/in/empty").mkdir(parents=True)
    swept = store.sweep(), store.sweep()
    there = sorted(str(path.relative_to(store.folder)) for path in store.folder.rglob("*") if not path.is_dir())
    assert (swept, there) == ((3, 0), [".hidden", "a/.b.0123.tmp", "a/.b.tmp", "a/b", "a/c/d"])
    assert sorted(path.name for path in store.folder.iterdir()) == [".hidden", "a"]


@pytest.fixture
def outside(tmp_path):
    """A folder beside the store's, which nothing may change or read."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(b"secret")
    return folder


def all_of(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def uses(store, key):
    """What becomes of each method: the type of its error, or what it says."""
    said = []
    for call in (
        lambda: put(store, key),
        lambda: store.put_new(key, b"new"),
        lambda: store.open(key),
        lambda: list(store.keys(f"{key}/")),
        lambda: store.delete(key),
    ):
        try:
            said.append(call())
        except StoreError as error:
            said.append(type(error))
    return said


def test_a_folder_that_is_a_symbolic_link_is_not_entered(store, outside):
    put(store, "a")
    (store.folder / "link").symlink_to(outside)
    assert uses(store, "link/secret") == [StoreError] * 5
    assert (all_of(outside), list(store.keys("")), store.sweep()) == ({"secret": b"secret"}, ["a"], 0)


def test_a_file_that_is_a_symbolic_link_is_not_read_and_is_replaced_by_put(store, outside):
    put(store, "a")
    (store.folder / "x").symlink_to(outside / "secret")
    said = [list(store.keys("")), store.put_new("x", b"new")]
    with pytest.raises(StoreError, match="/x is a symbolic link, and below a store's folder none is followed"):
        store.open("x")
    put(store, "x")
    assert (said, store.open("x").read(), all_of(outside)) == ([["a"], False], b"value", {"secret": b"secret"})


def test_a_dangling_link_is_not_written_through(store, outside):
    put(store, "a")
    (store.folder / "x").symlink_to(outside / "new")
    assert store.put_new("x", b"new") is False
    put(store, "x")
    store.delete("x")
    assert (list(store.keys("")), all_of(outside)) == (["a"], {"secret": b"secret"})


def test_the_stores_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    put(LocalStore(tmp_path / "link"), "a/b")
    assert all_of(tmp_path / "real") == {"a": False, "a/b": b"value"}


def test_what_is_no_regular_file_is_neither_listed_nor_read_and_nothing_hangs(store, monkeypatch):
    put(store, "a")
    os.mkfifo(store.folder / "fifo")
    monkeypatch.chdir(store.folder)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        assert list(store.keys("")) == ["a"]
        for key in ("fifo", "socket"):
            with pytest.raises(StoreError) as caught:
                store.open(key)
            assert type(caught.value) is StoreError


def test_keys_that_lead_out_touch_nothing(store, outside):
    put(store, "a")
    before = all_of(store.folder.parent)
    for key in ("../outside/secret", "/etc/passwd", str(outside / "secret"), "a/../../outside/secret", "..", "a/.."):
        assert uses(store, key) == [StoreError] * 5
    assert all_of(store.folder.parent) == before


class Following(LocalStore):
    """Opens by path."""

    def open(self, key):
        return (self.folder / key).read_bytes()


def test_a_store_that_follows_links_is_caught(store, outside):
    put(store, "a")
    (store.folder / "link").symlink_to(outside)
    assert uses(Following(store.folder), "link/secret")[2] == b"secret"


@pytest.fixture
def failing(monkeypatch):
    """Have a function of the system fail."""

    def fail(name, number):
        def call(*_, **__):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, name, call)

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("name", ["write", "fsync", "mkdir"])
def test_a_full_disk_is_called_so_with_what_is_needed_and_free(store, failing, name, number):
    failing(name, number)
    with pytest.raises(StoreError) as caught:
        put(store, "a/b", b"x" * 1234)
    said, free = str(caught.value).rsplit(", ", 1)
    about = f"Cannot write {store.folder}/a/b: disk full ({os.strerror(number)}): 1234 bytes are needed"
    assert (said, free.split()[1:]) == (about, ["are", "free."])
    assert int(free.split()[0]) > 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_what_this_user_may_not_is_told_with_the_path_and_the_user(store, failing, number):
    failing("mkdir", number)
    expected = f"Cannot write {store.folder}/a: {os.strerror(number)}; this process runs as user {os.getuid()}."
    with pytest.raises(StoreError) as caught:
        put(store, "a")
    assert str(caught.value) == expected


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_filesystem_without_hard_links_is_told(store, failing, number):
    failing("link", number)
    with pytest.raises(StoreError, match="which needs hard links, and this filesystem has none"):
        store.put_new("a", b"")
    assert (list(store.keys("")), temporaries(store.folder)) == ([], [])


def test_a_filesystem_that_cannot_sync_folders_is_good_enough(store, monkeypatch):
    real = os.fsync

    def fsync(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    put(store, "a/b")
    assert store.open("a/b").read() == b"value"


def test_a_link_that_was_made_though_the_answer_says_otherwise_is_found(store, monkeypatch):
    real = os.link

    def link(*args, **options):
        real(*args, **options)
        raise FileExistsError(errno.EEXIST, "File exists")  # a server that heard a request twice says so

    monkeypatch.setattr(os, "link", link)
    assert (store.put_new("a", b"mine"), store.open("a").read()) == (True, b"mine")


def test_an_error_while_reading_is_a_store_error(store, failing):
    put(store, "a")
    file = store.open("a")
    failing("preadv", errno.EIO)
    with file, pytest.raises(StoreError, match=r"Cannot read .*/store/a: Input/output error"):
        file.read()


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(store, failing):
    put(store, "a")
    failing("scandir", errno.EACCES)
    with pytest.raises(StoreError, match="Cannot list"):
        store.keys("")


def test_free_is_known_before_the_folder_is_there(store):
    assert store.free() > 0
