"""Strict parser for request heads, which consist of the request line and the header. It parses a head as a whole.

llhttp (through httptools) checks the syntax. This module also rejects everything that a proxy in front might interpret
differently: a missing or repeated Host header, a request line that isn't three words, transfer codings other than `chunked`,
repeated headers that must be unique, and a slash in the path written as %2F.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl

import httptools
import msgspec

from headway.doors.fields import TRACE_FIELDS, select_fields, shorten
from headway.errors import HEADERS_TOO_LARGE, METHOD_NOT_ALLOWED, BadRequest, PayloadTooLarge, RequestError
from headway.model import RequestOptions
from headway.runtime import protocol_hints

if TYPE_CHECKING:
    from headway.doors.exchange import CodecContext, Reader

END = b"\r\n\r\n"

_REQUEST_LINE = re.compile(rb"([A-Z][A-Z-]*) ([^\x00-\x20\x7f]+) HTTP/(1\.[01])\r\n")
_LINE_SO_FAR = re.compile(rb"[A-Z][A-Z-]*(?: [^\x00-\x20\x7f]*(?: [HTP/1.0]{0,8})?)?\r?")
_HANDSHAKE = re.compile(rb"\x16\x03[\x00-\x04]")  # Start of a TLS handshake: the type and version of its record.
_HTTP2 = b"PRI * HTTP/2"
_BLANK = re.compile(rb"(?:\r\n)*")
_STRAY = re.compile(rb"(?<!\r)\n|\r(?=[^\n])|\x00")

_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Za-z.:%_-]+\])(?::[0-9]{0,5})?")
MOST_MEMBERS = 100  # Maximum number of members in a query. Parsing more takes milliseconds that no quota covers.
_MOST_DIGITS = 20  # Maximum number of digits in a 64-bit Content-Length.

_NAMES = b"/v1/models/", b"/v2/models/"  # Prefixes of paths with a model's name, which may contain %2F.

_LISTS = TRACE_FIELDS | {b"cache-control", b"connection", b"prefer"}
_LOOKED_AT = _LISTS | {
    b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect", b"host", b"idempotency-key",
    b"inference-header-content-length", b"transfer-encoding", b"x-request-id", b"x-request-tier", b"x-request-timeout-ms",
}  # fmt: skip


class Head:
    """The head of one request.

    `target` is exactly as in the request line. The names in `fields` are lower case. `single` has the values of the fields in
    `_LOOKED_AT`; repeated list fields are joined by commas. `length` is the size of the body in bytes, or -1 for a chunked body.
    `keep` is True if the connection may serve another request. `expects` is True if the client waits for `100 Continue`."""

    __slots__ = ("expects", "fields", "keep", "length", "method", "single", "target", "version")

    def __init__(self, method: bytes, target: bytes, version: str, fields: list[tuple[bytes, bytes]]) -> None:
        self.method = method
        self.target = target
        self.version = version
        self.fields = fields
        self.single: dict[bytes, bytes] = {}
        self.length = 0
        self.keep = version == "1.1"
        self.expects = False


class OtherProtocol(BadRequest):
    """The client speaks a different protocol from the port. For `kind` see `protocol_hints`."""

    def __init__(self, message: str, kind: tuple[str, str]) -> None:
        super().__init__(message)
        self.kind = kind


class _HeaderEvents(msgspec.Struct, eq=False):
    fields: list[tuple[bytes, bytes]] = []
    complete: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        # Blanks around a value aren't part of it (RFC 9110, section 5.5).
        self.fields.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


def read_head(raw: bytes) -> Head:
    """Parse a complete head, including its empty line. Raises RequestError if it is malformed or ambiguous."""
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise _bad_line(raw)
    method, target, version = line.groups()
    if method == b"CONNECT":
        raise RequestError("CONNECT is not served here", code=METHOD_NOT_ALLOWED)
    events = _HeaderEvents()
    try:
        httptools.HttpRequestParser(events).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # RFC 9110, section 7.8, allows a server to ignore an Upgrade.
    except httptools.HttpParserError as exc:
        raise BadRequest(f"the header is malformed: {exc}") from None
    if not events.complete:
        raise BadRequest("the header is malformed: it is still incomplete at the empty line that should end it")
    if b"#" in target:
        raise BadRequest(f"the target {shorten(target)} has a fragment; remove # and everything after it")
    if b"%2f" in target.partition(b"?")[0].lower() and not target.startswith(_NAMES):
        raise BadRequest("the path contains %2F, which only some servers treat as a slash; write / instead")
    head = Head(method, target, version.decode(), events.fields)
    _check_fields(head)
    return head


def _check_fields(head: Head) -> None:
    single = head.single = select_fields(head.fields, _LOOKED_AT, _LISTS)
    if b"connection" in single and b"close" in map(bytes.strip, single[b"connection"].lower().split(b",")):
        head.keep = False
    host = single.get(b"host")
    if host is None and head.version == "1.1":
        raise BadRequest("the header host is missing; HTTP/1.1 requires it")
    if host is not None and _HOST.fullmatch(host) is None:
        raise BadRequest(f"the header host is {shorten(host)}; expected a name or an address, and a port after a colon")
    coding = single.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked" or head.version == "1.0" or b"content-length" in single:
            raise BadRequest("Transfer-Encoding may only be `chunked`, on HTTP/1.1, and without Content-Length")
        head.length = -1
    elif b"content-length" in single:
        digits = single[b"content-length"]
        if len(digits) > _MOST_DIGITS:
            raise BadRequest(f"Content-Length has {len(digits)} digits; expected at most {_MOST_DIGITS}")
        head.length = int(digits)
    head.expects = head.version == "1.1" and single.get(b"expect", b"").lower() == b"100-continue"


def suspect(partial: bytes, seen: int = 0) -> BadRequest | None:
    """Return an error if an incomplete head can't become valid, otherwise None. The first `seen` bytes were accepted by an
    earlier call. Without this check, a client that speaks another protocol would wait for the header timeout."""
    newline = partial.find(b"\r\n")
    if newline < 0 or seen <= newline + 1:
        good = _LINE_SO_FAR.fullmatch(partial) if newline < 0 else _REQUEST_LINE.match(partial)
        if good is None:
            return _bad_line(partial)
    if _STRAY.search(partial, max(seen - 1, 0)):
        return BadRequest("the header is malformed: it contains a bare CR, a bare LF or a NUL")
    return None


def _bad_line(raw: bytes) -> BadRequest:
    if _HANDSHAKE.match(raw):
        message = "received a TLS handshake on a port that speaks plain HTTP; use http:// instead of https://"
        return OtherProtocol(message, protocol_hints.TLS)
    if raw.startswith(_HTTP2):
        message = "received HTTP/2 on a port that speaks HTTP/1.1; gRPC has its own port, if it is enabled (grpc_port)"
        return OtherProtocol(message, protocol_hints.HTTP2)
    line, newline, _ = raw.partition(b"\n")
    shown = line[:80].decode("ascii", "backslashreplace")
    if newline and _REQUEST_LINE.match(line + b"\r\n"):
        return BadRequest(f"the request line {shown!r} ends with a bare LF; end it, and every header line, with CR LF")
    return BadRequest(f"the request line {shown!r} is malformed; expected: METHOD target HTTP/1.1")


def past_blank(buffer: bytes) -> bytes:
    """Skip blank lines before a request."""
    blank = _BLANK.match(buffer)
    return buffer[blank.end() if blank else 0 :]


def too_large(limit: int) -> PayloadTooLarge:
    """Return the error for a body of more than `limit` bytes."""
    return PayloadTooLarge(f"the body is larger than {limit} bytes (max_body_bytes)")


def too_many_members(query: bytes) -> BadRequest | None:
    """Return an error if a query (or a whole target) has more than MOST_MEMBERS members, otherwise None."""
    if (members := query.count(b"&") + 1) <= MOST_MEMBERS:
        return None
    return BadRequest(f"the query has {members} members; the limit is {MOST_MEMBERS}; send the rest in the body")


def too_long(limit: int) -> RequestError:
    """Return the error for a head of more than `limit` bytes."""
    return RequestError(f"the request line and header exceed {limit} bytes", code=HEADERS_TOO_LARGE)


_NAMED = ("model", "model_id", "version")


class RequestTarget(NamedTuple):
    """The variable parts of an inference request's target: the decoded placeholders of the path, and the raw query."""

    names: Mapping[str, str]
    query: bytes

    def refuse_named(self, instead: str) -> None:
        """Raise BadRequest if the query names a model or a version. The error message ends with `instead`."""
        if not self.query:
            return
        if (error := too_many_members(self.query)) is not None:
            raise error
        for name, _ in parse_qsl(self.query.decode("latin-1"), keep_blank_values=True):
            if name in _NAMED:
                raise BadRequest(
                    f"the query names `{name}`, which is allowed only for /v1/predict with a body of octets; {instead}"
                )


OpenHead = Callable[[Head, RequestTarget, RequestOptions, "CodecContext"], "tuple[RequestOptions, Reader | None]"]
"""Returns a request's final options, and the reader of its body (None for `Codec.read_json`). Raises RequestError."""
