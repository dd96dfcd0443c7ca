"""One writer in a run's folder: who gets it, who is refused, who takes over, and who notices that it is lost."""

import errno
import fcntl
import io
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress

import pytest

from loopline.checkpoint import card, folder_lock
from loopline.checkpoint import owner as owner_module
from loopline.checkpoint.card import who
from loopline.checkpoint.owner import Owner
from loopline.core.errors import RunLocked, StoreError
from loopline.stores import LocalStore, MemoryStore

RACES = 50 if os.environ.get("LOOPLINE_FULL") == "1" else 5
CANARY = "c4n4ry"
SOON = {"beat_s": 0.02, "patience_s": 0.2}  # for owners that are dead
LIVE = {"beat_s": 0.02, "patience_s": 60.0}  # for owners that live, however slow the machine is


class Cut(MemoryStore):
    """A store that can be cut off, as by a broken network. What it holds is shared with another."""

    def __init__(self, shared):
        super().__init__()
        self._values, self._change = shared._values, shared._change
        self.cut, self.tries = False, 0

    def reach(self):
        self.tries += 1
        if self.cut:
            raise StoreError("the network is down")

    def put(self, key, data):
        self.reach()
        super().put(key, data)

    def put_new(self, key, data):
        self.reach()
        return super().put_new(key, data)

    def open(self, key):
        self.reach()
        return super().open(key)

    def keys(self, prefix):
        self.reach()
        return super().keys(prefix)

    def delete(self, key):
        self.reach()
        super().delete(key)


class Pretends(MemoryStore):
    """Looks first and puts then, as stores do that have no exclusive put; meanwhile others look, too."""

    def put_new(self, key, data):
        if key in self.keys(key):
            return False
        time.sleep(0.05 if threading.current_thread().name == "slow" else 0.01)
        self.put(key, io.BytesIO(data))
        return True


@pytest.fixture(params=["folder", "bucket"])
def store(request, tmp_path):
    return LocalStore(tmp_path / "run") if request.param == "folder" else MemoryStore()


@pytest.fixture
def take():
    """Takes runs that are released when the test is over."""
    owners = []

    def take(store, **how):
        owners.append(Owner.take(store, **how))
        return owners[-1]

    yield take
    for owner in owners:
        owner.release()


@pytest.fixture
def folder(tmp_path):
    return LocalStore(tmp_path / "run")


def dead(store, number=1, *, beat=True, **about):
    """What an owner leaves that was killed."""
    store.put_new(f"LEASE-{number:06d}", json.dumps({"host": "elsewhere", "pid": 7, **about}).encode())
    if beat:
        store.put(f"BEAT-{number:06d}", io.BytesIO(b"5"))


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def told(caplog):
    return [record.getMessage() for record in caplog.records]


def owner_threads():
    return [thread for thread in threading.enumerate() if thread.name == "loopline-owner"]


def test_every_taking_has_the_next_number(store, take):
    numbers = []
    for _ in range(3):
        owner = take(store)
        numbers.append(owner.fencing)
        owner.release()
    assert numbers == [1, 2, 3]


def test_only_the_last_taking_leaves_files(store, take):
    for _ in range(3):
        take(store).release()
    assert list(store.keys("")) == ["FREE-000003", "LEASE-000003", *(["LOCK"] if store.folder else [])]


def test_who_comes_second_is_told_who_is_there_and_leaves_with_75(store, monkeypatch, take):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    owner = take(store, about={"run": "r-1"}, **LIVE)
    with pytest.raises(RunLocked) as refused:
        take(store, **LIVE)
    owner.release()
    start = f"{store.name} is being written by process {os.getpid()} on {socket.gethostname()}, run r-1, started "
    end = ": train.py --lr 0.1. Wait for it or stop it, or give this run a folder of its own."
    said = str(refused.value)
    assert (refused.value.code, said[: len(start)], said[-len(end) :]) == (75, start, end)


def test_who_is_refused_harms_nothing(store, take):
    owner = take(store, **LIVE)
    with pytest.raises(RunLocked):
        take(store, **LIVE)
    owner.check()
    owner.release()
    assert take(store).fencing == 2


def test_the_owner_of_a_folder_is_named_in_its_lock_until_it_is_released(folder, take):
    owner = take(folder, about={"run": "r-1"})
    held = json.loads((folder.folder / "LOCK").read_text())
    owner.release()
    assert (held["run"], int(held["pid"]), (folder.folder / "LOCK").read_text()) == ("r-1", os.getpid(), "")


