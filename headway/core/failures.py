"""Failures: messages that tell clients and operators why an entry got no output. They are the same for all brokers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec.structs import replace

from headway import errors
from headway.core.admission import Refused
from headway.core.excerpt import excerpt
from headway.core.ratelimit import Over
from headway.core.retry import BLAMED
from headway.core.suspects import APART_SECONDS, KNOWN_SECONDS
from headway.core.tensor_json import NoNumber
from headway.core.tensors import NoTensors
from headway.model import BatchFailure, Cause, Failure, ItemResult, Limit, Reply

CANCELLED = "cancelled"  # Reason label: the entry was cancelled.
POLICY = "policy"  # Reason label: the input policy refuses the input, or couldn't judge it.
CULPRIT = "culprit"  # Reason label: the input recently failed alone.
CROWDED = "crowded"  # Reason label: the output of a bulk line was dropped because its batch's outputs are too large.
LIST = "list"  # Reason label: the request has more inputs than can ever be answered in time.
BURST = "burst"  # Reason label: the request counts as more than a rate limit ever admits at a time.
UNHEARD = "the worker did not report in time"  # Message for clients about a batch whose lease was lost.


def error_of(failure: Failure) -> errors.RequestError:
    """Turn a failure into an exception."""
    return errors.RequestError(
        failure.message, code=failure.code, retry_after=failure.retry_after, reason=failure.reason
    )


def at_input(position: int, count: int, message: str) -> str:
    """Return a message about one of several inputs in a request. `position` starts at 0."""
    return f"input {position} of {count}, counted from 0: {message}"


def of_input(position: int, count: int, failure: Failure) -> Failure:
    """Return the failure of a request that fails because one of its inputs does; see `at_input`."""
    if count == 1:
        return failure
    return replace(failure, message=at_input(position, count, failure.message))


def refusal(refused: Refused) -> Failure:
    """Return a refusal: the deadline can't be met."""
    apart = f"this caller's inputs run apart for {APART_SECONDS:g} s after one failed, or after their outputs were too large for one batch"
    if refused.most:
        message = "this many inputs in one request cannot be answered within the deadline at the model's current pace"
        many = f"at most {refused.most} can; send fewer at a time"
        if refused.most < 0:
            many = f"a single batch takes longer. Allow more time; up to {-refused.most} at a time are tried anyway"
        return Failure(
            errors.PAYLOAD_TOO_LARGE, f"{message}{refused.apart * f' and while {apart}'}: {many}", None, LIST
        )
    if refused.apart:
        message = f"{apart}, and too many of them are waiting for this one to be answered within the deadline"
        return Failure(errors.SERVICE_OVERLOADED, message, refused.wait, "overloaded")
    if refused.tier_only:
        return Failure(errors.SHED, "shed: this tier's share of the queue is full", refused.wait, "shed")
    message = "the queue is too long to answer within the deadline"
    return Failure(errors.SERVICE_OVERLOADED, message, refused.wait, "overloaded")


def scarcity(wait: float) -> Failure:
    """Return a refusal: the broker's memory is nearly full."""
    return Failure(errors.SCARCE, "shed: the broker's memory is nearly full", wait, "memory")


def enough_bulk() -> Failure:
    """Return a refusal: enough bulk entries are waiting for empty seats."""
    return Failure(errors.SHED, "enough bulk entries are already waiting for empty seats", reason="bulk")


def over_capacity(wait: float) -> Failure:
    """Return a refusal: the lowest tier has used up the capacity that the other tiers leave."""
    return Failure(errors.SHED, "shed: this tier is limited to what the fleet can handle", wait, "capacity")


def over_burst(count: int, burst: float, wait: float) -> Failure:
    """Return a refusal: the request has more inputs than the lowest tier may send at a time."""
    message = (
        f"shed: {count} inputs in one request, but this tier is currently limited to {int(burst)} at a time; send fewer"
    )
    return Failure(errors.SHED, message, wait, "capacity")


def by_policy(rule: str) -> Failure:
    """Return a refusal: the named rule of the input policy refuses the input."""
    return Failure(errors.REJECTED_BY_POLICY, f"the input policy refuses this input: rule {rule!r}", None, POLICY)


