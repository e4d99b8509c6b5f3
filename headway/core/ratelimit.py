"""The rate limit: GCRA, the generic cell rate algorithm (ITU-T I.371), in its virtual scheduling form.

One number a key, the theoretical arrival time (TAT). With an emission interval T = 60 / rate and a burst
tolerance τ = T · burst, a request of cost c conforms when its TAT after it, less τ, is not in the future:

    tat' = max(tat, now) + c·T;   conforms when tat' − τ ≤ now
"""

from __future__ import annotations

import math

import msgspec


class Quota(msgspec.Struct, frozen=True, gc=False):
    """`rate` requests a minute on average, up to `burst` at once."""

    rate: float
    burst: float


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """`tat` is to be stored when `allowed`. `remaining` whole requests fit now; `retry_after` and
    `reset_after` are seconds until the same request fits (infinite when it costs more than the burst), and
    until the whole burst does."""

    allowed: bool
    tat: float
    remaining: int
    retry_after: float
    reset_after: float


def check(quota: Quota, tat: float, cost: float, now: float) -> Verdict:
    """Judge a request.

    Arguments:
        quota: the limit.
        tat: the stored theoretical arrival time; anything in the past for a new key.
        cost: in requests; 1 for each input.
        now: an instant on the clock that `tat` was made with.
    """
    interval = 60.0 / quota.rate
    tolerance = interval * max(quota.burst, 1.0)
    base = max(tat, now)
    after = base + cost * interval
    allowed = after - tolerance <= now + 1e-9
    kept = after if allowed else base
    fits_ever = cost * interval <= tolerance + 1e-9
    return Verdict(
        allowed=allowed,
        tat=kept,
        remaining=max(0, int((now + tolerance - kept) / interval + 1e-9)),
        retry_after=0.0 if allowed else after - tolerance - now if fits_ever else math.inf,
        reset_after=max(0.0, kept - now),
    )
