"""Records of requests that have ended: the most recent ones in memory, and a share of all requests in the access log."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from headway.core.excerpt import excerpt
from headway.core.trace_context import trace_field
from headway.errors import SHOWN, STATUS
from headway.gateway.pending import Ending, PendingRequest, WholeOutcome
from headway.model import BatchRun, EntryState, Failure, Principal, RequestStatus
from headway.runtime.logger import get_logger

log = get_logger(__name__)

REMEMBERED = 10_000  # Maximum number of requests to remember. Inputs and outputs aren't kept.
LEFT = 499  # Status of a request whose client left, as in nginx.

_Shared = tuple[Principal, str, int, str, Failure | None, BatchRun | None, WholeOutcome | None]
"""Principal, model, tier, queue version, failure, batch run, and for several inputs the outcome of the whole request."""


class _Alike(msgspec.Struct, frozen=True):
    """Requests that ended together and differ only in id and arrival time. Separate records would be ten times as large."""

    ids: str  # Ids, one per line.
    since: array[float]  # Arrival times.
    at: float
    shared: _Shared


_ALIKE, _ID, _SINCE = attrgetter("lane", "several"), attrgetter("entry.id"), attrgetter("since")
_FORGOTTEN = frozenset((Ending.LEFT, Ending.TURNED_AWAY))


class RecentRequests:
    """Observer that remembers the last REMEMBERED requests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: deque[_Alike] = deque()
        self._count = 0

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        if ending in _FORGOTTEN:  # The first of several inputs is kept, because it has the outcome of its request.
            requests = [request for request in requests if request.whole is not None and request.whole.ended]
        for _, alike in groupby(requests, _ALIKE if ending is Ending.ANSWERED else _shared):
            self._remember(list(alike), now)

    def _remember(self, requests: Sequence[PendingRequest], now: float) -> None:
        ids, since = "\n".join(map(_ID, requests)), array("d", map(_SINCE, requests))
        self._last.append(_Alike(ids, since, now, _shared(requests[0])))
        self._count += len(requests)
        while self._count > REMEMBERED:
            self._count -= len(self._last.popleft().since)

    def find(self, id: str, tenant: str | None) -> RequestStatus | None:
        """Return the status of the last request with this id, of one tenant or of any."""
        for alike in reversed(self._last):
            if id in alike.ids and tenant in (None, alike.shared[0].tenant):
                for known, since in zip(reversed(alike.ids.split("\n")), reversed(alike.since), strict=True):
                    if known == id:
                        return self._status(alike, id, since)
        return None

    def _status(self, alike: _Alike, id: str, begun: float) -> RequestStatus:
        principal, model, tier, version, failure, ran, whole = alike.shared
        seconds, state, part, part_of = alike.at - begun, EntryState.COMPLETED, "", ""
        since: float | None = self._clock() - alike.at
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
    """Return the status of a pending request at time `now`. `state`: its state at the broker, if known."""
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


class AccessLog:
    """Observer that logs a share of all requests. `share` is greater than 0 and at most 1."""

    def __init__(self, share: float, tiers: Sequence[str], rng: Callable[[], float]) -> None:
        self._share, self._tiers, self._rng = share, tiers, rng

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Log some of the requests. A request with several inputs is logged once, when the input that ends the request has finished."""
        for request in requests:
            several = request.several
            if several is not None and not several.ends(request.reply.failure is not None):
                continue
            if self._rng() < self._share:
                self._log(request, ending, now)

    def _log(self, request: PendingRequest, ending: Ending, now: float) -> None:
        entry, reply, several = request.entry, request.reply, request.several
        failure, ran = reply.failure, reply.ran
        if ending is Ending.LEFT:
            status, error = LEFT, "CANCELLED"
        else:
            status = 200 if failure is None else STATUS[failure.code]
            error = "" if failure is None else SHOWN.get(failure.code, failure.code)
        log.info(
            "request",
            request_id=f"req_{entry.id if several is None else several.id}",
            status=status,
            error=error,
            latency_ms=round((now - request.since) * 1000, 1),
            queue_ms=round(reply.queued * 1000, 1),
            batch_ms=None if ran is None else round(ran.seconds * 1000, 1),
            batch_size=None if ran is None else ran.size,
            worker=None if ran is None else ran.worker,
            batch_id=None if ran is None else ran.batch_id,
            version=excerpt((ran.version if ran is not None else "") or entry.version) or None,
            attempts=reply.attempts,
            shared=None if reply.shared is None else "kept" if reply.kept else "joined",
            task=request.task,
            inputs=1 if several is None else several.count,
            model=excerpt(entry.model),
            tier=self._tiers[entry.tier],
            tenant=excerpt(entry.tenant),
            user=excerpt(request.principal.user),
            **trace_field(entry.trace),
        )
