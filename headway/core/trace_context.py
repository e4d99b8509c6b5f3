"""Traces: the W3C header fields `traceparent` and `tracestate`, the traces that entries carry, and the sampling of requests.

A malformed `traceparent` is ignored, and the request begins a new trace. A `tracestate` counts only with a valid `traceparent`.

Sampling by a ratio uses the last 8 bytes of the trace id, as OpenTelemetry's samplers do, so that systems with the same ratio make
the same decision about a trace. For requests that begin a trace, the sampler draws how many to skip before the next sample (a
geometric distribution, so that all have the same chance). Requests are numbered, so skipping one costs only a comparison. A
sampled request gets a trace id that this ratio samples."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from headway.model import CarriedTrace, TraceContext
from headway.model.request import RANDOM, SAMPLED

MOST_MEMBERS = 32  # Limit on the members of a `tracestate`. One with more is dropped.
MOST_STATE = 512  # Limit on the characters of a `tracestate` that are passed on. Members are never cut, only left out.
LONG_MEMBER = 128  # Members with at least this many characters are left out first.

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]*)?")
_MEMBER = re.compile(rb"[a-z0-9][a-z0-9_*/@-]{0,255}=(?:[ -+\--<>-~]{0,255}[!-+\--<>-~])")
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)
_HEAD = 16 + 8 + 1 + 8


def read_trace_context(parent: bytes, state: bytes = b"") -> TraceContext | None:
    """Return the position in a trace that a request's `traceparent` gives, or None if the field is empty or malformed.
    `state` consists of the values of all `tracestate` fields, joined by commas."""
    match = _PARENT.fullmatch(parent)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    trace, span = bytes.fromhex(trace_id.decode()), bytes.fromhex(span_id.decode())
    if trace == _NO_TRACE or span == _NO_SPAN:
        return None
    return TraceContext(trace, span, int(flags, 16) & (SAMPLED | RANDOM), read_trace_state(state) if state else "")


def read_trace_state(value: bytes) -> str:
    """Return a `tracestate` in the form to pass on. Empty if it is malformed or has too many members."""
    members = [part for part in (part.strip(b" \t") for part in value.split(b",")) if part]
    if len(members) > MOST_MEMBERS or not all(map(_MEMBER.fullmatch, members)):
        return ""
    keys = {member.partition(b"=")[0] for member in members}
    if len(keys) < len(members):
        return ""
    return ",".join(member.decode("ascii") for member in _within(members, MOST_STATE))


def _within(members: list[bytes], most: int) -> list[bytes]:
    """Drop members until the rest fit into `most` characters in total. Long ones are dropped first, then the last (oldest)."""
    for least in (LONG_MEMBER, 0):
        for at in range(len(members) - 1, -1, -1):
            if sum(map(len, members)) + len(members) - 1 <= most:
                return members
            if len(members[at]) > least:
                members = members[:at] + members[at + 1 :]
    return members


def traceparent(context: TraceContext) -> str:
    """Return the value of the header field `traceparent` for a context."""
    return f"00-{context.trace_id.hex()}-{context.span_id.hex()}-{context.flags:02x}"


def trace_fields(context: TraceContext | None) -> dict[str, str]:
    """Return the header fields that pass a context on; none if the context is None."""
    if context is None:
        return {}
    state = {"tracestate": context.state} if context.state else {}
    return {"traceparent": traceparent(context), **state}


def pack_carried(carried: CarriedTrace) -> bytes:
    """Pack the trace that an entry carries. The broker stores the bytes without reading them."""
    context = carried.context
    sent_at = carried.sent_at.to_bytes(8, "big")
    return b"".join((context.trace_id, context.span_id, bytes((context.flags,)), sent_at, context.state.encode()))


def read_carried(packed: bytes) -> CarriedTrace | None:
    """Unpack the trace that an entry carries. Returns None if it carries none that this release can read."""
    if len(packed) < _HEAD:
        return None
    context = TraceContext(packed[:16], packed[16:24], packed[24], packed[_HEAD:].decode("ascii", "replace"))
    return CarriedTrace(context, int.from_bytes(packed[25:_HEAD], "big"))


def trace_field(packed: bytes) -> dict[str, str]:
    """Return the log field with an entry's trace id, or no field if the entry carries no trace."""
    return {"trace_id": trace_id_of(packed)} if packed else {}


def trace_id_of(packed: bytes) -> str:
    """Return the id of a carried trace in hexadecimal, as in the log and metrics."""
    return packed[:16].hex()


_ALL = 1 << 64
_MOST_LEFT_OUT = 1 << 62  # Limit on the requests that one draw skips.


class Sampler:
    """Samples a share (0 to 1) of the traces for which the decision is made here. If `follows`, a request that names a parent
    span gets the decision made for that span. `bits(n)` returns n random bits."""

    __slots__ = ("_bits", "_bound", "_follows", "_left_out", "_ratio", "due")

    def __init__(self, ratio: float, follows: bool, bits: Callable[[int], int]) -> None:
        self._ratio, self._follows, self._bits = ratio, follows, bits
        self._bound = round(ratio * _ALL)
        # `due` is the number of the next sampled request that names no parent. `draws` need not be called before.
        self._left_out, self.due = self._draw(), 1 + self._draw()

    def draws(self, number: int) -> bool:
        """Return True if the request with this new number is sampled, provided that it names no parent. Numbers increase from 1.
        Skipped numbers count as requests, so that each request has the same chance."""
        while self.due < number:
            self.due += 1 + self._draw()
        if self.due > number:
            return False
        self.due += 1 + self._draw()
        return True

    def begin(self, parent: TraceContext | None) -> TraceContext | None:
        """Return the context of the first span of a request that has no number, or None if the request isn't sampled. `parent` is
        the context that the client sent, if any."""
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
        if not self._bound:
            return _MOST_LEFT_OUT
        if self._ratio >= 1:
            return 0
        share = (self._bits(53) + 1) / (1 << 53)  # Above 0, at most 1.
        return min(int(math.log(share) / math.log1p(-self._ratio)), _MOST_LEFT_OUT)

    def first(self) -> TraceContext:
        """Return the context of the first span of a new trace, with a trace id that the ratio samples."""
        low = self._bits(64) * self._bound >> 64
        return TraceContext((self._bits(64) << 64 | low or 1).to_bytes(16, "big"), self.span_id(), SAMPLED | RANDOM)

    def apart(self) -> TraceContext:
        """Return the context of the first span of a new trace that is always sampled."""
        trace_id = (self._bits(128) or 1).to_bytes(16, "big")
        return TraceContext(trace_id, self.span_id(), SAMPLED | RANDOM)

    def below(self, context: TraceContext) -> TraceContext:
        span_id = (self._bits(64) or 1).to_bytes(8, "big")
        return TraceContext(context.trace_id, span_id, context.flags, context.state)

    def span_id(self) -> bytes:
        return (self._bits(64) or 1).to_bytes(8, "big")
