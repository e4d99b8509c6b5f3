"""Scaling a model without requests: it gives up all workers, and gets one back on the next request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.core.scaling.rules import read
from headway.core.scaling.scaler import FIRST_START, PLAN, RULES, ModelState, ScaleDecision, ScaleLimits, Scaler
from headway.core.scaling.sizing import BatchCost, Holding, rooms, shares

IDLE = ScaleLimits(idle_after=30.0, most=4)


def state(ready: int, *, queue: float = 0.0, rate: float = 0.0, running: int = 0, load: float = 0.0) -> ModelState:
    return ModelState(ready, queue, rate, ready * 100.0, None, running, load)


def decided(scaler: Scaler, found: ModelState, since: float, until: float) -> list[tuple[float, ScaleDecision]]:
    at = [since + 0.5 * step for step in range(int((until - since) * 2) + 1)]
    return [(now, one) for now in at if (one := scaler.decide(found, now)) is not None]


@pytest.mark.parametrize("policy", [RULES, PLAN])
def test_a_model_that_nobody_asks_for_gives_all_its_workers_back_at_once(policy: str) -> None:
    scaler = Scaler(replace(IDLE, policy=policy), 4, 0.0)
    [(now, one)] = decided(scaler, state(4), 0.0, 100.0)
    assert (now, one.before, one.desired, one.reason) == (30.0, 4, 0, "no requests for 30 s")


@pytest.mark.parametrize("asked", [{"queue": 1.0}, {"rate": 0.06}, {"running": 1}])
def test_what_waits_comes_or_runs_keeps_the_workers_and_brings_one_back_at_once(asked: dict[str, float]) -> None:
    scaler = Scaler(IDLE, 1, 0.0)
    assert decided(scaler, state(1, **asked), 0.0, 100.0) == []  # type: ignore[arg-type]
    assert [one.desired for _, one in decided(scaler, state(1), 100.5, 130.0)] == [0]
    one = scaler.decide(state(0, **asked), 200.0)  # type: ignore[arg-type]
    assert one is not None
    assert (one.before, one.desired, one.direction, one.reason) == (0, 1, "up", "it has requests")


def test_a_start_takes_none_of_the_time_so_that_who_was_sent_away_for_it_finds_a_worker() -> None:
    scaler = Scaler(replace(IDLE, idle_after=5.0), 0, 0.0)
    scaler.decide(state(0, rate=1.0), 0.0)
    assert decided(scaler, state(0), 0.5, 60.0) == []
    assert [now for now, _ in decided(scaler, state(1), 60.5, 100.0)] == [65.0]


def test_one_that_never_comes_is_given_up_once_nobody_asks() -> None:
    scaler = Scaler(replace(IDLE, start_within=60.0), 0, 0.0)
    scaler.decide(state(0, rate=1.0), 0.0)
    found = decided(scaler, state(0), 0.5, 200.0)
    assert [(now, one.desired) for now, one in found][-1] == (89.5, 0)


BROKEN = replace(state(0), trouble="gpu-0 does not start: broken", retry_in=30.0)


def test_a_start_in_which_a_worker_failed_to_load_does_not_tell_how_long_one_takes() -> None:
    scaler = Scaler(IDLE, 0, 0.0, start=0.4)
    scaler.decide(state(0, queue=1.0), 0.0)
    scaler.decide(BROKEN, 1.0)
    decided(scaler, state(0, queue=1.0), 1.5, 158.0)
    scaler.decide(state(1), 158.5)
    assert scaler.seen_start == 0.4
    decided(scaler, state(1), 159.0, 199.0)
    scaler.decide(state(0, queue=1.0), 200.0)
    scaler.decide(state(1), 203.0)
    assert scaler.seen_start == 3.0, "the next one does"


def test_a_start_that_failed_takes_of_the_time_without_requests_as_nobody_waits_for_it() -> None:
    scaler = Scaler(replace(IDLE, idle_after=5.0), 0, 0.0)
    scaler.decide(replace(BROKEN, rate=1.0), 0.0)
    [(now, one)] = decided(scaler, BROKEN, 0.5, 60.0)
    assert (now, one.desired, scaler.coming) == (5.0, 0, 0)


def test_after_a_start_that_failed_a_worker_is_there_one_start_after_the_next_try_at_the_soonest() -> None:
    scaler = Scaler(IDLE, 0, 0.0, start=0.4)
    scaler.decide(state(0, queue=1.0), 0.0)
    scaler.decide(BROKEN, 10.0)
    assert (scaler.starts_in(10.0), scaler.starts_in(25.0)) == (30.4, 15.4)
    scaler.decide(state(1), 40.5)
    assert (scaler.trouble, scaler.starts_in(40.5)) == ("", 0.4)


def test_what_is_left_of_the_start_is_told_from_the_last_one_that_was_seen() -> None:
    scaler = Scaler(IDLE, 1, 0.0)
    assert scaler.starts_in(0.0) == FIRST_START
    scaler.decide(state(1, load=12.0), 0.0)
    assert scaler.starts_in(0.0) == 12.0
    decided(scaler, state(1), 0.5, 31.0)
    assert scaler.desired == 0
    assert scaler.starts_in(40.0) == 12.0
    scaler.decide(state(0, queue=1.0), 50.0)
    assert scaler.starts_in(57.0) == 5.0
    assert (scaler.starts_in(62.0), scaler.overdue(62.0)) == (0.0, 0)
    assert (scaler.starts_in(70.0), scaler.overdue(70.0), scaler.awaited(70.0)) == (8.0, 1, 20.0)
    assert scaler.starts_in(300.0) == FIRST_START, "whoever comes back then is not sent away for longer"
    scaler.decide(state(1), 70.0)
    assert (scaler.starts_in(70.0), scaler.seen_start) == (20.0, 20.0)
    assert scaler.starts_in(80.0) == 20.0
    assert Scaler(IDLE, 0, 0.0, start=20.0).starts_in(0.0) == 20.0, "what another leader saw"


def test_lines_of_bulk_jobs_keep_the_workers_and_bring_one_no_sooner_than_a_start_after_the_last_change() -> None:
    scaler = Scaler(replace(IDLE, idle_after=5.0), 1, 0.0, start=20.0)
    assert decided(scaler, replace(state(1), bulk=1), 0.0, 100.0) == []
    assert [now for now, _ in decided(scaler, state(1), 100.5, 101.0)] == [100.5]
    [(now, one)] = decided(scaler, replace(state(0), bulk=1), 101.0, 130.0)
    assert (now, one.desired, one.reason) == (120.5, 1, "bulk lines are waiting for it")
    unseen = Scaler(replace(IDLE, idle_after=5.0), 1, 0.0)
    assert [now for now, _ in decided(unseen, state(1, load=3.0), 0.0, 6.0)] == [5.0]
    assert [now for now, _ in decided(unseen, replace(state(0), bulk=1), 6.0, 20.0)] == [8.0]


@pytest.mark.parametrize("policy", [RULES, PLAN])
def test_it_is_short_while_it_wants_more_than_it_may_have(policy: str) -> None:
    scaler = Scaler(
        replace(IDLE, policy=policy, most=1, rules=read('[{"utilisation_above": 0.8, "for_s": 5, "add": 1}]')), 1, 0.0
    )
    for rate, short in ((500.0, True), (10.0, False)):
        found = replace(state(1, rate=rate), cost=BatchCost(0.1, 0.0, 10.0))
        decided(scaler, found, 0.0 if short else 100.5, 100.0 if short else 200.0)
        assert (scaler.short, scaler.desired) == (short, 1)


def test_a_model_without_such_a_time_keeps_a_worker_and_tells_of_no_start() -> None:
    scaler = Scaler(replace(IDLE, idle_after=0.0), 1, 0.0)
    assert decided(scaler, state(1), 0.0, 5000.0) == []
    assert scaler.starts_in(5000.0) is None
    other = Scaler(replace(IDLE, idle_after=0.0), 0, 0.0)
    assert [one.desired for _, one in decided(other, state(0), 0.0, 1.0)] == [1]


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 7.0]), st.sampled_from([0.0, 0.2]), st.integers(0, 4)), max_size=60)
)
def test_nobody_who_asks_is_without_a_worker_that_is_there_or_wanted(steps: list[tuple[float, float, int]]) -> None:
    scaler, now = Scaler(replace(IDLE, idle_after=3.0), 2, 0.0), 0.0
    for waited, rate, ready in steps:
        now += waited
        scaler.decide(state(min(ready, scaler.desired), rate=rate), now)
        assert 0 <= scaler.desired <= IDLE.most
        assert scaler.desired > 0 or rate == 0.0


def test_every_process_gives_its_workers_back_and_has_one_again() -> None:
    assert shares(0, {"a": (2, 4), "b": (1, 1)}) == {"a": 0, "b": 0}
    assert shares(2, {"a": (0, 4), "b": (0, 1)}) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("holdings", "free", "coming", "found"),
    [
        pytest.param([(1, 1, 4), (0, 0, 4), (2, 2, 3)], 3, 0, [4, 3, 3], id="what is free, up to the bound of each"),
        pytest.param([(0, 1, 4), (3, 3, 4), (1, 1, 4)], 0, 0, [1, 2, 1], id="the one with the most gives one up"),
        pytest.param([(0, 1, 4), (2, 2, 4), (1, 1, 4)], 0, 1, [1, 2, 1], id="not if one is free soon"),
        pytest.param([(0, 1, 2), (1, 1, 2), (1, 1, 2), (0, 0, 2)], 0, 0, [1, 0, 0, 0], id="of last ones any"),
        pytest.param([(0, 1, 2), (0, 1, 2)], 0, 0, [1, 1], id="nobody has one"),
    ],
)
def test_who_has_room_for_how_many(
    holdings: list[tuple[int, int, int]], free: int, coming: int, found: list[int]
) -> None:
    asked = {name: Holding(*each) for name, each in zip("abcd", holdings, strict=False)}
    assert rooms(asked, free, coming) == dict(zip("abcd", found, strict=False))


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1),
    st.integers(0, 3),
)
def test_nobody_gives_up_anything_while_nobody_waits(drawn: dict[str, tuple[int, int]], free: int) -> None:
    holdings = {name: Holding(has, has, has + more) for name, (has, more) in drawn.items()}
    found = rooms(holdings, free, 0)
    assert all(holdings[name].has <= most <= holdings[name].most for name, most in found.items())
