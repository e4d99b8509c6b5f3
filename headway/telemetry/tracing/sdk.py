"""Bridge to OpenTelemetry's SDK: finished spans as its `ReadableSpan`s, and its OTLP exporters, which encode and send them.

Imported only where traces are recorded, as it needs the packages of the extra `otel`.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from headway.model import TraceContext
from headway.runtime import spans
from headway.runtime.quiet_grpc import import_quietly
from headway.runtime.spans import Attribute, Attributes, Span, SpanLink
from headway.telemetry.tracing.environment import GRPC, Collector
from headway.version import __version__

MOST_TEXT = 2048
"""Most characters of an attribute's value, and of the message of an error; the rest is cut off."""
AT_ONCE = 4
"""Spans that are encoded before other threads get their turn; about 0.3 ms."""
PAUSE = 0.0002
"""Seconds of that turn at least."""

_KINDS = {kind: SpanKind[kind.name] for kind in spans.SpanKind}
_UNSET = Status(StatusCode.UNSET)
_SCOPE = InstrumentationScope("headway", __version__)
_MOST_STATES = 32
"""Most members of a `tracestate`, beyond which the SDK would take none of them, and log that."""


def resource_of(attributes: Mapping[str, str | int]) -> Resource:
    """Make the description of the process. What the variables of the environment say goes before `attributes`."""
    return Resource(attributes).merge(OTELResourceDetector().detect())


def exporter_for(collector: Collector) -> Callable[[], SpanExporter]:
    """Import the SDK's exporter for a collector, and return what makes it: that may fail, as of a bad certificate."""
    url = collector.url
    if collector.protocol != GRPC:
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        how = Compression.Gzip if collector.gzip else Compression.NoCompression
        return functools.partial(OTLPSpanExporter, endpoint=url, timeout=collector.timeout, compression=how)
    import_quietly()
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
    """Spans as the SDK reads them, each made when it is read.

    Reading all of them gives other threads a turn after every few: the SDK encodes a whole message at once, and the event loop
    must not wait for the interpreter's lock until that is done.

    Arguments:
        found: the spans.
        resource: description of the process.
        most_links: most links of a span.
        hurried: tells whether turns are left out, as the process ends.
    """

    def __init__(
        self, found: Sequence[Span], resource: Resource, most_links: int, hurried: Callable[[], bool] = lambda: True
    ) -> None:
        self._spans, self._resource, self._most_links, self._hurried = found, resource, most_links, hurried

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> ReadableSpan: ...
    @overload
    def __getitem__(self, index: slice) -> ReadableSpans: ...
    def __getitem__(self, index: int | slice) -> ReadableSpan | ReadableSpans:
        if isinstance(index, slice):
            return ReadableSpans(self._spans[index], self._resource, self._most_links, self._hurried)
        return self._readable(self._spans[index])

    def __iter__(self) -> Iterator[ReadableSpan]:
        for number, span in enumerate(self._spans, 1):
            yield self._readable(span)
            if not number % AT_ONCE and not self._hurried():
                time.sleep(PAUSE)

    def _readable(self, span: Span) -> ReadableSpan:
        form, context = span.form, span.context
        parent = SpanContext(_id(context.trace_id), _id(span.parent), span.remote) if span.parent else None
        links: Sequence[Link] = [_link(link) for link in span.links]
        if len(links) > self._most_links:
            links = BoundedList.from_seq(self._most_links, links)  # It counts what it drops.
        return ReadableSpan(
            name=_text(form.name),
            context=_context(context, remote=False),
            parent=parent,
            resource=self._resource,
            attributes=_attributes((*form.attributes, *span.attributes)),
            links=links,
            kind=_KINDS[form.kind],
            status=_UNSET if span.error is None else Status(StatusCode.ERROR, _text(span.error)),
            start_time=span.begun,
            end_time=span.ended,
            instrumentation_scope=_SCOPE,
        )


def _link(link: SpanLink) -> Link:
    return Link(
        _context(link.context, remote=True), {"messaging.message.id": _text(link.message)} if link.message else {}
    )


def _context(context: TraceContext, remote: bool) -> SpanContext:
    ids = _id(context.trace_id), _id(context.span_id)
    return SpanContext(*ids, remote, TraceFlags(context.flags), _state(context.state) if context.state else None)


def _state(text: str) -> TraceState:
    members = dict(member.strip().partition("=")[::2] for member in text.split(","))
    return TraceState([*members.items()][:_MOST_STATES])


def _id(content: bytes) -> int:
    return int.from_bytes(content, "big")


def _attributes(pairs: Attributes) -> dict[str, Attribute]:
    return {name: _text(value) if isinstance(value, str) else value for name, value in pairs}


def _text(text: str) -> str:
    """Cut a text, and replace what no UTF-8 can say: one such character would cost the whole message."""
    cut = text[:MOST_TEXT]
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode()


def hide_headers() -> None:
    """Keep values of OTEL_EXPORTER_OTLP_HEADERS, which may be secret, out of what the SDK logs of them."""
    logging.getLogger("opentelemetry.util.re").addFilter(_without_values)


def _without_values(record: logging.LogRecord) -> bool:
    record.args = ("a value that is not shown",)
    return True


class Complaints(logging.Filter):
    """Filter that keeps what the SDK's exporters log in a thread; they would log it anew for each try of each message.

    Arguments:
        thread: the thread.

    Attributes:
        said: what was said, oldest first. Of a message that fails the first tells why, the last that no more tries follow.
    """

    _LOGGERS = (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry.exporter.otlp.proto.grpc.exporter",
    )

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self._thread = thread
        self.said: list[str] = []

    def listen(self) -> None:
        """Begin to listen, to warnings also where the log is without them."""
        for logger in map(logging.getLogger, self._LOGGERS):
            logger.setLevel(logging.WARNING)
            logger.addFilter(self)

    def stop(self) -> None:
        """Listen no more."""
        for logger in map(logging.getLogger, self._LOGGERS):
            logger.setLevel(logging.NOTSET)
            logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep what was said in the thread, and let others' lines pass."""
        if record.thread != self._thread.ident:
            return record.levelno >= logging.getLogger().level
        self.said.append(record.getMessage())
        return False
