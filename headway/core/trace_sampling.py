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
    bound: int = field(init=False, default=0)
    """Number below which the last 8 bytes of a sampled trace's id are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", round(self.ratio * _ALL))

    def begin(self, parent: TraceContext | None) -> TraceContext | None:
        """Context of the first span of a request; None when it is not sampled.

        Arguments:
            parent: span of the client's, if the request names one.
        """
        if parent is None:
            low = self.bits(64)
            return None if low >= self.bound else self.with_low(low)
        if not (parent.sampled if self.follows else int.from_bytes(parent.trace_id[8:], "big") < self.bound):
            return None
        return TraceContext(parent.trace_id, self.span_id(), parent.flags | SAMPLED, parent.state)

    def with_low(self, low: int) -> TraceContext:
        """Context of the first span of a trace whose id ends in these 8 bytes, which are below the bound."""
        return TraceContext((self.bits(64) << 64 | low or 1).to_bytes(16, "big"), self.span_id(), SAMPLED | RANDOM)

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
