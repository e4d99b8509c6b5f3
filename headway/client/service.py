"""Parts shared by both clients, without I/O: the service to call, and a call with its attempts and pauses.

    attempt ──answer──▶ done
      ▲        │ refused, failed, or the connection was lost
      └─pause──┘ while retries and time are left; otherwise the call raises the last error

An answer with `x-should-retry: false` ends the call. If an answer says when to retry, the call waits up to a quarter longer, at
random, so that clients that were refused together don't retry together. Outcomes of tasks are long-polled."""

from __future__ import annotations

import ipaddress
import random
import ssl
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from headway.client.errors import ApiError, ClientError, InvalidArgument, TimedOut
from headway.client.messages import (
    ROUTE,
    Answer,
    Request,
    Result,
    check_seconds,
    milliseconds,
    poll,
    read_error,
    read_outcome,
)
from headway.version import __version__

RETRIED = frozenset((408, 429, 500, 502, 503, 504))  # Statuses after which a retry of the same request may succeed.
REFUSED = frozenset((429, 503))  # Statuses of requests that the service has not started.
CONNECT = 5.0
GRACE = 0.25  # Seconds to wait beyond the caller's time, so that a 504 from the service can arrive.
FIRST_PAUSE = 0.1  # Seconds before the first retry if the service gives no time. Each further pause is 4 times as long.
LONGEST_PAUSE = 8.0
SPREAD = 0.25  # Pauses that the service requests are extended at random, by at most this share.
LONGEST_WAIT = 20.0  # Longest wait of a poll in seconds. Proxies usually close idle connections after a minute.
SPARE = 5.0  # Seconds that a poll may take beyond its wait and the caller's time.
PAUSE = 1.0  # Seconds until the next poll if the service answered early although the task is still running.


class Attempt(msgspec.Struct, frozen=True):
    """One attempt of a call: additional header fields, and time limits in seconds for connecting and for the answer."""

    header: dict[str, str]
    connect: float
    read: float


class Call:
    """A call that ends after `retries` retries, or `timeout` seconds after `now`. If `patient`, a retry doesn't count when the
    refusal said how long to wait. `rng` returns random numbers in [0, 1) for the pauses."""

    def __init__(
        self, request: Request, timeout: float, retries: int, now: float, rng: Callable[[], float], *, patient: bool = False,
    ) -> None:  # fmt: skip
        self.request = request
        self._timeout = timeout
        self._until = now + timeout
        self._left = retries
        self._tried = 0
        self._rng = rng
        self._patient = patient and retries > 0

    def attempt(self, now: float) -> Attempt:
        """Start an attempt. Raises TimedOut if the call's time is up."""
        remaining = self._until - now
        if remaining <= 0:
            raise self.overdue()
        self._tried += 1
        header = {"X-Request-Timeout-Ms": milliseconds(remaining)} if self.request.timed else {}
        return Attempt(header, min(CONNECT, remaining + GRACE), remaining + GRACE)

    def answered(self, answer: Answer, now: float) -> float | None:
        """Return None after a success, or else the seconds until the next attempt. Raises ApiError if the call has failed."""
        if 200 <= answer.status < 300:
            return None
        error = read_error(answer)
        if error.hopeless or answer.status not in RETRIED:
            raise error
        if self._patient and answer.status in REFUSED and error.retry_after is not None:
            self._left += 1  # _pause() subtracts it again.
        return self._pause(error, error.retry_after, now)

    def failed(self, error: ClientError, now: float) -> float:
        """Handle an attempt without an answer. Return the seconds until the next one. Raises `error` if the call has failed."""
        if error.hopeless:
            raise error
        return self._pause(error, None, now)

    def overdue(self) -> TimedOut:
        return TimedOut(f"no answer within {self._timeout:g} s")

    def _pause(self, error: ClientError, requested: float | None, now: float) -> float:
        if self._left <= 0:
            raise error
        if requested is not None:
            pause = max(requested, 0.01) * (1.0 + SPREAD * self._rng())
        else:
            pause = min(FIRST_PAUSE * 4.0 ** (self._tried - 1), LONGEST_PAUSE) * (0.5 + 0.5 * self._rng())
        if now + pause >= self._until:
            if isinstance(error, ApiError):
                error.message += f"; the call's {self._timeout:g} s end before the next attempt"
            raise error
        self._left -= 1
        return pause


