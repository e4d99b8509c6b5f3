"""The HTTP/2 stream of one call: its metadata, its messages in both directions, and its status.

A message consists of a compressed flag (one byte), its length (four bytes), and its content. Before the call starts reading, the client
may send up to WINDOW bytes. The rest of a message may follow only while the call is reading.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import quote_from_bytes

from headway.core.tenant_turns import TenantTurns
from headway.errors import DRAINING, RequestError
from headway.gateway.client_quotas import CountedConnection
from headway.grpc.header_blocks import RequestFields, block_of
from headway.grpc.status import Metadata, StatusCode
from headway.grpc.writer import ErrorCode, Http2Writer
from headway.runtime.fair_turns import give_way
from headway.runtime.memory_reuse import unfilled

SHARE = 0.001  # Seconds of work in one turn of the loop after which no more work is started.

T = TypeVar("T")


class MessageTurns:
    """Queue for one port's work. Owners take turns; each owner's work is done in order. `clock` returns the monotonic time."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self._waiting = TenantTurns[Callable[[], None]]()
        self._spent = 0.0
        self._asked = False  # True if `_begin` is scheduled for the next turn of the loop.

    @property
    def free(self) -> bool:
        return self._spent < SHARE and not self._waiting

    def wait(self, owner: str, work: Callable[[], None]) -> None:
        """Do work in a later turn of the loop, after the owner's earlier work. The work must not raise."""
        self._waiting.add(owner, work)
        self._ask()

    def add(self, seconds: float) -> None:
        """Count seconds of work that was done in this turn of the loop, or will be done in the next."""
        self._spent += seconds
        self._ask()

    def spend(self, since: float) -> float:
        now = self.clock()
        self.add(now - since)
        return now

    async def take(self, owner: str, work: Callable[[float], T]) -> T:
        """Do work, now or in a later turn of the loop, and return its result or raise its error. `work` gets the number of seconds
        that it has waited. Even if the caller is cancelled, the work may have been done."""
        if self.free:
            before = self.clock()
            try:
                return work(0.0)
            finally:
                self.spend(before)
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.wait(owner, partial(self._serve, turn, work, self.clock()))
        del work
        try:
            return await turn
        finally:
            del turn  # Its error refers to this frame, so a reference would create a cycle.

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        if self._waiting:
            give_way()
        self._asked, self._spent = False, 0.0
        for _ in range(len(self._waiting)):  # Work added now waits for the next turn.
            if self._spent >= SHARE:
                break
            self._waiting.take()()
        if self._waiting:
            self._ask()

    def _serve(self, turn: asyncio.Future[Any], work: Callable[[float], Any], since: float) -> None:
        if turn.done():  # The call has ended.
            return
        before = self.clock()
        try:
            turn.set_result(work(before - since))
        except Exception as exc:
            turn.set_exception(exc)
        finally:
            del turn, work  # An error would keep them in a cycle.
            self.spend(before)


WINDOW = 1 << 13  # Number of bytes that a client may send on a stream before the call reads.
PREFIX = 5  # Number of bytes before the content of a message.
_LARGE = 1 << 14  # Minimum size in bytes of a message that is received into its own memory, and so copied only once.
AHEAD = 128  # Free bytes before a large message's content. The opening of a packed value is written there.

_KIND = ((":status", "200"), ("content-type", "application/grpc"))
_TRAILERS_ONLY = block_of(_KIND)  # Header fields of an answer that has only a status.
_HEAD = block_of((*_KIND, ("grpc-accept-encoding", "identity, deflate, gzip")))  # For an answer with messages.
_OK = block_of((("grpc-status", "0"),))
_ENCODINGS, _NO_ENCODINGS = (b"gzip", b"deflate"), (b"", b"identity")
_ANY_WRAPPING = zlib.MAX_WBITS | 32  # Makes zlib detect whether data are in gzip or zlib format.
_LENGTH_DIGITS = 20
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
# Characters that are not escaped in the details of a status.
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class Ended(Exception):
    """The call ends with this status."""

    def __init__(self, status: StatusCode, details: str) -> None:
        super().__init__(details)
        self.status, self.details = status, details


class Carrier(CountedConnection, Protocol):
    """A connection as its calls see it. `leaving` is the monotonic time of the GOAWAY, or None before it."""

    address: str
    leaving: float | None
    streams: dict[int, CallStream]
    turns: MessageTurns

    @property
    def payer(self) -> str:
        """The owner of this connection's work in `turns`."""

    def retire(self) -> None:
        """Tell the client to open another connection for further calls."""

    def reset(self, number: int, code: ErrorCode) -> None:
        """End a stream. The client must not send on it anymore."""


