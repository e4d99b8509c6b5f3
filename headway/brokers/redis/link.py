"""Link to a server: a command is one write, and its answer wakes the waiting caller.

redis-py connects, logs in and selects the database. Then the link takes over the transport from redis-py's streams, which need more
time for a command than the server does. A large answer is collected in pieces and joined once, because a parser or a stream would
copy each piece several times. A large command and its short answer use the streams, which apply flow control."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import hiredis
from redis.asyncio import Redis
from redis.exceptions import (
    BusyLoadingError,
    InvalidResponse,
    MasterDownError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as NoConnection

Address = tuple[str, int]
T = TypeVar("T")

PIECE = 1 << 18  # Bytes of a large argument written per turn of the event loop.
SHORT = 1 << 10  # Maximum bytes of an argument of a small command.

_MORE = object()  # Marks an incomplete answer.
_CLOSED = "the server closed the connection"


def shown(address: Address) -> str:
    """Return HOST:PORT."""
    return f"{address[0]}:{address[1]}"


class Link(asyncio.Protocol):
    """Link to a server for one command at a time. It owns redis-py's `connection`."""

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
        # Errors become redis-py's exceptions.
        parse_error = connection._parser.parse_error
        self._large = None
        self._answers = hiredis.Reader(protocolError=InvalidResponse, replyError=parse_error, notEnoughData=_MORE)
        self._transport.set_protocol(self)

    def ask(self, command: bytes) -> asyncio.Future[Any]:
        """Send a packed command. The future's result is the answer, which may be an error. If there is no answer, the future fails."""
        waiting = self._waiting = self._loop.create_future()
        self._transport.write(command)
        return waiting

    async def ask_large(self, command: Sequence[Any]) -> bytes | None:
        """Send a command that is large or has a large answer. Its bytes are copied less often. Large strings must be ASCII, and the
        answer must not be a list."""
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
        writer: asyncio.StreamWriter = self.connection._writer
        for piece in _pieces(command):
            writer.write(piece)
            if len(piece) >= PIECE:
                await asyncio.sleep(0)
                await writer.drain()
        await writer.drain()

    def close(self) -> None:
        """Close the connection as if the server had closed it. A waiting caller gets an error."""
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
            if waiting is None:  # Unexpected reply: the stream is out of sync.
                self._transport.abort()
            elif not waiting.done():
                waiting.set_result(answer)

    def _take_large(self, large: BulkAnswer, data: bytes) -> Any:
        """Receive a piece of a large answer. Returns the complete answer or _MORE. An error is passed to the waiting caller."""
        answer = large.feed(data)
        if answer is not _MORE:
            self._large = None
        if isinstance(answer, str):
            self._fail(self.connection._parser.parse_error(answer))
            return _MORE
        return answer

    def connection_lost(self, exc: Exception | None) -> None:
        """See Protocol. Also tells the streams, because redis-py waits for them when it closes the connection."""
        self._transport = None
        self._streams.connection_lost(None)  # Without the error, because asyncio would log it if nobody retrieves it.
        self._fail(NoConnection(_CLOSED if exc is None else f"{_CLOSED}: {exc}"))

    def pause_writing(self) -> None:
        """See Protocol. Does nothing, because one small command needs no flow control."""

    def _fail(self, exc: Exception) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(exc)


def _pieces(command: Sequence[Any]) -> Iterator[bytes]:
    """Split a command into pieces of at most PIECE bytes. Large strings must be ASCII."""
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
    """Read the short answer to a large command from the streams. They may already have received part of it."""
    reader: asyncio.StreamReader = connection._reader
    line = await reader.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionResetError(_CLOSED)
    if line[:1] == b"-":
        raise connection._parser.parse_error(line[1:-2].decode(errors="replace"))
    return line[1:-2]


class BulkAnswer:
    """Collects the pieces of an answer that isn't a list."""

    __slots__ = ("_head", "_missing", "_pieces")

    def __init__(self) -> None:
        self._head = b""
        self._missing = 0  # Bytes still missing, or 0 until the head is complete.
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> Any:
        """Add received bytes. Returns the complete answer or _MORE. An error is returned as a string. Raises InvalidResponse."""
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
            raise InvalidResponse("more bytes have arrived than belong to a large answer")
        return self._joined()

    def _joined(self) -> bytes:
        """Join all pieces, except the final line break."""
        pieces, end = self._pieces, 2
        while len(pieces[-1]) <= end and len(pieces) > 1:
            end -= len(pieces.pop())
        pieces[-1] = pieces[-1][: len(pieces[-1]) - end]
        return b"".join(pieces)


KEPT = 2  # Maximum number of idle connections of an unlimited client. It makes two kinds of blocking reads.

_DEPOSED = "NOREPLICAS", "UNBLOCKED"  # Errors of a server without replicas, and of a new replica to blocking reads.


