"""Watch for clients that hang up while nothing is read from them.

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
import sys
from collections.abc import Callable


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


def descriptor_of(transport: asyncio.Transport) -> int:
    """Descriptor of a transport. The system hands out the lowest free number, so it tells how many are in use."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())
