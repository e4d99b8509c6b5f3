"""The entrance for requests from all ports: authenticates them, checks and charges rate limits, and submits them to the gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Protocol

from headway.core import ratelimit
from headway.core.failures import error_of
from headway.doors.exchange import Exchange
from headway.errors import RequestError, Unauthenticated
from headway.gateway.fan_out import FanOut
from headway.gateway.gateway import Gateway
from headway.gateway.pending import ReplySink
from headway.gateway.request_traces import RefusalTraces
from headway.identity.api_keys.credential import SERVICE
from headway.identity.principals import AnonymousIdentity
from headway.model import Failure, InferenceRequest, Limit, Principal, Reply, RequestOptions
from headway.ports import Identity, WatchedIdentity
from headway.runtime.request_id import NewId

_ITEM, _LEFT, _END = b'ratelimit: "', b'";r=', b"\r\n"  # Text around the name and numbers in RateLimit.

_COUNTS = (
    b"%bx-ratelimit-limit-requests: %d\r\nx-ratelimit-remaining-requests: %b\r\nx-ratelimit-reset-requests: %bs\r\n"
)

REMEMBERED = 10_000  # Maximum number of cached header texts, one for each set of limits.


_Terms = tuple[Limit, bytes, float, float]  # A limit, its header text, and its tolerance and interval in seconds.


_Known = tuple[tuple[Limit, ...], _Terms, tuple[_Terms, ...]]
"""A tuple of limits, the first limit's terms, and the others' terms. The reference to the tuple keeps its id valid."""


class RateLimitHeaders:
    """Writes the header fields RateLimit and RateLimit-Policy, based on the debts known to the gateway's broker."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limiter = gateway.limiter
        # Keyed by the id of the tuple, because comparing limits would cost more than everything else here.
        self._known: dict[int, _Known] = {}

    def lines(self, limits: tuple[Limit, ...]) -> bytes:
        """Return RateLimit and RateLimit-Policy as header lines, with line endings. There must be at least one limit."""
        limits = self._gateway.counted(limits)
        broker = self._gateway.broker
        owed_of = self._limiter.owed_by(broker) if self._limiter.debts else broker.rate_limit_debt
        _, (limit, text, tolerance, interval), others = self._known.get(id(limits)) or self._learn(limits)
        wait = owed_of(limit)
        least = (tolerance - wait) / interval
        for limit, other, tolerance, interval in others:
            owed = owed_of(limit)
            left = (tolerance - owed) / interval
            if left < least:
                least, text, wait = left, other, owed
        whole = int(least + ratelimit.ROUNDING)
        return b"%b%d;t=%d\r\n" % (text, whole if whole > 0 else 0, ceil(wait))

    def lines_and_counts(self, limits: tuple[Limit, ...]) -> bytes:
        """Return the result of `lines`, and three more header lines for OpenAI's clients. These are about the limit that is
        closest to being used up."""
        lines = self.lines(limits)
        counted = self._gateway.counted(limits)
        limit, figures = counted[0], lines[lines.rindex(_LEFT) + len(_LEFT) : -len(_END)]
        if len(counted) > 1:
            name = lines[lines.rindex(_ITEM) + len(_ITEM) : -len(figures) - len(_LEFT) - len(_END)].decode("ascii")
            limit = next(limit for limit in counted if limit.name == name)
        left, _, reset = figures.partition(b";t=")
        quota = int(limit.rate if limit.rate > limit.burst else limit.burst)
        return _COUNTS % (lines, quota if quota > 1 else 1, left, reset)

    def fields(self, limits: tuple[Limit, ...]) -> dict[str, str]:
        """Return RateLimit and RateLimit-Policy by name, or {} if there are no limits."""
        lines = self.lines(limits).decode("ascii").splitlines() if limits else []
        return {name: value for name, _, value in (line.partition(": ") for line in lines)}

    def _learn(self, limits: tuple[Limit, ...]) -> _Known:
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        policies = ", ".join(_policy(limit) for limit in limits)
        first, *others = (
            (
                limit,
                f'ratelimit-policy: {policies}\r\nratelimit: "{limit.name}";r='.encode("ascii"),
                ratelimit.tolerance(limit),
                ratelimit.interval(limit),
            )
            for limit in limits
        )
        known = self._known[id(limits)] = limits, first, tuple(others)
        return known


