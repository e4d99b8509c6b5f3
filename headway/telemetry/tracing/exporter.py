"""Exporter of spans: a thread that hands what the buffer holds to an exporter of OpenTelemetry's SDK.

    services ──▶ SpanBuffer ──▶ this thread ──SDK: encode, send, try again──▶ collector
                    │ full          │ no answer, after its tries
                    ▼               ▼
                 dropped         dropped

No request waits for any of it. What cannot be sent in time is dropped and counted. When the process ends, the last spans have
CLOSE_WITHIN seconds.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import export

from headway.runtime.logger import get_logger
from headway.runtime.spans import Span, SpanBuffer
from headway.runtime.supervisor import Supervisor
from headway.telemetry.tracing.environment import TraceEnvironment
from headway.telemetry.tracing.sdk import Complaints, ReadableSpans, hide_headers

log = get_logger(__name__)

CLOSE_WITHIN = 1.5
"""Most seconds for which a process that ends waits for its last spans to be sent."""


class SpanExporter:
    """Exporter of the spans of a process, as one of its resources; see `headway.app.lifecycle.Resource`.

    Arguments:
        environment: what the variables OTEL_… say.
        resource: what all messages say of the process.
        make: makes the SDK's exporter.
        dropped: counts of dropped spans by reason.

    Attributes:
        buffer: takes the spans.
    """

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
        self._sending = 0
        """Spans of the message that is being sent."""

    async def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def start(self, supervisor: Supervisor) -> None:
        """Do nothing: no loop is needed."""

    async def close(self) -> None:
        """Send what is left, in bounded time, and end the thread."""
        if self._thread.ident is None:
            return
        self._until = time.monotonic() + CLOSE_WITHIN
        self._ending.set()
        self._due.set()
        trouble = self._away or self._complaints.said
        if self._sdk is not None and trouble:  # It waits before it tries again.
            self._sdk.shutdown()
        await asyncio.to_thread(self._thread.join, CLOSE_WITHIN)
        if self._sdk is not None and not trouble:
            self._sdk.shutdown()
        sending, self._sending = self._sending, 0
        if left := len(self.buffer) + sending:
            self._dropped["export"] += left
            log.warning("spans were not sent in time, as the process ends", spans=left)

    def _run(self) -> None:
        """Send until the process ends."""
        hide_headers()
        try:
            self._sdk = sdk = self._make()
        except Exception as exc:  # Spans are dropped and counted as soon as too many wait.
            log.error("no traces are sent", collector=self._environment.collector.shown, error=str(exc))
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
            late = time.monotonic() >= due
            # Between two instants at which all of them are due only whole messages are sent: one costs as much as 50 spans.
            while (late or self._ending.is_set() or len(self.buffer) >= most) and (spans := self.buffer.take(most)):
                self._send(sdk, spans)
                if self._ending.is_set() and time.monotonic() >= self._until:
                    return
                late = late and len(spans) == most
            if self._ending.is_set():
                return
            if time.monotonic() >= due:
                due = time.monotonic() + delay

    def _send(self, sdk: export.SpanExporter, spans: Sequence[Span]) -> None:
        """Send one message. The SDK tries it again for as long as its time allows."""
        readable = ReadableSpans(spans, self._resource, self._environment.most_links, self._ending.is_set)
        said = self._complaints.said
        said.clear()
        self._sending = len(spans)
        try:
            sent = sdk.export(readable) is export.SpanExportResult.SUCCESS
        except Exception as exc:
            sent = False
            said.append(f"{type(exc).__name__}: {exc}")
        shown = self._environment.collector.shown
        if sent:
            said.clear()
            if self._away:
                log.info("the trace collector takes spans again", collector=shown)
        else:
            self._dropped["export"] += self._sending  # 0 once `close` has counted them.
            if not self._away:
                hint = "requests go on without their traces; dropped spans are counted in headway_trace_spans_dropped_total"
                error = " ".join(dict.fromkeys((*said[:1], *said[-1:])))[:500]
                log.warning("the trace collector takes no spans", collector=shown, error=error, hint=hint)
        self._away, self._sending = not sent, 0
