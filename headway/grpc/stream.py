"""Stream of HTTP/2 that carries a call: its metadata, its messages both ways, and its status.

A message is a byte that says whether it is compressed, four bytes with its length, and its content. The client may send WINDOW bytes
ahead of the call, and the rest of a message once the call reads it.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, cast
from urllib.parse import quote_from_bytes

from headway.errors import DRAINING, RequestError
from headway.grpc.header_blocks import RequestFields, block_of
from headway.grpc.http2 import ErrorCode
from headway.grpc.statuses import Metadata, StatusCode
from headway.runtime.memory_reuse import unfilled

if TYPE_CHECKING:
    from headway.grpc.connection import CallConnection

WINDOW = 1 << 13
"""Bytes that a client may send ahead of the call that reads, on each stream."""

PREFIX = 5
"""Bytes of a message before its content."""
_LARGE = 1 << 14
"""Bytes of a message from which it is put together once, in room of its own."""

AHEAD = 128
"""Bytes of room before the content of a large message, for the header of a packed value whose data end it."""

_KIND = ((":status", "200"), ("content-type", "application/grpc"))
_TRAILERS_ONLY = block_of(_KIND)
_HEAD = block_of((*_KIND, ("grpc-accept-encoding", "identity, deflate, gzip")))
"""Header fields of an answer with nothing but a status, and of one with messages."""
_OK = block_of((("grpc-status", "0"),))
_ENCODINGS, _NO_ENCODINGS = (b"gzip", b"deflate"), (b"", b"identity")
_ANY_WRAPPING = zlib.MAX_WBITS | 32
"""Wish that zlib finds out by itself whether a message is in the format of gzip or its own."""

_LENGTH_DIGITS = 20
"""Digits that no content-length has."""
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}

_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""Characters that the details of a status have as they are."""


class Ended(Exception):
    """The port ends a call by itself, by a status that says all.

    Arguments:
        status: the status.
        details: its details.
    """

    def __init__(self, status: StatusCode, details: str) -> None:
        super().__init__(details)
        self.status, self.details = status, details


