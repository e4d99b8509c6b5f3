"""Reader of kept outcomes, a few at a time: an outcome may be 16 MiB, and a broker sends nothing else meanwhile.

Calls for one outcome never run side by side. Those that come while one is under way share the next one: it begins after
all of them asked, so what it brings is true for each. The tenants take turns.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from headway.errors import BrokerUnavailable
from headway.model import EntryState, Reply
from headway.ports import RequestQueue
from headway.runtime.fair_turns import FairSlots

MOST_CALLS = 4
"""Most calls under way at once."""

Recalled = Reply | EntryState | None
Asking = asyncio.Future[Recalled]


class OutcomeReader:
    """Reader of kept outcomes at one broker.

    Arguments:
        broker: broker that has the outcomes.
        out_of_reach: whether the broker is known not to answer. Then all waiting reads fail with the first call that
            does.
    """

    def __init__(self, broker: RequestQueue, out_of_reach: Callable[[], bool]) -> None:
        self._broker = broker
        self._out_of_reach = out_of_reach
        self._calls = FairSlots(MOST_CALLS)
        self._waiting: dict[tuple[str, str], list[Asking]] = {}
        """Reads that wait for a call, by tenant and id."""
        self._reading: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def outcome(self, tenant: str, id: str) -> Recalled:
        """See Broker."""
        loop, key = asyncio.get_running_loop(), (tenant, id)
        asking: Asking = loop.create_future()
        self._waiting.setdefault(key, []).append(asking)
        if key not in self._reading:
            self._reading[key] = loop.create_task(self._read(key))
        return await asking

    async def _read(self, key: tuple[str, str]) -> None:
        """Read an outcome as long as anybody waits for it."""
        while key in self._waiting:
            async with self._calls.of(key[0]):
                asking = [one for one in self._waiting.pop(key, ()) if not one.done()]
                if asking:
                    await self._call(key, asking)
        del self._reading[key]

    async def _call(self, key: tuple[str, str], asking: list[Asking]) -> None:
        failure: Exception | None = None
        found: Recalled = None
        try:
            tenant, id = key
            found = await self._broker.outcome(tenant, id)
        except Exception as error:
            failure = error
            if isinstance(error, BrokerUnavailable) and self._out_of_reach():
                asking += itertools.chain.from_iterable(self._waiting.values())
                self._waiting.clear()
        for one in asking:
            if not one.done():
                one.set_result(found) if failure is None else one.set_exception(failure)
