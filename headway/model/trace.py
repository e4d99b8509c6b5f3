"""Traces: the place of a request in the trace that it belongs to."""

from __future__ import annotations

import msgspec

SAMPLED = 1
"""Flag of a trace whose spans are recorded."""
RANDOM = 2
"""Flag of a trace whose id is random in its last 7 bytes, so that samplers may go by it."""


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """Place in a trace: a span, by which those below it name their parent.

    Attributes:
        trace_id: id of the trace, 16 bytes.
        span_id: id of the span, 8 bytes.
        flags: sum of SAMPLED and RANDOM.
        state: what other systems have added to the trace, as in the header field `tracestate`; empty for nothing.
    """

    trace_id: bytes
    span_id: bytes
    flags: int = SAMPLED
    state: str = ""

    @property
    def sampled(self) -> bool:
        """Whether its spans are recorded."""
        return bool(self.flags & SAMPLED)


class CarriedTrace(msgspec.Struct, frozen=True, gc=False):
    """Part of a sampled request's trace that its entry carries.

    Attributes:
        context: span under which the entry was sent.
        sent_at: Unix time in nanoseconds at which it was sent.
    """

    context: TraceContext
    sent_at: int
