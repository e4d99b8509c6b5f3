"""The stand of the Redis broker's tests: processes of one fleet, in real time or on virtual time."""

import asyncio
import itertools
import math
import random
import selectors
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import pytest

from headway.brokers.redis import connection as links
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.clients import Cluster
from headway.brokers.redis.connection import RedisConnection
from headway.core.queue_limits import QueueLimits
from headway.core.retention import KeptLimits
from headway.errors import BrokerUnavailable
from headway.model import Reply, Value
from headway.runtime.counters import BrokerCounts
from tests.contracts.brokers import KEPT_LIMITS, LIMITS, MODELS, KnownServer, RedisHarness, answered, ask, output, slot
from tests.e2e.client import PATIENCE
from tests.servers.redis import RunningServer


class Stand(RedisHarness):
    """A fleet of two or more processes on virtual time. Its server is otherwise empty, and tests can look into it."""

    def __init__(self, server: RunningServer, shards: int = 1, apart_from: float = math.inf) -> None:
        self.clock_error = 0.0
        super().__init__(server, shards, apart_from=apart_from)
        self.server = server
        self.shards = shards
        for link in self._links:
            link._clock = self.now

    def now(self) -> float:
        """The server's clock, which a test may change."""
        return super().now() + self.clock_error

    async def another(
        self, shards: int | None = None, kept: KeptLimits = KEPT_LIMITS, served: Sequence[str] = MODELS
    ) -> RedisBroker:
        """Start another process. It may know fewer shards or models, or have budgets of its own."""
        link = KnownServer(self.server.url, timeout=math.inf, clock=self.now)
        self._links.append(link)
        await link.open()
        models = dict.fromkeys(served, LIMITS)
        rng, shards = random.Random(9).random, shards or self.shards
        broker = RedisBroker(link, models, BrokerCounts(), rng, shards, self.lease_seconds, kept)
        self._brokers.append(broker)
        return broker

    def key(self, name: str, shard: int = 0, model: str = "m") -> str:
        return f"headway:{{{model}:{shard}}}:{name}"

    @contextmanager
    def losing(self, function: str) -> Iterator[None]:
        """Execute the first process's calls of a library function, but lose the answers; of claims, only the leases."""
        link, way = self._links[0], "claim" if function == "claim" else "call"
        ask = getattr(link, way)

        async def deaf(name: str, key: str, *arguments: Any) -> Any:
            answer = await ask(name, key, *arguments)
            if name == function and (way == "call" or answer[0] == b"lease"):
                raise BrokerUnavailable("the answer is lost")
            return answer

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(link, way, deaf)
            yield

    @contextmanager
    def overtaken(self, function: str) -> Iterator[asyncio.Event]:
        """Hold the first process's calls of a library function back until the event is set."""
        link, arrives = self._links[0], asyncio.Event()
        ask = link.call

        async def late(name: str, key: str, *arguments: Any) -> Any:
            if name == function:
                await arrives.wait()
            return await ask(name, key, *arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(link, "call", late)
            yield arrives

    async def acknowledged(self, gateway: str = "g") -> int:
        """Read and acknowledge all replies for a gateway, until no more come. Returns their number."""
        cursor = 0
        while True:
            reading = asyncio.create_task(self.broker.replies(gateway, cursor))
            await self.advance(1.0)
            if not reading.done():
                reading.cancel()
                return cursor
            _, cursor = await reading

    def keys(self, model: str = "m", shard: int = 0) -> set[str]:
        prefix = self.key("", shard, model)
        return {key.decode().removeprefix(prefix) for key in self.server.command("KEYS", f"{prefix}*")}

    def held(self, model: str = "m") -> list[int]:
        return [self.server.command("HLEN", self.key("p", shard, model)) for shard in range(self.shards)]

    def idle(self, shard: int = 0) -> int:
        found: int = self.server.command("ZCARD", self.key("i", shard))
        return found

    def at_home(self) -> list[set[str]]:
        lists = [self.server.command("ZRANGE", self.key("h", shard), 0, -1) for shard in range(self.shards)]
        return [{name.decode() for name in names} for names in lists]


TIMEOUT = 0.4
"""Longest time for a call to a server that is silent on purpose, in real seconds."""
GRACE = 2.0
"""Seconds of running time by which this process may notice a timeout late."""
TICK = 0.02
"""Longest time that a pause of the process counts for."""

T = TypeVar("T")


@asynccontextmanager
async def opened(
    url: str, timeout: float = PATIENCE, clock: Callable[[], float] | None = None
) -> AsyncIterator[RedisConnection]:
    link = RedisConnection(url, timeout=timeout, clock=clock)
    try:
        await link.open()
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def brokers(
    url: str,
    count: int = 1,
    shards: int = 1,
    clock: Callable[[], float] | None = None,
    models: Mapping[str, QueueLimits] | None = None,
) -> AsyncIterator[list[RedisBroker]]:
    """Processes of one fleet on a server, with timeouts long enough for a slow machine; see `hasty`."""
    rng = random.Random(7)
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            link = RedisConnection(url, timeout=PATIENCE, clock=clock)
            link.reads.block = links.BLOCK
            stack.push_async_callback(link.close)
            await link.open()
            made.append(RedisBroker(link, models or {"m": LIMITS}, BrokerCounts(), rng.random, shards))
            stack.push_async_callback(made[-1].close)
        yield made


@contextmanager
def hasty(broker: RedisBroker) -> Iterator[None]:
    """Limit calls made here to TIMEOUT, for a server that is silent on purpose."""
    link = broker._connection
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(link, "timeout", TIMEOUT)
        for client in (link._calls, link._claims, link.reads._client):
            if isinstance(client, Cluster):
                patched.setattr(client, "_call_timeout", TIMEOUT / 4)
        yield


class Steady:
    """A clock for servers that hardly advances while this machine stalls, so nothing expires because of that."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._looked_at = time.monotonic()

    def __call__(self) -> float:
        before, self._looked_at = self._looked_at, time.monotonic()
        self._now += min(self._looked_at - before, 0.002)
        return self._now

    def skip(self, seconds: float) -> None:
        self._now += seconds


async def heard(broker: RedisBroker, gateway: str, count: int) -> dict[str, Value | None]:
    """Outputs of the next `count` replies for a gateway, by id. Checks that each comes once."""
    found: dict[str, Value | None] = {}
    cursor = 0
    while len(found) < count:
        replies, cursor = await until(lambda after=cursor: broker.replies(gateway, after))  # type: ignore[misc]
        more = {reply.id: reply.output for reply in replies}
        assert not found.keys() & more.keys()
        found |= more
    return found


async def served(url: str) -> None:
    """Check that a request goes all the way, and that its answer comes over a blocking read."""
    entry = ask(gateway=f"gateway of {next(_numbers)}")
    async with brokers(url) as [broker]:
        reading = asyncio.create_task(_read(broker, entry.gateway))
        assert await broker.enqueue([entry]) == [None]
        await answered(broker, slot())
        [reply] = await reading
        assert (reply.id, reply.output) == (entry.id, output(entry.input))


async def _read(broker: RedisBroker, gateway: str) -> Sequence[Reply]:
    replies, cursor = await broker.replies(gateway, 0)
    assert cursor == len(replies)
    return replies


_numbers = itertools.count()


def run(act: Coroutine[Any, Any, None]) -> None:
    """Run a test in real time until its last connection is closed. Over TLS the server closes last, and breaking a
    connection off doesn't wait for that."""
    selector = selectors.DefaultSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        try:
            runner.run(act)
        finally:
            runner.run(_hung_up(selector))


async def _hung_up(selector: selectors.BaseSelector) -> None:
    for _ in range(int(PATIENCE / 0.001)):
        if len(selector.get_map()) == 1:  # The loop's own.
            return
        await asyncio.sleep(0.001)


async def refused(call: Awaitable[Any], timeout: float = TIMEOUT) -> BrokerUnavailable:
    """Check that a call fails within its timeout. Returns the error."""
    asked = asyncio.ensure_future(call)
    for _ in range(round((timeout + GRACE) / TICK)):
        await asyncio.wait([asked], timeout=TICK)
        if asked.done():
            break
    else:
        asked.cancel()
        raise AssertionError("it takes longer than it may")
    with pytest.raises(BrokerUnavailable) as caught:
        await asked
    return caught.value


async def until(act: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call while the broker is unreachable. Returns the first answer."""
    async with asyncio.timeout(2 * PATIENCE):
        while True:
            try:
                return await act()
            except BrokerUnavailable:
                await asyncio.sleep(0.01)
