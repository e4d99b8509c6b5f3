"""Exporter of spans: a thread that sends the buffered spans through an exporter of OpenTelemetry's SDK.

    services ──▶ SpanBuffer ──▶ this thread ──SDK: encode, send, retry──▶ collector
                    │ full          │ no answer after the retries
                    ▼               ▼
                 dropped         dropped

No request waits for the exporter, which drops and counts spans that it can't send in time. It has CLOSE_WITHIN seconds to send the
last spans of an ending process. Import this module only if tracing is on, because it needs the packages of the extra `otel`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, export
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from headway.model import TraceContext
from headway.runtime import spans as own_spans
from headway.runtime.logger import get_logger, import_grpc_quietly
from headway.runtime.spans import Span, SpanBuffer, SpanLink
from headway.runtime.supervisor import Supervisor
from headway.telemetry.trace_environment import GRPC, Collector, TraceEnvironment
from headway.version import __version__

log = get_logger(__name__)

CLOSE_WITHIN = 1.5  # Maximum seconds that an ending process waits for its last spans to be sent.
MOST_TEXT = 2048  # Maximum number of characters of an attribute or an error message.
AT_ONCE = 4  # Spans to encode before other threads get a turn; about 0.3 ms.
PAUSE = 0.0002  # Minimum seconds of that turn.

_KINDS = {kind: SpanKind[kind.name] for kind in own_spans.SpanKind}
_UNSET = Status(StatusCode.UNSET)
_SCOPE = InstrumentationScope("headway", __version__)
_MOST_STATES = 32  # Maximum number of `tracestate` members. The SDK would drop a longer `tracestate`.


class SpanExporter:
    """Exports the spans in `buffer`. It is a `headway.app.lifecycle.Resource`.

    Every message contains the SDK's `resource`, which describes the process. `make` creates the SDK's exporter. `dropped` counts
    dropped spans by reason."""

    def __init__(
        self,
        environment: TraceEnvironment,
        resource: Resource,
        make: Callable[[], export.SpanExporter],
        dropped: dict[str, int],
    ) -> None:
        self._environment, self._resource, self._make, self._dropped = environment, resource, make, dropped
        self._due = threading.Event()
        self._ending = threading.Event()
        self._until = 0.0
        self.buffer = SpanBuffer(environment.most_waiting, environment.most_sent, dropped, self._due.set)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._complaints = Complaints(self._thread)
        self._sdk: export.SpanExporter | None = None
        self._away = False
        self._sending = 0  # Number of spans in the message that is being sent.

    async def open(self) -> None:
        self._thread.start()

    def start(self, supervisor: Supervisor) -> None:
        """Do nothing, because `open` has started the thread."""

    async def close(self) -> None:
        """Send the remaining spans within CLOSE_WITHIN seconds, and end the thread."""
        if self._thread.ident is None:
            return
        self._until = time.monotonic() + CLOSE_WITHIN
        self._ending.set()
        self._due.set()
        trouble = self._away or self._complaints.said
        if self._sdk is not None and trouble:  # Shutting down ends its wait for the next retry.
            self._sdk.shutdown()
        await asyncio.to_thread(self._thread.join, CLOSE_WITHIN)
        if self._sdk is not None and not trouble:
            self._sdk.shutdown()
        sending, self._sending = self._sending, 0
        if unsent := len(self.buffer) + sending:
            self._dropped["export"] += unsent
            log.warning("spans were not sent before the process ended", spans=unsent)

    def _run(self) -> None:
        hide_headers()
        try:
            self._sdk = sdk = self._make()
        except Exception as exc:  # Spans are then dropped and counted once too many wait.
            log.error("traces cannot be sent", collector=self._environment.collector.shown, error=str(exc))
            return
        self._complaints.listen()
        try:
            self._send_all(sdk)
        finally:
            self._complaints.stop()

    def _send_all(self, sdk: export.SpanExporter) -> None:
        delay, most = self._environment.delay, self._environment.most_sent
        due = time.monotonic() + delay
        while True:
            self._due.wait(max(due - time.monotonic(), 0.0))
            self._due.clear()
            is_due = time.monotonic() >= due
            # Before they are due, send only full messages, because a message costs as much as 50 spans.
            while (is_due or self._ending.is_set() or len(self.buffer) >= most) and (spans := self.buffer.take(most)):
                self._send(sdk, spans)
                if self._ending.is_set() and time.monotonic() >= self._until:
                    return
                is_due = is_due and len(spans) == most
            if self._ending.is_set():
                return
            if time.monotonic() >= due:
                due = time.monotonic() + delay

    def _send(self, sdk: export.SpanExporter, spans: Sequence[Span]) -> None:
        """Send one message. The SDK retries within the message's timeout."""
        readable = ReadableSpans(spans, self._resource, self._environment.most_links, self._ending.is_set)
        messages = self._complaints.said
        messages.clear()
        self._sending = len(spans)
        try:
            sent = sdk.export(readable) is export.SpanExportResult.SUCCESS
        except Exception as exc:
            sent = False
            messages.append(f"{type(exc).__name__}: {exc}")
        shown = self._environment.collector.shown
        if sent:
            messages.clear()
            if self._away:
                log.info("the trace collector accepts spans again", collector=shown)
        else:
            self._dropped["export"] += self._sending  # 0 if `close` has counted them already.
            if not self._away:
                hint = "requests are served without traces; headway_trace_spans_dropped_total counts the dropped spans"
                error = " ".join(dict.fromkeys((*messages[:1], *messages[-1:])))[:500]
                log.warning("the trace collector accepts no spans", collector=shown, error=error, hint=hint)
        self._away, self._sending = not sent, 0


