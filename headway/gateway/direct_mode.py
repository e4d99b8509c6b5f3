"""Direct mode, in which a gateway answers by itself while the fleet's shared broker is out of reach.

Its fallback consists of the parts of a single-process server: a broker, batchers, and a loop that expires overdue entries. So
batching, retries, isolation of bad inputs and admission work as usual. The backends start with the gateway, to be warm when
needed. If the fallback fails to start, the gateway starts without it, and retries later.

The fallback serves certain models, but no requests that name a version. When an outage begins, pending tasks, and pending requests
that the fallback doesn't serve, wait for the shared broker. New requests that it doesn't serve are refused. So each task belongs
to a single broker, which can delete it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headway.core import failures
from headway.fleet.pace import reap_on
from headway.gateway.broker_session import BrokerSession
from headway.gateway.pending import PendingRequest, PendingTable
from headway.model import Failure
from headway.ports import Broker
from headway.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from headway.worker.pool import Workers


class Fallback:
    """A gateway's own broker and workers. A model has as many workers as batches may run at once."""

    def __init__(self, broker: Broker, workers: Workers, models: Collection[str]) -> None:
        self.broker, self.workers, self.models = broker, workers, models

    def start(self, supervisor: Supervisor) -> None:
        supervisor.start("direct reaper", partial(reap_on, self.broker))
        self.workers.run(supervisor)

    async def wind_down(self) -> None:
        """Start no more batches, and wait until the running ones are done."""
        await self.workers.wind_down()

    async def stop(self) -> None:
        """Stop the backends. Call it after the loops have been stopped."""
        await self.workers.stop()


class DirectMode:
    """Routing of requests to a gateway's fallback."""

    def __init__(self, session: BrokerSession, models: Collection[str]) -> None:
        self.session, self._models = session, models

    def refusal(self, model: str, version: str, away: Failure) -> Failure | None:
        """Return the refusal of a new request in direct mode, or None. `away` is the refusal without a fallback."""
        if model not in self._models:
            return msgspec.structs.replace(away, message=failures.no_fallback(model))
        return failures.no_version_here(version) if version else None

    def take_over(self, shared: BrokerSession, pending: PendingTable) -> None:
        """Move the requests that the fallback serves from the shared broker's session to the fallback's."""
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
