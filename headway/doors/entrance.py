"""Entrance: authenticate a request, check and charge its rate limits, and submit it to the gateway. All ports share it."""

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

_ITEM, _LEFT, _END = b'ratelimit: "', b'";r=', b"\r\n"
"""Text around the name and the numbers in the RateLimit line."""

_COUNTS = (
    b"%bx-ratelimit-limit-requests: %d\r\nx-ratelimit-remaining-requests: %b\r\nx-ratelimit-reset-requests: %bs\r\n"
)

REMEMBERED = 10_000
"""Maximum number of sets of limits whose header text is cached."""


_Terms = tuple[Limit, bytes, float, float]
"""A limit, its header text up to the numbers, and its tolerance and interval in seconds."""


_Known = tuple[tuple[Limit, ...], _Terms, tuple[_Terms, ...]]
"""Limits (kept alive, so that their id stays valid), terms of the first limit, and terms of the others."""


class RateLimitHeaders:
    """Writes the fields RateLimit and RateLimit-Policy, from the debts that the gateway's broker knows."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limiter = gateway.limiter
        # Keyed by the id of the tuple, because comparing limits would cost more than everything else here.
        self._known: dict[int, _Known] = {}

    def lines(self, limits: tuple[Limit, ...]) -> bytes:
        """Return both header lines, with line ends, for a principal with at least one limit."""
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
        """Return both header lines, and three more for OpenAI's clients, about the limit that is nearest to its end."""
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
        """Return both header fields by name, or {} for a principal without limits."""
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
    """Return a limit's item in RateLimit-Policy. Quotas are whole numbers: a rate below one a minute gets a longer window."""
    if limit.rate >= 1.0:
        return f'"{limit.name}";q={int(limit.rate)};w=60'
    return f'"{limit.name}";q=1;w={ceil(60.0 / limit.rate)}'


CHARGED = 1 << 16
"""Bytes of JSON outside strings that are charged like one more request."""


class RepliesSink(ReplySink, Protocol):
    """Receiver of the replies to a request with one or several inputs."""

    def answer_all(self, replies: Sequence[Reply]) -> None:
        """Take the replies to all inputs, or the first failure; see `FanOut`."""
        ...


class Entrance:
    """Entrance of requests into one gateway. `anonymous` is True if the service has no credentials."""

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
        """Return the principal of an `Authorization` value. Raises RequestError if the value is unknown or can't be checked yet."""
        principal = self._identify(authorization)
        if principal is None:
            raise bad_credential(authorization)
        return principal

    def watch(self, authorization: bytes) -> Callable[[], Principal | None]:
        """Return a function that looks up the credential's principal, or None, when it is called; see `Identity`."""
        watch = None if self._watch is None else self._watch(authorization)
        return partial(self._identify, authorization) if watch is None else watch

    def excess(self, principal: Principal, id: str) -> RequestError | None:
        """If the principal is over a limit, count a refusal of request `id`, and return its error."""
        gateway = self.gateway
        failure = self.over(principal) if principal.limits else None
        if failure is None:
            return None
        gateway.note_refusal(InferenceRequest(principal, id, RequestOptions(0.0)), failure)
        return error_of(failure)

    def over(self, principal: Principal) -> Failure | None:
        """Return the failure if the principal is over a limit. Nothing is counted."""
        gateway = self.gateway
        return gateway.limiter.excess(gateway.counted(principal.limits), gateway.broker)

    def charge(self, principal: Principal) -> None:
        """Charge the rate limits for an invalid request, or for a body that is still arriving."""
        if principal.limits:
            self.gateway.limiter.charge(self.gateway.counted(principal.limits))

    def refund(self, principal: Principal) -> None:
        if principal.limits:
            self.gateway.limiter.refund(self.gateway.counted(principal.limits))

    def charge_pages(self, principal: Principal, size: int) -> None:
        """Charge the rate limits for the JSON of a long body, with `size` bytes outside strings."""
        if principal.limits and size >= CHARGED:
            self.gateway.limiter.charge_pages(self.gateway.counted(principal.limits), size // CHARGED)

    def charge_wrong(self, principal: Principal, id: str) -> RequestError | None:
        """Charge the invalid request `id`, or return the refusal if its principal is over a limit."""
        over = self.excess(principal, id)
        if over is None:
            self.charge(principal)
        return over

    def principal_for(self, exchange: Exchange, principal: Principal) -> Principal:
        """Return the principal with its limit for the request's model. Set the default model if the request names none."""
        if not exchange.model:
            exchange.model = self.gateway.served.default_of(principal.models)
        return principal.asking(exchange.model) if principal.of_models else principal

    def submit(
        self, sink: RepliesSink, principal: Principal, id: str, exchange: Exchange, owner: str, max_bytes: int = 0, why: str = ""
    ) -> FanOut | None:  # fmt: skip
        """Submit a request to the gateway, and drop the reference to its input. `principal` comes from `principal_for`.

        Return the fan-out if there are several inputs. Their outputs count for the client `owner` while held. They may have
        `max_bytes` bytes in all; 0 means half of what all clients may hold. The error message explains the bound by `why`."""
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
    """Return the error for an `Authorization` value that belongs to no principal."""
    if authorization[7:].strip().startswith(SERVICE):
        return Unauthenticated("this is a service token, which is valid only on the admin port: send a client's key")
    scheme, _, key = authorization.partition(b" ")
    if scheme and scheme.lower() != b"bearer":
        return Unauthenticated("the value of Authorization does not begin with Bearer: send Authorization: Bearer KEY")
    if key:
        return Unauthenticated(
            "the credential is not valid: it is mistyped, revoked or expired, or belongs to another service; send Authorization: Bearer KEY with a valid key"
        )
    return Unauthenticated("a key is required: send Authorization: Bearer KEY")
