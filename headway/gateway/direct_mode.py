"""Direct mode: a gateway answers by itself while the fleet's shared broker is out of reach.

Its fallback consists of the parts of a single-process server: a broker, batchers, and a loop that expires overdue entries. So
batching, retries, isolation of bad inputs and admission work as usual. The backends start with the gateway, to be warm when
they are needed. A fallback that fails to start is retried, and doesn't keep the gateway from starting.

The fallback serves certain models, and no request that names a version. When an outage begins, all other pending requests and
all tasks wait for the shared broker; new ones are refused. So every task belongs to exactly one broker, where it can be deleted.
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
    from headway.worker.pool import Workers


class Fallback:
    """A gateway's own broker and its workers.

    Arguments:
        broker: broker in this process.
        workers: its workers, for each model one for every batch that may run at once.
        models: names of the models that it serves.
    """

    def __init__(self, broker: Broker, workers: Workers, models: Collection[str]) -> None:
        self.broker, self.workers, self.models = broker, workers, models

    def start(self, supervisor: Supervisor) -> None:
        """Start the loops, which start the backends."""
        supervisor.start("direct reaper", partial(reap_on, self.broker))
        self.workers.run(supervisor)

    async def wind_down(self) -> None:
        """Start no more batches, and wait until the running ones are done."""
        await self.workers.wind_down()

    async def stop(self) -> None:
        """Stop the backends. Call it after the loops have been stopped."""
        await self.workers.stop()


class DirectMode:
    """Way of requests to a gateway's fallback.

    Arguments:
        session: session with the fallback's broker.
        models: names of the models that the fallback serves.
    """

    def __init__(self, session: BrokerSession, models: Collection[str]) -> None:
        self.session, self._models = session, models

    def refusal(self, model: str, version: str, away: Failure) -> Failure | None:
        """Return the refusal of a new request in direct mode; None if the fallback serves it.

        Arguments:
            model: name of a served model.
            version: version that the request names; empty for none.
            away: refusal that a gateway without a fallback would give.
        """
        if model not in self._models:
            return msgspec.structs.replace(away, message=failures.no_fallback(model))
        if version:
            return failures.no_version_here(version)
        return None

    def take_over(self, shared: BrokerSession, pending: PendingTable) -> None:
        """Move the requests that the fallback serves to its session, from the session with the shared broker."""
        moved = [request for request in pending.on(shared) if self._serves(request)]
        for request in moved:
            request.session, entry = self.session, request.entry
            # The limits let these requests in before. The fallback's workers don't claim by version.
            request.entry = msgspec.structs.replace(entry, limits=(), version="", pinned=False)
            shared.withdraw(entry.submission)  # So that another gateway can use the idempotency key.
        shared.give_up()
        self.session.take_over([request.entry for request in moved])

    def _serves(self, request: PendingRequest) -> bool:
        entry, of_task = request.entry, request.task or request.follows  # Other gateways must find tasks.
        return entry.model in self._models and not entry.pinned and not of_task
