"""A store at a URL, through fsspec."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from ..core.errors import LooplineError, NoSuchKey, StoreError
from ..core.redact import redacted_text
from ._pieces import Pieces
from ._plain import PlainPlace
from ._reading import Fetch, reading
from ._retry import Patience, code_of
from ._s3 import S3Place
from .base import Chunked, check_key, check_prefix, is_key

__all__ = ["RemoteStore"]

T = TypeVar("T")

_BUFFER = 8 << 20
_SECRET = re.compile("key|secret|token|passw|credential|auth|sas", re.IGNORECASE)


class RemoteStore:
    """A folder at any URL that fsspec knows, such as `s3://bucket/runs/1`; `options` go to its filesystem.

    What may pass by itself (5xx, throttling, timeouts, resets) is tried again, with pauses from `first_wait_s` on, for
    up to `deadline_s` for each request; a refusal is not. The layers below try once: on S3, s3fs and botocore are told
    so, unless `config_kwargs` say otherwise. No request on S3 takes longer than `attempt_s`.

    On S3 an object is there when it is complete, and `put_new` is a conditional write, if the server knows such; it is
    asked once. On every other filesystem values are written beside their place and moved there, large ones are not
    tried again, and `put_new` is exclusive within this process only, which is said once in the log.

    The filesystem is this store's own and caches no listings. It is made anew in a process that was forked, because
    the thread that it works on does not go along.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = 600.0,
        first_wait_s: float = 0.5,
        attempt_s: float = 120.0,
        **options: Any,
    ) -> None:
        self._scheme, credentials, where, query = _parts_of(url)
        self._name = f"{self._scheme}://{where}"
        if query or "::" in url:
            raise StoreError(f"{self._name} came with '?' or '::'; a store's URL has neither. Give options by name.")
        if credentials and self._is_s3:
            raise StoreError(f"{self._name} came with credentials, which S3 reads from no URL. Give key= and secret=.")
        self._url = url
        self._options = options
        self._secrets = sorted({*credentials, *_secrets_in(options)}, key=len, reverse=True)
        self._patience = Patience(deadline_s, first_wait_s, self._say)
        self._attempt_s = attempt_s
        self._made_in = os.getpid()
        self._made = self._connect()

    @property
    def name(self) -> str:
        """How messages call it: the URL, without what it may hold of credentials."""
        return self._name

    @property
    def folder(self) -> Path | None:
        """None: it is not on this machine."""
        return None

    def put(self, key: str, data: BinaryIO | Chunked) -> None:
        """Store what can be read from `data`."""
        check_key(key)
        pieces = Pieces(data)
        self._do("write", key, lambda: self._place.put(key, pieces), pieces)

    def put_new(self, key: str, data: bytes) -> bool:
        """Store only if nothing is there, and say whether it was stored."""
        check_key(key)
        return self._do("write", key, lambda: self._place.put_new(key, bytes(data)))

    def open(self, key: str) -> BinaryIO:
        """Read what is stored, by ranges, each when it is needed."""
        check_key(key)
        fetch, size = self._do("read", key, lambda: self._place.open(key))
        return reading(
            lambda at, buffer: self._do("read", key, lambda: fetch(at, buffer)), size, buffer=min(_BUFFER, max(size, 1))
        )

    def keys(self, prefix: str) -> Iterator[str]:
        """The keys that begin with a prefix, sorted."""
        check_prefix(prefix)
        found = self._do("list", prefix, lambda: self._place.keys(prefix))
        return iter(sorted(key for key in found if is_key(key)))

    def delete(self, key: str) -> None:
        """Remove a key; one that is not there is no error."""
        check_key(key)
        self._do("delete", key, lambda: self._place.delete(key))

    def free(self) -> int | None:
        """None: nobody says."""
        return None

    def sweep(self) -> int:
        """Remove what killed writers left half-written: on S3, uploads that nobody completed."""
        return self._do("sweep", "", lambda: self._place.sweep())

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({self._name!r})"

    @property
    def _is_s3(self) -> bool:
        return self._scheme in ("s3", "s3a")

    @property
    def _place(self) -> _Place:
        if self._made_in != os.getpid():
            self._made, self._made_in = self._connect(), os.getpid()
        return self._made

    def _connect(self) -> _Place:
        import fsspec  # type: ignore[import-untyped]

        try:
            fsspec.get_filesystem_class(self._scheme)
        except ImportError as error:
            how = "pip install 'loopline[s3]'" if self._is_s3 else str(error)
            raise StoreError(f"{self._name} needs a package that is not installed: {how}") from error
        except ValueError as error:
            raise StoreError(f"{self._name}: no filesystem is known for {self._scheme}://.") from error
        options = dict(self._options)
        if self._is_s3:
            options = {"use_listings_cache": False, **options}
            options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **options.get("config_kwargs", {})}
        fs, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, **options)
        if not self._is_s3:
            return PlainPlace(fs, root, self._name, self._patience)
        fs.retries = 1
        return S3Place(fs, root, self._name, self._patience, self._attempt_s)

    def _do(self, doing: str, key: str, call: Callable[[], T], pieces: Pieces | None = None) -> T:
        """What a call returns; its errors as StoreError, and those of the data that is put as they are."""
        try:
            return call()
        except LooplineError:
            raise
        except Exception as error:
            if pieces is not None and error is pieces.failed:
                raise
            if doing == "read" and isinstance(error, FileNotFoundError) and code_of(error) != "NoSuchBucket":
                told: StoreError = NoSuchKey(f"Nothing is stored under {key!r} in {self._name}.")
            else:
                told = StoreError(f"Cannot {doing} {key!r} in {self._name}: {self._say(error)}.")
            written = "".join(traceback.format_exception(error))
            cause = None if any(secret in written for secret in self._secrets) else error
        # outside of the handler, so that an error which shows a secret is not kept as its context either
        raise told from cause

    def _say(self, error: BaseException) -> str:
        said = f"{type(error).__name__}: {error}".rstrip(": ").rstrip(".")
        said += "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        for secret in self._secrets:
            said = said.replace(secret, "***")
        return redacted_text(said)


class _Place(Protocol):
    """What a store needs of a filesystem. Whatever fails raises what the filesystem raises."""

    def put(self, key: str, pieces: Pieces) -> None: ...

    def put_new(self, key: str, data: bytes) -> bool: ...

    def open(self, key: str) -> tuple[Fetch, int]: ...

    def keys(self, prefix: str) -> list[str]: ...

    def delete(self, key: str) -> None: ...

    def sweep(self) -> int: ...


def _parts_of(url: str) -> tuple[str, list[str], str, str]:
    """The scheme, what may be credentials, the place and the query."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    host, slash, path = rest.partition("/")
    user, _, host = host.rpartition("@")
    credentials = [part for part in (user, *user.split(":")) if part]
    return scheme.lower(), credentials, f"{host}{slash}{path}".rstrip("/"), query


def _secrets_in(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets_in(value)
        elif isinstance(value, str) and value and _SECRET.search(name):
            yield value
        elif isinstance(value, str) and "://" in value:
            yield from _parts_of(value)[1]
