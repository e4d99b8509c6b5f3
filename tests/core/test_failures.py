"""The exact text of failures, which clients read and both brokers use, and excerpts of strings from clients."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import errors
from headway.core import failures
from headway.core.admission import Refused
from headway.core.excerpt import MOST_CHARS, excerpt
from headway.core.ratelimit import Over
from headway.core.retry import BLAMED
from headway.model import BatchFailure, Cause, Failure, ItemResult, Limit

RAISED = BatchFailure(Cause.RAISED, "KeyError: 'mine'", "gpu-0")
FULL = "shed: this tier's share of the queue is full"
TOO_LONG = "the queue is too long to answer within the deadline"
SCARCE = "shed: the broker's memory is nearly full"
HELD = "shed: this tier is limited to what the fleet can handle"
BURST = "shed: 30 inputs in one request, but this tier is currently limited to 12 at a time; send fewer"
NO_MODEL = "no model named 'x' is served here; available: a, b"
NOT_FOR = "this credential is not for the model 'x', only for: a, b"
IN_FLIGHT = "a request with this id is in flight; use a new id or, if it is a task, fetch its result"
MISUSED = "this Idempotency-Key, or this id of a task, was used for another request; use a new one for each request"
NO_TASK = "no such task: unknown, expired, cancelled, or not yours"
TOO_LARGE = "the output of 12.3 MB is too large to be kept for later; send a request that waits for it"
NO_WORKER = "no healthy worker came up within 250 ms"
TOTAL = "the total deadline passed after 1500 ms and {}"
HUNG = "the GPU deadline passed: the model was too slow, and after 4010 ms and 1 failed run no time is left for another"
WAITED = "{}: waited 1500 ms for a worker ({}, or the request's own time-out if that is shorter)"
QUEUE = WAITED.format("the queue deadline passed", "--queue-timeout-ms")
NO_RUN = WAITED.format("no run would end by the total deadline", "--request-timeout-ms")
SPENT = "{}; the retry budget is spent"
NO_OUTPUT = "the model returned no output for this input"
CULPRIT = "the model failed on this input when it ran alone; it will not be run again for 3 minutes"


@pytest.mark.parametrize(
    ("failure", "code", "message", "retry_after", "reason"),
    [
        (failures.refusal(Refused(2.5, True)), errors.SHED, FULL, 2.5, "shed"),
        (failures.refusal(Refused(2.5, False)), errors.SERVICE_OVERLOADED, TOO_LONG, 2.5, "overloaded"),
        (failures.scarcity(3.0), errors.SCARCE, SCARCE, 3.0, "memory"),
        (failures.over_capacity(4.0), errors.SHED, HELD, 4.0, "capacity"),
        (failures.over_burst(30, 12.7, 2.0), errors.SHED, BURST, 2.0, "capacity"),
        (failures.no_model("x", ["b", "a"]), errors.NOT_FOUND, NO_MODEL, None, ""),
        (failures.no_model_for("x", ["b", "a"]), errors.FORBIDDEN, NOT_FOR, None, ""),
        (failures.conflict(), errors.IDEMPOTENCY_CONFLICT, IN_FLIGHT, None, "conflict"),
        (failures.misuse(), errors.IDEMPOTENCY_MISUSE, MISUSED, None, "conflict"),
        (failures.no_task(), errors.NOT_FOUND, NO_TASK, None, ""),
        (failures.cancelled(), errors.NOT_FOUND, NO_TASK, None, failures.CANCELLED),
        (failures.too_large(12_340_000), errors.PAYLOAD_TOO_LARGE, TOO_LARGE, None, "kept"),
        (failures.lateness(0.25, 3, 0, True), errors.NO_WORKERS, NO_WORKER, 1.0, "no_workers"),
        (failures.lateness(1.5, 1, 1, True), errors.DEADLINE_EXCEEDED, TOTAL.format("1 failed run"), None, "total"),
        (failures.lateness(1.5, 2, 1, True), errors.DEADLINE_EXCEEDED, TOTAL.format("2 failed runs"), None, "total"),
        (failures.lateness(4.01, 1, 0, True, hung=True), errors.DEADLINE_EXCEEDED, HUNG, None, "gpu"),
        (failures.lateness(4.01, 1, 1, True, hung=True), errors.DEADLINE_EXCEEDED, HUNG, None, "gpu"),
        (failures.lateness(1.5, 0, 1, True), errors.DEADLINE_EXCEEDED, QUEUE, None, "queue"),
        (failures.lateness(1.5, 0, 1, False), errors.DEADLINE_EXCEEDED, NO_RUN, None, "queue"),
        (failures.spent(RAISED, 1), errors.BACKEND_ERROR, SPENT.format("KeyError: 'mine'"), None, "raised"),
        (failures.spent(RAISED, 2), errors.BACKEND_ERROR, SPENT.format("the batch failed (raised)"), None, "raised"),
        (failures.item_failure(ItemResult(None, "too long")), errors.REJECTED_BY_MODEL, "too long", None, "item"),
        (failures.item_failure(ItemResult(None, None, fault=True)), errors.BACKEND_ERROR, NO_OUTPUT, None, "item"),
        (failures.known_culprit(), errors.REJECTED_BY_MODEL, CULPRIT, None, failures.CULPRIT),
    ],
)
def test_a_failure_says_what_is_wrong_when_to_come_back_and_what_counts(
    failure: Failure, code: str, message: str, retry_after: float | None, reason: str
) -> None:
    assert failure == Failure(code, message, retry_after, reason)


def test_names_of_clients_are_cut_short() -> None:
    assert len(failures.no_model("x" * 1_000_000, ["a"]).message) < 300
    assert len(failures.no_model_for("x" * 1_000_000, ["a"]).message) < 300


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("key", "this key"),
        ("user", "this user"),
        ("tier", "all users of this tier together"),
        ("of another kind", "this credential"),
    ],
)
def test_who_is_over_a_limit_hears_whose_it_is_and_when_to_come_back(name: str, whose: str) -> None:
    over = Over(Limit("id", name, 600.0, 20.0), 0.5)
    message = f"over the limit of 600 requests a minute for {whose}, 20 at once"
    assert failures.over(over) == Failure(errors.RATE_LIMITED, message, 0.5, "rate")
    polls = f"over 600 polls a minute for {whose}, 20 at once; poll less often, and a task with ?wait="
    assert failures.over_polls(over) == Failure(errors.RATE_LIMITED, polls, 0.5, "polls")


def test_figures_are_told_without_needless_digits_and_never_is_no_time_to_come_back() -> None:
    told = failures.over(Over(Limit("id", "key", 1.5, 2.5), math.inf))
    assert told.message == "over the limit of 1.5 requests a minute for this key, 2.5 at once"
    assert told.retry_after is None
    assert "of 100000.0 MB" in failures.too_large(10**11).message


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.LEASE_LOST])
def test_who_failed_alone_hears_why_and_is_blamed_only_for_what_inputs_do(cause: Cause) -> None:
    code = errors.REJECTED_BY_MODEL if cause in BLAMED else errors.BACKEND_ERROR
    assert failures.death(BatchFailure(cause, "it fell", "gpu-0")) == Failure(code, "it fell", None, cause.value)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (BatchFailure(Cause.REMOTE, "401 from secret-host", "gpu-0", "HTTP 401"), "HTTP 401"),
        (BatchFailure(Cause.LEASE_LOST, "no beat from host-9", "host-9"), "the worker did not report in time"),
        (BatchFailure(Cause.LEASE_LOST, "no beat from host-9", "host-9", "it is gone"), "it is gone"),
    ],
)
def test_what_operators_alone_may_read_is_kept_back(failure: BatchFailure, told: str) -> None:
    assert failures.death(failure).message == told


def test_a_culprit_that_is_known_hears_the_error_of_its_last_run() -> None:
    told = failures.known_culprit("ValueError: too long").message
    assert told.startswith(
        "the model failed on this input when it ran alone (ValueError: too long); it will not be run"
    )


@given(st.text() | st.text(min_size=1).map(lambda text: text * 50))
def test_an_excerpt_is_short_however_it_is_written(text: str) -> None:
    shown = excerpt(text)
    kept = shown.removesuffix("…") if shown != text else text
    assert text.startswith(kept)
    assert len(json.dumps(kept)) <= MOST_CHARS + 2
    assert len(repr(kept)) <= MOST_CHARS + 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("m", "m"),
        ("größer", "größer"),
        ("x" * MOST_CHARS, "x" * MOST_CHARS),
        ("x" * (MOST_CHARS + 1), "x" * MOST_CHARS + "…"),
        ("\x85" * 300_000, "\x85" * 33 + "…"),
        ("\U0001f600" * 17, "\U0001f600" * 16 + "…"),
        ('"' * 101, '"' * 100 + "…"),
    ],
)
def test_escapes_count_as_they_are_written(text: str, shown: str) -> None:
    assert excerpt(text) == shown
