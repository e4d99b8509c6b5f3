"""Clients for a broker's URL: one server, Sentinel or Cluster, each with or without TLS.

The URL's query may have options (`headway.config.broker.OPTIONS`), as in rediss://HOST:PORT/0?ssl_ca_certs=/etc/headway/ca.pem.
Commands are never retried, because an unanswered command may have been carried out."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.driver_info import DriverInfo
from redis.exceptions import AskError, MovedError, RedisError, ResponseError

from headway.brokers.redis.link import Address, Client, Server, shown
from headway.config import shown_url
from headway.errors import BrokerUnavailable, SettingError
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)

Vote = tuple[int, Address]  # Configuration epoch of a failover, and the primary since then.

CHANNELS = ("+promoted-slave", "+switch-master")  # The leading Sentinel sends the first, all send the second.
QUIET = 5.0  # After this many seconds without a message, a Sentinel is pinged. After as many more, it counts as gone.
AGAIN = 1.0  # Seconds between two votes on the primary while it is impossible to listen to a Sentinel.


class Sentinels(Sentinel):
    """Sentinels that watch one primary. `service` is their name for it. `asking` are the options for connections to the Sentinels.
    `leave` closes the connections to an address that is no longer the primary's."""

    def __init__(
        self,
        hosts: Sequence[Address],
        service: str,
        asking: dict[str, Any],
        leave: Callable[[Address], Awaitable[None]],
    ) -> None:
        super().__init__(hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        self._service = service
        self._leave = leave
        self._listening: list[asyncio.Task[None]] = []
        self._refused: Address | None = None
        self._config_epoch = 0
        self._primary: Address | None = None
        self._voting: asyncio.Task[Vote] | None = None
        self._next: asyncio.Task[Vote] | None = None

    def watch(self) -> None:
        """Start listening for failovers."""
        if not self._listening:
            loop = asyncio.get_running_loop()
            self._listening = [loop.create_task(self._follow(sentinel)) for sentinel in self.sentinels]

    def avoid(self, address: Address) -> None:
        """Don't use this address if any Sentinel names another primary."""
        self._refused = address

    async def renew(self) -> None:
        for sentinel in self.sentinels:
            await sentinel.connection_pool.disconnect(inuse_connections=False)
            sentinel.connection_pool._available_connections.clear()
        if self._listening:
            await end(*self._listening)
            self._listening = []
            self.watch()

    async def aclose(self) -> None:
        await end(*self._listening, self._voting, self._next)
        await super().aclose()

    async def discover_master(self, service_name: str) -> Address:
        """Return the address of the primary. Once a majority of the Sentinels agrees, slow ones aren't waited for. If the
        primary has changed, all connections to the old one are closed, because it may still accept writes that will be
        lost. Raises MasterNotFoundError if no Sentinel names a live primary, and ResponseError if a host isn't a
        Sentinel."""
        while True:
            known = self._config_epoch
            config_epoch, address = await self._shared_vote(service_name)
            # Otherwise a newer epoch became known during the vote, so vote again.
            if config_epoch >= self._config_epoch or known == self._config_epoch:
                break
        before, self._config_epoch, self._primary = self._primary, config_epoch, address
        if before is not None and before != address:
            log.info("the broker's primary has changed", was=shown(before), now=shown(address))
            await self._leave(before)
        return address

    async def _shared_vote(self, service: str) -> Vote:
        """Return the result of a vote that begins now or later. All callers that arrive during a vote share the next one."""
        running = self._voting
        if running is None or running.done():
            self._voting = vote = _start_vote(self._vote(service))
        elif self._next is None:
            self._next = vote = _start_vote(self._vote_after(running, service))
        else:
            vote = self._next
        return await asyncio.shield(vote)

    async def _vote_after(self, running: asyncio.Task[Vote], service: str) -> Vote:
        await asyncio.wait({running})
        self._voting, self._next = self._next, None
        return await self._vote(service)

    async def _vote(self, service: str) -> Vote:
        votes: Counter[Vote] = Counter()
        errors: list[BaseException] = []
        pending = {asyncio.ensure_future(_primary(sentinel, service)) for sentinel in self.sentinels}
        try:
            while pending and not self._agreed(votes):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for vote in done:
                    if (error := vote.exception()) is not None:
                        errors.append(error)
                    elif (answer := vote.result()) is not None:
                        votes[answer] += 1
        finally:
            await end(*pending)
        if votes:
            return max(votes, key=lambda vote: (vote[0], vote[1] != self._refused, votes[vote]))
        for error in errors:
            if isinstance(error, ResponseError):
                raise error
        reasons = ", ".join(f"{type(error).__name__}: {error}" for error in errors)
        raise MasterNotFoundError(f"No master found for {service!r}{f' : {reasons}' if reasons else ''}")

    def _agreed(self, votes: Counter[Vote]) -> bool:
        """Return True if a majority agrees on a primary that isn't to be avoided, in an epoch no older than the known one."""
        believed = (
            count
            for (config_epoch, address), count in votes.items()
            if address != self._refused and config_epoch >= self._config_epoch
        )
        return 2 * max(believed, default=0) > len(self.sentinels)

    async def _follow(self, sentinel: Redis) -> None:
        """Listen to one Sentinel for ever. While it is unreachable or refuses this user, repeat votes instead."""
        while True:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self._listen(sentinel)
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self.discover_master(self._service)
            await asyncio.sleep(AGAIN)

    async def _listen(self, sentinel: Redis) -> None:
        connection = sentinel.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
            await connection.send_command("SUBSCRIBE", *CHANNELS)
            for _ in CHANNELS:
                await connection.read_response()
            await self.discover_master(self._service)  # Catch up on earlier events.
            pinged = False
            while True:
                message = await connection.read_response(timeout=QUIET)
                if message is not None:
                    await self._hear(message)
                elif pinged:
                    return
                else:
                    await connection.send_command("PING")
                pinged = message is None
        finally:
            await connection.disconnect(nowait=True)

    async def _hear(self, message: Any) -> None:
        if message[0] == b"message":
            deposed = deposed_by(message[2].decode(), self._service)
            if deposed is not None:
                self.avoid(deposed)
                await self._leave(deposed)  # Clients then ask for the new primary.


def deposed_by(event: str, service: str) -> Address | None:
    """Return the address that a Sentinel's event says is no longer the primary's. None if the event is about another service. An event
    is `SERVICE HOST PORT HOST PORT`, with the old address first, or `slave NAME HOST PORT @ SERVICE HOST PORT`."""
    words = event.partition(" @ ")[2].split() or event.split()[:3]
    return (words[1], int(words[2])) if words[0] == service else None


def _start_vote(vote: Coroutine[Any, Any, Vote]) -> asyncio.Task[Vote]:
    task = asyncio.get_running_loop().create_task(vote)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # All callers may have gone.
    return task


async def _primary(sentinel: Redis, name: str) -> Vote | None:
    """Return the primary that one Sentinel names, or None if it knows no primary that is up."""
    # In this order a new primary may be recognized late. In the other order an old primary could be paired with a new epoch.
    masters: Any = await sentinel.sentinel_masters()
    address = await sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)  # type: ignore[no-untyped-call]
    if address is None:
        return None
    host, port = address[0].decode() if isinstance(address[0], bytes) else address[0], int(address[1])
    state = masters.get(name, {})
    if (state.get("is_sdown") or state.get("is_odown")) and (state["ip"], state["port"]) == (host, port):
        return None
    return state.get("config-epoch", 0), (host, port)


