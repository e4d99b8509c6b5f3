"""Admission: accept no entry that can't be served in time.

An entry is admitted if the entries ahead of it can be served before its deadline:

    ahead ≤ drain · (deadline − ℓ − margin)

`drain` is the part of the fleet's k·B/ℓ(B) entries per second that is left for the entry's tier: all of it minus what higher
tiers send, but never less than the reserved share. "Ahead" means entries in its own tier and in higher ones. So lower tiers are
refused first, and nothing overtakes an accepted entry and makes it late. The bound is Little's law reversed (Little, "A proof
for the queuing formula L = λW", 1961): for a queue that drains at a fixed rate, each wait corresponds to a depth.

In steady overload, entries wait as long as their deadlines allow. If run times vary, waits vary too, so the margin covers two
standard deviations of the wait. A full batch is still admitted, because otherwise GPUs would run half full. If the next batches
of the free GPUs have room for all entries ahead, a new one isn't delayed, and is admitted whatever its deadline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headway.model import Entry

MIN_MARGIN = 0.005  # Shortest margin in seconds: the part of a deadline kept for everything but waiting and running.
MARGIN_SHARE = 0.02  # The margin as a share of the deadline, if that is more than MIN_MARGIN.
WAIT_DEVIATIONS = 2.0  # Number of standard deviations by which a wait may exceed its mean without making an entry late.
LEAST_SHARE = 0.01  # Share of the drain that a tier is assumed to get, at least, when its wait is estimated.
MIN_WAIT = 0.001  # Shortest wait in seconds that a refusal states.


class Refused(msgspec.Struct, frozen=True):
    """Refusal of an entry. `most` is 0, unless the request has too many inputs even for an empty queue. Then it is the number
    of inputs that would be admitted, or minus that number if not even one could be answered in time."""

    wait: float  # Seconds until the entry would be admitted.
    tier_only: bool  # True if the highest tier would be admitted now.
    most: int = 0
    apart: bool = False  # True if its caller's quarantine is full.


class AdmissionLimits(msgspec.Struct, frozen=True):
    """Numbers that admission works with, recomputed from time to time. Sizes are numbers of entries, unless entries are weighed."""

    drains: tuple[float, ...]  # Size per second that is left for each tier, highest first; all 0 if unknown.
    batch_seconds: float  # Run time in seconds of a full batch that is one standard deviation slower than the mean.
    max_batch: float = 0.0  # Size of a full batch.
    spread: float = 0.0  # Square of the margin for varying waits (WAIT_DEVIATIONS), in seconds² per second of wait.
    known: dict[tuple[int, float, float], float] = {}  # Bounds computed so far, by tier and timeouts.

    @classmethod
    def unknown(cls, tiers: int) -> AdmissionLimits:
        """Return limits that admit every entry, for use until a batch has been measured."""
        return cls((0.0,) * tiers, 0.0)

    @classmethod
    def of(
        cls, max_batch: float, slots: float, seconds: float, deviation: float, rates: Sequence[float], reserved: float
    ) -> AdmissionLimits:
        """Compute limits. `slots` counts whole GPUs. `seconds` is the mean run time of a full batch (0 if unknown), and `deviation`
        its standard deviation. `rates` is the size arriving per second in each tier, highest first. `reserved` is the share
        reserved for lower tiers."""
        if seconds <= 0.0:
            return cls.unknown(len(rates))
        drain = slots * max_batch / seconds
        least, above, drains = drain * reserved, 0.0, []
        for rate in rates:
            drains.append(max(drain - above, least))
            above += rate
        spread = (WAIT_DEVIATIONS * deviation) ** 2 / (seconds * slots)
        return cls(tuple(drains), seconds + deviation, max_batch, spread)

    def allowed(self, tier: int, entry: Entry) -> float:
        """Return the largest total size of the entries ahead with which `entry` is still admitted to `tier`."""
        batch_seconds = self.batch_seconds
        wait = entry.queue_timeout
        if entry.timeout - batch_seconds < wait:
            wait = entry.timeout - batch_seconds
        margin = MARGIN_SHARE * (wait + batch_seconds)
        if margin < MIN_MARGIN:
            margin = MIN_MARGIN
        drain = self.drains[tier]
        if (square := self.spread * wait) > margin * margin:
            return max(drain * (wait - math.sqrt(square)), min(drain * (wait - margin), self.max_batch))
        return drain * (wait - margin)

    def bound(self, tier: int, entry: Entry) -> float:
        """Return `allowed`, computed once for all entries with the same timeouts."""
        kind = (tier, entry.queue_timeout, entry.timeout)
        allowed = self.known.get(kind)
        if allowed is None:
            allowed = self.known[kind] = self.allowed(tier, entry)
        return allowed

    def pace(self, tier: int) -> float:
        """Return the size per second by which the queue ahead of a tier shrinks. It is positive once a batch has been measured."""
        return max(self.drains[tier], self.drains[0] * LEAST_SHARE)

    def most(self, entry: Entry, size: float) -> float:
        """Return how many entries like `entry`, each of this size, can be answered in time if nothing else is waiting."""
        return math.inf if self.batch_seconds <= 0.0 else math.ceil(self.allowed(0, entry) / size)

    def judge(self, ahead: float, first: float, tier: int, entry: Entry) -> Refused | None:
        """Return a refusal, or None to admit the entry. `ahead` is the size of all entries ahead, and `first`
        the size of those in tier 0."""
        if ahead == 0 or self.batch_seconds <= 0.0:
            return None  # A bad estimate must not lock everybody out, so an entry with nothing ahead of it is let in.
        allowed = self.allowed(tier, entry)
        if ahead < allowed:
            return None
        return Refused(
            wait=max((ahead - max(allowed, 0.0)) / self.pace(tier), MIN_WAIT),
            tier_only=tier > 0 and (first == 0 or first < self.allowed(0, entry)),
        )
