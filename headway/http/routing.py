"""Ordinary routes of a port: the table of paths, methods and handlers, authentication, and errors as answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from headway.core.excerpt import excerpt
from headway.errors import (
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    SERVICE_OVERLOADED,
    BrokerUnavailable,
    RequestError,
    StoreUnavailable,
)
from headway.http.requests import Handler, Request, RouteAnswer, refuse, without_reason
from headway.model import Failure

if TYPE_CHECKING:
    from headway.doors.entrance import Entrance

_PART = re.compile(r"\{(\w+)(:path)?\}")


class NoRoute(Exception):
    """Nothing is served at this path."""


class WrongMethod(Exception):
    """The path is served, but only with the methods `allowed`."""

    def __init__(self, allowed: Iterable[str]) -> None:
        super().__init__()
        self.allowed = allowed


class Route:
    """A path, its methods, and the handler for them. In the path, `{name}` stands for one segment, and `{name:path}` for any
    number of segments. HEAD is added to GET."""

    def __init__(self, path: str, handler: Handler, methods: Sequence[str] = ("GET",)) -> None:
        self.path, self.handler = path, handler
        self.methods = frozenset((*methods, "HEAD") if "GET" in methods else methods)
        texts = _PART.split(path)
        form = re.escape(texts[0])
        for name, whole, text in zip(texts[1::3], texts[2::3], texts[3::3], strict=True):
            form += f"(?P<{name}>{'.*' if whole else '[^/]+'}){re.escape(text)}"
        self._form = re.compile(form)

    def match(self, path: str) -> Mapping[str, str] | None:
        """Return the values of the path's placeholders, or None if the path is another one."""
        match = self._form.fullmatch(path)
        return None if match is None else match.groupdict()


class Router:
    """All routes of a port. The first match answers a request. `hints` are further words for the 404 message, by prefixes of the
    path; here too the first match counts."""

    def __init__(self, routes: Iterable[Route], hints: Mapping[tuple[str, ...], str] | None = None) -> None:
        self._routes, self._hints = tuple(routes), hints or {}

    async def __call__(self, request: Request) -> RouteAnswer:
        """Answer a request. Unexpected exceptions are not caught."""
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
        """Return the handler of a request, and set the request's `params`."""
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
            message += f"; leave out the slash at its end: {excerpt(bare)}"
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
    """Wraps handlers of the public port so that only known principals within their rate limits pass.

    Credentials are checked before the body is read. On most routes, a request counts for its principal's limit of polls."""

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance

    def __call__(self, handler: Handler, *, counts: bool = False) -> Handler:
        """Wrap a handler. `counts` is True if each call counts as a request, not as a poll."""

        async def checked(request: Request) -> RouteAnswer:
            return self._refusal(request, counts) or await handler(request)

        return checked

    def _refusal(self, request: Request, counts: bool) -> RouteAnswer | None:
        """Return the answer to a request that doesn't pass; otherwise set the request's `principal` and return None."""
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
