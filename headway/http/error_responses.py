"""Error responses of ordinary routes, under the request's own id and in the form of its path's API."""

from __future__ import annotations

from headway import errors
from headway.http.problem import encode_problem
from headway.http.requests import Request, RouteAnswer
from headway.http.server.framing import EncodeError

UNFORESEEN = "an unexpected fault of the server; its log says more under this request's id"
"""Message that a client reads when the server raised an unforeseen exception."""


def refusal(
    id: str,
    code: str,
    message: str,
    retry_after: float | None = None,
    reason: str = "",
    encode: EncodeError = encode_problem,
) -> RouteAnswer:
    """Answer to a request that is refused.

    Arguments:
        id: the request's id as clients see it, `req_…`.
        code: a code of `headway.errors`.
        message: what is wrong, for the client to read.
        retry_after: seconds after which a retry makes sense; None when it does not, or is not known.
        reason: short label for metrics of why the request is refused.
        encode: encodes the error.
    """
    fields, body = encode(code, message, id, retry_after, reason)
    return RouteAnswer(body, errors.STATUS[code], fields)


def refuse(
    request: Request, code: str, message: str, retry_after: float | None = None, reason: str = ""
) -> RouteAnswer:
    """Answer to `request`, which is refused; see `refusal`."""
    return refusal(request.id, code, message, retry_after, reason, request.encode_error)
