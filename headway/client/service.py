"""The address of a service, the header fields of every request to it, and the code that both clients share."""

from __future__ import annotations

import ipaddress
import random
import ssl
import time
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from headway.client.call import Call
from headway.client.errors import InvalidArgument
from headway.client.messages import ROUTE, Request, check_seconds
from headway.version import __version__

URL = "http://127.0.0.1:8000"
"""Address of `headway serve` by default."""
TIMEOUT = 60.0
RETRIES = 3
CONNECTIONS = 100


@dataclass(frozen=True, kw_only=True)
class Service:
    """The service and how to call it; see `Client` for the fields. Building it checks them."""

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
                raise InvalidArgument(name, value, f"must be a whole number from {least} on", "Or leave it out.")

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
        """Proxy that the environment names for this address; None if the address is on this machine."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if _is_loopback(host) or urllib.request.proxy_bypass(host):
            return None
        proxy = urllib.request.getproxies().get(parts.scheme)
        return proxy if proxy is None or "://" in proxy else f"http://{proxy}"

    def seconds(self, given: float | None) -> float:
        """Return the seconds for a call, by default the client's. Raises InvalidArgument unless they are above 0."""
        if given is None:
            return self.timeout
        check_seconds("timeout", given)
        return given

    def key(self, given: str | None) -> str:
        """Return an idempotency key: the given one, or a new one, which is empty if requests are sent only once."""
        if given is not None:
            return given
        return str(uuid.uuid4()) if self.retries else ""

    def call(self, request: Request, seconds: float, *, patient: bool = False) -> Call:
        """Start a call that is given up after `seconds`. For `patient` see `Call`."""
        return Call(request, seconds, self.retries, time.monotonic(), random.random, patient=patient)

    def _check_url(self) -> None:
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname, parts.port
        except ValueError:  # Its message may quote a password.
            raise InvalidArgument("url", "…", "is not a valid URL", f"For example {URL}.") from None
        if parts.username is not None or parts.password is not None:
            raise InvalidArgument("url", "…", "holds a user name or password", "Give the key as api_key.")
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise InvalidArgument("url", self.url, "is not the address of a service", f"For example {URL}.")
        if not self.url.isprintable() or " " in self.url:
            raise InvalidArgument("url", self.url, "holds a space or control character", "Percent-encode it.")
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
        """Set up what this kind of client needs."""


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