class CallStream:
    """The stream of one call, which `task` answers. The client may send `window` bytes before the call reads. If `whole`, the
    client has already sent everything. `closed` is True once nothing more can be sent. While a message is being sent, `sent` is
    a future that is done once the whole message is sent."""

    __slots__ = (
        "_begun", "_deadline", "_encoding", "_missing", "_received", "_room", "_timer", "_unsent", "_waiting", "_whole", "_window", "_writer", "closed",
        "connection", "head", "number", "sent", "task",
    )  # fmt: skip

    def __init__(
        self, connection: Carrier, writer: Http2Writer, number: int, head: RequestFields, window: int, whole: bool
    ) -> None:
        self.connection, self._writer, self.number, self.head = connection, writer, number, head
        self.task: asyncio.Task[None] | None = None
        self.closed = False
        self._encoding = b""
        self._received = bytearray()
        self._room: memoryview | None = None  # The unfilled part of a large message's memory while one is being read.
        self._whole = whole
        self._missing: int | None = None  # Bytes still to come according to the content-length, if there is one.
        self._window = window
        self._waiting: asyncio.Future[None] | None = None
        self._begun = False
        self._unsent = memoryview(b"")
        self.sent: asyncio.Future[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, fields: Mapping[bytes, bytes]) -> None:
        """Read the call's compression, length and timeout from its header fields. Raises Ended if the timeout is malformed."""
        self._encoding = fields.get(b"grpc-encoding", b"")
        length, timeout = fields.get(b"content-length"), fields.get(b"grpc-timeout")
        if length is not None:
            self._missing = int(length) if length.isdigit() and len(length) < _LENGTH_DIGITS else -1
        if timeout is not None:
            match = _TIMEOUT.fullmatch(timeout)
            if match is None:
                raise Ended(StatusCode.INTERNAL, "the metadata grpc-timeout is malformed")
            seconds = int(match[1]) * _UNITS[match[2]]
            self._deadline = monotonic() + seconds
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else self._deadline - monotonic()

    async def read(self, most: int, *, leaves: bool = False) -> bytes | None:
        """Return the next message, or None after the last one. Raises Ended if the message is incomplete, is compressed in an
        unknown way, or is larger than `most` bytes. With `leaves`, raises RequestError once the client must reconnect."""
        received = self._received
        while True:
            if leaves and self.connection.leaving is not None:
                raise to_be_opened_anew()
            missing = PREFIX - len(received)
            if missing <= 0:
                length = int.from_bytes(received[1:PREFIX], "big")
                if length > most:
                    raise Ended(
                        StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {most})"
                    )
                missing += length
                packed = received[0]
                if missing <= 0 or length > _LARGE:
                    body = self.take_message(length) if missing <= 0 else await self._read_large(length, leaves)
                    return await self._unpack(packed, body, most) if packed else body
            if self._whole:
                if received:
                    raise _incomplete()
                return None
            self._open(missing)
            await self.change()

    def length_there(self, most: int) -> int:
        """Return the length of the next message if `take_message` can return it, or -1 if `read` must be used."""
        received = self._received
        available = len(received) - PREFIX
        if available < 0 or received[0]:
            return -1
        length = int.from_bytes(received[1:PREFIX], "big")
        return length if length <= available and length <= most else -1

    def take_message(self, length: int) -> bytes:
        received = self._received
        body = bytes(memoryview(received)[PREFIX : PREFIX + length])
        del received[: PREFIX + length]
        return body

    async def _read_large(self, length: int, leaves: bool) -> bytes:
        content, begun = memoryview(unfilled(AHEAD + length))[AHEAD:], self._received
        self._room, self._received = content, bytearray()
        self._fill(self._room, memoryview(begun)[PREFIX:])
        try:
            while self._room:
                if leaves and self.connection.leaving is not None:
                    raise to_be_opened_anew()
                if self._whole:
                    raise _incomplete()
                self._open(len(self._room))
                await self.change()
        finally:
            self._room = None
        return cast(bytes, content)  # A writable view, but nobody changes it, so it can be used like bytes.

    async def change(self) -> None:
        """Wait until more data arrive, or until the client has to open another connection."""
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _open(self, missing: int) -> None:
        if self._window < missing or self._window < WINDOW // 2:
            more = max(missing, WINDOW) - self._window
            self._window += more
            self._writer.grant(self.number, more)

    async def _unpack(self, packed: int, body: bytes, most: int) -> bytes:
        if packed > 1 or self._encoding in _NO_ENCODINGS:
            raise Ended(StatusCode.INTERNAL, "the message is compressed, but grpc-encoding names no compression")
        if self._encoding not in _ENCODINGS:
            if not self.closed:
                self._begin()  # The header fields name the known encodings.
            raise Ended(StatusCode.UNIMPLEMENTED, "the grpc-encoding is unknown; use gzip, deflate or identity")
        return await self.connection.turns.take(self.connection.payer, partial(_unpacked, body, most))

    def send(self, body: bytes) -> None:
        """Send the next message. If the client's window has no room for all of it, `sent` becomes a future; see CallStream."""
        if self.closed:
            return
        self._begin()
        self._unsent = memoryview(b"\0%b%b" % (len(body).to_bytes(4, "big"), body))
        if not self.pump():
            self._writer.stuck[self.number] = self.pump
            self.sent = asyncio.get_running_loop().create_future()

    def answer(self, body: bytes, trailers: Metadata) -> bool:
        """End the call successfully with its only message. If there isn't room for all of it, send nothing and return False."""
        writer = self._writer
        if self._begun or self.closed or PREFIX + len(body) > writer.room(self.number):
            return False
        message = b"\0%b%b" % (len(body).to_bytes(4, "big"), body)
        writer.answer(self.number, _HEAD, message, _OK + block_of(trailers))
        self._finish()
        return True

    def end(self, status: StatusCode, details: str = "", trailers: Metadata = ()) -> None:
        if self.closed:
            return
        if self._unsent:  # A status cannot overtake a message.
            self.reset()
            return
        if status is StatusCode.OK and not details:
            block = _OK + block_of(trailers)
        else:
            message = (("grpc-message", quote_from_bytes(details.encode(), _PLAIN)),) if details else ()
            block = block_of((("grpc-status", str(int(status))), *message, *trailers))
        self._writer.headers(self.number, block if self._begun else _TRAILERS_ONLY + block, end=True)
        self._finish()

    def reset(self) -> None:
        if not self.closed:
            self.connection.reset(self.number, ErrorCode.CANCEL)

    def pump(self) -> bool:
        """Send as much of the current message as there is room for. Return True once the whole message is sent."""
        unsent = self._unsent
        while unsent:
            size = self._writer.send(self.number, unsent)
            if not size:
                self._unsent = unsent
                return False
            unsent = unsent[size:]
        self._unsent = unsent
        if self.sent is not None:
            if not self.sent.done():
                self.sent.set_result(None)
            self.sent = None
        return True

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._writer.headers(self.number, _HEAD, end=False)

    def _finish(self) -> None:
        if self._whole:
            self.connection.streams.pop(self.number, None)
            self.close()
        else:
            self.connection.reset(self.number, ErrorCode.NO_ERROR)

    def take(self, data: bytes | memoryview, amount: int) -> bool:
        """Accept data that use `amount` bytes of the window. Return False if the client exceeds its window."""
        self._window -= amount
        if self._window < 0:
            return False
        size = len(data)
        if self._room:
            self._fill(self._room, data)
        else:
            self._received += data
        if self._missing is not None:
            self._missing -= size
        if amount > size:  # Padding.
            self._window += amount - size
            self._writer.grant(self.number, amount - size)
        if self._waiting is not None and not self._room:
            self.wake()
        return True

    def _fill(self, room: memoryview, data: bytes | memoryview) -> None:
        """Copy data into the memory of a large message. Data after the message's end belong to the next message."""
        own = data[: len(room)]
        room[: len(own)] = own
        self._room = room[len(own) :]
        if len(own) < len(data):
            self._received += data[len(own) :]

    def finish_reading(self) -> bool:
        """Record that the client has sent everything. Return False if that contradicts its content-length."""
        self._whole = True
        if self._waiting is not None:
            self.wake()
        return not self._missing

    def narrow(self, amount: int) -> None:
        """Reduce the window by `amount` bytes, as the client has done."""
        self._window -= amount
        self.wake()  # The window may now be too narrow for the rest of a message.

    def wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        """Send nothing more, and drop the rest of the current message."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unsent:
            self._writer.stuck.pop(self.number, None)
            self._unsent = memoryview(b"")

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.task = None

    def _expire(self) -> None:
        self._timer = None
        self.end(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self.cancel()


def _unpacked(body: bytes, most: int, waited: float) -> bytes:
    unpacker = zlib.decompressobj(_ANY_WRAPPING)
    try:
        content = unpacker.decompress(body, most + 1)
    except zlib.error:
        raise Ended(StatusCode.INTERNAL, "the message cannot be decompressed") from None
    if len(content) > most:
        raise Ended(
            StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max ({most} bytes) once it is decompressed"
        )
    if not unpacker.eof or unpacker.unused_data:
        raise Ended(StatusCode.INTERNAL, "the message cannot be decompressed")
    return content


def _incomplete() -> Ended:
    return Ended(StatusCode.INTERNAL, "the last message of the call is incomplete")


def to_be_opened_anew() -> RequestError:
    """Return the error for a call whose client has to open another connection."""
    message = "the connection is closing, because it is old or this process is shutting down; open another one"
    return RequestError(message, code=DRAINING, retry_after=0.0)
