"""Answers that a client has not taken: their bytes, and whether it takes any of them."""

from __future__ import annotations

import asyncio


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

    def overdue(self, transport: asyncio.WriteTransport, now: float, timeout: float, slowest: float) -> bool:
        """Whether the client has taken nothing for `timeout` seconds, or less than `slowest` bytes per second."""
        left = transport.get_write_buffer_size()
        if left < self._left:
            self._left, self._moved = left, now
        return now - self.since > timeout + self._total / slowest or now - self._moved > timeout
