"""Verdict on one try: whether another one makes sense, who is to blame, and what rest the API asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from headway.backends.remote.backend import TryVerdict
from headway.errors import RemoteError, RemoteRefused

_REFUSALS = frozenset([400, 413, 422])
"""Statuses that blame what was sent."""


def judge(status: int, headers: Mapping[str, str], now: float) -> TryVerdict:
    """Judge a status that is no success, with the header fields that came with it.

    Arguments:
        status: the HTTP status.
        headers: header fields, by their names in any case.
        now: Unix time in seconds, for a Retry-After that names a date.
    """
    if status in _REFUSALS:
        return TryVerdict(True, RemoteRefused)
    if status not in (408, 429) and status < 500:
        return TryVerdict(True, RemoteError)
    rest = milliseconds(headers.get("retry-after-ms", ""))
    if rest is None:
        rest = retry_after(headers.get("Retry-After", ""), now)
    return TryVerdict(headers.get("x-should-retry") == "false", RemoteError, rest)


def milliseconds(value: str) -> float | None:
    """Seconds that a retry-after-ms header asks for; None when it asks for nothing."""
    try:
        found = float(value) / 1000 if value[:1].isdigit() else math.nan
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def retry_after(value: str, now: float) -> float | None:
    """Seconds to wait that a Retry-After header asks for (RFC 9110, 10.2.3); None when it asks for nothing.

    Arguments:
        value: the header's value, a number of seconds or an HTTP date.
        now: Unix time in seconds.
    """
    try:
        seconds = float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - now
    except (ValueError, OverflowError):
        return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
