"""Clients for a broker's URL: one server, Sentinel or Cluster, each with or without TLS.

The URL's query may have options (`headway.config.broker.OPTIONS`), as in rediss://HOST:PORT/0?ssl_ca_certs=/etc/headway/ca.pem.
Nothing is tried twice, because an unanswered command may have been done.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.driver_info import DriverInfo

from headway.brokers.redis.cluster import Cluster
from headway.brokers.redis.link import Address
from headway.brokers.redis.sentinels import Sentinels
from headway.brokers.redis.server import Client, Server
from headway.config import shown_url
from headway.errors import SettingError

REDIS_PORT, SENTINEL_PORT = 6379, 26379


class Single(Client):
    """Client of one server, whose address may change if there are Sentinels that know it."""

    def __init__(self, server: Server, sentinels: Sentinels | None = None) -> None:
        self.mode = "standalone" if sentinels is None else "sentinel"
        self._server = server
        self._sentinels = sentinels

    @property
    def left_at(self) -> float:
        return self._server.left_at

    def watch(self) -> None:
        if self._sentinels is not None:
            self._sentinels.watch()

    async def call(self, key: str, *command: Any, large: bool = False) -> Any:
        return await self._server.call(*command, large=large)

    async def everywhere(self, *command: Any) -> list[Any]:
        return [await self._server.ask(*command)]

    def server_of(self, key: str) -> str:
        return ""

    async def leave(self, address: Address) -> None:
        if self._sentinels is not None:
            self._sentinels.avoid(address)
        await self._server.leave(address)

    async def renew(self) -> None:
        await self._server.renew()
        if self._sentinels is not None:
            await self._sentinels.renew()

    async def close(self) -> None:
        await self._server.close()
        if self._sentinels is not None:
            await self._sentinels.aclose()


@cache
def _driver() -> DriverInfo:
    """Return the driver name and version that connections report. Otherwise each connection would read redis-py's metadata."""
    return DriverInfo()


def connect(url: str, timeout: float, bounds: Sequence[int | None]) -> Sequence[Client]:
    """Make one client for each bound, which is the maximum number of its connections to one server. None is no bound.

    With Sentinels, the clients share one view of the primary. `timeout` is in seconds, and may be infinite. Raises SettingError if
    a file that the URL names can't be used.
    """
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    given = dict(parse_qsl(parts.query))
    secure = _secured(url, given) if scheme == "rediss" else {}
    hosts = _hosts(parts, SENTINEL_PORT if kind == "sentinel" else REDIS_PORT)
    common: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": _finite(timeout),
        "socket_timeout": None,  # Callers have their own timeouts.
        "socket_keepalive": True,
        "protocol": 2,
        "driver_info": _driver(),
        **secure,
    }
    if kind == "sentinel":
        # Dead Sentinels must leave time to ask others.
        share = _finite(timeout / (len(hosts) + 1))
        within = {"socket_timeout": share, "socket_connect_timeout": share}
        asking = {**common, **within, **_sentinel_login(given), "ssl": bool(secure)}
        return _followers(parts, hosts, asking, {**common, **_login(parts), "ssl": bool(secure)}, bounds)
    options = {"db": int(parts.path.strip("/") or 0), **_login(parts), **common}

    def make(most: int | None, host: str, port: int) -> Server:
        connection = SSLConnection if secure else Connection
        return Server(Redis.from_pool(ConnectionPool(connection, host=host, port=port, **options)), most)

    if kind == "cluster":
        return [Cluster(hosts, partial(make, most), timeout) for most in bounds]
    host, port = hosts[0]
    return [Single(make(most, host, port)) for most in bounds]


class Nodes(NamedTuple):
    """Servers behind a URL, to be asked one by one.

    Attributes:
        kind: `cluster`, `sentinel`, or empty for one server.
        hosts: hosts of the URL.
        service: name by which Sentinels know the primary, or empty.
        server, sentinel: make a client of a server or Sentinel with the URL's credentials.
    """

    kind: str
    hosts: Sequence[Address]
    service: str
    server: Callable[[Address], Redis]
    sentinel: Callable[[Address], Redis]


def nodes(url: str, timeout: float) -> Nodes:
    """Return the servers behind a URL. `timeout` is in seconds, for each command. Raises like `connect`."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    given = dict(parse_qsl(parts.query))
    secure = _secured(url, given) if scheme == "rediss" else {}
    common: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0), "socket_connect_timeout": timeout, "socket_timeout": timeout, "protocol": 2,
        "ssl": bool(secure), **secure,
    }  # fmt: skip

    def make(login: dict[str, Any], address: Address) -> Redis:
        return Redis(host=address[0], port=address[1], **common, **login)

    hosts = _hosts(parts, SENTINEL_PORT if kind == "sentinel" else REDIS_PORT)
    service = parts.path.strip("/").partition("/")[0] if kind == "sentinel" else ""
    return Nodes(kind, hosts, service, partial(make, _login(parts)), partial(make, _sentinel_login(given)))


def _followers(
    parts: SplitResult,
    hosts: Sequence[Address],
    asking: dict[str, Any],
    calling: dict[str, Any],
    bounds: Sequence[int | None],
) -> Sequence[Client]:
    """Make clients of the primary that Sentinels name. When one of them learns of a new primary, all follow."""
    service, _, database = parts.path.strip("/").partition("/")
    servers: list[Server] = []

    async def leave(address: Address) -> None:
        for server in servers:
            await server.leave(address)

    sentinels = Sentinels(hosts, service, asking, leave)
    for most in bounds:
        primary: Redis = sentinels.master_for(service, **calling, db=int(database or 0))
        servers.append(Server(primary, most))
    return [Single(server, sentinels) for server in servers]


def check_files(url: str) -> None:
    """Raise SettingError if a file that the URL names can't be used."""
    parts = urlsplit(url)
    if parts.scheme.startswith("rediss"):
        _secured(url, dict(parse_qsl(parts.query)))


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _hosts(parts: SplitResult, default: int) -> list[tuple[str, int]]:
    hosts = []
    for address in parts.netloc.rpartition("@")[2].split(","):
        parts = urlsplit(f"//{address}")
        hosts.append((parts.hostname or "", parts.port or default))
    return hosts


def _login(parts: SplitResult) -> dict[str, Any]:
    """Return user and password of a URL. urlsplit would miss them in a URL with several hosts."""
    credentials, at, _ = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    return {"username": unquote(user) or None, "password": unquote(password) or None} if at else {}


def _sentinel_login(given: Mapping[str, str]) -> dict[str, Any]:
    names = {"sentinel_username": "username", "sentinel_password": "password"}
    return {name: given[option] for option, name in names.items() if option in given}


def _secured(url: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the options for TLS. The files are tried here, because an error of the first connection would come late."""
    options: dict[str, Any] = {"ssl_check_hostname": given.get("ssl_check_hostname", "true").lower() != "false"}
    options |= {name: given[name] for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile") if name in given}
    try:
        if "ssl_ca_certs" in options:
            ssl.create_default_context(cafile=options["ssl_ca_certs"])
        if "ssl_certfile" in options:
            own = ssl.create_default_context()
            own.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"), password="")
    except (OSError, ValueError) as exc:  # SSLError is an OSError.
        reason = f"names a file for TLS that cannot be used: {exc}"
        hint = "ssl_ca_certs and ssl_certfile are files in PEM format that this process may read."
        raise SettingError("broker", shown_url(url), reason, hint) from exc
    return options
