"""Parser of a request's head: the request line and the header, read once and checked strictly.

The syntax is llhttp's business (through httptools); this module adds what llhttp leaves open and what a proxy in front
could understand differently: exactly one Host, one request line of three words, no transfer coding but `chunked`, no
header twice where only one makes sense, no slash of the path written as %2F. A head is always parsed whole.
"""

from __future__ import annotations

import re

import httptools

from headway.doors.fields import TRACE_FIELDS, select_fields, shorten
from headway.errors import HEADERS_TOO_LARGE, METHOD_NOT_ALLOWED, BadRequest, PayloadTooLarge, RequestError
from headway.runtime import protocol_hints

END = b"\r\n\r\n"


_REQUEST_LINE = re.compile(rb"([A-Z][A-Z-]*) ([^\x00-\x20\x7f]+) HTTP/(1\.[01])\r\n")
_LINE_SO_FAR = re.compile(rb"[A-Z][A-Z-]*(?: [^\x00-\x20\x7f]*(?: [HTP/1.0]{0,8})?)?\r?")
_HANDSHAKE = re.compile(rb"\x16\x03[\x00-\x04]")
"""Beginning of a TLS handshake: the type of the record, and its version."""
_HTTP2 = b"PRI * HTTP/2"
"""Beginning of a connection in HTTP/2, as gRPC's clients open it."""
_BLANK = re.compile(rb"(?:\r\n)*")
_STRAY = re.compile(rb"(?<!\r)\n|\r(?=[^\n])|\x00")

_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Za-z.:%_-]+\])(?::[0-9]{0,5})?")
MOST_MEMBERS = 100
"""Members of a query: a header full of them takes several ms to read, and nobody has paid for it."""
_MOST_DIGITS = 20
"""Digits of the largest Content-Length that 64 bits hold."""

_NAMES = b"/v1/models/", b"/v2/models/"
"""Beginnings of paths in which a model is named. Its name may hold a slash, written as %2F, and is never used as a path."""

_LISTS = TRACE_FIELDS | {b"cache-control", b"connection", b"prefer"}
_LOOKED_AT = _LISTS | {
    b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect", b"host", b"idempotency-key",
    b"inference-header-content-length", b"transfer-encoding", b"x-request-id", b"x-request-tier", b"x-request-timeout-ms",
}  # fmt: skip


class Head:
    """Head of one request.

    Attributes:
        method: method in capitals.
        target: target as it stands in the request line.
        version: `1.0` or `1.1`.
        fields: header fields in order, names in lower case.
        single: value of each header field that may come only once, and of those lists that are looked at, whose lines
            are joined by commas.
        length: bytes of the body; 0 when there is none, -1 when it is chunked.
        keep: whether the connection may serve another request.
        expects: whether the client waits for `100 Continue` before it sends the body.
    """

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
    """The client speaks another protocol than the port.

    Arguments:
        message: text that the client reads.
        kind: kind of it, as `headway.runtime.protocol_hints` logs it.
    """

    def __init__(self, message: str, kind: tuple[str, str]) -> None:
        super().__init__(message)
        self.kind = kind


class _HeaderEvents:
    """Callbacks of the parser, which take down what it finds."""

    __slots__ = ("complete", "fields")

    def __init__(self) -> None:
        self.fields: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value.strip(b" \t")))  # RFC 9110, section 5.5: blanks are no part of it

    def on_headers_complete(self) -> None:
        self.complete = True


def read_head(raw: bytes) -> Head:
    """Parse one head, from the request line up to and including its empty line.

    Raises:
        RequestError: the head is malformed or ambiguous; the connection cannot be used any further.
    """
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise _bad_line(raw)
    method, target, version = line.groups()
    if method == b"CONNECT":
        raise RequestError("CONNECT is not served here", code=METHOD_NOT_ALLOWED)
    scribe = _HeaderEvents()
    try:
        httptools.HttpRequestParser(scribe).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # an Upgrade is ignored, as RFC 9110, section 7.8, allows
    except httptools.HttpParserError as exc:
        raise BadRequest(f"the header is malformed: {exc}") from None
    if not scribe.complete:
        raise BadRequest("the header is malformed: it does not end where its empty line is")
    if b"#" in target:
        raise BadRequest(
            f"the target {shorten(target)} has a fragment, which is for the client alone; leave out # and what follows"
        )
    if b"%2f" in target.partition(b"?")[0].lower() and not target.startswith(_NAMES):
        raise BadRequest("the path has a slash written as %2F in it, which is no slash everywhere; write it as it is")
    head = Head(method, target, version.decode(), scribe.fields)
    _weigh(head)
    return head


def _weigh(head: Head) -> None:
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
    """Reason why the beginning of a head can never become a good one; None when it still may.

    Without this, a client that speaks another protocol would be left waiting for the header deadline.

    Arguments:
        partial: all bytes of the head so far.
        seen: number of them that were found good before.
    """
    newline = partial.find(b"\r\n")
    if newline < 0 or seen <= newline + 1:
        good = _LINE_SO_FAR.fullmatch(partial) if newline < 0 else _REQUEST_LINE.match(partial)
        if good is None:
            return _bad_line(partial)
    if _STRAY.search(partial, max(seen - 1, 0)):
        return BadRequest("the header is malformed: a CR or LF stands alone, or there is a NUL in it")
    return None


def _bad_line(raw: bytes) -> BadRequest:
    if _HANDSHAKE.match(raw):
        message = "a TLS handshake came to a port that speaks plain HTTP; ask http:// instead of https://"
        return OtherProtocol(message, protocol_hints.TLS)
    if raw.startswith(_HTTP2):
        message = "HTTP/2 came to a port that speaks HTTP/1.1; gRPC has a port of its own, if it is on (grpc_port)"
        return OtherProtocol(message, protocol_hints.HTTP2)
    line, newline, _ = raw.partition(b"\n")
    shown = line[:80].decode("ascii", "backslashreplace")
    if newline and _REQUEST_LINE.match(line + b"\r\n"):
        return BadRequest(f"the request line {shown!r} ends in LF alone; end it, and each line of the header, in CR LF")
    return BadRequest(f"the request line {shown!r} is malformed; expected: METHOD target HTTP/1.1")


def past_blank(buffer: bytes) -> bytes:
    """Bytes after the blank lines before a request."""
    blank = _BLANK.match(buffer)
    return buffer[blank.end() if blank else 0 :]


def too_large(most: int) -> PayloadTooLarge:
    """Error of a body of more than `most` bytes."""
    return PayloadTooLarge(f"the body is larger than {most} bytes (max_body_bytes)")


def too_many_members(query: bytes) -> BadRequest | None:
    """Error of a query, or of a target with one, that has more than MOST_MEMBERS; None where it has not."""
    if (members := query.count(b"&") + 1) <= MOST_MEMBERS:
        return None
    return BadRequest(f"the query has {members} members, the limit is {MOST_MEMBERS}; send more in the body")


def too_long(most: int) -> RequestError:
    """Error of a head of more than `most` bytes."""
    return RequestError(f"request line and header exceed {most} bytes", code=HEADERS_TOO_LARGE)
