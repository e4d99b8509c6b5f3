"""Errors as HTTP answers: problem documents (RFC 9457), and errors in OpenAI's form for its routes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import msgspec

from headway import errors
from headway.errors import HOPELESS, LABEL, SHOWN, STATUS, TITLE, UNAUTHENTICATED, AnyError
from headway.model import Failure


class Problem(msgspec.Struct, gc=False):
    """A problem document: members of RFC 9457, then Headway's own."""

    type: str
    title: str
    status: int
    detail: str
    error: str
    message: str
    request_id: str
    retry_after_ms: int | msgspec.UnsetType = msgspec.UNSET


_encode = msgspec.json.Encoder().encode

Encoded = tuple[dict[str, str], bytes]  # Header fields (in ASCII, without the content length) and body.

EncodeError = Callable[[AnyError, str], Encoded]  # Encodes an error, given the public request id. Never raises.


def retry_seconds(error: AnyError) -> float | None:
    """Return how many seconds to wait before a retry, or None. The default is 1 for errors whose status invites a retry."""
    if error.retry_after is None and STATUS[error.code] in (429, 503):
        return 1.0
    return error.retry_after


def anchor(code: str) -> str:
    """Return the anchor of an error code on the /docs page."""
    return code.lower().replace("_", "-")


def problem(error: AnyError, shown: str) -> Problem:
    """Return the problem document for an error. `shown` is the public request id, `req_…`."""
    code, message = error.code, error.message
    document = Problem(
        type=f"/docs#{anchor(code)}",
        title=TITLE[code],
        status=STATUS[code],
        detail=message,
        error=SHOWN.get(code, code),
        message=message,
        request_id=shown,
    )
    seconds = retry_seconds(error)
    if seconds is not None:
        document.retry_after_ms = math.ceil(max(seconds, 0.0) * 1000)
    return document


def escaped(text: str) -> str:
    """Escape lone surrogates in a text."""
    return text.encode("utf-8", "backslashreplace").decode()


def problem_body(document: Problem) -> bytes:
    """Encode a problem document as JSON, with lone surrogates escaped."""
    try:
        return _encode(document)
    except UnicodeEncodeError:
        document.detail = document.message = escaped(document.message)
        return _encode(document)


def problem_header(error: AnyError) -> dict[str, str]:
    """Return the header fields of an error."""
    code = error.code
    fields = {"content-type": "application/problem+json"}
    seconds = retry_seconds(error)
    if seconds is not None and STATUS[code] in (429, 503):
        fields["retry-after"] = str(max(1, math.ceil(seconds)))
        fields["retry-after-ms"] = str(math.ceil(max(seconds, 0.0) * 1000))
    if code in HOPELESS:
        fields["x-should-retry"] = "false"
    if code == UNAUTHENTICATED:
        fields["www-authenticate"] = "Bearer"
    if LABEL.fullmatch(error.reason):
        fields["x-headway-dropped-reason"] = error.reason
    return fields


def encode_problem(error: AnyError, shown: str) -> Encoded:
    """Encode an error as a problem document; see EncodeError."""
    return problem_header(error), problem_body(problem(error, shown))


MODEL_NOT_FOUND = "model_not_found"
UNKNOWN_URL = "unknown_url"

_CODES = {  # OpenAI's codes. Other errors have Headway's code in lower case.
    errors.UNAUTHENTICATED: "invalid_api_key",
    errors.FORBIDDEN: "permission_denied",
    errors.NOT_FOUND: MODEL_NOT_FOUND,
    errors.RATE_LIMITED: "rate_limit_exceeded",
    errors.SHED: "rate_limit_exceeded",
    errors.SCARCE: "rate_limit_exceeded",
    errors.SERVICE_OVERLOADED: "server_is_overloaded",
    errors.NO_WORKERS: "server_is_overloaded",
    errors.DRAINING: "server_is_overloaded",
}

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_exceeded"}
_SPENT = frozenset((errors.BACKEND_ERROR, errors.DEADLINE_EXCEEDED))  # Clients should not retry these, despite 5xx.

_PARAM = re.compile(r"`\$\.(\w+)")


class _Error(msgspec.Struct, gc=False):
    message: str
    type: str
    param: str | None
    code: str


class _Body(msgspec.Struct, gc=False):
    error: _Error


def encode_openai_error(error: AnyError, shown: str, name: str = "") -> Encoded:
    """Encode an error in OpenAI's format; see EncodeError. `name` replaces the member `code`."""
    code, message = error.code, error.message
    fields = problem_header(error)
    fields["content-type"] = "application/json"
    if code in _SPENT:
        fields["x-should-retry"] = "false"
    status = errors.STATUS[code]
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    named = name or _CODES.get(code, errors.SHOWN.get(code, code).lower())
    match = _PARAM.search(message)
    param = "model" if named == MODEL_NOT_FOUND else match[1] if match else None
    return fields, msgspec.json.encode(_Body(_Error(escaped(message), kind, param, named)))


def encode_path_error(error: AnyError, shown: str) -> Encoded:
    """Encode an error on an ordinary route under OpenAI's paths. There, 404 means an unknown URL rather than an unknown model."""
    return encode_openai_error(error, shown, UNKNOWN_URL if error.code == errors.NOT_FOUND else "")


def encode_stray_error(error: AnyError, shown: str) -> Encoded:
    """Encode an error for a client whose base URL lacks `/v1`."""
    if error.code == errors.NOT_FOUND:
        hint = "set the client's base_url to one that ends in /v1, such as http://HOST:8000/v1"
        error = Failure(error.code, f"{error.message}; {hint}", error.retry_after, error.reason)
    return encode_path_error(error, shown)