class Client(Protocol):
    """Client of the servers behind a URL. Connects on first use. `mode` is `cluster`, `sentinel` or `standalone`."""

    mode: str

    @property
    def left_at(self) -> float:
        """Event loop time at which a server was last left because it wasn't the primary, or minus infinity."""

    def watch(self) -> None:
        """If Sentinels announce changes of the primary, start listening for them."""

    async def call(self, key: str, *command: Any, large: bool = False) -> Any:
        """Send a command to the server that has a key, and return the answer. See `Server.call`."""

    async def everywhere(self, *command: Any) -> list[Any]:
        """Send a command without keys to all servers that hold keys. Returns their answers as parsed by redis-py."""

    def server_of(self, key: str) -> str:
        """Return the name of the server that has a key."""

    async def leave(self, address: Address) -> None:
        """Stop using a server that raised Deposed, and find the primary."""

    async def renew(self) -> None:
        """Replace all connections, using the current contents of the URL's files."""

    async def close(self) -> None: ...


class Ask(Protocol):
    """Returns the answer of `act`, which may take `wait` seconds longer than an ordinary call. Raises BrokerUnavailable."""

    async def __call__(self, act: Callable[[], Awaitable[T]], wait: float = 0.0) -> T: ...


class Deposed(RedisError):
    """The server at `address` accepts no writes. It isn't the primary, lacks its replicas, or is still loading."""

    def __init__(self, message: str, address: Address) -> None:
        super().__init__(message)
        self.address = address


class Server:
    """Client of one Redis server. `redis` determines the kind of connections. `most` is their maximum number, or None for blocking
    calls, whose number isn't limited."""

    def __init__(self, redis: Redis, most: int | None = None) -> None:
        self._redis = redis
        self._places = None if most is None else asyncio.Semaphore(most)
        self._kept = KEPT if most is None else most
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._outdated: set[Link] = set()  # Busy links that must be dropped once they are free.
        self._closed = False
        self.left_at = -math.inf

    async def ask(self, *command: Any) -> Any:
        """Send a command. Returns the answer as parsed by redis-py."""
        return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def call(self, *command: Any, large: bool = False) -> Any:
        """Send a command of bytes, strings and numbers, and return its raw answer. Pass `large` if the command or answer may
        be large. Each call has a link to itself, and waits if all links are busy. If a link breaks, all idle ones are closed,
        because they most likely broke as well. Raises Deposed if the server accepts no writes. See `leave`."""
        if self._places is None:
            return await self._call(command, large)
        async with self._places:
            return await self._call(command, large)

    async def _call(self, command: tuple[Any, ...], large: bool) -> Any:
        link = self._idle.pop() if self._idle else Link(self._new())
        self._busy.add(link)
        try:
            if not link.is_up:
                await self._connect(link)
            if large:
                answer = await link.ask_large(command)
            else:
                answer = await link.ask(hiredis.pack_command(command))
                if isinstance(answer, RedisError):
                    raise answer
        except BaseException as exc:
            await self._free(link)
            if not isinstance(exc, ResponseError):
                await self._disconnect(nowait=True)
            if isinstance(exc, BusyLoadingError | MasterDownError | ReadOnlyError) or str(exc).startswith(_DEPOSED):
                raise Deposed(str(exc), link.address) from exc
            raise
        finally:
            self._busy.discard(link)
        if self._outdated:
            await self._free(link)
        elif len(self._idle) < self._kept:
            self._idle.append(link)
        else:
            await link.connection.disconnect(nowait=True)
        if self._closed:
            await self._disconnect()
        return answer

    async def _connect(self, link: Link) -> None:
        await link.connect()
        if link in self._outdated:  # The link was left or renewed while it connected.
            self._outdated.discard(link)
            await link.connect()

    async def leave(self, address: Address) -> None:
        """Close all connections to an address. Waiting calls fail as if the server had closed them."""
        self.left_at = asyncio.get_running_loop().time()
        for link in self._idle:
            if link.address == address:
                await link.connection.disconnect(nowait=True)
        for link in self._busy:
            if link.address == address:
                if link.is_up:
                    link.close()
                else:
                    self._outdated.add(link)
        await self._redis.connection_pool.disconnect(inuse_connections=False)

    async def renew(self) -> None:
        """See Client. Busy connections are replaced once they are idle."""
        self._outdated |= self._busy
        await self._disconnect()
        pool = self._redis.connection_pool
        await pool.disconnect(inuse_connections=False)
        pool._available_connections.clear()

    async def close(self) -> None:
        """Close all connections. A connection that is in use is closed when its call has finished."""
        self._closed = True
        await self._disconnect()
        await self._redis.aclose()

    async def _free(self, link: Link) -> None:
        if link in self._outdated:
            self._outdated.discard(link)
            await link.connection.disconnect(nowait=True)
        else:
            self._idle.append(link)

    def _new(self) -> Any:
        return self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]

    async def _disconnect(self, nowait: bool = False) -> None:
        while self._idle:
            await self._idle.pop().connection.disconnect(nowait=nowait)
