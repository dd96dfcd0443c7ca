"""Keys as objects of an S3 bucket, through the client that s3fs keeps."""

from __future__ import annotations

import io
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from ._pieces import Pieces, in_blocks
from ._reading import Fetch
from ._retry import Again, Patience, status_of

__all__ = ["S3Place"]

logger = logging.getLogger("loopline")

_PART = 8 << 20
_AT_ONCE = 4
_MARK = "loopline-write"
_ABORT_S = 10.0


class S3Place:
    """A folder of a bucket. An object is there when its PUT or its multipart upload is complete, not before.

    What must not be done twice carries a mark of its writer. So where an answer was lost, or some layer below sent the
    request twice (aiohttp does, for a PUT on a connection that breaks), it asks whose object it is.
    """

    def __init__(self, fs: Any, root: str, name: str, patience: Patience, attempt_s: float) -> None:
        self._fs = fs
        self._bucket, folder, _ = fs.split_path(root)
        self._above = f"{folder}/" if folder else ""
        self._name = name
        self._patience = patience
        self._attempt_s = attempt_s
        self._probing = threading.Lock()
        self._honours_conditions: bool | None = None

    def put(self, key: str, pieces: Pieces) -> None:
        """One PUT for what is small, a multipart upload for what is large."""
        blocks = in_blocks(pieces, _PART)
        first, second = next(blocks, b""), next(blocks, None)
        if second is None:
            self._call("put_object", Key=self._above + key, body=first)
        else:
            self._upload(self._above + key, chain((first, second), blocks))

    def put_new(self, key: str, data: bytes) -> bool:
        """A PUT with `If-None-Match: *`, which the server answers with 412 if there is such an object."""
        name = self._above + key
        if not self._is_conditional():
            return self._put_if_unseen(name, data)
        mark = os.urandom(16).hex()

        def attempt() -> bool:
            try:
                self._once("put_object", Key=name, body=data, Metadata={_MARK: mark}, IfNoneMatch="*")
            except Exception as error:
                if status_of(error) != 412:
                    raise
                there, found = self._mark_of(name)
                if not there:
                    raise Again("the server had an object and then had none") from None
                return found == mark
            return True

        return self._patience("put_object", attempt)

    def open(self, key: str) -> tuple[Fetch, int]:
        """The first block at once, and so a small object whole; more by ranges, while it is still the same object."""
        path = f"{self._bucket}/{self._above}{key}"

        def attempt() -> tuple[Any, bytes]:
            file = self._fs.open(path, "rb", cache_type="none")
            if file.details["type"] != "file":
                raise FileNotFoundError(path)
            count = min(file.size, _PART)
            try:
                first: bytes = file.read(count)
            except OSError as error:
                if status_of(error) != 412:
                    raise
                raise Again("it was overwritten between two requests") from None
            _check(first, count)
            return file, first

        file, first = self._patience("get_object", attempt)

        def fetch(at: int, buffer: memoryview) -> int:
            count = min(len(buffer), _PART)

            def attempt() -> bytes:
                file.seek(at)
                data: bytes = file.read(count)
                _check(data, count)
                return data

            data = first[at : at + count] or self._patience("get_object", attempt)
            buffer[: len(data)] = data
            return len(data)

        return fetch, file.size

    def keys(self, prefix: str) -> list[str]:
        """What is under a prefix, from the server and from no cache."""
        found: list[str] = []
        more: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=self._above + prefix, **more)
            found += [entry["Key"].removeprefix(self._above) for entry in page.get("Contents", [])]
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        """S3 says the same whether it was there or not."""
        self._call("delete_object", Key=self._above + key)

    def sweep(self) -> int:
        """Abort every multipart upload that nobody completed."""
        swept = 0
        more: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Prefix=self._above, **more)
            for upload in page.get("Uploads", []):
                self._abort(upload["Key"], upload["UploadId"], self._patience)
                swept += 1
            if not page.get("IsTruncated"):
                return swept
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _upload(self, name: str, parts: Iterable[bytes]) -> None:
        mark = os.urandom(16).hex()
        upload = self._call("create_multipart_upload", Key=name, Metadata={_MARK: mark})["UploadId"]
        try:
            sent = self._send(name, upload, parts)
            self._patience("complete_multipart_upload", lambda: self._complete(name, upload, sent, mark))
        except BaseException:
            patience = replace(self._patience, deadline_s=min(_ABORT_S, self._patience.deadline_s))
            try:
                self._abort(name, upload, patience)
            except Exception as error:  # noqa: BLE001 - the first error is the one to tell
                logger.warning(
                    "An unfinished upload of %s is left in %s (%s). It costs space until the bucket's lifecycle rule "
                    "for unfinished uploads, or a sweep, removes it.",
                    name,
                    self._name,
                    self._patience.say(error),
                )
            raise

    def _send(self, name: str, upload: str, parts: Iterable[bytes]) -> list[dict[str, Any]]:
        """Upload the parts, some at once. When it returns or raises, no request is under way any more."""
        sent: list[dict[str, Any]] = []
        under_way: deque[Future[dict[str, Any]]] = deque()

        def send(number: int, part: bytes) -> dict[str, Any]:
            answer = self._call("upload_part", Key=name, UploadId=upload, PartNumber=number, body=part)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(_AT_ONCE, "loopline-upload") as threads:
            try:
                for number, part in enumerate(parts, 1):
                    if len(under_way) == _AT_ONCE:
                        sent.append(under_way.popleft().result())
                    under_way.append(threads.submit(send, number, part))
                sent += [future.result() for future in under_way]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return sent

    def _complete(self, name: str, upload: str, sent: list[dict[str, Any]], mark: str) -> None:
        try:
            self._once("complete_multipart_upload", Key=name, UploadId=upload, MultipartUpload={"Parts": sent})
        except FileNotFoundError:
            # no such upload: one of these requests, whose answer was lost, may have completed it
            if self._mark_of(name) != (True, mark):
                raise

    def _abort(self, name: str, upload: str, patience: Patience) -> None:
        def attempt() -> None:
            try:
                self._once("abort_multipart_upload", Key=name, UploadId=upload)
            except FileNotFoundError:
                return

        patience("abort_multipart_upload", attempt)

    def _put_if_unseen(self, name: str, data: bytes) -> bool:
        with self._probing:  # of the writers in this process at least, one is the first
            if self._mark_of(name)[0]:
                return False
            self._call("put_object", Key=name, body=data)
            return True

    def _is_conditional(self) -> bool:
        """Whether the server refuses a second `If-None-Match: *`. Some that speak S3 do not know it, and overwrite."""
        with self._probing:
            if self._honours_conditions is None:
                probe = f"{self._above}.probe-{os.urandom(8).hex()}"  # no key begins with a dot, so none lists it
                self._call("put_object", Key=probe, body=b"")
                self._honours_conditions = self._patience("put_object", lambda: self._refuses_second(probe))
                with suppress(Exception):  # not everybody who may write may delete
                    self._call("delete_object", Key=probe)
                if not self._honours_conditions:
                    logger.warning(
                        "%s does not know conditional writes (If-None-Match): two processes that write a key at once "
                        "may both be told that they were the first. Let only one run write there at a time.",
                        self._name,
                    )
            return self._honours_conditions

    def _refuses_second(self, probe: str) -> bool:
        try:
            self._once("put_object", Key=probe, body=b"", IfNoneMatch="*")
        except Exception as error:
            if (status := status_of(error)) not in (400, 412, 501):
                raise
            return status == 412
        return False

    def _mark_of(self, name: str) -> tuple[bool, str | None]:
        """Whether there is an object, and the mark of who wrote it."""
        try:
            found = self._call("head_object", Key=name)
        except FileNotFoundError:
            return False, None
        return True, found.get("Metadata", {}).get(_MARK)

    def _call(self, method: str, **what: Any) -> Any:
        return self._patience(method, lambda: self._once(method, **what))

    def _once(self, method: str, *, body: bytes | None = None, **what: Any) -> Any:
        if body is not None:
            what["Body"] = io.BytesIO(body)  # of bytes aiohttp warns: it would send them in one go
        # without a timeout here, a server that stops reading in the middle of a body is waited for without end
        return self._fs.call_s3(method, Bucket=self._bucket, timeout=self._attempt_s, **what)


def _check(data: bytes, count: int) -> None:
    if len(data) != count:
        raise Again(f"{len(data)} bytes came instead of {count}")
