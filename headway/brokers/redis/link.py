"""Connections to Redis or Valkey, through redis-py: one server, Sentinel or Cluster, each with or without TLS.

Every call has a deadline and is tried once: a command that timed out may have been done, and only the caller knows whether
it can be repeated. Calls, claims and blocking reads have connections of their own, so that neither waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import structlog
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from headway.brokers.redis import library
from headway.config import shown_url
from headway.errors import BrokerUnavailable, SettingError

log = structlog.get_logger(__name__)

BLOCK = 2.0
"""Longest blocking read, seconds: after that the connection is known to live, or not."""
OLDEST = (7, 0)
"""The first version of the server that has functions, which the steps are."""
CONNECTIONS = 64
"""Most connections for calls at once."""
MEMORY_AGE = 1.0
"""Seconds for which the share of memory in use is believed."""
SCARCE = 0.8
"""Share of `maxmemory` in use above which nothing new is taken in."""
STEADY_ERRORS = ("NOPERM", "NOAUTH", "WRONGPASS")
"""Answers that will be the same next time."""

_Client = Redis | RedisCluster


class Link:
    """One process's way to the server.

    Arguments:
        url: see `headway.config`, setting `broker`.
        prefix: what all keys begin with.
        timeout: longest time for a call, seconds.
        clock: instants that the server uses in place of its own clock; for tests.

    Attributes:
        prefix: as given.
        process: name of this process among all; its bells are found by it.
    """

    def __init__(
        self,
        url: str,
        prefix: str = "headway",
        timeout: float = 1.0,
        clock: Callable[[], float] | None = None,
        process: str = "",
    ) -> None:
        self.prefix = prefix
        self.process = process
        self._url = url
        self._timeout = timeout
        self._clock = clock
        self._source = library.source()
        self._calls = self._client()
        self._claims = self._client()
        self._loading = asyncio.Lock()
        self._scarce = False
        self._memory_at = -math.inf
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    def clock_text(self) -> str:
        """What scripts take for their clock: nothing, for the server's own."""
        return "" if self._clock is None else repr(self._clock())

    async def open(self) -> None:
        """Connect and see that the server can be used.

        Raises:
            SettingError: it cannot: too old, or it would evict what waits.
            BrokerUnavailable: it is not there.
        """
        try:
            info = await self._ask(lambda: self._calls.info("server"))
        except RefusedCommand as exc:
            mend = "Put user and password into the URL, redis://USER:PASSWORD@HOST:PORT/0, and let that user run INFO and FCALL."
            raise SettingError("broker", shown_url(self._url), f"refuses this user: {exc}", mend) from exc
        for one in _nodes(info):
            self._check_version(one)
        try:
            policy = await self._ask(lambda: self._calls.config_get("maxmemory-policy"))
        except RefusedCommand as exc:
            log.warning("the server's eviction policy cannot be seen; it must be noeviction", error=str(exc))
        else:
            self._check_policy(policy)
        await self._load()

    async def close(self) -> None:
        """Let go of all connections; whoever calls from now on hears that the broker is gone."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        for client in (self._calls, self._claims):
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()

    async def call(self, function: str, key: str, *arguments: Any) -> Any:
        """Run a function of the library on the keys that begin with `key`.

        Raises:
            BrokerUnavailable: no answer in time; it may have been done.
        """
        return await self._run(self._calls, function, key, arguments)

    async def claim(self, function: str, key: str, *arguments: Any) -> Any:
        """The same over the connections for claims."""
        return await self._run(self._claims, function, key, arguments)

    def reader(self) -> Reader:
        """A connection for blocking reads; close it in the end."""
        return Reader(self._client(), math.inf if self._clock is not None else BLOCK, self._timeout)

    @property
    def scarce(self) -> bool:
        """Whether the server's memory was nearly full when last looked at, about a second ago at most."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._memory_at > MEMORY_AGE and (self._looking is None or self._looking.done()):
            self._memory_at = loop.time()
            self._looking = loop.create_task(self._look_at_memory())
        return self._scarce

    async def _look_at_memory(self) -> None:
        with contextlib.suppress(BrokerUnavailable, RefusedCommand):
            nodes = _nodes(await self._ask(lambda: self._calls.info("memory")))
            scarce = any(node.get("maxmemory") and node["used_memory"] > SCARCE * node["maxmemory"] for node in nodes)
            if scarce != self._scarce:
                log.warning("the broker's memory is nearly full" if scarce else "the broker's memory has room again")
            self._scarce = scarce

    async def _run(self, client: _Client, function: str, key: str, arguments: tuple[Any, ...]) -> Any:
        name = f"{library.VERSION}_{function}"
        try:
            return await self._ask(lambda: client.execute_command("FCALL", name, 1, key, *arguments))
        except MissingFunction:
            await self._load()
            return await self._ask(lambda: client.execute_command("FCALL", name, 1, key, *arguments))

    async def _load(self) -> None:
        """Bring the library into the server: at first, and when a restart or a flush has lost it."""
        async with self._loading:
            if isinstance(self._calls, RedisCluster):
                target = RedisCluster.PRIMARIES
                await self._ask(
                    lambda: self._calls.execute_command("FUNCTION LOAD", "REPLACE", self._source, target_nodes=target)
                )
            else:
                await self._ask(lambda: self._calls.execute_command("FUNCTION LOAD", "REPLACE", self._source))

    async def _ask(self, command: Callable[[], Awaitable[Any]]) -> Any:
        if self._closed:
            raise BrokerUnavailable("the connection to the broker is closed")
        try:
            if math.isinf(self._timeout):
                return await command()
            async with asyncio.timeout(self._timeout):
                return await command()
        except AuthenticationError as exc:
            raise RefusedCommand(f"the broker at {shown_url(self._url)} lets nobody in so: {_text(exc)}") from exc
        except ResponseError as exc:
            raise _told(exc) from exc
        except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError) as exc:
            raise BrokerUnavailable(f"the broker at {shown_url(self._url)} does not answer: {_text(exc)}") from exc

    def _check_version(self, info: Mapping[str, Any]) -> None:
        version = str(info.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            reason = f"is version {version}, which has no functions"
            raise SettingError("broker", shown_url(self._url), reason, "Use Redis 7.0 or later, or Valkey.")

    def _check_policy(self, policy: Mapping[str, Any]) -> None:
        found = next(iter(policy.values()), "noeviction")
        if found != "noeviction":
            reason = f"has maxmemory-policy {found}: under pressure it would throw away requests that wait"
            mend = "Set it on the server: CONFIG SET maxmemory-policy noeviction, and in its configuration file."
            raise SettingError("broker", shown_url(self._url), reason, mend)

    def _client(self) -> _Client:
        return connect(self._url, self._timeout)


class Reader:
    """A connection for blocking reads."""

    def __init__(self, client: _Client, block: float, timeout: float) -> None:
        self._client = client
        self._block = block
        self._timeout = timeout

    async def pop(self, key: str) -> bytes | None:
        """The first element of a list; None when there was none for a while. Raises BrokerUnavailable."""
        wait = 0 if math.isinf(self._block) else self._block
        found = await self._wait_for(lambda: self._client.execute_command("BLPOP", key, wait))
        return None if found is None else found[1]

    async def stream(self, key: str, after: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """What came into a stream after an id; nothing when nothing did for a while. Raises BrokerUnavailable."""
        wait = 0 if math.isinf(self._block) else int(self._block * 1000)
        found = await self._wait_for(
            lambda: self._client.execute_command("XREAD", "BLOCK", wait, "STREAMS", key, after)
        )
        if not found:
            return []
        items = found[0][1] if isinstance(found, list) else next(iter(found.values()))
        return [(one[0], one[1] if isinstance(one[1], dict) else _pairs(one[1])) for one in _flat(items)]

    async def close(self) -> None:
        """Let go of it."""
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()

    async def _wait_for(self, command: Callable[[], Awaitable[Any]]) -> Any:
        try:
            if math.isinf(self._block):
                return await command()
            async with asyncio.timeout(self._block + self._timeout):
                return await command()
        except ResponseError as exc:
            raise BrokerUnavailable(f"the broker refuses to be read from: {_text(exc)}") from exc
        except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError) as exc:
            raise BrokerUnavailable(f"the connection to the broker broke: {_text(exc)}") from exc


class MissingFunction(Exception):
    """The library is not in the server."""


class RefusedCommand(BrokerUnavailable):
    """The server does not allow a command to this user."""


class OutOfMemory(BrokerUnavailable):
    """The server has no room for anything new."""


def _told(exc: ResponseError) -> Exception:
    """The server's answer in the house's words."""
    text = str(exc)
    if "Function not found" in text:
        return MissingFunction()
    if text.startswith("OOM") or "OOM command not allowed" in text:
        return OutOfMemory()
    if text.startswith(STEADY_ERRORS) or "unknown command" in text or "no permissions" in text:
        return RefusedCommand(text)
    return BrokerUnavailable(f"the broker answers: {text}")


def _text(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__


def _nodes(info: Any) -> list[Mapping[str, Any]]:
    """One mapping for each node: a cluster answers with a mapping of mappings."""
    first = next(iter(info.values()), None)
    return list(info.values()) if isinstance(first, dict) and "redis_version" not in info else [info]


def _flat(items: Any) -> Any:
    """Stream entries: RESP3 has them one list deeper."""
    return items[0] if items and items[0] and isinstance(items[0][0], list) else items


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def connect(url: str, timeout: float) -> _Client:
    """A client for a broker URL, not yet connected; answers are bytes, nothing is tried twice."""
    parts = urlsplit(url)
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": None if math.isinf(timeout) else timeout,
        "socket_timeout": None,
        "socket_keepalive": True,
        "protocol": 2,
    }
    kind = parts.scheme.partition("+")[2]
    if kind == "sentinel":
        return _by_sentinel(parts, options)
    scheme = parts.scheme.partition("+")[0]
    plain = urlunsplit((scheme, parts.netloc, parts.path, parts.query, ""))
    if kind == "cluster":
        return RedisCluster.from_url(plain, **options)
    return Redis.from_url(plain, max_connections=CONNECTIONS, **options)


def _by_sentinel(parts: SplitResult, options: dict[str, Any]) -> Redis:
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    service, _, database = parts.path.strip("/").partition("/")
    addresses = [
        (host.strip("[]"), int(port or 26379)) for host, _, port in (one.rpartition(":") for one in hosts.split(","))
    ]
    login = {"username": unquote(user) or None, "password": unquote(password) or None} if credentials else {}
    secure = {"ssl": True} if parts.scheme.startswith("rediss") else {}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        addresses, sentinel_kwargs={**options, **secure}, **options, **secure, **login
    )
    client: Redis = sentinel.master_for(service, db=int(database or 0), max_connections=CONNECTIONS)
    return client
