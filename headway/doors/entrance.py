"""Entrance: authenticate a request, check and charge its rate limits, and submit it to the gateway.

All ports share one, so that a request means the same whichever way it came.
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
from headway.gateway.request_traces import RefusalTraces
from headway.identity.api_keys.credential import SERVICE
from headway.identity.principals import AnonymousIdentity
from headway.model import Failure, InferenceRequest, Principal, Reply, RequestOptions
from headway.ports import Identity, WatchedIdentity
from headway.runtime.request_id import NewId

CHARGED = 1 << 16
"""Number of bytes of JSON outside strings that cost as much as one more request."""


class RepliesSink(ReplySink, Protocol):
    """Destination of the answer to a request with one or several inputs."""

    def answer_all(self, replies: Sequence[Reply]) -> None:
        """Take the replies to all inputs, or the failure of the first that failed; see `FanOut`."""
        ...


class Entrance:
    """Entrance of requests into one gateway. `refusal_traces` is None if refused requests are not traced. `anonymous` is True if
    there are no credentials. `rate_limits` writes the RateLimit header fields."""

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
        """Return the principal of an `Authorization` value. Raises RequestError if it isn't known, or can't be checked yet."""
        principal = self._identify(authorization)
        if principal is None:
            raise bad_credential(authorization)
        return principal

    def watch(self, authorization: bytes) -> Callable[[], Principal | None]:
        """Return a function that returns the credential's principal at the time of the call; see `Identity`."""
        watch = None if self._watch is None else self._watch(authorization)
        return partial(self._identify, authorization) if watch is None else watch

    def excess(self, principal: Principal, id: str) -> RequestError | None:
        """Return the refusal of request `id`, counted by the gateway, if its principal is over a limit."""
        gateway = self.gateway
        failure = self.over(principal) if principal.limits else None
        if failure is None:
            return None
        gateway.note_refusal(InferenceRequest(principal, id, RequestOptions(0.0)), failure)
        return error_of(failure)

    def over(self, principal: Principal) -> Failure | None:
        """Return the failure of a request whose principal is over a limit, without counting it."""
        gateway = self.gateway
        return gateway.limiter.excess(gateway.counted(principal.limits), gateway.broker)

    def charge(self, principal: Principal) -> None:
        """Charge a principal's rate limits for a request that is invalid, or whose body is still arriving."""
        if principal.limits:
            self.gateway.limiter.charge(self.gateway.counted(principal.limits))

    def refund(self, principal: Principal) -> None:
        """Take a charge back, because the body has arrived."""
        if principal.limits:
            self.gateway.limiter.refund(self.gateway.counted(principal.limits))

    def charge_pages(self, principal: Principal, size: int) -> None:
        """Charge the JSON of a long body, `size` bytes outside strings, to its principal's limits."""
        if principal.limits and size >= CHARGED:
            self.gateway.limiter.charge_pages(self.gateway.counted(principal.limits), size // CHARGED)

    def charge_wrong(self, principal: Principal, id: str) -> RequestError | None:
        """Charge the wrong request `id` to its principal's limits, or return the refusal if it is over one."""
        over = self.excess(principal, id)
        if over is None:
            self.charge(principal)
        return over

    def principal_for(self, exchange: Exchange, principal: Principal) -> Principal:
        """Return the principal with its limit for the request's model. If none is named, set the default model."""
        if not exchange.model:
            exchange.model = self.gateway.served.default_of(principal.models)
        return principal.asking(exchange.model) if principal.of_models else principal

    def submit(
        self, sink: RepliesSink, principal: Principal, id: str, exchange: Exchange, owner: str, max_bytes: int = 0, why: str = ""
    ) -> FanOut | None:  # fmt: skip
        """Submit a request that has a model, with the only reference to its input, to the gateway. For `principal` see
        `principal_for`.

        While several outputs are held, they are charged to the client `owner`. Together they may have `max_bytes` bytes, or half
        of what all clients may hold if that is 0; `why` explains the bound. Return the fan-out of several inputs."""
        gateway, model = self.gateway, exchange.model or ""
        input, exchange.input = exchange.input, ""
        if isinstance(input, list):
            request = InferenceRequest(principal, id, exchange.options, model, parameters=exchange.parameters)
            room = gateway.quotas.answer_room(owner, max_bytes, why)
            fan_out = FanOut(gateway, request, input, sink.answer_all, room)
            fan_out.start()
            return fan_out
        gateway.submit(sink, InferenceRequest(principal, id, exchange.options, model, input, exchange.parameters))
        return None


def bad_credential(authorization: bytes) -> Unauthenticated:
    """Return the error for an `Authorization` value that no principal has."""
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
