"""Gateway with an input policy: what every door submits goes through the input gate first.

A gateway without a policy has none of this, and pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headway.gateway.broker_session import BrokerSession
from headway.gateway.gateway import Gateway, unqueued
from headway.gateway.input_gate import InputGate
from headway.gateway.lane import Lane
from headway.gateway.limiter import CHARGED
from headway.gateway.pending import Ending, Judgement, PendingRequest, ReplySink, SeveralInputs
from headway.model import Entry, EntryState, Failure, InferenceRequest, Principal, QueueName, Reply, RequestOptions


class ScreenedGateway(Gateway):
    """Gateway behind an input gate.

    Arguments:
        arguments, named: those of a Gateway.
        gate: gate that every request goes through.
    """

    def __init__(self, *arguments: Any, gate: InputGate, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._gate = gate
        gate.bind(self._decide)
        self._judgement: Judgement | None = None
        """Verdict that the request in hand has to wait for; set while it is submitted."""

    def submit(self, sink: ReplySink, request: InferenceRequest, several: SeveralInputs | None = None) -> bool:
        """Take a request in, if the input policy lets it; see Gateway."""
        principal, options, model = request.principal, request.options, request.model
        if model not in self.served or (principal.models and model not in principal.models):
            # It is refused for that, and the policy is not shown.
            return super().submit(sink, request, several)
        principal = principal.asking(model)
        limits = self.counted(principal.limits)
        failure = self.limiter.excess(limits, self._session.broker) if limits else None
        if failure is None:
            first = several is not None and not several.inspected
            caller = principal.tenant, principal.user if options.origin is None else options.origin
            found = self._gate.inspect(caller, request, self.served, several)
            failure, self._judgement = found.failure, found.judgement
            if first and options.whole and several is not None:
                whole = several.digest(QueueName(model, options.version))
                options = msgspec.structs.replace(options, whole=whole)
            request = msgspec.structs.replace(request, options=options, input=found.input, parameters=found.parameters)
        if failure is not None:
            self._judgement = None
            self._refuse(sink, principal, unqueued(request, limits), failure, several)
            return False
        try:
            return super().submit(sink, request, several)
        finally:
            self._judgement = None

    def lane(self, principal: Principal, options: RequestOptions, asked: str | None) -> Lane:
        """Lane of requests; closed, as the policy sees them first."""
        lane = super().lane(principal, options, asked)
        lane.open = lane.rows = lane.keeps = False
        return lane

    async def outcome(self, tenant: str, id: str) -> Reply | EntryState | None:
        """Outcome or state of a task; see Gateway. One that waits for a verdict is queued."""
        pending = self._pending.get((tenant, id))
        if pending is not None and pending.task and pending.session is None:
            return EntryState.QUEUED
        return await super().outcome(tenant, id)

    def _hold(
        self, sink: ReplySink, principal: Principal, entry: Entry, unadmitted: bool, several: SeveralInputs | None,
        session: BrokerSession | None,
    ) -> None:  # fmt: skip
        judgement = self._judgement
        super()._hold(sink, principal, entry, unadmitted, several, None if judgement is not None else session)
        if judgement is None:
            return
        if self._gate.hold(judgement, self._pending[entry.tenant, entry.id]):
            self.limiter.charge(entry.limits)  # Until the verdict: else any number could wait for theirs.
        else:
            self._hand_on(self._pending[entry.tenant, entry.id])

    def _decide(self, waited: Sequence[PendingRequest], failure: Failure | None) -> None:
        """Hand on requests that have waited for a verdict, or refuse them: together they are one, whose first is told."""
        for pending in waited:
            self.limiter.refund(pending.entry.limits)
        if failure is None:
            for pending in waited:
                self._hand_on(pending)
        elif waited:
            first = waited[0]
            self.limiter.forgo(first.entry.model, first.entry.tenant, first.entry.tier, len(waited))
            if failure.code in CHARGED:
                limits = first.entry.limits
                self.limiter.charge(limits, limits[0].counting if limits else 1)
            self._answer(first, failure, Ending.REFUSED)

    def _hand_on(self, pending: PendingRequest) -> None:
        """Hand a request on to the broker that new ones go to, with what is left of its time."""
        if self.equal_inputs.is_later(pending):
            return
        session, entry = self._session, pending.refreshed(self._clock())
        if session.full(1):
            self._answer(pending, session.no_room(), Ending.REFUSED)
            return
        pending.session = session
        pending.entry = msgspec.structs.replace(entry, limits=self.counted(pending.principal.limits))
        session.offer(pending.entry)
