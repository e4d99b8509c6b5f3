"""Tells the fleet each second that this process is there, and at the end that it has left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from headway.core.health import OFFLINE_AFTER
from headway.errors import BrokerUnavailable, SettingError
from headway.model import Member
from headway.ports import Fleet
from headway.pulse import PULSE, Pulse
from headway.supervisor import Supervisor

NAMESAKE_PATIENCE = OFFLINE_AFTER + 2 * PULSE
"""Seconds in which a process of the same name that was killed is forgotten."""


class Attendance:
    """One process's place in the fleet.

    Arguments:
        fleet: is told.
        describe: the process as it is now.
        clock: monotonic seconds.

    Attributes:
        leaving: it is going down: still there, but nothing new should come its way.
    """

    def __init__(self, fleet: Fleet, describe: Callable[[], Member], clock: Callable[[], float]) -> None:
        self.leaving = False
        self._fleet = fleet
        self._describe = describe
        self._pulse = Pulse("attendance", self._attend, clock)
        self._entered = False

    async def enter(self) -> None:
        """Attend for the first time, once no other process goes by this one's id. One that was killed is waited for.

        Raises:
            SettingError: another process lives under the name.
        """
        me = self._describe()
        for _ in range(int(NAMESAKE_PATIENCE / PULSE) + 1):
            others = [m for m in await self._fleet.members() if m.id == me.id and (m.host, m.pid) != (me.host, me.pid)]
            if not others:
                await self._fleet.attend(me)
                self._entered = True
                return
            await asyncio.sleep(PULSE)
        where = f"process {others[0].pid} on {others[0].host}"
        raise SettingError("name", me.id, f"is the name of {where}", "Give each process a name of its own.")

    def start(self, supervisor: Supervisor) -> None:
        """Attend from now on, each second."""
        self._pulse.start(supervisor)

    async def end(self) -> None:
        """Leave the fleet; who led it leads no more. Safe to call more than once."""
        self.leaving = True
        await self._pulse.stop()
        if not self._entered:
            return  # The name may be another's.
        with contextlib.suppress(BrokerUnavailable):  # Then we are forgotten, as who says nothing is.
            await self._fleet.leave(self._describe().id)

    async def _attend(self) -> None:
        await self._fleet.attend(self._describe())
