"""Header fields `RateLimit-Policy` and `RateLimit`, in the form of the IETF draft "RateLimit header fields for HTTP".

A policy is a quota `q` for a window of `w` seconds. `RateLimit` shows the limit that has the least left: the requests `r`
that fit now, and the seconds `t` until its full burst is available again.
"""

from __future__ import annotations

from math import ceil

from headway.core import ratelimit
from headway.gateway.gateway import Gateway
from headway.model import Limit

_ITEM, _LEFT, _END = b'ratelimit: "', b'";r=', b"\r\n"
"""Text around the name and the figures in the RateLimit line."""

_COUNTS = (
    b"%bx-ratelimit-limit-requests: %d\r\nx-ratelimit-remaining-requests: %b\r\nx-ratelimit-reset-requests: %bs\r\n"
)

REMEMBERED = 10_000
"""Maximum number of sets of limits whose header text is cached."""


_Terms = tuple[Limit, bytes, float, float]
"""One limit, its header text up to the figures, and its tolerance and interval in seconds."""


_Known = tuple[tuple[Limit, ...], _Terms, tuple[_Terms, ...]]
"""Limits, which are kept alive so that their id stays valid, terms of the first limit, and terms of the others."""


class RateLimitHeaders:
    """Writes both header fields from the debts that the gateway's broker knows."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limiter = gateway.limiter
        # Keyed by id of the limits tuple, which each principal keeps: comparing limits would cost more than all else here.
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
        """Return both header lines, and the three that OpenAI's clients read, for the limit with the least left."""
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
        """Return both header fields by name, or none for a principal without limits."""
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
    """Return the policy item of a limit. A quota is a whole number, so a rate below one a minute gets a longer window."""
    if limit.rate >= 1.0:
        return f'"{limit.name}";q={int(limit.rate)};w=60'
    return f'"{limit.name}";q=1;w={ceil(60.0 / limit.rate)}'
