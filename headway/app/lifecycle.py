"""Lifecycle of a process: the order in which its parts start and stop.

    up     bind addresses → open the admin port → reach the broker → join the fleet → open resources → load the workers
           and run their warm-up batches → start the loops → open the public ports
    down   report not ready but keep serving for the lame-duck period → give up leadership → accept no new connections on
           the public ports → answer held requests → finish the workers' batches and end the workers → leave
           the fleet → close the admin port → stop the loops → close resources → disconnect from the broker

A process with a fallback doesn't wait for the broker: it starts in direct mode, and the parts that need the broker follow. Steps
for parts that a process lacks are skipped: a gateway has no workers, a worker has no public port, a controller has neither. On a
second signal during shutdown, the process answers held requests with 503 and exits immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from headway import errors
from headway.config import Settings
from headway.core.excerpt import excerpt
from headway.core.health import REST_EVERY
from headway.errors import BrokerUnavailable, HeadwayError, SettingError, StoreUnavailable
from headway.fleet.pace import reap_on
from headway.model import Failure
from headway.ports import Broker
from headway.runtime.logger import get_logger
from headway.runtime.race import heed_cancellation
from headway.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from headway.controller.controller import Controller
    from headway.fleet.membership import Membership
    from headway.gateway.direct_mode import Fallback
    from headway.gateway.fleet_watchers import WorkersWatcher
    from headway.gateway.gateway import Gateway
    from headway.worker.pool import Workers

log = get_logger(__name__)


class PortListener(Protocol):
    """A listening port."""

    async def bind(self) -> None:
        """Bind the address without listening. Raises SettingError if the address isn't available."""

    async def open(self) -> None:
        """Listen at the bound address. Raises SettingError if another program is already listening there."""

    def retire(self) -> None:
        """Close each connection after its next response, but still accept new connections."""

    async def drain(self) -> None:
        """Accept no new connections, and close each open connection as soon as its response is written."""

    async def close(self) -> None: ...


class BrokerConnection(Protocol):
    """A connection to a broker in another process."""

    async def open(self) -> None:
        """Connect to the broker. Raises BrokerUnavailable if it doesn't answer, SettingError if it can't be used."""

    async def close(self) -> None: ...


class Resource(Protocol):
    """A resource of a process, for example its key store. It is open before the first request, and closes after the last answer."""

    async def open(self) -> None:
        """Get ready. Raises StoreUnavailable if it isn't ready yet, SettingError if it never will be."""

    def start(self, supervisor: Supervisor) -> None:
        """Start the loops. When `close` is called later, they have already ended."""

    async def close(self) -> None:
        """Finish the remaining work in limited time, and close. Called once after `open`, even if `open` failed."""


@runtime_checkable
class Rereadable(Protocol):
    """A resource or broker connection that reads files that an operator may change."""

    @property
    def rereads(self) -> str:
        """Name of the files' content in log lines, or "" if there are no files."""

    async def reread(self) -> None:
        """Reread the files. If they can't be used, keep the previous content and raise HeadwayError."""


