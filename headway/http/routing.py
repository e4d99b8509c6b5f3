"""Routing of ordinary requests on a port: requests, answers, the router, and authentication."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

import msgspec

from headway.core.excerpt import excerpt
from headway.errors import (
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    SERVICE_OVERLOADED,
    STATUS,
    AnyError,
    BrokerUnavailable,
    RequestError,
    StoreUnavailable,
)
from headway.http.problem import EncodeError, encode_problem
from headway.http.server.head import Head
from headway.model import Failure, Principal

if TYPE_CHECKING:
    from headway.doors.entrance import Entrance

JSON = "application/json"


class ClientLeft(Exception):
    """The client left, or was refused, before its whole body arrived."""


class Request:
    """A request to an ordinary route.

    `id` is the public id, `req_…`. `client` is the client's address and port, or None. `encode_error` encodes errors in the format
    of the path's API. `shut` is set when the port closes, which ends long polls. `cut` closes the connection immediately. `want` is
    called when the handler waits for more of the body. `path` is decoded, and the names in `fields` are lower case. `params` has
    the values of the route's placeholders. Routes with authentication set `principal`, and `session` if a browser is signed in.
    `more` returns additional header fields for the answer. `gone` is True once the client has left."""

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
        """Header values by lower-case name. For a repeated field, the first value counts."""
        return {name.decode(): value.decode("latin-1") for name, value in reversed(self.fields)}

    @cached_property
    def query(self) -> Mapping[str, list[str]]:
        return parse_qs(self.raw_query, keep_blank_values=True)

    def param(self, name: str) -> str | None:
        return self.query.get(name, (None,))[-1]

    def feed(self, content: bytes) -> int:
        """Add a piece of the body. Return how many bytes the handler hasn't read yet."""
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
        """Yield pieces of the body as they arrive. Raises ClientLeft if the client leaves before the end."""
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
        """Discard the rest of the body, and wait until the client leaves."""
        with contextlib.suppress(ClientLeft):
            async for _ in self.pieces():
                pass
        while not self.gone:
            self._news.clear()
            await self._news.wait()


class RouteAnswer:
    """The answer of an ordinary route. The writer adds the content length. `media_type` is None if `headers` already include it."""

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
    """Return a JSON answer."""
    return RouteAnswer(msgspec.json.encode(content), status, headers, JSON)


