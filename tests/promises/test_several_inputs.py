"""The checker on requests with several inputs and on limits: what is allowed, and one history of each kind that is not."""

import asyncio
import json
from typing import Any

import grpc
import pytest

from headway.core import failures
from headway.model import Failure
from tests.promises.calls import answered
from tests.promises.checker import check
from tests.promises.histories import KNOWN, LEFT, LIMITED, MISUSE, REJECTED, Scribe
from tests.promises.ways_in import CALL, COMPLETIONS, OIP_JSON


def asked(
    it: Scribe, at: tuple[float, float | None], *texts: str, outputs: list[str] | None = None, **told: Any
) -> None:
    if outputs is not None:
        told |= {"outputs": tuple(outputs), "output": "\n".join(outputs)}
    it.ask(at, "\n".join(texts), inputs=texts, **told)


def promises(it: Scribe) -> set[str]:
    return {violation.promise for violation in check(it.history)}


@pytest.fixture
def it() -> Scribe:
    return Scribe()


def test_several_inputs_are_answered_each_for_itself_whatever_run_it_was_in(it: Scribe) -> None:
    [a], [b, c] = it.run("a", at=(1.0, 2.0)), it.run("b", "c", at=(1.0, 2.0))
    asked(it, (0.0, 3.0), "a", "b", "c", outputs=[a, b, c])
    assert not promises(it)


def test_outputs_in_another_order_than_the_inputs_are_found_out(it: Scribe) -> None:
    a, b = it.run("a", "b", at=(1.0, 2.0))
    asked(it, (0.0, 3.0), "a", "b", outputs=[b, a])
    assert promises(it) == {"answers in another order"}


@pytest.mark.parametrize("few", [True, False])
def test_an_output_too_few_or_of_another_request_is_found_out(it: Scribe, few: bool) -> None:
    a, _, c = it.run("a", "b", "c", at=(1.0, 2.0))
    asked(it, (0.0, 3.0), "a", "b", outputs=[a] if few else [a, c])
    it.ask((0.0, 3.0), "c", output=c)
    assert "answer to another request" in promises(it)


def test_the_output_of_a_neighbour_with_the_same_text_is_found_out(it: Scribe) -> None:
    [a], [b], _ = it.run("a", at=(1.0, 2.0)), it.run("b", at=(1.0, 2.0)), it.run("a", at=(1.0, 2.0))
    asked(it, (0.0, 3.0), "a", "b", outputs=[a, b])
    it.ask((0.0, 3.0), "a", output=a)
    assert promises(it) == {"answer to another request"}


def test_the_first_failure_is_that_of_the_request_and_the_rest_may_have_run_or_not(it: Scribe) -> None:
    it.run("a", "reject b", at=(1.0, 2.0))
    asked(it, (0.0, 3.0), "a", "reject b", "c", blamed=1, **REJECTED)
    asked(it, (4.0, 5.0), "d", "reject b", **KNOWN)
    asked(it, (4.0, None), "e", "f", **LEFT)
    assert not promises(it)


def test_a_failure_that_names_a_good_input_is_found_out(it: Scribe) -> None:
    it.run("a", "reject b", at=(1.0, 2.0))
    asked(it, (0.0, 3.0), "a", "reject b", blamed=0, **REJECTED)
    assert promises(it) == {"a good input is rejected"}


def test_outputs_in_spite_of_an_input_that_fails_are_found_out(it: Scribe) -> None:
    a, b = it.run("a", "reject b", at=(1.0, 2.0))
    asked(it, (0.0, 3.0), "a", "reject b", outputs=[a, b])
    assert promises(it) == {"output of an input that the model rejects"}


@pytest.mark.parametrize("excused", [True, False])
def test_an_input_that_runs_twice_is_found_out_unless_a_fault_explains_it(it: Scribe, excused: bool) -> None:
    a, b = it.run("a", "b", at=(1.0, 2.0))
    it.run("b", at=(1.5, 2.5))
    if excused:
        it.fault("worker killed", at=(1.0, 1.2))
    asked(it, (0.0, 3.0), "a", "b", outputs=[a, b])
    assert promises(it) == (set() if excused else {"second run of a request"})


def test_inputs_under_a_key_run_once_and_are_answered_alike(it: Scribe) -> None:
    a, b = it.run("a", "b", at=(1.0, 2.0))
    asked(it, (0.0, 3.0), "a", "b", outputs=[a, b], key="k")
    asked(it, (4.0, 5.0), "a", "b", outputs=[a, b], key="k")
    assert not promises(it)
    [again] = it.run("b", at=(6.5, 7.0))
    asked(it, (6.0, 8.0), "a", "b", outputs=[a, again], key="k")
    assert promises(it) == {"two outcomes", "second run under a key"}


def test_a_text_that_a_request_under_a_key_has_twice_may_run_twice_and_no_more(it: Scribe) -> None:
    [first], [second] = it.run("a", at=(1.0, 2.0)), it.run("a", at=(1.0, 2.0))
    asked(it, (0.0, 3.0), "a", "a", outputs=[first, second], key="k")
    assert not promises(it)
    it.run("a", at=(4.0, 5.0))
    assert promises(it) == {"second run under a key"}


def test_a_limit_counts_each_input_at_once_or_not_at_all(it: Scribe) -> None:
    it.history.limits["acme", None] = 1.0, 3.0
    a, b = it.run("a", "b", at=(0.2, 0.4))
    asked(it, (0.0, 1.0), "a", "b", outputs=[a, b])
    asked(it, (1.0, 1.5), "c", "d", "e", **LIMITED)
    assert not promises(it)