class CallStream:
    """Stream of one call.

    Arguments:
        connection: connection that it is on.
        number: its number.
        head: header fields that it began with.
        window: bytes that the client may send before the call reads.
        whole: whether the client has sent all.

    Attributes:
        task: task that answers the call.
        closed: whether nothing more can be sent on it.
        sent: is done when the message in hand has left; None while there is none.
    """

    __slots__ = (
        "_begun", "_deadline", "_encoding", "_missing", "_received", "_room", "_timer", "_unsent", "_waiting", "_whole", "_window", "closed", "connection",
        "head", "number", "sent", "task",
    )  # fmt: skip

    def __init__(self, connection: CallConnection, number: int, head: RequestFields, window: int, whole: bool) -> None:
        self.connection, self.number, self.head = connection, number, head
        self.task: asyncio.Task[None] | None = None
        self.closed = False
        self._encoding = b""
        self._received = bytearray()
        self._room: memoryview | None = None
        """Room of a large message that is read, as far as it is not filled; None while none is."""
        self._whole = whole
        self._missing: int | None = None
        """Bytes that are still to come by the content-length; None where there is none."""
        self._window = window
        """Bytes that the client may still send."""
        self._waiting: asyncio.Future[None] | None = None
        self._begun = False
        """Whether the answer has begun."""
        self._unsent = memoryview(b"")
        self.sent: asyncio.Future[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, fields: Mapping[bytes, bytes]) -> None:
        """Take note of what the header fields say of the time that the call has, and of its messages.

        Raises:
            Ended: the time is malformed.
        """
        self._encoding = fields.get(b"grpc-encoding", b"")
        length, timeout = fields.get(b"content-length"), fields.get(b"grpc-timeout")
        if length is not None:
            self._missing = int(length) if length.isdigit() and len(length) < _LENGTH_DIGITS else -1
        if timeout is not None:
            found = _TIMEOUT.fullmatch(timeout)
            if found is None:
                raise Ended(StatusCode.INTERNAL, "the metadata grpc-timeout is malformed")
            seconds = int(found[1]) * _UNITS[found[2]]
            self._deadline = monotonic() + seconds
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline; None where it has none."""
        return None if self._deadline is None else self._deadline - monotonic()

    # What the call does.

    async def read(self, most: int, *, leaves: bool = False) -> bytes | None:
        """Return the next message; None: the client has sent all.

        Arguments:
            most: most bytes that it may have, also once it is unpacked.
            leaves: whether the call is to end when the client is to open another connection.

        Raises:
            Ended: it is too large, incomplete, or compressed in a way that is not known.
            RequestError: the client is to open another connection.
        """
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
                if length > _LARGE and missing > 0:
                    packed, body = received[0], await self._read_large(length, leaves)
                    return await self._unpack(packed, body, most) if packed else body
                if missing <= 0:
                    packed, body = received[0], self.take_message(length)
                    return await self._unpack(packed, body, most) if packed else body
            if self._whole:
                if received:
                    raise _incomplete()
                return None
            self._open(missing)
            await self.change()

    def length_there(self, most: int) -> int:
        """Bytes of the next message, if all of it is there as it was meant; -1: it is to be waited for, unpacked or refused, by `read`."""
        received = self._received
        there = len(received) - PREFIX
        if there < 0 or received[0]:
            return -1
        length = int.from_bytes(received[1:PREFIX], "big")
        return length if length <= there and length <= most else -1

    def take_message(self, length: int) -> bytes:
        """Take the next message, all of which is there."""
        received = self._received
        body = bytes(memoryview(received)[PREFIX : PREFIX + length])
        del received[: PREFIX + length]
        return body

    async def _read_large(self, length: int, leaves: bool) -> bytes:
        """Content of a large message, whose prefix is there; see `read`."""
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
        """Return as soon as more has come, or the client is to open another connection."""
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def send(self, body: bytes) -> None:
        """Send a message, behind the last one. What the client does not take yet leaves later: `sent` tells when."""
        if self.closed:
            return
        self._begin()
        self._unsent = memoryview(b"\0%b%b" % (len(body).to_bytes(4, "big"), body))
        if not self.pump():
            self.connection.stuck[self] = None
            self.sent = asyncio.get_running_loop().create_future()

    def answer(self, body: bytes, trailers: Metadata) -> bool:
        """End a call without an error whose only message is this, all at once; False, and nothing is sent, where it cannot be."""
        if self._begun or self.closed:
            return False
        return self.connection.send_answer(self, _HEAD, body, _OK + block_of(trailers), whole=self._whole)

    def end(self, status: StatusCode, details: str = "", trailers: Metadata = ()) -> None:
        """End the call with a status, unless it has ended."""
        if self.closed:
            return
        if self._unsent:  # No status can pass a message that is half sent.
            self.reset()
            return
        if status is StatusCode.OK and not details:
            block = _OK + block_of(trailers)
        else:
            told = ("grpc-message", quote_from_bytes(details.encode(), _PLAIN))
            block = block_of((("grpc-status", str(int(status))), *((told,) if details else ()), *trailers))
        self.connection.send_headers(self, block if self._begun else _TRAILERS_ONLY + block, end=True)
        self.connection.finish(self, whole=self._whole)

    def refuse(self, status: bytes) -> None:
        """End the stream with a status of HTTP, as it carries no call."""
        self.connection.send_headers(self, block_of(((":status", status.decode()),)), end=True)
        self.connection.finish(self, whole=self._whole)

    def reset(self) -> None:
        """End the stream without a status."""
        if not self.closed:
            self.connection.reset(self, ErrorCode.CANCEL)

    # What the connection does.

    def take(self, data: bytes | memoryview, amount: int) -> bool:
        """Take what has come; `amount` is what it takes of the window. Returns whether the client was allowed to send it."""
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
            self.connection.grant(self, amount - size)
        if self._waiting is not None and not self._room:
            self.wake()
        return True

    def _fill(self, room: memoryview, data: bytes | memoryview) -> None:
        """Put data into the room of a large message, and what is beyond it aside."""
        own = data[: len(room)]
        room[: len(own)] = own
        self._room = room[len(own) :]
        if len(own) < len(data):
            self._received += data[len(own) :]

    def finish_reading(self) -> bool:
        """Note that the client has sent all. Returns whether that is as much as it has said."""
        self._whole = True
        if self._waiting is not None:
            self.wake()
        return not self._missing

    def narrow(self, amount: int) -> None:
        """Let the client send less ahead; it heeds that already."""
        self._window -= amount

    def wake(self) -> None:
        """Let the call look at what has changed."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def pump(self) -> bool:
        """Send as much of the message in hand as the client takes. Returns whether that is all of it."""
        unsent = self._unsent
        while unsent:
            size = self.connection.send_data(self, unsent)
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

    def close(self) -> None:
        """Let go of everything, and end the call if it goes on."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unsent:
            self.connection.stuck.pop(self, None)
            self._unsent = memoryview(b"")

    def cancel(self) -> None:
        """End the call, as its client has left or its time is over."""
        if self.task is not None:
            self.task.cancel()
            self.task = None

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self.connection.send_headers(self, _HEAD)

    def _open(self, missing: int) -> None:
        """Let the client send what is missing of a message, and something ahead."""
        if self._window < missing or self._window < WINDOW // 2:
            more = max(missing, WINDOW) - self._window
            self._window += more
            self.connection.grant(self, more)

    async def _unpack(self, packed: int, body: bytes, most: int) -> bytes:
        if packed > 1 or self._encoding in _NO_ENCODINGS:
            raise Ended(
                StatusCode.INTERNAL, "the message is marked as compressed in a way that grpc-encoding does not tell"
            )
        if self._encoding not in _ENCODINGS:
            if not self.closed:
                self._begin()  # Its header fields say which encodings are known.
            raise Ended(StatusCode.UNIMPLEMENTED, "the message is compressed in a way that is not known here")
        return await self.connection.in_turn(partial(self._unpacked, body, most))

    def _unpacked(self, body: bytes, most: int, waited: float) -> bytes:
        unpacker = zlib.decompressobj(_ANY_WRAPPING)
        try:
            found = unpacker.decompress(body, most + 1)
        except zlib.error:
            raise Ended(StatusCode.INTERNAL, "the message cannot be unpacked") from None
        if len(found) > most:
            raise Ended(
                StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max ({most} bytes) once it is unpacked"
            )
        if not unpacker.eof or unpacker.unused_data:
            raise Ended(StatusCode.INTERNAL, "the message cannot be unpacked")
        return found

    def _expire(self) -> None:
        self._timer = None
        self.end(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self.cancel()


def _incomplete() -> Ended:
    return Ended(StatusCode.INTERNAL, "the last message of the call is incomplete")


def to_be_opened_anew() -> RequestError:
    """Error that ends a call whose client is to open another connection."""
    message = "the connection is to be closed, as it is old or this process goes down; open another one"
    return RequestError(message, code=DRAINING, retry_after=0.0)
