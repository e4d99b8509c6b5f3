"""Sampling of traces: which requests have their spans recorded.

The decision by a ratio goes by the last 8 bytes of the trace id, as in OpenTelemetry's samplers, so that systems with the same
ratio decide alike about one trace. For requests that begin a trace the sampler draws how many are left out before the next one
that is sampled (a geometric distribution: each request has the same chance, whatever became of those before it). Requests are
numbered, so to be left out costs a comparison. A request that is sampled gets an id that ends below the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from headway.model import TraceContext
from headway.model.trace import RANDOM, SAMPLED

_ALL = 1 << 64
_MOST_LEFT_OUT = 1 << 62
"""Most requests that are left out before the sampler draws anew."""


class Sampler:
    """Sampler of traces.

    Arguments:
        ratio: share of the traces that are sampled, 0 to 1, where that is decided here.
        follows: whether the decision is taken over from the span that a request names as its parent.
        bits: returns so many random bits.

    Attributes:
        due: number of the next request that is sampled if it names no parent. `draws` need not be asked about earlier ones.
    """

    __slots__ = ("_bits", "_bound", "_follows", "_left_out", "_ratio", "due")

    def __init__(self, ratio: float, follows: bool, bits: Callable[[int], int]) -> None:
        self._ratio, self._follows, self._bits = ratio, follows, bits
        self._bound = round(ratio * _ALL)
        self._left_out, self.due = self._draw(), 1 + self._draw()

    def draws(self, number: int) -> bool:
        """Whether the request with this number, which no earlier one had, is sampled if it names no parent.

        Numbers grow from 1. Those that were passed over count as requests, so that the chance of each stays the same.
        """
        while self.due < number:
            self.due += 1 + self._draw()
        if self.due > number:
            return False
        self.due += 1 + self._draw()
        return True

    def begin(self, parent: TraceContext | None) -> TraceContext | None:
        """Context of the first span of a request that has no number; None when it is not sampled.

        Arguments:
            parent: span of the client's, if the request names one.
        """
        if parent is None:
            if self._left_out:
                self._left_out -= 1
                return None
            self._left_out = self._draw()
            return self.first()
        if not (parent.sampled if self._follows else int.from_bytes(parent.trace_id[8:], "big") < self._bound):
            return None
        return TraceContext(parent.trace_id, self.span_id(), parent.flags | SAMPLED, parent.state)

    def _draw(self) -> int:
        """Number of requests that are left out before the next one that is sampled."""
        if not self._bound:
            return _MOST_LEFT_OUT
        if self._ratio >= 1:
            return 0
        share = (self._bits(53) + 1) / (1 << 53)  # Above 0, at most 1.
        return min(int(math.log(share) / math.log1p(-self._ratio)), _MOST_LEFT_OUT)

    def first(self) -> TraceContext:
        """Context of the first span of a trace whose id ends below the bound."""
        low = self._bits(64) * self._bound >> 64
        return TraceContext((self._bits(64) << 64 | low or 1).to_bytes(16, "big"), self.span_id(), SAMPLED | RANDOM)

    def apart(self) -> TraceContext:
        """Context of the first span of a trace that is sampled in any case."""
        trace_id = (self._bits(128) or 1).to_bytes(16, "big")
        return TraceContext(trace_id, self.span_id(), SAMPLED | RANDOM)

    def below(self, context: TraceContext) -> TraceContext:
        """Context of a further span in the same trace."""
        span_id = (self._bits(64) or 1).to_bytes(8, "big")
        return TraceContext(context.trace_id, span_id, context.flags, context.state)

    def span_id(self) -> bytes:
        """Id of a new span."""
        return (self._bits(64) or 1).to_bytes(8, "big")