class Polling:
    """Polls for a task's outcome until `timeout` seconds after `now`; None means forever. Raises InvalidArgument
    if `timeout` is not a number above 0."""

    def __init__(self, task_id: str, timeout: float | None, now: float) -> None:
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._id = task_id
        self._timeout = timeout
        self._until = None if timeout is None else now + timeout
        self._wait = 0.0
        self._asked_at = now

    def next(self, now: float) -> tuple[Request, float]:
        """Return the next poll, and the time limit in seconds for it and its retries."""
        remaining = 2 * LONGEST_WAIT if self._until is None else max(self._until - now, 0.0)
        self._wait = min(remaining, LONGEST_WAIT)
        self._asked_at = now
        return poll(self._id, self._wait), remaining + SPARE

    def answered(self, answer: Answer, now: float) -> Result | float:
        """Return the task's result, or the seconds until the next poll. Raises ApiError if the task failed, and TimedOut if it
        has no outcome in time."""
        _, outcome = read_outcome(answer)
        if isinstance(outcome, Result):
            return outcome
        if isinstance(outcome, ApiError):
            raise outcome
        if self._until is not None and now >= self._until:
            raise TimedOut(f"task {self._id} has no outcome after {self._timeout:g} s; it continues")
        early = now - self._asked_at < self._wait / 2  # Don't flood a service that doesn't wait.
        pause = PAUSE if early else 0.0
        return pause if self._until is None else min(pause, max(self._until - now, 0.0))


URL = "http://127.0.0.1:8000"  # Address of `headway serve` by default.
TIMEOUT = 60.0
RETRIES = 3
CONNECTIONS = 100


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service, and how to call it. See `Client` for the fields, which the constructor checks."""

    url: str = URL
    api_key: str | None = field(default=None, repr=False)
    timeout: float = TIMEOUT
    retries: int = RETRIES
    connections: int = CONNECTIONS
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    ssl_context: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_url()
        if self.api_key == "":
            raise InvalidArgument("api_key", "", "is empty", "Give the key as it was printed, or None to send none.")
        if (key := self.api_key) is not None and not (key.isascii() and key.isprintable() and " " not in key):
            reason = "must be printable ASCII without spaces"
            raise InvalidArgument("api_key", "…", reason, "Give the key as it was printed.")
        check_seconds("timeout", self.timeout)
        for name, value, least in (("retries", self.retries, 0), ("connections", self.connections, 1)):
            if type(value) is not int or value < least:
                raise InvalidArgument(name, value, f"must be a whole number, {least} or more", "Or leave it out.")

    @property
    def base(self) -> str:
        return self.url.rstrip("/")

    @property
    def header(self) -> dict[str, str]:
        header = {"User-Agent": f"headway-python/{__version__}", "Accept": "application/json", **(self.headers or {})}
        if self.api_key is not None:
            header["Authorization"] = f"Bearer {self.api_key}"
        return header

    @property
    def proxy(self) -> str | None:
        """Proxy for this service, from the environment. None if no proxy is set, or the service is on this machine."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if _is_loopback(host) or urllib.request.proxy_bypass(host):
            return None
        proxy = urllib.request.getproxies().get(parts.scheme)
        return proxy if proxy is None or "://" in proxy else f"http://{proxy}"

    def seconds(self, given: float | None) -> float:
        """Return the time limit of a call, by default the client's. Raises InvalidArgument unless it is above 0."""
        if given is None:
            return self.timeout
        check_seconds("timeout", given)
        return given

    def key(self, given: str | None) -> str:
        """Return the given idempotency key. If none is given, return a new one, or "" if the client doesn't retry."""
        if given is not None:
            return given
        return str(uuid.uuid4()) if self.retries else ""

    def call(self, request: Request, seconds: float, *, patient: bool = False) -> Call:
        return Call(request, seconds, self.retries, time.monotonic(), random.random, patient=patient)

    def _check_url(self) -> None:
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname, parts.port
        except ValueError:  # The exception may quote a password.
            raise InvalidArgument("url", "…", "is not a valid URL", f"For example {URL}.") from None
        if parts.username is not None or parts.password is not None:
            raise InvalidArgument("url", "…", "contains a user name or password", "Give the key as api_key.")
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise InvalidArgument("url", self.url, "is not the address of a service", f"For example {URL}.")
        if not self.url.isprintable() or " " in self.url:
            raise InvalidArgument("url", self.url, "contains a space or control character", "Percent-encode it.")
        if self.base.endswith(ROUTE):
            hint = f"Leave out {ROUTE}, which the client adds."
            raise InvalidArgument("url", self.url, "is the address of a route, not of a service", hint)


class AnyClient:
    """Base of both clients; see `Client` for the arguments."""

    def __init__(
        self, url: str = URL, api_key: str | None = None, *, timeout: float = TIMEOUT, retries: int = RETRIES,
        connections: int = CONNECTIONS, headers: Mapping[str, str] | None = None, ssl_context: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self._service = Service(
            url=url, api_key=api_key, timeout=timeout, retries=retries, connections=connections, headers=headers,
            ssl_context=ssl_context,
        )  # fmt: skip
        self._closed = False
        self._begin()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._service.url!r})"

    def _begin(self) -> None:
        """Set up the attributes of this kind of client."""


AClient = TypeVar("AClient", bound=AnyClient)


class AnyTask(Generic[AClient]):
    """Base of both kinds of tasks."""

    def __init__(self, client: AClient, id: str) -> None:
        self._client = client
        self.id = id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
