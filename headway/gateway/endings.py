"""Ends of requests: observers hear of them, and sinks get the answers. One that fails harms no other."""

from __future__ import annotations

from collections.abc import Sequence

from headway.gateway.pending import NOBODY, Ending, Observer, PendingRequest, ReplySink
from headway.model import Reply
from headway.runtime.logger import get_logger

log = get_logger(__name__)


def finish(observers: Sequence[Observer], ended: Sequence[PendingRequest], ending: Ending, now: float) -> None:
    """End requests that have their replies, each once; see Observer."""
    for observer in observers:
        try:
            observer.finished(ended, ending, now)
        except Exception:
            log.exception("an observer of requests has failed", requests=len(ended))
    for pending in ended:
        sink = pending.sink
        pending.sink = NOBODY
        try:
            sink.answer(pending.reply)
        except Exception:
            log.exception("an answer could not be written", request_id=pending.reply.id)


def tell(sink: ReplySink, reply: Reply) -> None:
    """Give a sink its answer."""
    try:
        sink.answer(reply)
    except Exception:
        log.exception("an answer could not be written", request_id=reply.id)
