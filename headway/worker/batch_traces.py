"""Spans for batches and the requests in them: the worker's part of their traces.

A batch that contains a sampled entry has its own trace. It is linked to its entries, because a span can't have several parents:

    CLIENT `poll MODEL` ── linked to the PRODUCER span of each sampled entry
      └─ CONSUMER `process MODEL`: the run
           └─ INTERNAL `run MODEL`, reported by the process that ran it; or CLIENT `call MODEL` for each try at a remote API

Each sampled entry has a span `process MODEL` in its request's trace, linked to `poll MODEL`. A retry is another batch, with
its own trace that is linked to the same entry. The poll span is recorded when the batch is claimed, so it may still be sent
even if the worker is killed during the batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache

from headway.core.trace_context import read_carried
from headway.errors import BackendError
from headway.model import CarriedTrace, Entry, ItemResult, Lease, TraceContext
from headway.runtime.log import TRACE_ID
from headway.runtime.spans import FORMS, RUN, Attributes, RunTrace, Span, SpanForm, SpanKind, SpanLink, SpanRecorder

Member = tuple[int, Entry, CarriedTrace]  # Index of a sampled entry in its batch, the entry, and its trace context.
Facts = tuple[str, str, int, int, str, float, str]  # Model, worker, size, attempt, departure reason, fill, version.


class BatchTraces:
    """Records the spans of batches."""

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder
        self._forms = lru_cache(FORMS)(_forms)

    async def run(
        self, run_batch: Callable[[], Awaitable[Sequence[ItemResult]]], lease: Lease, claimed_at: float
    ) -> Sequence[ItemResult]:
        """Run a batch. If any entry is sampled, record the spans. `claimed_at` is when the claim started."""
        members = _sampled(lease.entries)
        if not members:
            return await run_batch()
        recorder = self._recorder
        polled, ran = self._forms(_facts(lease))
        batch = ("headway.batch_id", lease.batch_id)
        poll, begun = recorder.sampler.apart(), recorder.clock()
        run = RunTrace(recorder, recorder.sampler.below(poll), lease.slot.model, begun)
        links = [SpanLink(carried.context, f"req_{entry.id}") for _, entry, carried in members]
        recorder.add(Span(polled, poll, b"", run.unix(min(claimed_at, begun)), run.unix(begun), (batch,), links))
        token, named = RUN.set(run), TRACE_ID.set(poll.trace_id.hex())
        items: Sequence[ItemResult] = ()
        error, kind = "cut short", "cancelled"
        try:
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
            TRACE_ID.reset(named)
            self._record_run(run, poll, ran, members, items, error, kind, batch)
        return items

    def _record_run(
        self,
        run: RunTrace,
        poll: TraceContext,
        form: SpanForm,
        members: Sequence[Member],
        items: Sequence[ItemResult],
        error: str,
        kind: str,
        batch: tuple[str, str],
    ) -> None:
        """Record the run in the batch's trace and in the trace of each sampled entry."""
        recorder = self._recorder
        begun, ended = run.unix(run.begun), run.unix(recorder.clock())
        failed: Attributes = (batch, ("error.type", kind)) if error else (batch,)
        recorder.add(Span(form, run.context, poll.span_id, begun, ended, failed, (), error or None))
        links = (SpanLink(poll),)
        for place, entry, carried in members:
            waited = max(begun - carried.sent_at, 0) / 1e9
            own: Attributes = (("messaging.message.id", f"req_{entry.id}"), ("headway.queue_seconds", waited), *failed)
            wrong = error or None
            if items and items[place].output is None:
                wrong, own = items[place].error or "no output", (*own, ("error.type", "item"))
            span = recorder.sampler.below(carried.context)
            recorder.add(Span(form, span, carried.context.span_id, begun, ended, own, links, wrong, True))


def _sampled(entries: Sequence[Entry]) -> Sequence[Member]:
    carrying = [entry for entry in entries if entry.trace]
    if not carrying:  # The usual case.
        return ()
    members, place = list[Member](), -1
    for entry in carrying:
        place = entries.index(entry, place + 1)  # Resuming after the last hit scans the batch only once.
        if (carried := read_carried(entry.trace)) is not None:
            members.append((place, entry, carried))
    return members


def _facts(lease: Lease) -> Facts:
    slot = lease.slot
    fill = round(lease.fill, 4)
    return slot.model, slot.worker, len(lease.entries), lease.attempt, lease.reason, fill, slot.runs.version


def _forms(facts: Facts) -> tuple[SpanForm, SpanForm]:
    polled, ran = _attributes("poll", "receive", facts), _attributes("process", "process", facts)
    model = facts[0]
    return SpanForm(f"poll {model}", SpanKind.CLIENT, polled), SpanForm(f"process {model}", SpanKind.CONSUMER, ran)


def _attributes(name: str, kind: str, facts: Facts) -> Attributes:
    model, worker, size, attempt, departure, fill, version = facts
    return (
        ("messaging.system", "headway"),
        ("messaging.destination.name", model),
        ("messaging.operation.name", name),
        ("messaging.operation.type", kind),
        ("messaging.batch.message_count", size),
        ("headway.worker", worker),
        ("headway.model_version", version),
        ("headway.attempt", attempt),
        ("headway.departure", departure),
        ("headway.batch.fill", fill),
    )
