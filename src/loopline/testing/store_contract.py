"""What every store keeps to, as tests that a store of your own inherits."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ..core.errors import NoSuchKey, StoreError
from ..stores import Store

__all__ = ["StoreContract"]

T = TypeVar("T")

_LARGE = 17_000_003
_BAD_KEYS = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    ".hidden",
    "a/.hidden",
    "a\\b",
    "a\0b",
    "a\n",
    "a b",
    "a:b",
    "~",
    "ä",
    "x" * 129,
)
_BAD_PREFIXES = ("/", "..", "../", "a//", ".a", "a/.", "a\\", "*", "a\n")
_GOOD_KEYS = ("a", "A.b-c_d=e", "-", "=", "_", "0/1/2/3", "x" * 128, "a.", "a..b", "000000000012-1a2b/MANIFEST.json")


class StoreContract:
    """Derive a test class from this, give it a `make_store`, and pytest finds the tests.

    >>> from loopline.stores import MemoryStore
    >>> class TestMemoryStore(StoreContract):
    ...     def make_store(self):
    ...         return MemoryStore()
    >>> TestMemoryStore().test_put_replaces_what_was_there()
    """

    def make_store(self) -> Store:
        """A new store with nothing in it."""
        raise NotImplementedError(f"{type(self).__qualname__} has no make_store()")

    def test_it_is_a_store_with_a_name(self) -> None:
        store = self.make_store()
        assert isinstance(store, Store)
        assert isinstance(store.name, str)
        assert store.name

    def test_what_is_put_is_read_back(self) -> None:
        store = self.make_store()
        for value in (b"", b"x", bytes(range(256)) * 4):
            store.put("a/b/c", io.BytesIO(value))
            assert _read(store, "a/b/c") == value

    def test_what_is_large_is_read_back(self) -> None:
        store = self.make_store()
        value = _large()
        store.put("large", io.BytesIO(value))
        assert _read(store, "large") == value

    def test_what_comes_in_chunks_is_read_back(self) -> None:
        store = self.make_store()
        value = _large()
        store.put("large", _Chunks([value[:1], b"", value[1:9_000_000], value[9_000_000:]], len(value)))
        store.put("small", _Chunks([b"a", b"", b"bc"], 3))
        store.put("empty", _Chunks([], 0))
        assert _read(store, "large") == value
        assert (_read(store, "small"), _read(store, "empty")) == (b"abc", b"")

    def test_put_replaces_what_was_there(self) -> None:
        store = self.make_store()
        store.put("a", io.BytesIO(b"long" * 1000))
        store.put("a", io.BytesIO(b"short"))
        assert (_read(store, "a"), list(store.keys(""))) == (b"short", ["a"])

    def test_put_new_stores_only_where_nothing_is(self) -> None:
        store = self.make_store()
        told = [store.put_new("a/b", b"first"), store.put_new("a/b", b"second"), store.put_new("a/b", b"")]
        assert (told, _read(store, "a/b")) == ([True, False, False], b"first")

    def test_put_new_stores_again_what_was_deleted(self) -> None:
        store = self.make_store()
        store.put_new("a", b"first")
        store.delete("a")
        assert (store.put_new("a", b"second"), _read(store, "a")) == (True, b"second")

    def test_put_new_leaves_what_was_put(self) -> None:
        store = self.make_store()
        store.put("a", io.BytesIO(b"put"))
        assert (store.put_new("a", b"new"), _read(store, "a")) == (False, b"put")

    def test_of_eight_writers_at_once_exactly_one_is_told_that_it_stored(self) -> None:
        store = self.make_store()
        for key in ("a", "b/c", "b/d"):
            values = [f"writer {i}".encode() for i in range(8)]
            told = _at_once([partial(store.put_new, key, value) for value in values])
            assert sorted(told) == [False] * 7 + [True]
            assert _read(store, key) == values[told.index(True)]

    def test_keys_are_sorted_and_have_the_prefix(self) -> None:
        store = self.make_store()
        for key in ("b/2", "a", "b/10", "b/1/x", "c", "b-1", "B"):
            store.put(key, io.BytesIO(b""))
        found = [list(store.keys(prefix)) for prefix in ("", "b", "b/", "b/1", "b/1/", "b/1/x", "d", "d/", "b/9/")]
        assert found == [
            ["B", "a", "b-1", "b/1/x", "b/10", "b/2", "c"],
            ["b-1", "b/1/x", "b/10", "b/2"],
            ["b/1/x", "b/10", "b/2"],
            ["b/1/x", "b/10"],
            ["b/1/x"],
            ["b/1/x"],
            [],
            [],
            [],
        ]

    def test_an_empty_store_has_no_keys_and_can_be_asked_everything(self) -> None:
        store = self.make_store()
        store.delete("a/b")
        assert (list(store.keys("")), list(store.keys("a/")), store.sweep()) == ([], [], 0)
        free = store.free()
        assert free is None or free > 0

    def test_delete_removes_and_may_be_repeated(self) -> None:
        store = self.make_store()
        for key in ("a/b", "a/c"):
            store.put(key, io.BytesIO(b""))
        store.delete("a/b")
        store.delete("a/b")
        store.delete("a")
        store.delete("x/y/z")
        assert list(store.keys("")) == ["a/c"]
        _raises(NoSuchKey, partial(_read, store, "a/b"))

    def test_a_missing_key_is_told_by_its_name(self) -> None:
        store = self.make_store()
        store.put("a/b", io.BytesIO(b""))
        for key in ("missing", "a/missing", "a", "a/b/c", "no/folder"):
            error = _raises(NoSuchKey, partial(_read, store, key))
            assert key in str(error)

    def test_what_is_no_key_is_refused_and_shown(self) -> None:
        store = self.make_store()
        for key in _BAD_KEYS:
            for call in (
                partial(store.put, key, io.BytesIO(b"")),
                partial(store.put_new, key, b""),
                partial(store.open, key),
                partial(store.delete, key),
            ):
                error = _raises(StoreError, call)
                assert repr(key) in str(error)
                assert not isinstance(error, NoSuchKey)
        for prefix in _BAD_PREFIXES:
            _raises(StoreError, partial(_keys, store, prefix))
        assert list(store.keys("")) == []

    def test_every_name_that_is_allowed_can_be_stored(self) -> None:
        store = self.make_store()
        for key in _GOOD_KEYS:
            store.put(key, io.BytesIO(key.encode()))
        assert [_read(store, key).decode() for key in store.keys("")] == sorted(_GOOD_KEYS)

    def test_a_value_can_be_read_in_parts(self) -> None:
        store = self.make_store()
        value = _large()
        store.put("a", io.BytesIO(value))
        with store.open("a") as file:
            got = [file.read(10), file.read(9_000_000)]
            if file.seekable():
                file.seek(-5, io.SEEK_END)
                got += [file.read(100), file.read(1)]
                file.seek(16_000_000)
                got += [file.read(3), file.read()]
        expected = [value[:10], value[10:9_000_010], value[-5:], b"", value[16_000_000:16_000_003], value[16_000_003:]]
        assert got == expected[: len(got)]

    def test_several_readers_do_not_disturb_each_other(self) -> None:
        store = self.make_store()
        store.put("a", io.BytesIO(b"0123456789"))
        with store.open("a") as one, store.open("a") as other:
            assert [one.read(3), other.read(5), one.read(3), other.read(5)] == [b"012", b"01234", b"345", b"56789"]

    def test_methods_may_be_called_on_any_thread(self) -> None:
        store = self.make_store()
        values = [b"%d" % number * (1000 + number) for number in range(8)]

        def use(number: int) -> bool:
            key, value = f"folder/{number}/x", values[number]
            for _ in range(5):
                store.put(key, io.BytesIO(value))
                store.put("folder/shared", io.BytesIO(value))
                assert _read(store, key) == value
                assert key in list(store.keys(f"folder/{number}/"))
                assert _read(store, "folder/shared") in values
                store.delete(key)
            return True

        assert _at_once([partial(use, number) for number in range(8)]) == [True] * 8
        assert list(store.keys("")) == ["folder/shared"]

    def test_nothing_is_seen_of_a_value_before_it_is_complete(self) -> None:
        store = self.make_store()
        for old in (None, b"old"):
            _set(store, old)
            seen: list[tuple[list[str], bytes | None]] = []
            store.put("a/b", _Watched(_large(), lambda: seen.append(_seen(store))))  # noqa: B023
            assert seen
            assert [state for state in seen if state != ([] if old is None else ["a/b"], old)] == []
            assert _read(store, "a/b") == _large()

    def test_a_source_that_fails_midway_passes_its_error_on_and_leaves_what_was_there(self) -> None:
        store = self.make_store()
        for old in (None, b"old"):
            for size in (0, 100, _LARGE):
                for chunked in (False, True):
                    _set(store, old)
                    error = OSError("the source failed")
                    source = _Failing(b"x" * size, error)
                    given = _Chunks(source.pieces(), size) if chunked else source
                    assert _raises(OSError, partial(store.put, "a/b", given)) is error
                    assert _seen(store) == ([] if old is None else ["a/b"], old)


def _large() -> bytes:
    """More than two blocks of any store here, no whole number of them, and no two alike."""
    return random.Random(0).randbytes(_LARGE)


def _read(store: Store, key: str) -> bytes:
    with store.open(key) as file:
        return file.read()


def _keys(store: Store, prefix: str) -> list[str]:
    return list(store.keys(prefix))


def _set(store: Store, value: bytes | None) -> None:
    if value is None:
        store.delete("a/b")
    else:
        store.put("a/b", io.BytesIO(value))


def _seen(store: Store) -> tuple[list[str], bytes | None]:
    try:
        return list(store.keys("")), _read(store, "a/b")
    except NoSuchKey:
        return list(store.keys("")), None


def _raises(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """The error that a call raises; here because pytest need not be installed to import this."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def _at_once(calls: list[Callable[[], T]]) -> list[T]:
    barrier = threading.Barrier(len(calls))

    def begin(call: Callable[[], T]) -> T:
        barrier.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(begin, calls))


class _Chunks:
    """Bytes in chunks of given sizes."""

    def __init__(self, chunks: Iterable[bytes], nbytes: int) -> None:
        self._chunks = chunks
        self.nbytes = nbytes

    def chunks(self) -> Iterator[memoryview]:
        for chunk in self._chunks:
            yield memoryview(chunk)


class _Watched(io.BytesIO):
    """Calls back before each part of it is read."""

    def __init__(self, value: bytes, look: Callable[[], None]) -> None:
        super().__init__(value)
        self._look = look

    def read(self, size: int | None = -1, /) -> bytes:
        self._look()
        return super().read(size)


class _Failing(io.BytesIO):
    """Gives its bytes and then an error."""

    def __init__(self, value: bytes, error: Exception) -> None:
        super().__init__(value)
        self._error = error

    def read(self, size: int | None = -1, /) -> bytes:
        if piece := super().read(size):
            return piece
        raise self._error

    def pieces(self) -> Iterator[bytes]:
        while True:
            yield self.read(1 << 20)
