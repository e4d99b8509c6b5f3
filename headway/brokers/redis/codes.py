"""Codes and orders of values that this process and the functions in the server both use.

`function_library` writes each name of this module into the functions, so that it is written down once.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from headway.core.queue_limits import QueueLimits
from headway.core.retention import KeptLimits


class RefusalCode(enum.IntEnum):
    """Reasons of the functions for refusing an entry."""

    TOO_LONG = 0
    """Queue too long for the entry's deadline."""
    SHED = 1
    """Queue too long for the entry's tier, and not for the highest."""
    SCARCE = 2
    """Server with hardly any memory left."""
    CONFLICT = 3
    """Id under which another submission is live."""
    MISUSE = 4
    """Idempotency key or chosen id that was used for another request."""
    NO_TASK = 5
    """Task that is not known."""
    CANCELLED = 6
    """Task that was cancelled."""
    TOO_LARGE = 7
    """Output that is too large to be kept. In place of a wait comes its size in bytes."""
    CULPRIT = 8
    """Input that has failed alone a short while ago. In place of a wait comes its error."""
    ROOM = 9
    """Tenant whose large entries have all the room that they may have."""
    LOST = 10
    """Input that lay apart from its entry, and is not there."""
    UNDIGESTED = 11
    """Input that lies apart and may be a known culprit: its digest is needed to tell."""
    MOVED = 12
    """Request that is known in another queue of its model. In place of a wait comes how the prefix of that one goes on."""
    APART = 13
    """Quarantine of the entry's caller too long."""
    TOO_MANY = 14
    """Entry that comes with more others than can be answered in time. In place of a wait comes how many can."""
    TOO_MANY_APART = 15
    """Entry of a caller in quarantine that comes with more others than can be answered in time there."""
    OVER = 16
    """First of the entry's rate limits; one more for each further position of the exceeded one."""


class Worth(enum.IntEnum):
    """Worth of an outcome to later requests."""

    WORTHLESS = 0
    VERDICT = 1
    """Verdict that the model rejects the input."""
    ANSWER = 2


class Standing(enum.IntEnum):
    """State of an entry, as the functions tell it."""

    AT_END = 0
    """Entry that has its outcome, or is not known."""
    WAITING = 1
    RUNNING = 2


class PackedDedupKey(NamedTuple):
    """A dedup key of an entry as the functions take it.

    Attributes:
        kind: value of its DedupKind.
        flight: name of what is known under it. That of identical requests ends with a `#`, behind which the functions write the newest code.
        digest: digest of what is asked, in hexadecimal digits.
        keep: seconds for which an outcome is kept.
        joins: whether the entry joins an original that has no outcome yet.
        waits: whether the entry only waits for another's outcome.
        renews: whether an outcome that is kept is forgotten.
    """

    kind: str
    flight: str
    digest: str
    keep: float
    joins: bool
    waits: bool
    renews: bool


class QueueSettings(NamedTuple):
    """Settings of a queue, which every call of its functions brings along in one line of text.

    Attributes:
        tiers: number of tiers.
        max_batch: most entries of a batch.
        share: part of a batch that is kept for lower tiers.
        max_queue: most entries that wait.
        max_weight: most weight of a batch; 0 when entries are not weighed.
        unit: weight of one of the places of a batch; infinite when entries are not weighed.
        round_weight: weight that costs a tenant one round.
        least_cost: rounds that an entry costs at least.
        longest, fixed: as in `Padding`, where the model fills inputs up; 0 elsewhere.
        lease_seconds: seconds for which a lease lasts.
        shed_last: depth from which the lowest tier is refused; below 0 for none.
        shed_rest: depth from which all tiers but the highest are refused; below 0 for none.
        room: bytes of the room for large entries.
        kept: budgets of kept outcomes in bytes: of all, of a tenant, of one outcome.
        promise: latency in seconds that was promised; 0 for none.
        delayed: share of the entries that may wait for a batch of bulk entries.
        served: 1 while any shard has healthy slots for the queue's entries, as far as the caller knows; else 0.
        limits: key of the counts of rate limits.
    """

    tiers: int
    max_batch: int
    share: float
    max_queue: int
    max_weight: int
    unit: float
    round_weight: float
    least_cost: float
    longest: float
    fixed: float
    lease_seconds: float
    shed_last: int
    shed_rest: int
    room: int
    kept: str
    promise: float
    delayed: float
    served: int
    limits: str

    @classmethod
    def packed(
        cls,
        in_use: int,
        served: bool,
        kept: KeptLimits,
        room: int,
        limits: QueueLimits,
        lease_seconds: float,
        counts_key: str,
    ) -> str:
        """Settings of one of `in_use` shards, as the functions take them."""
        last, rest = (-1, -1) if limits.shed_at is None else (max(1, depth // in_use) for depth in limits.shed_at)
        settings = cls(
            tiers=limits.tiers,
            max_batch=limits.max_batch,
            share=limits.reserved_share,
            max_queue=limits.max_queue,
            max_weight=limits.max_weight,
            unit=limits.unit,
            round_weight=limits.round_weight,
            least_cost=limits.least_cost,
            longest=limits.padding.longest if limits.padding is not None else 0.0,
            fixed=limits.padding.fixed if limits.padding is not None else 0.0,
            lease_seconds=lease_seconds,
            shed_last=last,
            shed_rest=rest,
            room=room,
            kept=f"{kept.total},{kept.tenant},{kept.largest}",
            promise=limits.promise,
            delayed=limits.delayed,
            served=int(served),
            limits=counts_key,
        )
        return " ".join(map(str, settings))
