"""All errors of Headway: one tree of classes, and one table from an error's code to its HTTP status.

    HeadwayError
    ├── SettingError            a setting is wrong: names setting, value, reason, mend (exit code 3)
    ├── TargetError             the target cannot be loaded or broke the rules when tried
    │   └── StartKilled         somebody else killed the worker process while it started
    ├── BrokerUnavailable       the broker cannot be reached, or does not answer in time
    ├── StoreUnavailable        the database of ledger or keys cannot be reached, or does not answer in time
    │   └── StoreCorrupted      what it holds makes no sense any more
    ├── BackendError            the black box failed on a whole batch
    │   ├── BatchRaised         user code raised
    │   ├── WorkerCrashed       the worker process died
    │   ├── BatchTimeout        no answer by the GPU deadline; the worker was killed
    │   ├── BadOutput           wrong number or shape of outputs
    │   ├── RemoteError         the remote API failed, its tries spent
    │   └── RemoteRefused       the remote API turned down what was in the batch
    └── RequestError            one request gets an error answer; knows its `code`
        ├── BadRequest  Unauthenticated  Forbidden  NotFound  Conflict  Unprocessable
        ├── PayloadTooLarge  HeadersTooLarge  RequestTimeout  MethodNotAllowed
        └── (anything that reaches the client as a `model.Failure`)

A failure that has to travel is a `model.Failure` with one of the codes below.
"""

from __future__ import annotations

from headway.model import Cause

BAD_REQUEST = "BAD_REQUEST"
UNAUTHENTICATED = "UNAUTHENTICATED"
FORBIDDEN = "FORBIDDEN"
NOT_FOUND = "NOT_FOUND"
METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
REQUEST_TIMEOUT = "REQUEST_TIMEOUT"
IDEMPOTENCY_CONFLICT = "IDEMPOTENCY_CONFLICT"
IDEMPOTENCY_MISUSE = "IDEMPOTENCY_MISUSE"
PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
HEADERS_TOO_LARGE = "HEADERS_TOO_LARGE"
REJECTED_BY_MODEL = "REJECTED_BY_MODEL"
RATE_LIMITED = "RATE_LIMITED"
SHED = "SHED"
INTERNAL = "INTERNAL"
BACKEND_ERROR = "BACKEND_ERROR"
SERVICE_OVERLOADED = "SERVICE_OVERLOADED"
NO_WORKERS = "NO_WORKERS"
DRAINING = "DRAINING"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
CANCELLED = "CANCELLED"
"""Code of a request whose client left, or that was cancelled. No client reads it; records have it."""

STATUS: dict[str, int] = {
    BAD_REQUEST: 400,
    UNAUTHENTICATED: 401,
    FORBIDDEN: 403,
    NOT_FOUND: 404,
    METHOD_NOT_ALLOWED: 405,
    REQUEST_TIMEOUT: 408,
    IDEMPOTENCY_CONFLICT: 409,
    IDEMPOTENCY_MISUSE: 422,
    PAYLOAD_TOO_LARGE: 413,
    HEADERS_TOO_LARGE: 431,
    REJECTED_BY_MODEL: 422,
    RATE_LIMITED: 429,
    SHED: 429,
    INTERNAL: 500,
    BACKEND_ERROR: 502,
    SERVICE_OVERLOADED: 503,
    NO_WORKERS: 503,
    DRAINING: 503,
    DEADLINE_EXCEEDED: 504,
}
"""HTTP status of each error code."""

SHOWN: dict[str, str] = {IDEMPOTENCY_MISUSE: IDEMPOTENCY_CONFLICT}
"""Codes that clients read in place of others. Two codes may look alike to clients, who tell them apart by the status.
"""

TITLE: dict[str, str] = {
    BAD_REQUEST: "The request is malformed",
    UNAUTHENTICATED: "No valid credential",
    FORBIDDEN: "Not allowed with this credential",
    NOT_FOUND: "No such thing here",
    METHOD_NOT_ALLOWED: "Not with this method",
    REQUEST_TIMEOUT: "The request took too long to arrive",
    IDEMPOTENCY_CONFLICT: "The idempotency key is in use",
    IDEMPOTENCY_MISUSE: "The idempotency key, or the id of a task, was used for another request",
    PAYLOAD_TOO_LARGE: "The body is too large",
    HEADERS_TOO_LARGE: "The header is too large",
    REJECTED_BY_MODEL: "The model fails on this input",
    RATE_LIMITED: "Over the rate limit",
    SHED: "Refused because of its tier at this load",
    INTERNAL: "A fault of the server",
    BACKEND_ERROR: "The model failed",
    SERVICE_OVERLOADED: "No capacity in time",
    NO_WORKERS: "No healthy worker",
    DRAINING: "Shutting down",
    DEADLINE_EXCEEDED: "Too late",
}
"""One short title for each error code, the `title` of its problem document."""


