"""Verdict on a call that failed: whether another one makes sense, who is to blame, and what rest the API asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import grpc

from headway.backends.remote.backend import TryVerdict
from headway.errors import PAYLOAD_TOO_LARGE, RemoteError, RemoteExhausted, RemoteRefused

Code = grpc.StatusCode

_REFUSALS = frozenset((Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE))
"""Statuses that blame what was sent."""
_PASSING = frozenset((
    Code.ABORTED, Code.CANCELLED, Code.DATA_LOSS, Code.DEADLINE_EXCEEDED, Code.INTERNAL, Code.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE, Code.UNKNOWN,
))  # fmt: skip
"""Statuses of an API that is in trouble."""

TOO_LARGE = "larger than max"
"""Words of gRPC's C library, and of Go's and Node's, in the details of a message that is too large, which has no status of its own."""
_OTHER_WORDS = re.compile(r"message exceeds (the )?maximum|exceeded while decompressing")
"""Words of Java's, .NET's and Rust's."""
_TOLD_TOO_LARGE = ("x-headway-error", PAYLOAD_TOO_LARGE)
"""Trailing metadata of another Headway whose own bounds an input is too large for."""

PUSHBACK = "grpc-retry-pushback-ms"


def judge(code: grpc.StatusCode, details: str, trailers: Iterable[tuple[str, str | bytes]]) -> TryVerdict:
    """Judge a status that is no success, with the details and the trailing metadata that came with it."""
    trailers = list(trailers)
    if code in _REFUSALS or (code is Code.RESOURCE_EXHAUSTED and _too_large(details, trailers)):
        return TryVerdict(True, RemoteRefused)
    if code not in _PASSING:
        return TryVerdict(True, RemoteError)
    wishes = [value for name, value in trailers if name == PUSHBACK]
    rest = pushback(wishes[-1]) if wishes else None
    # The status stands for a rate limit and for too many elements alike. Only a rest that is asked for tells them apart.
    kind = RemoteExhausted if code is Code.RESOURCE_EXHAUSTED and rest is None else RemoteError
    return TryVerdict(bool(wishes) and rest is None, kind, rest)


def _too_large(details: str, trailers: Iterable[tuple[str, str | bytes]]) -> bool:
    """Whether what was sent is too large for the API: another call with the same never succeeds."""
    return TOO_LARGE in details or _OTHER_WORDS.search(details) is not None or _TOLD_TOO_LARGE in trailers


def pushback(value: str | bytes) -> float | None:
    """Seconds after which a retry is welcome; None when it is not, or nobody can tell when (gRFC A6)."""
    try:
        seconds = int(value) / 1000
    except (ValueError, OverflowError):
        return None
    return seconds if seconds >= 0 and math.isfinite(seconds) else None
