"""What a client call does after each answer, tested without I/O."""

from collections.abc import Mapping

import pytest

from headway.client import ApiError, Overloaded, RateLimited, TimedOut, Unreachable
from headway.client.messages import Answer, inference
from headway.client.service import FIRST_PAUSE, GRACE, LONGEST_PAUSE, RETRIED, Call

REQUEST = inference("x", None, None, "key")


def call(timeout: float = 60.0, retries: int = 3, rng: float = 0.0) -> Call:
    return Call(REQUEST, timeout, retries, 100.0, lambda: rng)


def patient_call(retries: int = 3) -> Call:
    return Call(REQUEST, 30.0, retries, 100.0, lambda: 0.0, patient=True)


def refused(status: int = 503, header: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, header or {}, b"")


def test_an_attempt_tells_the_service_what_is_left_of_the_time() -> None:
    one = call(timeout=2.0)
    first, later = one.attempt(100.0), one.attempt(101.25)
    assert first.header == {"X-Request-Timeout-Ms": "2000"} and first.read == 2.0 + GRACE
    assert later.header == {"X-Request-Timeout-Ms": "750"} and later.connect == later.read == 0.75 + GRACE


def test_no_attempt_begins_when_the_time_is_over_and_a_success_ends_the_call() -> None:
    with pytest.raises(TimedOut, match="no answer within 2 s"):
        call(timeout=2.0).attempt(102.0)
    assert call().answered(Answer(202, {}, b"{}"), 100.0) is None


@pytest.mark.parametrize("status", sorted(RETRIED))
def test_what_may_pass_is_tried_again(status: int) -> None:
    one = call()
    one.attempt(100.0)
    assert one.answered(refused(status), 100.0) == FIRST_PAUSE / 2


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 409, 413, 422, 501])
def test_what_will_not_pass_is_not_tried_again(status: int) -> None:
    with pytest.raises(ApiError) as raised:
        call().answered(refused(status), 100.0)
    assert raised.value.status == status


def test_what_cannot_pass_is_not_tried_again_whoever_says_so() -> None:
    with pytest.raises(Overloaded):
        call().answered(refused(503, {"x-should-retry": "false"}), 100.0)
    error = Unreachable("no TLS")
    error.hopeless = True
    with pytest.raises(Unreachable):
        call().failed(error, 0.0)


@pytest.mark.parametrize(
    ("header", "pause"),
    [
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2.0),
        ({"retry-after-ms": "0"}, 0.01),
    ],
)
def test_the_service_says_how_long_to_wait(header: dict[str, str], pause: float) -> None:
    one = call()
    one.attempt(100.0)
    assert one.answered(refused(429, header), 100.0) == pytest.approx(pause)


def test_pauses_grow_up_to_a_limit_and_those_asked_for_are_spread_and_never_shorter() -> None:
    assert call(rng=0.8).answered(refused(429, {"retry-after": "1"}), 100.0) == pytest.approx(1.2)
    one, pauses = call(timeout=1000.0, retries=6, rng=1.0), []
    for _ in range(6):
        one.attempt(100.0)
        pauses.append(one.failed(Unreachable("gone"), 100.0))
    assert pauses == pytest.approx([0.1, 0.4, 1.6, 6.4, LONGEST_PAUSE, LONGEST_PAUSE])


def test_the_last_error_is_raised_when_the_retries_are_spent() -> None:
    one, error = call(retries=1), Unreachable("gone")
    one.attempt(100.0)
    one.failed(Unreachable("first"), 100.0)
    one.attempt(101.0)
    with pytest.raises(Unreachable) as raised:
        one.failed(error, 101.0)
    assert raised.value is error


def test_a_pause_beyond_the_time_is_not_waited_for() -> None:
    with pytest.raises(RateLimited) as raised:
        call(timeout=1.0).answered(refused(429, {"retry-after": "1"}), 100.5)
    assert raised.value.retry_after == 1.0
    assert "the call's 1 s end before the next attempt" in str(raised.value)


@pytest.mark.parametrize("status", [429, 503])
def test_a_patient_call_waits_out_refusals_within_its_time_and_retries_errors_as_ever(status: int) -> None:
    one, refusal = patient_call(retries=1), refused(status, {"retry-after": "1"})
    for now in range(100, 129):
        assert one.answered(refusal, now) == 1.0
    one.answered(refused(502, {"retry-after": "1"}), 128.0)
    with pytest.raises(ApiError):
        one.answered(refused(502, {"retry-after": "1"}), 128.0)
    with pytest.raises(ApiError, match="the call's 30 s end"):
        patient_call().answered(refusal, 129.0)
    with pytest.raises(ApiError):
        patient_call(retries=0).answered(refusal, 100.0)
