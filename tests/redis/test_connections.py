"""A process's connections: few per server however many queues there are, answers in any pieces, and cluster nodes."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import InvalidResponse, MovedError, ResponseError

from headway.brokers.redis import clients, link
from headway.brokers.redis.blocking_reads import FEW, BlockingReads
from headway.brokers.redis.clients import Cluster, connect
from headway.brokers.redis.connection import BOUNDS
from headway.brokers.redis.link import Address, BulkAnswer, Deposed, Server
from headway.errors import BrokerUnavailable
from headway.model import Lease
from tests.contracts.brokers import AT_ONCE, LIMITS, answered, ask, slot
from tests.e2e.client import PATIENCE, wait_until
from tests.redis.stand import brokers
from tests.servers.redis import RunningServer, SharedServers

MODELS = [f"m{number}" for number in range(30)]
BRIEF = 0.3
"""Seconds of a blocking read here. The next read covers everything that is waited for."""
Clock = Callable[[], float]


async def test_a_process_waits_for_all_queues_over_one_connection_and_shares_a_few_for_calls(
    servers: SharedServers, kind: str
) -> None:
    server = servers.of(kind)
    async with brokers(server.url, models=dict.fromkeys(MODELS, LIMITS)) as [broker]:
        broker._connection.reads.block = BRIEF
        slots = {model: slot(f"gpu of {model}", model=model) for model in MODELS}
        await asyncio.gather(*(broker.depths() for _ in range(5)))
        assert not any(
            isinstance(one, Lease)
            for one in await asyncio.gather(*(broker.claim(one, AT_ONCE) for one in slots.values()))
        )
        calls, claims, _, _ = BOUNDS
        reads = beside = 2  # Its wake-ups and replies; redis-py's calls, and this test.
        assert server.command("INFO", "clients")["connected_clients"] <= calls + claims + reads + beside
        woken = [asyncio.ensure_future(broker.wait_for_work(one, None)) for one in slots.values()]
        await blocked(server, 1)
        reading = asyncio.ensure_future(broker.replies("g", 0))
        await blocked(server, 2)
        entries = [ask(model=model, gateway="g") for model in MODELS]
        assert await broker.enqueue(entries) == [None] * len(MODELS)
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*woken)
        seen = Counter[str]()
        for one in slots.values():
            await answered(broker, one)
        async with asyncio.timeout(PATIENCE):
            while len(seen) < len(MODELS):
                replies, cursor = await reading
                seen.update(reply.id for reply in replies)
                reading = asyncio.ensure_future(broker.replies("g", cursor))
        reading.cancel()
        assert seen == Counter(entry.id for entry in entries)


async def blocked(server: RunningServer, count: int) -> None:
    await asyncio.to_thread(wait_until, lambda: server.command("INFO", "clients")["blocked_clients"] == count)


class KeyServer:
    """Keys that sometimes hold something. Records the keys of each read and how long it waited."""

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
    server = KeyServer()
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
    server = KeyServer()
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
    server = KeyServer()
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
    server = KeyServer()
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
    """Feed the pieces to a parser and return the result. All but the last leave it incomplete."""
    answer = BulkAnswer()
    *ahead, last = pieces
    for piece in ahead:
        assert answer.feed(piece) is link._MORE
    return answer.feed(last)


@pytest.mark.parametrize("content", [b"", b"x", b"\r", b"\r\n", b"abc\r\ndef"])
def test_an_answer_is_whole_wherever_it_is_cut(content: bytes) -> None:
    told = b"$%d\r\n%b\r\n" % (len(content), content)
    assert fed(*(told[at : at + 1] for at in range(len(told)))) == content
    for first, second in itertools.combinations(range(len(told)), 2):
        assert fed(told[:first], told[first:second], told[second:]) == content


@pytest.mark.parametrize(("told", "answer"), [(b"$-1\r\n", None), (b"+OK\r\n", b"OK"), (b"-ERR no\r\n", "ERR no")])
def test_short_answers_are_told_apart(told: bytes, answer: object) -> None:
    assert fed(told) == answer
    assert fed(told[:3], told[3:]) == answer


@pytest.mark.parametrize("told", [b"*1\r\n$1\r\na\r\n", b"$x\r\n", b"$1\r\nab\r\nc", b"$2\r\nab\r\n+OK\r\n"])
def test_anything_else_is_no_answer(told: bytes) -> None:
    with pytest.raises(InvalidResponse):
        fed(told)


async def test_a_link_that_is_reset_leaves_no_error_that_nobody_takes() -> None:
    reset: Any = link.Link(SimpleNamespace())
    reset._streams = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    waiting = reset._waiting = asyncio.get_running_loop().create_future()
    reset.connection_lost(ConnectionResetError(104, "Connection reset by peer"))
    with pytest.raises(NoConnection, match="reset by peer"):
        await waiting
    assert reset._streams._closed.exception() is None


class Peer:
    """A server that sends the next answer, in these pieces, for each command, and then closes the connection."""

    def __init__(self, *answers: tuple[bytes, ...] | bytes) -> None:
        self._answers = [one if isinstance(one, tuple) else (one,) for one in answers]
        self.links = self.open = self.asked = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.links += 1
        self.open += 1
        self.writers.append(writer)
        while await reader.read(1 << 20):
            self.asked += 1
            if not self._answers:
                break
            for piece in self._answers.pop(0):
                writer.write(piece)
                await writer.drain()
                for _ in range(5):  # Until it is read.
                    await asyncio.sleep(0)
        writer.close()
        self.open -= 1


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - the peer shares this event loop
        await asyncio.sleep(0)


@asynccontextmanager
async def asked(peer: Peer) -> AsyncIterator[Server]:
    listening = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    pool = ConnectionPool(Connection, host="127.0.0.1", port=port, protocol=2, driver_info=None)
    server = Server(Redis.from_pool(pool), 2)
    try:
        async with asyncio.timeout(10):
            yield server
    finally:
        await server.close()
        listening.close()


@pytest.mark.parametrize(
    ("answer", "error", "broken"),
    [
        (b"-READONLY You can't write\r\n", Deposed, False),
        (b"-MASTERDOWN Link is down\r\n", Deposed, False),
        (b"-NOREPLICAS Not enough good replicas\r\n", Deposed, False),
        (b"-LOADING Redis is loading\r\n", Deposed, True),
        (b"-ERR unknown command\r\n", ResponseError, False),
        (b"HTTP/1.1 400 Bad Request\r\n", InvalidResponse, True),
    ],
    ids=["replica", "without-its-primary", "without-replicas", "loading", "unknown", "no-answer"],
)
async def test_an_error_says_whether_the_server_takes_no_writes_and_whether_its_link_is_broken(
    answer: bytes, error: type[Exception], broken: bool
) -> None:
    peer = Peer(answer, b"+PONG\r\n")
    async with asked(peer) as server:
        with pytest.raises(error) as caught:
            await server.call("PING")
        assert isinstance(caught.value, Deposed) == (error is Deposed)
        if isinstance(caught.value, Deposed):
            assert caught.value.address[0] == "127.0.0.1"
        assert await server.call("PING") == b"PONG"
        assert peer.links == 1 + broken


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
async def test_a_link_that_breaks_during_a_call_is_told_and_made_anew(large: bool) -> None:
    peer = Peer(b"$1\r\nx\r\n")
    async with asked(peer) as server:
        assert await server.call("GET", "a", large=large) == b"x"
        with pytest.raises((NoConnection, ConnectionResetError, asyncio.IncompleteReadError)) as caught:
            await server.call("GET", "a", large=large)
        assert not isinstance(caught.value, Deposed)
        peer._answers.append((b"$1\r\ny\r\n",))
        assert await server.call("GET", "a", large=large) == b"y"
        assert (peer.links, peer.open) == (2, 1)


async def test_a_link_that_the_server_has_closed_meanwhile_is_made_anew_before_the_next_call() -> None:
    peer = Peer(b"+PONG\r\n", b"+PONG\r\n")
    async with asked(peer) as server:
        assert await server.call("PING") == b"PONG"
        peer.writers[0].close()
        await until(lambda: not server._idle[0].is_up)
        assert await server.call("PING") == b"PONG"
        assert peer.links == 2


async def test_answers_come_in_any_pieces_and_a_link_takes_large_and_small_ones_in_turn() -> None:
    value = bytes(range(256)) * 4096
    pieces = b"$%d\r\n" % len(value), value[:70_000], value[70_000:], b"\r\n"

    answer = b"*4\r\n$5\r\nle", b"ase\r\n:3\r\n$-1\r\n*2", b"\r\n$2\r\n\r\n\r\n$0\r\n", b"\r\n"
    peer = Peer(answer, pieces, pieces, b"$-1\r\n", b"$-1\r\n")
    async with asked(peer) as server:
        assert await server.call("FCALL") == [b"lease", 3, None, [b"\r\n", b""]]
        assert await server.call("GET", "a", large=True) == value
        assert await server.call("GET", "a") == value
        assert await server.call("GET", "b", large=True) is None
        assert await server.call("GET", "b") is None
        assert peer.links == 1


async def test_a_call_that_is_given_up_leaves_no_answer_to_the_next() -> None:
    peer = Peer((b"$1\r\n", b"a\r\n"), b"$1\r\nb\r\n")
    async with asked(peer) as server:
        late = asyncio.ensure_future(server.call("GET", "a"))
        await until(lambda: peer.asked == 1)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert await server.call("GET", "b") == b"b"


async def test_who_leaves_an_address_ends_the_calls_there() -> None:
    peer = Peer(b"+PONG\r\n", ())
    async with asked(peer) as server:
        assert await server.call("PING") == b"PONG"
        [link] = server._idle
        waiting = asyncio.ensure_future(server.call("BLPOP"))
        await until(lambda: peer.asked == 2)
        await server.leave(link.address)
        with pytest.raises(NoConnection):
            await waiting


def place(pool: Any) -> tuple[str, int]:
    return pool.connection_kwargs["host"], pool.connection_kwargs["port"]


def test_a_url_without_a_port_means_the_usual_one() -> None:
    [client] = connect("redis+sentinel://10.0.0.1,10.0.0.2:7000/mymaster", 1.0, [1])
    sentinels: Any = vars(client)["_sentinels"]
    assert [place(one.connection_pool) for one in sentinels.sentinels] == [("10.0.0.1", 26379), ("10.0.0.2", 7000)]
    for url, port in (("redis://10.0.0.1", 6379), ("redis://10.0.0.1:7000/2", 7000)):
        [client] = connect(url, 1.0, [1])
        assert place(vars(client)["_server"]._redis.connection_pool) == ("10.0.0.1", port)


LAST = 16_383


class Nodes:
    """A cluster whose nodes all report the same map. While `moved` is set, the other nodes redirect calls to it."""

    def __init__(self, *owners: tuple[str | None, int]) -> None:
        self.told: list[list[Any]] = []
        self.asked: list[tuple[Address, str]] = []
        self.moved: Address | None = None
        self.own(*owners)

    def own(self, *owners: tuple[str | None, int]) -> None:
        ends = [LAST * (place + 1) // len(owners) for place in range(len(owners))]
        begins = [0, *(end + 1 for end in ends[:-1])]
        self.told = [
            [*span, [*owner, b"id"]] for span, owner in zip(zip(begins, ends, strict=True), owners, strict=True)
        ]

    def client(self, *seeds: Address) -> Cluster:
        return Cluster(seeds, lambda host, port: cast(Server, Node(self, (host, port))), 1.0)

    def those(self, command: str) -> list[Address]:
        """The nodes that have got this command since the last call."""
        found = [address for address, asked in self.asked if asked == command]
        self.asked.clear()
        return found


class Node:
    def __init__(self, nodes: Nodes, address: Address) -> None:
        self._nodes, self._address = nodes, address

    async def call(self, *command: Any, large: bool = False) -> Any:
        self._nodes.asked.append((self._address, command[0]))
        moved = self._nodes.moved
        if moved is not None and moved != self._address and command[0] != "CLUSTER SLOTS":
            raise MovedError(f"1 {moved[0]}:{moved[1]}")
        return self._nodes.told if command[0] == "CLUSTER SLOTS" else b"OK"

    ask = call

    async def leave(self, address: Address) -> None:
        self._nodes.asked.append((self._address, f"leave {address[0]}"))


@pytest.mark.parametrize(
    ("named", "host"), [("inside", "inside"), (b"inside", "inside"), (None, "seed"), ("", "seed"), ("?", "seed")]
)
async def test_a_node_is_asked_by_the_name_that_it_has_in_the_map(named: str | None, host: str, clock: object) -> None:
    nodes = Nodes((named, 7001))
    client = nodes.client(("seed", 7000))
    await client.call("key", "GET")
    assert nodes.those("GET") == [(host, 7001)]
    assert client.server_of("key") == f"{host}:7001"


async def test_what_goes_to_all_nodes_goes_to_those_that_there_are_now(clock: object) -> None:
    nodes = Nodes(("a", 1), ("b", 2))
    client = nodes.client(("a", 1))
    await client.everywhere("PING")
    assert nodes.those("PING") == [("a", 1), ("b", 2)]
    nodes.own(("a", 1), ("c", 3))
    await client.everywhere("PING")
    assert nodes.those("PING") == [("a", 1), ("c", 3)]


@pytest.mark.parametrize("left", [[], [("a", 1)], [("elsewhere", 9)]])
async def test_after_a_node_is_left_the_map_is_learnt_anew(left: Sequence[Address], clock: object) -> None:
    nodes = Nodes(("a", 1))
    client = nodes.client(("a", 1))
    await client.call("key", "GET")
    nodes.asked.clear()
    for address in left:
        await client.leave(address)
    assert nodes.those("leave a") == [address for address in left if address == ("a", 1)]
    await asyncio.sleep(clients.REFRESH_EVERY)
    await client.call("key", "GET")
    await asyncio.sleep(0)
    assert len(nodes.those("CLUSTER SLOTS")) == len(left)


async def test_a_node_that_sends_a_call_on_is_known_to_have_been_left_just_now(clock: object) -> None:
    nodes = Nodes(("a", 1))
    client = nodes.client(("a", 1))
    await client.call("key", "GET")
    assert client.left_at < 0.0
    nodes.moved = ("b", 2)
    await client.call("key", "GET")
    assert client.left_at == asyncio.get_running_loop().time()
