"""Connection to Redis or Valkey: calls of the function library, blocking reads, and their errors.

A call that isn't answered in time raises BrokerUnavailable, and may have been done. It is tried only once, because only its
caller knows whether a repetition is safe. Calls, claims, large values and blocking reads use separate connections, so none of
them waits for another kind. A few connections per server are enough, because a server does one step after the other.
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
from typing import Any, Generic, TypeVar

from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError, ResponseError

from headway.brokers.redis import function_library
from headway.brokers.redis.clients import check_files, connect
from headway.brokers.redis.link import Client, Deposed
from headway.brokers.redis.together import Together
from headway.config import shown_url
from headway.errors import BrokerUnavailable, SettingError
from headway.runtime.counters import BrokerCounts
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)

BOUNDS = 8, 8, None, 8
"""Maximum number of connections to one server for calls, claims, blocking reads and large values."""
BLOCK = 2.0  # Longest blocking read in seconds. Without an answer by then, the connection is dead.
OLDEST = (7, 0)  # Oldest server version that has functions.
READ_WITHIN = 0.5  # Seconds within which a running server answers a read.
READ_AGAIN = 0.1  # Seconds before a read is repeated after its connection was closed.
MEMORY_AGE = 1.0  # Seconds for which a measured memory use is trusted.
SCARCE = 0.8  # Share of `maxmemory` above which no new entry is admitted.
KEEPING = "noeviction"  # Eviction policy that throws no waiting entry away.
SLOWEST = 10_000_000
"""Lowest speed in bytes per second at which a server moves large values. It lengthens the timeouts of such calls."""
PIECE = 1 << 19
"""Bytes of a large value per answer. An answer blocks Redis for 0.1 ms at this size, and for 6 ms at 8 MB."""
LOADS = 3  # Maximum number of times that a call loads the library into a server that keeps losing it.
NEEDED = "+@read +@write -@dangerous +fcall +function|load +time +info +config|get"
"""Rights that a user needs, as in ACL SETUSER. A cluster also needs `+cluster|slots`."""
MISSING = "Function not found"
TROUBLE = (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError)
"""Exceptions that redis-py raises without an answer."""
OVERDUE = re.compile(r"OVERDUE ([0-9.e+]+)")
"""Library's error for a call whose caller has stopped waiting. It contains the server's instant."""
CLOSED = "the handler is closed"  # Text of uvloop's RuntimeError for a write to a connection that was just reset.

_TRUST = "Name the host as its certificate does; rediss://HOST:PORT/0?ssl_ca_certs=FILE names an authority to trust."
_DATABASE = "Name a lower one, as in redis://HOST:PORT/0, or raise `databases` in the server's configuration file."
_text_decoder = codecs.getincrementaldecoder("utf-8")
T = TypeVar("T")
P = TypeVar("P")


class RedisConnection:
    """Connection of one process to the server. Raises SettingError if a file that the URL names can't be used.

    All keys begin with `prefix`. `process` is a name that is unique in the fleet. Tests replace the server's clock by `clock`.

    Attributes:
        timeout: maximum seconds for a call.
        smallest_memory: smallest `maxmemory` of all servers in bytes, or 0 if unlimited or unknown.
        memory: bytes in use and `maxmemory` of all servers together, when last measured. The latter is 0 if any is unlimited.
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
        self._block = math.inf if clock is not None else BLOCK
        self._source = function_library.source()
        self._calls, self._claims, self._reads, self._values = connect(url, timeout, BOUNDS)
        self._pops: dict[str, BlockingReads[None, bytes]] = {}
        self._streams: dict[str, BlockingReads[bytes, list[Any]]] = {}
        self._joined = Together(self, self._tag, _fault)
        self._loading = asyncio.Lock()
        self._loads: dict[str, int] = {}
        self._scarce = False
        self._fit = False  # Until a check finds the server usable.
        self._evicts = ""  # Harmful eviction policies at the last look.
        self.servers, self.smallest_memory = 1, 0
        self.memory = 0, 0
        self._memory_at = -math.inf
        self._looking: asyncio.Task[None] | None = None
        self._closed = False
        self._refused = False  # True if the last failed call was answered with an error.
        self._unfit = ""

    def clock_text(self) -> str:
        """Return the functions' clock argument, which is empty for the server's own clock."""
        return "" if self._clock is None else repr(self._clock())

    async def open(self) -> None:
        """Connect, and check that the server can be used. If it can't, every later call fails. Raises SettingError if the server
        is too old, evicts waiting entries, refuses this user, or isn't trusted, and BrokerUnavailable if it isn't there."""
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
                raise SettingError("broker", self._shown, "is not a Sentinel", hint) from exc
            hint = (
                "Put user and password into the URL, redis://USER:PASSWORD@HOST:PORT/0. "
                f"That user needs, as in ACL SETUSER: ~{self.prefix}:* {NEEDED}; in a cluster +cluster|slots, too."
            )
            raise SettingError("broker", self._shown, f"refuses this user: {str(exc).rstrip('.')}", hint) from exc
        except Unfit as exc:
            raise SettingError("broker", self._shown, exc.reason, exc.hint) from exc

    async def renew(self) -> None:
        """Connect again with the present content of the URL's files. After a SettingError the connections are as before."""
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
        """Run a function of the library on the keys that begin with `key`."""
        return await self._ask(lambda: self._run(self._calls, function, key, arguments))

    async def join(self, function: str, key: str, *arguments: Any) -> Any:
        """Run a function like `call`, but batched with other calls (see `together`). The library must register it as joinable."""
        return await self._joined.join(function, key, *arguments)

    async def share(self, function: str, key: str, *arguments: Any) -> Any:
        """Run a read-only function like `join`. Concurrent calls that differ only in their last argument share one answer."""
        return await self._joined.share(function, key, *arguments)

    async def claim(self, function: str, key: str, *arguments: Any) -> Any:
        return await self._ask(lambda: self._run(self._claims, function, key, arguments))

    async def store(self, key: str, value: bytes | str, seconds: int) -> None:
        """Store a large value that expires after some seconds. Raises OutOfMemory."""
        wait = len(value) / SLOWEST
        await self._ask(lambda: self._values.call(key, "SET", key, value, "EX", seconds, large=True), wait)

    async def fetch(self, key: str, length: int) -> bytes | None:
        """Read a large value of known length in pieces, so its key must never get another value. None if it doesn't exist."""
        return await self._ask(lambda: self._joined_pieces(key, length, PIECE), length / SLOWEST)

    async def fetch_text(self, key: str, length: int) -> str | None:
        """Read a large text of known length in bytes like `fetch`, and decode each piece as it arrives."""
        return await self._ask(lambda: self._text(key, length), length / SLOWEST)

    async def fetch_whole(self, key: str, length: int) -> bytes | None:
        """Read a large value like `fetch`, but in one piece, because its key may get another value."""
        return await self._ask(lambda: self._joined_pieces(key, length, length), length / SLOWEST)

    async def _joined_pieces(self, key: str, length: int, most: int) -> bytes | None:
        pieces: list[bytes] = []
        if not await self._pieces(key, length, most, pieces.append):
            return None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _text(self, key: str, length: int) -> str | None:
        decode, pieces = _text_decoder("surrogatepass").decode, list[str]()
        if not await self._pieces(key, length, PIECE, lambda piece: pieces.append(decode(piece))):
            return None
        pieces.append(decode(b"", True))
        return "".join(pieces)

    async def _pieces(self, key: str, length: int, most: int, take: Callable[[bytes], None]) -> bool:
        """Hand over a large value piece by piece. Returns False if the value doesn't exist, or vanishes between two pieces."""
        for begin in range(0, length, most):
            end = min(begin + most, length)
            piece = await self._values.call(key, "GETRANGE", key, begin, end - 1, large=True)
            if piece is None or len(piece) != end - begin:
                return False
            take(piece)
        return True

    async def drop(self, keys: Sequence[str]) -> None:
        """Drop values that are on the same server."""
        if keys:
            await self._ask(lambda: self._calls.call(keys[0], "UNLINK", *keys))

    async def pop(self, key: str) -> bytes | None:
        """Wait for the first element of a list, or return None after BLOCK seconds."""
        return await self._together(self._pops, self._pop, key).wait(key, None)

    async def stream(self, key: str, after: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Wait for stream entries after an id, or return none after BLOCK seconds."""
        entries = await self._together(self._streams, self._read_streams, key).wait(key, after)
        return [(id, dict(zip(flat[::2], flat[1::2], strict=True))) for id, flat in entries or ()]

    def _together(
        self,
        reads: dict[str, BlockingReads[P, T]],
        read: Callable[[Mapping[str, P], float], Awaitable[Mapping[str, T]]],
        key: str,
    ) -> BlockingReads[P, T]:
        """Return the blocking reads that one command makes together with the read of `key`."""
        tag = self._tag(key)
        if (shared := reads.get(tag)) is None:
            shared = reads[tag] = BlockingReads(read, lambda: self._block)
        return shared

    def _tag(self, key: str) -> str:
        """Return the part that all keys of a command must share. It is the hash tag in a cluster, and empty elsewhere."""
        return key[: key.index("}")] if self.clustered else ""

    async def _pop(self, keys: Mapping[str, None], wait: float) -> Mapping[str, bytes]:
        seconds = 0 if math.isinf(wait) else wait
        element = await self._ask(lambda: self._reads.call(next(iter(keys)), "BLPOP", *keys, seconds), wait)
        return {} if element is None else {element[0].decode(): element[1]}

    async def _read_streams(self, keys: Mapping[str, bytes], wait: float) -> Mapping[str, list[Any]]:
        block = 0 if math.isinf(wait) else math.ceil(wait * 1000)
        command = "XREAD", "BLOCK", block, "STREAMS", *keys, *keys.values()
        streams = await self._ask(lambda: self._reads.call(next(iter(keys)), *command), wait)
        return {key.decode(): entries for key, entries in streams or ()}

    async def entries(self, key: str, start: bytes, count: int, last: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return the first `count` stream entries from id `start` to id `last`."""
        entries = await self._ask(lambda: self._calls.call(key, "XRANGE", key, start, last, "COUNT", count))
        return [(id, dict(zip(flat[::2], flat[1::2], strict=True))) for id, flat in entries]

    @property
    def _clients(self) -> Sequence[Client]:
        return self._calls, self._claims, self._reads, self._values

    @property
    def clustered(self) -> bool:
        """True if keys lie on several servers, so a step can't use just any two keys."""
        return self._calls.mode == "cluster"

    @property
    def memory_pressure(self) -> bool:
        """True if the server's memory was nearly full about a second ago."""
        self.look_soon()
        return self._scarce

    def look_soon(self) -> None:
        """Read the server's memory use and eviction policy, unless that was done within a second."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._memory_at > MEMORY_AGE and (self._looking is None or self._looking.done()):
            self._memory_at = loop.time()
            self._looking = loop.create_task(self._look_at_memory())

    async def is_scarce(self) -> bool:
        """Return True if the server's memory is nearly full. A shortage seen some time ago is checked again."""
        stale = self._scarce and asyncio.get_running_loop().time() - self._memory_at > 2 * MEMORY_AGE
        if not (self.memory_pressure and stale) or self._looking is None:
            return self._scarce
        await asyncio.wait({self._looking})
        return self._scarce

    async def takes_reads_only(self) -> bool:
        """Return True if every server answers reads while writes get no answer, or are refused for lack of a primary.

        Servers behave like that while writes are paused and a replica takes over. For the time of two calls after a server turned
        out not to be the primary, reads may fail too: connections are closed then, and the new primary may be slow at first.
        """
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
        """Log a harmful change of the eviction policy, and its repair. `open` reports a policy that is wrong from the start."""
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
        raise BrokerUnavailable(f"the broker at {self._shown} keeps losing its functions")

    async def _load(self, client: Client, key: str, known: Mapping[str, int]) -> None:
        """Load the library into the server of `key` after a restart or a flush. Only one of the calls that miss it does so."""
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
            reason = f"is version {version}, which has no functions"
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
            log.warning("the server's eviction policy cannot be seen; it must be noeviction", error=str(exc))
            return
        for policy in (value for setting in settings for value in setting.values()):
            if policy not in (KEEPING, KEEPING.encode()):
                name = policy.decode() if isinstance(policy, bytes) else policy
                reason = f"has maxmemory-policy {name}: under pressure it would throw away requests that wait"
                hint = "Set it on the server: CONFIG SET maxmemory-policy noeviction, and in its configuration file."
                raise SettingError("broker", self._shown, reason, hint)

    async def _try_library(self) -> None:
        """Load the library and call it. A user who may not load the library can use one that is there, as the call shows."""
        with contextlib.suppress(RefusedCommand):
            await self._ask(lambda: self._calls.everywhere("FUNCTION LOAD", "REPLACE", self._source))
        await self.call("leave", f"{self.prefix}:{{fleet}}:", self.clock_text(), "")


class RefusedCommand(BrokerUnavailable):
    """The server doesn't allow this user to run a command."""


class Unfit(BrokerUnavailable):
    """The server answers `said`, and can't be used. `reason` and `hint` are meant for a SettingError."""

    def __init__(self, said: str, reason: str, hint: str) -> None:
        super().__init__(said)
        self.reason, self.hint = reason, hint


class Overdue(BrokerUnavailable):
    """The server got to the call at its instant `now`, after the caller had stopped waiting, and did nothing."""

    def __init__(self, now: float) -> None:
        super().__init__(f"the broker got to a call too late, at instant {now:.3f} of its clock")
        self.now = now


class OutOfMemory(BrokerUnavailable):
    """The server has no room for new keys. The call changed nothing."""


def _fault(text: str) -> BrokerUnavailable:
    overdue = OVERDUE.search(text)
    return Overdue(float(overdue[1])) if overdue else BrokerUnavailable(f"the broker answers: {text}")


def _translated(exc: BaseException, shown: str) -> BrokerUnavailable:
    """Turn an error of redis-py into Headway's. A wrapped cause may say more than the error itself."""
    said = f"the broker at {shown} {'answers' if isinstance(exc, ResponseError | Deposed) else 'does not answer'}: {_text(exc)}"
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
            return Unfit(said, "names a database that the server does not have", _DATABASE)
        cause = cause.__cause__ or cause.__context__
    return BrokerUnavailable(said)


def _text(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__


LEAST = 0.001  # Minimum length of a read in seconds, because 0 means for ever.
FEW = 2  # Number of reads under way from which new keys gather.
GATHERED = 0.02  # Seconds for which new keys gather. Their data waits in the server meanwhile.


class _Waiting(Generic[P, T]):
    """Wait for a key from a position on."""

    __slots__ = ("place", "read", "result")

    def __init__(self, place: P) -> None:
        self.place = place
        self.result: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self.read = False  # True if a read under way includes the key.


class BlockingReads(Generic[P, T]):
    """Blocking reads of keys that one command may name together.

    Arguments:
        read: reads keys, each from its position on, for at most some seconds. Returns results by key.
        block: returns the seconds after which a wait ends without a result, which may be infinite.
    """

    def __init__(
        self, read: Callable[[Mapping[str, P], float], Awaitable[Mapping[str, T]]], block: Callable[[], float]
    ) -> None:
        self._read, self._block = read, block
        self._waiting: dict[str, _Waiting[P, T]] = {}
        self._reading: dict[asyncio.Task[None], Mapping[str, _Waiting[P, T]]] = {}
        self._until = 0.0  # Instant at which all reads end.
        self._known: set[str] = set()  # Recently read keys. Other keys gather first.
        self._begins: asyncio.Handle | None = None

    async def wait(self, key: str, place: P) -> T | None:
        """Wait for data at a key, with one caller per key. Return None if the read ends without any. Raises BrokerUnavailable."""
        waiting = self._waiting[key] = _Waiting[P, T](place)
        self._begin_soon(GATHERED if len(self._reading) >= FEW and key not in self._known else 0.0)
        try:
            return await waiting.result
        finally:
            if self._waiting.get(key) is waiting:
                del self._waiting[key]
                self._cancel_idle()

    def _cancel_idle(self) -> None:
        for task, keys in self._reading.items():
            if not any(self._waiting.get(key) is waiting for key, waiting in keys.items()):
                task.cancel()

    def _begin_soon(self, wait: float = 0.0) -> None:
        """Begin a read in `wait` seconds. At 0 it begins when callers that were just answered wait again."""
        loop = asyncio.get_running_loop()
        if self._begins is None:
            self._begins = loop.call_later(wait, self._begin) if wait else loop.call_soon(self._begin)
        elif not wait and isinstance(self._begins, asyncio.TimerHandle):
            self._begins.cancel()
            self._begins = loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._begins = None
        keys = {key: waiting for key, waiting in self._waiting.items() if not waiting.read}
        loop = asyncio.get_running_loop()
        if not keys:
            return
        if loop.time() >= self._until:
            if self._reading:  # These reads end now, and the last of them begins the next read, with all keys.
                return
            self._until = loop.time() + self._block()
            self._known.clear()
        self._known.update(keys)
        for waiting in keys.values():
            waiting.read = True
        task = loop.create_task(self._read_once(keys))
        self._reading[task] = keys
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        for waiting in self._reading.pop(task).values():
            waiting.read = False
        self._begin_soon()

    async def _read_once(self, keys: Mapping[str, _Waiting[P, T]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            results = await self._read(
                {key: waiting.place for key, waiting in keys.items()}, max(self._until - loop.time(), LEAST)
            )
        except BrokerUnavailable as exc:
            for key, waiting in keys.items():
                if self._is_waited_for(key, waiting):
                    waiting.result.set_exception(exc)
            return
        over = loop.time() >= self._until
        for key, waiting in keys.items():
            if (key in results or over) and self._is_waited_for(key, waiting):
                waiting.result.set_result(results.get(key))

    def _is_waited_for(self, key: str, waiting: _Waiting[P, T]) -> bool:
        return self._waiting.get(key) is waiting and not waiting.result.done()