def test_what_is_let_in_beyond_a_limit_is_found_out(it: Scribe) -> None:
    it.history.limits["acme", None] = 1.0, 3.0
    for number in range(3):
        a, b = it.run(f"a{number}", f"b{number}", at=(0.2, 0.4))
        asked(it, (0.0, 1.0), f"a{number}", f"b{number}", outputs=[a, b])
    assert promises(it) == {"let in beyond its limit"}


def test_what_is_refused_within_a_limit_is_found_out(it: Scribe) -> None:
    it.history.limits["acme", None] = 1.0, 3.0
    asked(it, (0.0, 1.0), "a", "b", "c", **LIMITED)
    assert promises(it) == {"refused within its limit"}


@pytest.mark.parametrize(("model", "in_all", "wrong"), [
    ("second", 9.0, {"let in beyond its limit"}), ("", 9.0, set()), ("", 3.0, {"let in beyond its limit"}),
])  # fmt: skip
def test_a_limit_to_one_model_counts_it_and_one_to_all_each(model: str, in_all: float, wrong: set[str]) -> None:
    it = Scribe()
    it.history.limits |= {("acme", None): (0.0, in_all), ("acme", "second"): (0.0, 3.0)}
    for number in range(4):
        [a] = it.run(f"a{number}", at=(0.2, 0.4))
        it.history.runs[-1].model = model
        it.ask((0.0, 1.0), f"a{number}", output=a, model=model)
    assert promises(it) == wrong


@pytest.mark.parametrize(("burst", "wrong"), [(2.0, set()), (3.0, {"refused within its limit"})])
def test_a_refusal_is_within_no_limit_of_its_own(it: Scribe, burst: float, wrong: set[str]) -> None:
    it.history.limits |= {("acme", None): (0.0, 9.0), ("acme", "second"): (0.0, burst)}
    asked(it, (1.0, 1.5), "c", "d", model="second", **LIMITED)
    it.ask((0.0, 1.0), "b", model="second", timeout=1.0, status=504, code="DEADLINE_EXCEEDED")
    assert promises(it) == wrong


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("over the limit of 240 requests a minute for this credential, 40 at once", "RATE_LIMITED"),
        ("shed: this tier is held to what the fleet can carry", "SHED"),
    ],
)
def test_apis_that_tell_no_code_tell_a_limit_from_too_much_load_by_the_message(message: str, code: str) -> None:
    openai = json.dumps({"error": {"message": message, "code": "rate_limit_exceeded"}}).encode()
    assert COMPLETIONS.read(429, {}, openai).code == code
    assert OIP_JSON.read(429, {}, json.dumps({"error": message}).encode()).code == code


@pytest.mark.parametrize("failure", [
    failures.version_unknown("m", "9"), failures.not_here("m"), failures.lost_input(),
    failures.lateness(0.5, attempts=0, slots=0, queue_due=True),
])  # fmt: skip
def test_apis_that_tell_no_code_tell_a_want_of_workers_from_too_much_load_by_the_message(failure: Failure) -> None:
    openai = json.dumps({"error": {"message": failure.message, "code": "server_is_overloaded"}}).encode()
    assert COMPLETIONS.read(503, {}, openai).code == failure.code
    assert OIP_JSON.read(503, {}, json.dumps({"error": failure.message}).encode()).code == failure.code


@pytest.mark.parametrize(
    ("status", "code", "read"),
    [
        (grpc.StatusCode.ABORTED, "IDEMPOTENCY_CONFLICT", 409),
        (grpc.StatusCode.INVALID_ARGUMENT, "IDEMPOTENCY_CONFLICT", 422),
        (grpc.StatusCode.INVALID_ARGUMENT, "REJECTED_BY_MODEL", 422),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED", 429),
        (grpc.StatusCode.UNAVAILABLE, "SERVICE_OVERLOADED", 503),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", 504),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT", 408),
        (grpc.StatusCode.UNAVAILABLE, "REJECTED_BY_MODEL", 500),
        (grpc.StatusCode.UNAVAILABLE, "", 0),
    ],
)
def test_the_status_of_a_call_is_read_as_https_and_fits_its_code(status: grpc.StatusCode, code: str, read: int) -> None:
    trailers = grpc.aio.Metadata(*((("x-headway-error", code),) if code else ()))

    async def fail() -> bytes:
        raise grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailers, "input 3 of 5, counted from 0: no")

    found = asyncio.run(answered(CALL, fail()))
    assert found.status == read
    assert found.blamed == (3 if code else -1)


def test_rows_of_a_request_run_together_and_in_their_order(it: Scribe) -> None:
    _, a, b, _ = it.run("x", "a", "b", "y", at=(1.0, 2.0))
    asked(it, (0.0, 3.0), "a", "b", outputs=[a, b], rows=True)
    assert not promises(it)


@pytest.mark.parametrize("apart", [True, False])
def test_rows_of_a_request_that_ran_apart_or_with_another_between_them_are_found_out(it: Scribe, apart: bool) -> None:
    if apart:
        [a], [b] = it.run("a", at=(1.0, 2.0)), it.run("b", at=(1.0, 2.0))
    else:
        a, _, b = it.run("a", "c", "b", at=(1.0, 2.0))
    asked(it, (0.0, 3.0), "a", "b", outputs=[a, b], rows=True)
    assert promises(it) == {"rows of a request that did not run together"}


def test_an_array_of_one_row_under_a_key_is_another_request_than_its_text() -> None:
    """Its answer is an array, too, and none that the other could have."""
    it = Scribe()
    [a] = it.run("a", at=(1.0, 2.0))
    it.ask((0.0, 3.0), "a", output=a, key="k")
    it.ask((4.0, 5.0), "a", key="k", rows=True, **MISUSE)
    assert not promises(it)
