"""Routes of a port: a table of paths, methods and handlers, and the errors that become answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

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

_PART = re.compile(r"\{(\w+)(:path)?\}")


class NoRoute(Exception):
    """Error for a path at which nothing is served."""


class WrongMethod(Exception):
    """Error for a method that a path is not served with.

    Arguments:
        allowed: methods with which it is.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        super().__init__()
        self.allowed = allowed


class Route:
    """Path and what answers there.

    Arguments:
        path: path, in which `{name}` stands for one segment, and `{name:path}` for any number of them.
        handler: answers its requests.
        methods: methods that it takes; HEAD goes with GET.
    """

    def __init__(self, path: str, handler: Handler, methods: Sequence[str] = ("GET",)) -> None:
        self.path, self.handler = path, handler
        self.methods = frozenset((*methods, "HEAD") if "GET" in methods else methods)
        texts = _PART.split(path)
        form = re.escape(texts[0])
        for name, whole, text in zip(texts[1::3], texts[2::3], texts[3::3], strict=True):
            form += f"(?P<{name}>{'.*' if whole else '[^/]+'}){re.escape(text)}"
        self._form = re.compile(form)

    def match(self, path: str) -> Mapping[str, str] | None:
        """Named parts of a path; None: it is not of this route."""
        found = self._form.fullmatch(path)
        return None if found is None else found.groupdict()


class Router:
    """All routes of a port; the first that fits a request answers it.

    Arguments:
        routes: the routes.
        hints: extra text for the message about a path where nothing is served, by prefix of the path. The first match is used.
    """

    def __init__(self, routes: Iterable[Route], hints: Mapping[tuple[str, ...], str] | None = None) -> None:
        self._routes, self._hints = tuple(routes), hints or {}

    async def __call__(self, request: Request) -> RouteAnswer:
        """Answer a request. Raises what nobody foresaw."""
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
        """Handler of a request, which gets the named parts of its path."""
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
