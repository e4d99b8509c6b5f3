"""Listening sockets for ports of any protocol.

A socket must survive a lack of file descriptors. libuv keeps a spare descriptor, to accept and drop connections when no other
is left. If a listening socket dies anyway, a second handle keeps its queue of connections until a new socket takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import select
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway.errors import SettingError
from headway.runtime.logger import get_logger
from headway.runtime.periodic import until_tick

log = get_logger(__name__)

BACKLOG = 2048  # Maximum number of connections that the system queues until they are accepted.
HANDLES = 4  # Handles per listening socket, because libuv accepts one connection per handle and turn of the event loop.
SPARE = 32  # Descriptors that clients can't use: half to refuse them, half for workers, files and operators.
LEAST, EACH_WORKER = 64, 7  # Descriptors for a process, which opens 31 to 46, and for each worker, which opens 5.


class ListeningSocket:
    """Bound socket, with a spare handle in case the loop closes the others. `refusal` turns an OSError into a SettingError."""

    def __init__(
        self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol], refusal: Callable[[OSError], SettingError]
    ) -> None:
        self._spare = sock
        self._socks = [sock.dup() for _ in range(HANDLES)]
        self._protocol, self._refusal = protocol, refusal
        self._servers: list[asyncio.Server] = []
        self._reviving: asyncio.Task[None] | None = None
        self.port: int = sock.getsockname()[1]

    @property
    def has_waiting(self) -> bool:
        poll = select.poll()
        poll.register(self._spare, select.POLLIN)
        return bool(poll.poll(0))

    async def listen(self) -> None:
        """Listen. Raises SettingError if another program is already listening here."""
        try:
            self._spare.listen(BACKLOG)  # If uvloop did this and failed, the loop couldn't be closed.
        except OSError as exc:
            raise self._refusal(exc) from None
        await self._serve(self._socks)

    async def _serve(self, socks: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self._servers += [await loop.create_server(self._protocol, sock=sock, backlog=BACKLOG) for sock in socks]

    def revive(self) -> None:
        """Listen again if the event loop has closed a handle. uvloop does so if accepting fails for good."""
        dead = [at for at, sock in enumerate(self._socks) if sock.fileno() < 0]
        if not dead or (self._reviving is not None and not self._reviving.done()):
            return
        with contextlib.suppress(OSError):  # There are still no descriptors. The next look tries again.
            for at in dead:
                self._socks[at] = self._spare.dup()
            log.warning("a listening socket had failed and was reopened", port=self.port)
            revived = [self._socks[at] for at in dead]
            self._reviving = asyncio.get_running_loop().create_task(self._serve(revived))

    def close(self) -> None:
        """Stop listening. Connections that weren't accepted are reset."""
        if self._reviving is not None:
            self._reviving.cancel()
        for server in self._servers:
            server.close()
        for sock in (*self._socks, self._spare):
            sock.close()


class ListeningPort:
    """Base class for ports. It opens sockets, and checks connections regularly. For the arguments, see `bind`."""

    def __init__(self, host: str, port: int, host_setting: str, port_setting: str) -> None:
        self._wanted = host, port, host_setting, port_setting
        self._sockets: list[ListeningSocket] = []
        self._next_look: asyncio.TimerHandle | None = None
        self.port = 0

    def get_ready(self) -> Callable[[], asyncio.Protocol]:
        """Prepare for connections, and return their protocol factory."""
        raise NotImplementedError

    def look(self) -> float:
        """Check all connections, and return the seconds until the next check."""
        raise NotImplementedError

    async def bind(self) -> None:
        """Bind the address without listening. Raises SettingError if it can't be bound."""
        self._sockets = await bind(*self._wanted, self.get_ready())
        self.port = self._sockets[0].port

    async def open(self) -> None:
        """Listen, after `bind` if necessary. Raises SettingError as `bind` does, or if another program is already listening."""
        if not self._sockets:
            await self.bind()
        raise_descriptor_limit()
        for sock in self._sockets:
            await sock.listen()
        self.look_after()

    def look_after(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        seconds = self.look()
        for sock in self._sockets:
            sock.revive()
        self._next_look = asyncio.get_running_loop().call_later(until_tick(seconds), self.look_after)

    async def stop_listening(self) -> None:
        """Accept the waiting connections, which would otherwise be reset, and stop listening."""
        for _ in range(BACKLOG):
            if not any(sock.has_waiting for sock in self._sockets):
                break
            await asyncio.sleep(0)
        self._close_sockets()

    async def close(self) -> None:
        """Reset connections that weren't accepted, and stop checking the others."""
        self._close_sockets()
        if self._next_look is not None:
            self._next_look.cancel()

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()


async def bind(
    host: str, port: int, host_setting: str, port_setting: str, protocol: Callable[[], asyncio.Protocol]
) -> list[ListeningSocket]:
    """Bind a socket to one port (0: chosen by the system) at each address of a host, without listening. Raises SettingError about
    one of the two settings if an address can't be bound."""

    def refusal(exc: OSError) -> SettingError:
        if exc.errno == errno.EADDRINUSE:
            reason = "is taken by another program"
            hint = "Stop that program, or choose another port; 0 finds a free one."
        elif exc.errno in (errno.EACCES, errno.EPERM):
            reason, hint = "may not be used by this user", "Choose a port above 1023."
        else:
            reason = f"cannot be bound on {host}: {exc.strerror or exc}"
            return SettingError(host_setting, host, reason, "Choose an address of this machine, for example 127.0.0.1.")
        return SettingError(port_setting, port, reason, hint)

    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as exc:
        raise SettingError(host_setting, host, f"is not an address here: {exc}", "Try 127.0.0.1.") from None
    sockets: list[ListeningSocket] = []
    chosen = port
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in addresses):
            sock = _bound(family, (address[0], chosen, *address[2:]))
            sockets.append(ListeningSocket(sock, protocol, refusal))
            chosen = sockets[0].port
    except OSError as exc:
        for listening in sockets:
            listening.close()
        raise refusal(exc) from None
    return sockets


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def raise_descriptor_limit() -> None:
    """Raise the soft limit on descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # Some systems refuse an infinite limit.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_descriptor_limit(workers: int) -> None:
    """Raise SettingError if the limit on descriptors is too low for a process with this many workers."""
    limit, least = descriptors(), LEAST + EACH_WORKER * workers
    if limit is not None and limit < least:
        raise_descriptor_limit()
        limit = descriptors()
    if limit is not None and limit < least:
        needed = f"{least} open files are needed ({LEAST}, and {EACH_WORKER} for each worker), and one more for each connection"
        raise SettingError("ulimit -n", limit, needed, "Raise the hard limit, as with ulimit -Hn or LimitNOFILE=.")


def descriptors() -> int | None:
    """Return the process's limit on descriptors; None if it is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """Return the number of descriptors that this process has open."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


def descriptor_ceiling(spare: int) -> int:
    """Return the lowest descriptor that leaves fewer than `spare` free. If the limit is low, at most a quarter is kept free."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft - min(spare, soft * spare // (4 * SPARE))


def descriptor_of(transport: asyncio.Transport) -> int:
    """Return a transport's descriptor. The system assigns the lowest free number, so this shows how many are in use."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())
