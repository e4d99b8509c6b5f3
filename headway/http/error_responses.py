"""Error responses of ordinary routes, under the request's own id and in the form of its path's API."""

from __future__ import annotations

from headway import errors
from headway.errors import RequestError
from headway.http.problem import AnyError, EncodeError, encode_problem
from headway.http.requests import Request, RouteAnswer
from headway.model import Failure

UNFORESEEN = "an unexpected fault of the server; its log says more under this request's id"
"""Message that a client reads when the server raised an unforeseen exception."""


def refusal(id: str, error: AnyError, encode: EncodeError = encode_problem) -> RouteAnswer:
    """Answer to a request that is refused.

    Arguments:
        id: the request's id as clients see it, `req_…`.
        error: error that it is refused with.
        encode: encodes the error.
    """
    fields, body = encode(error, id)
    return RouteAnswer(body, errors.STATUS[error.code], fields)


def without_reason(error: RequestError) -> Failure:
    """Error as ordinary routes tell it whose handler raises it, without a label of its reason."""
    return Failure(error.code, error.message, error.retry_after)


def refuse(request: Request, error: AnyError) -> RouteAnswer:
    """Answer to `request`, which is refused; see `refusal`."""
    return refusal(request.id, error, request.encode_error)
