"""The gRPC status of an error: its code (based on the HTTP status), its details and its trailers."""

from __future__ import annotations

import math
from enum import IntEnum

from headway.errors import HOPELESS, LABEL, REFUSALS, SHOWN, STATUS, AnyError


class StatusCode(IntEnum):
    """gRPC's status codes."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


STATUSES: dict[int, StatusCode] = {  # gRPC status by HTTP status. INTERNAL errors must not be retried.
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    405: StatusCode.UNIMPLEMENTED,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.ABORTED,
    413: StatusCode.RESOURCE_EXHAUSTED,
    422: StatusCode.INVALID_ARGUMENT,
    429: StatusCode.RESOURCE_EXHAUSTED,
    431: StatusCode.RESOURCE_EXHAUSTED,
    500: StatusCode.INTERNAL,
    501: StatusCode.UNIMPLEMENTED,
    502: StatusCode.INTERNAL,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
RETRIED = frozenset((409, 429, 503))  # HTTP statuses of errors after which the same call may succeed.
LONGEST = 2048  # Maximum size in bytes of the details. A byte may take three on the wire. Many clients accept 8 KiB.
Metadata = tuple[tuple[str, str], ...]


def status_of(code: str) -> StatusCode:
    """Return the gRPC status of an error code."""
    status = STATUS[code]
    return STATUSES.get(status, StatusCode.INVALID_ARGUMENT if status < 500 else StatusCode.INTERNAL)


def details_of(message: str) -> str:
    """Truncate an error message to fit into the status details, which are sent as metadata."""
    return message.encode("utf-8", "backslashreplace")[:LONGEST].decode("utf-8", "ignore")


def trailers_of(error: AnyError, shown: str) -> Metadata:
    """Return the trailing metadata of an error: its code, its reason, and when to retry. `shown` is the public request id."""
    code = error.code
    trailers = [
        ("x-request-id", shown),
        ("x-headway-error", SHOWN.get(code, code)),
        ("grpc-retry-pushback-ms", str(pushback(code, error.retry_after))),
    ]
    if code in REFUSALS and LABEL.fullmatch(error.reason):
        trailers.append(("x-headway-dropped-reason", error.reason))
    return tuple(trailers)


def pushback(code: str, retry_after: float | None) -> int:
    """Return how many milliseconds to wait before a retry, or -1 if no retry makes sense."""
    if code in HOPELESS or STATUS[code] not in RETRIED:
        return -1
    return math.ceil(1000 * (1.0 if retry_after is None else retry_after))
