"""Last requests that a gateway answered, which it knows without a ledger."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from headway.gateway.pending import Ending, PendingRequest, WholeOutcome
from headway.model import BatchRun, EntryState, Failure, Principal, RequestStatus

REMEMBERED = 10_000
"""Most answered requests that are known; their inputs and outputs are not kept."""

_Shared = tuple[Principal, str, int, str, Failure | None, BatchRun | None, WholeOutcome | None]
"""Principal, model, tier, version of the queue, why it failed, and its run.

Of one of several inputs also the outcome of their request, which may come later.
"""


class _Alike(msgspec.Struct, frozen=True):
    """Requests that were answered together and have all but their ids and times in common.

    One record for each would be ten times as large, and the caches of a CPU would hold little else.
    """

    ids: str
    """Ids of the requests, each in a line."""
    since: array[float]
    """Instant at which each came."""
    at: float
    shared: _Shared


_ALIKE, _ID, _SINCE = attrgetter("lane", "several"), attrgetter("entry.id"), attrgetter("since")
_FORGOTTEN = frozenset((Ending.LEFT, Ending.TURNED_AWAY))


class RecentRequests:
    """Observer that remembers the last REMEMBERED answers.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: deque[_Alike] = deque()
        self._count = 0

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Remember requests that were answered."""
        if ending in _FORGOTTEN:  # All but the first of several inputs that is let go of as another failed.
            requests = [one for one in requests if one.whole is not None and one.whole.ended]
        for _, alike in groupby(requests, _ALIKE if ending is Ending.ANSWERED else _shared):
            self._remember(list(alike), now)

    def _remember(self, requests: Sequence[PendingRequest], now: float) -> None:
        """Remember requests that are alike, and forget the oldest."""
        ids, since = "\n".join(map(_ID, requests)), array("d", map(_SINCE, requests))
        self._last.append(_Alike(ids, since, now, _shared(requests[0])))
        self._count += len(requests)
        while self._count > REMEMBERED:
            self._count -= len(self._last.popleft().since)

    def find(self, id: str, tenant: str | None) -> RequestStatus | None:
        """Status of the last request of this id, of this tenant if one is named."""
        for one in reversed(self._last):
            if id in one.ids and tenant in (None, one.shared[0].tenant):
                for known, since in zip(reversed(one.ids.split("\n")), reversed(one.since), strict=True):
                    if known == id:
                        return self._status(one, id, since)
        return None

    def _status(self, one: _Alike, id: str, begun: float) -> RequestStatus:
        principal, model, tier, version, failure, ran, whole = one.shared
        seconds, state, part, part_of = one.at - begun, EntryState.COMPLETED, "", ""
        since: float | None = self._clock() - one.at
        if whole is not None and whole.id != id:
            part_of = whole.id
        elif whole is not None:
            seconds, failure, ran, part = whole.seconds, whole.failure, whole.ran, whole.failed_part
            since = self._clock() - begun - seconds
            if not whole.ended:
                state, seconds, since = EntryState.PROCESSING, self._clock() - begun, None
        return RequestStatus(
            EntryState.FAILED if failure is not None else state,
            seconds,
            failure,
            principal.tenant,
            principal.user,
            model,
            tier,
            since=since,
            ran=ran,
            version=version,
            failed_part=part,
            part_of=part_of,
        )


def _shared(request: PendingRequest) -> _Shared:
    entry, reply, several = request.entry, request.reply, request.several
    whole = None if several is None or several.count == 1 else several.whole
    return request.principal, entry.model, entry.tier, entry.version, reply.failure, reply.ran, whole


def waiting(pending: PendingRequest, state: EntryState | None, now: float) -> RequestStatus:
    """Status of a request that is held at instant `now`, in a state if that can be told."""
    entry = pending.entry
    return RequestStatus(
        state or EntryState.QUEUED,
        now - pending.since,
        None,
        entry.tenant,
        pending.principal.user,
        entry.model,
        entry.tier,
        version=entry.version,
        part_of=pending.part_of,
    )
