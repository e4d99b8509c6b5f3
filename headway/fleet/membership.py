"""A process's membership in the fleet: heartbeats every second, or every other second while it rests, and a report of its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping

from headway.core.health import OFFLINE_AFTER
from headway.errors import BrokerUnavailable, SettingError
from headway.model import Departed, EndKind, ProcessInfo, WorkerStatus
from headway.ports import Fleet, Registry
from headway.runtime.logger import get_logger
from headway.runtime.periodic import PERIOD, Periodic
from headway.runtime.supervisor import Supervisor

log = get_logger(__name__)

NAMESAKE_SECONDS = OFFLINE_AFTER + 2 * PERIOD  # Seconds after which the name of a killed process is free again.

_GONE = (WorkerStatus.OFFLINE, WorkerStatus.COLD, WorkerStatus.FAILED)  # The worker's id may be used again.


class Membership:
    """Membership of one process in the fleet.

    `describe` returns its current state. `slots` are the ids of its workers. `every` returns the seconds until the next
    heartbeat. After each heartbeat, `drained` is called with the names of all drains; it is None in a process without workers.
    `killed` returns why workers were killed since the last call, by id. `reason` says why the process ends. Once `leaving` is
    set, the process gets no new work."""

    def __init__(
        self, fleet: Fleet, describe: Callable[[], ProcessInfo], clock: Callable[[], float], broker: Registry,
        slots: Collection[str] = (), every: Callable[[], float] = lambda: PERIOD,
        drained: Callable[[Collection[str]], Awaitable[None]] | None = None, killed: Callable[[], Mapping[str, str]] = dict,
    ) -> None:  # fmt: skip
        self.reason = "ended by its program"
        self.leaving = False
        self._fleet, self._broker, self._slots, self._describe = fleet, broker, slots, describe
        self._drained, self._killed = drained, killed
        self._drains: Collection[str] = ()
        self._periodic = Periodic("membership", self._heartbeat, clock, every=every)
        self._entered = False

    async def enter(self) -> None:
        """Send the first heartbeat once the name is free. Raises SettingError if a living process is using it."""
        for attempt in range(int(NAMESAKE_SECONDS / PERIOD) + 1):
            namesake = await self._namesake()
            if not namesake:
                await self._end_drains()
                await self._heartbeat()
                self._entered = True
                await self._compare()
                return
            if attempt == 0:
                log.info("waiting until the name is free", name=self._describe().id, in_use=namesake)
            await asyncio.sleep(PERIOD)
        hint = "Give each process a name of its own, or leave it out."
        raise SettingError("name", self._describe().id, f"is in use: {namesake}", hint)

    def start(self, supervisor: Supervisor) -> None:
        self._periodic.start(supervisor)

    def soon(self) -> None:
        self._periodic.soon()

    async def end(self) -> None:
        """Leave the fleet, and give up the lead. Safe to call more than once."""
        self.leaving = True
        await self._periodic.stop()
        if not self._entered:
            return  # The name may belong to another process.
        with contextlib.suppress(BrokerUnavailable):  # The fleet forgets processes that stop reporting.
            await self._leave()
        self._entered = False

    async def _heartbeat(self) -> None:
        me = self._describe()
        self._drains = drains = await self._fleet.heartbeat(me)
        if self._drained is not None:
            await self._drained(drains)
        for worker, reason in self._killed().items():
            killed = Departed(id=worker, role=me.role, host=me.host, ending=EndKind.KILLED, reason=reason)
            await self._fleet.depart(killed)

    async def _leave(self) -> None:
        """Leave the fleet, and record why. The drains of this process end."""
        me, drains = self._describe(), self._drains
        drained = me.id in drains or (bool(self._slots) and drains and {*drains} >= {*self._slots})
        ending = EndKind.DRAINED if drained else EndKind.STOPPED
        departed = Departed(id=me.id, role=me.role, host=me.host, pid=me.pid, ending=ending, reason=self.reason)
        await asyncio.gather(self._fleet.depart(departed), self._fleet.leave(me.id))
        if drains:
            await self._end_drains()

    async def _end_drains(self) -> None:
        """End the drains that are recorded for a process with this name."""
        if self._drained is not None:
            id = self._describe().id
            await self._fleet.undrain([drain.name for drain in await self._fleet.drains() if drain.process == id])

    async def _compare(self) -> None:
        """Warn about settings that must be the same in the entire fleet, but differ from another process's."""
        me, warned = self._describe(), set()
        for member in await self._fleet.members():
            for name, own in me.shared.items():
                theirs = member.shared.get(name, own)
                if theirs != own and (name, theirs) not in warned:
                    warned.add((name, theirs))
                    log.warning(
                        "a setting differs from another process's, but must be the same in the entire fleet",
                        setting=name, here=own, there=theirs, process=member.id, host=member.host,
                    )  # fmt: skip

    async def _namesake(self) -> str:
        """Describe who else has this process's name or one of its worker ids. Return "" if nobody has."""
        me = self._describe()
        for member in await self._fleet.members():
            if member.id == me.id and (member.host, member.pid) != (me.host, me.pid):
                return f"by process {member.pid} on {member.host}"
        for worker in await self._broker.workers():
            if worker.worker_id in self._slots and worker.status not in _GONE:
                return f"a worker {worker.worker_id} already exists"
        return ""
