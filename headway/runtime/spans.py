"""Spans of sampled requests and batches, and the buffer in which they wait for another thread to export them."""

from __future__ import annotations

import enum
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import msgspec

from headway.core.trace_context import Sampler
from headway.model import TraceContext

Attribute = str | int | float
Attributes = tuple[tuple[str, Attribute], ...]


class SpanKind(enum.IntEnum):
    """Kinds of spans, with their numbers in OTLP."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3
    PRODUCER = 4
    CONSUMER = 5


FORMS = 1024  # Maximum number of span forms that a recorder caches.
ZERO_LASTS = 1.0  # Seconds to keep the offset between clock and Unix time, so that spans stay in order.


class SpanForm(msgspec.Struct, eq=False):
    """Name, kind and attributes that many spans share."""

    name: str
    kind: SpanKind
    attributes: Attributes = ()


class SpanLink(msgspec.Struct, frozen=True, gc=False):
    """A link from one span to another, usually in another trace."""

    context: TraceContext
    message: str = ""  # Id of the other span's request, or empty.


class Span(msgspec.Struct, frozen=True, gc=False):
    """A span that has ended."""

    form: SpanForm
    context: TraceContext
    parent: bytes  # Id of the parent; empty for the first span of a trace.
    begun: int
    ended: int  # Unix time in nanoseconds, like `begun`.
    attributes: Attributes = ()  # Attributes beyond those of the form.
    links: Sequence[SpanLink] = ()
    error: str | None = None  # Error message; None if there was no error.
    remote: bool = False  # True if another process recorded the parent.


class SpanBuffer:
    """Up to `most` spans that wait to be exported, added by one thread and taken by another. `dropped` counts dropped spans
    by reason. `wake` is called to start an export once `enough` spans wait."""

    def __init__(self, most: int, enough: int, dropped: dict[str, int], wake: Callable[[], None]) -> None:
        self._most, self._enough, self._wake = most, enough, wake
        self._dropped = dropped
        self._waiting: deque[Span] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, span: Span) -> None:
        waiting = len(self._waiting)
        if waiting >= self._most:
            self._dropped["queue"] += 1
            return
        self._waiting.append(span)
        if waiting + 1 == self._enough:
            self._wake()

    def take(self, most: int) -> list[Span]:
        count = min(most, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]


class SpanRecorder:
    """Records spans. `sampler` chooses the requests to record, and generates ids. `wall` returns Unix time in nanoseconds."""

    def __init__(
        self, sampler: Sampler, buffer: SpanBuffer, clock: Callable[[], float], wall: Callable[[], int] = time.time_ns
    ) -> None:
        self.sampler = sampler
        self.clock, self._wall = clock, wall
        self._zero, self._known_until = 0, -math.inf
        self.add = buffer.add

    def unix_zero(self, now: float) -> int:
        """Return the Unix time in nanoseconds at which the clock was 0, as measured within the last second."""
        if now >= self._known_until:
            self._zero, self._known_until = self._wall() - int(self.clock() * 1e9), now + ZERO_LASTS
        return self._zero


class RunTrace:
    """Trace of a running batch, to which the backend adds spans. `context` identifies the span of the run."""

    def __init__(self, recorder: SpanRecorder, context: TraceContext, model: str, begun: float) -> None:
        self._recorder, self._model, self._zero = recorder, model, recorder.unix_zero(begun)
        self.context, self.begun, self.clock = context, begun, recorder.clock

    def unix(self, at: float) -> int:
        return self._zero + int(at * 1e9)

    def ran(self, begun: float, ended: float) -> None:
        """Record the run of user code, if the times that its process reports are plausible."""
        if self.begun <= begun <= ended <= self._recorder.clock():
            self._add(f"run {self._model}", SpanKind.INTERNAL, self._recorder.sampler.below(self.context), begun, ended)

    def begin_try(self) -> TraceContext:
        """Begin a span for one attempt, and return the trace context to send with the remote call."""
        return self._recorder.sampler.below(self.context)

    def end_try(self, context: TraceContext, begun: float, number: int, problem: str, attributes: Attributes) -> None:
        """Record a call to a remote API. `number` is the number of the attempt, from 1. `problem` is the error, or empty."""
        more = (("http.request.resend_count", number - 1),) if number > 1 else ()
        ended = self._recorder.clock()
        self._add(f"call {self._model}", SpanKind.CLIENT, context, begun, ended, (*attributes, *more), problem or None)

    def _add(
        self,
        name: str,
        kind: SpanKind,
        context: TraceContext,
        begun: float,
        ended: float,
        attributes: Attributes = (),
        error: str | None = None,
    ) -> None:
        form = SpanForm(name, kind, attributes)
        self._recorder.add(Span(form, context, self.context.span_id, self.unix(begun), self.unix(ended), error=error))


RUN: ContextVar[RunTrace | None] = ContextVar("run", default=None)  # Trace of the current batch, if sampled.
OUTGOING: ContextVar[TraceContext | None] = ContextVar("outgoing", default=None)  # Span of the task's remote call.
