"""Errors of the clients.

    ClientError
    ├── InvalidArgument         an argument of a client or call is unusable (a SettingError and a ValueError)
    ├── InvalidInput            the input cannot be sent; nothing was (a TypeError and a ValueError)
    ├── Unreachable             no connection to the service, or it was lost before the answer (a ConnectionError)
    ├── TimedOut                the call's own time is up (a TimeoutError)
    └── ApiError                the service answered with an error: `status`, `code`, `request_id`, `retry_after`
        ├── BadRequest          the request is malformed
        ├── Unauthenticated     no API key, or a bad one
        ├── Forbidden           a good key that is not for this
        ├── NotFound            no such model or task
        ├── Conflict            the idempotency key was used for another request
        ├── PayloadTooLarge     the input is too large
        ├── RejectedByModel     the model fails on this input, even alone
        ├── RejectedByPolicy    a rule of the service refuses this input
        ├── RateLimited         over the rate of the key
        ├── Overloaded          no capacity in time: too much load, no worker, or shutting down
        ├── ModelFailed         the model failed for reasons of its own
        └── DeadlineExceeded    a deadline of the service passed (a TimeoutError)

Any other error of the service is a plain ApiError. Clients raise what remains after their retries.
"""

from __future__ import annotations

from collections.abc import Sized

from headway import errors
from headway.errors import HeadwayError, SettingError


class ClientError(HeadwayError):
    """Root of all errors that a client raises for a call.

    Attributes:
        hopeless: True if the same call will fail again.
        input_index: index of the input of `infer_many` that failed; None for other calls.
    """

    hopeless: bool = False
    input_index: int | None = None
    _place: str = ""

    def __str__(self) -> str:
        return self._place + super().__str__()

    def locate(self, index: int, inputs: object) -> None:
        """Note that the input at `index` failed; the error's text then begins with that."""
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
    """The service answered with an error.

    Arguments:
        message: what happened, in the service's words.
        status: HTTP status.
        code: error code, for example `RATE_LIMITED`; empty if the answer isn't Headway's.
        request_id: id of the request, for the operators; empty if the answer has none.
        retry_after: seconds until a retry makes sense; None if not known.
        hopeless: True if the service says that the same request will fail again.
    """

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
