"""Stores that break their word in one way each, and the tests of the contract that notice it."""

import io
import itertools
import time

import pytest

from loopline.core.errors import NoSuchKey, StoreError
from loopline.stores import MemoryStore
from loopline.testing import StoreContract

TESTS = [name for name in vars(StoreContract) if name.startswith("test_")]


def not_passed(kind, names):
    """Those of some tests of the contract that a store does not pass."""

    class Contract(StoreContract):
        def make_store(self):
            return kind()

    failed = []
    for name in names:
        try:
            getattr(Contract(), name)()
        except Exception:  # noqa: BLE001 - whatever it is, it was noticed
            failed.append(name)
    return failed


class Early(MemoryStore):
    """Shows a value while it is written."""

    def put(self, key, data):
        super().put(key, io.BytesIO(b""))
        super().put(key, data)


class InPlace(MemoryStore):
    """Loses what was there when the source fails."""

    def put(self, key, data):
        self.delete(key)
        super().put(key, data)


class Wrapping(MemoryStore):
    """Gives the source's error as its own."""

    def put(self, key, data):
        try:
            super().put(key, data)
        except OSError as error:
            raise StoreError("it failed") from error


class LookingFirst(MemoryStore):
    """Looks whether a key is there, and then stores it."""

    def put_new(self, key, data):
        if key in self._values:
            return False
        time.sleep(0.05)
        self._values[key] = data
        return True


class Overwriting(MemoryStore):
    """Does not care whether a key is new."""

    def put_new(self, key, data):
        self.put(key, io.BytesIO(data))
        return True


class Unsorted(MemoryStore):
    """Lists keys as they came."""

    def keys(self, prefix):
        return (key for key in self._values if key.startswith(prefix))


class Folders(MemoryStore):
    """Takes a prefix for a folder."""

    def keys(self, prefix):
        return (key for key in super().keys("") if key.startswith(f"{prefix}/" if prefix else ""))


class Cluttered(MemoryStore):
    """Lists what is being written."""

    def put(self, key, data):
        self._values[f"{key}.tmp"] = b""
        super().put(key, data)
        del self._values[f"{key}.tmp"]


class Trusting(MemoryStore):
    """Takes any key."""

    def put(self, key, data):
        self._values[key] = data.read()


class Silent(MemoryStore):
    """Says that what is missing is empty."""

    def open(self, key):
        try:
            return super().open(key)
        except NoSuchKey:
            return io.BytesIO(b"")


class Raw(MemoryStore):
    """Raises what is no StoreError."""

    def open(self, key):
        return io.BytesIO(self._values[key])


class Strict(MemoryStore):
    """Does not delete what is not there."""

    def delete(self, key):
        del self._values[key]


class OneReader(MemoryStore):
    """Has one position for all readers of a key."""

    def __init__(self):
        super().__init__()
        self._files = {}

    def open(self, key):
        value = super().open(key).read()
        return self._files.setdefault((key, value), io.BytesIO(value))


class Short(MemoryStore):
    """Keeps what fits into one block."""

    def put(self, key, data):
        super().put(key, data)
        self._values[key] = self._values[key][: 8 << 20]


class Deaf(MemoryStore):
    """Knows no chunks."""

    def put(self, key, data):
        super().put(key, io.BytesIO(data.read()))


class Eager(MemoryStore):
    """Sweeps what is stored."""

    def sweep(self):
        return 1


class OneAtATime(MemoryStore):
    """Cannot be used by two threads at once."""

    def __init__(self):
        super().__init__()
        self._users = itertools.count()

    def put(self, key, data):
        mine = next(self._users)
        time.sleep(0.002)
        if next(self._users) != mine + 1:
            raise RuntimeError("two at once")
        super().put(key, data)


NOTICED_BY = {
    Early: "test_nothing_is_seen_of_a_value_before_it_is_complete",
    InPlace: "test_a_source_that_fails_midway_passes_its_error_on_and_leaves_what_was_there",
    Wrapping: "test_a_source_that_fails_midway_passes_its_error_on_and_leaves_what_was_there",
    LookingFirst: "test_of_eight_writers_at_once_exactly_one_is_told_that_it_stored",
    Overwriting: "test_put_new_stores_only_where_nothing_is",
    Unsorted: "test_keys_are_sorted_and_have_the_prefix",
    Folders: "test_keys_are_sorted_and_have_the_prefix",
    Cluttered: "test_nothing_is_seen_of_a_value_before_it_is_complete",
    Trusting: "test_what_is_no_key_is_refused_and_shown",
    Silent: "test_a_missing_key_is_told_by_its_name",
    Raw: "test_a_missing_key_is_told_by_its_name",
    Strict: "test_delete_removes_and_may_be_repeated",
    OneReader: "test_several_readers_do_not_disturb_each_other",
    Short: "test_what_is_large_is_read_back",
    Deaf: "test_what_comes_in_chunks_is_read_back",
    Eager: "test_an_empty_store_has_no_keys_and_can_be_asked_everything",
    OneAtATime: "test_methods_may_be_called_on_any_thread",
}


@pytest.mark.parametrize("kind", NOTICED_BY, ids=lambda kind: kind.__name__)
def test_a_store_that_breaks_its_word_is_noticed(kind):
    assert not_passed(kind, [NOTICED_BY[kind]]) == [NOTICED_BY[kind]]


def test_a_sound_store_is_not_complained_of():
    assert (not_passed(MemoryStore, TESTS), len(TESTS)) == ([], 20)
