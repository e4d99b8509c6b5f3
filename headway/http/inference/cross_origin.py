"""Pages of other sites that may ask at the public port (CORS): header lines for the answers they get, and leave to send a request.

A browser asks by OPTIONS whether it may send a request that no form could; that needs no credential, and no route. Every answer to
a page that may ask says so. Nothing here reads a cookie, so pages send their credential themselves.
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
"""Seconds for which a browser need not ask again."""
_PERMISSION = (
    b"HTTP/1.1 204 No Content\r\ndate: %b\r\nx-request-id: %b\r\naccess-control-allow-methods: GET, POST, DELETE\r\n"
    b"%baccess-control-max-age: %d\r\n%b\r\n"
)


class Origins:
    """Origins whose pages may ask.

    Arguments:
        text: value of the setting `cors_origins`.
    """

    def __init__(self, text: str) -> None:
        self._any = text == ANY
        self._known = {origin.strip().lower().encode() for origin in text.split(",")}

    def marks(self, head: Head) -> bytes:
        """Return header lines for every answer to a request: they let the page it comes from read them. Empty where it may not."""
        origin = _last(head, b"origin")
        if not origin or not (self._any or origin.lower() in self._known):
            return b""
        allowed = b"*\r\n" if self._any else origin + b"\r\nvary: origin\r\n"
        return b"access-control-allow-origin: " + allowed + _EXPOSE

    def refusal(self, head: Head) -> RequestError:
        """Return the error of a page of another origin."""
        shown = _last(head, b"origin")[:100].decode("latin-1")
        return RequestError(f"pages of {shown!r} may not ask here: it is not in --cors-origins", code=FORBIDDEN)


def asks_leave(head: Head) -> bool:
    """Whether a browser asks for leave to send a request."""
    return head.method == b"OPTIONS" and bool(_last(head, b"access-control-request-method"))


def permission(head: Head, shown: str, date: bytes, ending: bytes) -> bytes:
    """Return the HTTP/1.1 response by which a browser may send what it asks to.

    Arguments:
        head: head of its question.
        shown: id of the question as clients see it, `req_…`.
        date: value of the Date header.
        ending: further lines of the header, each with its end.
    """
    asked = _last(head, b"access-control-request-headers")
    headers = b"access-control-allow-headers: %b\r\n" % asked if asked else b""
    return _PERMISSION % (date, shown.encode(), headers, _MAX_AGE, ending)


def _last(head: Head, wanted: bytes) -> bytes:
    """Value of the last header field of a name; empty where there is none."""
    return next((value for name, value in reversed(head.fields) if name == wanted), b"")
