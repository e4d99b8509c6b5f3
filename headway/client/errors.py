"""Errors of the clients, and explanations of connection errors.

    ClientError
    ├── InvalidArgument     also a SettingError and a ValueError
    ├── InvalidInput        also a TypeError and a ValueError
    ├── Unreachable         also a ConnectionError
    ├── TimedOut            also a TimeoutError
    └── ApiError            the service answered with an error; its subclasses are kinds of errors

Any other error of the service is a plain ApiError. Clients raise what remains after their retries.
"""

from __future__ import annotations

import ssl
from collections.abc import Sized

from headway import errors
from headway.errors import HeadwayError, SettingError


class ClientError(HeadwayError):
    """Root of all errors that a client raises for a call. `hopeless` is True if the same call will fail again. `input_index` is the
    index of the input of `infer_many` that failed."""

    hopeless: bool = False
    input_index: int | None = None
    _place: str = ""

    def __str__(self) -> str:
        return self._place + super().__str__()

    def locate(self, index: int, inputs: object) -> None:
        """Note that the input at `index` failed. The error's text then begins with that."""
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
    """The service cannot be reached, or the connection was lost before the answer."""


class TimedOut(ClientError, TimeoutError):
    """The caller's time is up. A task goes on; ask for its result again."""


class ApiError(ClientError):
    """The service answered with an error. `code`, such as `RATE_LIMITED`, is empty if the answer isn't Headway's. Operators can
    look up the `request_id`. `retry_after` is the seconds until a retry makes sense; None if unknown."""

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
    """The request is malformed; the message says where."""


class Unauthenticated(ApiError):
    """The service needs an API key or token, and got none or a bad one."""


class Forbidden(ApiError):
    """The key is good, but not for this."""


class NotFound(ApiError):
    """No such model, route, or task of this tenant."""


class Conflict(ApiError):
    """The idempotency key was used for another request."""


class PayloadTooLarge(ApiError):
    """The body or the input is larger than the service takes."""


class RejectedByModel(ApiError):
    """The model fails on this input, even when it runs alone."""


class RejectedByPolicy(ApiError):
    """A rule of the service refuses this input; the message says which."""


class RateLimited(ApiError):
    """The key is over its rate; `retry_after` says when there is room."""


class Overloaded(ApiError):
    """The service has no capacity in time: too much load for this tier, no healthy worker, or it is shutting down."""


class ModelFailed(ApiError):
    """The model failed for reasons of its own, and the service's retries are spent."""


class DeadlineExceeded(ApiError, TimeoutError):
    """A deadline of the service passed: in the queue, on the GPU, or in total; the message says which."""


BY_CODE: dict[str, type[ApiError]] = {
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
"""Class for each error code; any other code is a plain ApiError."""

BY_STATUS: dict[int, type[ApiError]] = {
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    413: PayloadTooLarge,
    429: RateLimited,
    503: Overloaded,
    504: DeadlineExceeded,
}
"""Class for the status of an answer that isn't Headway's, such as a proxy's."""

_NO_TLS = frozenset(("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"))
"""OpenSSL's reasons if the other side doesn't speak TLS. They depend on OpenSSL's version."""
_ASKED = ("ALERT_CERTIFICATE_REQUIRED", "ALERT_HANDSHAKE_FAILURE")
"""Ends of OpenSSL's reasons if the client must show a certificate. TLS 1.2 only has the second."""
_NOT_TAKEN = ("ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE_UNKNOWN", "ALERT_CERTIFICATE_EXPIRED")


def unreachable(url: str, exc: BaseException) -> Unreachable:
    """Return the error for a connection that could not be made."""
    hint = "Is the service running, and is this its address?"
    return _of_tls(url, exc) or Unreachable(f"no connection to {url}: {exc}. {hint}")


def lost(url: str, exc: BaseException) -> Unreachable:
    """Return the error for a connection that broke before the answer."""
    return _of_tls(url, exc) or Unreachable(f"the connection to {url} was lost: {exc}")


def tls_fault(exc: BaseException, authority: str, own: str) -> str:
    """Return why a TLS handshake would fail again; empty for any other error. Hints in it use `authority` and `own` as the names of
    the options for an authority to trust and for the caller's certificate."""
    cause: ssl.SSLError | None = None
    step: BaseException | None = exc
    while step is not None:  # The last SSLError is Python's own. Libraries may wrap it and lose its reason.
        cause = step if isinstance(step, ssl.SSLError) else cause
        step = step.__cause__ or step.__context__
    reason = (cause.reason or "") if cause is not None else ""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}. Name its authority by {authority}."
    if reason in _NO_TLS:
        return f"it does not speak TLS ({reason}). Is it http://?"
    if reason.endswith(_ASKED):
        return f"it asks its clients for a certificate. Name one by {own}."
    if reason.endswith(_NOT_TAKEN):
        return f"it does not take the certificate that it was shown ({reason}). Name another by {own}."
    return ""


def _of_tls(url: str, exc: BaseException) -> Unreachable | None:
    """Return the error for a handshake that would fail again; None for any other error."""
    why = tls_fault(exc, "ssl_context", "ssl_context")
    if not why:
        return None
    error = Unreachable(f"no connection to {url}: {why}")
    error.hopeless = True
    return error
