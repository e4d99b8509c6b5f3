"""Errors in OpenAI's form: an object `error` with `message`, `type`, `param` and `code`.

OpenAI's clients retry 408, 409, 429 and every 5xx twice, but obey `x-should-retry`. Failures that were already retried here,
or that used up the deadline, say `false`, because retries would triple an overload.
"""

from __future__ import annotations

import re

import msgspec

from headway import errors
from headway.errors import AnyError
from headway.http.problem import Encoded, escaped, problem_header
from headway.model import Failure

MODEL_NOT_FOUND = "model_not_found"
UNKNOWN_URL = "unknown_url"

_CODES = {
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
"""OpenAI's codes. Other errors have Headway's code in lower case."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_exceeded"}
_SPENT = frozenset((errors.BACKEND_ERROR, errors.DEADLINE_EXCEEDED))
"""Errors that a client should not retry."""

_PARAM = re.compile(r"`\$\.(\w+)")


class _Error(msgspec.Struct, gc=False):
    message: str
    type: str
    param: str | None
    code: str


class _Body(msgspec.Struct, gc=False):
    error: _Error


def encode_error(error: AnyError, shown: str, name: str = "") -> Encoded:
    """Encode an error; see `headway.http.problem.EncodeError`. `name` overrides its `code`."""
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
    """Encode an error of an ordinary route under OpenAI's paths, where 404 means an unknown URL, not an unknown model."""
    return encode_error(error, shown, UNKNOWN_URL if error.code == errors.NOT_FOUND else "")


def encode_stray_error(error: AnyError, shown: str) -> Encoded:
    """Encode an error for a client whose base URL lacks `/v1`."""
    if error.code == errors.NOT_FOUND:
        hint = "set the client's base_url to one that ends in /v1, such as http://HOST:8000/v1"
        error = Failure(error.code, f"{error.message}; {hint}", error.retry_after, error.reason)
    return encode_path_error(error, shown)
