"""Stream of one call in HTTP/2: its metadata, its messages both ways, and its status.

A message is a byte that says whether it is compressed, four bytes with its length, and its content. The client may send WINDOW
bytes ahead of the call, and the rest of a message once the call reads it.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import Protocol, cast
from urllib.parse import quote_from_bytes

from headway.errors import DRAINING, RequestError
from headway.gateway.client_quotas import CountedConnection
from headway.grpc.header_blocks import RequestFields, block_of
from headway.grpc.message_turns import MessageTurns
from headway.grpc.statuses import Metadata, StatusCode
from headway.grpc.writer import ErrorCode, Http2Writer
from headway.runtime.memory_reuse import unfilled

WINDOW = 1 << 13
"""Bytes that a client may send ahead of its call's reading, on each stream."""
PREFIX = 5
"""Size in bytes of what precedes the content of a message."""
_LARGE = 1 << 14
"""Size in bytes from which a message is received into memory of its own, so that it is assembled once."""
AHEAD = 128
"""Bytes of room before the content of a large message, for the header of a packed value that ends with the message's data."""

_KIND = ((":status", "200"), ("content-type", "application/grpc"))
_TRAILERS_ONLY = block_of(_KIND)
_HEAD = block_of((*_KIND, ("grpc-accept-encoding", "identity, deflate, gzip")))
"""Header fields of an answer with nothing but a status, and of one with messages."""
_OK = block_of((("grpc-status", "0"),))
_ENCODINGS, _NO_ENCODINGS = (b"gzip", b"deflate"), (b"", b"identity")
_ANY_WRAPPING = zlib.MAX_WBITS | 32
"""Let zlib detect whether a message has the format of gzip or zlib."""
_LENGTH_DIGITS = 20
"""Number of digits that no content-length reaches."""
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""Characters that remain unquoted in the details of a status."""


class Ended(Exception):
    """The port ends the call with this status."""

    def __init__(self, status: StatusCode, details: str) -> None:
        super().__init__(details)
        self.status, self.details = status, details


class Carrier(CountedConnection, Protocol):
    """Connection as its calls see it. `leaving` is the monotonic instant at which the client was told to leave, or None before."""

    address: str
    leaving: float | None
    streams: dict[int, CallStream]
    turns: MessageTurns

    @property
    def payer(self) -> str:
        """Name under which the client waits in line for work of this connection."""

    def retire(self) -> None:
        """Tell the client to open another connection for further calls."""

    def reset(self, number: int, code: ErrorCode) -> None:
        """End a stream on which the client must not send any more."""


class CallStream:
    """Stream of one call.

    The client may send `window` bytes before the call reads. If `whole`, the client has sent everything. `task` answers the call.
    `closed` is True once nothing more can be sent. `sent` is done when the message in hand has left, or None while there is none.
    """

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
        self._room: memoryview | None = None
        """Unfilled part of the memory of a large message, or None if no such message is being read."""
        self._whole = whole
        self._missing: int | None = None
        """Bytes still to come according to the content-length, or None without one."""
        self._window = window
        self._waiting: asyncio.Future[None] | None = None
        self._begun = False
        self._unsent = memoryview(b"")
        self.sent: asyncio.Future[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, fields: Mapping[bytes, bytes]) -> None:
        """Read compression, length and time-out of the call from its header fields. Raises Ended if the time-out is malformed."""
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
        """Return the next message, or None if the client has sent all. Raises Ended if the message is incomplete, compressed in an
        unknown way, or larger than `most` bytes. With `leaves`, raises RequestError once the client has to leave."""
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
        """Return the length of the next message if it can be taken at once, or -1 if only `read` can take it."""
        received = self._received
        there = len(received) - PREFIX
        if there < 0 or received[0]:
            return -1
        length = int.from_bytes(received[1:PREFIX], "big")
        return length if length <= there and length <= most else -1

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
        return cast(bytes, content)  # Nobody changes it, so it serves as bytes.

    async def change(self) -> None:
        """Return as soon as more data have arrived, or the client has to open another connection."""
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _open(self, missing: int) -> None:
        """Widen the window for the `missing` bytes of a message and some bytes ahead."""
        if self._window < missing or self._window < WINDOW // 2:
            more = max(missing, WINDOW) - self._window
            self._window += more
            self._writer.grant(self.number, more)

    async def _unpack(self, packed: int, body: bytes, most: int) -> bytes:
        if packed > 1 or self._encoding in _NO_ENCODINGS:
            raise Ended(
                StatusCode.INTERNAL, "the message is marked as compressed in a way that grpc-encoding does not tell"
            )
        if self._encoding not in _ENCODINGS:
            if not self.closed:
                self._begin()  # Its header fields tell the known encodings.
            raise Ended(StatusCode.UNIMPLEMENTED, "the message is compressed in a way that is not known here")
        return await self.connection.turns.take(self.connection.payer, partial(_unpacked, body, most))

    def send(self, body: bytes) -> None:
        """Send a message after the last one. `sent` is set while the client has no room for all of it."""
        if self.closed:
            return
        self._begin()
        self._unsent = memoryview(b"\0%b%b" % (len(body).to_bytes(4, "big"), body))
        if not self.pump():
            self._writer.stuck[self.number] = self.pump
            self.sent = asyncio.get_running_loop().create_future()

    def answer(self, body: bytes, trailers: Metadata) -> bool:
        """End the call successfully with its only message. Return False, and send nothing, if there isn't room for all of it."""
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
        if self._unsent:  # No status can pass a message that is half sent.
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
        """End the stream without a status."""
        if not self.closed:
            self.connection.reset(self.number, ErrorCode.CANCEL)

    def pump(self) -> bool:
        """Send as much of the message in hand as there is room for. Return True if all of it is sent."""
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
        """Take data, which use `amount` of the window. Return False if the client wasn't allowed to send them."""
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
        """Put data into the memory of a large message, and keep the data beyond its end for the next message."""
        own = data[: len(room)]
        room[: len(own)] = own
        self._room = room[len(own) :]
        if len(own) < len(data):
            self._received += data[len(own) :]

    def finish_reading(self) -> bool:
        """Note that the client has sent everything. Return False if that contradicts its content-length."""
        self._whole = True
        if self._waiting is not None:
            self.wake()
        return not self._missing

    def narrow(self, amount: int) -> None:
        """Narrow the window by `amount`, as the client has done."""
        self._window -= amount
        self.wake()  # There may be no more room for the rest of a message.

    def wake(self) -> None:
        """Wake the call to check what has changed."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        """Send nothing more, and drop what isn't sent."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unsent:
            self._writer.stuck.pop(self.number, None)
            self._unsent = memoryview(b"")

    def cancel(self) -> None:
        """Cancel the call's task, because its client has left or its time is over."""
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
        raise Ended(StatusCode.INTERNAL, "the message cannot be unpacked") from None
    if len(content) > most:
        raise Ended(
            StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max ({most} bytes) once it is unpacked"
        )
    if not unpacker.eof or unpacker.unused_data:
        raise Ended(StatusCode.INTERNAL, "the message cannot be unpacked")
    return content


def _incomplete() -> Ended:
    return Ended(StatusCode.INTERNAL, "the last message of the call is incomplete")


def to_be_opened_anew() -> RequestError:
    """Return the error that ends a call whose client has to open another connection."""
    message = "the connection is to be closed, as it is old or this process goes down; open another one"
    return RequestError(message, code=DRAINING, retry_after=0.0)