def unjudged(rule: str, busy: bool) -> Failure:
    """Return a refusal: a rule's function gave no verdict or, if `busy`, couldn't be called in time."""
    if busy:
        message = f"the input policy cannot judge this input now: rule {rule!r}; try again later"
        return Failure(errors.SERVICE_OVERLOADED, message, 1.0, POLICY)
    message = f"the input policy could not judge this input: rule {rule!r}"
    return Failure(errors.REJECTED_BY_POLICY, message, None, POLICY)


def no_model(model: str, served: Iterable[str]) -> Failure:
    """Return a refusal: the model doesn't exist."""
    there = ", ".join(sorted(served)) or "none for you"
    return Failure(errors.NOT_FOUND, f"no model named {excerpt(model)!r} is served here; available: {there}")


def no_version(model: str, version: str, there: Iterable[str]) -> Failure:
    """Return a refusal: the model has no such version, or the version accepts no requests."""
    versions = ", ".join(sorted(there)) or "none yet"
    message = (
        f"the model {excerpt(model)!r} has no version {excerpt(version)!r} that takes requests; available: {versions}"
    )
    return Failure(errors.NOT_FOUND, message)


def model_unknown(model: str) -> Failure:
    """Return a refusal: the broker hasn't said for a while which models are served. `model` is empty if the request names none."""
    whether = f"the model {excerpt(model)!r} is served" if model else "there is a model for requests that name none"
    return Failure(errors.NO_WORKERS, f"it is not currently known whether {whether}; try again", 1.0, "no_workers")


def version_unknown(model: str, version: str) -> Failure:
    """Return the refusal for a version that may exist: the broker hasn't reported workers for a while, or lost its state."""
    message = (
        f"it is not currently known whether the model {excerpt(model)!r} has a version {excerpt(version)!r}; try again"
    )
    return Failure(errors.NO_WORKERS, message, 1.0, "no_workers")


def no_version_here(version: str) -> Failure:
    """Return a refusal: a version can't be chosen while the broker is unreachable and a fallback answers."""
    message = f"version {excerpt(version)!r} cannot be chosen while the queue is unreachable; try again later"
    return Failure(errors.NO_WORKERS, message, 1.0, "no_workers")


def no_fallback(model: str) -> str:
    """Return the message of a refusal: the broker is unreachable, and the gateway's fallback doesn't answer for the model."""
    return f"the queue is unreachable, and the model {excerpt(model)!r} has no fallback; try again later"


def no_default(served: Iterable[str]) -> Failure:
    """Return a refusal: the request names no model, and there are several."""
    there = ", ".join(sorted(served))
    message = (
        "the request names no model, and there is no default (which /api/inference needs, because its body cannot name a model); "
        f"name one of: {there}"
    )
    return Failure(errors.BAD_REQUEST, message)


def none_served_for(models: Iterable[str]) -> Failure:
    """Return a refusal: the request names no model, and none of the models that its caller may use is served."""
    only = ", ".join(sorted(models))
    message = f"the request names no model, and none of the models that this credential is for is served here; it is only for: {only}"
    return Failure(errors.FORBIDDEN, message)


def not_here(model: str) -> Failure:
    """Return a refusal: the broker has no queue for the model. A fallback may not have all models of the fleet."""
    return Failure(errors.NO_WORKERS, f"no worker runs the model {excerpt(model)!r} now", 1.0, "no_workers")


def not_loaded(model: str, rest: float) -> Failure:
    """Return a refusal: the model failed to load on every GPU, and is tried again in `rest` seconds."""
    message = (
        f"the model {excerpt(model)!r} failed to load, and is tried again in {rest:.0f} s; send the request again then. "
        "Its operator can find the reason with headway status"
    )
    return Failure(errors.NO_WORKERS, message, rest, "no_workers")


def at_zero(model: str, rest: float, overdue: float = 0.0) -> Failure:
    """Return a refusal: the model had no worker because nobody was using it. One is being started, and should be up in `rest`
    seconds. If its start takes longer than usual, `overdue` is how long it has taken so far."""
    begun = "one is being started" if not overdue else f"the one requested {overdue:.0f} s ago is overdue"
    message = (
        f"the model {excerpt(model)!r} had no worker, because nobody was using it, and {begun}; "
        f"it is expected in {math.ceil(rest)} s; send the request again then"
    )
    return Failure(errors.NO_WORKERS, message, rest, "no_workers")