MOVES = 4  # Maximum number of times that a call is redirected because its key has moved.
REFRESH_EVERY = 0.1  # Minimum seconds between two readings of the slot map.


class Cluster(Client):
    """Client of the nodes of a cluster. `seeds` are the addresses of some nodes. `timeout` is in seconds, and may be infinite."""

    mode = "cluster"

    def __init__(self, seeds: Sequence[Address], make: Callable[[str, int], Server], timeout: float) -> None:
        self._seeds = seeds
        self._make = make
        self._call_timeout = None if math.isinf(timeout) else timeout / 4
        self._servers: dict[Address, Server] = {}
        self._ends: list[int] = []
        self._owners: list[Address] = []
        self._moved: dict[int, Address] = {}
        self._silent: set[Address] = set()
        self._doubtful = True
        self._looked_at = self._left_at = -math.inf
        self._looking: asyncio.Task[None] | None = None

    @property
    def left_at(self) -> float:
        return self._left_at

    def watch(self) -> None:
        """See Client. Does nothing: a cluster announces no failovers. Its slot map is read again when it may be outdated."""

    async def call(self, key: str, *command: Any, large: bool = False) -> Any:
        if self._doubtful:
            await self._look()
        slot = key_slot(key.encode())
        for _ in range(MOVES):
            address = self._owner(slot)
            try:
                return await self._server(address).call(*command, large=large)
            except MovedError as exc:
                self._moved[slot] = (exc.host or address[0], exc.port)
                self._doubt()
            except AskError as exc:
                # A function needs all of its keys, but they are on two nodes for now.
                raise BrokerUnavailable(f"the keys of {key} are being moved to {exc.host}:{exc.port}") from exc
            except ResponseError:
                raise
            except BaseException:  # A deadline cancels the call.
                self._silent.add(address)
                self._doubtful = True
                raise
        raise BrokerUnavailable(f"the nodes of the cluster do not agree on which of them has {key}")

    async def everywhere(self, *command: Any) -> list[Any]:
        self._doubtful, self._looked_at = True, -math.inf
        await self._look(wait=True)
        owners = dict.fromkeys(self._owners)
        return list(await asyncio.gather(*(self._server(owner).ask(*command) for owner in owners)))

    def server_of(self, key: str) -> str:
        host, port = self._owner(key_slot(key.encode()))
        return f"{host}:{port}"

    async def leave(self, address: Address) -> None:
        self._doubt()
        if address in self._servers:
            await self._servers[address].leave(address)

    async def renew(self) -> None:
        for server in self._servers.values():
            await server.renew()

    async def close(self) -> None:
        await end(self._looking)
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def _doubt(self) -> None:
        self._doubtful, self._left_at = True, asyncio.get_running_loop().time()

    def _server(self, address: Address) -> Server:
        server = self._servers.get(address)
        if server is None:
            host, port = address
            server = self._servers[address] = self._make(host, port)
        return server

    def _owner(self, slot: int) -> Address:
        moved = self._moved.get(slot)
        if moved is not None:
            return moved
        index = bisect_left(self._ends, slot)
        if index == len(self._ends):
            raise BrokerUnavailable(f"no node of the cluster has slot {slot}")
        return self._owners[index]

    async def _look(self, wait: bool = False) -> None:
        """Read the slot map again. Don't wait for it if there is an old map, unless `wait` is set."""
        loop = asyncio.get_running_loop()
        if (self._looking is None or self._looking.done()) and loop.time() - self._looked_at >= REFRESH_EVERY:
            self._looked_at = loop.time()
            self._looking = loop.create_task(self._learn())
        if self._looking is not None and (wait or not self._owners):
            await asyncio.shield(self._looking)

    async def _learn(self) -> None:
        """Read the slot map from the first node that answers. Try unresponsive nodes last."""
        known = dict.fromkeys([*self._owners, *self._seeds])
        failed: RedisError | OSError | TimeoutError | None = None
        for address in sorted(known, key=lambda address: address in self._silent):
            try:
                async with asyncio.timeout(self._call_timeout):
                    slots = await self._server(address).ask("CLUSTER SLOTS")
            except (RedisError, OSError, TimeoutError) as exc:
                self._silent.add(address)
                failed = exc
                continue
            self._read(slots, address[0])
            return
        if failed is not None and not self._owners:
            raise failed

    def _read(self, slots: Any, host: str) -> None:
        rows = sorted((int(last), node[0], int(node[1])) for _, last, node, *_ in slots)
        self._ends = [last for last, _, _ in rows]
        self._owners = [(_text(named) or host, port) for _, named, port in rows]
        self._moved.clear()
        self._silent.clear()
        self._doubtful = False


