"""Spans of sampled requests and batches, and the buffer in which they wait to be sent.

Nothing here knows how spans are sent: they are plain data, which another thread encodes.
Only what is sampled ever becomes a Span.
"""

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
    """Kinds of spans, with their numbers in OpenTelemetry's protocol."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3
    PRODUCER = 4
    CONSUMER = 5


FORMS = 1024
"""Limit on the forms of spans that a recorder remembers."""
ZERO_LASTS = 1.0
"""Seconds for which the difference between the clock and Unix time counts as constant, so that spans keep their order."""


class SpanForm(msgspec.Struct, eq=False):
    """Part that many spans share, made once.

    Attributes:
        name: name of the spans, of which there are few.
        kind: see SpanKind.
        attributes: names and values that all of the spans have.
    """

    name: str
    kind: SpanKind
    attributes: Attributes = ()


class SpanLink(msgspec.Struct, frozen=True, gc=False):
    """Link of a span to another, mostly in another trace.

    Attributes:
        context: the other span.
        message: id of the request that it belongs to; empty where that is not said.
    """

    context: TraceContext
    message: str = ""


class Span(msgspec.Struct, frozen=True, gc=False):
    """One span, ended.

    Attributes:
        form: part that it shares with others.
        context: its own place in the trace.
        parent: id of the span above it; empty for the first of a trace.
        remote: whether that span is another process's.
        begun, ended: Unix times in nanoseconds.
        attributes: names and values of its own.
        links: links to other spans.
        error: what went wrong; None when nothing did.
    """

    form: SpanForm
    context: TraceContext
    parent: bytes
    begun: int
    ended: int
    attributes: Attributes = ()
    links: Sequence[SpanLink] = ()
    error: str | None = None
    remote: bool = False


class SpanBuffer:
    """Spans that wait to be sent. One thread adds, another takes.

    Arguments:
        most: limit on waiting spans; further ones are dropped and counted.
        enough: number of spans at which `wake` is called.
        dropped: counts of dropped spans by reason.
        wake: called when there is enough to send.
    """

    def __init__(self, most: int, enough: int, dropped: dict[str, int], wake: Callable[[], None]) -> None:
        self._most, self._enough, self._wake = most, enough, wake
        self._dropped = dropped
        self._waiting: deque[Span] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, span: Span) -> None:
        """Add a span, unless too many wait."""
        waiting = len(self._waiting)
        if waiting >= self._most:
            self._dropped["queue"] += 1
            return
        self._waiting.append(span)
        if waiting + 1 == self._enough:
            self._wake()

    def take(self, most: int) -> list[Span]:
        """Take the oldest spans, at most so many."""
        count = min(most, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]


class SpanRecorder:
    """Recorder of spans for the services of a process.

    Arguments:
        sampler: decides which requests are sampled, and makes ids.
        buffer: takes the spans.
        clock: monotonic seconds, on which the services' instants are.
        wall: Unix time in nanoseconds.
    """

    def __init__(
        self,
        sampler: Sampler,
        buffer: SpanBuffer,
        clock: Callable[[], float],
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self.sampler = sampler
        self.clock, self._wall = clock, wall
        self._zero, self._known_until = 0, -math.inf
        self.add = buffer.add

    def unix_zero(self, now: float) -> int:
        """Return the Unix time in nanoseconds of the clock's 0, at most a second old. `now`: instant of the clock."""
        if now >= self._known_until:
            self._zero, self._known_until = self._wall() - int(self.clock() * 1e9), now + ZERO_LASTS
        return self._zero


class RunTrace:
    """Trace of a running batch, to which its backend may add.

    Arguments:
        recorder: recorder of its spans.
        context: span of the run.
        model: name of the model.
        begun: instant at which the run began.

    Attributes:
        clock: monotonic seconds.
    """

    def __init__(self, recorder: SpanRecorder, context: TraceContext, model: str, begun: float) -> None:
        self._recorder, self._model, self._zero = recorder, model, recorder.unix_zero(begun)
        self.context, self.begun, self.clock = context, begun, recorder.clock

    def unix(self, instant: float) -> int:
        """Return the Unix time in nanoseconds of an instant of the clock."""
        return self._zero + int(instant * 1e9)

    def ran(self, begun: float, ended: float) -> None:
        """Record the run of user code by the instants that its process reports, if they make sense."""
        if self.begun <= begun <= ended <= self._recorder.clock():
            self._add(f"run {self._model}", SpanKind.INTERNAL, self._recorder.sampler.below(self.context), begun, ended)

    def begin_try(self) -> TraceContext:
        """Return the context of a try at a remote API, which is sent with it."""
        return self._recorder.sampler.below(self.context)

    def end_try(self, context: TraceContext, begun: float, number: int, problem: str, attributes: Attributes) -> None:
        """Record a try at a remote API. `problem`: what went wrong with it; empty when nothing did."""
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


RUN: ContextVar[RunTrace | None] = ContextVar("run", default=None)
"""Trace of the batch that the current task runs; None unless it is sampled."""
OUTGOING: ContextVar[TraceContext | None] = ContextVar("outgoing", default=None)
"""Span under which the current task asks a remote API; None unless it is sampled."""
