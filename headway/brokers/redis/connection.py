"""Connection to Redis or Valkey: calls to the function library, and their errors.

A call that isn't answered in time raises BrokerUnavailable, although it may have been carried out. It is tried only once, because
only its caller knows whether it can be repeated safely. Calls, claims, large values and blocking reads use separate connections, so
that one kind doesn't wait for another. A few connections per server are enough, because a server executes one step at a time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError, ResponseError

from headway.brokers.redis import function_library
from headway.brokers.redis.blocking_reads import KeyReads
from headway.brokers.redis.clients import check_files, connect
from headway.brokers.redis.large_values import StoredValues
from headway.brokers.redis.link import Client, Deposed
from headway.brokers.redis.memory_watch import KEEPING, MemoryWatch
from headway.brokers.redis.together import Together
from headway.config import shown_url
from headway.errors import BrokerUnavailable, SettingError
from headway.runtime.counters import BrokerCounts
from headway.runtime.logger import get_logger

log = get_logger(__name__)

BOUNDS = 8, 8, None, 8
"""Maximum number of connections to one server for calls, claims, blocking reads and large values."""
BLOCK = 2.0  # Maximum seconds of a blocking read. If there is no answer by then, the connection is dead.
OLDEST = (7, 0)  # Oldest server version that supports functions.
READ_WITHIN = 0.5  # Seconds within which a running server answers a read.
READ_AGAIN = 0.1  # Seconds after which a read is repeated if its connection was closed.
LOADS = 3  # Maximum number of times that one call loads the library, if the server keeps losing it.
NEEDED = "+@read +@write -@dangerous +fcall +function|load +time +info +config|get"
"""Permissions that a user needs, as in ACL SETUSER. For a cluster, `+cluster|slots` is also needed."""
MISSING = "Function not found"
TROUBLE = (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError)  # What redis-py raises if no answer comes.
OVERDUE = re.compile(r"OVERDUE ([0-9.e+]+)")  # Error for a call that came too late, with the server's time.
CLOSED = "the handler is closed"  # Message of uvloop's RuntimeError for a write to a connection that was just reset.

_TRUST = "Use the host name in its certificate. Name a CA to trust as in rediss://HOST:PORT/0?ssl_ca_certs=FILE."
_DATABASE = "Use a lower number, as in redis://HOST:PORT/0, or increase `databases` in the server's configuration file."
T = TypeVar("T")


class RedisConnection:
    """Connection of one process to the server. Raises SettingError if a file that the URL names can't be used.

    All keys begin with `prefix`. `process` is a name that is unique in the fleet. Tests replace the server's clock with `clock`.

    Attributes:
        timeout: maximum duration of a call in seconds.
    """

    def __init__(
        self,
        url: str,
        prefix: str = "headway",
        timeout: float = 1.0,
        clock: Callable[[], float] | None = None,
        process: str = "",
        counters: BrokerCounts | None = None,
    ) -> None:
        self._counters = BrokerCounts() if counters is None else counters
        self.prefix = prefix
        self.process = process
        self._url = url
        self._shown = shown_url(url)
        self.timeout = timeout
        self._clock = clock
        self._source = function_library.source()
        self._clients: Sequence[Client] = connect(url, timeout, BOUNDS)
        self._calls, self._claims, blocking, values = self._clients
        self.values = StoredValues(values, self._ask)
        self.reads = KeyReads(blocking, self._ask, self._tag, math.inf if clock is not None else BLOCK)
        self.memory = MemoryWatch(self._calls, self._ask)
        self._joined = Together(self, self._tag, _fault)
        self._loading = asyncio.Lock()
        self._loads: dict[str, int] = {}
        self._closed = False
        self._refused = False  # True if the last failed call was answered with an error.
        self._unfit = ""

    def clock_text(self) -> str:
        """Return the clock argument for the functions, or an empty string to make them use the server's clock."""
        return "" if self._clock is None else repr(self._clock())

    async def open(self) -> None:
        """Connect, and check that the server can be used. If it can't, every later call fails. Raises BrokerUnavailable if the server
        is unreachable, and SettingError if it is too old, evicts waiting entries, refuses this user, or isn't trusted."""
        self._unfit, self.memory.reports_policy = "", False
        self._calls.watch()
        try:
            await self._check()
            self.memory.reports_policy = True
        except SettingError as exc:
            self._unfit = str(exc)
            raise

    async def _check(self) -> None:
        try:
            for info in await self._ask(lambda: self._calls.everywhere("INFO", "server")):
                self._check_server(info)
            await self._see_policy()
            await self._try_library()
            await self.memory.look()
        except RefusedCommand as exc:
            if "'SENTINEL'" in str(exc):
                hint = "Use the port of the Sentinels, usually 26379, or begin the URL with redis:// or rediss://."
                raise SettingError("broker", self._shown, "is not a Sentinel", hint) from exc
            hint = (
                "Put user and password into the URL, as in redis://USER:PASSWORD@HOST:PORT/0. "
                f"That user needs, as in ACL SETUSER: ~{self.prefix}:* {NEEDED}; in a cluster also +cluster|slots."
            )
            raise SettingError("broker", self._shown, f"refuses this user: {str(exc).rstrip('.')}", hint) from exc
        except Unfit as exc:
            raise SettingError("broker", self._shown, exc.reason, exc.hint) from exc

    async def renew(self) -> None:
        """Reconnect, using the current contents of the URL's files. If this raises SettingError, the connections are unchanged."""
        await asyncio.to_thread(check_files, self._url)
        for client in self._clients:
            await client.renew()

    async def close(self) -> None:
        """Close all connections. Later calls raise BrokerUnavailable."""
        self._closed = True
        await self.memory.close()
        for client in self._clients:
            with contextlib.suppress(*TROUBLE):
                await client.close()

    async def call(self, function: str, key: str, *arguments: Any) -> Any:
        """Call a function of the library on the keys that begin with `key`."""
        return await self._ask(lambda: self._run(self._calls, function, key, arguments))

    async def join(self, function: str, key: str, *arguments: Any) -> Any:
        """Make a call that is batched with others (see `together`). The library must register the function as joinable."""
        return await self._joined.join(function, key, *arguments)

    async def share(self, function: str, key: str, *arguments: Any) -> Any:
        """Make a read-only call like `join`. Concurrent calls that differ only in their last argument share one answer."""
        return await self._joined.share(function, key, *arguments)

    async def claim(self, function: str, key: str, *arguments: Any) -> Any:
        return await self._ask(lambda: self._run(self._claims, function, key, arguments))

    async def drop(self, keys: Sequence[str]) -> None:
        """Delete values that are on the same server."""
        if keys:
            await self._ask(lambda: self._calls.call(keys[0], "UNLINK", *keys))

    def _tag(self, key: str) -> str:
        """Return the part of a key that all keys of a command must share: in a cluster its hash tag, otherwise nothing."""
        return key[: key.index("}")] if self.clustered else ""

    async def entries(self, key: str, start: bytes, count: int, last: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return the first `count` stream entries from the id `start` to the id `last`."""
        entries = await self._ask(lambda: self._calls.call(key, "XRANGE", key, start, last, "COUNT", count))
        return [(id, dict(zip(flat[::2], flat[1::2], strict=True))) for id, flat in entries]

    @property
    def clustered(self) -> bool:
        """True if keys are distributed over several servers, so a step can't use arbitrary keys together."""
        return self._calls.mode == "cluster"

    async def takes_reads_only(self) -> bool:
        """Return True if every server answers reads, but writes aren't answered or are refused because there is no primary.

        That happens while writes are paused and a replica takes over. After a server turned out not to be the primary, reads
        may fail at first: connections are closed, and the new primary may be slow. So return True for twice the timeout."""
        for pause in (READ_AGAIN, 0.0):  # Connections to a replaced server are closed.
            if self._refused:
                return False
            try:
                async with asyncio.timeout(READ_WITHIN):
                    await self._ask(lambda: self._calls.everywhere("TIME"))
                return True
            except TimeoutError:
                break
            except BrokerUnavailable:
                await asyncio.sleep(pause)
        return asyncio.get_running_loop().time() - self._calls.left_at < 2 * self.timeout

    async def _run(self, client: Client, function: str, key: str, arguments: tuple[Any, ...]) -> Any:
        name = f"{function_library.VERSION}_{function}"
        for _ in range(LOADS):
            known = self._loads.copy()
            try:
                return await client.call(key, "FCALL", name, 1, key, *arguments)
            except ResponseError as exc:
                if overdue := OVERDUE.search(str(exc)):
                    raise Overdue(float(overdue[1])) from exc
                if MISSING not in str(exc):
                    raise
            await self._load(client, key, known)
        raise BrokerUnavailable(f"the broker at {self._shown} keeps losing its functions")

    async def _load(self, client: Client, key: str, known: Mapping[str, int]) -> None:
        """Load the library into the server of `key` after a restart or a flush. If several calls need it, only one loads it."""
        async with self._loading:
            server = client.server_of(key)
            if self._loads.get(server, 0) == known.get(server, 0):
                await client.call(key, "FUNCTION", "LOAD", "REPLACE", self._source)
                self._loads[server] = self._loads.get(server, 0) + 1
                log.info("the functions were loaded into the broker again")

    async def _ask(self, act: Callable[[], Awaitable[T]], wait: float = 0.0) -> T:
        """Return the answer of `act`, which may take `wait` seconds longer than an ordinary call."""
        if self._closed:
            raise BrokerUnavailable("the connection to the broker is closed")
        if self._unfit:
            raise BrokerUnavailable(self._unfit)
        bound, began = wait + self.timeout, monotonic()
        try:
            async with asyncio.timeout(None if math.isinf(bound) else bound):
                answer = await act()
            if not wait:
                self._counters.call_seconds.observe(monotonic() - began)
            return answer
        except Deposed as exc:
            for client in self._clients:
                await client.leave(exc.address)
            raise self._unanswered(exc) from exc
        except OutOfMemoryError as exc:
            raise OutOfMemory(f"the broker at {self._shown} has no memory left") from exc
        except TROUBLE as exc:
            raise self._unanswered(exc) from exc
        except RuntimeError as exc:
            if CLOSED not in str(exc):
                raise
            raise self._unanswered(exc) from exc

    def _unanswered(self, exc: BaseException) -> BrokerUnavailable:
        self._counters.call_failures += 1
        self._refused = isinstance(exc, ResponseError)
        return _translated(exc, self._shown)

    def _check_server(self, info: Mapping[str, Any]) -> None:
        version = str(info.get("redis_version", ""))
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
            reason = f"is version {version}, which does not support functions"
            raise SettingError("broker", self._shown, reason, "Use Redis 7.0 or later, or Valkey.")
        mode = str(info.get("redis_mode") or info.get("server_mode"))  # Redis and Valkey
        if self._calls.mode == "standalone" and mode in ("cluster", "sentinel"):
            reason = "is a node of a cluster" if mode == "cluster" else "is a Sentinel"
            hint = f"Begin the URL with redis+{mode}:// or rediss+{mode}://."
            raise SettingError("broker", self._shown, reason, hint)

    async def _see_policy(self) -> None:
        try:
            settings = await self._ask(lambda: self._calls.everywhere("CONFIG GET", "maxmemory-policy"))
        except RefusedCommand as exc:
            log.warning("cannot read the server's eviction policy; it must be noeviction", error=str(exc))
            return
        for policy in (value for setting in settings for value in setting.values()):
            if policy not in (KEEPING, KEEPING.encode()):
                name = policy.decode() if isinstance(policy, bytes) else policy
                reason = f"has maxmemory-policy {name}: if memory is short it would discard waiting requests"
                hint = "Set it with CONFIG SET maxmemory-policy noeviction, and in the server's configuration file."
                raise SettingError("broker", self._shown, reason, hint)

    async def _try_library(self) -> None:
        """Load the library and call it. A user who isn't allowed to load the library may still be able to use one that is loaded."""
        with contextlib.suppress(RefusedCommand):
            await self._ask(lambda: self._calls.everywhere("FUNCTION LOAD", "REPLACE", self._source))
        await self.call("leave", f"{self.prefix}:{{fleet}}:", self.clock_text(), "")


class RefusedCommand(BrokerUnavailable):
    """This user isn't allowed to run a command."""


class Unfit(BrokerUnavailable):
    """The server can't be used, as its answer `said` shows. `reason` and `hint` are for a SettingError."""

    def __init__(self, said: str, reason: str, hint: str) -> None:
        super().__init__(said)
        self.reason, self.hint = reason, hint


class Overdue(BrokerUnavailable):
    """The call arrived after its caller had stopped waiting, so the server did nothing. `now` is the server's time."""

    def __init__(self, now: float) -> None:
        super().__init__(f"a call reached the broker too late, at {now:.3f} on its clock")
        self.now = now


class OutOfMemory(BrokerUnavailable):
    """The server has no room for new keys. The call changed nothing."""


def _fault(text: str) -> BrokerUnavailable:
    overdue = OVERDUE.search(text)
    return Overdue(float(overdue[1])) if overdue else BrokerUnavailable(f"the broker answers: {text}")


def _translated(exc: BaseException, shown: str) -> BrokerUnavailable:
    """Convert an error from redis-py. A wrapped cause may be more specific than the error itself."""
    text = str(exc) or type(exc).__name__
    said = (
        f"the broker at {shown} {'answers' if isinstance(exc, ResponseError | Deposed) else 'does not answer'}: {text}"
    )
    cause: BaseException | None = exc
    while cause is not None:
        text = str(cause)
        if isinstance(cause, AuthenticationError | NoPermissionError) or "unknown command" in text:
            return RefusedCommand(text)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Unfit(said, f"is not trusted: {said.rstrip('.')}", _TRUST)
        if "cluster support disabled" in text:
            return Unfit(said, "is not a cluster", "Begin the URL with redis:// or rediss://.")
        if "DB index is out of range" in text:
            return Unfit(said, "has a database number that the server does not have", _DATABASE)
        cause = cause.__cause__ or cause.__context__
    return BrokerUnavailable(said)
