"""All of Headway's errors: a tree of classes, and a table of the codes that clients may receive.

    HeadwayError
    ├── SettingError            a setting is wrong: setting, value, reason and hint (exit code 3)
    ├── TargetError             the target can't be loaded, or broke the rules when tried
    │   └── StartKilled         the worker process was killed from outside while it was starting
    ├── BrokerUnavailable       the broker is unreachable, or doesn't answer in time
    ├── StoreUnavailable        the ledger or key database is unreachable, or doesn't answer in time
    │   ├── StoreCorrupted      the database is damaged
    │   └── FolderUnavailable   the bulk job folder is missing, or its disk is full or failing
    │       └── FileLost        a file in the folder is missing
    ├── FailoverAborted         a failover of the broker didn't begin, or was abandoned
    ├── BackendError            the target failed on an entire batch
    │   ├── BatchRaised         user code raised an exception
    │   ├── WorkerCrashed       the worker process died
    │   │   └── WorkerAbsent    the worker process was gone before the batch
    │   ├── BatchTimeout        no answer by the GPU deadline; the worker was killed
    │   ├── BadOutput           wrong number or shape of outputs
    │   ├── RemoteError         the remote API failed, and no retries are left
    │   │   ├── RemoteAbsent    no connection could be made, so nothing was sent
    │   │   └── RemoteExhausted the remote API has no capacity for the batch
    │   └── RemoteRefused       the remote API rejected an input of the batch, or all of them
    └── RequestError            one request is answered with an error; has a `code`
        ├── BadRequest          not JSON, not UTF-8, a wrong type, a missing member
        ├── Unauthenticated     no credential, or an invalid one
        ├── Forbidden           a valid credential that doesn't allow this
        ├── NotFound            no such model, task, dead letter or route
        └── PayloadTooLarge     the body is larger than the limit

A failure that is passed between processes is a `model.Failure` with one of the codes below. To add a code, add one entry here:
status, title, header fields, API contract and ledger follow from it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from headway.model import Cause, Failure


class Code(msgspec.Struct, frozen=True):
    """One error code."""

    status: int  # HTTP status.
    title: str  # One short line: the `title` of its problem document.
    when: str  # One sentence for the API contract that says when clients get this code.
    hopeless: bool = False  # True if the same request will fail again.
    refusal: bool = False  # True if the request wasn't admitted. The ledger may count several in one record.
    native: bool = True  # True if the native routes can return it.
    shown: str = ""  # Code that clients see instead. Only status and title tell the two apart.


CODES: dict[str, Code] = {}  # Every error code that a client may receive, by name. The entries follow.


def _code(
    name: str, status: int, title: str, when: str, *, hopeless: bool = False, refusal: bool = False, native: bool = True,
    shown: str = "",
) -> str:  # fmt: skip
    CODES[name] = Code(status, title, when, hopeless, refusal, native, shown)
    return name


# fmt: off
BAD_REQUEST = _code("BAD_REQUEST", 400, "The request is malformed",
    "The request is not valid HTTP, JSON or UTF-8, or a member is missing or has the wrong type. The message says which, and what "
    "was expected.", hopeless=True, refusal=True)
UNAUTHENTICATED = _code("UNAUTHENTICATED", 401, "No valid credential",
    "A key is required, but none or an invalid one was sent.", hopeless=True, refusal=True)
FORBIDDEN = _code("FORBIDDEN", 403, "Not allowed with this credential", "The key is valid, but does not allow this.", hopeless=True, refusal=True)
NOT_FOUND = _code("NOT_FOUND", 404, "Not found",
    "There is no such model, task or route. Tasks of other tenants are not found either.", hopeless=True, refusal=True)
METHOD_NOT_ALLOWED = _code("METHOD_NOT_ALLOWED", 405, "Method not allowed",
    "The route exists, but does not support this method. The Allow header lists the methods that it supports.", hopeless=True, native=False)
REQUEST_TIMEOUT = _code("REQUEST_TIMEOUT", 408, "The request took too long to arrive", "The header or body did not arrive in time.")
IDEMPOTENCY_CONFLICT = _code("IDEMPOTENCY_CONFLICT", 409, "The idempotency key is in use",
    "A request with the same id is in flight.", refusal=True)
PAYLOAD_TOO_LARGE = _code("PAYLOAD_TOO_LARGE", 413, "The request is too large",
    "The body is larger than the limit and was not read, it has too many inputs, or their outputs are too large in total.", hopeless=True, refusal=True)
HEADERS_TOO_LARGE = _code("HEADERS_TOO_LARGE", 431, "The header is too large",
    "The request line and header are larger than the limit.", hopeless=True)
REJECTED_BY_MODEL = _code("REJECTED_BY_MODEL", 422, "The model fails on this input",
    "The model fails on this input, even when it runs alone in its batch.", hopeless=True)
REJECTED_BY_POLICY = _code("REJECTED_BY_POLICY", 422, "The input policy refuses this input",
    "A rule of the input policy refuses the input. The message names the rule.", hopeless=True, refusal=True)
IDEMPOTENCY_MISUSE = _code("IDEMPOTENCY_MISUSE", 422, "The idempotency key, or the id of a task, was used for another request",
    "The Idempotency-Key, or the X-Request-Id of a task, was used for a request with another body or model.", hopeless=True, shown=IDEMPOTENCY_CONFLICT)
RATE_LIMITED = _code("RATE_LIMITED", 429, "Over the rate limit",
    "The key has used up its quota. Retry-After says when requests are accepted again.", refusal=True)
SHED = _code("SHED", 429, "Refused because of its tier at this load", "Requests of this tier are refused at this load.", refusal=True)
SCARCE = _code("SCARCE", 429, "Refused while the memory of the queue is nearly full",
    "The memory for waiting requests is nearly full. Requests of all tiers are refused.", refusal=True, shown=SHED)
NOT_IMPLEMENTED = _code("NOT_IMPLEMENTED", 501, "Not implemented",
    "The request belongs to another server's API, but this server does not implement it. An example is loading a model.", hopeless=True, native=False)
INTERNAL = _code("INTERNAL", 500, "Internal server error", "The server has a fault.", native=False)
BACKEND_ERROR = _code("BACKEND_ERROR", 502, "The model failed", "The model failed for reasons unrelated to the input, and no retries are left.")
SERVICE_OVERLOADED = _code("SERVICE_OVERLOADED", 503, "No capacity in time",
    "The request could not be answered in time, or too many connections are open. Retry-After is computed from how fast the queue "
    "drains.", refusal=True)
NO_WORKERS = _code("NO_WORKERS", 503, "No healthy worker", "No worker is healthy.", refusal=True)
DRAINING = _code("DRAINING", 503, "Shutting down", "This process is shutting down. Another one may be serving.", refusal=True)
DEADLINE_EXCEEDED = _code("DEADLINE_EXCEEDED", 504, "Deadline exceeded",
    "The deadline for the queue, for the GPU, or for the entire request has passed. The message says which.")
# fmt: on
CANCELLED = "CANCELLED"  # The request was cancelled, or its client disconnected. Appears in records only.

# The codes' members, by the name of the code, and the names of codes in which a certain member is True.
STATUS: dict[str, int] = {name: code.status for name, code in CODES.items()}
TITLE: dict[str, str] = {name: code.title for name, code in CODES.items()}
SHOWN: dict[str, str] = {name: code.shown for name, code in CODES.items() if code.shown}
HOPELESS = frozenset(name for name, code in CODES.items() if code.hopeless)
REFUSALS = frozenset(name for name, code in CODES.items() if code.refusal)


class HeadwayError(Exception):
    """Root of all exceptions that Headway raises on purpose."""


class SettingError(HeadwayError):
    """A setting has an unusable value. The message has the setting as the user wrote it, its value, the problem and a remedy."""

    def __init__(self, setting: str, value: object, reason: str, hint: str) -> None:
        super().__init__(f"{setting} = {value!r}: {reason.rstrip('.')}. {hint}")
        self.setting, self.value, self.reason, self.hint = setting, value, reason, hint


class TargetError(HeadwayError):
    """The target can't be loaded, or broke the rules when it was tried. `trace` is a traceback of user code, for the log."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class StartKilled(TargetError):
    """A worker process was killed from outside while it was starting, for example by an operator or for lack of memory."""


