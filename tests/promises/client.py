"""A client's connection, which keeps every byte, and the ways in which clients leave."""

import asyncio
import contextlib
import math
import random
import socket
import struct
import time
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, cast

PATIENCE = 45.0
"""Seconds until an answer counts as missing; longer than any deadline."""
IDLE_SECONDS = 5.0
"""Age at which an idle connection is no longer used, well before the service would close it."""

_RESET = struct.pack("ii", 1, 0)


class Standing(Enum):
    """The state of a gateway as its clients see it."""

    OPEN = "open"
    ENDING = "ending"
    KILLED = "killed"


class Door:
    """A gateway and its idle connections. A port of 0 means that it has no such port, or that it isn't used. Set
    `standing` before killing or ending the gateway. `channel` is for the gRPC calls of clients that don't close theirs,
    and `streams` holds its streams by metadata. `shut` is when the gateway stopped being open."""

    def __init__(self, name: str, port: int, host: str = "127.0.0.1", grpc: int = 0, admin: int = 0) -> None:
        self.name, self.host, self.port, self.grpc, self.admin = name, host, port, grpc, admin
        self._standing = Standing.OPEN
        self.shut = math.inf
        self.free: list[Connection] = []
        self.channel: Any = None
        self.streams: dict[Any, Any] = {}

    @property
    def standing(self) -> Standing:
        return self._standing

    @standing.setter
    def standing(self, standing: Standing) -> None:
        self._standing, self.shut = standing, min(self.shut, time.monotonic())

    def is_open(self) -> bool:
        return self.standing is Standing.OPEN


class Point(Enum):
    """When a client leaves."""

    HEAD = "within the head"
    BODY = "within the body"
    WAIT = "while it waits"
    ANSWER = "when the answer has begun"
    END = "not before its answer"


@dataclass(frozen=True, slots=True)
class Departure:
    """When and how a client leaves: by closing (`close`), a reset (`reset`), or shutting down its side (`half`)."""

    point: Point = Point.END
    way: str = "close"
    after: float = 0.0


STAYS = Departure()
LEAVES = {Point.HEAD: 1, Point.BODY: 1, Point.WAIT: 10, Point.ANSWER: 2, Point.END: 90}
DEPARTURES = ("close", "reset", "half")


def some_departure(rng: random.Random) -> Departure:
    [point] = rng.choices(list(LEAVES), list(LEAVES.values()))
    return Departure(point, rng.choice(DEPARTURES), rng.choice((0.0, rng.expovariate(50.0), rng.expovariate(4.0))))


class Head(NamedTuple):
    """The status and header fields of an answer, with lowercase names."""

    status: int
    fields: dict[str, str]


class Connection(asyncio.Protocol):
    """A connection with at most one request in progress. `unasked` is what arrived when no answer was due."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._held = b""
        self._asked = self._left = self._ends = False
        self.unasked = b""
        self.used = self._loop.time()
        self.head: asyncio.Future[Head] = self._loop.create_future()
        self.body: asyncio.Future[bytes] = self._loop.create_future()

    @property
    def fresh(self) -> bool:
        return (
            self._transport is not None
            and not self._left
            and not self._ends
            and not self._transport.is_closing()
            and self._loop.time() - self.used < IDLE_SECONDS
        )

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def expect(self) -> None:
        self.head, self.body = self._loop.create_future(), self._loop.create_future()
        for future in (self.head, self.body):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._asked = True
        if self._transport is None:
            self.connection_lost(None)

    def leave(self, way: str) -> None:
        """Leave before the answer is complete."""
        transport, self._left = self._transport, True
        if transport is None:
            return
        if way == "half" and transport.can_write_eof():
            with contextlib.suppress(OSError):  # The other side has just closed it.
                transport.write_eof()
            self._loop.call_later(0.05, transport.abort)
            return
        if way == "reset":
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for future in (self.head, self.body):
            if self._asked and not future.done():
                future.set_exception(ConnectionResetError(repr(exc)))

    def data_received(self, data: bytes) -> None:
        if self._left:
            return
        if not self._asked:
            self.unasked += data
            return
        self._held += data
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            return
        if not self.head.done():
            self.head.set_result(_head(self._held[:end]))
            # The service may close a connection before reading everything. Nothing may follow on it then.
            self._ends = self.head.result().fields.get("connection") == "close"
        status, fields = self.head.result()
        length = 0 if status == 204 else int(fields["content-length"])
        if len(self._held) < end + 4 + length:
            return
        body, self.unasked = self._held[end + 4 : end + 4 + length], self._held[end + 4 + length :]
        self._held, self._asked, self.used = b"", False, self._loop.time()
        self.body.set_result(body)


def _head(data: bytes) -> Head:
    line, *fields = data.decode("latin-1").split("\r\n")
    named = (field.partition(":") for field in fields)
    return Head(int(line[9:12]), {name.lower(): value.strip() for name, _, value in named})


async def connect(door: Door) -> Connection:
    """Return a connection to a gateway: an idle one, or a new one."""
    while door.free:
        connection = door.free.pop()
        if connection.fresh:
            return connection
        connection.leave("close")
    loop = asyncio.get_running_loop()
    _, made = await loop.create_connection(Connection, door.host, door.port)
    return made
