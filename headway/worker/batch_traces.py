"""Spans of batches, and of the requests in them: the worker's part of their traces.

A batch with a sampled member has a trace of its own. As it has many parents, it has none, but links:

    CLIENT `poll MODEL` ── a link to the PRODUCER span of each sampled member
      └─ CONSUMER `process MODEL`, the run
           └─ INTERNAL `run MODEL`, as the process that ran it tells; or CLIENT `call MODEL`, one for each try at a remote API

Each sampled member has a span `process MODEL` in the trace of its request, with a link to `poll MODEL`. A retry is another
batch, and so another trace with a link to the same member. The poll is recorded at the claim: a worker that is killed with its
batch may have sent it before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import structlog

from headway.core.trace_context import read_carried
from headway.errors import BackendError
from headway.model import CarriedTrace, Entry, ItemResult, Lease, TraceContext
from headway.runtime.spans import RUN, Attributes, RunTrace, Span, SpanKind, SpanLink, SpanRecorder

Member = tuple[int, Entry, CarriedTrace]
"""Sampled entry of a batch: its place, itself, and what it carries."""


class BatchTraces:
    """Recorder of the spans of batches.

    Arguments:
        recorder: recorder of spans.
    """

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder

    async def run(
        self, run_batch: Callable[[], Awaitable[Sequence[ItemResult]]], lease: Lease, asked_at: float
    ) -> Sequence[ItemResult]:
        """Run a batch, and record its spans if one of its members is sampled.

        Arguments:
            run_batch: runs it.
            lease: the batch.
            asked_at: instant at which its claim began.
        """
        members = _sampled(lease.entries)
        if not members:
            return await run_batch()
        recorder = self._recorder
        poll = recorder.sampler.apart()
        begun = recorder.clock()
        self._tell_poll(poll, lease, members, asked_at, begun)
        run = RunTrace(recorder, recorder.sampler.below(poll), lease.slot.model, begun)
        token = RUN.set(run)
        items: Sequence[ItemResult] = ()
        error, kind = "cut short", "cancelled"
        try:
            with structlog.contextvars.bound_contextvars(trace_id=poll.trace_id.hex()):
                items = await run_batch()
            error = kind = ""
        except BackendError as exc:
            error, kind = exc.shown or str(exc), exc.cause.value
            raise
        except Exception as exc:
            error, kind = repr(exc), type(exc).__name__
            raise
        finally:
            RUN.reset(token)
            self._tell_run(run, poll, lease, members, items, error, kind)
        return items

    def _tell_poll(
        self, context: TraceContext, lease: Lease, members: Sequence[Member], asked_at: float, granted: float
    ) -> None:
        attributes: Attributes = (
            *_messaging(lease, "poll", "receive"),
            ("messaging.batch.message_count", len(lease.entries)),
            *_of_batch(lease),
        )
        links = [SpanLink(carried.context, f"req_{entry.id}") for _, entry, carried in members]
        unix = self._recorder.unix
        times = unix(min(asked_at, granted)), unix(granted)
        name = f"poll {lease.slot.model}"
        self._recorder.add(Span(name, SpanKind.CLIENT, context, b"", *times, attributes, links))

    def _tell_run(
        self,
        run: RunTrace,
        poll: TraceContext,
        lease: Lease,
        members: Sequence[Member],
        items: Sequence[ItemResult],
        error: str,
        kind: str,
    ) -> None:
        """Record the run: once in the trace of the batch, and once in that of each sampled member."""
        recorder = self._recorder
        begun, ended = recorder.unix(run.begun), recorder.unix(recorder.clock())
        name, size = f"process {lease.slot.model}", len(lease.entries)
        common: Attributes = (
            *_messaging(lease, "process", "process"),
            ("messaging.batch.message_count", size),
            *_of_batch(lease),
        )
        failed = (("error.type", kind),) if error else ()
        recorder.add(
            Span(name, SpanKind.CONSUMER, run.context, poll.span_id, begun, ended, common + failed, (), error or None)
        )
        links = (SpanLink(poll),)
        for place, entry, carried in members:
            waited = max(begun - carried.sent_at, 0) / 1e9
            own: Attributes = (("messaging.message.id", f"req_{entry.id}"), ("headway.queue_seconds", waited))
            wrong, why = error or None, failed
            if items and items[place].output is None:
                wrong, why = items[place].error or "no output", (("error.type", "item"),)
            span = recorder.sampler.below(carried.context)
            parent = carried.context.span_id
            attributes = common + own + why
            recorder.add(Span(name, SpanKind.CONSUMER, span, parent, begun, ended, attributes, links, wrong, True))


def _sampled(entries: Sequence[Entry]) -> list[Member]:
    """Members of a batch that are sampled."""
    return [
        (place, entry, carried)
        for place, entry in enumerate(entries)
        if entry.trace and (carried := read_carried(entry.trace)) is not None
    ]


def _messaging(lease: Lease, name: str, kind: str) -> Attributes:
    return (
        ("messaging.system", "headway"),
        ("messaging.destination.name", lease.slot.model),
        ("messaging.operation.name", name),
        ("messaging.operation.type", kind),
    )


def _of_batch(lease: Lease) -> Attributes:
    return (
        ("headway.worker", lease.slot.worker),
        ("headway.attempt", lease.attempt),
        ("headway.departure", lease.reason),
        ("headway.batch.fill", round(lease.fill, 4)),
    )
