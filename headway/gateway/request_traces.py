"""Spans of requests: the gateway's part of their traces.

    SERVER `POST /v1/inference`
      └─ PRODUCER `send MODEL`, one for each input ── its context travels in the entry
           └─ CONSUMER `process MODEL`, recorded by the worker (`headway.worker.batch_traces`)

A request that is not sampled leaves nothing here. One that is has its spans recorded when it ends, from what every other
observer hears too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from headway.core.trace_context import pack_carried, trace_id_of
from headway.errors import SHOWN, STATUS
from headway.gateway.pending import Ending, PendingRequest, RequestTrace, SeveralInputs
from headway.model import CarriedTrace, Entry, Failure, RequestOptions, TraceContext
from headway.runtime.counters import GatewayCounts
from headway.runtime.spans import FORMS, Attributes, Span, SpanForm, SpanKind, SpanLink, SpanRecorder

LEFT = 499
"""Status of a request whose client left, as the access log has it."""
ACCEPTED = 202
"""Status of a request that has become a task."""
SERVER_FAULT = 500
"""Least status of an error that is not the client's."""

LONG_MODEL = 128
"""Characters beyond which the name of a model that a failed request named is remembered by no form."""

_GEN_AI: Mapping[str, str] = {
    "POST /v1/chat/completions": "chat",
    "POST /v1/completions": "text_completion",
    "POST /v1/embeddings": "embeddings",
}
"""Operations of generative AI, as OpenTelemetry names them, by route."""


class SentInput(msgspec.Struct, eq=False):
    """Input of a sampled request, from its submission to its end.

    Attributes:
        request: trace of its request.
        context: its PRODUCER span.
        begun: instant of its submission.
        admitted: instant at which the broker had it; 0 while that is not known.
    """

    request: RequestTrace
    context: TraceContext
    begun: float
    admitted: float = 0.0


class RequestTraces:
    """Observer that records the spans of sampled requests.

    Arguments:
        recorder: recorder of spans.
        tiers: names of the tiers.
        counters: counters whose histograms get exemplars.
        scheme: scheme of the public port.

    Attributes:
        sampler: decides which requests are sampled.
    """

    def __init__(
        self, recorder: SpanRecorder, tiers: Sequence[str], counters: GatewayCounts, scheme: str = "http"
    ) -> None:
        self._recorder, self._tiers, self._counters, self._scheme = recorder, tiers, counters, scheme
        self._clock, self.sampler = recorder.clock, recorder.sampler
        self._send_form = lru_cache(FORMS)(_send_form)
        self._server_form = lru_cache(FORMS)(self._make_server_form)
        self._sent: dict[bytes, SentInput] = {}
        """Inputs that have not ended, by what their entries carry."""

    def begin(self, options: RequestOptions, several: SeveralInputs | None, number: int) -> bytes:
        """Begin the trace of a request, or of one of its inputs. Returns what its entry carries; empty unless sampled.

        Arguments:
            options: options of the request.
            several: request with several inputs of which this is one.
            number: number of the submission; see `Sampler.draws`.
        """
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
        """Begin the trace of a request with so many inputs; None: it is not sampled. `drawn`: whether it is without a parent."""
        if options.replays is not None:  # As what died was sampled.
            links = (SpanLink(options.replays),)
            return RequestTrace(self.sampler.apart(), None, options.way, self._clock(), count, links)
        if options.trace is None:
            context = self.sampler.first() if drawn else None
        else:
            context = self.sampler.begin(options.trace)
        return None if context is None else RequestTrace(context, options.trace, options.way, self._clock(), count)

    def admitted(self, entry: Entry) -> None:
        """Note that the broker has an entry."""
        if (sent := self._sent.get(entry.trace)) is not None and not sent.admitted:
            sent.admitted = self._clock()

    def detached(self, entry: Entry) -> None:
        """Note that the client of a task has its id, and waits no longer."""
        if (sent := self._sent.get(entry.trace)) is not None:
            now = self._clock()
            self._tell_request(sent.request, entry, entry.id, ACCEPTED, None, now, self._recorder.unix_zero(now))

    def finished(self, requests: Sequence[PendingRequest], ending: Ending, now: float) -> None:
        """Record the spans of those of the requests that are sampled."""
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
            self._tell_send(sent, pending, ending, now, zero)
            self._note_exemplars(pending, ending, now, zero)
        request.missing -= 1
        if failure is not None or not request.missing:
            left = ending is Ending.LEFT
            status = 200 if failure is None else LEFT if left else STATUS[failure.code]
            id = entry.id if several is None else several.id
            self._tell_request(request, entry, id, status, failure, now, zero)

    def _note_exemplars(self, pending: PendingRequest, ending: Ending, now: float, zero: int) -> None:
        """Give the histograms that count this request its trace id."""
        entry, reply = pending.entry, pending.reply
        if ending not in (Ending.REPLIED, Ending.ANSWERED, Ending.TIMED_OUT):
            return
        key = entry.model, self._tiers[entry.tier]
        trace_id, at = trace_id_of(entry.trace), zero / 1e9 + now
        self._counters.request_seconds[key].exemplify(now - pending.since, trace_id, at)
        if ending is not Ending.TIMED_OUT:
            self._counters.queue_seconds[key].exemplify(0.0 if reply.kept else reply.queued, trace_id, at)

    def _tell_send(self, sent: SentInput, pending: PendingRequest, ending: Ending, now: float, zero: int) -> None:
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

    def _tell_request(
        self, request: RequestTrace, entry: Entry, id: str, status: int, failure: Failure | None, now: float, zero: int
    ) -> None:
        """Record the SERVER span of a request, once."""
        if request.told:
            return
        request.told = True
        own: Attributes = (("headway.request_id", f"req_{id}"), ("headway.tenant", entry.tenant))
        error, code, model = None, "", entry.model
        if failure is not None:
            code = SHOWN.get(failure.code, failure.code)
            error = failure.message if status >= SERVER_FAULT else None
            if len(model) > LONG_MODEL:  # As a client may name one that is not served: no form remembers it.
                own, model = (*own, ("headway.model", model)), ""
        form = self._server_form(request.way, status, model, entry.tier, code)
        parent = request.parent.span_id if request.parent is not None else b""
        begun, ended = zero + int(request.begun * 1e9), zero + int(now * 1e9)
        self._recorder.add(Span(form, request.context, parent, begun, ended, own, request.links, error, bool(parent)))

    def _make_server_form(self, way: str, status: int, model: str, tier: int, code: str) -> SpanForm:
        """Form of the SERVER spans of a route with one outcome. `code`: code of the error; empty for none."""
        attributes: Attributes = (*protocol_attributes(way, status, self._scheme), ("headway.tier", self._tiers[tier]))
        if model:
            attributes += (("headway.model", model),)
        if way in _GEN_AI:
            attributes += (("gen_ai.operation.name", _GEN_AI[way]), ("gen_ai.request.model", model))
        if code:
            attributes += (("error.type", code),)
        return SpanForm(way.removeprefix("grpc ") or "request", SpanKind.SERVER, attributes)


def protocol_attributes(way: str, status: int, scheme: str) -> Attributes:
    """Attributes of the protocol by which a request came.

    Arguments:
        way: see RequestOptions.
        status: status of its answer, as HTTP has it.
        scheme: scheme of the public port.
    """
    kind, _, place = way.partition(" ")
    if kind == "grpc":
        service, _, method = place.partition("/")
        return ("rpc.system", "grpc"), ("rpc.service", service), ("rpc.method", method)
    if not place:  # A replay of a dead letter, or a program's call.
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
