"""Hook of a gateway with an input policy: what every door submits goes through the input gate first.

A gateway without a policy imports none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from headway.gateway.input_gate import InputGate
from headway.gateway.limiter import CHARGED, Limiter
from headway.gateway.pending import Ending, Judgement, PendingRequest, SeveralInputs
from headway.gateway.served_models import ServedModels
from headway.model import Failure, InferenceRequest, Limit, QueueName
from headway.ports import RequestQueue


class Screened(NamedTuple):
    """Request that has gone through the gate.

    Attributes:
        request: the request as the policy leaves it.
        failure: why it is refused; None when it isn't.
        judgement: verdict that it waits for; None for none.
    """

    request: InferenceRequest
    failure: Failure | None = None
    judgement: Judgement | None = None


class Screening:
    """Way of a gateway's requests through its input gate.

    Arguments:
        gate: the gate.
        served: models of the gateway.
        limiter: limits of the gateway.
        hand_on: takes requests that have waited and may go to the broker.
        answer: ends a request that has waited with a failure.
    """

    def __init__(
        self,
        gate: InputGate,
        served: ServedModels,
        limiter: Limiter,
        hand_on: Callable[[PendingRequest], None],
        answer: Callable[[PendingRequest, Failure, Ending], None],
    ) -> None:
        self._gate, self._served, self._limiter = gate, served, limiter
        self._hand_on, self._answer = hand_on, answer

    def inspect(
        self, request: InferenceRequest, several: SeveralInputs | None, limits: tuple[Limit, ...], broker: RequestQueue
    ) -> Screened:
        """Show a request to the policy, unless it is over one of `limits`."""
        if limits and (over := self._limiter.excess(limits, broker)) is not None:
            return Screened(request, over)
        principal, options = request.principal, request.options
        first = several is not None and not several.inspected
        caller = principal.tenant, principal.user if options.origin is None else options.origin
        found = self._gate.inspect(caller, request, self._served, self._decide, several)
        if first and options.whole and several is not None:
            whole = several.digest(QueueName(request.model, options.version))
            options = msgspec.structs.replace(options, whole=whole)
        request = msgspec.structs.replace(request, options=options, input=found.input, parameters=found.parameters)
        return Screened(request, found.failure, found.judgement)

    def hold(self, judgement: Judgement, pending: PendingRequest) -> None:
        """Let a request wait for its verdict, or hand it on if that is known."""
        if self._gate.hold(judgement, pending):
            self._limiter.charge(pending.entry.limits)  # Until the verdict: else any number could wait for theirs.
        else:
            self._hand_on(pending)

    def _decide(self, waited: Sequence[PendingRequest], failure: Failure | None) -> None:
        """Hand on requests that have waited for a verdict, or refuse them: together they are one, whose first is told."""
        for pending in waited:
            self._limiter.refund(pending.entry.limits)
        if failure is None:
            for pending in waited:
                self._hand_on(pending)
        elif waited:
            first = waited[0]
            self._limiter.forgo(first.entry.model, first.entry.tenant, first.entry.tier, len(waited))
            if failure.code in CHARGED:
                limits = first.entry.limits
                self._limiter.charge(limits, limits[0].counting if limits else 1)
            self._answer(first, failure, Ending.REFUSED)
