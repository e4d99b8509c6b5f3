"""Answers that a client has not taken: their bytes, and whether it takes any of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket

STREAM_BYTES = 64 * 1024
"""Bytes of a stream that the kernel keeps for a client that does not take them. Left to itself it keeps megabytes, which are
hours of a quiet stream."""
STREAM_SILENCE = 30.0
"""Seconds after which a stream ends whose client acknowledges nothing, as its host or its network is gone."""


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
