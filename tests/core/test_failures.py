"""Failures, word for word: clients read them, and both brokers say them."""

from __future__ import annotations

import math

import pytest

from headway import errors
from headway.core import failures
from headway.core.admission import Refused
from headway.core.ratelimit import Over
from headway.core.retry import BLAMED
from headway.model import BatchFailure, Cause, Failure, ItemResult, Limit

LIMIT = Limit("key-7", "key", 600.0, 20.0)


def test_a_refusal_says_whether_the_tier_or_the_whole_is_full() -> None:
    assert failures.refusal(Refused(2.5, True)) == Failure(
        errors.SHED, "shed: this tier's share of the queue is full", 2.5, "shed"
    )
    assert failures.refusal(Refused(2.5, False)) == Failure(
        errors.SERVICE_OVERLOADED, "the queue is too long to answer within the deadline", 2.5, "overloaded"
    )


def test_who_is_shed_hears_what_is_short_and_when_to_come_back() -> None:
    assert failures.scarcity(3.0) == Failure(errors.SCARCE, "shed: the broker's memory is nearly full", 3.0, "memory")
    assert failures.over_capacity(4.0) == Failure(
        errors.SHED, "shed: this tier is held to what the fleet can carry", 4.0, "capacity"
    )


def test_who_asks_the_wrong_model_hears_of_the_right_ones_in_order() -> None:
    assert failures.no_model("x", ["b", "a"]) == Failure(
        errors.NOT_FOUND, "no model named 'x' is served here; there is: a, b"
    )
    assert len(failures.no_model("x" * 1_000_000, ["a"]).message) < 300
    assert len(failures.no_model_for("x" * 1_000_000, ["a"]).message) < 300
    assert failures.no_model_for("x", ["b", "a"]) == Failure(
        errors.FORBIDDEN, "this credential is not for the model 'x', only for: a, b"
    )


def test_an_id_or_a_key_that_was_used_before() -> None:
    assert failures.conflict() == Failure(
        errors.IDEMPOTENCY_CONFLICT,
        "a request with this id is in flight; use a new id or, if it is a task, ask for its result",
        None,
        "conflict",
    )
    assert failures.misuse() == Failure(
        errors.IDEMPOTENCY_MISUSE,
        "this Idempotency-Key, or this id of a task, was used for another request; use a new one for each request",
        None,
        "conflict",
    )


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
    assert failures.over(over) == Failure(
        errors.RATE_LIMITED, f"over the limit of 600 requests a minute for {whose}, 20 at once", 0.5, "rate"
    )
    assert failures.over_polls(over) == Failure(
        errors.RATE_LIMITED,
        f"over 600 polls a minute for {whose}, 20 at once; ask less often, for a task with ?wait=",
        0.5,
        "polls",
    )


def test_figures_are_told_without_needless_digits() -> None:
    told = failures.over(Over(Limit("id", "key", 1.5, 2.5), 1.0)).message
    assert told == "over the limit of 1.5 requests a minute for this key, 2.5 at once"


def test_nobody_is_told_to_come_back_never() -> None:
    assert failures.over(Over(LIMIT, math.inf)).retry_after is None


def test_a_task_that_is_gone_and_one_that_was_cancelled_elsewhere_read_alike() -> None:
    message = "no such task: unknown, expired, cancelled, or not yours"
    assert failures.no_task() == Failure(errors.NOT_FOUND, message, None, "")
    assert failures.cancelled() == Failure(errors.NOT_FOUND, message, None, failures.CANCELLED)


def test_an_output_that_is_too_large_to_keep_is_told_in_megabytes() -> None:
    assert failures.too_large(12_340_000) == Failure(
        errors.PAYLOAD_TOO_LARGE,
        "the output of 12.3 MB is too large to be kept for later; ask for it with a request that waits",
        None,
        "kept",
    )
    assert "of 100000.0 MB" in failures.too_large(10**11).message


