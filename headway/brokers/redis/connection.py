"""Connection to Redis or Valkey: calls of the library of functions, blocking reads, and their errors.

Every call has a deadline and is tried once: a command that timed out may have been done, and only the caller knows
whether it can be repeated. Calls, claims, large values and blocking reads have connections of their own, so that neither
waits for the other: a few for each server, as it does one step after the other.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import math
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)

from headway.brokers.redis import function_library
from headway.brokers.redis.blocking import BlockingReads
from headway.brokers.redis.clients import check_files, connect
from headway.brokers.redis.server import Client, Deposed
from headway.brokers.redis.together import Together
from headway.config import shown_url
from headway.errors import BrokerUnavailable, SettingError
from headway.runtime.counters import BrokerCounts
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)

BOUNDS = 8, 8, None, 8
"""Most connections to one server for calls, for claims, for blocking reads and for large values."""
BLOCK = 2.0
"""Longest blocking read in seconds, after which a connection is known to live, or not."""
OLDEST = (7, 0)
"""Oldest version of the server that has functions."""
READ_WITHIN = 0.5
"""Seconds within which a server that is there answers a read."""
READ_AGAIN = 0.1
"""Seconds after which a read is tried again whose connection was closed."""
MEMORY_AGE = 1.0
"""Seconds for which the share of memory in use is believed."""
SCARCE = 0.8
"""Share of `maxmemory` in use above which no new entry is admitted."""
KEEPING = "noeviction"
"""Eviction policy under which no waiting entry is thrown away."""
SLOWEST = 10_000_000
"""Bytes of a large value that a server takes or gives in a second at least; a call with one may last longer by that."""
PIECE = 1 << 19
"""Bytes of a large value in one answer. Redis does nothing else while it makes an answer: 0.1 ms for these, 6 ms for 8 MB."""
LOADS = 3
"""Most times that a call loads the library into the server, should it be lost again and again."""
NEEDED = "+@read +@write -@dangerous +fcall +function|load +time +info +config|get"
"""Rights that a user needs, as in ACL SETUSER; `+cluster|slots` besides in a cluster."""
MISSING = "Function not found"
"""Text of the server's error for a function of a library that it lacks."""
TROUBLE = (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError)
"""Exceptions that redis-py raises when there is no answer."""
OVERDUE = re.compile(r"OVERDUE ([0-9.e+]+)")
"""Text of the library's error for a call for which nobody waits any more, and the server's instant."""
CLOSED = "the handler is closed"
"""Text of uvloop's RuntimeError at a write to a connection that was reset just before."""

_TRUST = "Name the host as its certificate does; rediss://HOST:PORT/0?ssl_ca_certs=FILE names an authority to trust."
_DATABASE = "Name a lower one, as in redis://HOST:PORT/0, or raise `databases` in the server's configuration file."
_text_decoder = codecs.getincrementaldecoder("utf-8")
T = TypeVar("T")
P = TypeVar("P")


