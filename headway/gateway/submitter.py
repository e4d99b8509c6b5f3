"""Gateway as those know it who bring it requests."""

from __future__ import annotations

from typing import Protocol

from headway.config import Settings
from headway.gateway.client_quotas import Quotas
from headway.gateway.limiter import Limiter
from headway.gateway.pending import ReplySink
from headway.gateway.several_inputs import SeveralInputs
from headway.model import Entry, Failure, Limit, Principal, Reply, RequestOptions, Value
from headway.ports import QueueCondition
from headway.runtime.counters import Counters
from headway.runtime.fair_turns import FairTurns


class Submitter(Protocol):
    """Taker of requests, as doors and fan-outs know the gateway.

    Attributes:
        settings: settings of the process.
        limiter: limiter that lets requests in, and takes back those that are not submitted.
        turns: line in which requests with many inputs wait for their turn.
        quotas: quotas of the clients of the process, for which outputs count.
        counters: counters of refusals.
    """

    settings: Settings
    limiter: Limiter
    turns: FairTurns
    quotas: Quotas
    counters: Counters

    @property
    def broker(self) -> QueueCondition:
        """Broker that new requests go to."""
        ...

    def submit(
        self,
        sink: ReplySink,
        principal: Principal,
        id: str,
        options: RequestOptions,
        model: str,
        input: Value,
        parameters: bytes,
        several: SeveralInputs | None = None,
    ) -> bool:
        """Take a request; `sink` gets its reply. False: it is refused. See `headway.gateway.gateway.Gateway.submit`."""
        ...

    def abandon(self, sink: ReplySink, tenant: str, id: str) -> None:
        """Forget a request whose client has left."""
        ...

    def counted(self, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
        """Limits as the broker counts them now."""
        ...

    def absence(self, principal: Principal, model: str) -> Failure | None:
        """Failure of a request for a model that is not there for the principal; None where it is."""
        ...

    def note_refusal(self, principal: Principal, entry: Entry, failure: Failure) -> Reply:
        """Count and record a request that was refused before it was submitted; its reply."""
        ...
