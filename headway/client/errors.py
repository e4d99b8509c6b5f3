"""Errors of the clients, and explanations of connection errors.

    ClientError
    ├── InvalidArgument     also a SettingError and a ValueError
    ├── InvalidInput        also a TypeError and a ValueError
    ├── Unreachable         also a ConnectionError
    ├── TimedOut            also a TimeoutError
    └── ApiError            the service answered with an error; subclasses: see below

The service's other errors are plain ApiErrors. Clients raise an error only once they won't retry."""

from __future__ import annotations

import ssl
from collections.abc import Sized

from headway import errors
from headway.errors import HeadwayError, SettingError


class ClientError(HeadwayError):
    """Base class of all errors of a call. `hopeless` is True if a retry would fail, too. `infer_many` sets `input_index`."""

    hopeless: bool = False
    input_index: int | None = None
    _place: str = ""

    def __str__(self) -> str:
        return self._place + super().__str__()

    def locate(self, index: int, inputs: object) -> None:
        """Add the index of the failed input to the error and to its message."""
        self.input_index = index
        count = f" of {len(inputs)}" if isinstance(inputs, Sized) else ""
        self._place = f"input {index}{count}, counted from 0: "


class InvalidArgument(ClientError, SettingError, ValueError):
    """An argument of a client or call is unusable; nothing was sent."""

    hopeless = True


class InvalidInput(ClientError, TypeError, ValueError):
    """The input or parameters are not JSON, an array cannot be sent, or the inputs are not a list; nothing was sent."""

    hopeless = True


class Unreachable(ClientError, ConnectionError):
    """The service is unreachable, or the connection was lost before the answer."""


class TimedOut(ClientError, TimeoutError):
    """The caller's time is up. A task continues, so you can ask for its result again."""


class ApiError(ClientError):
    """The service answered with an error. `code`, such as `RATE_LIMITED`, is empty if the answer isn't Headway's. Operators can
    find the `request_id` in the log. `retry_after` is the number of seconds to wait before a retry; None if unknown."""

    def __init__(
        self, message: str, *, status: int = 0, code: str = "", request_id: str = "", retry_after: float | None = None,
        hopeless: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message, self.status, self.code = message, status, code
        self.request_id, self.retry_after, self.hopeless = request_id, retry_after, hopeless

    def __str__(self) -> str:
        facts = filter(None, (f"{self.status} {self.code}".strip(), self.request_id))
        return f"{self._place}{self.message} ({', '.join(facts)})"


class BadRequest(ApiError):
    """The request is malformed. The message says where."""


class Unauthenticated(ApiError):
    """The service requires an API key or token, but got none or an invalid one."""


class Forbidden(ApiError):
    """The key is valid, but does not allow this request."""


class NotFound(ApiError):
    """The model, the route, or the tenant's task does not exist."""


class Conflict(ApiError):
    """The idempotency key was used for another request."""


class PayloadTooLarge(ApiError):
    """The body or the input is larger than the service accepts."""


class RejectedByModel(ApiError):
    """The model fails on this input, even when it runs alone."""


class RejectedByPolicy(ApiError):
    """A rule of the service refuses this input. The message names the rule."""


class RateLimited(ApiError):
    """The key has exceeded its rate limit. `retry_after` says when to retry."""


class Overloaded(ApiError):
    """The service cannot answer in time: the load is too high for this tier, no worker is healthy, or it is shutting down."""


class ModelFailed(ApiError):
    """The model failed, but not because of the input, and the service has used up its retries."""


class DeadlineExceeded(ApiError, TimeoutError):
    """A deadline of the service passed: in the queue, on the GPU, or in total. The message says which."""


BY_CODE: dict[str, type[ApiError]] = {  # All other codes are plain ApiErrors.
    errors.BAD_REQUEST: BadRequest,
    errors.UNAUTHENTICATED: Unauthenticated,
    errors.FORBIDDEN: Forbidden,
    errors.NOT_FOUND: NotFound,
    errors.IDEMPOTENCY_CONFLICT: Conflict,
    errors.PAYLOAD_TOO_LARGE: PayloadTooLarge,
    errors.REJECTED_BY_MODEL: RejectedByModel,
    errors.REJECTED_BY_POLICY: RejectedByPolicy,
    errors.RATE_LIMITED: RateLimited,
    errors.SHED: Overloaded,
    errors.SERVICE_OVERLOADED: Overloaded,
    errors.NO_WORKERS: Overloaded,
    errors.DRAINING: Overloaded,
    errors.BACKEND_ERROR: ModelFailed,
    errors.DEADLINE_EXCEEDED: DeadlineExceeded,
}

BY_STATUS: dict[int, type[ApiError]] = {  # For answers that aren't Headway's, such as a proxy's.
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    413: PayloadTooLarge,
    429: RateLimited,
    503: Overloaded,
    504: DeadlineExceeded,
}

_NO_TLS = frozenset(("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"))
"""OpenSSL's reasons if the server doesn't use TLS; they depend on its version. The next two tuples are ends of reasons."""
_ASKED = ("ALERT_CERTIFICATE_REQUIRED", "ALERT_HANDSHAKE_FAILURE")  # No certificate sent. TLS 1.2 has only the second.
_NOT_TAKEN = ("ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE_UNKNOWN", "ALERT_CERTIFICATE_EXPIRED")


def unreachable(url: str, exc: BaseException) -> Unreachable:
    """Return the error for a connection that could not be made."""
    hint = "Is the service running, and is this its address?"
    return _of_tls(url, exc) or Unreachable(f"no connection to {url}: {exc}. {hint}")


def lost(url: str, exc: BaseException) -> Unreachable:
    """Return the error for a connection that broke before the answer."""
    return _of_tls(url, exc) or Unreachable(f"the connection to {url} was lost: {exc}")


def tls_fault(exc: BaseException, authority: str, own: str) -> str:
    """Explain a TLS error that no retry can fix; "" for any other error. The text suggests the option `authority` or `own`."""
    cause: ssl.SSLError | None = None
    step: BaseException | None = exc
    while step is not None:  # The last SSLError is Python's own. Libraries may wrap it and omit its reason.
        cause = step if isinstance(step, ssl.SSLError) else cause
        step = step.__cause__ or step.__context__
    reason = (cause.reason or "") if cause is not None else ""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}. Name its authority with {authority}."
    if reason in _NO_TLS:
        return f"it does not speak TLS ({reason}). Is it http://?"
    if reason.endswith(_ASKED):
        return f"it requires a client certificate. Name one with {own}."
    if reason.endswith(_NOT_TAKEN):
        return f"it does not accept the client certificate ({reason}). Name another with {own}."
    return ""


def _of_tls(url: str, exc: BaseException) -> Unreachable | None:
    fault = tls_fault(exc, "ssl_context", "ssl_context")
    if not fault:
        return None
    error = Unreachable(f"no connection to {url}: {fault}")
    error.hopeless = True
    return error
