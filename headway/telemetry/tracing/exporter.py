"""Exporter of spans: a thread that encodes what the buffer holds, and sends it to the collector.

    services ──▶ SpanBuffer ──▶ this thread ──encode──send──▶ collector
                    │ full          │ no answer, after its tries
                    ▼               ▼
                 dropped         dropped

No request waits for any of it. The thread encodes a few spans at a time and sleeps between, since the interpreter runs one thread
at a time and the event loop must not wait for a whole message. What cannot be sent in time is dropped and counted. When the
process ends, the last spans have CLOSE_WITHIN seconds.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence

from headway.runtime.counters import Counters
from headway.runtime.logger import get_logger
from headway.runtime.spans import Span, SpanBuffer
from headway.runtime.supervisor import Supervisor
from headway.telemetry.tracing.environment import TraceEnvironment
from headway.telemetry.tracing.otlp import Origin, encode_span, export_request, read_partial_success
from headway.telemetry.tracing.sender import NotSent, SpanSender

log = get_logger(__name__)

CLOSE_WITHIN = 1.5
"""Most seconds for which a process that ends waits for its last spans to be sent."""
AT_ONCE = 64
"""Spans that are encoded before other threads get their turn; about 0.2 ms."""
PAUSE = 0.0002
"""Seconds of that turn at least."""
FIRST_PAUSE, MOST_PAUSE = 0.5, 5.0
"""Least and most seconds between two tries of one message, before jitter."""


class SpanExporter:
    """Exporter of the spans of a process, as one of its resources; see `headway.app.lifecycle.Resource`.

    Arguments:
        environment: what the variables OTEL_… say.
        origin: what all messages say of the process.
        make_sender: opens the way to the collector.
        counters: counters of the process.

    Attributes:
        buffer: takes the spans.
    """

    def __init__(
        self,
        environment: TraceEnvironment,
        origin: Origin,
        make_sender: Callable[[], SpanSender],
        counters: Counters,
    ) -> None:
        self._environment, self._origin, self._make_sender = environment, origin, make_sender
        self._dropped = counters.spans_dropped
        self._due = threading.Event()
        self._ending = threading.Event()
        self._until = 0.0
        enough = min(environment.most_sent, environment.most_waiting)
        self.buffer = SpanBuffer(environment.most_waiting, enough, counters, self._due.set)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._sender: SpanSender | None = None
        self._away = self._complained = False

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
        await asyncio.to_thread(self._thread.join, CLOSE_WITHIN)
        if self._sender is not None:
            self._sender.close()
        if left := len(self.buffer):
            self._dropped["export"] += left
            log.warning("spans were not sent in time, as the process ends", spans=left)

    def _run(self) -> None:
        """Send until the process ends."""
        try:
            self._sender = sender = self._make_sender()
        except (
            Exception
        ) as exc:  # As of a certificate that is none; spans are dropped and counted as soon as too many wait.
            log.error("no traces are sent", collector=self._environment.collector.shown, error=str(exc))
            return
        delay, most = self._environment.delay, self._environment.most_sent
        due = time.monotonic() + delay
        while True:
            self._due.wait(max(due - time.monotonic(), 0.0))
            self._due.clear()
            late = time.monotonic() >= due
            # Between two instants at which all of them are due only whole messages are sent: one costs as much as 50 spans.
            while (late or self._ending.is_set() or len(self.buffer) >= most) and (spans := self.buffer.take(most)):
                try:
                    self._send(sender, spans)
                except Exception as exc:
                    self._dropped["export"] += len(spans)
                    log.error("spans could not be sent", exc_info=exc)
                if self._ending.is_set() and time.monotonic() >= self._until:
                    return
                late = late and len(spans) == most
            if self._ending.is_set():
                return
            if time.monotonic() >= due:
                due = time.monotonic() + delay

    def _encoded(self, spans: Sequence[Span]) -> bytes:
        most, found = self._environment.most_links, []
        for at in range(0, len(spans), AT_ONCE):
            found += [encode_span(span, most) for span in spans[at : at + AT_ONCE]]
            if not self._ending.is_set():
                time.sleep(PAUSE)
        return export_request(self._origin, found)

    def _send(self, sender: SpanSender, spans: Sequence[Span]) -> None:
        """Send one message, with as many tries as its time allows."""
        body = self._encoded(spans)
        collector = self._environment.collector
        until, pause = time.monotonic() + collector.timeout, FIRST_PAUSE
        while True:
            if self._ending.is_set():
                until = min(until, self._until)
            try:
                answer = sender.send(body, max(until - time.monotonic(), 0.01))
                break
            except NotSent as exc:
                wait = exc.rest if exc.rest is not None else pause * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
                pause = min(2 * pause, MOST_PAUSE)
                if not exc.again or time.monotonic() + wait >= until or self._ending.wait(wait):
                    self._give_up(len(spans), exc)
                    return
        if self._away:
            self._away = False
            log.info("the trace collector takes spans again", collector=collector.shown)
        self._note(answer)

    def _give_up(self, count: int, error: NotSent) -> None:
        self._dropped["export"] += count
        if not self._away:
            self._away = True
            hint = "requests go on without their traces; dropped spans are counted in headway_trace_spans_dropped_total"
            shown = self._environment.collector.shown
            log.warning("the trace collector takes no spans", collector=shown, error=str(error)[:500], hint=hint)

    def _note(self, answer: bytes) -> None:
        """Note what the collector says of a message that it took."""
        try:
            rejected, message = read_partial_success(answer)
        except ValueError as exc:
            rejected, message = 0, f"an answer that cannot be read: {exc}"
        self._dropped["rejected"] += min(rejected, 1 << 20)
        if (rejected or message) and not self._complained:
            self._complained = True
            log.warning("the trace collector complains", rejected=rejected, message=message[:500])
