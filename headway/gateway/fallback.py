"""Direct mode: a gateway answers by itself while the broker that the fleet shares is away.

It is the machinery of a single process, started beside: a broker of its own, batchers, and the loop that expires what
is overdue. So batching, retries, isolation of bad inputs and admission are the same there as everywhere. Its backends
come up with the gateway, to be warm when they are needed; a fallback that does not come up is tried again and again and
keeps no gateway from starting.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from headway.fleet.reaper import reap_on
from headway.ports import Broker
from headway.runtime.supervisor import Supervisor
from headway.worker.pools import Workers


class Fallback:
    """A gateway's own broker and the slots that serve it.

    Arguments:
        broker: in this process.
        workers: workers over it, for each model one for each batch that may run at once.
        versions: version that requests for a model may name, by the models that it answers for; empty for none.
    """

    def __init__(self, broker: Broker, workers: Workers, versions: Mapping[str, str]) -> None:
        self.broker = broker
        self.workers = workers
        self.versions = versions

    def start(self, supervisor: Supervisor) -> None:
        """Start its loops, which bring the backends up."""
        supervisor.start("direct reaper", partial(reap_on, self.broker))
        self.workers.run(supervisor)

    async def drain(self) -> None:
        """Return when the batches that run now are done; no other is begun."""
        await self.workers.drain()

    async def stop(self) -> None:
        """Let go of the backends, after the loops have been stopped."""
        await self.workers.stop()
