"""Errors that go away by themselves: a disk, a network or a store failed, not what was read of it.

They are never taken for bad input. What was finished stays, and the same command goes on with it:
the exit code is `llmx.runtime.exits.AGAIN`. An error that is raised `from` such a one is one, too.
"""

import errno
import os
import re
from collections.abc import Iterator

_NUMBERS = frozenset(
    getattr(errno, name) for name in (
        "EIO", "EREMOTEIO", "EAGAIN", "EINTR", "EBUSY", "ESTALE", "ETIMEDOUT", "ECONNRESET",
        "ECONNABORTED", "ECONNREFUSED", "EPIPE", "ENOTCONN", "ESHUTDOWN", "ENETDOWN", "ENETRESET",
        "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENOBUFS",
    ) if hasattr(errno, name)
)  # fmt: skip
# Codes of TensorStore, jax and gRPC. TensorStore raises errors of Python, with the code first;
# elsewhere in a text they may be words of the user's.
_CODES = re.compile(r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED)\b")
_CODE_FIRST = re.compile(rf"{_CODES.pattern}: ")
_OF_CODES = ("jax", "jaxlib", "tensorstore", "grpc")
# Names of errors of the network in packages that are not always there.
_NAMES = re.compile(
    r"ConnectionError|HTTPClientError|ClientConnectionError|ClientPayloadError|TransportError|"
    r"IncompleteRead|ResponseStreamingError|Timeout|ChecksumError|ProtocolError"
)
_STATUSES = (408, 425, 429)  # and 500 to 599
_AGAIN = re.compile(r"\bagain\b")  # in what says what to do
# Of bodies that were cut or changed on the way.
_SENT_BADLY = ("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "RequestTimeout")


class Transient(OSError):
    """What a store or a disk gave is not what it holds, or it gave nothing: try again."""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    for _ in range(32):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_transient(error: BaseException) -> bool:
    """Whether the same may succeed when it is tried again later, with nothing changed."""
    return any(map(_is_transient, _chain(error)))


def is_of_access(error: BaseException) -> bool:
    """Whether something could not be read or written at all: it says nothing of its content."""
    kinds = (Transient, FileNotFoundError, PermissionError, ConnectionError, TimeoutError)
    return any(
        isinstance(each, kinds) or (isinstance(each, OSError) and each.errno is not None)
        or _is_transient(each) for each in _chain(error)
    )  # fmt: skip


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, Transient | ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return True
    response, code = vars(error).get("response"), ""  # of requests and httpx, or botocore's table
    if isinstance(response, dict):
        code = str(response.get("Error", {}).get("Code", ""))
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    stated = [vars(error).get(name) for name in ("code", "status", "status_code")]
    for value in (*stated, getattr(response, "status_code", response)):
        if isinstance(value, int) and (500 <= value < 600 or value in _STATUSES):
            return True
    if code in _SENT_BADLY:
        return True
    if any(_NAMES.search(kind.__name__) for kind in type(error).__mro__):
        return True
    return _has_code(error)


def _has_code(error: BaseException) -> bool:
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    if packages & {*_OF_CODES}:
        return bool(_CODES.search(str(error)))
    is_plain = packages == {"builtins"} and not isinstance(error, OSError)
    return is_plain and bool(_CODE_FIRST.match(str(error)))


def exit_code(error: BaseException, lasting: int = 2) -> int:
    """Of a command that the error ends, see `llmx.runtime.exits`: AGAIN where it is transient, else
    `lasting`, by default REFUSED."""
    return os.EX_TEMPFAIL if is_transient(error) else lasting


def problem(what: str, error: BaseException, remedy: str) -> str:
    """`what` as a problem of the config, with its cause and remedy.

    Raises ValueError where the error is transient, since nothing is wrong with the config then.
    """
    text = _sentence(what, error, remedy)
    if is_transient(error):
        raise ValueError(text) from error
    return text


def stated(what: str, error: Exception) -> str:
    """An error as a problem of the config. Raises it where it is transient."""
    if is_transient(error):
        raise error
    return f"{what}: {error}"


def refusal(what: str, error: BaseException, remedy: str) -> ValueError:
    """The error to raise from `error`: for a transient one the remedy is to run again."""
    return ValueError(_sentence(what, error, remedy))


def told(error: BaseException) -> object:
    """An error as a command shows it: with the remedy where it is transient and has none."""
    if not is_transient(error) or _AGAIN.search(str(error)):
        return error
    return f"{error}: run again"


def _sentence(what: str, error: BaseException, remedy: str) -> str:
    cause = getattr(error, "strerror", None) or error
    return f"{what} ({cause}): {'run again' if is_transient(error) else remedy}"
