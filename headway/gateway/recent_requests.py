"""Last requests that a gateway answered, which it knows without a ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from headway.gateway.pending import Ending, PendingRequest
from headway.model import BatchRun, EntryState, Failure, Principal, RequestStatus

REMEMBERED = 10_000
"""Most answered requests that are known; their inputs and outputs are not kept."""

_Answered = tuple[str, Principal, tuple[str, int, str], float, float, Failure | None, BatchRun | None]
"""Id, principal, (model, tier, version of the queue), instant and seconds of a request, why it failed, and its run."""
_FORGOTTEN = frozenset((Ending.LEFT, Ending.TURNED_AWAY))


class RecentRequests:
    """Observer that remembers the last REMEMBERED answers.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: deque[_Answered] = deque(maxlen=REMEMBERED)

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Remember requests that were answered."""
        if ending in _FORGOTTEN:
            return
        for request in requests:
            entry, reply = request.entry, request.reply
            seconds = now - request.since
            asked = entry.model, entry.tier, entry.version
            self._last.append((entry.id, request.principal, asked, now, seconds, reply.failure, reply.ran))

    def find(self, id: str, tenant: str | None) -> RequestStatus | None:
        """Status of the last request of this id, of this tenant if one is named."""
        for answered, principal, (model, tier, version), at, seconds, failure, ran in reversed(self._last):
            if answered == id and tenant in (None, principal.tenant):
                state = EntryState.COMPLETED if failure is None else EntryState.FAILED
                whose = principal.tenant, principal.user
                return RequestStatus(state, seconds, failure, *whose, model, tier, self._clock() - at, ran, version)
        return None


def waiting(pending: PendingRequest, state: EntryState | None, now: float) -> RequestStatus:
    """Status of a request that is held at instant `now`, in a state if that can be told."""
    entry = pending.entry
    user, seconds = pending.principal.user, now - pending.since
    asked = entry.tenant, user, entry.model, entry.tier
    return RequestStatus(state or EntryState.QUEUED, seconds, None, *asked, version=entry.version)
