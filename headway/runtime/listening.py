"""Listening sockets of a port of any protocol.

A socket must survive the system running out of file descriptors. libuv keeps one in reserve to accept and drop connections when there is
none left. If the listening socket dies all the same, a second handle on it has kept the queue of connections, and a new
socket takes over.
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
from headway.runtime.ticks import until_tick

log = get_logger(__name__)

BACKLOG = 2048
"""Connections that the system holds until they are accepted."""

HANDLES = 4
"""Handles on a listening socket. libuv accepts one connection for each in a turn of the event loop. With a single
handle, the 300th connection would wait for 300 turns, however long each takes."""

SPARE = 32
"""File descriptors kept from clients: the first half for refusing them, the second for workers, files and operators."""

LEAST, EACH_WORKER = 64, 7
"""Descriptors that a process needs to start and to serve a few connections, and for each of its workers.

It opens 31, or 46 with two addresses for each port, and 5 for each worker; up to a quarter is spare, see `descriptor_ceiling`.
"""


class ListeningSocket:
    """Bound socket, and a second handle on it to go on with if the event loop gives the first up.

    Arguments:
        sock: the bound socket.
        protocol: makes the protocol of each connection.
        refusal: makes an error of the system's when another program listens here.
    """

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        refusal: Callable[[OSError], SettingError],
    ) -> None:
        self._spare = sock
        self._socks = [sock.dup() for _ in range(HANDLES)]
        self._protocol = protocol
        self._refusal = refusal
        self._servers: list[asyncio.Server] = []
        self._reviving: asyncio.Task[None] | None = None
        self.port: int = sock.getsockname()[1]

    @property
    def has_waiting(self) -> bool:
        """True while connections wait to be accepted."""
        poll = select.poll()
        poll.register(self._spare, select.POLLIN)
        return bool(poll.poll(0))

    async def listen(self) -> None:
        """Listen.

        Raises:
            SettingError: another program now listens here.
        """
        try:
            self._spare.listen(BACKLOG)  # A failure within uvloop would leave a loop that cannot be closed.
        except OSError as exc:
            raise self._refusal(exc) from None
        await self._serve(self._socks)

    async def _serve(self, socks: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self._servers += [await loop.create_server(self._protocol, sock=one, backlog=BACKLOG) for one in socks]

    def revive(self) -> None:
        """Listen again if the event loop closed a handle, as uvloop does when accepting fails for good."""
        dead = [at for at, one in enumerate(self._socks) if one.fileno() < 0]
        if not dead or (self._reviving is not None and not self._reviving.done()):
            return
        with contextlib.suppress(OSError):  # still out of descriptors: the next look tries again
            for at in dead:
                self._socks[at] = self._spare.dup()
            log.warning("the listener had died and was started anew", port=self.port)
            anew = [self._socks[at] for at in dead]
            self._reviving = asyncio.get_running_loop().create_task(self._serve(anew))

    def close(self) -> None:
        """Stop listening. Connections that were not accepted are cut."""
        if self._reviving is not None:
            self._reviving.cancel()
        for server in self._servers:
            server.close()
        for sock in (*self._socks, self._spare):
            sock.close()


class ListeningPort:
    """Base of the listeners of all ports: their sockets, and regular looks at all connections.

    Arguments:
        host: address to bind.
        port: port to bind, 0 to let the system choose.
        host_setting: name of the setting that `host` comes from, for errors.
        port_setting: name of the setting that `port` comes from.

    Attributes:
        port: the port, once it is bound.
    """

    def __init__(self, host: str, port: int, host_setting: str, port_setting: str) -> None:
        self._wanted = host, port, host_setting, port_setting
        self._sockets: list[ListeningSocket] = []
        self._next_look: asyncio.TimerHandle | None = None
        self.port = 0

    def get_ready(self) -> Callable[[], asyncio.Protocol]:
        """Get ready for connections. Returns the maker of their protocols."""
        raise NotImplementedError

    def look(self) -> float:
        """Look at all connections. Returns seconds until the next look."""
        raise NotImplementedError

    async def bind(self) -> None:
        """Take the address, without listening.

        Raises:
            SettingError: the address cannot be had.
        """
        self._sockets = await bind(*self._wanted, self.get_ready())
        self.port = self._sockets[0].port

    async def open(self) -> None:
        """Listen at the address, which is taken now unless `bind` did.

        Raises:
            SettingError: the address cannot be had. Of two programs that took it, the one that listens first has it.
        """
        if not self._sockets:
            await self.bind()
        raise_descriptor_limit()
        for one in self._sockets:
            await one.listen()
        self.look_after()

    def look_after(self) -> None:
        """Look at all connections, and schedule the next look."""
        if self._next_look is not None:
            self._next_look.cancel()
        seconds = self.look()
        for one in self._sockets:
            one.revive()
        self._next_look = asyncio.get_running_loop().call_later(until_tick(seconds), self.look_after)

    async def stop_listening(self) -> None:
        """Accept the connections that wait, which would otherwise be cut, and no further one."""
        for _ in range(BACKLOG):
            if not any(one.has_waiting for one in self._sockets):
                break
            await asyncio.sleep(0)
        self._close_sockets()

    async def close(self) -> None:
        """Cut connections that wait to be accepted, and stop looking at the others."""
        self._close_sockets()
        if self._next_look is not None:
            self._next_look.cancel()

    def _close_sockets(self) -> None:
        for one in self._sockets:
            one.close()
        self._sockets.clear()


async def bind(
    host: str, port: int, host_setting: str, port_setting: str, protocol: Callable[[], asyncio.Protocol]
) -> list[ListeningSocket]:
    """Bind a socket at each address of a host, all on one port, without listening yet.

    Arguments:
        host: name or address.
        port: port, 0 to let the system choose.
        host_setting: name of the setting that `host` comes from, for errors.
        port_setting: name of the setting that `port` comes from.
        protocol: makes the protocol of each connection.

    Raises:
        SettingError: the address cannot be had.
    """

    def refusal(exc: OSError) -> SettingError:
        if exc.errno == errno.EADDRINUSE:
            reason, hint = (
                "is taken by another program",
                "Stop that program, or choose another port; 0 finds a free one.",
            )
        elif exc.errno in (errno.EACCES, errno.EPERM):
            reason, hint = "may not be used by this user", "Choose a port above 1023."
        else:
            reason = f"cannot be bound on {host}: {exc.strerror or exc}"
            return SettingError(host_setting, host, reason, "Choose an address of this machine, for example 127.0.0.1.")
        return SettingError(port_setting, port, reason, hint)

    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as exc:
        raise SettingError(host_setting, host, f"is no address here: {exc}", "Try 127.0.0.1.") from None
    sockets: list[ListeningSocket] = []
    chosen = port
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            sock = _bound(family, (address[0], chosen, *address[2:]))
            sockets.append(ListeningSocket(sock, protocol, refusal))
            chosen = sockets[0].port
    except OSError as exc:
        for one in sockets:
            one.close()
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
    """Raise the soft limit on descriptors to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # Some systems refuse an infinite one; the former stays.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_descriptor_limit(workers: int) -> None:
    """Raise SettingError if a process with so many workers couldn't open what it needs to start."""
    limit, least = descriptors(), LEAST + EACH_WORKER * workers
    if limit is not None and limit < least:
        raise_descriptor_limit()
        limit = descriptors()
    if limit is not None and limit < least:
        needed = f"{least} open files are needed ({LEAST}, and {EACH_WORKER} for each worker), and one more for each connection"
        raise SettingError("ulimit -n", limit, needed, "Raise the hard limit, as with ulimit -Hn or LimitNOFILE=.")


def descriptors() -> int | None:
    """Return the limit on descriptors of the process; None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """Return the number of open descriptors."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


def descriptor_ceiling(spare: int) -> int:
    """Return the first descriptor number that leaves fewer than `spare`, or than its part of a quarter if there are few."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft - min(spare, soft * spare // (4 * SPARE))


def descriptor_of(transport: asyncio.Transport) -> int:
    """Return the descriptor of a transport. The system gives out the lowest free number, so it tells how many are in use."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())