class StreamedAnswer(RouteAnswer):
    """An answer that is sent piece by piece until there are no more pieces or the client leaves. Then `ended` is called."""

    def __init__(
        self,
        pieces: Callable[[], AsyncGenerator[bytes, None]],
        headers: Mapping[str, str],
        media_type: str,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(headers=headers, media_type=media_type)
        self.pieces, self.ended = pieces, ended


Handler = Callable[[Request], Awaitable[RouteAnswer]]  # Answers a request. Errors from `headway.errors` become answers.


def refusal(id: str, error: AnyError, encode: EncodeError = encode_problem) -> RouteAnswer:
    """Return the error answer to the request with the public id `id`, `req_…`."""
    fields, body = encode(error, id)
    return RouteAnswer(body, STATUS[error.code], fields)


def without_reason(error: RequestError) -> Failure:
    """Return an error without its reason, which is only a metrics label."""
    return Failure(error.code, error.message, error.retry_after)


def refuse(request: Request, error: AnyError) -> RouteAnswer:
    """Return the error answer to a request, in the format of its path's API."""
    return refusal(request.id, error, request.encode_error)


_PART = re.compile(r"\{(\w+)(:path)?\}")


class NoRoute(Exception):
    """Nothing is served at this path."""


class WrongMethod(Exception):
    """The path is served, but not with this method. `allowed` has the allowed methods."""

    def __init__(self, allowed: Iterable[str]) -> None:
        super().__init__()
        self.allowed = allowed


class Route:
    """A path with its methods and handler. `{name}` matches one segment, `{name:path}` any number of them. GET implies HEAD."""

    def __init__(self, path: str, handler: Handler, methods: Sequence[str] = ("GET",)) -> None:
        self.path, self.handler = path, handler
        self.methods = frozenset((*methods, "HEAD") if "GET" in methods else methods)
        texts = _PART.split(path)
        form = re.escape(texts[0])
        for name, whole, text in zip(texts[1::3], texts[2::3], texts[3::3], strict=True):
            form += f"(?P<{name}>{'.*' if whole else '[^/]+'}){re.escape(text)}"
        self._form = re.compile(form)

    def match(self, path: str) -> Mapping[str, str] | None:
        """Return the values of the placeholders, or None if the path doesn't match."""
        match = self._form.fullmatch(path)
        return None if match is None else match.groupdict()


class Router:
    """The routes of a port. A request is answered by the first route that matches. `hints` maps path prefixes to hints, which
    are appended to the message of a 404."""

    def __init__(self, routes: Iterable[Route], hints: Mapping[tuple[str, ...], str] | None = None) -> None:
        self._routes, self._hints = tuple(routes), hints or {}

    async def __call__(self, request: Request) -> RouteAnswer:
        try:
            response = await self._find(request)(request)
        except RequestError as exc:
            response = refuse(request, without_reason(exc))
        except BrokerUnavailable as exc:
            response = refuse(request, Failure(SERVICE_OVERLOADED, str(exc), 1.0, "broker"))
        except StoreUnavailable as exc:
            response = refuse(request, Failure(SERVICE_OVERLOADED, str(exc), 1.0, "ledger"))
        except NoRoute:
            response = self._nothing(request)
        except WrongMethod as exc:
            response = _wrong_method(request, exc.allowed)
        if request.more is not None:
            response.headers.update(request.more())
        return response

    def _find(self, request: Request) -> Handler:
        allowed: Iterable[str] = ()
        for route in self._routes:
            params = route.match(request.path)
            if params is None:
                continue
            if request.method in route.methods:
                request.params = params
                return route.handler
            allowed = allowed or route.methods
        if allowed:
            raise WrongMethod(allowed)
        raise NoRoute

    def _nothing(self, request: Request) -> RouteAnswer:
        path = request.path
        message = f"nothing is served at {excerpt(path)}"
        if (bare := path.rstrip("/")) != path and any(route.match(bare) is not None for route in self._routes):
            message += f"; remove the trailing slash: {excerpt(bare)}"
        else:
            message += next((hint for begins, hint in self._hints.items() if path.startswith(begins)), "")
        return refuse(request, Failure(NOT_FOUND, message))


def _wrong_method(request: Request, allowed: Iterable[str]) -> RouteAnswer:
    allow = ", ".join(sorted({*allowed, "OPTIONS"}))
    if request.method == "OPTIONS":
        return RouteAnswer(status=204, headers={"allow": allow})
    message = f"{excerpt(request.method)} is not served at {excerpt(request.path)}, only {allow}"
    response = refuse(request, Failure(METHOD_NOT_ALLOWED, message))
    response.headers["allow"] = allow
    return response


class Authentication:
    """Wraps handlers of the public port, so that only known principals within their rate limits get through. Credentials are
    checked before the body is read. On most routes, a request counts as a poll; see `Limiter.poll`."""

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance

    def __call__(self, handler: Handler, *, counts: bool = False) -> Handler:
        """Wrap a handler. `counts` is True if each call counts as a request rather than a poll."""

        async def checked(request: Request) -> RouteAnswer:
            return self._refusal(request, counts) or await handler(request)

        return checked

    def _refusal(self, request: Request, counts: bool) -> RouteAnswer | None:
        """Set the request's `principal`. Return the error answer if the request is refused, otherwise None."""
        authorization = next((value for name, value in request.fields if name == b"authorization"), b"")
        entrance = self._entrance
        try:
            principal = entrance.identify(authorization)
        except RequestError as exc:
            entrance.counters.refusals[exc.code.lower(), "none", ""] += 1
            return refuse(request, without_reason(exc))
        request.principal = principal
        if not principal.limits:
            return None
        request.more = partial(entrance.rate_limits.fields, principal.limits)
        if not counts:
            over = entrance.gateway.limiter.poll(principal.limits)
        elif (over := entrance.over(principal)) is None:
            entrance.charge(principal)
        if over is None:
            return None
        entrance.counters.refusals[over.reason, entrance.tiers[principal.tier], ""] += 1
        answer = refuse(request, over)
        answer.headers["cache-control"] = "no-store"
        return answer
