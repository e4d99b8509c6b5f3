"""Spans for requests, recorded by a gateway and its ports.

    SERVER `POST /v1/inference`
      └─ PRODUCER `send MODEL`, one for each input ── its context travels in the entry
           └─ CONSUMER `process MODEL`, recorded by the worker (`headway.worker.batch_traces`)

Nothing is stored for requests that aren't sampled. The spans of a sampled request are recorded when it ends.

A port records a SERVER span for each sampled request that it refuses, for example because of an invalid key or a malformed body. Since
clients can force sampling by sending a parent span, these spans are rate-limited. Those over the limit are counted as dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from headway.core.trace_context import pack_carried, read_trace_context, trace_id_of
from headway.errors import SHOWN, STATUS, RequestError
from headway.gateway.pending import Ending, PendingRequest, RequestTrace, SeveralInputs
from headway.gateway.request_log import LEFT
from headway.model import CarriedTrace, Entry, Failure, RequestOptions, TraceContext
from headway.model.request import SAMPLED
from headway.runtime.counters import GatewayCounts
from headway.runtime.spans import FORMS, Attributes, Span, SpanForm, SpanKind, SpanLink, SpanRecorder

ACCEPTED = 202  # Status of a request that became a task.
SERVER_FAULT = 500  # Lowest status of errors that aren't the client's fault.
RATE = 20.0  # Average number of refusal spans per second.
BURST = 100  # Maximum number of refusal spans in a burst.
LONGEST_PATH = 256  # Maximum number of characters of a path in a span.
LONG_MODEL = 128  # Maximum characters of a model name in a cached form.
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

_GEN_AI: Mapping[str, str] = {
    "POST /v1/chat/completions": "chat",
    "POST /v1/completions": "text_completion",
    "POST /v1/embeddings": "embeddings",
}
"""OpenTelemetry's names for generative AI operations, by route."""


class SentInput(msgspec.Struct, eq=False):
    """One input of a sampled request, from submission to end."""

    request: RequestTrace
    context: TraceContext  # PRODUCER span of the input.
    begun: float
    admitted: float = 0.0  # When the broker accepted the input; 0 until that is known.