class TestLateness:
    def test_lateness_without_a_worker_names_that_as_its_cause(self) -> None:
        assert failures.lateness(0.25, 3, 0, True) == Failure(
            errors.NO_WORKERS, "no healthy worker came up within 250 ms", 1.0, "no_workers"
        )

    def test_lateness_after_failed_runs_names_them_as_its_cause(self) -> None:
        for attempts, runs in ((1, "1 failed run"), (2, "2 failed runs")):
            assert failures.lateness(1.5, attempts, 1, True) == Failure(
                errors.DEADLINE_EXCEEDED, f"the total deadline passed after 1500 ms and {runs}", None, "total"
            )

    @pytest.mark.parametrize("slots", [0, 1])
    def test_lateness_after_a_run_beyond_the_gpu_deadline_names_the_model(self, slots: int) -> None:
        message = "the GPU deadline passed: the model was too slow, and after 4010 ms and 1 failed run no time is left for another"
        assert failures.lateness(4.01, 1, slots, True, hung=True) == Failure(
            errors.DEADLINE_EXCEEDED, message, None, "gpu"
        )

    @pytest.mark.parametrize(
        ("queue_due", "which", "setting"),
        [
            (True, "the queue deadline passed", "--queue-timeout-ms"),
            (False, "no run would end by the total deadline", "--request-timeout-ms"),
        ],
    )
    def test_lateness_without_a_run_names_the_wait_and_the_setting(
        self, queue_due: bool, which: str, setting: str
    ) -> None:
        whose = f"{setting}, or the request's own time-out if that is shorter"
        assert failures.lateness(1.5, 0, 1, queue_due) == Failure(
            errors.DEADLINE_EXCEEDED, f"{which}: waited 1500 ms for a worker ({whose})", None, "queue"
        )


class TestFailedRuns:
    @pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.LEASE_LOST])
    def test_who_failed_alone_hears_why_and_is_blamed_only_for_what_inputs_do(self, cause: Cause) -> None:
        code = errors.REJECTED_BY_MODEL if cause in BLAMED else errors.BACKEND_ERROR
        assert failures.death(BatchFailure(cause, "it fell", "gpu-0")) == Failure(code, "it fell", None, cause.value)

    def test_what_operators_alone_may_read_is_kept_back(self) -> None:
        failure = BatchFailure(Cause.REMOTE, "401 from secret-host", "gpu-0", "HTTP 401")
        assert failures.death(failure).message == "HTTP 401"
        lost = BatchFailure(Cause.LEASE_LOST, "no beat from host-9", "host-9")
        assert failures.death(lost).message == "the worker did not report in time"
        shown = BatchFailure(Cause.LEASE_LOST, "no beat from host-9", "host-9", "it is gone")
        assert failures.death(shown).message == "it is gone"

    def test_in_a_batch_of_several_nobody_reads_of_anothers_input(self) -> None:
        failure = BatchFailure(Cause.RAISED, "KeyError: 'mine'", "gpu-0")
        assert failures.spent(failure, 1) == Failure(
            errors.BACKEND_ERROR, "KeyError: 'mine'; the retry budget is spent", None, "raised"
        )
        assert failures.spent(failure, 2) == Failure(
            errors.BACKEND_ERROR, "the batch failed (raised); the retry budget is spent", None, "raised"
        )

    def test_an_item_without_an_output_is_its_own_fault_unless_the_model_broke_the_rules(self) -> None:
        assert failures.item_failure(ItemResult(None, "too long")) == Failure(
            errors.REJECTED_BY_MODEL, "too long", None, "item"
        )
        assert failures.item_failure(ItemResult(None, None, fault=True)) == Failure(
            errors.BACKEND_ERROR, "the model gave no output for this input", None, "item"
        )

    def test_a_culprit_that_is_known_hears_for_how_long_at_most(self) -> None:
        assert failures.known_culprit() == Failure(
            errors.REJECTED_BY_MODEL,
            "the model failed on this input when it ran alone; it is not run again within 3 minutes",
            None,
            failures.CULPRIT,
        )
        told = failures.known_culprit("ValueError: too long").message
        assert told.startswith("the model failed on this input when it ran alone (ValueError: too long); it is not run")
