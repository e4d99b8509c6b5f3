"""Lifecycle of a process: the order in which its parts come up and go down.

    up     addresses are taken → the admin port opens → the broker answers → the fleet is told → resources open →
           workers load and pass their warm-up batch → loops start → the public ports open
    down   not ready, but serving on for the lame-duck period → no new lead is asked for → the public ports take no new
           connection → what is held is answered → workers finish, go offline and end → the fleet is told → the admin
           port closes → loops stop → resources close → the broker is let go

A process with a fallback does not wait for the broker: it comes up in direct mode, and does what needs the broker, its
workers too, when that is there.

A process has those steps that it has parts for: a gateway no workers, a worker no public port, a controller neither. A
second signal while going down answers what is still held with 503 and ends at once.
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
from headway.fleet.reaper import reap_on
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
    from headway.worker.pools import Workers

log = get_logger(__name__)


class PortListener(Protocol):
    """A listening port."""

    async def bind(self) -> None:
        """Take the address, without listening yet. Raises SettingError when it cannot be had."""
        ...

    async def open(self) -> None:
        """Listen, at the address that was taken. Raises SettingError when another program listens there by now."""
        ...

    def retire(self) -> None:
        """Have each answer end its connection, and still take new ones."""
        ...

    async def drain(self) -> None:
        """Take no new connection, and let each open one go as soon as its answer is written."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class BrokerConnection(Protocol):
    """Connection to a broker in another process."""

    async def open(self) -> None:
        """Reach the broker. Raises BrokerUnavailable when it does not answer, SettingError when it cannot be used."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class Resource(Protocol):
    """Resource of a process beside broker and workers, such as its store of keys or its ledger.

    It is open before the first request comes, and until the last one has its answer.
    """

    async def open(self) -> None:
        """Get ready.

        Raises:
            StoreUnavailable: it is not ready yet; another call is made for some seconds.
            SettingError: it will never be ready.
        """
        ...

    def start(self, supervisor: Supervisor) -> None:
        """Start its loops, if it has any. They have ended when `close` is called."""
        ...

    async def close(self) -> None:
        """Finish the remaining work in bounded time, and close. Called once after `open`, also when that failed."""
        ...


@runtime_checkable
class Rereadable(Protocol):
    """Resource, or link, with files that an operator may change."""

    @property
    def rereads(self) -> str:
        """Content of the files, as the log names it; empty when there are none."""
        ...

    async def reread(self) -> None:
        """Read the files again. Raises HeadwayError when they cannot be used; what was read before goes on."""
        ...


class Service:
    """Service of one process: its parts of gateway, workers and controller, and its listeners, over one broker.

    Arguments:
        settings: settings of the lame-duck period and the drain's time-out.
        broker: broker shared by all parts.
        gateway: gateway of the clients; None where there are none.
        pool: workers; None where there are none.
        listeners: listeners, the public one first where there is a gateway; they close in this order.
        controller: controller; None where there is none.
        membership: membership of the process in the fleet; None without a fleet.
        fallback: fallback that the gateway asks while the broker is away; None without one.
        connection: connection opened first and closed last; None when the broker is in this process.
        resources: resources, opened in this order and closed in the other one.
        workers: one of them; looks at the workers before the public port opens. None where there are no clients.
        further: further listeners of clients, which open and close with the public one.
        every: returns the seconds between two reaps while nothing is due.

    Attributes:
        up: whether the process has started.
    """

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
        self._there = False
        """Whether the process may report its slots.

        A process that stops before must not mark a namesake's slots as gone.
        """
        self._supervisor = Supervisor()

    async def start(self) -> None:
        """Start the process.

        Raises:
            BrokerUnavailable: the broker does not answer.
            StoreUnavailable: the store of keys, or the ledger, does not answer.
            TargetError: a worker does not start.
            SettingError: the broker cannot be used, another process has the name, or a port cannot be had.
        """
        try:
            for listener in (*self._public, *self._others):
                await listener.bind()
            for listener in self._others:
                await listener.open()
            met = await self._connect()
            await self._open_resources()
            if met and self._pool is not None:
                await self._pool.start()
            self._supervisor.start("reaper", partial(reap_on, self._broker, self._every))
            if self._fallback is not None:
                self._fallback.start(self._supervisor)
            if self._gateway is not None:
                self._gateway.start(self._supervisor)
            if met:
                self._take_part()
            else:
                self._supervisor.start("late broker", self._meet_late)
            if met and self._workers is not None:
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
        """Have the fleet read why this process ends."""
        if self._membership is not None:
            self._membership.reason = reason

    async def drain(self) -> None:
        """Drain the process without failing a request: within the drain time-out once the lame-duck period is over."""
        if self._membership is not None:
            self._membership.leaving = True
        if self._gateway is not None and self._settings.lame_duck_ms:
            for listener in self._public:
                listener.retire()
            await asyncio.sleep(self._settings.lame_duck_ms / 1000)
            log.info("no new connections")
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
            log.warning("drain time-out: answering what is left with 503", held=held)

    async def stop(self) -> None:
        """End at once: answer pending requests with 503, kill the workers, close the ports."""
        if self._gateway is not None:
            self._gateway.closed = True
            self._gateway.refuse_all(Failure(errors.DRAINING, "shutting down; ask another instance", 1.0, "draining"))
        for listener in (*self._public, *self._others):
            await listener.close()
        await self._supervisor.stop()
        if self._fallback is not None:
            await self._fallback.stop()
        if self._there:
            if self._pool is not None:
                await self._pool.stop()
            if self._membership is not None:
                await self._membership.end()
        while self._opened:
            await self._opened.pop().close()
        if self._connection is not None:
            self._there = False
            await self._connection.close()

    async def replace_workers(self) -> None:
        """Swap every worker for a fresh one, one after the other. The first that fails ends it, and the rest go on."""
        if self._pool is not None:
            await self._pool.replace()
        if self._workers is not None:  # Clients may send what the new code takes.
            with contextlib.suppress(BrokerUnavailable):
                await self._workers.look()

    async def reread(self) -> None:
        """Read the files of resources and the link again. A file that cannot be used changes nothing."""
        everything: list[object] = [*self._resources, self._connection]
        for one in everything:
            if isinstance(one, Rereadable) and one.rereads:
                try:
                    await one.reread()
                    log.info("read again", what=one.rereads)
                except HeadwayError as exc:
                    log.error("cannot be read again; what was known goes on", what=one.rereads, error=str(exc))

    async def _connect(self) -> bool:
        """Reach the broker, which may be starting up like this process, and join the fleet.

        False when the broker is not there and there is a fallback.
        """
        if self._fallback is None:
            await _patiently(self._enter)
            return True
        try:
            await self._enter()
        except BrokerUnavailable as exc:
            log.warning("the broker does not answer; coming up in direct mode", error=str(exc))
            return False
        return True

    async def _enter(self) -> None:
        if self._connection is not None:
            await self._connection.open()
        if self._membership is not None:
            await self._membership.enter()
            self._membership.start(self._supervisor)
        self._there = True

    def _take_part(self) -> None:
        """Start the parts that need the broker."""
        if self._pool is not None:
            self._pool.run(self._supervisor)
        if self._controller is not None:
            self._controller.start(self._supervisor)

    async def _meet_late(self) -> None:
        """Try until the broker is there and can be used, and start the parts that need it."""
        told = ""
        while self._membership is None or not self._membership.leaving:
            try:
                await self._enter()
            except BrokerUnavailable:
                await asyncio.sleep(CONNECT_EVERY)
            except SettingError as exc:
                if str(exc) != told:
                    told = str(exc)
                    log.error("the broker will not do; direct mode goes on", error=told)
                await asyncio.sleep(MEND_WITHIN)
            else:
                log.info("the broker is there; direct mode ends")
                self._take_part()
                return

    async def _open_resources(self) -> None:
        for resource in self._resources:
            self._opened.append(resource)
            await _patiently(resource.open)
        for resource in self._resources:
            resource.start(self._supervisor)


async def _patiently(ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Call `ask` again and again until the broker, or the store, answers.

    Raises:
        BrokerUnavailable, StoreUnavailable: it did not answer for CONNECT_WITHIN seconds.
    """
    loop = asyncio.get_running_loop()
    until, told = loop.time() + CONNECT_WITHIN, False
    while True:
        try:
            await ask()
            return
        except (BrokerUnavailable, StoreUnavailable) as exc:
            heed_cancellation()
            who, flags = ("broker", "--broker") if isinstance(exc, BrokerUnavailable) else ("store", "--ledger")
            if loop.time() >= until:
                hint = f"Start it, or name another with {flags}."
                raise type(exc)(f"{str(exc).rstrip('.')}; given up after {CONNECT_WITHIN:g} s. {hint}") from exc
            if not told:
                told = True
                log.warning(f"the {who} does not answer yet", error=str(exc), given_up_after=CONNECT_WITHIN)
        await asyncio.sleep(CONNECT_EVERY)


CONNECT_WITHIN = 30.0
"""Seconds for which a process that starts waits for its broker."""
CONNECT_EVERY = 0.5
"""Seconds between two attempts to reach it."""
MEND_WITHIN = 5.0
"""Seconds between two attempts while the broker that is there cannot be used."""
