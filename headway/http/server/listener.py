"""Listener: a listening port, the connections through it, and the order in which it closes.

    bind     take the address; callers are refused as if nobody was there
    open     listen → look after the connections every now and then
    retire   every answer says `Connection: close`; new connections are taken all the same
    drain    stop listening → every answer says `Connection: close` → idle connections go → none is left
    close    cut what is left

A listener must outlive the system running out of file descriptors. It refuses connections with 503 while a few
descriptors are left, so that there is something to refuse with; libuv keeps one more to accept and drop what comes when
there is none; and if the listening socket dies all the same, a second handle on it has kept the queue of connections,
and a new one takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import select
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any, cast

import structlog
from starlette.types import ASGIApp

from headway.config import Settings
from headway.errors import SettingError
from headway.http.inference.fast_path import FastPathConnection
from headway.http.server.connection import Connection
from headway.http.server.connection_context import SPARE, ConnectionContext, InferenceContext, Intake, NewId
from headway.ports import Identity
from headway.runtime.counters import Counters

log = structlog.get_logger(__name__)

SWEEP = 0.5
"""Seconds between two looks at all connections; shorter when a configured time-out is."""

BACKLOG = 2048
"""Connections that the system holds until they are accepted."""


class Listener:
    """A listening port.

    Arguments:
        host: address to bind.
        port: port to bind, 0 to let the system choose.
        prefix: prefix of the names of these two settings, for errors.
        settings: limits and times.
        make_context: builds the context that the connections share; called within the event loop.
    """

    def __init__(
        self, host: str, port: int, prefix: str, settings: Settings, make_context: Callable[[], ConnectionContext]
    ) -> None:
        self._host = host
        self._wanted_port = port
        self._prefix = prefix
        self._settings = settings
        self._make_context = make_context
        self._context: ConnectionContext | None = None
        self._listeners: list[_Listener] = []
        self._sweep: asyncio.TimerHandle | None = None
        self.port = 0

    @classmethod
    def public(
        cls,
        settings: Settings,
        intake: Intake,
        identity: Identity,
        app: ASGIApp,
        new_id: NewId,
        counters: Counters,
    ) -> Listener:
        """Listener for clients: the fast path, and `app` for all other routes."""
        return cls(
            settings.host,
            settings.port,
            "",
            settings,
            lambda: InferenceContext(app, settings, new_id, counters, intake, identity),
        )

    @classmethod
    def admin(cls, settings: Settings, app: ASGIApp, new_id: NewId, counters: Counters) -> Listener:
        """Listener for operators."""
        return cls(
            settings.admin_host,
            settings.admin_port,
            "admin_",
            settings,
            lambda: ConnectionContext(app, settings, new_id, counters),
        )

    async def bind(self) -> None:
        """Take the address, without listening.

        Raises:
            SettingError: the address cannot be had.
        """
        context = self._context = self._make_context()
        self._listeners = await self._bind(context)

    async def open(self) -> None:
        """Listen, at the address that was taken, or else is taken now.

        Raises:
            SettingError: the address cannot be had. Of two programs that took it, the one that listens first has it.
        """
        if self._context is None:
            await self.bind()
        _raise_descriptor_limit(self._settings.max_connections)
        try:
            for listener in self._listeners:
                await listener.listen()
        except OSError as exc:
            raise self._cannot_bind(exc) from None
        self._look_after()

    def retire(self) -> None:
        """Let each open connection go with its next answer, and still take new ones.

        An idle connection is kept: closing it could cross a request on its way.
        """
        if self._context is not None:
            self._context.retire()
        for connection in self._connections():
            connection.retire()

    async def drain(self) -> None:
        """Take no new connection, and let each open one go as soon as its answer is written.

        A client that uses its connection all the time hears of the end with its next answer; one that has
        been silent for a while is left without a word. Returns when no connection is left.
        """
        context = self._context
        if context is None:
            return
        for _ in range(BACKLOG):
            if not any(listener.has_callers for listener in self._listeners):
                break
            await asyncio.sleep(0)  # They are accepted; else they would be cut when the listener closes.
        context.close()
        self._stop_listening()
        for connection in self._connections():
            connection.retire()
        self._look_after()
        await context.emptied()

    async def close(self) -> None:
        """Cut what is left."""
        self._stop_listening()
        if self._sweep is not None:
            self._sweep.cancel()
        context = self._context
        if context is not None:
            context.close()
            for connection in self._connections():
                connection.shutdown()
            tasks = list(context.state.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await context.emptied()
            context.hangups.close()

    def sweep(self, now: float) -> None:
        """Look at all connections at the monotonic instant `now`, in seconds, and end what takes too long."""
        for connection in self._connections():
            try:
                connection.inspect(now)
            except Exception as exc:
                connection.fault(exc)

    def _connections(self) -> list[Connection]:
        return [] if self._context is None else cast(list[Connection], list(self._context.state.connections))

    def _look_after(self) -> None:
        """Sweep, and schedule the next sweep."""
        context = self._context
        if context is None:
            return
        if self._sweep is not None:
            self._sweep.cancel()
        context.refresh()
        context.fd_ceiling, context.fd_brink = (
            _descriptor_ceiling(context.spare),
            _descriptor_ceiling(context.spare // 2),
        )
        self._sweep_soon(context, monotonic())
        for listener in self._listeners:
            listener.revive()
        self._sweep = context.loop.call_later(_interval(context), self._look_after)

    def _sweep_soon(self, context: ConnectionContext, now: float) -> None:
        """Sweep when all that has come by `now` has been read: this process may have stood still, and not its clients.

        Timers come first after a stand-still, so this takes a turn to get behind them, and one in which is read.
        """
        loop = context.loop
        loop.call_soon(loop.call_soon, self.sweep, now)

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _bind(self, context: ConnectionContext) -> list[_Listener]:
        """Make a listening socket for each address that the host stands for, all on one port."""
        try:
            found = await context.loop.getaddrinfo(
                self._host or None, self._wanted_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (OSError, UnicodeError) as exc:
            raise SettingError(
                f"{self._prefix}host", self._host, f"is no address here: {exc}", "Try 127.0.0.1."
            ) from None
        listeners: list[_Listener] = []
        self.port = self._wanted_port
        try:
            for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
                sock = _bound(family, (address[0], self.port, *address[2:]))
                self.port = sock.getsockname()[1]
                listeners.append(_Listener(sock, context))
        except OSError as exc:
            for listener in listeners:
                listener.close()
            raise self._cannot_bind(exc) from None
        return listeners

    def _cannot_bind(self, exc: OSError) -> SettingError:
        if exc.errno == errno.EADDRINUSE:
            reason, hint = (
                "is taken by another program",
                "Stop that program, or choose another port; 0 finds a free one.",
            )
        elif exc.errno in (errno.EACCES, errno.EPERM):
            reason, hint = "may not be used by this user", "Choose a port above 1023."
        else:
            reason = f"cannot be bound on {self._host}: {exc.strerror or exc}"
            hint = "Choose an address of this machine, for example 127.0.0.1."
            return SettingError(f"{self._prefix}host", self._host, reason, hint)
        return SettingError(f"{self._prefix}port", self._wanted_port, reason, hint)


class _Listener:
    """Bound socket, and a second handle on it from which listening goes on if the event loop gives it up."""

    def __init__(self, sock: socket.socket, context: ConnectionContext) -> None:
        self._spare = sock
        self._sock = sock.dup()
        self._context = context
        self._server: asyncio.Server | None = None
        self._reviving: asyncio.Task[None] | None = None

    @property
    def has_callers(self) -> bool:
        """Whether there are connections that have not been accepted yet."""
        poll = select.poll()
        poll.register(self._spare, select.POLLIN)
        return bool(poll.poll(0))

    async def listen(self) -> None:
        context = self._context
        self._sock.listen(BACKLOG)  # A failure within uvloop would leave a loop that cannot be closed.
        protocol: Callable[[], Connection] = (
            (lambda: FastPathConnection(context))
            if isinstance(context, InferenceContext)
            else (lambda: Connection(context))
        )
        self._server = await context.loop.create_server(protocol, sock=self._sock, backlog=BACKLOG)

    def revive(self) -> None:
        """Listen again if the event loop has closed the socket, as uvloop does when accepting fails for good."""
        if self._sock.fileno() >= 0 or (self._reviving is not None and not self._reviving.done()):
            return
        with contextlib.suppress(OSError):  # still out of descriptors: the next sweep tries again
            self._sock = self._spare.dup()
            log.warning("the listener had died and was started anew", port=self._spare.getsockname()[1])
            self._reviving = self._context.loop.create_task(self.listen())

    def close(self) -> None:
        if self._reviving is not None:
            self._reviving.cancel()
        if self._server is not None:
            self._server.close()
        self._sock.close()
        self._spare.close()


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


def _interval(context: ConnectionContext) -> float:
    shortest = min(context.header_timeout, context.body_timeout, context.keep_alive)
    return max(0.01, min(SWEEP, shortest / 2, 0.05 if context.shut.is_set() else SWEEP))


def _raise_descriptor_limit(connections: int) -> None:
    """Let the process have a descriptor for each connection, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 8 * SPARE
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _descriptor_ceiling(spare: int) -> int:
    """First descriptor number that leaves less than `spare` of them, or than its part of a quarter if there are few."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft - min(spare, soft * spare // (4 * SPARE))
