"""Direct mode: a gateway answers by itself while the broker that the fleet shares is away.

It is the machinery of a single process, started beside: a broker of its own, batchers, and the loop that expires what
is overdue. So batching, retries, isolation of bad inputs and admission are the same there as everywhere. Its backends
come up with the gateway, to be warm when they are needed; a fallback that does not come up is tried again and again and
keeps no gateway from starting.
"""

from __future__ import annotations

from functools import partial

from headway.fleet.reaper import reap_on
from headway.ports import Broker
from headway.runtime.supervisor import Supervisor
from headway.worker.pool import WorkerPool


class Fallback:
    """A gateway's own broker and the slots that serve it.

    Arguments:
        broker: in this process; the gateway's `direct`.
        pool: workers over it, one for each batch that may run at once.
    """

    def __init__(self, broker: Broker, pool: WorkerPool) -> None:
        self.broker = broker
        self.pool = pool

    def start(self, supervisor: Supervisor) -> None:
        """Start its loops, which bring the backends up."""
        supervisor.start("direct reaper", partial(reap_on, self.broker))
        self.pool.run(supervisor)

    async def drain(self) -> None:
        """Return when the batches that run now are done; no other is begun."""
        await self.pool.drain()

    async def stop(self) -> None:
        """Let go of the backends, after the loops have been stopped."""
        await self.pool.stop()