class RequestTraces:
    """Observer that records the spans of sampled requests, and adds exemplars to the histograms of `counters`."""

    def __init__(
        self, recorder: SpanRecorder, tiers: Sequence[str], counters: GatewayCounts, scheme: str = "http"
    ) -> None:
        self._recorder, self._tiers, self._counters, self._scheme = recorder, tiers, counters, scheme
        self._clock, self.sampler = recorder.clock, recorder.sampler
        self._send_form = lru_cache(FORMS)(_send_form)
        self._server_form = lru_cache(FORMS)(self._make_server_form)
        self._sent: dict[bytes, SentInput] = {}  # Inputs that haven't ended, by the trace in their entries.

    def begin(self, options: RequestOptions, several: SeveralInputs | None, number: int) -> bytes:
        """Begin a trace. Returns the trace context for the entry; empty if it isn't sampled. For `number`, see `Sampler.draws`."""
        drawn = number >= self.sampler.due and self.sampler.draws(number)
        if several is None:
            request = self._begin(options, 1, drawn)
        else:
            if not several.entered:
                several.entered, several.trace = True, self._begin(options, several.count, drawn)
            request = several.trace
        if request is None:
            return b""
        below = self.sampler.below(request.context)
        now = self._clock()
        packed = pack_carried(CarriedTrace(below, self._recorder.unix_zero(now) + int(now * 1e9)))
        self._sent[packed] = SentInput(request, below, now)
        return packed

    def _begin(self, options: RequestOptions, count: int, drawn: bool) -> RequestTrace | None:
        """Begin the trace of a request if it is sampled. If the client sent no trace context, `drawn` decides this."""
        if options.replays is not None:  # The dead letter was sampled, so sample its replay, too.
            links = (SpanLink(options.replays),)
            return RequestTrace(self.sampler.apart(), None, options.way, self._clock(), count, links)
        if options.trace is None:
            context = self.sampler.first() if drawn else None
        else:
            context = self.sampler.begin(options.trace)
        return None if context is None else RequestTrace(context, options.trace, options.way, self._clock(), count)

    def admitted(self, entry: Entry) -> None:
        if (sent := self._sent.get(entry.trace)) is not None and not sent.admitted:
            sent.admitted = self._clock()

    def detached(self, entry: Entry) -> None:
        """Record the span of a task whose client no longer waits for the outcome."""
        if (sent := self._sent.get(entry.trace)) is not None:
            now = self._clock()
            self._record_request(sent.request, entry, entry.id, ACCEPTED, None, now, self._recorder.unix_zero(now))

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        if not self._sent:
            return
        zero = self._recorder.unix_zero(now)
        for request in requests:
            if request.entry.trace:
                self._finish(request, ending, now, zero)

    def _finish(self, pending: PendingRequest, ending: Ending, now: float, zero: int) -> None:
        entry, reply = pending.entry, pending.reply
        sent = self._sent.pop(entry.trace, None)
        if sent is None:
            return
        failure = reply.failure
        several, request = pending.several, sent.request
        if ending is not Ending.TURNED_AWAY:
            self._record_send(sent, pending, ending, now, zero)
            self._add_exemplars(pending, ending, now, zero)
        request.missing -= 1
        if failure is not None or not request.missing:
            left = ending is Ending.LEFT
            status = 200 if failure is None else LEFT if left else STATUS[failure.code]
            id = entry.id if several is None else several.id
            self._record_request(request, entry, id, status, failure, now, zero)

    def _add_exemplars(self, pending: PendingRequest, ending: Ending, now: float, zero: int) -> None:
        entry, reply = pending.entry, pending.reply
        if ending not in (Ending.REPLIED, Ending.ANSWERED, Ending.TIMED_OUT):
            return
        key = entry.model, self._tiers[entry.tier]
        trace_id, at = trace_id_of(entry.trace), zero / 1e9 + now
        self._counters.request_seconds[key].exemplify(now - pending.since, trace_id, at)
        if ending is not Ending.TIMED_OUT:
            self._counters.queue_seconds[key].exemplify(0.0 if reply.kept else reply.queued, trace_id, at)

    def _record_send(self, sent: SentInput, pending: PendingRequest, ending: Ending, now: float, zero: int) -> None:
        entry, reply = pending.entry, pending.reply
        own: Attributes = (("messaging.message.id", f"req_{entry.id}"),)
        if reply.shared is not None:
            own += (("headway.shared", "kept" if reply.kept else "joined"),)
        error = None
        if ending is Ending.REFUSED and reply.failure is not None:
            error = reply.failure.message
            own += (("error.type", reply.failure.code),)
        begun, ended = zero + int(sent.begun * 1e9), zero + int((sent.admitted or now) * 1e9)
        parent = sent.request.context.span_id
        self._recorder.add(Span(self._send_form(entry.model), sent.context, parent, begun, ended, own, (), error))

    def _record_request(
        self, request: RequestTrace, entry: Entry, id: str, status: int, failure: Failure | None, now: float, zero: int
    ) -> None:
        if request.recorded:
            return
        request.recorded = True
        own: Attributes = (("headway.request_id", f"req_{id}"), ("headway.tenant", entry.tenant))
        error, code, model = None, "", entry.model
        if failure is not None:
            code = SHOWN.get(failure.code, failure.code)
            error = failure.message if status >= SERVER_FAULT else None
            if len(model) > LONG_MODEL:  # Names that clients make up shouldn't fill the cache of forms.
                own, model = (*own, ("headway.model", model)), ""
        form = self._server_form(request.way, status, model, entry.tier, code)
        parent = request.parent.span_id if request.parent is not None else b""
        begun, ended = zero + int(request.begun * 1e9), zero + int(now * 1e9)
        self._recorder.add(Span(form, request.context, parent, begun, ended, own, request.links, error, bool(parent)))

    def _make_server_form(self, way: str, status: int, model: str, tier: int, code: str) -> SpanForm:
        attributes: Attributes = (*protocol_attributes(way, status, self._scheme), ("headway.tier", self._tiers[tier]))
        if model:
            attributes += (("headway.model", model),)
        if way in _GEN_AI:
            attributes += (("gen_ai.operation.name", _GEN_AI[way]), ("gen_ai.request.model", model))
        if code:
            attributes += (("error.type", code),)
        return SpanForm(way.removeprefix("grpc ") or "request", SpanKind.SERVER, attributes)


