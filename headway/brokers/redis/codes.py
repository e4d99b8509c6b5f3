"""Codes, and the order of packed values, which the functions in the server share. `function_library` writes both there."""

from __future__ import annotations

import enum
from typing import NamedTuple

from headway.core.queue_limits import QueueLimits
from headway.core.retention import KeptLimits


class RefusalCode(enum.IntEnum):
    """Reasons why the functions refuse an entry."""

    TOO_LONG = 0  # The queue is too long for the entry's deadline.
    SHED = 1  # The queue is too long for the entry's tier, but not for the highest.
    SCARCE = 2  # The server is short of memory.
    CONFLICT = 3  # Another submission is using this id.
    MISUSE = 4  # The idempotency key or chosen id was used for another request.
    NO_TASK = 5
    CANCELLED = 6
    TOO_LARGE = 7  # The output is too large to be kept. Its size in bytes replaces the wait.
    CULPRIT = 8  # The same input recently failed when it ran alone. Its error replaces the wait.
    ROOM = 9  # The tenant's large entries use all the memory that they may use.
    LOST = 10  # The separately stored input is gone.
    UNDIGESTED = 11  # The separately stored input may be known to fail, so its digest is needed.
    MOVED = 12  # Another queue of the model knows the request. The suffix of that queue's prefix replaces the wait.
    APART = 13  # The quarantine of the entry's caller is too long.
    TOO_MANY = 14  # The request has more entries than can be answered in time. The possible number replaces the wait.
    TOO_MANY_APART = 15  # Like TOO_MANY, but for the quarantine of the entry's caller.
    OVER = 16  # The entry's first rate limit is exceeded. Its other limits have the codes that follow.


class Worth(enum.IntEnum):
    """Usefulness of an outcome to later requests."""

    WORTHLESS = 0
    VERDICT = 1  # The model rejects the input.
    ANSWER = 2


class Standing(enum.IntEnum):
    """State of an entry in the server."""

    AT_END = 0  # The entry has its outcome or is unknown.
    WAITING = 1
    RUNNING = 2


class PackedDedupKey(NamedTuple):
    """Dedup key of an entry, as the functions expect it.

    Attributes:
        flight: name of the flight. For identical requests it ends with `#`, and the functions append the newest code's digest.
        digest: digest of the request in hexadecimal.
        keep: seconds for which an outcome is kept.
        joins: True if the entry may follow an original that has no outcome yet.
        waits: True if the entry only waits for another entry's outcome.
        renews: True if a kept outcome is to be forgotten.
    """

    kind: str
    flight: str
    digest: str
    keep: float
    joins: bool
    waits: bool
    renews: bool


class QueueSettings(NamedTuple):
    """Settings of a queue. They are sent with every call as one line of text.

    Attributes:
        share: share of a batch that is reserved for lower tiers.
        max_weight: maximum weight of a batch, or 0 if entries aren't weighed.
        unit: maximum weight divided by the maximum batch size, or infinite if entries aren't weighed.
        round_weight: weight that costs a tenant one round.
        least_cost: minimum number of rounds that an entry costs.
        longest, fixed: see `Padding` if the model pads its inputs, otherwise 0.
        shed_last: depth from which the lowest tier is refused, or -1.
        shed_rest: depth from which all tiers but the highest are refused, or -1.
        room: maximum bytes of large entries.
        kept: byte budgets for all kept outcomes, for those of a tenant, and for a single outcome.
        promise: promised latency in seconds, or 0.
        delayed: share of the entries that bulk batches may delay.
        served: 1 if any shard is known to have healthy slots for the queue, otherwise 0.
        limits: key of the rate-limit counters.
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
        """Pack the settings for one of `in_use` shards."""
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
