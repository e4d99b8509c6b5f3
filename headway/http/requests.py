"""Requests and answers of ordinary routes, which are all but the inference routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec

from headway.errors import STATUS, AnyError, RequestError
from headway.http.problem import EncodeError, encode_problem
from headway.http.server.head import Head
from headway.model import Failure, Principal

JSON = "application/json"


class ClientLeft(Exception):
    """The client has left, or was refused, before its whole body had arrived."""


class Request:
    """Request to an ordinary route.

    `id` is as clients see it, `req_…`. `client` is the client's address and port, or None. `encode_error` encodes errors in the
    form of the path's API. `shut` is set when the port closes, to end waits for news. `cut` closes the connection at once. `want`
    is called when the handler waits for more of the body. `path` is decoded, and names in `fields` are in lower case. `params`
    are the values of the placeholders in the route's path. Routes with authentication set `principal`, and `session` if a browser
    has signed in. `more` makes further header fields for any answer. `gone` is True once nobody waits for it."""

    def __init__(
        self,
        head: Head,
        path: bytes,
        query: bytes,
        id: str,
        client: tuple[str, int] | None,
        encode_error: EncodeError,
        shut: asyncio.Event,
        cut: Callable[[], None],
        want: Callable[[], None],
    ) -> None:
        self.method, self.path, self.fields = head.method.decode(), unquote(path.decode()), head.fields
        self.id, self.client, self.encode_error, self.shut, self.cut = id, client, encode_error, shut, cut
        self.raw_query = query.decode("latin-1")
        self.params: Mapping[str, str] = {}
        self.principal: Principal
        self.session = ""
        self.more: Callable[[], Mapping[str, str]] | None = None
        self.gone = False
        self._want = want
        self._body, self._complete, self._news = bytearray(), False, asyncio.Event()

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """Header values by lower-case name; of repeated fields the first."""
        return {name.decode(): value.decode("latin-1") for name, value in reversed(self.fields)}

    @cached_property
    def query(self) -> Mapping[str, list[str]]:
        return parse_qs(self.raw_query, keep_blank_values=True)

    def param(self, name: str) -> str | None:
        return self.query.get(name, (None,))[-1]

    def feed(self, content: bytes) -> int:
        """Add a piece of the body. Return how many bytes the handler has not read."""
        self._body += content
        self._news.set()
        return len(self._body)

    def end(self) -> None:
        self._complete = True
        self._news.set()

    def leave(self) -> None:
        self.gone = True
        self._news.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield pieces of the body as they arrive. Raises ClientLeft if the rest won't arrive."""
        while not self.gone:
            if self._body:
                piece = bytes(self._body)
                self._body.clear()
                yield piece
            elif self._complete:
                return
            else:
                self._want()
                self._news.clear()
                await self._news.wait()
        raise ClientLeft

    async def left(self) -> None:
        """Wait until the client leaves, and drop the rest of its body."""
        with contextlib.suppress(ClientLeft):
            async for _ in self.pieces():
                pass
        while not self.gone:
            self._news.clear()
            await self._news.wait()


class RouteAnswer:
    """Answer of an ordinary route. `headers` lack the fields of the framing. `media_type` is None if `headers` have it."""

    def __init__(
        self,
        body: bytes = b"",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        self.body, self.status = body, status
        self.headers = dict(headers or {})
        if media_type is not None:
            self.headers["content-type"] = media_type


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> RouteAnswer:
    """Make a JSON answer."""
    return RouteAnswer(msgspec.json.encode(content), status, headers, JSON)


class StreamedAnswer(RouteAnswer):
    """Answer that is sent piece by piece until its client leaves or the pieces end. Then `ended` is called once."""

    def __init__(
        self,
        pieces: Callable[[], AsyncGenerator[bytes, None]],
        headers: Mapping[str, str],
        media_type: str,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(headers=headers, media_type=media_type)
        self.pieces, self.ended = pieces, ended


Handler = Callable[[Request], Awaitable[RouteAnswer]]
"""Answer a request. Errors of `headway.errors` that it raises become answers."""


def refusal(id: str, error: AnyError, encode: EncodeError = encode_problem) -> RouteAnswer:
    """Return the answer that refuses request `id`, which is as clients see it, `req_…`."""
    fields, body = encode(error, id)
    return RouteAnswer(body, STATUS[error.code], fields)


def without_reason(error: RequestError) -> Failure:
    """Return an error that a handler has raised, without the label of its reason."""
    return Failure(error.code, error.message, error.retry_after)


def refuse(request: Request, error: AnyError) -> RouteAnswer:
    """Return the answer that refuses a request, in the form of its path's API."""
    return refusal(request.id, error, request.encode_error)
