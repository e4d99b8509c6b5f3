"""Trace context of the W3C: the header fields `traceparent` and `tracestate`, and what an entry carries of them.

A `traceparent` that is malformed is passed over, as the recommendation has it, and its request begins a trace of its own. It
never makes a request fail. A `tracestate` counts only beside a good `traceparent`.
"""

from __future__ import annotations

import re

from headway.model import CarriedTrace, TraceContext
from headway.model.trace import RANDOM, SAMPLED

MOST_MEMBERS = 32
"""Most members of a `tracestate`; one with more is dropped."""
MOST_STATE = 512
"""Characters of a `tracestate` that are passed on at least. Of a longer one whole members are left out."""
LONG_MEMBER = 128
"""Characters beyond which a member is among the first to be left out."""

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]*)?")
_MEMBER = re.compile(rb"[a-z0-9][a-z0-9_*/@-]{0,255}=(?:[ -+\--<>-~]{0,255}[!-+\--<>-~])")
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)
_HEAD = 16 + 8 + 1 + 8


def read_trace_context(parent: bytes, state: bytes = b"") -> TraceContext | None:
    """Read the place in a trace that a request names; None when it names none that counts.

    Arguments:
        parent: value of `traceparent`.
        state: values of all `tracestate` fields, joined by commas; empty when there is none.
    """
    found = _PARENT.fullmatch(parent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    trace, span = bytes.fromhex(trace_id.decode()), bytes.fromhex(span_id.decode())
    if trace == _NO_TRACE or span == _NO_SPAN:
        return None
    return TraceContext(trace, span, int(flags, 16) & (SAMPLED | RANDOM), read_trace_state(state) if state else "")


def read_trace_state(value: bytes) -> str:
    """Read a `tracestate`. Returns it as it is passed on; empty when it is malformed or has too many members."""
    members = [part for part in (one.strip(b" \t") for one in value.split(b",")) if part]
    if len(members) > MOST_MEMBERS or not all(map(_MEMBER.fullmatch, members)):
        return ""
    keys = {member.partition(b"=")[0] for member in members}
    if len(keys) < len(members):
        return ""
    return ",".join(member.decode("ascii") for member in _within(members, MOST_STATE))


def _within(members: list[bytes], most: int) -> list[bytes]:
    """Members that fit into `most` characters. Long ones are left out first, and then the last, which are the oldest."""
    for least in (LONG_MEMBER, 0):
        for at in range(len(members) - 1, -1, -1):
            if sum(map(len, members)) + len(members) - 1 <= most:
                return members
            if len(members[at]) > least:
                members = members[:at] + members[at + 1 :]
    return members


def traceparent(context: TraceContext) -> str:
    """Value of the header field `traceparent` by which a context is passed on."""
    return f"00-{context.trace_id.hex()}-{context.span_id.hex()}-{context.flags:02x}"


def trace_fields(context: TraceContext | None) -> dict[str, str]:
    """Header fields by which a context is passed on; none where there is none."""
    if context is None:
        return {}
    state = {"tracestate": context.state} if context.state else {}
    return {"traceparent": traceparent(context), **state}


def pack_carried(carried: CarriedTrace) -> bytes:
    """Pack what an entry carries. Whoever stores the entry need not look into it."""
    context = carried.context
    sent_at = carried.sent_at.to_bytes(8, "big")
    return b"".join((context.trace_id, context.span_id, bytes((context.flags,)), sent_at, context.state.encode()))


def read_carried(packed: bytes) -> CarriedTrace | None:
    """Read what an entry carries; None where that is nothing, or nothing that this release can read."""
    if len(packed) < _HEAD:
        return None
    context = TraceContext(packed[:16], packed[16:24], packed[24], packed[_HEAD:].decode("ascii", "replace"))
    return CarriedTrace(context, int.from_bytes(packed[25:_HEAD], "big"))


def trace_field(packed: bytes) -> dict[str, str]:
    """Field of a log line that names the trace which an entry carries; none where it carries none."""
    return {"trace_id": trace_id_of(packed)} if packed else {}


def trace_id_of(packed: bytes) -> str:
    """Trace id in what an entry carries, in hexadecimal, as the log and metrics show it."""
    return packed[:16].hex()
