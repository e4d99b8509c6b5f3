import asyncio
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.load.connection import IDLE, Connection, ConnectionPool


class Wire:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.ended = ""

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.ended = "aborted"

    def close(self) -> None:
        self.ended = "closed"


class Desk:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def ready(self, connection: Connection) -> None:
        self.told.append(("ready",))

    def answered(self, connection: Connection, status: int, body: bytes, retry_after: bool, reusable: bool) -> None:
        connection.number = IDLE
        self.told.append((status, body, retry_after, reusable))

    def lost(self, connection: Connection, cause: str) -> None:
        self.told.append(("lost", cause))


def connected() -> tuple[Connection, Desk, Wire]:
    context, wire = Desk(), Wire()
    connection = Connection(context)
    connection.connection_made(cast(asyncio.BaseTransport, wire))
    assert context.told.pop() == ("ready",)
    return connection, context, wire


BUSY = b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\nContent-Length: 4\r\n\r\nbusy"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\nRetry-After: 1\r\n\r\n"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
LAST = b"HTTP/1.1 200 OK\r\nconnection: Close\r\ncontent-length: 2\r\n\r\nok"

ANSWERS = [
    (BUSY, (503, b"busy", True, True)),
    (BUSY.replace(b"retry-after", b"X-Retry-After"), (503, b"busy", False, True)),
    (CHUNKED, (200, b"abcde", False, True)),
    (INTERIM + BUSY, (503, b"busy", True, True)),
    (INTERIM + CHUNKED, (200, b"abcde", False, True)),
    (EMPTY, (204, b"", False, True)),
    (LAST, (200, b"ok", False, False)),
    (LAST.replace(b"Close", b"keep-alive\r\nX-Transfer-Encoding: chunked"), (200, b"ok", False, True)),
    (BUSY.replace(b"HTTP/1.1", b"HTTP/1.0"), (503, b"busy", True, False)),
]


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 150), max_size=6))
def test_an_answer_is_the_same_however_it_is_cut(answer: tuple[bytes, tuple[Any, ...]], cuts: list[int]) -> None:
    connection, context, wire = connected()
    data, told = answer
    connection.send(b"request", 7, 1.0, 0)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        if start < end:
            connection.data_received(data[start:end])
    assert context.told == [told]
    assert wire.written == [b"request"]


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes_end_in_one_outcome(first: bytes, second: bytes) -> None:
    connection, context, wire = connected()
    connection.send(b"request", 7, 1.0, 0)
    for data in (b"HTTP/1.1 " + first, second):
        if data and not wire.ended:
            connection.data_received(data)
    connection.connection_lost(None)
    assert context.told[-1][0] == "lost"
    assert len(context.told) <= 2


def test_a_body_without_a_length_goes_on_until_the_end_of_its_connection() -> None:
    connection, context, _ = connected()
    connection.send(b"request", 7, 1.0, 0)
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nall of it")
    connection.connection_lost(None)
    assert context.told[0] == (200, b"all of it", False, False)


def test_bytes_that_nobody_asked_for_spoil_the_connection_only() -> None:
    for excess in (BUSY, b"HTTP/1.1 2", b"\x00"):
        connection, context, _ = connected()
        connection.send(b"request", 7, 1.0, 0)
        connection.data_received(CHUNKED + excess)
        assert context.told == [(200, b"abcde", False, False)]
    connection, context, wire = connected()
    connection.data_received(BUSY)
    assert (context.told, wire.ended, connection.open) == ([], "aborted", False)


@pytest.mark.parametrize(
    ("data", "error", "cause"),
    [
        (b"", None, "closed"),
        (b"", ConnectionResetError(), "reset"),
        (b"HTTP/1.1 200 OK\r\n", None, "truncated"),
        (b"HTTP/1.1 200 OK\r\n\r\nhalf", ConnectionResetError(), "truncated"),
        (BUSY[:-1], None, "truncated"),
        (CHUNKED[:-1], None, "truncated"),
        (INTERIM, None, "truncated"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", None, "malformed"),
        (b"nonsense\r\n\r\n", None, "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx", None, "malformed"),
    ],
)
def test_an_end_without_an_answer_says_why(data: bytes, error: Exception | None, cause: str) -> None:
    connection, context, wire = connected()
    connection.send(b"request", 7, 1.0, 0)
    if data:
        connection.data_received(data)
    connection.connection_lost(None if wire.ended else error)
    assert context.told == [("lost", cause)]


def test_the_pool_gives_the_connection_used_last_and_no_dead_or_stale_one() -> None:
    def build() -> Connection:
        raise AssertionError("no connection is opened here")

    pool = ConnectionPool("127.0.0.1", 1, 10, build, lambda failure: None)
    (stale, _, wire), (older, _, _), (closed, _, _), (latest, _, _) = (connected() for _ in range(4))
    stale.idle_since, older.idle_since, closed.idle_since, latest.idle_since = 10.0, 100.0, 100.5, 101.0
    pool.idle += [stale, older, closed, latest]
    closed.eof_received()
    assert [pool.take(101.0), pool.take(101.0), pool.take(101.0)] == [latest, older, None]
    assert wire.ended == "closed"
