"""Clients that don't read their answers, or hang up while the server doesn't read from them.

Reading shows when a client hangs up. But a connection whose client has sent too much ahead of an answer is paused. The
kernel still reports the hang-up (EPOLLRDHUP), which asyncio never asks for. So paused connections share an epoll object
of their own, which the event loop watches like any other descriptor.

A hang-up that follows more bytes than the kernel buffers arrives late, after some have been read. Without epoll (outside
Linux) a hang-up shows only when reading resumes.
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
"""Kernel send buffer of a stream. By default the kernel buffers megabytes, which are hours of a quiet stream."""
STREAM_SILENCE = 30.0
"""Seconds without an acknowledgement after which a stream ends: the client's host or network is gone."""


class Hangups:
    """Watches sockets of one listener for hang-ups, within its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: dict[int, Callable[[], None]] = {}
        self._poll: select.epoll | None = None

    def watch(self, descriptor: int, gone: Callable[[], None]) -> None:
        """Call `gone` once when the peer of a socket hangs up."""
        if sys.platform != "linux":
            return
        if self._poll is None:
            self._poll = select.epoll()
            self._loop.add_reader(self._poll.fileno(), self._report)
        self._watched[descriptor] = gone
        self._poll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None and self._poll is not None:
            with contextlib.suppress(OSError):  # It is closed.
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
    """Pauses and resumes reading from one client. `descriptor` is that of the socket, or -1. `held` is True while reading is
    paused, for whatever reason, and `paused` while the client is also watched for a hang-up."""

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
        """Pause reading, and call `gone` when the client hangs up."""
        if not self.paused:
            self.paused = True
            self._hangups.watch(self.descriptor, gone)
        self.hold()

    def read_on(self) -> None:
        """Resume reading after `watch`."""
        if self.paused:
            self.forget()
            self.release()

    def forget(self) -> None:
        if self.paused:
            self.paused = False
            self._hangups.forget(self.descriptor)


def bound(transport: asyncio.BaseTransport) -> None:
    """Limit what the kernel buffers for the client of a stream, and how long it waits for an acknowledgement."""
    connected = transport.get_extra_info("socket")
    if connected is None:
        return
    with contextlib.suppress(OSError):  # It has just been closed, or isn't a TCP socket.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STREAM_SILENCE * 1000))


class Unread:
    """Written bytes that a connection's client hasn't read. `since` is the monotonic time of the oldest, or 0.0."""

    __slots__ = ("_left", "_moved", "_total", "since")

    def __init__(self) -> None:
        self.since = self._moved = 0.0
        self._total = self._left = 0

    def begin(self, transport: asyncio.WriteTransport, now: float) -> None:
        """Note that the client doesn't read fast enough: written bytes wait from `now` on."""
        self.since = self._moved = now
        self._total = self._left = transport.get_write_buffer_size()

    def count_whole(self, since: float, total: int) -> None:
        """Measure the client's speed over a whole answer that is sent bit by bit: `total` bytes, unread since `since`."""
        self.since, self._total = since, total

    def overdue(self, transport: asyncio.WriteTransport, now: float, timeout: float, slowest: float) -> bool:
        """Return True if the client has read nothing for `timeout` seconds, or less than `slowest` bytes per second."""
        left = transport.get_write_buffer_size()
        if left < self._left:
            self._left, self._moved = left, now
        return now - self.since > timeout + self._total / slowest or now - self._moved > timeout
