"""Client of one server: which errors say that another server is the one to ask, and what becomes of a link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import InvalidResponse, ResponseError

from headway.brokers.redis.server import Deposed, Server

Act = Callable[["Peer", Server], Coroutine[Any, Any, None]]


class Peer:
    """Server that gives each command the next of some answers, as they are on the wire, in these pieces; then it closes the connection.

    Attributes:
        links: number of connections that were made.
        open: number of those that are open.
        asked: number of commands that have come.
    """

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
    """Return when it is so."""
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
