"""Asking again for what may pass by itself."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

__all__ = ["Again", "Patience", "code_of", "passes", "status_of"]

logger = logging.getLogger("loopline")

T = TypeVar("T")

# of its own: what draws from Python's stream in another thread would change the training
_RANDOM = random.SystemRandom()

_LONGEST_WAIT_S = 20.0
_QUIET_TRIES = 3

_STATUSES = (408, 429, 500, 502, 503, 504)
_CODES = (
    "BadDigest",
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "XAmzContentSHA256Mismatch",
)
_ERRNOS = (errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH)
_CLASSES = (
    "aiohttp.client_exceptions.ClientError",
    # not their base HTTPClientError: that is also what becomes of any error inside of the client
    "botocore.exceptions.ConnectionClosedError",
    "botocore.exceptions.ConnectionError",
    "botocore.exceptions.IncompleteReadError",
    "botocore.exceptions.ReadTimeoutError",
    "botocore.exceptions.ResponseStreamingError",
    "botocore.parsers.ResponseParserError",
    "http.client.HTTPException",
)


class Again(Exception):
    """What was found contradicts itself, because others are writing; it is worth another look."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Tries until it succeeds, is refused, or the deadline is over. The pauses double, and no two are quite alike."""

    deadline_s: float
    first_wait_s: float
    say: Callable[[BaseException], str]

    def __call__(self, doing: str, attempt: Callable[[], T]) -> T:
        """Call `attempt`, which must do no harm when it is called again after it has done its work."""
        began = time.monotonic()
        wait_s = self.first_wait_s
        for tries in count(1):
            try:
                return attempt()
            except Exception as error:
                waited_s = time.monotonic() - began
                if not passes(error):
                    raise
                if waited_s >= self.deadline_s:
                    error.add_note(f"given up after {tries} tries in {waited_s:.1f} s")
                    raise
                pause_s = min(_RANDOM.uniform(wait_s / 2, wait_s), self.deadline_s - waited_s)
                level = logging.INFO if tries <= _QUIET_TRIES else logging.WARNING
                logger.log(level, "%s: %s. Trying again in %.1f s.", doing, self.say(error), pause_s)
            time.sleep(pause_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError


def passes(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later: not where the answer was a refusal."""
    for link in _causes(error):
        status, code = _answer(link)
        if status is not None:
            return status in _STATUSES or code in _CODES
        if _is_of_the_network(link):
            return True
    return False


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error stands for."""
    return next((status for link in _causes(error) if (status := _answer(link)[0]) is not None), None)


def code_of(error: BaseException) -> str:
    """S3's name for what was wrong, or nothing."""
    return next((code for link in _causes(error) if (code := _answer(link)[1])), "")


def _answer(error: BaseException) -> tuple[int | None, str]:
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status, str(response.get("Error", {}).get("Code", ""))
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 100 <= status < 600:
            return status, ""
    return None, ""


def _is_of_the_network(error: BaseException) -> bool:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return False
    return (
        isinstance(error, Again | TimeoutError | ConnectionError)
        or (isinstance(error, OSError) and error.errno in _ERRNOS)
        or any(f"{kind.__module__}.{kind.__qualname__}" in _CLASSES for kind in type(error).__mro__)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__
