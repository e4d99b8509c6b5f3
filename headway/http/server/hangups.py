"""Clients that take no answer, or hang up while nothing is read from them.

The end of what a client sends is its departure, and it is seen by reading. While more was sent ahead of an answer than
one connection may hold, nothing is read; the system knows of the end all the same (EPOLLRDHUP), but an event loop does
not ask for it. So there is one epoll for such connections, which the event loop watches like any other descriptor.

An end that lies behind more than the system's own buffer holds has not arrived, and is seen when it has. Where there is
no epoll (outside of Linux) nothing is heard before reading goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
from collections.abc import Callable

from headway.runtime.listening import descriptor_of

STREAM_BYTES = 64 * 1024
"""Bytes of a stream that the kernel keeps for a client that does not take them. Left to itself it keeps megabytes, which are
hours of a quiet stream."""
STREAM_SILENCE = 30.0
"""Seconds after which a stream ends whose client acknowledges nothing, as its host or its network is gone."""


class Hangups:
    """Watch of one listener's clients.

    Arguments:
        loop: event loop that tells it; called within that loop alone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: dict[int, Callable[[], None]] = {}
        self._poll: select.epoll | None = None

    def watch(self, descriptor: int, gone: Callable[[], None]) -> None:
        """Call `gone` once when the other side of a socket has ended."""
        if sys.platform != "linux":
            return
        if self._poll is None:
            self._poll = select.epoll()
            self._loop.add_reader(self._poll.fileno(), self._tell)
        self._watched[descriptor] = gone
        self._poll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, descriptor: int) -> None:
        """Stop watching a socket, also one that is not watched."""
        if self._watched.pop(descriptor, None) is not None and self._poll is not None:
            with contextlib.suppress(OSError):  # It is closed.
                self._poll.unregister(descriptor)

    def close(self) -> None:
        """Stop watching all sockets."""
        if self._poll is not None:
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
            self._poll = None
            self._watched.clear()

    def _tell(self) -> None:
        if self._poll is None:
            return
        for descriptor, _ in self._poll.poll(0):
            gone = self._watched.get(descriptor)
            if gone is not None:
                self.forget(descriptor)
                gone()


class ReadGate:
    """Gate between a transport and its connection: while it is shut, nothing is read from the client.

    Arguments:
        transport: the transport.
        hangups: watch of the listener.

    Attributes:
        descriptor: number of its socket; -1 where it has none.
        held: whether it is shut.
        paused: whether it is shut and the client's departure is watched for.
    """

    __slots__ = ("_hangups", "_transport", "descriptor", "held", "paused")

    def __init__(self, transport: asyncio.Transport, hangups: Hangups) -> None:
        self._transport, self._hangups = transport, hangups
        self.descriptor = descriptor_of(transport)
        self.held = self.paused = False

    def hold(self) -> None:
        """Read nothing more from the client for now."""
        if not self.held:
            self.held = True
            self._transport.pause_reading()

    def release(self) -> None:
        """Read on."""
        if self.held:
            self.held = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def watch(self, gone: Callable[[], None]) -> None:
        """Read nothing more, and call `gone` when the client hangs up."""
        if not self.paused:
            self.paused = True
            self._hangups.watch(self.descriptor, gone)
        self.hold()

    def read_on(self) -> None:
        """Read on after `watch`."""
        if self.paused:
            self.forget()
            self.release()

    def forget(self) -> None:
        """Watch for nothing any more."""
        if self.paused:
            self.paused = False
            self._hangups.forget(self.descriptor)


def bound(transport: asyncio.BaseTransport) -> None:
    """Have the kernel notice soon that the client of a stream takes nothing."""
    connected = transport.get_extra_info("socket")
    if connected is None:
        return
    with contextlib.suppress(OSError):  # It has just been closed, or is no TCP socket.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STREAM_SILENCE * 1000))


class Unread:
    """Answers of one connection that its client has not taken.

    Attributes:
        since: monotonic instant since which some wait, in seconds; 0.0 when none do.
    """

    __slots__ = ("_left", "_moved", "_total", "since")

    def __init__(self) -> None:
        self.since = self._moved = 0.0
        self._total = self._left = 0

    def begin(self, transport: asyncio.WriteTransport, now: float) -> None:
        """Note that answers wait from now on."""
        self.since = self._moved = now
        self._total = self._left = transport.get_write_buffer_size()

    def count_whole(self, since: float, total: int) -> None:
        """Hold the client to the whole answer, which is sent bit by bit: `total` bytes since the instant `since`, in seconds."""
        self.since, self._total = since, total

    def overdue(self, transport: asyncio.WriteTransport, now: float, timeout: float, slowest: float) -> bool:
        """Whether the client has taken nothing for `timeout` seconds, or less than `slowest` bytes per second."""
        left = transport.get_write_buffer_size()
        if left < self._left:
            self._left, self._moved = left, now
        return now - self.since > timeout + self._total / slowest or now - self._moved > timeout
