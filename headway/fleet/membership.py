"""Membership of a process in the fleet: a heartbeat each second, or two while it rests, and a farewell at the end."""

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

NAMESAKE_SECONDS = OFFLINE_AFTER + 2 * PERIOD
"""Seconds after which a killed process's name is free again."""


_GONE = (WorkerStatus.OFFLINE, WorkerStatus.COLD, WorkerStatus.FAILED)
"""Statuses of workers whose ids others may have: nothing runs there."""


class Membership:
    """Membership of one process in the fleet.

    Arguments:
        fleet: fleet that gets the heartbeats.
        describe: returns the process as it is now.
        clock: monotonic seconds.
        broker: broker that knows the slots of all processes.
        slots: ids of this process's own slots.
        every: returns the seconds until the next heartbeat.
        drained: hears with each heartbeat of the names of all drains; None where there are no workers.
        killed: returns how processes of workers here have ended since the last call, by worker.

    Attributes:
        reason: why it ends, in words.
        leaving: whether the process is going down: still there, but nothing new should come its way.
    """

    def __init__(
        self,
        fleet: Fleet,
        describe: Callable[[], ProcessInfo],
        clock: Callable[[], float],
        broker: Registry,
        slots: Collection[str] = (),
        every: Callable[[], float] = lambda: PERIOD,
        drained: Callable[[Collection[str]], Awaitable[None]] | None = None,
        killed: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.reason = "ended by its program"
        self.leaving = False
        self._broker = broker
        self._slots = slots
        self._fleet = fleet
        self._describe = describe
        self._drained, self._killed = drained, killed
        self._drains: Collection[str] = ()
        self._periodic = Periodic("membership", self._heartbeat, clock, every=every)
        self._entered = False

    async def enter(self) -> None:
        """Send the first heartbeat, once no other process has this process's name. A killed namesake is waited for.

        Raises:
            SettingError: another process lives under the name.
        """
        for attempt in range(int(NAMESAKE_SECONDS / PERIOD) + 1):
            namesake = await self._namesake()
            if not namesake:
                await self._end_drains()
                await self._heartbeat()
                self._entered = True
                await self._compare()
                return
            if attempt == 0:
                log.info("waits until its name is free", name=self._describe().id, in_use=namesake)
            await asyncio.sleep(PERIOD)
        hint = "Give each process a name of its own, or leave it out."
        raise SettingError("name", self._describe().id, f"is in use: {namesake}", hint)

    def start(self, supervisor: Supervisor) -> None:
        """Send heartbeats from now on."""
        self._periodic.start(supervisor)

    def soon(self) -> None:
        """Send a heartbeat now, as there is something to tell of."""
        self._periodic.soon()

    async def end(self) -> None:
        """Leave the fleet, and give up its lead. Safe to call more than once."""
        self.leaving = True
        await self._periodic.stop()
        if not self._entered:
            return  # The name may be another's.
        with contextlib.suppress(BrokerUnavailable):  # Then we are forgotten, as who says nothing is.
            await self._say_goodbye()
        self._entered = False

    async def _heartbeat(self) -> None:
        me = self._describe()
        self._drains = names = await self._fleet.heartbeat(me)
        if self._drained is not None:
            await self._drained(names)
        for worker, how in self._killed().items():
            await self._fleet.depart(Departed(id=worker, role=me.role, host=me.host, ending=EndKind.KILLED, reason=how))

    async def _say_goodbye(self) -> None:
        """Leave, and say why; the drains end with the process."""
        me, drains = self._describe(), self._drains
        drained = me.id in drains or (bool(self._slots) and drains and {*drains} >= {*self._slots})
        ending = EndKind.DRAINED if drained else EndKind.STOPPED
        gone = Departed(id=me.id, role=me.role, host=me.host, pid=me.pid, ending=ending, reason=self.reason)
        await asyncio.gather(self._fleet.depart(gone), self._fleet.leave(me.id))
        if drains:
            await self._end_drains()

    async def _end_drains(self) -> None:
        """End the drains of an earlier process of this name: a restart ends them."""
        if self._drained is not None:
            id = self._describe().id
            await self._fleet.undrain([one.name for one in await self._fleet.drains() if one.process == id])

    async def _compare(self) -> None:
        """Log the settings in which this process differs from others, though all must agree."""
        me, told = self._describe(), set()
        for member in await self._fleet.members():
            for name, own in me.shared.items():
                theirs = member.shared.get(name, own)
                if theirs != own and (name, theirs) not in told:
                    told.add((name, theirs))
                    log.warning(
                        "a setting differs from that of another process, and must be the same in all of a fleet",
                        setting=name, here=own, there=theirs, process=member.id, host=member.host,
                    )  # fmt: skip

    async def _namesake(self) -> str:
        """Describe the process that has this process's id or the id of one of its slots; empty when there is none."""
        me = self._describe()
        for member in await self._fleet.members():
            if member.id == me.id and (member.host, member.pid) != (me.host, me.pid):
                return f"by process {member.pid} on {member.host}"
        for worker in await self._broker.workers():
            if worker.worker_id in self._slots and worker.status not in _GONE:
                return f"a worker {worker.worker_id} is there already"
        return ""
