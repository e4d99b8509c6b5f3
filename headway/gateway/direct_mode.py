"""Direct mode, in which a gateway answers requests on its own while the fleet's shared broker is unreachable.

The gateway's fallback has the parts of a single-process server: a broker, batchers, and a loop that expires overdue entries. So
batching, retries, isolation of bad inputs, and admission work as usual. The backends start together with the gateway, so that they
are warm when needed. If the fallback fails to start, the gateway starts without it, and retries later.

The fallback serves certain models, but not requests that name a version. When an outage begins, pending tasks, and pending requests that
the fallback doesn't serve, wait for the shared broker. New requests that the fallback doesn't serve are refused. So each task belongs to
exactly one broker, which can delete it."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headway.core import failures
from headway.fleet.pace import reap_on
from headway.gateway.broker_session import BrokerSession
from headway.gateway.pending import PendingTable
from headway.model import Failure
from headway.ports import Broker
from headway.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from headway.worker.pool import Workers


class Fallback:
    """A gateway's own broker and workers. A model has one worker for each batch that may run at the same time."""

    def __init__(self, broker: Broker, workers: Workers, models: Collection[str]) -> None:
        self.broker, self.workers, self.models = broker, workers, models

    def start(self, supervisor: Supervisor) -> None:
        supervisor.start("direct reaper", partial(reap_on, self.broker))
        self.workers.run(supervisor)

    async def wind_down(self) -> None:
        """Stop claiming batches, and wait until the running ones have finished."""
        await self.workers.wind_down()

    async def stop(self) -> None:
        """Stop the backends. Call this after the loops have stopped."""
        await self.workers.stop()


class DirectMode:
    """Routes requests to a gateway's fallback."""

    def __init__(self, session: BrokerSession, models: Collection[str]) -> None:
        self.session, self._models = session, models

    def refusal(self, model: str, version: str, away: Failure) -> Failure | None:
        """Return the failure for a new request, or None if the fallback serves it. If the fallback lacks the model, the failure
        is `away` with another message."""
        if model not in self._models:
            return msgspec.structs.replace(away, message=failures.no_fallback(model))
        return failures.no_version_here(version) if version else None

    def take_over(self, shared: BrokerSession, pending: PendingTable) -> None:
        """Move requests that the fallback serves from the shared broker's session to the fallback's. Tasks stay, because other
        gateways must be able to find them."""
        waiting = [request for request in pending.on(shared) if not (request.task or request.follows)]
        moved = [request for request in waiting if request.entry.model in self._models and not request.entry.pinned]
        for request in moved:
            request.session, entry = self.session, request.entry
            # These requests have already passed the limits. The fallback's workers don't claim by version.
            request.entry = msgspec.structs.replace(entry, limits=(), version="", pinned=False)
            shared.withdraw(entry.submission)  # So that another gateway can use the idempotency key.
        shared.give_up()
        self.session.take_over([request.entry for request in moved])
