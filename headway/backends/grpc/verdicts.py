"""Verdict on a call that failed: whether another one makes sense, who is to blame, and what rest the API asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import grpc

from headway.errors import BackendError, RemoteError, RemoteExhausted, RemoteRefused

Code = grpc.StatusCode

_REFUSALS = frozenset((Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE))
"""Statuses that blame what was sent."""
_PASSING = frozenset((
    Code.ABORTED, Code.CANCELLED, Code.DATA_LOSS, Code.DEADLINE_EXCEEDED, Code.INTERNAL, Code.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE, Code.UNKNOWN,
))  # fmt: skip
"""Statuses of an API that is in trouble."""

TOO_LARGE = "larger than max"
"""Words of every stack's servers in the details of a message that is too large for them, which has no status of its own."""

PUSHBACK = "grpc-retry-pushback-ms"


class CallVerdict(NamedTuple):
    """Verdict on a status that is no success.

    Attributes:
        final: whether no other try makes sense now.
        kind: error that it comes to.
        rest: seconds of rest that the API asks for; None when it asks for none.
    """

    final: bool
    kind: type[BackendError]
    rest: float | None = None


def judge(code: grpc.StatusCode, details: str, trailers: Iterable[tuple[str, str | bytes]]) -> CallVerdict:
    """Judge a status that is no success, with the details and the trailing metadata that came with it."""
    too_large = code is Code.RESOURCE_EXHAUSTED and TOO_LARGE in details
    if code in _REFUSALS or too_large:
        return CallVerdict(True, RemoteRefused)
    if code not in _PASSING:
        return CallVerdict(True, RemoteError)
    wishes = [value for name, value in trailers if name == PUSHBACK]
    rest = pushback(wishes[-1]) if wishes else None
    # The status stands for a rate limit and for too many elements alike. Only a rest that is asked for tells them apart.
    kind = RemoteExhausted if code is Code.RESOURCE_EXHAUSTED and rest is None else RemoteError
    return CallVerdict(bool(wishes) and rest is None, kind, rest)


def pushback(value: str | bytes) -> float | None:
    """Seconds after which a retry is welcome; None when it is not, or nobody can tell when (gRFC A6)."""
    try:
        seconds = int(value) / 1000
    except (ValueError, OverflowError):
        return None
    return seconds if seconds >= 0 and math.isfinite(seconds) else None