def resource_of(attributes: Mapping[str, str | int]) -> Resource:
    """Return the description of the process. OTEL_… environment variables override `attributes`."""
    return Resource(attributes).merge(OTELResourceDetector().detect())


def exporter_for(collector: Collector) -> Callable[[], export.SpanExporter]:
    """Return a function that creates the SDK's exporter for a collector. It may fail, for example because of a certificate."""
    url = collector.url
    if collector.protocol != GRPC:
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        compression = Compression.Gzip if collector.gzip else Compression.NoCompression
        return functools.partial(OTLPSpanExporter, endpoint=url, timeout=collector.timeout, compression=compression)
    import_grpc_quietly()
    import grpc
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter

    parts = urlsplit(url)
    return functools.partial(
        GrpcSpanExporter,
        endpoint=f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}",
        insecure=parts.scheme == "http",
        timeout=collector.timeout,
        compression=grpc.Compression.Gzip if collector.gzip else grpc.Compression.NoCompression,
    )


class ReadableSpans(Sequence[ReadableSpan]):
    """Sequence of spans in the SDK's format, with at most `most_links` links each. A span is converted when the SDK reads
    it. Iterating pauses after every few spans, unless `hurried` returns True. If the SDK encoded a whole message without a
    pause, the event loop would have to wait for the interpreter's lock."""

    def __init__(
        self, spans: Sequence[Span], resource: Resource, most_links: int, hurried: Callable[[], bool] = lambda: True
    ) -> None:
        self._spans, self._resource, self._most_links, self._hurried = spans, resource, most_links, hurried

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: Any) -> Any:
        return self._readable(self._spans[index])  # The SDK uses no slices.

    def __iter__(self) -> Iterator[ReadableSpan]:
        for number, span in enumerate(self._spans, 1):
            yield self._readable(span)
            if not number % AT_ONCE and not self._hurried():
                time.sleep(PAUSE)

    def _readable(self, span: Span) -> ReadableSpan:
        form, context, pairs = span.form, span.context, (*span.form.attributes, *span.attributes)
        parent = SpanContext(_id(context.trace_id), _id(span.parent), span.remote) if span.parent else None
        links: Sequence[Link] = [_link(link) for link in span.links]
        if len(links) > self._most_links:
            links = BoundedList.from_seq(self._most_links, links)  # It tells the collector how many links it dropped.
        return ReadableSpan(
            name=_text(form.name),
            context=_context(context, remote=False),
            parent=parent,
            resource=self._resource,
            attributes={name: _text(value) if isinstance(value, str) else value for name, value in pairs},
            links=links,
            kind=_KINDS[form.kind],
            status=_UNSET if span.error is None else Status(StatusCode.ERROR, _text(span.error)),
            start_time=span.begun,
            end_time=span.ended,
            instrumentation_scope=_SCOPE,
        )


def _link(link: SpanLink) -> Link:
    attributes = {"messaging.message.id": _text(link.message)} if link.message else {}
    return Link(_context(link.context, remote=True), attributes)


def _context(context: TraceContext, remote: bool) -> SpanContext:
    trace_state = _state(context.state) if context.state else None
    return SpanContext(_id(context.trace_id), _id(context.span_id), remote, TraceFlags(context.flags), trace_state)


def _state(text: str) -> TraceState:
    members = dict(member.strip().partition("=")[::2] for member in text.split(","))
    return TraceState([*members.items()][:_MOST_STATES])


def _id(content: bytes) -> int:
    return int.from_bytes(content, "big")


def _text(text: str) -> str:
    """Shorten a string, and replace characters that UTF-8 can't encode, which would make the SDK drop the whole message."""
    cut = text[:MOST_TEXT]
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode()


def hide_headers() -> None:
    """Keep the values of OTEL_EXPORTER_OTLP_HEADERS, which may be secret, out of the SDK's log lines."""
    logging.getLogger("opentelemetry.util.re").addFilter(_without_values)


def _without_values(record: logging.LogRecord) -> bool:
    record.args = ("a value that is not shown",)
    return True


class Complaints(logging.Filter):
    """Logging filter that holds back the messages of the SDK's exporters in one thread, because each retry repeats them. `said`
    has these messages, oldest first. After a failure, the first one gives the reason, and the last one says that the SDK gave
    up."""

    _LOGGERS = (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry.exporter.otlp.proto.grpc.exporter",
    )

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self._thread = thread
        self.said: list[str] = []

    def listen(self) -> None:
        """Start collecting messages, including warnings, whatever the log level."""
        for logger in map(logging.getLogger, self._LOGGERS):
            logger.setLevel(logging.WARNING)
            logger.addFilter(self)

    def stop(self) -> None:
        for logger in map(logging.getLogger, self._LOGGERS):
            logger.setLevel(logging.NOTSET)
            logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread.ident:
            return record.levelno >= logging.getLogger().level
        self.said.append(record.getMessage())
        return False