def test_a_command_of_any_length_is_no_hindrance(store, take, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *["x" * 1000] * 1000])
    take(store).check()


def leaks(store, take, monkeypatch):
    """Whether secrets of an owner are in what it wrote, and in what others are told."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", CANARY, f"--data=https://me:{CANARY}@host/x"])
    owner = take(store, about={"api_key": CANARY, "note": f"HF_TOKEN={CANARY} python train.py"}, **LIVE)
    with pytest.raises(RunLocked) as refused:
        take(store, **LIVE)
    written = b"".join(store.open(key).read() for key in store.keys(""))
    owner.release()
    return CANARY in written.decode(), CANARY in str(refused.value)


def test_no_secret_of_the_command_or_of_what_is_told_is_written_or_said(store, take, monkeypatch):
    assert leaks(store, take, monkeypatch) == (False, False)


@pytest.mark.parametrize("careless", ["redacted", "redacted_command"])
def test_an_owner_that_does_not_redact_is_caught_by_the_canary(store, take, monkeypatch, careless):
    """The test above can fail."""
    monkeypatch.setattr(card, careless, lambda given: given)
    assert leaks(store, take, monkeypatch) == (True, True)


def test_what_another_has_written_about_itself_is_fit_for_a_terminal():
    about = {"host": "\x1b[2J", "pid": "1\n2", "x\ty": "z" * 1000, "command": "a\r"}
    assert who(about) == f"process 1?2 on ?[2J, x?y {'z' * 300}, started at an unknown time: a?"


@pytest.mark.parametrize("about", [b"", b"[]", b"{", b'{"pid": []}', b"[" * 100_000, b"\xff"])
def test_a_card_that_cannot_be_read_names_nobody_and_harms_nothing(about, take):
    store = MemoryStore()
    store.put_new("LEASE-000001", about)
    assert take(store, **SOON).fencing == 2


def test_a_sign_of_life_that_is_replaced_while_it_is_read_is_read_again(take):
    class Moves(MemoryStore):
        moved = False

        def open(self, key):
            if key.startswith("BEAT") and not self.moved:
                self.moved = True
                raise StoreError("it is another one now")
            return super().open(key)

    store = Moves()
    dead(store)
    assert (take(store, **SOON).fencing, store.moved) == (2, True)


def test_a_released_run_is_taken_without_waiting(store, take):
    take(store).release()
    take(store, patience_s=3600).release()


def test_a_dead_owner_is_waited_for_and_then_taken_over_which_is_logged(caplog, take):
    store = MemoryStore()
    dead(store, command="train.py")
    owner = take(store, **SOON)
    owner.release()
    name = "process 7 on elsewhere, started at an unknown time: train.py"
    assert (owner.fencing, told(caplog)) == (
        2,
        [
            f"memory was taken by {name}. Waiting 0.2 s for a sign of life.",
            f"memory was not released by {name}. It is dead, and the run is taken over.",
        ],
    )


def test_an_owner_that_died_before_its_first_sign_of_life_is_taken_over(take):
    store = MemoryStore()
    dead(store, beat=False)
    assert take(store, **SOON).fencing == 2


def test_an_owner_that_is_released_while_another_waits_is_followed_at_once(caplog, take):
    store = MemoryStore()
    dead(store)
    later = threading.Timer(0.1, store.put_new, ["FREE-000001", b""])
    later.start()
    owner = take(store, **LIVE)
    owner.release()
    assert (owner.fencing, len(told(caplog))) == (2, 1)


def test_a_folders_lock_tells_at_once_that_its_owner_is_dead(folder, take):
    dead(folder, beat=False)
    assert take(folder, patience_s=3600).fencing == 2


def test_an_owner_where_the_lock_did_not_hold_is_believed_its_signs_of_life(folder, monkeypatch, take):
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda file, operation: None)
        owner = take(folder, **LIVE)
    with pytest.raises(RunLocked):
        take(folder, **LIVE)
    owner.release()
    assert take(folder, patience_s=3600).fencing == 2


@pytest.mark.parametrize("number", [None, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_no_lock_holds_the_lease_decides(folder, monkeypatch, caplog, number, take):
    def flock(file, operation):
        if number is not None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    owner = take(folder, **LIVE)
    assert told(caplog) == [
        f"The file system of {folder.name} has no locks that hold: signs of life will tell its owner."
    ]
    with pytest.raises(RunLocked):
        take(folder, **LIVE)
    owner.release()
    take(folder, patience_s=3600).release()


def test_one_who_was_cut_off_and_taken_over_notices_and_writes_no_more(take):
    shared = MemoryStore()
    cut = Cut(shared)
    owner = take(cut, beat_s=0.02, stale_s=3600)
    cut.cut = True
    successor = take(shared, about={"run": "r-2"}, **SOON)
    cut.cut = False
    with pytest.raises(RunLocked, match=r"^memory was taken over by process \d+ on .*, run r-2, started") as lost:
        owner.check()
    owner.release()
    successor.check()
    assert (lost.value.code, owner.lost, list(shared.keys(""))) == (75, True, ["BEAT-000002", "LEASE-000002"])


def test_a_lost_run_is_noticed_without_asking_by_the_next_sign_of_life(take):
    store = MemoryStore()
    owner = take(store, beat_s=0.01)
    dead(store, 2)
    until(lambda: owner.lost)
    owner.release()
    assert "FREE-000001" not in list(store.keys(""))


def test_a_folder_whose_lock_file_was_removed_goes_to_the_next_and_the_first_notices(folder, take):
    first = take(folder)
    (folder.folder / "LOCK").unlink()
    second = take(folder)
    with pytest.raises(RunLocked, match="was taken over by"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_lease_that_was_removed_is_a_lost_run(store, take):
    owner = take(store)
    store.delete("LEASE-000001")
    with pytest.raises(RunLocked, match=r"LEASE-000001 in .* is gone"):
        owner.check()
    owner.release()


def test_one_who_cannot_give_signs_of_life_for_too_long_counts_itself_as_lost(take):
    cut = Cut(MemoryStore())
    owner = take(cut, beat_s=0.02, stale_s=0.1)
    cut.cut = True
    until(lambda: owner.lost)
    cut.cut = False
    with pytest.raises(
        RunLocked, match=r"could not be told for .* that its owner lives.*: the network is down"
    ) as lost:
        owner.check()
    owner.release()
    assert lost.value.code == 75


def test_a_short_outage_is_logged_once_and_costs_nothing(caplog, take):
    cut = Cut(MemoryStore())
    owner = take(cut, beat_s=0.01, stale_s=3600)
    cut.cut, tries = True, cut.tries
    until(lambda: cut.tries > tries + 5)
    cut.cut, tries = False, cut.tries
    until(lambda: cut.tries > tries + 5)
    owner.check()
    owner.release()
    assert told(caplog) == ["memory could not be told that its owner lives: the network is down. Trying on."]


def test_during_an_outage_a_check_says_that_the_store_failed_and_not_that_the_run_is_lost(take):
    cut = Cut(MemoryStore())
    owner = take(cut, beat_s=3600)
    cut.cut = True
    with pytest.raises(StoreError, match="the network is down"):
        owner.check()
    cut.cut = False
    owner.check()
    owner.release()


def test_the_signs_of_life_end_with_the_release(take):
    owner = take(MemoryStore(), beat_s=0.01)
    alive = len(owner_threads())
    owner.release()
    assert (alive, owner_threads()) == (1, [])


def test_a_folder_with_locks_needs_no_thread(folder, take):
    owner = take(folder)
    alive = owner_threads()
    owner.release()
    assert alive == []


def test_a_release_may_come_twice(store, take):
    owner = take(store)
    owner.release()
    following = take(store)
    owner.release()
    following.check()
    following.release()
    assert list(store.keys("FREE-")) == ["FREE-000002"]


def test_a_release_of_a_dead_store_raises_nothing_and_says_so(caplog, take):
    cut = Cut(MemoryStore())
    owner = take(cut)
    cut.cut = True
    owner.release()
    assert told(caplog) == ["memory could not be told that it is free: the network is down"]


def test_a_release_of_a_folder_that_is_gone_raises_nothing(folder, take):
    owner = take(folder)
    for path in folder.folder.iterdir():
        path.unlink()
    folder.folder.rmdir()
    owner.release()


@pytest.mark.timeout(60)
def test_a_release_does_not_wait_for_a_store_that_hangs(caplog, monkeypatch, take):
    monkeypatch.setattr(owner_module, "_FAREWELL_S", 0.1)
    go = threading.Event()

    class Hangs(MemoryStore):
        def put_new(self, key, data):
            if key.startswith("FREE"):
                go.wait(60)
            return super().put_new(key, data)

    owner = take(Hangs())
    owner.release()
    said = told(caplog)
    go.set()
    until(lambda: not owner_threads())
    assert said == ["memory does not answer, and the next run in it will have to wait."]


def test_a_forked_child_can_neither_release_nor_keep_what_its_parent_holds(store, take):
    owner = take(store)
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            owner.release()
        os._exit(0)
    os.waitpid(child, 0)
    owner.check()
    free = list(store.keys("FREE-"))
    owner.release()
    assert free == []


@pytest.mark.parametrize("make", ["symlink", "dangling", "hardlink", "fifo", "folder"])
def test_a_lock_that_leads_elsewhere_is_refused_and_nothing_is_written_there(folder, tmp_path, make, take):
    folder.put("x", io.BytesIO(b""))
    lock, victim = folder.folder / "LOCK", tmp_path / "victim"
    if make != "dangling":
        victim.write_text("precious")
    match make:
        case "symlink" | "dangling":
            lock.symlink_to(victim)
        case "hardlink":
            lock.hardlink_to(victim)
        case "fifo":
            os.mkfifo(lock)
        case "folder":
            lock.mkdir()
    with pytest.raises(StoreError, match=r"LOCK cannot be locked, so nothing can be written into this folder"):
        take(folder)
    assert (victim.exists() and victim.read_text(), list(folder.keys("LEASE"))) == (
        make != "dangling" and "precious",
        [],
    )


@pytest.mark.parametrize("make", ["symlink_to", "hardlink_to"])
def test_a_card_written_without_a_look_at_the_file_would_land_elsewhere(tmp_path, monkeypatch, make):
    """The test above can fail."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    getattr(tmp_path / "LOCK", make)(victim)
    monkeypatch.setattr(folder_lock, "_opened", os.open)
    folder_lock._write(tmp_path / "LOCK", b"card")
    assert victim.read_text() == "card"