def no_model_for(model: str, models: Iterable[str]) -> Failure:
    """Return a refusal: the caller may only use other models."""
    only = ", ".join(sorted(models))
    return Failure(errors.FORBIDDEN, f"this credential is not for the model {excerpt(model)!r}, only for: {only}")


def conflict() -> Failure:
    """Return a refusal: the request is already in flight. Its first submission gets the answer."""
    message = "a request with this id is in flight; use a new id or, if it is a task, fetch its result"
    return Failure(errors.IDEMPOTENCY_CONFLICT, message, None, "conflict")


def over(excess: Over) -> Failure:
    """Return a refusal: a rate limit is exceeded."""
    limit, whose = excess.limit, _WHOSE.get(excess.limit.name, "this credential")
    what = f"requests a minute to the model {excerpt(limit.model)!r}" if limit.model else "requests a minute"
    rate, burst, count = limit.rate * limit.counting, limit.burst * limit.counting, limit.counting
    message = f"over the limit of {rate:g} {what} for {whose}, {burst:g} at once"
    if count > 1:
        message += f"; {count} inputs count as {count} requests"
    wait = excess.retry_after if math.isfinite(excess.retry_after) else None
    return Failure(errors.RATE_LIMITED, message, wait, "rate")


def never_within(limit: Limit, count: int) -> Failure:
    """Return a refusal: `count` inputs are more than a rate limit ever admits at a time."""
    whose = _WHOSE.get(limit.name, "this credential")
    what = f"{whose} and the model {excerpt(limit.model)!r}" if limit.model else whose
    fit = f"only {max(limit.burst, 1.0):g} fit into the rate limit at once for {what}"
    return Failure(errors.PAYLOAD_TOO_LARGE, f"{count} inputs count as {count} requests, and {fit}", None, BURST)


def over_polls(excess: Over) -> Failure:
    """Return the refusal of a poll: its caller polls tasks or models too often."""
    limit, whose = excess.limit, _WHOSE.get(excess.limit.name, "this credential")
    message = f"over {limit.rate:g} polls a minute for {whose}, {limit.burst:g} at once; poll less often, and a task with ?wait="
    return Failure(errors.RATE_LIMITED, message, excess.retry_after, "polls")


def misuse() -> Failure:
    """Return a refusal: the idempotency key or the task's id was used for another request."""
    message = "this Idempotency-Key, or this id of a task, was used for another request; use a new one for each request"
    return Failure(errors.IDEMPOTENCY_MISUSE, message, None, "conflict")


def no_task() -> Failure:
    """Return the failure of a poll: the task doesn't exist."""
    return Failure(errors.NOT_FOUND, "no such task: unknown, expired, cancelled, or not yours", None, "")


def too_large(bytes: int) -> Failure:
    """Return the outcome of a task whose output of `bytes` bytes is too large to keep."""
    message = f"the output of {bytes / 1e6:.1f} MB is too large to be kept for later; send a request that waits for it"
    return Failure(errors.PAYLOAD_TOO_LARGE, message, None, "kept")


def failure_of(reply: Reply) -> Failure:
    """Return the failure of a reply without an output."""
    return reply.failure or Failure(errors.INTERNAL, "the reply is neither an output nor a failure")


def no_text() -> Failure:
    """Return the failure of a request whose output can't be sent because it isn't valid text."""
    return Failure(errors.BACKEND_ERROR, "the model's output contains a lone surrogate, which is not text")


def no_json(exc: NoTensors, where: str) -> errors.RequestError:
    """Return the error for an output that JSON can't represent. NaN is the model's fault; other outputs need the binary form."""
    if isinstance(exc, NoNumber):
        return errors.RequestError(f"{exc}{where}", code=errors.BACKEND_ERROR, reason="output")
    return errors.BadRequest(f"{exc}{where}")


def left() -> Failure:
    """Return the failure that the ledger records for a request whose client disconnected."""
    return Failure(errors.CANCELLED, "the client left")


