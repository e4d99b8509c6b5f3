"""From a broker's URL to a client of redis-py: for one server, Sentinel or Cluster, each with or without TLS.

What follows a `?` in the URL are options, as in rediss://HOST:PORT/0?ssl_ca_certs=/etc/headway/ca.pem; see
`headway.config.broker.OPTIONS`. Nothing is tried twice: a command that was not answered may have been done, and only the
caller knows whether it can be repeated.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import hiredis
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from headway.config import shown_url
from headway.errors import SettingError

CONNECTIONS = 1024
"""Most connections of one client to one server. A bound on mistakes: what is asked at once is a call for each shard."""
REDIS_PORT, SENTINEL_PORT = 6379, 26379


class Client:
    """A client of redis-py, not yet connected, with all that has to be closed with it. Answers are bytes.

    Arguments:
        url: of the broker.
        timeout: longest time to connect, seconds.
        silence: longest time for an answer, seconds; infinite when whoever asks bounds it.

    Raises:
        SettingError: a file that the URL names cannot be used.
    """

    def __init__(self, url: str, timeout: float, silence: float) -> None:
        parts = urlsplit(url)
        scheme, _, kind = parts.scheme.partition("+")
        given = dict(parse_qsl(parts.query))
        secure = _secured(url, given) if scheme == "rediss" else {}
        common: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_keepalive": True, "protocol": 2, **secure}
        hosts = _hosts(parts, SENTINEL_PORT if kind == "sentinel" else REDIS_PORT)
        self._idle: list[Any] = []
        self._sentinel: Sentinel | None = None
        self._redis: Redis | RedisCluster
        if kind == "cluster":
            # It finds out for itself that a node is silent, or it would go on asking it after a failover.
            self._redis = RedisCluster(
                startup_nodes=[ClusterNode(host, port) for host, port in hosts],
                max_connections=CONNECTIONS,
                reinitialize_steps=0,  # When a slot has moved, nobody else's connections are closed.
                socket_timeout=_finite(silence),
                socket_connect_timeout=_finite(timeout / 4),
                ssl=bool(secure),
                **_login(parts),
                **common,
            )
        elif kind == "sentinel":
            # Those that are gone must leave time to ask the others.
            share = _finite(timeout / (len(hosts) + 1))
            asking = {**common, **_sentinel_login(given), "socket_timeout": share, "socket_connect_timeout": share}
            self._sentinel = Sentinel(hosts, sentinel_kwargs={**asking, "ssl": bool(secure)})  # type: ignore[no-untyped-call]
            service, _, database = parts.path.strip("/").partition("/")
            self._redis = self._sentinel.master_for(
                service, **_one(common, timeout, parts, database), ssl=bool(secure), max_connections=CONNECTIONS
            )
        else:
            [(host, port)] = hosts
            pool = ConnectionPool(
                connection_class=SSLConnection if secure else Connection,
                max_connections=CONNECTIONS,
                host=host,
                port=port,
                **_one(common, timeout, parts, parts.path.strip("/")),
            )
            self._redis = Redis.from_pool(pool)

    async def ask(self, *command: Any, **where: Any) -> Any:
        """The answer to a command."""
        return await self._redis.execute_command(*command, **where)

    async def call(self, *command: Any) -> Any:
        """The server's plain answer to a command of bytes, text and numbers: `ask` without what redis-py does for others
        around each command, which takes more time than the command.

        Each call has a connection to itself while it lasts. What breaks is closed, and with it whatever lay idle: it
        most likely broke too.
        """
        if isinstance(self._redis, RedisCluster):
            return await self.ask(*command)
        connection = self._idle.pop() if self._idle else self._connection()
        try:
            if not connection.is_connected:
                await connection.connect()
            await connection.send_packed_command(hiredis.pack_command(command))
            answer = await connection.read_response()
        except ResponseError:
            self._idle.append(connection)
            raise
        except BaseException:
            broken, self._idle = [connection, *self._idle], []
            for one in broken:
                await one.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        return answer

    def _connection(self) -> Any:
        return self._redis.connection_pool.make_connection()  # type: ignore[union-attr]

    async def everywhere(self, *command: Any) -> list[Any]:
        """What each server answers that holds keys: the only one, or all primaries of a cluster."""
        if not isinstance(self._redis, RedisCluster):
            return [await self.ask(*command)]
        await self._redis.initialize()
        nodes = self._redis.get_primaries()
        return list(await asyncio.gather(*(self.ask(*command, target_nodes=node) for node in nodes)))

    def place_of(self, key: str) -> str:
        """Name of the server that has a key, as far as it is known."""
        if not isinstance(self._redis, RedisCluster):
            return ""
        node = self._redis.get_node_from_key(key)
        return "" if node is None else node.name

    async def at(self, key: str, *command: Any) -> Any:
        """What the server that has a key answers to a command without keys."""
        if not isinstance(self._redis, RedisCluster):
            return await self.ask(*command)
        return await self.ask(*command, target_nodes=self._redis.get_node_from_key(key))

    async def close(self) -> None:
        """Close all its connections."""
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)
        await self._redis.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _hosts(parts: SplitResult, default: int) -> list[tuple[str, int]]:
    found = []
    for place in parts.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{place}")
        found.append((one.hostname or "", one.port or default))
    return found


def _login(parts: SplitResult) -> dict[str, Any]:
    """User and password. They are not read from the URL by urlsplit, which knows only one host."""
    credentials, at, _ = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    return {"username": unquote(user) or None, "password": unquote(password) or None} if at else {}


def _sentinel_login(given: Mapping[str, str]) -> dict[str, Any]:
    names = {"sentinel_username": "username", "sentinel_password": "password"}
    return {name: given[option] for option, name in names.items() if option in given}


def _one(common: Mapping[str, Any], timeout: float, parts: SplitResult, database: str) -> dict[str, Any]:
    bounds = {"socket_timeout": None, "socket_connect_timeout": _finite(timeout)}
    return {**common, **bounds, **_login(parts), "db": int(database or 0)}


def _secured(url: str, given: Mapping[str, str]) -> dict[str, Any]:
    """What TLS needs to know; the files are tried, as they would only be read with the first connection."""
    found: dict[str, Any] = {"ssl_check_hostname": given.get("ssl_check_hostname", "true").lower() != "false"}
    found |= {name: given[name] for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile") if name in given}
    try:
        if "ssl_ca_certs" in found:
            ssl.create_default_context(cafile=found["ssl_ca_certs"])
        if "ssl_certfile" in found:
            ssl.create_default_context().load_cert_chain(found["ssl_certfile"], found.get("ssl_keyfile"), password="")
    except (OSError, ValueError) as exc:  # of which SSLError is one
        reason = f"names a file for TLS that cannot be used: {exc}"
        mend = "ssl_ca_certs and ssl_certfile are files in PEM format that this process may read."
        raise SettingError("broker", shown_url(url), reason, mend) from exc
    return found
