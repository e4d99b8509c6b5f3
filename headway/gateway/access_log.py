"""Access log: a log line for each request that ends, or for a random share of them.

A line tells how the request ended and where its time went, but nothing of its content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.core.excerpt import excerpt
from headway.core.trace_context import trace_field
from headway.errors import SHOWN, STATUS
from headway.gateway.pending import Ending, PendingRequest
from headway.runtime.logger import get_logger

log = get_logger(__name__)

LEFT = 499
"""Status of a request whose client left, as in nginx."""


class AccessLog:
    """Observer that logs requests.

    Arguments:
        share: share of the requests to log, above 0 and up to 1.
        tiers: names of the tiers.
        rng: uniform in [0, 1).
    """

    def __init__(self, share: float, tiers: Sequence[str], rng: Callable[[], float]) -> None:
        self._share, self._tiers, self._rng = share, tiers, rng

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Log a share of the requests. One with several inputs is logged once, with the input that ends it."""
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
