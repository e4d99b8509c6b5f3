"""Entrance of requests at the ports of a gateway: who asks, whether its limits let it, and the way into the gateway.

One object for all ports, over HTTP and gRPC, so that a request means the same however it came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from headway.core.failures import error_of
from headway.doors.exchange import Exchange
from headway.doors.rate_limit_headers import RateLimitHeaders
from headway.errors import RequestError, Unauthenticated
from headway.gateway.fan_out import FanOut
from headway.gateway.gateway import Gateway
from headway.gateway.pending import ReplySink
from headway.gateway.refusal_traces import RefusalTraces
from headway.identity.anonymous import AnonymousIdentity
from headway.identity.api_keys.credential import SERVICE
from headway.model import Failure, InferenceRequest, Principal, Reply, RequestOptions
from headway.ports import Identity, WatchedIdentity
from headway.runtime.request_id import NewId

CHARGED = 1 << 16
"""Bytes of JSON outside strings that count as one request more."""


class RepliesSink(ReplySink, Protocol):
    """Destination of the answer to a request with one input, or with several."""

    def answer_all(self, replies: Sequence[Reply]) -> None:
        """Take the replies to all inputs, or the failure of one; see `headway.gateway.fan_out.FanOut`."""
        ...


class Entrance:
    """Entrance of requests.

    Arguments:
        gateway: gateway that they go to.
        identity: identity that knows the principals.
        new_id: makes request ids.
        refusal_traces: traces of refused requests; None where none are recorded.

    Attributes:
        gateway, new_id, refusal_traces: see the arguments.
        settings: settings of the gateway.
        counters: counters of refusals.
        tiers: names of the tiers.
        anonymous: whether nobody is asked for a credential.
        rate_limits: writer of the fields by which principals learn of their limits.
    """

    def __init__(
        self, gateway: Gateway, identity: Identity, new_id: NewId, refusal_traces: RefusalTraces | None = None
    ) -> None:
        self.gateway, self.new_id, self.refusal_traces = gateway, new_id, refusal_traces
        self.settings, self.counters = gateway.settings, gateway.counters
        self.tiers = gateway.settings.tier_names
        self.anonymous = isinstance(identity, AnonymousIdentity)
        self.rate_limits = RateLimitHeaders(gateway)
        self._identify = identity.identify
        self._watch = identity.watch if isinstance(identity, WatchedIdentity) else None

    def identify(self, authorization: bytes) -> Principal:
        """Principal of a credential, the value of `Authorization`; empty: none was sent.

        Raises:
            RequestError: it is not known, or that cannot be told yet.
        """
        principal = self._identify(authorization)
        if principal is None:
            raise stranger(authorization)
        return principal

    def watch(self, authorization: bytes) -> Callable[[], Principal | None]:
        """Function that tells whose a credential is at the time; see Identity."""
        found = None if self._watch is None else self._watch(authorization)
        return partial(self._identify, authorization) if found is None else found

    def excess(self, principal: Principal, id: str) -> RequestError | None:
        """Refusal of request `id` when its principal is over a limit. The gateway counts it."""
        gateway = self.gateway
        failure = self.over(principal) if principal.limits else None
        if failure is None:
            return None
        gateway.note_refusal(InferenceRequest(principal, id, RequestOptions(0.0)), failure)
        return error_of(failure)

    def over(self, principal: Principal) -> Failure | None:
        """Failure of a request whose principal is over a limit; nothing counts it."""
        gateway = self.gateway
        return gateway.limiter.excess(gateway.counted(principal.limits), gateway.broker)

    def charge(self, principal: Principal) -> None:
        """Count a request towards its principal's limits: one that is wrong, or whose body is on its way."""
        if principal.limits:
            self.gateway.limiter.charge(self.gateway.counted(principal.limits))

    def refund(self, principal: Principal) -> None:
        """Take a charge back, as the body is there."""
        if principal.limits:
            self.gateway.limiter.refund(self.gateway.counted(principal.limits))

    def charge_pages(self, principal: Principal, size: int) -> None:
        """Count the JSON of a long body towards its principal's limits, by its bytes outside strings."""
        if principal.limits and size >= CHARGED:
            self.gateway.limiter.charge_pages(self.gateway.counted(principal.limits), size // CHARGED)

    def charge_wrong(self, principal: Principal, id: str) -> RequestError | None:
        """Count the wrong request `id` towards its principal's limits; the refusal when it is over one."""
        over = self.excess(principal, id)
        if over is None:
            self.charge(principal)
        return over

    def principal_for(self, exchange: Exchange, principal: Principal) -> Principal:
        """Principal of a request for its model, with its limit for that. A request that names no model gets the default one."""
        if not exchange.model:
            exchange.model = self.gateway.served.default_of(principal.models)
        return principal.asking(exchange.model) if principal.of_models else principal

    def submit(
        self, sink: RepliesSink, principal: Principal, id: str, exchange: Exchange, owner: str, most: int = 0, why: str = ""
    ) -> FanOut | None:  # fmt: skip
        """Hand a request to the gateway, which has its input from then on. Returns its fan-out if it has several.

        Arguments:
            sink: gets the reply, or the replies.
            principal: principal of the request for its model.
            id: id of the request.
            exchange: the request; its model is known.
            owner: name of the client for whom several outputs are held.
            most: most bytes that several outputs may have together; 0: half of what all clients may hold.
            why: what that bound comes from.
        """
        gateway, model = self.gateway, exchange.model or ""
        input, exchange.input = exchange.input, ""
        if isinstance(input, list):
            request = InferenceRequest(principal, id, exchange.options, model, parameters=exchange.parameters)
            room = gateway.quotas.answer_room(owner, most, why)
            fan_out = FanOut(gateway, request, input, sink.answer_all, room)
            fan_out.start()
            return fan_out
        gateway.submit(sink, InferenceRequest(principal, id, exchange.options, model, input, exchange.parameters))
        return None


def stranger(authorization: bytes) -> Unauthenticated:
    """Error of a request without a known principal, whose `Authorization` had this value."""
    if authorization[7:].strip().startswith(SERVICE):
        return Unauthenticated("this is a service token, which is good on the admin port only: send a client's key")
    scheme, _, key = authorization.partition(b" ")
    if scheme and scheme.lower() != b"bearer":
        return Unauthenticated("the value of Authorization does not begin with Bearer: send Authorization: Bearer KEY")
    if key:
        return Unauthenticated(
            "the credential is not valid: it is mistyped, revoked or expired, or of another service; send Authorization: Bearer KEY with one that is good here"
        )
    return Unauthenticated("a key is required: send Authorization: Bearer KEY")
