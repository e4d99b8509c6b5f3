"""Reads of kept outcomes, a few at a time. An outcome may have 16 MiB, and the broker sends nothing else in the meantime.

Reads of the same outcome that come during a call share the next call. That call begins after all of them have asked, so its
result is true for each. Tenants take turns.
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
"""Maximum number of calls at once."""
Recalled = Reply | EntryState | None
Asking = asyncio.Future[Recalled]


class OutcomeReader:
    """Reader of the outcomes that one broker keeps. While `out_of_reach` returns True, a failed call fails all waiting reads."""

    def __init__(self, broker: RequestQueue, out_of_reach: Callable[[], bool]) -> None:
        self._broker, self._out_of_reach = broker, out_of_reach
        self._calls = FairSlots(MOST_CALLS)
        self._waiting: dict[tuple[str, str], list[Asking]] = {}
        """Reads without a call yet, by tenant and id."""
        self._reading: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def outcome(self, tenant: str, id: str) -> Recalled:
        """Read a task's outcome; see RequestQueue."""
        loop, key = asyncio.get_running_loop(), (tenant, id)
        asking: Asking = loop.create_future()
        self._waiting.setdefault(key, []).append(asking)
        if key not in self._reading:
            self._reading[key] = loop.create_task(self._read(key))
        return await asking

    async def _read(self, key: tuple[str, str]) -> None:
        while key in self._waiting:
            async with self._calls.of(key[0]):
                asking = [read for read in self._waiting.pop(key, ()) if not read.done()]
                if asking:
                    await self._call(key, asking)
        del self._reading[key]

    async def _call(self, key: tuple[str, str], asking: list[Asking]) -> None:
        failure: Exception | None = None
        outcome: Recalled = None
        try:
            tenant, id = key
            outcome = await self._broker.outcome(tenant, id)
        except Exception as error:
            failure = error
            if isinstance(error, BrokerUnavailable) and self._out_of_reach():
                asking += itertools.chain.from_iterable(self._waiting.values())
                self._waiting.clear()
        for read in asking:
            if not read.done():
                read.set_result(outcome) if failure is None else read.set_exception(failure)