def cancelled() -> Failure:
    """Return the failure of an entry that was cancelled at a gateway other than its own."""
    return Failure(errors.NOT_FOUND, no_task().message, None, CANCELLED)


def unread(timeout: float) -> Failure:
    """Return the failure of a request whose long body couldn't be read within `timeout` seconds."""
    message = f"the total deadline of {timeout * 1000:.0f} ms passed while the body waited for its turn to be read"
    return Failure(errors.DEADLINE_EXCEEDED, message, None, "total")


def lateness(waited: float, attempts: int, slots: int, queue_due: bool, hung: bool = False) -> Failure:
    """Return the failure of an entry that is too late after `waited` seconds and `attempts` runs. If `queue_due`, it has missed its
    queue deadline. If `hung`, its last run was stopped at the GPU deadline."""
    time = f"{waited * 1000:.0f} ms"
    runs = "1 failed run" if attempts == 1 else f"{attempts} failed runs"
    if hung and attempts:
        message = (
            f"the GPU deadline passed: the model was too slow, and after {time} and {runs} no time is left for another"
        )
        return Failure(errors.DEADLINE_EXCEEDED, message, None, "gpu")
    if slots == 0:
        return Failure(errors.NO_WORKERS, f"no healthy worker came up within {time}", 1.0, "no_workers")
    if attempts:
        message = f"the total deadline passed after {time} and {runs}"
        return Failure(errors.DEADLINE_EXCEEDED, message, None, "total")
    which, setting = "the queue deadline passed", "--queue-timeout-ms"
    if not queue_due:
        which, setting = "no run would end by the total deadline", "--request-timeout-ms"
    message = f"{which}: waited {time} for a worker ({setting}, or the request's own time-out if that is shorter)"
    return Failure(errors.DEADLINE_EXCEEDED, message, None, "queue")


def death(failure: BatchFailure) -> Failure:
    """Return the failure of an entry that has failed alone for the last time."""
    code = errors.REJECTED_BY_MODEL if failure.cause in BLAMED else errors.BACKEND_ERROR
    return Failure(code, shown(failure), None, failure.cause.value)


def spent(failure: BatchFailure, size: int) -> Failure:
    """Return the failure of an entry without retries left. The batch's message is left out: it may be about another input."""
    what = shown(failure) if size == 1 else f"the batch failed ({failure.cause.value})"
    return Failure(errors.BACKEND_ERROR, f"{what}; the retry budget is spent", reason=failure.cause.value)


def lost_input() -> Failure:
    """Return the failure of an entry whose input the broker has lost, for example in a failover."""
    message = "the queue lost this input before it could run; send it again"
    return Failure(errors.SERVICE_OVERLOADED, message, 0.1, "broker")


def lost_output() -> Failure:
    """Return the failure of an entry whose output the broker has lost."""
    message = "the model answered, but the queue lost its output; send the request again"
    return Failure(errors.SERVICE_OVERLOADED, message, 0.1, "broker")


def item_failure(item: ItemResult) -> Failure:
    """Return the failure of an input for which the target returned no output."""
    if item.elsewhere:
        return Failure(errors.NO_WORKERS, item.error or "no worker runs this version of the model", 1.0, "no_workers")
    if item.crowded:
        return Failure(errors.SHED, "together, the outputs of the lines in its batch are too large", None, CROWDED)
    code = errors.BACKEND_ERROR if item.fault else errors.REJECTED_BY_MODEL
    return Failure(code, item.error or "the model returned no output for this input", None, "item")


def known_culprit(error: str = "") -> Failure:
    """Return a refusal: an identical input recently failed alone, with this error."""
    message = (
        f"the model failed on this input when it ran alone{error and f' ({error})'}; "
        f"it will not be run again for {KNOWN_SECONDS / 60:g} minutes"
    )
    return Failure(errors.REJECTED_BY_MODEL, message, None, CULPRIT)


def shown(failure: BatchFailure) -> str:
    """Return the part of a failure's message that clients may read. It never names a worker's host."""
    if failure.cause is Cause.LEASE_LOST and not failure.shown:
        return UNHEARD
    return failure.shown or failure.message


_WHOSE = {"key": "this key", "user": "this user", "tier": "all users of this tier together"}
