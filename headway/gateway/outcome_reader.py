"""Reader of kept outcomes, a few at a time: an outcome may be 16 MiB, and a broker sends nothing else meanwhile.

Calls for one outcome never run side by side. Those that come while one is under way share the next one: it begins after
all of them asked, so what it brings is true for each. The tenants take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.errors import BrokerUnavailable
from headway.model import EntryState, Reply
from headway.ports import RequestQueue

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
        self._waiting: dict[str, dict[str, list[Asking]]] = {}
        """Waiting reads by tenant and id; the tenant whose turn it is comes first."""
        self._calls: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def outcome(self, tenant: str, id: str) -> Recalled:
        """See Broker."""
        asking: Asking = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, {}).setdefault(id, []).append(asking)
        self._begin()
        return await asking

    def _begin(self) -> None:
        """Begin as many calls as may be under way."""
        loop = asyncio.get_running_loop()
        while len(self._calls) < MOST_CALLS and (key := self._next()) is not None:
            tenant, id = key
            ids = self._waiting.pop(tenant)
            asking = [one for one in ids.pop(id) if not one.done()]
            if ids:
                self._waiting[tenant] = ids
            if asking:
                self._calls[key] = loop.create_task(self._call(key, asking))

    def _next(self) -> tuple[str, str] | None:
        """First outcome, by the turns of the tenants, that no call is under way for."""
        outcomes = ((tenant, id) for tenant, ids in self._waiting.items() for id in ids)
        return next((key for key in outcomes if key not in self._calls), None)

    async def _call(self, key: tuple[str, str], asking: list[Asking]) -> None:
        failure: Exception | None = None
        found: Recalled = None
        try:
            found = await self._broker.outcome(*key)
        except Exception as error:
            failure = error
            if isinstance(error, BrokerUnavailable) and self._out_of_reach():
                asking += [one for ids in self._waiting.values() for some in ids.values() for one in some]
                self._waiting.clear()
        finally:
            del self._calls[key]
        for one in asking:
            if not one.done():
                one.set_result(found) if failure is None else one.set_exception(failure)
        self._begin()
