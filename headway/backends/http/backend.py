"""A remote API over HTTP: one POST per batch.

| the API says | meaning | reaction |
|---|---|---|
| nothing, 408, 429, 5xx | it is in trouble | up to `max_tries`, after an exponential pause or the rest that it asks for |
| 400, 413, 422 | it rejects an input or the batch | final; search for the bad input |
| any other status | wrong API or credential | final; no input is to blame |

It asks for a rest by Retry-After or retry-after-ms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from headway.backends.http.connections import Connections, TooLong, tls_error, was_sent
from headway.backends.remote import backend, tls_failures
from headway.backends.remote.backend import Answered, RemoteBackend, Tried, TryVerdict
from headway.backends.remote.generations import NotStarted
from headway.config.target import RemoteTarget
from headway.core.trace_context import trace_fields
from headway.dialects.dialect import Remote, RemoteCall
from headway.dialects.table import reach
from headway.errors import BadOutput, RemoteAbsent, RemoteError, RemoteRefused
from headway.runtime.spans import OUTGOING
from headway.version import __version__

_JSON_BYTES = "Inference-Header-Content-Length"

_REFUSALS = frozenset([400, 413, 422])


class HttpBackend(RemoteBackend):
    """Backend of one slot of a remote API over HTTP. `remote` is found from the URL if missing. `wall` returns Unix time."""

    def __init__(
        self,
        spec: RemoteTarget,
        *,
        remote: Remote | None = None,
        wall: Callable[[], float] = time.time,
        **settings: Any,
    ) -> None:
        super().__init__(spec, remote or reach(spec.url), **settings)
        self._wall = wall
        self._generations = self._connections = Connections(time.monotonic, self._certificates)

    async def _try(self, call: RemoteCall, left: float) -> Answered | Tried:
        try:
            response = await self._connections.request(
                "POST" if call.body else "GET",
                call.place or self._remote.url,
                call.body,
                self._headers(call.headers, left),
                within=max(left / 2, 0.001),
                most=backend.MAX_ANSWER,
            )
        except NotStarted:
            raise self._error(RemoteError, "was not started") from None
        except TooLong:
            raise self._error(BadOutput, f"answered more than {backend.MAX_ANSWER} bytes") from None
        except Exception as exc:  # Libraries raise all kinds of errors on bad data.
            if (error := tls_error(exc)) is not None:
                return Tried(tls_failures.explain(error), tls_failures.SHOWN, RemoteAbsent, final=False)
            final = not isinstance(exc, aiohttp.ClientError | OSError) or isinstance(exc, aiohttp.InvalidURL)
            kind = RemoteError if was_sent(exc) else RemoteAbsent
            return Tried(self._told(exc), type(exc).__name__, kind, final)
        if 200 <= response.status < 300:
            return Answered(response.body, _json_bytes(response.headers))
        if failure := tls_failures.explain_answer(response.status, response.body):
            return Tried(failure, tls_failures.SHOWN, RemoteAbsent, final=True)
        verdict = judge(response.status, response.headers, self._wall())
        return Tried.judged(verdict, f"HTTP {response.status}", response.body, response.status)

    def _headers(self, own: Mapping[str, str], left: float) -> dict[str, str]:
        return {
            "User-Agent": f"headway/{__version__}",
            **self._credentials.current(),
            **own,
            **trace_fields(OUTGOING.get()),
            "X-Request-Timeout-Ms": str(max(int(left * 1000), 1)),
        }

    def _told(self, exc: Exception) -> str:
        """Return the type of a connection's error, with its text unless that quotes the API or the URL's query."""
        quotes = isinstance(exc, aiohttp.ClientError) and not isinstance(exc, OSError)
        text = "" if quotes else str(exc)
        return f"{type(exc).__name__}: {text}" if text and not self._is_secret(text) else type(exc).__name__


def _json_bytes(headers: Mapping[str, str]) -> int:
    """Return the length of the JSON before a body's binary data, or -1 if no header field gives it."""
    text = headers.get(_JSON_BYTES, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1


def judge(status: int, headers: Mapping[str, str], now: float) -> TryVerdict:
    """Judge a failure status. `now` is Unix time in seconds, for a Retry-After with a date."""
    if status in _REFUSALS:
        return TryVerdict(True, RemoteRefused)
    if status not in (408, 429) and status < 500:
        return TryVerdict(True, RemoteError)
    rest = milliseconds(headers.get("retry-after-ms", ""))
    if rest is None:
        rest = retry_after(headers.get("Retry-After", ""), now)
    return TryVerdict(headers.get("x-should-retry") == "false", RemoteError, rest)


def milliseconds(value: str) -> float | None:
    """Return the seconds that a retry-after-ms header asks for, or None if it is missing or invalid."""
    try:
        seconds = float(value) / 1000 if value[:1].isdigit() else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None


def retry_after(value: str, now: float) -> float | None:
    """Return the seconds that a Retry-After header (RFC 9110, 10.2.3) asks for at Unix time `now`, or None if it is invalid."""
    try:
        seconds = float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - now
    except (ValueError, OverflowError):
        return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
