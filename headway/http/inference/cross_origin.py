"""CORS: lets web pages of other origins use the public port.

Before a request that a form couldn't send, a browser sends a preflight request by OPTIONS. It needs no credential and
matches no route. The public port never reads cookies, so pages have to send their credential themselves.
"""

from __future__ import annotations

from headway.errors import FORBIDDEN, RequestError
from headway.http.server.head import Head

ANY = "*"
_EXPOSED = (
    "x-request-id, retry-after, retry-after-ms, location, preference-applied, ratelimit, ratelimit-policy, idempotency-replayed, "
    "x-headway-cache, x-headway-kept, x-headway-dropped-reason, x-headway-error, x-should-retry, x-ratelimit-limit-requests, "
    "x-ratelimit-remaining-requests, x-ratelimit-reset-requests, inference-header-content-length"
)
_EXPOSE = f"access-control-expose-headers: {_EXPOSED}\r\n".encode()
_MAX_AGE = 600
"""Seconds for which a browser may cache a preflight answer."""
_PERMISSION = (
    b"HTTP/1.1 204 No Content\r\ndate: %b\r\nx-request-id: %b\r\naccess-control-allow-methods: GET, POST, DELETE\r\n"
    b"%baccess-control-max-age: %d\r\n%b\r\n"
)


class Origins:
    """Allowed origins, from the setting `cors_origins`."""

    def __init__(self, text: str) -> None:
        self._any = text == ANY
        self._known = {origin.strip().lower().encode() for origin in text.split(",")}

    def marks(self, head: Head) -> bytes:
        """Return the header lines that let a page read the answer to its request, or empty if its origin is not allowed."""
        origin = _last(head, b"origin")
        if not origin or not (self._any or origin.lower() in self._known):
            return b""
        allowed = b"*\r\n" if self._any else origin + b"\r\nvary: origin\r\n"
        return b"access-control-allow-origin: " + allowed + _EXPOSE

    def refusal(self, head: Head) -> RequestError:
        shown = _last(head, b"origin")[:100].decode("latin-1")
        return RequestError(f"pages of {shown!r} may not ask here: it is not in --cors-origins", code=FORBIDDEN)


def is_preflight(head: Head) -> bool:
    """Return True for a CORS preflight request."""
    return head.method == b"OPTIONS" and bool(_last(head, b"access-control-request-method"))


def preflight_answer(head: Head, shown: str, date: bytes, ending: bytes) -> bytes:
    """Return the HTTP/1.1 response that allows what a preflight request asks for. `ending` are further header lines."""
    requested = _last(head, b"access-control-request-headers")
    headers = b"access-control-allow-headers: %b\r\n" % requested if requested else b""
    return _PERMISSION % (date, shown.encode(), headers, _MAX_AGE, ending)


def _last(head: Head, field: bytes) -> bytes:
    """Return the last value of a header field, or empty if it was not sent."""
    return next((value for name, value in reversed(head.fields) if name == field), b"")