def _policy(limit: Limit) -> str:
    """Return a limit's item in RateLimit-Policy. Quotas are whole numbers, so a rate below 1/min gets a longer window."""
    if limit.rate >= 1.0:
        return f'"{limit.name}";q={int(limit.rate)};w=60'
    return f'"{limit.name}";q=1;w={ceil(60.0 / limit.rate)}'


CHARGED = 1 << 16  # Number of bytes of JSON outside strings that are charged like one additional request.


class RepliesSink(ReplySink, Protocol):
    """Receives the replies to a request with one or more inputs."""

    def answer_all(self, replies: Sequence[Reply]) -> None:
        """Accept the replies to all inputs, or the first failure; see `FanOut`."""
        ...


class Entrance:
    """The entrance to one gateway. `anonymous` is True if the service has no credentials."""

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
        """Return the principal for an `Authorization`. Raises RequestError if it is unknown or can't be checked yet."""
        principal = self._identify(authorization)
        if principal is None:
            raise bad_credential(authorization)
        return principal

    def watch(self, authorization: bytes) -> Callable[[], Principal | None]:
        """Return a function that looks up the credential's current principal (or None) each time it is called; see `Identity`."""
        watch = None if self._watch is None else self._watch(authorization)
        return partial(self._identify, authorization) if watch is None else watch

    def excess(self, principal: Principal, id: str) -> RequestError | None:
        """If the principal is over a limit, count the refusal of request `id` and return the error."""
        gateway = self.gateway
        failure = self.over(principal) if principal.limits else None
        if failure is None:
            return None
        gateway.note_refusal(InferenceRequest(principal, id, RequestOptions(0.0)), failure)
        return error_of(failure)

    def over(self, principal: Principal) -> Failure | None:
        """Return the failure of a principal that is over one of its limits, or None. The refusal isn't counted."""
        gateway = self.gateway
        return gateway.limiter.excess(gateway.counted(principal.limits), gateway.broker)

    def charge(self, principal: Principal) -> None:
        """Charge the rate limits for an invalid request, or in advance for a body that is still arriving."""
        if principal.limits:
            self.gateway.limiter.charge(self.gateway.counted(principal.limits))

    def refund(self, principal: Principal) -> None:
        if principal.limits:
            self.gateway.limiter.refund(self.gateway.counted(principal.limits))

    def charge_pages(self, principal: Principal, size: int) -> None:
        """Charge the rate limits for decoding a long JSON body. `size` is its number of bytes outside strings."""
        if principal.limits and size >= CHARGED:
            self.gateway.limiter.charge_pages(self.gateway.counted(principal.limits), size // CHARGED)

    def charge_wrong(self, principal: Principal, id: str) -> RequestError | None:
        """Charge for the invalid request `id`. Return the refusal instead if the principal is over a limit."""
        over = self.excess(principal, id)
        if over is None:
            self.charge(principal)
        return over

    def principal_for(self, exchange: Exchange, principal: Principal) -> Principal:
        """Return the principal with its limit for the request's model. If the request names no model, `exchange` first gets the
        default model."""
        if not exchange.model:
            exchange.model = self.gateway.served.default_of(principal.models)
        return principal.asking(exchange.model) if principal.of_models else principal

    def submit(
        self, sink: RepliesSink, principal: Principal, id: str, exchange: Exchange, owner: str, max_bytes: int = 0, why: str = ""
    ) -> FanOut | None:  # fmt: skip
        """Submit a request to the gateway, and drop the reference to its input. `principal` comes from `principal_for`. If
        there are several inputs, return their fan-out. It holds outputs, which count towards the quota of the client `owner`.
        `max_bytes` limits their total size; 0 means half of what all clients may hold. `why` explains this limit in the error
        message."""
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
    """Return the error for an `Authorization` value that doesn't belong to any principal."""
    if authorization[7:].strip().startswith(SERVICE):
        return Unauthenticated("this is a service token, which is valid only on the admin port; send a client's key")
    scheme, _, key = authorization.partition(b" ")
    if scheme and scheme.lower() != b"bearer":
        return Unauthenticated("the value of Authorization does not begin with Bearer; send Authorization: Bearer KEY")
    if key:
        return Unauthenticated(
            "the credential is not valid: it is mistyped, revoked or expired, or belongs to another service; send Authorization: Bearer KEY with a valid key"
        )
    return Unauthenticated("a key is required; send Authorization: Bearer KEY")