def _text(name: str | bytes | None) -> str:
    """Return the host of a node, or an empty string if the node doesn't know its own host."""
    text = name.decode() if isinstance(name, bytes) else name or ""
    return "" if text == "?" else text


REDIS_PORT, SENTINEL_PORT = 6379, 26379


class Single(Client):
    """Client of one server. If there are Sentinels, its address may change."""

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
    """Return the driver name and version that connections report. Cached, so that not every connection reads redis-py's metadata."""
    return DriverInfo()


def connect(url: str, timeout: float, bounds: Sequence[int | None]) -> Sequence[Client]:
    """Create one client for each of `bounds`. A bound is a client's maximum number of connections to one server, or None
    for no limit. If there are Sentinels, all clients use the same primary. `timeout` is in seconds, and may be infinite.
    Raises SettingError if a file that the URL names can't be used."""
    parts, kind, hosts, query, secure = _read(url)
    common: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": _finite(timeout),
        "socket_timeout": None,  # The callers have timeouts.
        "socket_keepalive": True,
        "protocol": 2,
        "driver_info": _driver(),
        **secure,
    }
    if kind == "sentinel":
        # If a Sentinel is dead, there must be time left to ask others.
        share = _finite(timeout / (len(hosts) + 1))
        within = {"socket_timeout": share, "socket_connect_timeout": share}
        asking = {**common, **within, **_sentinel_login(query), "ssl": bool(secure)}
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
        kind: `cluster`, `sentinel`, or empty for a single server.
        service: the Sentinels' name for the primary, or empty.
        server, sentinel: create a client of a server or Sentinel, with the URL's credentials.
    """

    kind: str
    hosts: Sequence[Address]
    service: str
    server: Callable[[Address], Redis]
    sentinel: Callable[[Address], Redis]


def nodes(url: str, timeout: float) -> Nodes:
    """Return the servers behind a URL. `timeout` is for each command, in seconds. Raises SettingError like `connect`."""
    parts, kind, hosts, query, secure = _read(url)
    common: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0), "socket_connect_timeout": timeout, "socket_timeout": timeout, "protocol": 2,
        "ssl": bool(secure), **secure,
    }  # fmt: skip

    def make(login: dict[str, Any], address: Address) -> Redis:
        return Redis(host=address[0], port=address[1], **common, **login)

    service = parts.path.strip("/").partition("/")[0] if kind == "sentinel" else ""
    return Nodes(kind, hosts, service, partial(make, _login(parts)), partial(make, _sentinel_login(query)))


def _followers(
    parts: SplitResult,
    hosts: Sequence[Address],
    asking: dict[str, Any],
    calling: dict[str, Any],
    bounds: Sequence[int | None],
) -> Sequence[Client]:
    """Create clients of the primary that the Sentinels name. When one client learns about a new primary, all switch to it."""
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
    _read(url)


def _read(url: str) -> tuple[SplitResult, str, Sequence[Address], Mapping[str, str], dict[str, Any]]:
    """Return a URL's parts, the kind of its servers, their addresses, its query, and the TLS options."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    query = dict(parse_qsl(parts.query))
    hosts = _hosts(parts, SENTINEL_PORT if kind == "sentinel" else REDIS_PORT)
    return parts, kind, hosts, query, _secured(url, query) if scheme == "rediss" else {}


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _hosts(parts: SplitResult, default: int) -> list[tuple[str, int]]:
    hosts = []
    for address in parts.netloc.rpartition("@")[2].split(","):
        parts = urlsplit(f"//{address}")
        hosts.append((parts.hostname or "", parts.port or default))
    return hosts


def _login(parts: SplitResult) -> dict[str, Any]:
    """Return the user and password in a URL. urlsplit doesn't find them if the URL has several hosts."""
    credentials, at, _ = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    return {"username": unquote(user) or None, "password": unquote(password) or None} if at else {}


def _sentinel_login(query: Mapping[str, str]) -> dict[str, Any]:
    names = {"sentinel_username": "username", "sentinel_password": "password"}
    return {name: query[option] for option, name in names.items() if option in query}


def _secured(url: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the TLS options. The files are tried now, because an error in the first connection would come too late."""
    options: dict[str, Any] = {"ssl_check_hostname": query.get("ssl_check_hostname", "true").lower() != "false"}
    options |= {name: query[name] for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile") if name in query}
    try:
        if "ssl_ca_certs" in options:
            ssl.create_default_context(cafile=options["ssl_ca_certs"])
        if "ssl_certfile" in options:
            own = ssl.create_default_context()
            own.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"), password="")
    except (OSError, ValueError) as exc:  # SSLError is an OSError.
        reason = f"names a TLS file that cannot be used: {exc}"
        hint = "ssl_ca_certs and ssl_certfile must be files in PEM format that this process may read."
        raise SettingError("broker", shown_url(url), reason, hint) from exc
    return options
