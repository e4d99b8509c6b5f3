"""Client of one server, which errors say that another is the one to ask, and the nodes of a cluster that are asked."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import InvalidResponse, MovedError, ResponseError

from headway.brokers.redis import cluster
from headway.brokers.redis.clients import connect
from headway.brokers.redis.cluster import Cluster
from headway.brokers.redis.link import Address
from headway.brokers.redis.server import Deposed, Server

Act = Callable[["Peer", Server], Coroutine[Any, Any, None]]


class Peer:
    """Server that gives each command the next of some answers, as they are on the wire, in these pieces; then it closes the
    connection."""

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
                for _ in range(5):  # Till it is read.
                    await asyncio.sleep(0)
        writer.close()
        self.open -= 1


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - the peer shares this event loop
        await asyncio.sleep(0)


def served(peer: Peer, act: Act) -> None:
    async def main() -> None:
        listening = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        pool = ConnectionPool(Connection, host="127.0.0.1", port=port, protocol=2, driver_info=None)
        server = Server(Redis.from_pool(pool), 2)
        try:
            async with asyncio.timeout(10):
                await act(peer, server)
        finally:
            await server.close()
            listening.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "broken"),
    [
        (b"-READONLY You can't write\r\n", False),
        (b"-MASTERDOWN Link is down\r\n", False),
        (b"-NOREPLICAS Not enough good replicas\r\n", False),
        (b"-LOADING Redis is loading\r\n", True),
    ],
    ids=["replica", "without-its-primary", "without-replicas", "loading"],
)
def test_a_server_that_takes_no_writes_is_told_with_its_address(answer: bytes, broken: bool) -> None:
    async def act(peer: Peer, server: Server) -> None:
        with pytest.raises(Deposed) as caught:
            await server.call("PING")
        assert caught.value.address[0] == "127.0.0.1"
        assert await server.call("PING") == b"PONG"
        assert peer.links == 1 + broken

    served(Peer(answer, b"+PONG\r\n"), act)


def test_an_error_of_a_command_says_nothing_of_the_primary_and_leaves_the_link() -> None:
    async def act(peer: Peer, server: Server) -> None:
        with pytest.raises(ResponseError) as caught:
            await server.call("PING")
        assert not isinstance(caught.value, Deposed)
        assert await server.call("PING") == b"PONG"
        assert peer.links == 1

    served(Peer(b"-ERR unknown command\r\n", b"+PONG\r\n"), act)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_link_that_breaks_during_a_call_is_told_and_made_anew(large: bool) -> None:
    async def act(peer: Peer, server: Server) -> None:
        assert await server.call("GET", "a", large=large) == b"x"
        with pytest.raises((NoConnection, ConnectionResetError, asyncio.IncompleteReadError)) as caught:
            await server.call("GET", "a", large=large)
        assert not isinstance(caught.value, Deposed)
        peer._answers.append((b"$1\r\ny\r\n",))
        assert await server.call("GET", "a", large=large) == b"y"
        assert (peer.links, peer.open) == (2, 1)

    served(Peer(b"$1\r\nx\r\n"), act)


def test_a_link_that_the_server_has_closed_meanwhile_is_made_anew_before_the_next_call() -> None:
    async def act(peer: Peer, server: Server) -> None:
        assert await server.call("PING") == b"PONG"
        peer.writers[0].close()
        await until(lambda: not server._idle[0].is_up)
        assert await server.call("PING") == b"PONG"
        assert peer.links == 2

    served(Peer(b"+PONG\r\n", b"+PONG\r\n"), act)


def test_answers_come_in_any_pieces_and_a_link_takes_large_and_small_ones_in_turn() -> None:
    value = bytes(range(256)) * 4096
    pieces = b"$%d\r\n" % len(value), value[:70_000], value[70_000:], b"\r\n"

    async def act(peer: Peer, server: Server) -> None:
        assert await server.call("FCALL") == [b"lease", 3, None, [b"\r\n", b""]]
        assert await server.call("GET", "a", large=True) == value
        assert await server.call("GET", "a") == value
        assert await server.call("GET", "b", large=True) is None
        assert await server.call("GET", "b") is None
        assert peer.links == 1

    answer = b"*4\r\n$5\r\nle", b"ase\r\n:3\r\n$-1\r\n*2", b"\r\n$2\r\n\r\n\r\n$0\r\n", b"\r\n"
    served(Peer(answer, pieces, pieces, b"$-1\r\n", b"$-1\r\n"), act)


def test_what_is_no_answer_at_all_breaks_the_link() -> None:
    async def act(peer: Peer, server: Server) -> None:
        with pytest.raises(InvalidResponse):
            await server.call("PING")
        assert await server.call("PING") == b"PONG"
        assert peer.links == 2

    served(Peer(b"HTTP/1.1 400 Bad Request\r\n", b"+PONG\r\n"), act)


def test_a_call_that_is_given_up_leaves_no_answer_to_the_next() -> None:
    async def act(peer: Peer, server: Server) -> None:
        late = asyncio.ensure_future(server.call("GET", "a"))
        await until(lambda: peer.asked == 1)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert await server.call("GET", "b") == b"b"

    served(Peer((b"$1\r\n", b"a\r\n"), b"$1\r\nb\r\n"), act)


def test_who_leaves_an_address_ends_the_calls_there() -> None:
    async def act(peer: Peer, server: Server) -> None:
        assert await server.call("PING") == b"PONG"
        [link] = server._idle
        waiting = asyncio.ensure_future(server.call("BLPOP"))
        await until(lambda: peer.asked == 2)
        await server.leave(link.address)
        with pytest.raises(NoConnection):
            await waiting

    served(Peer(b"+PONG\r\n", ()), act)


def place(pool: Any) -> tuple[str, int]:
    return pool.connection_kwargs["host"], pool.connection_kwargs["port"]


def test_a_sentinel_without_a_port_in_the_url_is_asked_at_26379() -> None:
    [client] = connect("redis+sentinel://10.0.0.1,10.0.0.2:7000/mymaster", 1.0, [1])
    sentinels: Any = vars(client)["_sentinels"]
    assert [place(one.connection_pool) for one in sentinels.sentinels] == [("10.0.0.1", 26379), ("10.0.0.2", 7000)]


@pytest.mark.parametrize(("url", "port"), [("redis://10.0.0.1", 6379), ("redis://10.0.0.1:7000/2", 7000)])
def test_a_server_without_a_port_in_the_url_is_asked_at_6379(url: str, port: int) -> None:
    [client] = connect(url, 1.0, [1])
    assert place(vars(client)["_server"]._redis.connection_pool) == ("10.0.0.1", port)


LAST = 16_383


class Nodes:
    """A cluster whose nodes all tell the same map. While `moved` is set, the other nodes send calls on to it."""

    def __init__(self, *owners: tuple[str | None, int]) -> None:
        self.told: list[list[Any]] = []
        self.asked: list[tuple[Address, str]] = []
        self.moved: Address | None = None
        self.own(*owners)

    def own(self, *owners: tuple[str | None, int]) -> None:
        """Let these nodes own equal parts of the slots."""
        ends = [LAST * (place + 1) // len(owners) for place in range(len(owners))]
        begins = [0, *(end + 1 for end in ends[:-1])]
        self.told = [
            [*span, [*owner, b"id"]] for span, owner in zip(zip(begins, ends, strict=True), owners, strict=True)
        ]

    def client(self, *seeds: Address) -> Cluster:
        return Cluster(seeds, lambda host, port: cast(Server, Node(self, (host, port))), 1.0)

    def those(self, command: str) -> list[Address]:
        """The nodes that were asked this since the last time."""
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
    await asyncio.sleep(cluster.REFRESH_EVERY)
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
