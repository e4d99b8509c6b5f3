"""Spans of requests that are refused before the gateway has them: a wrong key, body or path, or too many requests.

Each is one SERVER span, recorded by the port. A request that names no sampled span, or that the sampler leaves out, costs a look.
Who floods a port with bad requests chooses whether they are sampled, so there are at most so many of these spans in a second;
those beyond are counted among the dropped ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from headway.core.trace_context import read_trace_context
from headway.errors import SHOWN, STATUS, RequestError
from headway.gateway.request_traces import SERVER_FAULT, protocol_attributes
from headway.model import TraceContext
from headway.model.request import SAMPLED
from headway.runtime.spans import FORMS, Attributes, Span, SpanForm, SpanKind, SpanRecorder

RATE = 20.0
"""Spans of refusals in a second, on average."""
BURST = 100
"""Spans of refusals at once."""
LONGEST_PATH = 256
"""Most characters of a path that a span tells."""
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class RefusalTraces:
    """Recorder of the spans of refused requests, for all ports of a process.

    Arguments:
        recorder: recorder of spans.
        dropped: counts of dropped spans by reason.
        scheme: scheme of the public port.
    """

    def __init__(self, recorder: SpanRecorder, dropped: dict[str, int], scheme: str = "http") -> None:
        self._recorder, self._dropped, self._scheme = recorder, dropped, scheme
        self._form = lru_cache(FORMS)(self._make_form)
        self._full_at = 0.0
        """Instant at which the whole burst may be recorded again."""

    def refused(self, way: str, fields: Mapping[bytes, bytes], id: str, error: RequestError, begun: float) -> None:
        """Record a request whose header fields, or metadata, are at hand.

        Arguments:
            way: see RequestOptions.
            fields: its fields; of those that count here the values.
            id: id of the request, as the client sees it.
            error: error with which it is refused.
            begun: instant of its arrival.
        """
        parent = fields.get(b"traceparent")
        context = None if parent is None else read_trace_context(parent)
        if context is not None and context.flags & SAMPLED:  # Only then is the other field worth a look.
            context = read_trace_context(fields[b"traceparent"], fields.get(b"tracestate", b""))
        self.refused_below(context, way, id, error, begun)

    def refused_below(self, parent: TraceContext | None, way: str, id: str, error: RequestError, begun: float) -> None:
        """Record a request below a span; see `refused`. `parent`: span of the client's that it names; None for none."""
        self._tell(parent, way, (("headway.request_id", id),), error, begun)

    def _tell(self, parent: TraceContext | None, way: str, own: Attributes, error: RequestError, begun: float) -> None:
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
        wrong = error.message if status >= SERVER_FAULT else None
        recorder.add(Span(form, context, above, begun_at, ended_at, own, error=wrong, remote=bool(above)))

    def answered(
        self, method: str, path: str, fields: Mapping[bytes, bytes], id: str, status: int, begun: float
    ) -> None:
        """Record a request to an ordinary route that was answered with an error, if it names a span; see `refused`."""
        if b"traceparent" not in fields:
            return
        parent = read_trace_context(fields[b"traceparent"], fields.get(b"tracestate", b""))
        code = next((code for code, known in STATUS.items() if known == status), None)
        if parent is not None and code is not None:
            way = method if method in _METHODS else "_OTHER"
            own = ("headway.request_id", id), ("url.path", path[:LONGEST_PATH])
            self._tell(parent, way, own, RequestError(f"answered with {status}", code=code), begun)

    def _make_form(self, way: str, status: int, code: str) -> SpanForm:
        """Form of the spans of one route that are refused for one reason."""
        if " " in way:
            attributes = protocol_attributes(way, status, self._scheme)
        else:
            attributes = (
                ("http.request.method", way), ("url.scheme", self._scheme), ("http.response.status_code", status),
            )  # fmt: skip
        return SpanForm(way.removeprefix("grpc "), SpanKind.SERVER, (*attributes, ("error.type", code)))
