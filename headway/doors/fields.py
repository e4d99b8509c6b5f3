"""Fields of a request over any port: header fields of HTTP, or metadata of gRPC of the same names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from headway.config import Settings
from headway.core.trace_context import read_trace_context
from headway.errors import BadRequest
from headway.model import RequestOptions
from headway.runtime.timing_wheel import DEADLINE_GRAIN

ID_PREFIX = "req_"
"""Prefix of a request's id wherever clients see it."""

TRACE_FIELDS = frozenset((b"traceparent", b"tracestate"))

MOST_KEY = 255
"""Most characters of an idempotency key."""

MOMENT = 0.001
"""Seconds left of a request whose time is over."""

_ID = re.compile(rb"(?:req_)?([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})")
_KEY = re.compile(rb'[\x21\x23-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?|"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])+"')
_ESCAPED = re.compile(rb'\\(["\\])')
_MILLISECONDS = re.compile(rb"[0-9]+(?:\.[0-9]+)?")


def picked(
    fields: Iterable[tuple[bytes, bytes]], names: Collection[bytes], lists: Collection[bytes], kind: str = "header"
) -> dict[bytes, bytes]:
    """Values of those header fields, or metadata, that are looked at, by name.

    Arguments:
        fields: names, in lower case, and values.
        names: names of those that are looked at.
        lists: names of those among them whose values are joined by commas, while others may come only once. A `traceparent` that
            comes twice is so malformed.
        kind: what they are, for the message.

    Raises:
        BadRequest: one came twice.
    """
    found: dict[bytes, bytes] = {}
    for name, value in fields:
        if name in names:
            if name not in found:
                found[name] = value
            elif name in lists:
                found[name] = b"%b, %b" % (found[name], value)
            else:
                raise BadRequest(f"the {kind} {name.decode()} was sent twice; send it once")
    return found


def shorten(value: bytes) -> str:
    """Beginning of a header field's value, as an error may show it."""
    return repr(value[:60].decode("latin-1"))


def read_id(single: Mapping[bytes, bytes]) -> str:
    """UUID in the field `X-Request-Id`, with or without the prefix, in lower case; empty for anything else."""
    value = single.get(b"x-request-id")
    found = None if value is None else _ID.fullmatch(value)
    return found[1].decode().lower() if found else ""


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
    """Options in header fields, or in metadata of the same names.

    Arguments:
        single: value of each field, by its name in lower case.
        settings: settings of the tiers.
        longest: seconds that the request may take.
        chosen: see RequestOptions.
        origin: see RequestOptions.
        task: see RequestOptions.
        way: see RequestOptions.

    Raises:
        BadRequest: a field is wrong.
    """
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
    """Key in the value of `Idempotency-Key`: a string in quotes, as the draft has it, or the bare key."""
    key = b""
    if _KEY.fullmatch(value) is not None:
        key = _ESCAPED.sub(rb"\1", value[1:-1]) if value.startswith(b'"') else value
    if not 1 <= len(key) <= MOST_KEY:
        raise BadRequest(f"the Idempotency-Key is malformed; expected 1 to {MOST_KEY} printable ASCII characters")
    return key.decode("ascii")


def _freshness(value: bytes) -> tuple[bool, bool]:
    """Whether a request asks for an answer of its own, and whether this is not to be kept."""
    asked = {directive.partition(b"=")[0].strip().lower() for directive in value.split(b",")}
    unkept = b"no-store" in asked
    return unkept or b"no-cache" in asked, unkept


def _seconds(value: bytes) -> float:
    if _MILLISECONDS.fullmatch(value) is None or float(value) <= 0:
        raise BadRequest(
            f"X-Request-Timeout-Ms is {shorten(value)}; expected a number of milliseconds above 0, for example 1500"
        )
    return float(value) / 1000


def _tier(value: bytes, names: tuple[str, ...]) -> int:
    name = value.decode("latin-1").strip()
    if name not in names:
        raise BadRequest(f"X-Request-Tier is {shorten(value)}; expected one of {', '.join(names)}")
    return names.index(name)


def hurried(options: RequestOptions, waited: float, remaining: float | None = None) -> RequestOptions:
    """Options of a request that has waited for some seconds, and whose call has some left."""
    left = options.timeout if waited < DEADLINE_GRAIN else options.timeout - waited
    if remaining is not None:
        left = min(left, remaining)
    if left >= options.timeout:
        return options
    return msgspec.structs.replace(options, timeout=max(left, MOMENT))
