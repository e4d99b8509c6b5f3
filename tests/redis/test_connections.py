"""Connections of one process to a server: a few, however many queues there are, and answers in whatever pieces."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import hiredis
import pytest
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import InvalidResponse, ResponseError

from headway.brokers.redis import link
from headway.brokers.redis.blocking import FEW, BlockingReads
from headway.brokers.redis.connection import BOUNDS
from headway.brokers.redis.link import BulkAnswer
from headway.errors import BrokerUnavailable
from headway.model import ItemResult, Lease
from tests.contracts.brokers import AT_ONCE, LIMITS, ask, output, slot
from tests.e2e.client import PATIENCE
from tests.redis.stand import brokers
from tests.servers.redis import RunningServer, SharedServers

MODELS = [f"m{number}" for number in range(30)]
BRIEF = 0.3
"""Seconds of a blocking read here, after which all that is waited for goes into one."""
Clock = Callable[[], float]


async def test_a_gateway_waits_for_all_queues_over_one_connection(servers: SharedServers, kind: str) -> None:
    server = servers.of(kind)
    async with brokers(server.url, models=dict.fromkeys(MODELS, LIMITS)) as [broker]:
        broker._connection._block = BRIEF
        reading = asyncio.ensure_future(broker.replies("g", 0))
        entries = [ask(model=model, gateway="g") for model in MODELS]
        assert await broker.enqueue(entries) == [None] * len(MODELS)
        await blocked(server, 1)
        seen = Counter[str]()
        cursor = 0
        for model in MODELS:
            lease = await broker.claim(slot("gpu-0", model=model), AT_ONCE)
            assert isinstance(lease, Lease)
            await broker.complete(lease, [ItemResult(output(one.input)) for one in lease.entries])
        async with asyncio.timeout(PATIENCE):
            while len(seen) < len(MODELS):
                replies, cursor = await reading
                seen.update(reply.id for reply in replies)
                reading = asyncio.ensure_future(broker.replies("g", cursor))
        reading.cancel()
        assert seen == Counter(entry.id for entry in entries)


async def test_idle_slots_of_all_queues_wait_over_one_connection(servers: SharedServers, kind: str) -> None:
    server = servers.of(kind)
    async with brokers(server.url, models=dict.fromkeys(MODELS, LIMITS)) as [broker]:
        broker._connection._block = BRIEF
        slots = [slot(f"gpu of {model}", model=model) for model in MODELS]
        for one in slots:
            assert not isinstance(await broker.claim(one, AT_ONCE), Lease)
        woken = [asyncio.ensure_future(broker.wait_for_work(one, None)) for one in slots]
        await blocked(server, 1)
        await broker.enqueue([ask(model=model) for model in MODELS])
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*woken)


async def test_calls_of_all_queues_at_once_share_a_few_connections(servers: SharedServers, kind: str) -> None:
    server = servers.of(kind)
    async with brokers(server.url, models=dict.fromkeys(MODELS, LIMITS)) as [broker]:
        await asyncio.gather(*(broker.depths() for _ in range(5)))
        slots = [slot(f"gpu of {model}", model=model) for model in MODELS]
        await asyncio.gather(*(broker.claim(one, AT_ONCE) for one in slots))
        calls, claims, _, _ = BOUNDS
        reads = beside = 2  # Its wake-ups and replies; what is asked by redis-py, and this test.
        assert server.command("INFO", "clients")["connected_clients"] <= calls + claims + reads + beside


async def blocked(server: RunningServer, count: int) -> None:
    for _ in range(int(PATIENCE / 0.02)):
        if (found := server.command("INFO", "clients")["blocked_clients"]) == count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{found} clients are blocked")


class Server:
    """Keys that hold something at times, and the reads that there were: the keys of each, and how long they waited."""

    def __init__(self) -> None:
        self.there: dict[str, str] = {}
        self.reads: list[tuple[set[str], float]] = []
        self.changed = asyncio.Event()
        self.broken = False

    async def read(self, keys: Mapping[str, str], wait: float) -> Mapping[str, str]:
        self.reads.append((set(keys), wait))
        try:
            async with asyncio.timeout(wait):
                while not (found := [key for key in keys if key in self.there]):
                    await self.changed.wait()
                    if self.broken:
                        raise BrokerUnavailable("cut")
        except TimeoutError:
            return {}
        return {key: self.there.pop(key) for key in found}

    def put(self, key: str, value: str) -> None:
        self.there[key] = value
        self.changed.set()
        self.changed.clear()


async def test_keys_that_come_later_are_read_at_once_and_soon_together_with_the_others(clock: Clock) -> None:
    server = Server()
    reads = BlockingReads(server.read, lambda: 2.0)
    got: list[tuple[str, str | None]] = []

    async def keep(key: str) -> None:
        while True:
            got.append((key, await reads.wait(key, "0")))

    tasks = [asyncio.ensure_future(keep(key)) for key in "ab"]
    await asyncio.sleep(0.5)
    tasks.append(asyncio.ensure_future(keep("c")))
    await asyncio.sleep(0.1)
    assert [keys for keys, _ in server.reads] == [{"a", "b"}, {"c"}]
    assert [wait for _, wait in server.reads] == pytest.approx([2.0, 1.5])
    server.put("c", "1")
    await asyncio.sleep(0.1)
    assert got == [("c", "1")]
    await asyncio.sleep(1.5)
    assert server.reads[-1] == ({"a", "b", "c"}, 2.0)
    assert sorted(got[1:]) == [("a", None), ("b", None), ("c", None)]
    server.put("b", "2")
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.1)
    assert got[-1] == ("b", "2")
    assert server.reads[-1][0] == {"a", "b", "c"}
    assert len(reads._reading) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.0)
    assert not reads._reading


async def test_keys_that_come_one_after_the_other_make_a_few_reads(clock: Clock) -> None:
    server = Server()
    reads = BlockingReads(server.read, lambda: 2.0)
    waiting = []
    for number in range(50):
        waiting.append(asyncio.ensure_future(reads.wait(f"key {number}", "0")))
        await asyncio.sleep(0.001)
    assert len(server.reads) <= FEW + 3
    await asyncio.sleep(0.05)
    for number in range(50):
        server.put(f"key {number}", "1")
    assert await asyncio.gather(*waiting) == ["1"] * 50


async def test_a_read_that_fails_tells_all_who_wait(clock: Clock) -> None:
    server = Server()
    reads = BlockingReads(server.read, lambda: 2.0)
    waiting = [asyncio.ensure_future(reads.wait(key, "0")) for key in "ab"]
    await asyncio.sleep(0.1)
    server.broken = True
    server.put("x", "nothing")
    for one in waiting:
        with pytest.raises(BrokerUnavailable):
            await one
    server.broken = False
    again = asyncio.ensure_future(reads.wait("a", "0"))
    await asyncio.sleep(0.1)
    server.put("a", "1")
    assert await again == "1"


async def test_a_place_that_is_waited_for_anew_gets_nothing_of_the_former_read(clock: Clock) -> None:
    server = Server()
    reads = BlockingReads(server.read, lambda: 2.0)
    other = asyncio.ensure_future(reads.wait("b", "0"))
    first = asyncio.ensure_future(reads.wait("a", "0"))
    await asyncio.sleep(0.1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.ensure_future(reads.wait("a", "5"))
    await asyncio.sleep(0.1)
    server.there["a"] = "of the first read"
    server.put("b", "1")
    assert await other == "1"
    assert not second.done()
    server.put("a", "2")
    assert await second == "2"


def fed(*pieces: bytes) -> Any:
    """What comes of these pieces; all but the last leave it open."""
    answer = BulkAnswer()
    *ahead, last = pieces
    for piece in ahead:
        assert answer.feed(piece) is link._MORE
    return answer.feed(last)


@pytest.mark.parametrize("content", [b"", b"x", b"\r", b"\r\n", b"abc\r\ndef"])
def test_an_answer_is_whole_wherever_it_is_cut(content: bytes) -> None:
    told = b"$%d\r\n%b\r\n" % (len(content), content)
    assert fed(told) == content
    assert fed(*(told[at : at + 1] for at in range(len(told)))) == content
    for first in range(1, len(told)):
        assert fed(told[:first], told[first:]) == content
        for second in range(first + 1, len(told)):
            assert fed(told[:first], told[first:second], told[second:]) == content


@pytest.mark.parametrize(("told", "answer"), [(b"$-1\r\n", None), (b"+OK\r\n", b"OK"), (b"-ERR no\r\n", "ERR no")])
def test_short_answers_are_told_apart(told: bytes, answer: object) -> None:
    assert fed(told) == answer
    assert fed(told[:3], told[3:]) == answer


@pytest.mark.parametrize("told", [b"*1\r\n$1\r\na\r\n", b"$x\r\n", b"$1\r\nab\r\nc", b"$2\r\nab\r\n+OK\r\n"])
def test_anything_else_is_no_answer(told: bytes) -> None:
    with pytest.raises(InvalidResponse):
        fed(told)


class _Transport:
    """Transport to a server that answers each command with the next of these pieces, one by one."""

    def __init__(self, answers: list[list[bytes]], received: Callable[[bytes], None]) -> None:
        self.aborted = False
        self._answers, self._received = answers, received

    def write(self, command: bytes) -> None:
        for piece in self._answers.pop(0):
            asyncio.get_running_loop().call_soon(self._received, piece)

    def abort(self) -> None:
        self.aborted = True


async def test_a_link_reads_large_answers_and_goes_on_with_others() -> None:
    parser = SimpleNamespace(parse_error=ResponseError)
    made = link.Link(SimpleNamespace(_parser=parser))
    made._answers = hiredis.Reader(notEnoughData=link._MORE)
    answers = [[b"$4\r\nab", b"cd\r\n"], [b"+PONG\r\n"], [b"-ERR no\r\n"], [b"$-1\r\n"], [b"?\r\n"]]
    transport: Any = _Transport(answers, made.data_received)
    made._transport = transport
    assert await made.ask_large(("GETRANGE", "key", 0, 3)) == b"abcd"
    assert await made.ask(b"PING") == b"PONG"
    with pytest.raises(ResponseError, match="ERR no"):
        await made.ask_large(("GETRANGE", "key", 0, 3))
    assert not transport.aborted
    assert await made.ask_large(("GETRANGE", "key", 0, 3)) is None
    with pytest.raises(InvalidResponse):
        await made.ask_large(("GETRANGE", "key", 0, 3))
    assert transport.aborted


async def test_a_link_that_is_reset_leaves_no_error_that_nobody_takes() -> None:
    reset: Any = link.Link(SimpleNamespace())
    reset._streams = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    waiting = reset._waiting = asyncio.get_running_loop().create_future()
    reset.connection_lost(ConnectionResetError(104, "Connection reset by peer"))
    with pytest.raises(NoConnection, match="reset by peer"):
        await waiting
    assert reset._streams._closed.exception() is None