class BrokerUnavailable(HeadwayError):
    """The broker is unreachable, or doesn't answer in time. The call may still have taken effect, but can be repeated safely."""


class StoreUnavailable(HeadwayError):
    """The ledger or key database is unreachable, or doesn't answer in time."""


class StoreCorrupted(StoreUnavailable):
    """The ledger or key database is damaged. None of its answers can be trusted, not even "nothing has changed"."""


class FolderUnavailable(StoreUnavailable):
    """The bulk job folder is missing, or its disk is full or failing."""


class FileLost(FolderUnavailable):
    """A file in the bulk job folder is missing, although the folder exists."""


class FailoverAborted(HeadwayError):
    """A failover of the broker's server didn't begin, or was abandoned. The message says why, and whether writes continue."""


class BackendError(HeadwayError):
    """The target failed on an entire batch. The message is for operators, because it may contain a worker's output from
    earlier batches. Clients see `shown`, by default the entire message. `trace` is a traceback of user code, for the log."""

    cause = Cause.RAISED

    def __init__(self, message: str, shown: str = "", trace: str = "") -> None:
        super().__init__(message)
        self.shown = shown or message
        self.trace = trace


class BatchRaised(BackendError):
    """User code raised an exception, whose type and text are in the message. If the batch was split into several calls, `places` has
    the positions of the inputs of the call that raised; empty means all inputs."""

    def __init__(self, message: str, shown: str = "", trace: str = "", places: Sequence[int] = ()) -> None:
        super().__init__(message, shown, trace=trace)
        self.places = tuple(places)


