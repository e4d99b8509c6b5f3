"""Event loops whose clock jumps: timers fire in order, without real waiting.

    run(main)  runs the coroutine function `main(clock)` where `clock()` is the loop's time in seconds.

If nothing is ready and no timer is left, the loop would wait for ever; that is an error here.

`ServedLoop` is for tests that talk to a real server. Before the clock jumps, it makes sure that the server has nothing more
to send. Over loopback, data has arrived once it is sent. A single-threaded server reads from every client in each round of
its loop, and sends all answers at the end of it. So after two consecutive questions it has answered everything sent before
the first, and notified every client concerned. The second question lists the clients: commands and answers too long for one
round show there.
"""

from __future__ import annotations

import asyncio
import re
import selectors
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from headway.brokers.redis.link import Link

T = TypeVar("T")
Clock = Callable[[], float]

PATIENCE = 30.0
"""Real seconds to wait for a server."""
GRAIN = 0.001
"""Real seconds before a busy server is asked again."""
LONG = 3600.0
"""A longer jump in seconds is probably not meant by a test: it happens only if nothing has arrived for WHILE, either."""
WHILE = 0.2
"""Real seconds: a busy machine may take this long to deliver what a server has sent."""

_UNDER_WAY = re.compile(
    rb"^.* (?:obl|oll)=[1-9]"  # An answer that is only partly sent.
    # A partly read command, unless its client is blocked. If a read ended exactly at an argument, `qbuf` is 0.
    rb"|^.* flags=(?![^ ]*b).* (?:qbuf|argv-mem)=[1-9].* cmd=(?!client\|list)",
    re.MULTILINE,
)
"""Patterns in the list of clients for commands and answers that take several rounds."""


class _Selector(selectors.DefaultSelector):
    """Polls real files without waiting, and moves the loop's clock to the next timer instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        # Most waits end with a reply, which is cheaper to wait for than to ask the server whether there is none.
        ready = super().select(0 if timeout == 0 else self.loop.grain)
        if ready or timeout == 0:
            return ready
        for _ in range(self.loop.hearings):
            quiet = self.loop.hear()
            if ready := super().select(0 if quiet else GRAIN):
                return ready
            if quiet:
                break
        else:
            if self.loop.hearings:
                raise RuntimeError("virtual time stands still: somebody does not read what the server says")
        if self.loop.settled():
            return []
        if timeout is None:
            if not self.loop.patience or not (ready := super().select(self.loop.patience)):
                raise RuntimeError("virtual time stands still: no timer is set and nothing is ready")
            return ready
        if timeout > LONG and self.loop.patience and (ready := super().select(WHILE)):
            return ready
        self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A selector loop in virtual time. It starts at 1,000 s so that a forgotten zero shows."""

    patience = grain = 0.0
    hearings = 0

    def __init__(self) -> None:
        selector = _Selector()
        self.now = 1000.0
        selector.loop = self
        self._settling: list[asyncio.Future[None]] = []
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    async def settle(self) -> None:
        """Return once everything has run that can run without time passing."""
        settling = self.create_future()
        self._settling.append(settling)
        await settling

    def settled(self) -> bool:
        """Resume waiting `settle` calls once nothing else can run. Returns False if there are none."""
        settling, self._settling = self._settling, []
        for one in settling:
            if not one.done():
                one.set_result(None)
        return bool(settling)

    def hear(self) -> bool:
        """Receive everything that was sent to us. Returns False if more is on its way."""
        return True


class ServedLoop(VirtualLoop):
    """A loop in virtual time for clients of real servers, given by URL. Hosts must be addresses: names are looked up in a thread."""

    patience, grain = PATIENCE, GRAIN
    hearings = int(PATIENCE / GRAIN)
    _transports: Mapping[int, asyncio.Transport]
    """The event loop's own, by descriptor."""

    def __init__(self, *urls: str) -> None:
        super().__init__()
        self._lines = [_Line(url) for url in urls]

    def hear(self) -> bool:
        # A large answer counts as sent once the kernel has it; on a busy machine, the rest may arrive a moment later.
        return not any(map(_is_half_read, self._transports.values())) and all(line.hear() for line in self._lines)

    def close(self) -> None:
        for line in self._lines:
            line.close()
        super().close()


def _is_half_read(transport: Any) -> bool:
    """Return True if part of a large answer has arrived on a connection, but not all of it."""
    link = transport.get_protocol()
    return (
        not transport.is_closing() and isinstance(link, Link) and link._large is not None and link._large._missing > 0
    )


class _Line:
    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._socket: socket.socket | None = None

    def hear(self) -> bool:
        try:
            if self._socket is None:
                place = self._url.hostname or "", self._url.port or 6379
                self._socket = socket.create_connection(place, PATIENCE)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ask(self._socket, b"PING\r\n")
            return not _UNDER_WAY.search(self._ask(self._socket, b"CLIENT LIST\r\n"))
        except TimeoutError:
            raise RuntimeError(f"the server at {self._url.hostname}:{self._url.port} does not answer") from None
        except OSError:
            self.close()  # The server is down, and has sent all it will. It may come back.
            return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, line: socket.socket, question: bytes) -> bytes:
        line.sendall(question)
        got = _more(line)
        size = 0
        if got[:1] == b"$":
            head, _, _ = got.partition(b"\r\n")
            size = len(head) + 2 + int(head[1:])
        while len(got) < size + 2 or got[-2:] != b"\r\n":
            got += _more(line)
        if got[:1] == b"-":
            raise RuntimeError(f"the server at {self._url.hostname}:{self._url.port} says {got.decode()}")
        return got


def _more(line: socket.socket) -> bytes:
    chunk = line.recv(1 << 16)
    if not chunk:
        raise ConnectionResetError
    return chunk


def run(main: Callable[[Clock], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main(runner.get_loop().time))