class RefusalTraces:
    """Records spans for requests that a process's ports refuse before these reach the gateway."""

    def __init__(self, recorder: SpanRecorder, dropped: dict[str, int], scheme: str = "http") -> None:
        self._recorder, self._dropped, self._scheme = recorder, dropped, scheme
        self._form = lru_cache(FORMS)(self._make_form)
        self._full_at = 0.0  # When BURST spans may be recorded again.

    def refused(self, way: str, fields: Mapping[bytes, bytes], id: str, error: RequestError, begun: float) -> None:
        """Record a refused request that arrived at time `begun`. `id` is the id that the client sees. For `way`, see RequestOptions."""
        parent = fields.get(b"traceparent")
        context = None if parent is None else read_trace_context(parent)
        if context is not None and context.flags & SAMPLED:  # Otherwise `tracestate` needn't be read.
            context = read_trace_context(fields[b"traceparent"], fields.get(b"tracestate", b""))
        self.refused_below(context, way, id, error, begun)

    def refused_below(self, parent: TraceContext | None, way: str, id: str, error: RequestError, begun: float) -> None:
        """Record a refused request below the client's span `parent`, or as the first span of a trace; see `refused`."""
        self._record(parent, way, (("headway.request_id", id),), error, begun)

    def _record(
        self, parent: TraceContext | None, way: str, own: Attributes, error: RequestError, begun: float
    ) -> None:
        recorder = self._recorder
        context = recorder.sampler.begin(parent)
        if context is None:
            return
        now = recorder.clock()
        full_at = max(self._full_at, now) + 1 / RATE
        if full_at - now > (BURST + 0.5) / RATE:
            self._dropped["refused"] += 1
            return
        self._full_at = full_at
        zero, code, status = recorder.unix_zero(now), error.code, STATUS[error.code]
        form = self._form(way, status, SHOWN.get(code, code))
        above = parent.span_id if parent is not None else b""
        begun_at, ended_at = zero + int(min(begun, now) * 1e9), zero + int(now * 1e9)
        message = error.message if status >= SERVER_FAULT else None
        recorder.add(Span(form, context, above, begun_at, ended_at, own, error=message, remote=bool(above)))

    def answered(
        self, method: str, path: str, fields: Mapping[bytes, bytes], id: str, status: int, begun: float
    ) -> None:
        """Record a failed request to a non-inference route if the client sent a trace context; see `refused`."""
        if b"traceparent" not in fields:
            return
        parent = read_trace_context(fields[b"traceparent"], fields.get(b"tracestate", b""))
        code = next((code for code, known in STATUS.items() if known == status), None)
        if parent is not None and code is not None:
            way = method if method in _METHODS else "_OTHER"
            own = ("headway.request_id", id), ("url.path", path[:LONGEST_PATH])
            self._record(parent, way, own, RequestError(f"answered with {status}", code=code), begun)

    def _make_form(self, way: str, status: int, code: str) -> SpanForm:
        if " " in way:
            attributes = protocol_attributes(way, status, self._scheme)
        else:
            attributes = (
                ("http.request.method", way), ("url.scheme", self._scheme), ("http.response.status_code", status),
            )  # fmt: skip
        return SpanForm(way.removeprefix("grpc "), SpanKind.SERVER, (*attributes, ("error.type", code)))


def protocol_attributes(way: str, status: int, scheme: str) -> Attributes:
    """Return a span's attributes for the request's protocol and the HTTP status of the answer. `way`: see RequestOptions."""
    kind, _, place = way.partition(" ")
    if kind == "grpc":
        service, _, method = place.partition("/")
        return ("rpc.system", "grpc"), ("rpc.service", service), ("rpc.method", method)
    if not place:  # A dead letter replay, or a call from a program.
        return ()
    path = () if "{" in place else (("url.path", place),)
    return (
        ("http.request.method", kind), ("http.route", place), ("url.scheme", scheme), *path,
        ("http.response.status_code", status),
    )  # fmt: skip


def _send_form(model: str) -> SpanForm:
    return SpanForm(f"send {model}", SpanKind.PRODUCER, (
        ("messaging.system", "headway"), ("messaging.destination.name", model), ("messaging.operation.name", "send"),
        ("messaging.operation.type", "send"),
    ))  # fmt: skip
