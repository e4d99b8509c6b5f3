"""Link to a server: a command is one write, and its answer wakes the waiting caller.

redis-py connects, logs in and chooses the database. Then the link takes the transport over from redis-py's streams, which take more
time per command than the command itself. A large answer is collected in pieces and joined once, because a parser or a stream would
copy each piece several times. A large command and its short answer use the streams, which wait for the server to take the command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import hiredis
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import InvalidResponse, RedisError

Address = tuple[str, int]

PIECE = 1 << 18
"""Bytes of a large argument written per turn of the event loop."""
SHORT = 1 << 10
"""Maximum bytes of an argument of a small command."""

_MORE = object()
"""Marks an incomplete answer."""
_CLOSED = "the server closed the connection"


class Link(asyncio.Protocol):
    """Link to a server for one command at a time. It owns the `connection` of redis-py."""

    __slots__ = ("_answers", "_large", "_loop", "_streams", "_transport", "_waiting", "connection")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._transport: Any = None
        self._streams: Any = None
        self._answers: Any = None
        self._large: BulkAnswer | None = None
        self._waiting: asyncio.Future[Any] | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def is_up(self) -> bool:
        """True if a command can be sent, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def address(self) -> Address:
        return self.connection.host, self.connection.port

    async def connect(self) -> None:
        connection = self.connection
        if connection.is_connected:
            await connection.disconnect(nowait=True)
        await connection.connect()
        self._transport = connection._writer.transport
        self._streams = self._transport.get_protocol()
        # Raise the errors of redis-py.
        parse_error = connection._parser.parse_error
        self._large = None
        self._answers = hiredis.Reader(protocolError=InvalidResponse, replyError=parse_error, notEnoughData=_MORE)
        self._transport.set_protocol(self)

    def ask(self, command: bytes) -> asyncio.Future[Any]:
        """Send a packed command. The answer may be an error. Without an answer the future fails."""
        waiting = self._waiting = self._loop.create_future()
        self._transport.write(command)
        return waiting

    async def ask_large(self, command: Sequence[Any]) -> bytes | None:
        """Send a command that is large or has a large answer, and copy its bytes less often.

        Large texts must be ASCII, and the answer must not be a list.
        """
        if not all(
            isinstance(argument, int) or (isinstance(argument, str | bytes) and len(argument) <= SHORT)
            for argument in command
        ):
            self._transport.set_protocol(self._streams)
            await self._send(command)
            line = await _read_line(self.connection)
            self._transport.set_protocol(self)
            return line
        self._large = BulkAnswer()
        answer: bytes | None = await self.ask(hiredis.pack_command(tuple(command)))
        return answer

    async def _send(self, command: Sequence[Any]) -> None:
        """Send a command, and yield to the event loop after each piece of a large argument."""
        writer: asyncio.StreamWriter = self.connection._writer
        for piece in _pieces(command):
            writer.write(piece)
            if len(piece) >= PIECE:
                await asyncio.sleep(0)
                await writer.drain()
        await writer.drain()

    def close(self) -> None:
        """Close as if the server had done so. A waiting caller gets an error."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            if self._large is not None:
                answer = self._take_large(self._large, data)
            else:
                self._answers.feed(data)
                answer = self._answers.gets()
        except RedisError as exc:
            self._fail(exc)
            self._transport.abort()
            return
        if answer is not _MORE:
            waiting, self._waiting = self._waiting, None
            if waiting is None:  # Unsolicited reply: the stream is out of sync.
                self._transport.abort()
            elif not waiting.done():
                waiting.set_result(answer)

    def _take_large(self, large: BulkAnswer, data: bytes) -> Any:
        """Take a piece of a large answer. Returns the complete answer or _MORE. An error goes to the waiting caller."""
        answer = large.feed(data)
        if answer is not _MORE:
            self._large = None
        if isinstance(answer, str):
            self._fail(self.connection._parser.parse_error(answer))
            return _MORE
        return answer

    def connection_lost(self, exc: Exception | None) -> None:
        """See Protocol. The streams are told too, because redis-py waits for them when it closes the connection."""
        self._transport = None
        self._streams.connection_lost(None)  # Nobody may be left to take an error from them, and asyncio would log it.
        self._fail(NoConnection(_CLOSED if exc is None else f"{_CLOSED}: {exc}"))

    def pause_writing(self) -> None:
        """See Protocol. A single small command needs no pause."""

    def _fail(self, exc: Exception) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(exc)


def _pieces(command: Sequence[Any]) -> Iterator[bytes]:
    """Split a command into pieces of at most PIECE bytes. Large texts must be ASCII."""
    head = b"*%d\r\n" % len(command)
    for part in command:
        argument: Any = part if isinstance(part, bytes | bytearray | str) else str(part)
        if len(argument) <= PIECE:
            whole = argument.encode() if isinstance(argument, str) else argument
            head += b"$%d\r\n%b\r\n" % (len(whole), whole)
            continue
        yield head + b"$%d\r\n" % len(argument)
        head = b"\r\n"
        for begin in range(0, len(argument), PIECE):
            piece = argument[begin : begin + PIECE]
            yield piece.encode("ascii") if isinstance(piece, str) else piece
    yield head


async def _read_line(connection: Any) -> bytes | None:
    """Read the short answer to a large command from the streams, which may already have part of it."""
    reader: asyncio.StreamReader = connection._reader
    line = await reader.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionResetError(_CLOSED)
    if line[:1] == b"-":
        raise connection._parser.parse_error(line[1:-2].decode(errors="replace"))
    return line[1:-2]


class BulkAnswer:
    """Answer that isn't a list, collected in pieces."""

    __slots__ = ("_head", "_missing", "_pieces")

    def __init__(self) -> None:
        self._head = b""
        self._missing = 0
        """Bytes still missing, or 0 until the head is complete."""
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> Any:
        """Take received bytes. Returns the complete answer or _MORE. An error is returned as text. Raises InvalidResponse."""
        if not self._missing:
            data = self._head + data
            end = data.find(b"\r\n")
            if end < 0:
                self._head = data
                return _MORE
            kind, line = data[:1], data[1:end]
            if kind == b"-":
                return line.decode(errors="replace")
            if kind in b"+:":
                return line
            if kind != b"$" or not line.removeprefix(b"-").isdigit():
                raise InvalidResponse(f"a large answer begins with {data[:20]!r}")
            if line[:1] == b"-":
                return None
            self._missing, data = int(line) + 2, data[end + 2 :]
        self._missing -= len(data)
        self._pieces.append(data)
        if self._missing > 0:
            return _MORE
        if self._missing < 0:
            raise InvalidResponse("more bytes have come than belong to a large answer")
        return self._joined()

    def _joined(self) -> bytes:
        """Join all pieces without the final line end."""
        pieces, end = self._pieces, 2
        while len(pieces[-1]) <= end and len(pieces) > 1:
            end -= len(pieces.pop())
        pieces[-1] = pieces[-1][: len(pieces[-1]) - end]
        return b"".join(pieces)
