"""Request options from HTTP header fields, or from gRPC metadata of the same names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from headway.config import Settings
from headway.core.trace_context import read_trace_context
from headway.errors import BadRequest
from headway.gateway.deadlines import DEADLINE_GRAIN
from headway.model import RequestOptions

ID_PREFIX = "req_"

TRACE_FIELDS = frozenset((b"traceparent", b"tracestate"))

MOST_KEY = 255

MOMENT = 0.001  # Timeout in seconds for a request that has no time left.

_ID = re.compile(rb"(?:req_)?([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})")
_KEY = re.compile(rb'[\x21\x23-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?|"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])+"')
_ESCAPED = re.compile(rb'\\(["\\])')
_MILLISECONDS = re.compile(rb"[0-9]+(?:\.[0-9]+)?")


def select_fields(
    fields: Iterable[tuple[bytes, bytes]], names: Collection[bytes], lists: Collection[bytes], kind: str = "header"
) -> dict[bytes, bytes]:
    """Return the values of the fields in `names` (lower case). Repeated fields in `lists` are joined by commas, so that a second
    `traceparent` makes the value malformed. Raises BadRequest if any other field is repeated."""
    selected: dict[bytes, bytes] = {}
    for name, value in fields:
        if name in names:
            if name not in selected:
                selected[name] = value
            elif name in lists:
                selected[name] = b"%b, %b" % (selected[name], value)
            else:
                raise BadRequest(f"the {kind} {name.decode()} was sent twice; send it once")
    return selected


def shorten(value: bytes) -> str:
    """Return the start of a field's value, for an error message."""
    return repr(value[:60].decode("latin-1"))


def read_id(single: Mapping[bytes, bytes]) -> str:
    """Return the UUID in `X-Request-Id`, in lower case and without the prefix, or an empty string if there is none."""
    value = single.get(b"x-request-id")
    match = None if value is None else _ID.fullmatch(value)
    return match[1].decode().lower() if match else ""


def read_options(
    single: Mapping[bytes, bytes],
    settings: Settings,
    longest: float,
    chosen: bool,
    origin: str | None,
    *,
    task: bool = False,
    way: str = "",
) -> RequestOptions:
    """Read request options from a mapping of lower-case header names to values. The request may take at most `longest` seconds. For
    the other arguments see RequestOptions. Raises BadRequest if a value is malformed."""
    key = _key(single[b"idempotency-key"]) if b"idempotency-key" in single else ""
    fresh = unkept = False
    if b"cache-control" in single:
        fresh, unkept = _freshness(single[b"cache-control"])
    timeout = longest
    if b"x-request-timeout-ms" in single:
        timeout = min(timeout, _seconds(single[b"x-request-timeout-ms"]))
    tier = _tier(single[b"x-request-tier"], settings.tier_names) if b"x-request-tier" in single else 0
    trace = None
    if settings.trace and b"traceparent" in single:
        trace = read_trace_context(single[b"traceparent"], single.get(b"tracestate", b""))
    return RequestOptions(timeout, tier, key, task, fresh, chosen, origin, way=way, trace=trace, unkept=unkept)


def _key(value: bytes) -> str:
    """Return the key in an `Idempotency-Key`, which may be bare or a quoted string as in the IETF draft."""
    key = b""
    if _KEY.fullmatch(value) is not None:
        key = _ESCAPED.sub(rb"\1", value[1:-1]) if value.startswith(b'"') else value
    if not 1 <= len(key) <= MOST_KEY:
        raise BadRequest(
            f"the Idempotency-Key {shorten(value)} is malformed; expected 1 to {MOST_KEY} printable ASCII characters"
        )
    return key.decode("ascii")


def _freshness(value: bytes) -> tuple[bool, bool]:
    """Return two flags: True if the request wants a fresh answer, and True if the answer must not be stored."""
    directives = {directive.partition(b"=")[0].strip().lower() for directive in value.split(b",")}
    unkept = b"no-store" in directives
    return unkept or b"no-cache" in directives, unkept


def _seconds(value: bytes) -> float:
    if _MILLISECONDS.fullmatch(value) is None or float(value) <= 0:
        raise BadRequest(f"X-Request-Timeout-Ms is {shorten(value)}; expected milliseconds above 0, for example 1500")
    return float(value) / 1000


def _tier(value: bytes, names: tuple[str, ...]) -> int:
    name = value.decode("latin-1").strip()
    if name not in names:
        raise BadRequest(f"X-Request-Tier is {shorten(value)}; expected one of {', '.join(names)}")
    return names.index(name)


def with_time_left(options: RequestOptions, waited: float, remaining: float | None = None) -> RequestOptions:
    """Subtract the seconds already `waited` from the timeout, and limit it to the call's `remaining` seconds if given."""
    left = options.timeout if waited < DEADLINE_GRAIN else options.timeout - waited
    if remaining is not None:
        left = min(left, remaining)
    if left >= options.timeout:
        return options
    return msgspec.structs.replace(options, timeout=max(left, MOMENT))
