"""Watches the servers' memory use and eviction policy."""

from __future__ import annotations

import asyncio
import contextlib
import math

from headway.brokers.redis.link import Ask, Client
from headway.errors import BrokerUnavailable
from headway.runtime.logger import get_logger
from headway.runtime.race import end

log = get_logger(__name__)

MEMORY_AGE = 1.0  # Seconds for which a measurement is trusted.
SCARCE = 0.8  # Share of `maxmemory` above which no new entries are admitted.
KEEPING = "noeviction"  # The only eviction policy that never discards waiting entries.


class MemoryWatch:
    """Memory of the servers, when last measured.

    Attributes:
        servers: number of servers.
        smallest: the smallest `maxmemory` of any server in bytes, or 0 if none has a limit or it is unknown.
        use: bytes in use and `maxmemory`, both in total. The latter is 0 if any server has no limit.
        reports_policy: True if a change of the eviction policy is logged.
    """

    def __init__(self, client: Client, ask: Ask) -> None:
        self._client, self._ask = client, ask
        self.servers, self.smallest, self.use = 1, 0, (0, 0)
        self.reports_policy = False
        self._scarce = False
        self._evicts = ""  # Harmful eviction policies, when last read.
        self._looked_at = -math.inf
        self._looking: asyncio.Task[None] | None = None

    @property
    def pressure(self) -> bool:
        """True if the memory of a server was nearly full about a second ago."""
        self.look_soon()
        return self._scarce

    def look_soon(self) -> None:
        """Start a measurement, unless there was one in the last second."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._looked_at > MEMORY_AGE and (self._looking is None or self._looking.done()):
            self._looked_at = loop.time()
            self._looking = loop.create_task(self.look())

    async def is_scarce(self) -> bool:
        """Return True if the memory of a server is nearly full. If that measurement isn't recent, measure again first."""
        stale = self._scarce and asyncio.get_running_loop().time() - self._looked_at > 2 * MEMORY_AGE
        if not (self.pressure and stale) or self._looking is None:
            return self._scarce
        await asyncio.wait({self._looking})
        return self._scarce

    async def look(self) -> None:
        """Read memory use and eviction policy now. Does nothing if the broker is unavailable."""
        with contextlib.suppress(BrokerUnavailable):
            nodes = await self._ask(lambda: self._client.everywhere("INFO", "memory"))
            scarce = any(node.get("maxmemory") and node["used_memory"] > SCARCE * node["maxmemory"] for node in nodes)
            if scarce and not self._scarce:
                log.warning("the broker's memory is nearly full")
            elif self._scarce and not scarce:
                log.info("the broker's memory has room again")
            self._scarce = scarce
            self._check_policies({str(node.get("maxmemory_policy", KEEPING)) for node in nodes})
            self.servers = len(nodes)
            limits = [int(node.get("maxmemory") or 0) for node in nodes]
            self.use = sum(int(node["used_memory"]) for node in nodes), sum(limits) if all(limits) else 0
            self.smallest = min(filter(None, limits), default=0)

    async def close(self) -> None:
        await end(self._looking)

    def _check_policies(self, policies: set[str]) -> None:
        """Log if the eviction policy becomes harmful, and when it is right again."""
        if not self.reports_policy:
            return
        wrong = ", ".join(sorted(policies - {KEEPING}))
        if wrong and wrong != self._evicts:
            hint = f"CONFIG SET maxmemory-policy {KEEPING}"
            log.error(
                "the broker may discard waiting requests: its eviction policy was changed", policy=wrong, hint=hint
            )
        elif self._evicts and not wrong:
            log.info("the broker's eviction policy is right again", policy=KEEPING)
        self._evicts = wrong
