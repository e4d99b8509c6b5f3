"""Routes for the dashboard's files, which aren't secret and need no credential."""

from __future__ import annotations

import hashlib
from pathlib import Path

from headway.http.routing import Request, Route, RouteAnswer

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # Content security policy: everything comes from this port, nothing is inline, and no page may embed this one.
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def routes() -> list[Route]:
    """Return a route for each file of the page. The page is at `/dashboard`, and `/` redirects there."""
    pages = [Route("/", _to_page)]
    for file in sorted(Path(__file__).with_name("page").iterdir()):
        path = "/dashboard" if file.name == "index.html" else f"/dashboard/{file.name}"
        pages.append(Route(path, _File(file.read_bytes(), TYPES[file.name.rpartition(".")[2]]).answer))
    return pages


async def _to_page(request: Request) -> RouteAnswer:
    # The URL is relative, because a client can send any Host.
    return RouteAnswer(status=307, headers={**HEADERS, "location": "/dashboard"})


class _File:
    def __init__(self, body: bytes, media_type: str) -> None:
        self._body, self._type = body, media_type
        self._tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'

    async def answer(self, request: Request) -> RouteAnswer:
        headers = {**HEADERS, "etag": self._tag}
        if request.headers.get("if-none-match") == self._tag:
            return RouteAnswer(status=304, headers=headers)
        return RouteAnswer(self._body, headers=headers, media_type=self._type)
