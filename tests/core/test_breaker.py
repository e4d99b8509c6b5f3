import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.breaker import COOLDOWN_CAP, REST_CAP, Breaker, State

LONG = 1e6
"""Seconds that no probe takes."""


@pytest.fixture
def breaker() -> Breaker:
    """An open breaker."""
    breaker = Breaker(3, 1.0)
    for _ in range(3):
        breaker.failure(0.0)
    assert breaker.allow(0.0, LONG)
    breaker.failure(0.0)
    return breaker


def test_failures_in_a_row_ask_for_a_probe_at_once() -> None:
    breaker = Breaker(3, 1.0)
    for _ in range(2):
        breaker.failure(0.0)
        assert breaker.state(0.0) is State.CLOSED
    breaker.success(0.0)
    for _ in range(2):
        breaker.failure(0.0)
    assert (breaker.state(0.0), breaker.allow(0.0, LONG)) == (State.CLOSED, True)
    breaker.failure(0.0)
    assert breaker.state(0.0) is State.HALF_OPEN
    assert [breaker.allow(0.0, LONG), breaker.allow(0.0, LONG)] == [True, False]
    breaker.success(0.0)
    assert breaker.state(0.0) is State.CLOSED


def test_a_probe_that_fails_doubles_the_rest_up_to_a_cap(breaker: Breaker) -> None:
    now, rests = 0.0, []
    for _ in range(8):
        rests.append(breaker.retry_at(now) - now)
        assert not breaker.allow(breaker.retry_at(now) - 0.01, LONG)
        now = breaker.retry_at(now)
        assert breaker.allow(now, LONG)
        breaker.failure(now)
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, COOLDOWN_CAP, COOLDOWN_CAP, COOLDOWN_CAP]


def test_a_late_failure_does_not_lengthen_the_rest_and_a_probe_given_up_leaves_room(breaker: Breaker) -> None:
    breaker.failure(0.9)
    assert breaker.retry_at(0.9) == 1.0
    assert breaker.allow(1.0, LONG)
    breaker.forget()
    assert breaker.allow(1.0, LONG)


def test_a_probe_that_is_never_heard_of_again_keeps_others_out_for_its_time_only(breaker: Breaker) -> None:
    assert breaker.allow(1.0, 5.0)
    assert not breaker.allow(5.9, 5.0)
    assert breaker.allow(6.0, 5.0)
    assert not breaker.allow(6.0, 5.0)


def test_a_rest_that_is_asked_for_is_kept_whatever_ends_well_meanwhile() -> None:
    breaker = Breaker(3, 1.0)
    breaker.rest(0.0, 60.0)
    breaker.success(1.0)
    assert (breaker.state(59.9), breaker.allow(59.9, LONG)) == (State.OPEN, False)
    assert (breaker.retry_at(1.0), breaker.rest_left(20.0)) == (60.0, 40.0)
    assert [breaker.allow(60.0, LONG), breaker.allow(60.0, LONG)] == [True, False]
    breaker.success(60.1)
    assert (breaker.state(60.1), breaker.rest_left(60.1)) == (State.CLOSED, 0.0)


def test_a_probe_that_is_asked_for_rest_opens_it_for_that_rest(breaker: Breaker) -> None:
    assert breaker.allow(1.0, LONG)
    breaker.rest(1.0, 60.0)
    breaker.failure(1.0)
    assert breaker.retry_at(1.0) == 61.0
    assert breaker.allow(61.0, LONG)


def test_a_probe_that_fails_after_a_rest_rests_for_the_first_cooldown(breaker: Breaker) -> None:
    assert breaker.allow(1.0, LONG)
    breaker.failure(1.0)
    assert breaker.allow(3.0, LONG)
    breaker.success(3.0)
    breaker.rest(10.0, 5.0)
    assert breaker.allow(15.0, LONG)
    breaker.failure(15.0)
    assert breaker.retry_at(15.0) == 16.0


def test_a_rest_while_it_is_open_leaves_the_cooldown_as_long_as_it_was(breaker: Breaker) -> None:
    assert breaker.allow(1.0, LONG)
    breaker.failure(1.0)
    breaker.rest(1.0, 10.0)
    assert breaker.allow(11.0, LONG)
    breaker.failure(11.0)
    assert breaker.retry_at(11.0) == 15.0


def test_a_short_rest_does_not_shorten_a_longer_one(breaker: Breaker) -> None:
    breaker.rest(0.0, 0.1)
    assert breaker.retry_at(0.0) == 1.0
    breaker.rest(0.0, 1e9)
    breaker.rest(0.0, 1.0)
    assert breaker.retry_at(0.0) == REST_CAP


@given(st.lists(st.tuples(st.sampled_from(["ask", "success", "failure", "rest"]), st.floats(0.0, 3.0)), max_size=60))
def test_open_lets_nothing_through_and_it_never_stays_open_for_good(steps: list[tuple[str, float]]) -> None:
    breaker, now, probes = Breaker(2, 1.0), 0.0, 0
    for step, pause in steps:
        now += pause
        if step == "ask":
            state, allowed = breaker.state(now), breaker.allow(now, LONG)
            assert allowed == (state is State.CLOSED or (state is State.HALF_OPEN and probes == 0))
            probes += state is State.HALF_OPEN and allowed
        elif step == "success":
            breaker.success(now)
            probes = probes if breaker.rest_left(now) else 0
        elif step == "rest":
            breaker.rest(now, 2.0)
        else:
            breaker.failure(now)
            if breaker.state(now) is not State.HALF_OPEN:
                probes = 0
    assert breaker.retry_at(now) <= now + COOLDOWN_CAP


def test_a_failure_that_is_none_of_what_was_asked_is_probed_at_once() -> None:
    breaker = Breaker(threshold=5, cooldown=1.0)
    breaker.failure(10.0, certain=True)
    assert breaker.state(10.0) is State.HALF_OPEN
    assert breaker.allow(10.0, 1.0)
    breaker.failure(10.0)
    assert breaker.state(10.5) is State.OPEN
    assert breaker.retry_at(10.5) == 11.0