class WorkerCrashed(BackendError):
    """The worker process died while it was running the batch."""

    cause = Cause.CRASHED


class WorkerAbsent(WorkerCrashed):
    """The worker process was gone before it got the batch, so the batch has not run."""


class BatchTimeout(BackendError):
    """The target didn't return by the GPU deadline, so the worker was killed."""

    cause = Cause.TIMEOUT


class BadOutput(BackendError):
    """The target returned the wrong number of outputs, or something other than a list."""

    cause = Cause.BAD_OUTPUT


class RemoteError(BackendError):
    """The remote API failed, and all retries are used up."""

    cause = Cause.REMOTE


class RemoteAbsent(RemoteError):
    """No connection to the remote API could be made, so nothing was sent, and the batch has not run."""


class RemoteExhausted(RemoteError):
    """The remote API has no capacity for the batch. It is unknown whether that is temporary or the batch is too large."""


class RemoteRefused(BackendError):
    """The remote API rejected an input of the batch, or all of them together."""

    cause = Cause.REFUSED


class RequestError(HeadwayError):
    """One request is answered with an error. The message is for the client. `retry_after` is in seconds, or None if retrying is
    useless or the time is unknown. `reason` is a short metrics label."""

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
        return str(self.args[0])


class BadRequest(RequestError):
    """The request is malformed: not JSON, not UTF-8, a wrong type, or a missing member."""

    code = BAD_REQUEST


class Unauthenticated(RequestError):
    """The request has no credential, or an invalid one."""

    code = UNAUTHENTICATED


class Forbidden(RequestError):
    """The credential is valid, but doesn't allow this."""

    code = FORBIDDEN


class NotFound(RequestError):
    """The model, task, dead letter or route does not exist."""

    code = NOT_FOUND


class PayloadTooLarge(RequestError):
    """The body is larger than the limit."""

    code = PAYLOAD_TOO_LARGE


LABEL = re.compile(r"[a-z0-9_-]{1,40}")  # Metrics labels that clients may see, such as the reason for a refusal.
AnyError = RequestError | Failure  # Error in an answer, either of the request itself or of its entry.
UNFORESEEN = "unexpected server error; see the server's log for this request's id"  # After an unexpected exception.