class HeadwayError(Exception):
    """Root of everything Headway raises on purpose."""


class SettingError(HeadwayError):
    """A setting that cannot be used. The text names the setting, its value, why it cannot be, and what to write
    instead.

    Arguments:
        setting: name of the setting as the user wrote it, for example `--max-batch-size`.
        value: value that it was set to.
        reason: why that value cannot be.
        hint: what to write instead.
    """

    def __init__(self, setting: str, value: object, reason: str, hint: str) -> None:
        super().__init__(f"{setting} = {value!r}: {reason}. {hint}")
        self.setting, self.value, self.reason, self.hint = setting, value, reason, hint


class TargetError(HeadwayError):
    """The target cannot be loaded, or broke the rules when it was tried."""


class StartKilled(TargetError):
    """A worker process that was killed from outside while it started, as by an operator or by the kernel for want of
    memory.
    """


class BrokerUnavailable(HeadwayError):
    """The broker cannot be reached, or does not answer in time.

    The call may have taken effect all the same. Every method of a broker can be repeated, so ask again.
    """


class StoreUnavailable(HeadwayError):
    """The database of ledger or keys cannot be reached, or does not answer in time."""


class StoreCorrupted(StoreUnavailable):
    """The database of ledger or keys is damaged. No answer of it can be relied on, not even "nothing has changed"."""


class BackendError(HeadwayError):
    """The black box failed on a whole batch.

    Arguments:
        message: what happened, for operators; it may hold what a worker wrote while it ran earlier batches.
        shown: part of the message that a client may read; all of it when left out.
    """

    cause = Cause.RAISED

    def __init__(self, message: str, shown: str = "") -> None:
        super().__init__(message)
        self.shown = shown or message


class BatchRaised(BackendError):
    """User code raised; the message carries its type and text."""


class WorkerCrashed(BackendError):
    """The worker process died while it held the batch."""

    cause = Cause.CRASHED


class WorkerAbsent(WorkerCrashed):
    """The worker process was gone before it could be given the batch, so the batch has not run."""


class BatchTimeout(BackendError):
    """The black box gave no answer by the GPU deadline, so the worker was killed."""

    cause = Cause.TIMEOUT


class BadOutput(BackendError):
    """The black box returned the wrong number of outputs, or something that is no list."""

    cause = Cause.BAD_OUTPUT


class RemoteError(BackendError):
    """The remote API failed and its tries are spent."""

    cause = Cause.REMOTE


class RemoteRefused(BackendError):
    """The remote API rejected an input of the batch, or all of them together."""

    cause = Cause.REFUSED


class RequestError(HeadwayError):
    """Error that one request is answered with.

    Arguments:
        message: text that the client reads.
        code: error code, which decides the HTTP status.
        retry_after: seconds after which a retry makes sense; None when it does not, or is not known.
        reason: short label for metrics of why the request is refused.
    """

    code = INTERNAL

    def __init__(
        self, message: str, *, code: str | None = None, retry_after: float | None = None, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.reason = reason
        if code is not None:
            self.code = code
        self.retry_after = retry_after

    @property
    def message(self) -> str:
        """Text that the client reads."""
        return str(self.args[0])


class BadRequest(RequestError):
    """The request is malformed: not JSON, not UTF-8, a wrong type, or a missing member."""

    code = BAD_REQUEST


class Unauthenticated(RequestError):
    """The request has no credential, or a bad one."""

    code = UNAUTHENTICATED


class Forbidden(RequestError):
    """The credential is good, but does not allow this."""

    code = FORBIDDEN


class NotFound(RequestError):
    """The model, task, dead letter or route does not exist."""

    code = NOT_FOUND


class PayloadTooLarge(RequestError):
    """The body is larger than the limit."""

    code = PAYLOAD_TOO_LARGE
