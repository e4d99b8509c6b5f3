"""The calls and bytecodes that a typical request over Redis may cost at a gateway and a worker (tests/http/budget.toml).
The counts include the broker's connections, but not C code. No server is needed: see `redis_peer`.
"""

import asyncio
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import pytest
import uvloop

import tests
from headway.brokers.redis.broker import RedisBroker
from headway.brokers.redis.connection import RedisConnection
from headway.config import Settings
from headway.core import policies
from headway.core.queue_limits import QueueLimits
from headway.gateway.gateway import Gateway
from headway.model import Limit, Principal, Reply, RequestOptions, Slot
from headway.runtime.counters import BrokerCounts, GatewayCounts, WorkerCounts
from headway.runtime.request_id import new_id
from headway.runtime.supervisor import Supervisor
from tests.contracts.brokers import ask
from tests.http.test_budget import BUDGET, Counts, enough, within
from tests.services.fake_backend import FakeBackend
from tests.services.redis_peer import Peer
from tests.services.site import make_batcher

BATCH, GATHERED = 32, 8
ROUNDS = 5
PATIENCE = 20.0
"""Seconds that a round may take. On a busy machine a request may be late for its deadline, which is of common length."""
LIMITS = QueueLimits(tiers=3, max_batch=64)
HERE = str(Path(tests.__file__).parent)
Round = Callable[[], Awaitable[None]]


class Sink:
    def __init__(self) -> None:
        self.count = 0

    def answer(self, reply: Reply) -> None:
        assert reply.output == "HELLO WORLD"
        self.count += 1

    def admitted(self) -> None: ...


@asynccontextmanager
async def over(peer: Peer) -> AsyncIterator[RedisBroker]:
    connection = RedisConnection(peer.url)
    await connection.open()
    broker = RedisBroker(connection, {"m": LIMITS}, BrokerCounts(), lambda: 0.5)
    try:
        yield broker
    finally:
        await broker.close()
        await connection.close()


@types.coroutine
def turn() -> Generator[None, None, None]:
    yield


async def until(reached: Callable[[], bool]) -> None:
    """Poll until `reached` is true. The peer runs in another thread."""
    end = monotonic() + PATIENCE
    while not reached():
        assert monotonic() < end, "a request was late, and does not come any more"
        await turn()


@asynccontextmanager
async def gateway(peer: Peer) -> AsyncIterator[Round]:
    """Send requests through a gateway: BATCH of them per batch, and GATHERED per call."""
    async with over(peer) as broker:
        made, sink, supervisor = Gateway(Settings(), ["m"], broker, GatewayCounts(), monotonic), Sink(), Supervisor()
        made.start(supervisor)
        limits = (Limit("k", "user", 60_000.0, 10_000.0),)
        lane = made.lane(Principal("ada", "acme", 0, limits), RequestOptions(4.0), None)

        async def round_() -> None:
            sink.count = 0
            for count in range(GATHERED, BATCH + 1, GATHERED):
                for _ in range(GATHERED):
                    made.enter(sink, lane, new_id(), "hello world", b"")
                await until(lambda: peer.waiting == count)  # noqa: B023 - it is awaited within the iteration
            peer.answer(str.upper)
            await until(lambda: sink.count == BATCH)

        yield round_
        await supervisor.stop()


@asynccontextmanager
async def worker(peer: Peer) -> AsyncIterator[Round]:
    """Run batches on a slot. It is woken, claims, runs and completes one, and claims again without result."""
    async with over(peer) as broker:
        backend, supervisor = FakeBackend(0.0), Supervisor()
        slot, policy = Slot("gpu-0", "m", 64), policies.build("paced", None)
        batcher = make_batcher(slot, lambda: backend, broker, WorkerCounts(), monotonic, policy, gpu_timeout=5.0)
        await batcher.start()
        batcher.run(supervisor)
        await until(lambda: peer.blocked)

        async def round_() -> None:
            peer.put([ask("hello world") for _ in range(BATCH)])
            claims = peer.calls["claim"]
            peer.depart("gpu-0")
            await until(lambda: peer.calls["claim"] >= claims + 2 and batcher._pausing is not None)

        yield round_
        batcher.wind_down()
        await supervisor.stop()


SIDES = {"redis gateway": gateway, "redis worker": worker}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="each version of Python has bytecodes of its own")
@pytest.mark.skipif(sys.gettrace() is not None, reason="something else traces")
@pytest.mark.parametrize("kind", SIDES)
def test_a_request_over_redis_costs_no_more_than_its_budget(kind: str) -> None:
    async def main(peer: Peer) -> None:
        async with SIDES[kind](peer) as round_:
            for _ in range(3):
                await round_()
            rounds = list[Counts]()
            # On a busy machine, the peer's answers may come in more pieces.
            while not enough(BUDGET[kind], rounds, BATCH, ROUNDS):
                with Counts(lambda path: not path.startswith(HERE)) as counts:
                    await round_()
                rounds.append(counts)
        within(BUDGET[kind], rounds, BATCH)

    with Peer() as peer, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(peer))
