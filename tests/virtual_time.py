"""Event loops whose clock jumps: timers fire in order without anybody waiting for them.

    run(main)  runs the coroutine function `main(clock)` where `clock()` is the loop's time in seconds.

When nothing is ready and no timer is left, the loop would wait for ever; that is an error here.

`ServedLoop` is for tests that talk to a real server. Before its clock jumps it makes sure that the server has nothing
more to say. Over loopback what is sent is there. A server with one thread reads everybody in each round of its loop and
sends all answers at its end, so after two questions, one after the other, it has answered all that came before the first,
and told everybody whom that concerns. What is too long for one round shows in the list of its clients, which is the second
question.
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
"""Real seconds for which a server is waited for."""
GRAIN = 0.001
"""Real seconds after which a server that is busy is asked again."""
LONG = 3600.0
"""Seconds of a jump that no test means: it is made only when nothing has come for a while of real time, too."""
WHILE = 0.2
"""Real seconds for that: a busy machine may take as long to bring what a server has sent."""

_UNDER_WAY = re.compile(
    rb"^.* (?:obl|oll)=[1-9]"  # An answer that is not all sent.
    # A command not all read, but for one after a wait. Where a read ended with an argument, `qbuf` is 0.
    rb"|^.* flags=(?![^ ]*b).* (?:qbuf|argv-mem)=[1-9].* cmd=(?!client\|list)",
    re.MULTILINE,
)
"""Words in the list of clients for commands and answers that take several rounds."""


class _Selector(selectors.DefaultSelector):
    """Polls real files without waiting, and moves the loop's clock to the next timer instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
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
    """A selector loop on virtual time; starts at 1,000 s so that a forgotten zero shows."""

    patience = 0.0
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
        """Return once everything has run that can without letting time pass."""
        settling = self.create_future()
        self._settling.append(settling)
        await settling

    def settled(self) -> bool:
        """Resume what waits until nothing can run; False when nothing does."""
        settling, self._settling = self._settling, []
        for one in settling:
            if not one.done():
                one.set_result(None)
        return bool(settling)

    def hear(self) -> bool:
        """Let everything arrive that was said to us; False when there is more to come."""
        return True


class ServedLoop(VirtualLoop):
    """A loop on virtual time for clients of real servers, by their URLs. A host is an address, as a name would be looked up in
    another thread."""

    patience = PATIENCE
    hearings = int(PATIENCE / GRAIN)
    _transports: Mapping[int, asyncio.Transport]
    """The loop's own, by descriptor."""

    def __init__(self, *urls: str) -> None:
        super().__init__()
        self._lines = [_Line(url) for url in urls]

    def hear(self) -> bool:
        # A server has sent a large answer once its kernel has all of it. On a busy machine the last of it may take a moment longer to come.
        return not any(map(_is_half_read, self._transports.values())) and all(line.hear() for line in self._lines)

    def close(self) -> None:
        for line in self._lines:
            line.close()
        super().close()


def _is_half_read(transport: Any) -> bool:
    """Whether a large answer has begun to come over a connection, and not all of it is there."""
    link = transport.get_protocol()
    return (
        not transport.is_closing() and isinstance(link, Link) and link._large is not None and link._large._missing > 0
    )


class _Line:
    """A connection to one server, for questions."""

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
            self.close()  # It is down, and has said all it had to say; it may come back.
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
