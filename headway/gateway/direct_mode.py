"""Direct mode: a gateway answers by itself while the broker that the fleet shares is away.

Its fallback is the machinery of a single process, started beside: a broker of its own, batchers, and the loop that expires
what is overdue. So batching, retries, isolation of bad inputs and admission are the same there as everywhere. Its backends come
up with the gateway, to be warm when they are needed; a fallback that does not come up is tried again and again and keeps no
gateway from starting.

A fallback answers for some models, and for no request that names a version. All other requests that came before the outage, and
all tasks, wait for that broker, as at a gateway without a fallback; those that come during it are refused. So a task is either the
shared broker's, which may have it unheard, or the fallback's, and who deletes it there has deleted it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headway.core import failures
from headway.fleet.reaper import reap_on
from headway.gateway.broker_session import BrokerSession
from headway.gateway.pending import PendingRequest, PendingTable
from headway.model import Failure
from headway.ports import Broker
from headway.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from headway.worker.pools import Workers


class Fallback:
    """A gateway's own broker and the slots that serve it.

    Arguments:
        broker: in this process.
        workers: workers over it, for each model one for each batch that may run at once.
        models: names of the models that it answers for.
    """

    def __init__(self, broker: Broker, workers: Workers, models: Collection[str]) -> None:
        self.broker = broker
        self.workers = workers
        self.models = models

    def start(self, supervisor: Supervisor) -> None:
        """Start its loops, which bring the backends up."""
        supervisor.start("direct reaper", partial(reap_on, self.broker))
        self.workers.run(supervisor)

    async def wind_down(self) -> None:
        """Return when the batches that run now are done; no other is begun."""
        await self.workers.wind_down()

    async def stop(self) -> None:
        """Let go of the backends, after the loops have been stopped."""
        await self.workers.stop()


class DirectMode:
    """Way of requests to a gateway's fallback.

    Arguments:
        session: session with the broker of the fallback.
        models: names of the models that the fallback answers for.
    """

    def __init__(self, session: BrokerSession, models: Collection[str]) -> None:
        self.session = session
        self._models = models

    def refusal(self, model: str, version: str, away: Failure) -> Failure | None:
        """Refusal of a new request in direct mode; None where the fallback answers it.

        Arguments:
            model: name of a model that is served.
            version: version that the request names; empty for none.
            away: refusal of a gateway without a fallback.
        """
        if model not in self._models:
            return msgspec.structs.replace(away, message=failures.no_fallback(model))
        if version:
            return failures.no_version_here(version)
        return None

    def take_over(self, shared: BrokerSession, pending: PendingTable) -> None:
        """Take over from the session with the shared broker what the fallback answers."""
        moved = [one for one in pending.on(shared) if self._answers(one)]
        for one in moved:
            one.session, entry = self.session, one.entry
            # It may have been charged; a burst that was let in is not refused now. Nobody there claims for a version.
            one.entry = msgspec.structs.replace(entry, limits=(), version="", pinned=False)
            shared.withdraw(entry.submission)  # A key may be used at any gateway, which the broker sees to.
        shared.give_up()
        self.session.take_over([one.entry for one in moved])

    def _answers(self, one: PendingRequest) -> bool:
        """Whether the fallback answers a request. A task is asked for, followed, and deleted, at any gateway."""
        entry, of_task = one.entry, one.task or one.follows
        return entry.model in self._models and not entry.pinned and not of_task
