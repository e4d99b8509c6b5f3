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
    """`tat` is to be stored when `allowed`. `retry_after` is the seconds until the same request fits, infinite when
    it costs more than the burst. What is only shown is worked out when it is asked for."""

    allowed: bool
    tat: float
    retry_after: float
    quota: Quota
    now: float

    @property
    def remaining(self) -> int:
        """Whole requests that fit now."""
        interval = 60.0 / self.quota.rate
        return max(0, int((self.now + interval * max(self.quota.burst, 1.0) - self.tat) / interval + 1e-9))

    @property
    def reset_after(self) -> float:
        """Seconds until the whole burst fits."""
        return max(0.0, self.tat - self.now)


def check(quota: Quota, tat: float, cost: float, now: float) -> Verdict:
    """Judge a request.

    Arguments:
        quota: the limit.
        tat: the stored theoretical arrival time; anything in the past for a new key.
        cost: in requests; 1 for each input.
        now: an instant on the clock that `tat` was made with.
    """
    interval = 60.0 / quota.rate
    tolerance = interval * quota.burst if quota.burst > 1.0 else interval
    base = tat if tat > now else now
    after = base + cost * interval
    if after - tolerance <= now + 1e-9:
        return Verdict(True, after, 0.0, quota, now)
    fits_ever = cost * interval <= tolerance + 1e-9
    return Verdict(False, base, after - tolerance - now if fits_ever else math.inf, quota, now)
