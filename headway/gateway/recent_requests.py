"""Last requests that a gateway answered, which it knows without a ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from headway.gateway.pending import Ending, PendingRequest
from headway.gateway.several_inputs import WholeOutcome
from headway.model import BatchRun, EntryState, Failure, Principal, RequestStatus

REMEMBERED = 10_000
"""Most answered requests that are known; their inputs and outputs are not kept."""

_Answered = tuple[str, Principal, str, int, str, float, float, Failure | None, BatchRun | None, WholeOutcome | None]
"""Id, principal, model, tier, version of the queue, instant and seconds of a request, why it failed, and its run.

Of the first of several inputs also the outcome of the request, which has its id and may come later.
"""
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
        if ending in _FORGOTTEN:  # All but the first of several inputs that is let go of as another failed.
            requests = [one for one in requests if one.whole is not None and one.whole.ended]
        for request in requests:
            entry, reply = request.entry, request.reply
            self._last.append((
                entry.id, request.principal, entry.model, entry.tier, entry.version, now, now - request.since, reply.failure,
                reply.ran, None if request.several is None else request.whole,
            ))  # fmt: skip

    def find(self, id: str, tenant: str | None) -> RequestStatus | None:
        """Status of the last request of this id, of this tenant if one is named."""
        for one in reversed(self._last):
            if one[0] == id and tenant in (None, one[1].tenant):
                return self._status(one)
        return None

    def _status(self, one: _Answered) -> RequestStatus:
        _, principal, model, tier, version, at, seconds, failure, ran, whole = one
        begun, part, whose = at - seconds, "", (principal.tenant, principal.user, model, tier)
        if whole is not None:
            seconds, failure, ran, part = whole.seconds, whole.failure, whole.ran, whole.failed_part
            if not whole.ended:
                waited = self._clock() - begun
                return RequestStatus(EntryState.PROCESSING, waited, None, *whose, version=version)
        state = EntryState.COMPLETED if failure is None else EntryState.FAILED
        since = self._clock() - begun - seconds
        return RequestStatus(state, seconds, failure, *whose, since, ran, version, part)


def waiting(pending: PendingRequest, state: EntryState | None, now: float) -> RequestStatus:
    """Status of a request that is held at instant `now`, in a state if that can be told."""
    entry = pending.entry
    user, seconds = pending.principal.user, now - pending.since
    asked = entry.tenant, user, entry.model, entry.tier
    return RequestStatus(state or EntryState.QUEUED, seconds, None, *asked, version=entry.version)
