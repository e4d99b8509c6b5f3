"""The last requests that a gateway answered: what of them, and for how long, is still known without a ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headway.gateway.pending import PendingRequest
from headway.model import BatchRun, Entry, EntryState, Failure, Principal, Reply, RequestStatus

REMEMBERED = 10_000
"""Answered requests that are still known; their inputs and outputs are not kept."""


class RecentRequests:
    """Remembers the last REMEMBERED of them.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: deque[tuple[str, Principal, str, int, float, float, Failure | None, BatchRun | None]] = deque(
            maxlen=REMEMBERED
        )

    def add(self, caller: Principal, entry: Entry, now: float, seconds: float, reply: Reply) -> None:
        """A request was answered at instant `now`, after so many seconds."""
        self._last.append((entry.id, caller, entry.model, entry.tier, now, seconds, reply.failure, reply.ran))

    def find(self, id: str, tenant: str | None) -> RequestStatus | None:
        """The last one of this id, of this tenant if one is named."""
        for answered, caller, model, tier, at, seconds, failure, ran in reversed(self._last):
            if answered == id and tenant in (None, caller.tenant):
                stage = EntryState.COMPLETED if failure is None else EntryState.FAILED
                since = self._clock() - at
                return RequestStatus(stage, seconds, failure, caller.tenant, caller.user, model, tier, since, ran)
        return None


def waiting(held: PendingRequest, stage: EntryState | None, now: float) -> RequestStatus:
    """A request that is held at instant `now`, in a stage if that can be told."""
    entry = held.entry
    user = held.principal.user if held.principal is not None else ""
    return RequestStatus(
        stage or EntryState.QUEUED, now - held.since, None, entry.tenant, user, entry.model, entry.tier
    )
