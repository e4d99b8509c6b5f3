"""Link to a server: a command goes out in one write, and its answer wakes who waits for it.

redis-py connects: address, TLS, login and database are its business. Then the link takes the transport over from its streams,
which take more time for each command than the command itself. The pieces of an answer that is large are put together once, since a
parser, or a stream, copies each of them several times. A large command is sent by the streams,
which wait for the server to take it, and its short answer is read from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import hiredis
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import InvalidResponse, RedisError

Address = tuple[str, int]
"""Host and port of a server."""

PIECE = 1 << 18
"""Bytes of a large argument that are written in one turn of the event loop."""

SHORT = 1 << 10
"""Bytes of the longest argument of a command that is not large itself."""

_MORE = object()
"""Answer that is not whole yet."""
_CLOSED = "the server closed the connection"


class Link(asyncio.Protocol):
    """Link to a server, for one command at a time.

    Arguments:
        connection: connection of redis-py, of which this is the only user.

    Attributes:
        connection: as given.
    """

    __slots__ = ("_answers", "_large", "_loop", "_streams", "_transport", "_waiting", "connection")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._transport: Any = None
        self._streams: Any = None
        """Protocol of redis-py's streams."""
        self._answers: Any = None
        self._large: BulkAnswer | None = None
        """Answer that is read past the parser, while one is."""
        self._waiting: asyncio.Future[Any] | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def is_up(self) -> bool:
        """Whether a command can be sent, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def address(self) -> Address:
        """Host and port of the server."""
        return self.connection.host, self.connection.port

    async def connect(self) -> None:
        """Connect, anew if need be."""
        connection = self.connection
        if connection.is_connected:
            await connection.disconnect(nowait=True)
        await connection.connect()
        self._transport = connection._writer.transport
        self._streams = self._transport.get_protocol()
        # Errors are those of redis-py.
        parse_error = connection._parser.parse_error
        self._large = None
        self._answers = hiredis.Reader(protocolError=InvalidResponse, replyError=parse_error, notEnoughData=_MORE)
        self._transport.set_protocol(self)

    def ask(self, command: bytes) -> asyncio.Future[Any]:
        """Send a packed command. Its answer may be an error; the future fails when there is none."""
        waiting = self._waiting = self._loop.create_future()
        self._transport.write(command)
        return waiting

    async def ask_large(self, command: Sequence[Any]) -> bytes | None:
        """Answer to a command that is large, or has a large answer, which is no list; its large texts are ASCII. Their bytes are copied less often."""
        if not all(isinstance(one, int) or (isinstance(one, str | bytes) and len(one) <= SHORT) for one in command):
            self._transport.set_protocol(self._streams)
            await self._send(command)
            told = await _read_told(self.connection)
            self._transport.set_protocol(self)
            return told
        self._large = BulkAnswer()
        answer: bytes | None = await self.ask(hiredis.pack_command(tuple(command)))
        return answer

    async def _send(self, command: Sequence[Any]) -> None:
        """Send a command. The event loop has a turn after each piece of a large argument."""
        writer: asyncio.StreamWriter = self.connection._writer
        for piece in _pieces(command):
            writer.write(piece)
            if len(piece) >= PIECE:
                await asyncio.sleep(0)
                await writer.drain()
        await writer.drain()

    def close(self) -> None:
        """Close as the server might: who waits hears of it."""
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
            if waiting is None:  # Nobody has asked, so that later answers would be taken for others.
                self._transport.abort()
            elif not waiting.done():
                waiting.set_result(answer)

    def _take_large(self, large: BulkAnswer, data: bytes) -> Any:
        """Take a piece of a large answer. Returns the answer once it is whole; whoever waits for an error has it then."""
        answer = large.feed(data)
        if answer is not _MORE:
            self._large = None
        if isinstance(answer, str):
            self._fail(self.connection._parser.parse_error(answer))
            return _MORE
        return answer

    def connection_lost(self, exc: Exception | None) -> None:
        """See Protocol. The streams hear of it, too: whoever disconnects waits for them."""
        self._transport = None
        self._streams.connection_lost(exc)
        self._fail(NoConnection(_CLOSED if exc is None else f"{_CLOSED}: {exc}"))

    def pause_writing(self) -> None:
        """See Protocol. One command at a time needs no more room than it takes."""

    def _fail(self, exc: Exception) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(exc)


def _pieces(command: Sequence[Any]) -> Iterator[bytes]:
    """Pieces of a command, of at most PIECE bytes. Of its large arguments texts are ASCII; a body may be a bytearray."""
    head = b"*%d\r\n" % len(command)
    for one in command:
        argument: Any = one if isinstance(one, bytes | bytearray | str) else str(one)
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


async def _read_told(connection: Any) -> bytes | None:
    """Read the answer to a large command, which is short, from the streams: some of it may have come while the command was sent."""
    reader: asyncio.StreamReader = connection._reader
    line = await reader.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionResetError(_CLOSED)
    if line[:1] == b"-":
        raise connection._parser.parse_error(line[1:-2].decode(errors="replace"))
    return line[1:-2]


class BulkAnswer:
    """Answer that is no list, in the pieces in which it comes."""

    __slots__ = ("_head", "_missing", "_pieces")

    def __init__(self) -> None:
        self._head = b""
        self._missing = 0
        """Bytes that have yet to come, once the head is whole; until then 0."""
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> Any:
        """Take what came. Returns the answer when it is whole, as text if it is an error, else _MORE.

        Raises:
            InvalidResponse: it is no such answer.
        """
        if not self._missing:
            data = self._head + data
            end = data.find(b"\r\n")
            if end < 0:
                self._head = data
                return _MORE
            kind, told = data[:1], data[1:end]
            if kind == b"-":
                return told.decode(errors="replace")
            if kind in b"+:":
                return told
            if kind != b"$" or not told.removeprefix(b"-").isdigit():
                raise InvalidResponse(f"a large answer begins with {data[:20]!r}")
            if told[:1] == b"-":
                return None
            self._missing, data = int(told) + 2, data[end + 2 :]
        self._missing -= len(data)
        self._pieces.append(data)
        if self._missing > 0:
            return _MORE
        if self._missing < 0:
            raise InvalidResponse("more bytes have come than belong to a large answer")
        return self._joined()

    def _joined(self) -> bytes:
        """All pieces but for the end of the last line."""
        pieces, end = self._pieces, 2
        while len(pieces[-1]) <= end and len(pieces) > 1:
            end -= len(pieces.pop())
        pieces[-1] = pieces[-1][: len(pieces[-1]) - end]
        return b"".join(pieces)
