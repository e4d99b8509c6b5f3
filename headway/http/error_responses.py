"""Error responses of ordinary routes, under the request's own id.

The connection has put that id into the request's state as `request_id`, in the form in which clients see it, and as
`encode_error` what encodes errors for its path: as problem documents, unless the path is another API's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from headway import errors
from headway.core.excerpt import excerpt
from headway.errors import BrokerUnavailable, RequestError, StoreUnavailable
from headway.http.problem import encode_problem
from headway.http.server.framing import EncodeError

UNFORESEEN = "an unexpected fault of the server; its log says more under this request's id"
"""Message that a client reads when the server raised an unforeseen exception."""

Handler = Callable[[Request, Exception], Awaitable[Response]]


def refusal(
    id: str,
    code: str,
    message: str,
    retry_after: float | None = None,
    reason: str = "",
    encode: EncodeError = encode_problem,
) -> Response:
    """Response to a request that is refused.

    Arguments:
        id: the request's id as clients see it, `req_…`.
        code: a code of `headway.errors`.
        message: what is wrong, for the client to read.
        retry_after: seconds after which a retry makes sense; None when it does not, or is not known.
        reason: short label for metrics of why the request is refused.
        encode: encodes the error.
    """
    fields, body = encode(code, message, id, retry_after, reason)
    return Response(body, errors.STATUS[code], fields)


def _is_served(request: Request, path: str) -> bool:
    """Whether the application has a route at a path, with whatever method."""
    scope = {**request.scope, "path": path}
    return any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes)


def handlers(hint: str = "", under: str = "/") -> Mapping[Any, Handler]:
    """Make Starlette's `exception_handlers`.

    Arguments:
        hint: what the message about a path where nothing is served says further.
        under: beginning of the paths that get the hint.
    """

    def answer(
        request: Request, code: str, message: str, retry_after: float | None = None, reason: str = ""
    ) -> Response:
        state = request.state
        return refusal(state.request_id, code, message, retry_after, reason, state.encode_error)

    async def refused(request: Request, exc: Exception) -> Response:
        if not isinstance(exc, RequestError):
            return await broken(request, exc)
        return answer(request, exc.code, exc.message, exc.retry_after)

    async def away(request: Request, exc: Exception) -> Response:
        return answer(request, errors.SERVICE_OVERLOADED, str(exc), 1.0, "broker")

    async def no_route(request: Request, exc: Exception) -> Response:
        """Answer Starlette's own refusals: no such route, or not with this method."""
        allowed = getattr(exc, "headers", None) or {}
        if "Allow" not in allowed:
            path = request.url.path
            message = f"nothing is served at {excerpt(path)}"
            if (bare := path.rstrip("/")) != path and _is_served(request, bare):
                message += f"; leave out the slash at its end: {excerpt(bare)}"
            elif path.startswith(under):
                message += hint
            return answer(request, errors.NOT_FOUND, message)
        methods = sorted({*allowed["Allow"].split(", "), "OPTIONS"})
        allow = {"allow": ", ".join(methods)}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=allow)
        message = f"{excerpt(request.method)} is not served at {excerpt(request.url.path)}, only {allow['allow']}"
        response = answer(request, errors.METHOD_NOT_ALLOWED, message)
        response.headers.update(allow)
        return response

    async def broken(request: Request, exc: Exception) -> Response:
        return answer(request, errors.INTERNAL, UNFORESEEN)

    async def unrecorded(request: Request, exc: Exception) -> Response:
        return answer(request, errors.SERVICE_OVERLOADED, str(exc), 1.0, "ledger")

    return {
        RequestError: refused,
        BrokerUnavailable: away,
        StoreUnavailable: unrecorded,
        HTTPException: no_route,
        Exception: broken,
    }
