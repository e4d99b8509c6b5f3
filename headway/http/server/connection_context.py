"""State shared by all connections of a listener, and detection of clients that hang up or don't read."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from typing import Any, Literal

from headway.config import Settings
from headway.errors import RequestError
from headway.gateway.client_quotas import Quotas
from headway.http.problem import EncodeError, encode_problem
from headway.http.routing import Handler, Request
from headway.http.server.head import Head, OtherProtocol
from headway.runtime.counters import GatewayCounts
from headway.runtime.fair_turns import FairTurns
from headway.runtime.listening import descriptor_of
from headway.runtime.protocol_hints import ProtocolHints
from headway.runtime.request_id import NewId

STREAM_BYTES = 64 * 1024  # Bytes in the kernel's send buffer of a stream. The default can hold hours of a quiet stream.
STREAM_SILENCE = 30.0  # Seconds without an acknowledgement after which a stream ends: its client must be gone.


class Hangups:
    """Watches sockets of a listener for hang-ups while reading is paused."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: dict[int, Callable[[], None]] = {}
        self._poll: select.epoll | None = None

    def watch(self, descriptor: int, gone: Callable[[], None]) -> None:
        """Call `gone` once if the peer of a socket hangs up."""
        if sys.platform != "linux":
            return
        if self._poll is None:
            self._poll = select.epoll()
            self._loop.add_reader(self._poll.fileno(), self._report)
        self._watched[descriptor] = gone
        self._poll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None and self._poll is not None:
            with contextlib.suppress(OSError):  # The socket is already closed.
                self._poll.unregister(descriptor)

    def close(self) -> None:
        if self._poll is not None:
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
            self._poll = None
            self._watched.clear()

    def _report(self) -> None:
        if self._poll is None:
            return
        for descriptor, _ in self._poll.poll(0):
            gone = self._watched.get(descriptor)
            if gone is not None:
                self.forget(descriptor)
                gone()


class ReadGate:
    """Pauses and resumes reading from a client. `descriptor` is that of the socket, or -1. `held` is True while reading is
    paused. `paused` is True while the client is also being watched for a hang-up."""

    __slots__ = ("_hangups", "_transport", "descriptor", "held", "paused")

    def __init__(self, transport: asyncio.Transport, hangups: Hangups) -> None:
        self._transport, self._hangups = transport, hangups
        self.descriptor = descriptor_of(transport)
        self.held = self.paused = False

    def hold(self) -> None:
        if not self.held:
            self.held = True
            self._transport.pause_reading()

    def release(self) -> None:
        if self.held:
            self.held = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def watch(self, gone: Callable[[], None]) -> None:
        """Pause reading, and call `gone` if the client hangs up."""
        if not self.paused:
            self.paused = True
            self._hangups.watch(self.descriptor, gone)
        self.hold()

    def read_on(self) -> None:
        if self.paused:
            self.forget()
            self.release()

    def forget(self) -> None:
        if self.paused:
            self.paused = False
            self._hangups.forget(self.descriptor)


def bound(transport: asyncio.BaseTransport) -> None:
    """Limit how many bytes the kernel buffers for a stream, and how long it waits for an acknowledgement."""
    connected = transport.get_extra_info("socket")
    if connected is None:
        return
    with contextlib.suppress(OSError):  # The socket has just been closed, or isn't a TCP socket.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STREAM_SILENCE * 1000))


class Unread:
    """Written bytes that the client hasn't read yet. `since` is the monotonic time of the oldest byte, or 0.0."""

    __slots__ = ("_left", "_moved", "_total", "since")

    def __init__(self) -> None:
        self.since = self._moved = 0.0
        self._total = self._left = 0

    def begin(self, transport: asyncio.WriteTransport, now: float) -> None:
        """Start to measure how fast the client reads, because it hasn't read everything immediately."""
        self.since = self._moved = now
        self._total = self._left = transport.get_write_buffer_size()

    def count_whole(self, since: float, total: int) -> None:
        """Measure the speed over a whole answer of `total` bytes, sent in pieces and not fully read since `since`."""
        self.since, self._total = since, total

    def overdue(self, transport: asyncio.WriteTransport, now: float, timeout: float, slowest: float) -> bool:
        """Return True if the client has read nothing for `timeout` seconds, or fewer than `slowest` bytes per second."""
        left = transport.get_write_buffer_size()
        if left < self._left:
            self._left, self._moved = left, now
        return now - self.since > timeout + self._total / slowest or now - self._moved > timeout


LINGER = 1.0  # Seconds for which a refused client may continue to send.

GRACE = 1.0  # Number of idle seconds after which a closing listener closes a connection.

LARGE = 1 << 16  # Minimum size in bytes of a body or answer that is processed in turns.
SLOWEST = 16_384  # Minimum rate in bytes per second at which a client must read its answer or send an upload.


class ConnectionContext:
    """State shared by the connections of a listener.

    Connections leave `spare` file descriptors for other uses. From descriptor number `fd_ceiling` on, new connections are refused;
    from `fd_brief_at` on, they close immediately instead of lingering. Connections that pipeline many requests wait for `turns`.
    Lingering connections, whose bytes are discarded, wait for `drops`. If `closing`, each connection closes after its next answer.
    `shut` is set once the port has closed: idle connections close, and long polls are answered. `tasks` run ordinary routes."""

    label = "admin"
    spare = 8

    def __init__(self, answer: Handler, settings: Settings, new_id: NewId, counters: GatewayCounts) -> None:
        self.answer = answer
        self.settings = settings
        self.new_id = new_id
        self.encode_error: EncodeError = encode_problem
        self.counters = counters
        self.quotas = Quotas(settings)
        self.max_header = settings.max_header_bytes
        self.max_body = settings.max_body_bytes
        self.read_timeout = settings.read_timeout_ms / 1000
        self.keep_alive = settings.keep_alive_ms / 1000
        self.scheme: Literal["http", "https"] = "http"
        self.closing = False
        self.shut = asyncio.Event()
        self.date = b""
        self.fd_ceiling = self.fd_brief_at = 1 << 30
        self.loop = asyncio.get_running_loop()
        self.hangups = Hangups(self.loop)
        self.turns = FairTurns(loop=self.loop, rests=False)
        self.drops = FairTurns(loop=self.loop, rests=False)
        self._left = asyncio.Event()
        self._hints = ProtocolHints(self.label, self.loop.time)
        self.connections: set[asyncio.BaseProtocol] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.refresh()

    def fit(self, connections: int) -> None:
        """Limit the number of connections to the number of available descriptors."""

    def max_body_of(self, head: Head) -> int:
        return self.max_body

    def refresh(self) -> None:
        self.date = formatdate(usegmt=True).encode()

    def retire(self) -> None:
        self.closing = True

    def close(self) -> None:
        """Close idle connections, and all others after their next answer, because the port is closing."""
        self.retire()
        self.shut.set()

    def left(self) -> None:
        if not self.connections:
            self._left.set()

    async def emptied(self) -> None:
        while self.connections:
            self._left.clear()
            await self._left.wait()

    def refused(self, error: RequestError, tier: str | None) -> None:
        """Count a refusal under a tier. `tier` is None if the refusal has already been counted."""
        if isinstance(error, OtherProtocol):
            self._hints.tell(error.kind)
        if tier is not None:
            self.counters.refusals[error.reason or error.code.lower(), tier, ""] += 1

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def trace_head(self, head: Head, id: str, error: RequestError, begun: float) -> None:
        """Record the span of a request that is refused before its body is read."""

    def trace_answer(self, request: Request, status: int, begun: float) -> None:
        """Record the span of a request to an ordinary route that answered with an error."""