def test_the_folder_and_its_lock_are_for_their_user_alone(folder, take):
    take(folder).release()
    modes = [path.stat().st_mode & 0o777 for path in (folder.folder, folder.folder / "LOCK")]
    assert modes == [0o700, 0o600]


def test_the_lock_of_a_folder_that_a_group_writes_is_the_groups(folder, take):
    folder.folder.mkdir()
    folder.folder.chmod(0o770)
    take(folder).release()
    assert (folder.folder / "LOCK").stat().st_mode & 0o777 == 0o660


def test_a_store_that_denies_its_own_success_is_not_believed(take):
    class Denies(MemoryStore):
        def put_new(self, key, data):
            super().put_new(key, data)
            return False

    take(Denies()).check()


def test_one_who_listed_long_ago_gets_no_number_that_others_are_past(take):
    class Stale(MemoryStore):
        stale = True

        def keys(self, prefix):
            if prefix == "LEASE-" and self.stale:
                self.stale = False
                return iter([])
            return super().keys(prefix)

    store = Stale()
    dead(store, 2)
    with pytest.raises(RunLocked, match="was taken over by process 7 on elsewhere"):
        take(store, **SOON)
    assert owner_threads() == []


def test_where_a_store_only_pretends_to_be_exclusive_the_first_notices_at_its_next_check(take):
    store = Pretends()
    owners = []
    slow = threading.Thread(target=lambda: owners.append(take(store, beat_s=3600)), name="slow")
    slow.start()
    owners.append(take(store, beat_s=3600))
    slow.join()
    first, second = owners
    with pytest.raises(RunLocked):
        first.check()
    second.check()
    for owner in owners:
        owner.release()


def race(store, contenders=4, patience_s=60.0):
    """The numbers of those who got a run that they all wanted at once, and the codes of the others."""
    start, end = threading.Barrier(contenders), threading.Barrier(contenders)
    got, codes = [], []

    def contend():
        owner = None
        start.wait()
        try:
            owner = Owner.take(store, beat_s=0.02, patience_s=patience_s)
            got.append(owner.fencing)
        except RunLocked as error:
            codes.append(error.code)
        end.wait()
        if owner is not None:
            owner.release()

    threads = [threading.Thread(target=contend, name="slow" if n == 0 else None) for n in range(contenders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got, codes


def test_of_several_who_want_a_run_at_once_exactly_one_gets_it(store):
    assert [race(store) for _ in range(RACES)] == [([number], [75] * 3) for number in range(1, RACES + 1)]


def test_of_several_who_wait_for_a_dead_owner_exactly_one_gets_its_run():
    store = MemoryStore()
    dead(store)
    assert race(store, patience_s=0.5) == ([2], [75] * 3)


def test_a_store_without_an_exclusive_put_is_caught_by_the_race():
    """The race can fail."""
    got, _ = race(Pretends(), contenders=2)
    assert got == [1, 1]
