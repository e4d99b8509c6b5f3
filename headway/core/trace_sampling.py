"""Sampling of traces: which requests have their spans recorded.

The decision by a ratio goes by the last 8 bytes of the trace id, as in OpenTelemetry's samplers, so that systems with the same
ratio decide alike about one trace. A request that begins a trace draws these bytes first, and is given the rest only if it is
sampled: to be left out costs one random number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headway.model import TraceContext
from headway.model.trace import RANDOM, SAMPLED

_ALL = 1 << 64


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sampler of traces.

    Arguments:
        ratio: share of the traces that are sampled, 0 to 1, where that is decided here.
        follows: whether the decision is taken over from the span that a request names as its parent.
        bits: returns so many random bits.
    """

    ratio: float
    follows: bool
    bits: Callable[[int], int]
    _bound: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bound", round(self.ratio * _ALL))

    def begin(self, parent: TraceContext | None) -> TraceContext | None:
        """Context of the first span of a request; None when it is not sampled.

        Arguments:
            parent: span of the client's, if the request names one.
        """
        if parent is None:
            low = self.bits(64)
            if low >= self._bound:
                return None
            trace_id = (self.bits(64) << 64 | low or 1).to_bytes(16, "big")
            return TraceContext(trace_id, self.span_id(), SAMPLED | RANDOM)
        if not (parent.sampled if self.follows else int.from_bytes(parent.trace_id[8:], "big") < self._bound):
            return None
        return TraceContext(parent.trace_id, self.span_id(), parent.flags | SAMPLED, parent.state)

    def apart(self) -> TraceContext:
        """Context of the first span of a trace that is sampled in any case."""
        trace_id = (self.bits(128) or 1).to_bytes(16, "big")
        return TraceContext(trace_id, self.span_id(), SAMPLED | RANDOM)

    def below(self, context: TraceContext) -> TraceContext:
        """Context of a further span in the same trace."""
        return TraceContext(context.trace_id, self.span_id(), context.flags, context.state)

    def span_id(self) -> bytes:
        """Id of a new span."""
        return (self.bits(64) or 1).to_bytes(8, "big")