class Service:
    """The service of one process: its parts and listeners, with one broker. `up` is True once it has started. Listeners
    close in order. If there is a gateway, the public listener comes first, and the `further` listeners open and close with
    it. Resources open in order and close in reverse order. The connection opens first and closes last. `workers` reads the
    state of the workers once before the public port opens. `every` returns how many seconds pass between two reaps if
    nothing is due earlier."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        gateway: Gateway | None,
        pool: Workers | None,
        listeners: Sequence[PortListener],
        *,
        controller: Controller | None = None,
        membership: Membership | None = None,
        fallback: Fallback | None = None,
        connection: BrokerConnection | None = None,
        resources: Sequence[Resource] = (),
        workers: WorkersWatcher | None = None,
        further: Sequence[PortListener] = (),
        every: Callable[[], float] = lambda: REST_EVERY,
    ) -> None:
        self.up = False
        self._settings = settings
        self._broker = broker
        self._gateway = gateway
        self._pool = pool
        clients = 0 if gateway is None else 1
        self._public = [*listeners[:clients], *further]
        self._others = listeners[clients:]
        self._controller = controller
        self._membership = membership
        self._fallback = fallback
        self._connection = connection
        self._resources = resources
        self._workers = workers
        self._every = every
        self._opened: list[Resource] = []
        self._joined = False  # Until this is True, slots must not be reported: another process may have the name.
        self._supervisor = Supervisor()

    async def start(self) -> None:
        """Start the process. Raises BrokerUnavailable or StoreUnavailable if the broker, the key store or the ledger
        doesn't answer, TargetError if a worker fails to start, and SettingError if the broker can't be used, another
        process has the name, or a port isn't available."""
        try:
            for listener in (*self._public, *self._others):
                await listener.bind()
            for listener in self._others:
                await listener.open()
            connected = await self._connect()
            await self._open_resources()
            if connected and self._pool is not None:
                await self._pool.start()
            self._supervisor.start("reaper", partial(reap_on, self._broker, self._every))
            if self._fallback is not None:
                self._fallback.start(self._supervisor)
            if self._gateway is not None:
                self._gateway.start(self._supervisor)
            if connected:
                self._take_part()
            else:
                self._supervisor.start("late broker", self._connect_late)
            if connected and self._workers is not None:
                await self._workers.look()
            for listener in self._public:
                await listener.open()
            self.up = True
        except BaseException as exc:
            if isinstance(exc, HeadwayError):
                self.ends(f"did not start: {excerpt(str(exc))}")
            await self.stop()
            raise

    def ends(self, reason: str) -> None:
        """Set the reason that the fleet reports for the end of this process."""
        if self._membership is not None:
            self._membership.reason = reason

    async def drain(self) -> None:
        """Drain the process without failing a request. This takes the lame-duck period, and then at most the drain timeout."""
        if self._membership is not None:
            self._membership.leaving = True
        if self._gateway is not None and self._settings.lame_duck_ms:
            for listener in self._public:
                listener.retire()
            await asyncio.sleep(self._settings.lame_duck_ms / 1000)
            log.info("no longer accepting new connections")
        try:
            async with asyncio.timeout(self._settings.drain_s):
                if self._controller is not None:
                    await self._controller.stop()
                if self._gateway is not None:
                    await asyncio.gather(*(listener.drain() for listener in self._public))
                    await self._gateway.emptied()
                if self._fallback is not None:
                    await self._fallback.wind_down()
                if self._pool is not None:
                    await self._pool.wind_down()
                if self._membership is not None:
                    await self._membership.end()
                for listener in self._others:
                    await listener.drain()
        except TimeoutError:
            held = self._gateway.pending if self._gateway is not None else 0
            log.warning("drain time-out: answering the remaining requests with 503", held=held)

    async def stop(self) -> None:
        """End immediately: answer pending requests with 503, kill the workers, close the ports."""
        if self._gateway is not None:
            self._gateway.closed = True
            self._gateway.refuse_all(Failure(errors.DRAINING, "shutting down; ask another instance", 1.0, "draining"))
        for listener in (*self._public, *self._others):
            await listener.close()
        await self._supervisor.stop()
        if self._fallback is not None:
            await self._fallback.stop()
        if self._joined:
            if self._pool is not None:
                await self._pool.stop()
            if self._membership is not None:
                await self._membership.end()
        while self._opened:
            await self._opened.pop().close()
        if self._connection is not None:
            self._joined = False
            await self._connection.close()

    async def replace_workers(self) -> None:
        """Replace the workers one by one. Stop if a new worker fails to start."""
        if self._pool is not None:
            await self._pool.replace()
        if self._workers is not None:  # The new code may accept other inputs, which clients may send right away.
            with contextlib.suppress(BrokerUnavailable):
                await self._workers.look()

    async def reread(self) -> None:
        """Reread the files of the resources and the broker connection. If a file can't be used, keep its previous content."""
        resources: list[object] = [*self._resources, self._connection]
        for resource in resources:
            if isinstance(resource, Rereadable) and resource.rereads:
                try:
                    await resource.reread()
                    log.info("read again", what=resource.rereads)
                except HeadwayError as exc:
                    event = "rereading failed; the previous content stays in use"
                    log.error(event, what=resource.rereads, error=str(exc))

    async def _connect(self) -> bool:
        """Connect to the broker and join the fleet. With a fallback, don't wait: return False if the broker doesn't answer."""
        if self._fallback is None:
            await _patiently(self._enter)
            return True
        try:
            await self._enter()
        except BrokerUnavailable as exc:
            log.warning("the broker does not answer; starting in direct mode", error=str(exc))
            return False
        return True

    async def _enter(self) -> None:
        if self._connection is not None:
            await self._connection.open()
        if self._membership is not None:
            await self._membership.enter()
            self._membership.start(self._supervisor)
        self._joined = True

    def _take_part(self) -> None:
        if self._pool is not None:
            self._pool.run(self._supervisor)
        if self._controller is not None:
            self._controller.start(self._supervisor)

    async def _connect_late(self) -> None:
        logged = ""
        while self._membership is None or not self._membership.leaving:
            try:
                await self._enter()
            except BrokerUnavailable:
                await asyncio.sleep(CONNECT_EVERY)
            except SettingError as exc:
                if str(exc) != logged:
                    logged = str(exc)
                    log.error("the broker cannot be used; direct mode continues", error=logged)
                await asyncio.sleep(MEND_WITHIN)
            else:
                log.info("the broker answers; direct mode ends")
                self._take_part()
                return

    async def _open_resources(self) -> None:
        for resource in self._resources:
            self._opened.append(resource)
            await _patiently(resource.open)
        for resource in self._resources:
            resource.start(self._supervisor)


async def _patiently(ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Call `ask` until the broker or the store answers. After CONNECT_WITHIN seconds, raise the last error."""
    loop = asyncio.get_running_loop()
    until, logged = loop.time() + CONNECT_WITHIN, False
    while True:
        try:
            await ask()
            return
        except (BrokerUnavailable, StoreUnavailable) as exc:
            heed_cancellation()
            who, flags = ("broker", "--broker") if isinstance(exc, BrokerUnavailable) else ("store", "--ledger")
            if loop.time() >= until:
                hint = f"Start the {who}, or name another one with {flags}."
                raise type(exc)(f"{str(exc).rstrip('.')}; given up after {CONNECT_WITHIN:g} s. {hint}") from exc
            if not logged:
                logged = True
                log.warning(f"the {who} does not answer yet", error=str(exc), given_up_after=CONNECT_WITHIN)
        await asyncio.sleep(CONNECT_EVERY)


CONNECT_WITHIN = 30.0  # How many seconds a starting process waits for its broker or store.
CONNECT_EVERY = 0.5  # Seconds between two attempts to connect.
MEND_WITHIN = 5.0  # Seconds between two attempts if the broker answers but can't be used.
