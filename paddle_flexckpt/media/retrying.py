"""Retry requests to remote storage: which errors pass by themselves, and how long to wait.

Tested in tests/media/test_remote.py.
"""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.media.file_names import Secrets

Result = TypeVar("Result")

DEFAULT_RETRIES = 5
# The first pause, which doubles up to the longest: 0.5, 1, 2, 4, 8, 16, 20, 20 s ..., each shortened by up to a half
# at random, so that ranks that failed together do not come back together.
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 20.0

# Statuses that ask for another try: timeouts, throttling, and servers that fail or are being replaced. 409: two
# conditional requests for one object at a time.
_TRANSIENT_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
# Codes of errors in bodies, some of which come with the status 400 or 403.
_TRANSIENT_CODES = frozenset(
    "BandwidthLimitExceeded ConditionalRequestConflict InternalError InternalServerError OperationAborted "
    "PriorRequestNotComplete RequestLimitExceeded RequestThrottled RequestThrottledException RequestTimeout "
    "RequestTimeoutException ServerBusy ServiceUnavailable SlowDown Throttling ThrottlingException "
    "TooManyRequestsException TransactionInProgressException".split()
)
_TRANSIENT_ERRNO = frozenset(
    getattr(errno, name)
    for name in "EAGAIN EBUSY ECONNABORTED ECONNREFUSED ECONNRESET EHOSTDOWN EHOSTUNREACH EINTR ENETDOWN ENETRESET "
    "ENETUNREACH EPIPE ETIMEDOUT".split()
    if hasattr(errno, name)
)
# Errors of connections that are not OSErrors, by name: their packages need not be installed.
_TRANSIENT_TYPES = frozenset(
    "ClientConnectionError ClientPayloadError ConnectionClosedError ConnectionError EndpointConnectionError "
    "HTTPClientError IncompleteRead IncompleteReadError ProtocolError ReadTimeoutError ResponseParserError "
    "ResponseStreamingError ServerDisconnectedError ServiceRequestError ServiceResponseError TransportError".split()
)
# Statuses of gateways and servers that may have passed a request on before they failed.
_UNSURE_STATUS = frozenset({500, 502, 504})
# Errors before a connection was made.
_UNSENT_TYPES = frozenset(
    "ClientConnectorError ConnectTimeoutError ConnectionRefusedError EndpointConnectionError".split()
)
# One class from Python 3.11 on.
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError, socket.timeout)
# Errors whose cause is known; more tries do not change it.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_NUMBERS: tuple[tuple[Any, int], ...] = (
    *zip(_FINAL, (errno.ENOENT, errno.EEXIST, errno.EACCES, errno.EISDIR, errno.ENOTDIR)),
    (_TIMEOUTS, errno.ETIMEDOUT),
)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status behind an error."""
    for each in causes(error):
        if any(kind.__name__ == "HttpProcessingError" for kind in type(each).__mro__):
            # aiohttp's number for an answer that it cannot read, such as a truncated one; no server sent it.
            continue
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            status = next((getattr(each, n) for n in ("status", "status_code", "code") if hasattr(each, n)), None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None


def code_of(error: BaseException) -> str | None:
    """Return the error code in a server's answer."""
    for each in causes(error):
        response = getattr(each, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        if isinstance(code, str):
            return code
    return None


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed a little later."""
    if any(isinstance(each, ssl.SSLCertVerificationError) for each in causes(error)):
        return False
    if code_of(error) in _TRANSIENT_CODES:
        return True
    status = status_of(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    return not isinstance(error, _FINAL) and any(map(_passes, causes(error)))


def _passes(error: BaseException) -> bool:
    """Return whether an error without a server's answer is one of the connection."""
    if isinstance(error, (*_TIMEOUTS, ConnectionError)):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    return any(kind.__name__ in _TRANSIENT_TYPES for kind in type(error).__mro__)


def _may_be_done(error: BaseException) -> bool:
    """Return whether a request that failed may have been carried out, or may be later: its answer was lost."""
    if not is_transient(error):
        return False
    status = status_of(error)
    if status is not None:
        return status in _UNSURE_STATUS
    return not any(kind.__name__ in _UNSENT_TYPES for each in causes(error) for kind in type(each).__mro__)


def is_unanswered(error: OSError) -> bool:
    """Return whether a request that a :class:`Retrier` gave up may have been carried out, or may be later."""
    return bool(getattr(error, "is_unanswered", False))


def pause_seconds(attempt: int) -> float:
    """Return how long to wait after an attempt that failed, counted from 1."""
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)


class Retrier:
    """A maker of requests: it retries where that may help, and turns errors into OSErrors that name the file."""

    def __init__(self, retries: int, secrets: Secrets) -> None:
        """Make no request yet; ``retries``: the tries after the first one; ``secrets``: what errors must not show."""
        self._retries = retries
        self._secrets = secrets

    def __call__(
        self,
        where: str,
        function: Callable[..., Result],
        *arguments: Any,
        recover: Callable[[Exception], Result | None] | None = None,
        stop: threading.Event | None = None,
        **keywords: Any,
    ) -> Result:
        """Make a request about the file ``where``; no more tries once ``stop`` is set.

        ``recover`` examines an error of a later try: an earlier try may have succeeded although its answer was lost. If
        it returns a value other than None, that is the result.
        """
        begin = time.monotonic()
        attempt, unanswered = 0, False
        while True:
            attempt += 1
            try:
                return function(*arguments, **keywords)
            # Whatever an fsspec file system raises: their errors have no common base.
            except Exception as error:
                if isinstance(error, CheckpointError) and not unanswered:
                    raise  # the lease is lost, and every earlier try was answered: no request is on its way
                unanswered = unanswered or _may_be_done(error)
                result = recover(error) if attempt > 1 and recover is not None else None
                if result is not None:
                    return result
                if attempt > self._retries or isinstance(error, CheckpointError) or not is_transient(error):
                    tries = f" ({attempt} attempts in {time.monotonic() - begin:.1f} s)" if attempt > 1 else ""
                    raise self._translated(error, where, tries, unanswered) from self._presentable(error)
                if stop is not None and stop.wait(pause_seconds(attempt)):
                    raise self._translated(error, where, " (given up)", unanswered) from self._presentable(error)
            if stop is None:
                time.sleep(pause_seconds(attempt))

    def _translated(self, error: Exception, where: str, tries: str, unanswered: bool) -> OSError:
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        text = self._secrets.hide(text).strip() or type(error).__name__
        if not isinstance(error, OSError):
            text = f"{type(error).__name__}: {text}"
        status = status_of(error)
        # Of the class that fits the number.
        translated = OSError(_number_of(error, status), text + tries, where)
        if status is not None:
            # For errors whose cause must not be shown.
            translated.status = status  # type: ignore[attr-defined]
        if unanswered:
            translated.is_unanswered = True  # type: ignore[attr-defined]
        return translated

    def _presentable(self, error: Exception) -> Exception | None:
        """Return the error as the cause of another; None if its text contains a secret."""
        text = "".join(f"{each} {each.args!r}" for each in causes(error))
        return error if self._secrets.hide(text) == text else None


def _number_of(error: Exception, status: int | None) -> int:
    """Return the errno of an error; for a refused condition, that of an existing file."""
    if status == 412 or code_of(error) == "PreconditionFailed":
        return errno.EEXIST
    for kind, number in _NUMBERS:
        if isinstance(error, kind):
            return number
    return (error.errno if isinstance(error, OSError) else None) or errno.EIO