class RedisConnection:
    """Connection of one process to the server.

    Arguments:
        url: see `headway.config`, setting `broker`.
        prefix: text that all keys begin with.
        timeout: longest time in seconds for a call.
        clock: instants that the server uses in place of its own clock; for tests.
        process: name of this process, unique in the fleet; its wake-up lists are found by it.
        counters: counters of the calls.

    Attributes:
        prefix, process: as given.
        servers: number of servers.
        smallest_memory: least `maxmemory` of all servers in bytes; 0: there is no limit, or it is not known yet.
        memory: bytes in use and `maxmemory` of all servers together, as of the last look; 0: as above.

    Raises:
        SettingError: a file that the URL names cannot be used.
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
        self._timeout = timeout
        self._clock = clock
        self._block = math.inf if clock is not None else BLOCK
        self._source = function_library.source()
        self._calls, self._claims, self._reads, self._values = connect(url, timeout, BOUNDS)
        self._pops: dict[str, BlockingReads[None, bytes]] = {}
        self._streams: dict[str, BlockingReads[bytes, list[Any]]] = {}
        self._joined = Together(self, self._tag, _fault)
        self._loading = asyncio.Lock()
        self._loads: dict[str, int] = {}
        self._scarce = False
        self._fit = False
        """Whether the last look at what the server must be found it so."""
        self._evicts = ""
        """Eviction policies that were seen and throw waiting entries away."""
        self.servers, self.smallest_memory = 1, 0
        self.memory = 0, 0
        self._memory_at = -math.inf
        self._looking: asyncio.Task[None] | None = None
        self._closed = False
        self._refused = False
        """Whether the last call that failed was answered with an error."""
        self._unfit = ""
        """Reason for which the server cannot be used; empty as far as is known."""

    @property
    def timeout(self) -> float:
        """Longest time in seconds for a call."""
        return self._timeout

    def clock_text(self) -> str:
        """Clock argument of the functions: empty for the server's own clock."""
        return "" if self._clock is None else repr(self._clock())

    async def open(self) -> None:
        """Connect, and check that the server can be used. If it cannot, every later call fails.

        Raises:
            SettingError: the server is too old, evicts waiting entries, refuses this user, or is not trusted.
            BrokerUnavailable: the server is not there.
        """
        self._unfit, self._fit = "", False
        self._calls.watch()
        try:
            await self._check()
            self._fit = True
        except SettingError as exc:
            self._unfit = str(exc)
            raise

    async def _check(self) -> None:
        try:
            for info in await self._ask(lambda: self._calls.everywhere("INFO", "server")):
                self._check_server(info)
            await self._see_policy()
            await self._try_library()
            await self._look_at_memory()
        except RefusedCommand as exc:
            if "'SENTINEL'" in str(exc):
                hint = "Name the Sentinels' own port, 26379 as a rule, or begin the URL with redis:// or rediss://."
                raise SettingError("broker", self._shown, "is no Sentinel", hint) from exc
            hint = (
                "Put user and password into the URL, redis://USER:PASSWORD@HOST:PORT/0. "
                f"That user needs, as in ACL SETUSER: ~{self.prefix}:* {NEEDED}; in a cluster +cluster|slots, too."
            )
            raise SettingError("broker", self._shown, f"refuses this user: {str(exc).rstrip('.')}", hint) from exc
        except Unfit as exc:
            raise SettingError("broker", self._shown, exc.reason, exc.hint) from exc

    async def renew(self) -> None:
        """Connect anew, with the present content of the files of the URL.

        Raises:
            SettingError: a file cannot be used; the connections stay as they are.
        """
        await asyncio.to_thread(check_files, self._url)
        for client in self._clients:
            await client.renew()

    async def close(self) -> None:
        """Close all connections. Later calls raise BrokerUnavailable."""
        self._closed = True
        await end(self._looking)
        for client in self._clients:
            with contextlib.suppress(*TROUBLE):
                await client.close()

    async def call(self, function: str, key: str, *arguments: Any) -> Any:
        """Run a function of the library on the keys that begin with `key`.

        Raises:
            BrokerUnavailable: no answer in time; it may have been done.
        """
        return await self._ask(lambda: self._run(self._calls, function, key, arguments))

    async def join(self, function: str, key: str, *arguments: Any) -> Any:
        """Run a function like `call`, in one call with all others that are joined at this moment; see `together`.

        The function is one that the library registers for that.
        """
        return await self._joined.join(function, key, *arguments)

    async def share(self, function: str, key: str, *arguments: Any) -> Any:
        """Run a function that only reads, like `join`. All who ask for the same at this moment have one answer, by the last argument of the first."""
        return await self._joined.share(function, key, *arguments)

    async def claim(self, function: str, key: str, *arguments: Any) -> Any:
        """Run a function like `call`, over the connections for claims."""
        return await self._ask(lambda: self._run(self._claims, function, key, arguments))

    async def store(self, key: str, value: bytes | str, seconds: int) -> None:
        """Store a large value for so many seconds; a text of ASCII is encoded as it is sent.

        Raises:
            OutOfMemory: the server has no room for it.
            BrokerUnavailable: no answer in time; it may be stored.
        """
        wait = len(value) / SLOWEST
        await self._ask(lambda: self._values.call(key, "SET", key, value, "EX", seconds, large=True), wait)

    async def fetch(self, key: str, length: int) -> bytes | None:
        """Read a large value of a known length, piece by piece; None when it is not there. Raises BrokerUnavailable.

        No other value may ever be stored under its key.
        """
        return await self._ask(lambda: self._joined_pieces(key, length, PIECE), length / SLOWEST)

    async def fetch_text(self, key: str, length: int) -> str | None:
        """Read a large text of a known length in bytes, as `fetch` does; each piece is decoded as it comes."""
        return await self._ask(lambda: self._text(key, length), length / SLOWEST)

    async def fetch_whole(self, key: str, length: int) -> bytes | None:
        """Read a large value in one piece, as another one may take its place; see `fetch`."""
        return await self._ask(lambda: self._joined_pieces(key, length, length), length / SLOWEST)

    async def _joined_pieces(self, key: str, length: int, most: int) -> bytes | None:
        found: list[bytes] = []
        if not await self._pieces(key, length, most, found.append):
            return None
        return found[0] if len(found) == 1 else b"".join(found)

    async def _text(self, key: str, length: int) -> str | None:
        decode, found = _text_decoder("surrogatepass").decode, list[str]()
        if not await self._pieces(key, length, PIECE, lambda piece: found.append(decode(piece))):
            return None
        found.append(decode(b"", True))
        return "".join(found)

    async def _pieces(self, key: str, length: int, most: int, take: Callable[[bytes], None]) -> bool:
        """Hand over a large value piece by piece. False: it is not there, or no longer."""
        for begin in range(0, length, most):
            end = min(begin + most, length)
            piece = await self._values.call(key, "GETRANGE", key, begin, end - 1, large=True)
            if piece is None or len(piece) != end - begin:  # It has gone, perhaps between two pieces.
                return False
            take(piece)
        return True

    async def drop(self, keys: Sequence[str]) -> None:
        """Drop values that lie on one server. Raises BrokerUnavailable."""
        if keys:
            await self._ask(lambda: self._calls.call(keys[0], "UNLINK", *keys))

    async def pop(self, key: str) -> bytes | None:
        """Wait for the first element of a list; None when there was none for a while. Raises BrokerUnavailable."""
        return await self._together(self._pops, self._pop, key).wait(key, None)

    async def stream(self, key: str, after: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Wait for entries of a stream after an id; empty when none came for a while. Raises BrokerUnavailable."""
        found = await self._together(self._streams, self._read_streams, key).wait(key, after)
        return [(id, dict(zip(flat[::2], flat[1::2], strict=True))) for id, flat in found or ()]

    def _together(
        self,
        reads: dict[str, BlockingReads[P, T]],
        read: Callable[[Mapping[str, P], float], Awaitable[Mapping[str, T]]],
        key: str,
    ) -> BlockingReads[P, T]:
        """Reads that a key's goes together with: all, or in a cluster those of keys with the same tag."""
        tag = self._tag(key)
        if (found := reads.get(tag)) is None:
            found = reads[tag] = BlockingReads(read, lambda: self._block)
        return found

    def _tag(self, key: str) -> str:
        """Part of a key that keys of one command must have in common: their tag in a cluster, else nothing."""
        return key[: key.index("}")] if self.clustered else ""

    async def _pop(self, keys: Mapping[str, None], wait: float) -> Mapping[str, bytes]:
        seconds = 0 if math.isinf(wait) else wait
        found = await self._ask(lambda: self._reads.call(next(iter(keys)), "BLPOP", *keys, seconds), wait)
        return {} if found is None else {found[0].decode(): found[1]}

    async def _read_streams(self, keys: Mapping[str, bytes], wait: float) -> Mapping[str, list[Any]]:
        block = 0 if math.isinf(wait) else math.ceil(wait * 1000)
        command = "XREAD", "BLOCK", block, "STREAMS", *keys, *keys.values()
        found = await self._ask(lambda: self._reads.call(next(iter(keys)), *command), wait)
        return {key.decode(): entries for key, entries in found or ()}

    async def entries(self, key: str, start: bytes, count: int, last: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """First entries of a stream from an id on up to the `last`, at most `count`. Raises BrokerUnavailable."""
        found = await self._ask(lambda: self._calls.call(key, "XRANGE", key, start, last, "COUNT", count))
        return [(id, dict(zip(flat[::2], flat[1::2], strict=True))) for id, flat in found]

    @property
    def _clients(self) -> Sequence[Client]:
        return self._calls, self._claims, self._reads, self._values

    @property
    def clustered(self) -> bool:
        """Whether keys lie on several servers, so that a step cannot use any two of them."""
        return self._calls.mode == "cluster"

    @property
    def memory_pressure(self) -> bool:
        """Whether the server's memory was nearly full at the last look, at most about a second ago."""
        self.look_soon()
        return self._scarce

    def look_soon(self) -> None:
        """Read the server's memory use and eviction policy, unless that was done within a second."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._memory_at > MEMORY_AGE and (self._looking is None or self._looking.done()):
            self._memory_at = loop.time()
            self._looking = loop.create_task(self._look_at_memory())

    async def is_scarce(self) -> bool:
        """Whether the server's memory is nearly full. An old shortage is looked at anew, rather than believed."""
        stale = self._scarce and asyncio.get_running_loop().time() - self._memory_at > 2 * MEMORY_AGE
        if not (self.memory_pressure and stale) or self._looking is None:
            return self._scarce
        await asyncio.wait({self._looking})
        return self._scarce

    async def takes_reads_only(self) -> bool:
        """Return whether every server answers a read, while writes get no answer or are turned away for want of a primary.

        That is how servers look while their writes are paused and a replica takes over. One that is gone, or stands still,
        answers no read, and one that refuses writes for another reason says so. For as long as two calls may take after a
        server was found not to be the primary, reads may fail, too: connections are closed by several hands then, and
        the new primary may be slow at first.
        """
        for pause in (READ_AGAIN, 0.0):  # Connections to a server that another one replaces are closed.
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
        return asyncio.get_running_loop().time() - self._calls.left_at < 2 * self._timeout

    async def _look_at_memory(self) -> None:
        with contextlib.suppress(BrokerUnavailable):
            nodes = await self._ask(lambda: self._calls.everywhere("INFO", "memory"))
            scarce = any(node.get("maxmemory") and node["used_memory"] > SCARCE * node["maxmemory"] for node in nodes)
            if scarce and not self._scarce:
                log.warning("the broker's memory is nearly full")
            elif self._scarce and not scarce:
                log.info("the broker's memory has room again")
            self._scarce = scarce
            self._note_policies({str(node.get("maxmemory_policy", KEEPING)) for node in nodes})
            self.servers = len(nodes)
            limits = [int(node.get("maxmemory") or 0) for node in nodes]
            self.memory = sum(int(node["used_memory"]) for node in nodes), sum(limits) if all(limits) else 0
            self.smallest_memory = min((node["maxmemory"] for node in nodes if node.get("maxmemory")), default=0)

    def _note_policies(self, policies: set[str]) -> None:
        """Log when the eviction policy was changed after the start, and when it is right again.

        A start that it keeps from succeeding tells of it itself.
        """
        if not self._fit:
            return
        wrong = ", ".join(sorted(policies - {KEEPING}))
        if wrong and wrong != self._evicts:
            hint = f"CONFIG SET maxmemory-policy {KEEPING}"
            log.error(
                "the broker may throw away requests that wait: its eviction policy was changed", policy=wrong, hint=hint
            )
        elif self._evicts and not wrong:
            log.info("the broker's eviction policy is right again", policy=KEEPING)
        self._evicts = wrong

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
        raise BrokerUnavailable(f"the broker at {self._shown} loses its functions again and again")

    async def _load(self, client: Client, key: str, known: Mapping[str, int]) -> None:
        """Load the library into the server that has `key`, after a restart or a flush.

        Of many calls that miss it, one does so.
        """
        async with self._loading:
            server = client.server_of(key)
            if self._loads.get(server, 0) == known.get(server, 0):
                await client.call(key, "FUNCTION", "LOAD", "REPLACE", self._source)
                self._loads[server] = self._loads.get(server, 0) + 1
                log.info("the broker has got its functions again")

    async def _ask(self, act: Callable[[], Awaitable[T]], wait: float = 0.0) -> T:
        """Answer to `act`, which may wait for `wait` seconds and then take as long as any other call."""
        if self._closed:
            raise BrokerUnavailable("the connection to the broker is closed")
        if self._unfit:
            raise BrokerUnavailable(self._unfit)
        bound, began = wait + self._timeout, monotonic()
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
        """Count a call that was not answered; its error in Headway's words."""
        self._counters.call_failures += 1
        self._refused = isinstance(exc, ResponseError)
        return _told(exc, self._shown)

    def _check_server(self, info: Mapping[str, Any]) -> None:
        version = str(info.get("redis_version", ""))
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is not None and (int(found[1]), int(found[2])) < OLDEST:
            reason = f"is version {version}, which has no functions"
            raise SettingError("broker", self._shown, reason, "Use Redis 7.0 or later, or Valkey.")
        mode = str(info.get("redis_mode") or info.get("server_mode"))  # Redis and Valkey
        if self._calls.mode == "standalone" and mode in ("cluster", "sentinel"):
            reason = "is a node of a cluster" if mode == "cluster" else "is a Sentinel"
            hint = f"Begin the URL with redis+{mode}:// or rediss+{mode}://."
            raise SettingError("broker", self._shown, reason, hint)

    async def _see_policy(self) -> None:
        try:
            found = await self._ask(lambda: self._calls.everywhere("CONFIG GET", "maxmemory-policy"))
        except RefusedCommand as exc:
            log.warning("the server's eviction policy cannot be seen; it must be noeviction", error=str(exc))
            return
        for policy in (value for one in found for value in one.values()):
            if policy not in (KEEPING, KEEPING.encode()):
                name = policy.decode() if isinstance(policy, bytes) else policy
                reason = f"has maxmemory-policy {name}: under pressure it would throw away requests that wait"
                hint = "Set it on the server: CONFIG SET maxmemory-policy noeviction, and in its configuration file."
                raise SettingError("broker", self._shown, reason, hint)

    async def _try_library(self) -> None:
        """Load the library, and call it. A user without the right to load finds it there, or fails in the call."""
        with contextlib.suppress(RefusedCommand):
            await self._ask(lambda: self._calls.everywhere("FUNCTION LOAD", "REPLACE", self._source))
        await self.call("leave", f"{self.prefix}:{{fleet}}:", self.clock_text(), "")


class RefusedCommand(BrokerUnavailable):
    """The server does not allow a command to this user."""


class Unfit(BrokerUnavailable):
    """The server answers, and is not one that can be used.

    Arguments:
        said: what it said.
        reason, hint: see SettingError.
    """

    def __init__(self, said: str, reason: str, hint: str) -> None:
        super().__init__(said)
        self.reason, self.hint = reason, hint


class Overdue(BrokerUnavailable):
    """The server got to the call after the instant until which its caller waits, and did nothing.

    Arguments:
        now: the server's instant.
    """

    def __init__(self, now: float) -> None:
        super().__init__(f"the broker got to a call too late, at instant {now:.3f} of its clock")
        self.now = now


class OutOfMemory(BrokerUnavailable):
    """The server has no room for new keys. The call changed nothing."""


def _fault(text: str) -> BrokerUnavailable:
    """Error of one of several calls that were made as one, from its text."""
    overdue = OVERDUE.search(text)
    return Overdue(float(overdue[1])) if overdue else BrokerUnavailable(f"the broker answers: {text}")


def _told(exc: BaseException, shown: str) -> BrokerUnavailable:
    """Error of redis-py in Headway's words. The cause that it wraps may say most."""
    said = f"the broker at {shown} {'answers' if isinstance(exc, ResponseError | Deposed) else 'does not answer'}: {_text(exc)}"
    cause: BaseException | None = exc
    while cause is not None:
        text = str(cause)
        if isinstance(cause, AuthenticationError | NoPermissionError) or "unknown command" in text:
            return RefusedCommand(text)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Unfit(said, f"is not trusted: {said.rstrip('.')}", _TRUST)
        if "cluster support disabled" in text:
            return Unfit(said, "is no cluster", "Begin the URL with redis:// or rediss://.")
        if "DB index is out of range" in text:
            return Unfit(said, "names a database that the server does not have", _DATABASE)
        cause = cause.__cause__ or cause.__context__
    return BrokerUnavailable(said)


def _text(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__
