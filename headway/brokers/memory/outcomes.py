"""Outcomes of the memory broker's entries, and the mailboxes where they wait for gateways."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from headway.core import failures
from headway.core.batch import Departure
from headway.core.fair_queue import GONE, QueuedEntry
from headway.model import BatchRun, DeadLetter, Failure, Lease, Reply


class Running(msgspec.Struct):
    """Running batch, with the instant at which its lease expires unless it is extended."""

    lease: Lease
    departure: Departure
    expires_at: float


class Mailbox:
    """Replies to one gateway, kept until it asks for later replies. If `deliver` is set, they go there at once (see NearQueue)."""

    def __init__(self) -> None:
        self.deliver: Callable[[Sequence[Reply], Sequence[Any]], None] | None = None
        self.replies: list[Reply] = []
        self.acknowledged = 0
        self.arrival = asyncio.Event()

    def put(self, replies: Iterable[Reply]) -> None:
        if self.deliver is None:
            self.arrival.set()
        elif not self.replies:
            asyncio.get_running_loop().call_soon(self._hand_over, self.deliver)
        self.replies += replies

    def _hand_over(self, deliver: Callable[[Sequence[Reply], Sequence[Any]], None]) -> None:
        replies, self.replies = self.replies, []
        self.acknowledged += len(replies)
        deliver(replies, ())

    def acknowledge(self, cursor: int) -> Sequence[Reply]:
        """Drop the replies up to `cursor` and return them."""
        read = max(0, cursor - self.acknowledged)
        gone = self.replies[:read]
        del self.replies[:read]
        self.acknowledged += len(gone)
        return gone


def reply_to(member: QueuedEntry, left_at: float, failure: Failure, ran: BatchRun | None) -> Reply:
    """Return a reply without an output to an entry that waited until instant `left_at`."""
    entry = member.entry
    waited = left_at - member.arrived
    return Reply(entry.id, entry.tenant, None, failure, ran, waited, member.attempts, entry.nonce)


def lateness_of(member: QueuedEntry, slots: int, now: float) -> Failure:
    """Return the failure of an entry that is overdue at instant `now` while `slots` GPUs serve."""
    return failures.lateness(now - member.arrived, member.attempts, slots, now >= member.queue_due, member.hung)


def letter_of(member: QueuedEntry, error: str, cause: str, ran: BatchRun) -> DeadLetter:
    """Return the dead letter of an entry that failed for good in this run."""
    return DeadLetter(
        entry=member.entry,
        error=error,
        cause=cause,
        attempts=member.attempts,
        worker=ran.worker,
        died_at=time.time(),
        version=ran.version,
        batch_id=ran.batch_id,
    )


def run_of(lease: Lease, departure: Departure, worker: str, now: float) -> BatchRun:
    """Return the run of a batch that ended on `worker` at instant `now`."""
    left_at, runs = departure.left_at, lease.slot.runs
    return BatchRun(worker, len(departure.members), now - left_at, left_at, runs.version, runs.target)


def forget_read(entries: dict[tuple[str, str], QueuedEntry], gateway: str, read: Iterable[Reply]) -> None:
    """Forget entries whose replies a gateway has read, unless they were submitted again."""
    for reply in read:
        key = reply.tenant, reply.id
        answered = entries.get(key)
        if answered is not None and answered.state == GONE:
            entry = answered.entry
            if entry.nonce == reply.nonce and entry.gateway == gateway:
                del entries[key]
