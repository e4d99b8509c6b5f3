"""Rollout rules, and how often they are wrong on random traffic."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.core.rollout import (
    LATENCIES_BLOCK,
    MOST_KEPT,
    NoRollout,
    Unknown,
    begun,
    bucket_of,
    decided,
    watched,
    weights_of,
)
from headway.core.versions import Versions
from headway.model import Rollout, RolloutState, VersionCounts, WorkerStatus
from tests.core.test_versions import drawn, worker

PLAN = Rollout(
    model="m", version="4", beside="3", steps=(1.0, 10.0, 50.0, 100.0), every=60.0, rollback_on=("failures", "p95"),
    slower=0.25,
)  # fmt: skip
WORKERS = [worker("3"), worker("4")]
Latency = Callable[[random.Random], float]


def lognormal(rng: random.Random) -> float:
    return rng.lognormvariate(math.log(0.05), 0.3)


def heavy(rng: random.Random) -> float:
    """Return a random latency. The mean is ten times the median."""
    return 0.02 * rng.paretovariate(1.1)


class Traffic:
    """Random requests to one version, some of which fail."""

    def __init__(self, rng: random.Random, latency: Latency, failing: float) -> None:
        self._rng, self._failing = rng, failing
        self._buckets = [bucket_of(latency(rng)) for _ in range(20_000)]

    def ended(self, mean: float) -> VersionCounts:
        rng, count, at = self._rng, 0, self._rng.expovariate(1.0)
        while at < mean:
            count, at = count + 1, at + rng.expovariate(1.0)
        failed = sum(rng.random() < self._failing for _ in range(count))
        return VersionCounts(count - failed, failed, Counter(rng.choices(self._buckets, k=count - failed)))


def rolled(plan: Rollout, rate: float, new: Traffic, old: Traffic, look: float = 1.0) -> tuple[Rollout, float]:
    """Return the rollout at its end, and the seconds it took. The last step runs as long as the others."""
    seconds = 0.0
    while plan.running and not (plan.step + 1 == len(plan.steps) and plan.waited >= plan.every):
        share = plan.percent / 100.0
        plan = watched(plan, look, new.ended(rate * share * look), old.ended(rate * (1.0 - share) * look))
        seconds += look
    return plan, seconds


@pytest.mark.draws
@pytest.mark.parametrize(
    ("rate", "every", "look", "latency", "failing"),
    [(1.0, 120.0, 4.0, heavy, 0.05), (40.0, 10.0, 1.0, lognormal, 0.01)],
    ids=["low traffic of which 5 % fail, heavy tails", "1 % fail"],
)
def test_an_equal_version_is_rolled_back_in_less_than_one_of_a_hundred_rollouts(
    rate: float, every: float, look: float, latency: Latency, failing: float
) -> None:
    rng = random.Random(31)
    new, old = Traffic(rng, latency, failing), Traffic(rng, latency, failing)
    plan = replace(PLAN, every=every)
    ends = Counter(rolled(plan, rate, new, old, look)[0].state for _ in range(400))
    assert ends[RolloutState.ROLLED_BACK] < 4
    assert ends.keys() <= {RolloutState.PROMOTED, RolloutState.ROLLED_BACK, RolloutState.RUNNING}


def test_a_canary_that_fails_everything_at_1_percent_of_200_a_second_is_gone_within_10_seconds() -> None:
    rng = random.Random(31)
    new, old = Traffic(rng, lognormal, 1.0), Traffic(rng, lognormal, 0.002)
    for _ in range(100):
        end, seconds = rolled(PLAN, 200.0, new, old, look=0.5)
        assert end.state is RolloutState.ROLLED_BACK
        assert seconds < 10.0
        assert end.evidence.new.failed < 50
        assert end.reason.startswith("fails more, at the step of 1 %: ")


def test_what_is_twice_as_slow_is_found_and_what_is_slower_by_less_than_allowed_is_not() -> None:
    rng = random.Random(31)
    old = Traffic(rng, lognormal, 0.0)
    plan = replace(PLAN, every=600.0)
    for _ in range(5):
        end, _ = rolled(plan, 50.0, Traffic(rng, lambda rng: 2.0 * lognormal(rng), 0.0), old)
        assert end.state is RolloutState.ROLLED_BACK
        assert end.reason.startswith("slower, at the step of 1 %: P95 ")
    for _ in range(2):
        end, _ = rolled(plan, 50.0, Traffic(rng, lambda rng: 1.2 * lognormal(rng), 0.0), old)
        assert end.state is RolloutState.PROMOTED


@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_one_list_of_bad_inputs_or_a_short_stall_of_the_new_version_is_no_evidence(seconds: float) -> None:
    plan = replace(PLAN, every=600.0, steps=(50.0,))
    for number in range(1000):
        failed = 100 if 20 <= number < 20 + seconds / 0.5 else number % 10 == 9
        plan = watched(plan, 0.5, VersionCounts(100, failed), VersionCounts(100, 1))
        assert plan.running


def test_trouble_of_both_versions_speaks_for_neither() -> None:
    plan = replace(PLAN, every=1000.0)
    fast, slow = {bucket_of(0.05): 20}, {bucket_of(1.0): 20}
    for number in range(400):
        bad = number % 40 > 30
        both = VersionCounts(0, 20) if bad else VersionCounts(20, 0, slow if number % 40 > 20 else fast)
        plan = watched(plan, LATENCIES_BLOCK, both, both)
    assert plan.running


def test_a_test_that_was_not_asked_for_ends_nothing() -> None:
    rng = random.Random(31)
    bad, good = Traffic(rng, lambda rng: 9.0 * lognormal(rng), 0.5), Traffic(rng, lognormal, 0.0)
    for tests in ((), ("failures",), ("p95",)):
        end, _ = rolled(replace(PLAN, rollback_on=tests), 100.0, bad, good)
        assert (end.state is RolloutState.ROLLED_BACK) is bool(tests)


def ended(plan: Rollout, looks: Sequence[tuple[float, int]]) -> list[tuple[int, RolloutState]]:
    places = []
    for seconds, count in looks:
        plan = watched(plan, seconds, VersionCounts(count), VersionCounts(count))
        places.append((plan.step, plan.state))
    return places


def test_a_step_lasts_its_time_and_until_the_new_version_has_had_a_request() -> None:
    running, promoted = RolloutState.RUNNING, RolloutState.PROMOTED
    plan = replace(PLAN, steps=(1.0, 50.0, 100.0))
    assert ended(plan, [(59.0, 1), (1.0, 0), (60.0, 0), (1.0, 1)]) == [
        (0, running), (1, running), (1, running), (2, promoted),
    ]  # fmt: skip
    assert ended(replace(PLAN, steps=(1.0, 50.0)), [(60.0, 1), (60.0, 1), (600.0, 1)])[-1] == (1, running)


def test_weights_follow_the_step_and_an_end_takes_out_what_has_lost() -> None:
    configured = {"2": 10.0, "3": 80.0, "4": 10.0}
    end = partial(replace, PLAN, reason="")
    assert weights_of(None, configured, "234") == configured
    assert weights_of(replace(PLAN, step=1), configured, "234") == {"3": 90.0, "4": 10.0}
    promoted = end(state=RolloutState.PROMOTED)
    assert weights_of(promoted, configured, "234") == {"3": 0.0, "4": 100.0}
    assert weights_of(promoted, configured, "23") == {"2": 10.0, "3": 0.0, "4": 10.0}, "its workers have left"
    for state in (RolloutState.ROLLED_BACK, RolloutState.ABORTED):
        assert weights_of(end(state=state), {}, "34") == {"4": 0.0}
        assert weights_of(end(state=state), configured, "34") == {"2": 10.0, "3": 80.0, "4": 0.0}


def test_a_record_without_what_earlier_rollouts_have_left_is_read() -> None:
    told = msgspec.to_builtins(replace(PLAN, state=RolloutState.ROLLED_BACK))
    del told["before"]
    last = msgspec.convert(told, Rollout)
    assert last == replace(PLAN, state=RolloutState.ROLLED_BACK)
    assert begun(replace(PLAN, version="2"), [*WORKERS, worker("2")], last).before == {"4": 0.0}


def test_a_loser_that_a_rollout_names_beside_its_version_serves_if_that_loses_and_nobody_else_is_left() -> None:
    last = replace(PLAN, state=RolloutState.PROMOTED)
    workers = [worker("2"), worker("3")]
    after = begun(replace(PLAN, version="2"), workers, last)
    assert after.before == {"3": 100.0}, "the one that was promoted has left"
    assert begun(replace(PLAN, version="2"), [*workers, worker("4")], last).before == {"4": 100.0, "3": 0.0}
    assert weights_of(replace(after, state=RolloutState.ABORTED), {"2": 1.0}, "23") == {"3": 100.0, "2": 0.0}


def test_a_record_keeps_the_newest_losers_and_the_version_promoted_last() -> None:
    first = decided(begun(replace(PLAN, version="3", beside="4"), WORKERS, None), RolloutState.PROMOTED, "m", WORKERS)
    last, names = first, [f"n{number}" for number in range(2 * MOST_KEPT)]
    for name in names:
        last = begun(replace(PLAN, version=name), [*WORKERS, worker(name)], last)
        last = replace(last, state=RolloutState.ABORTED)
    assert last.before == {"3": 100.0} | dict.fromkeys(names[-MOST_KEPT:-1], 0.0)


ORDERS = st.one_of(
    st.permutations("1234").map(lambda names: ("start", names[0], names[1])),
    st.sampled_from([("step", "", ""), ("roll back", "", ""), ("promote", "", ""), ("abort", "", "")]),
)
FILES = st.sampled_from([{}, {"1": 100.0}, {"1": 80.0, "2": 20.0}, {"1": 0.0, "3": 50.0, "4": 50.0}])


@given(FILES, st.lists(ORDERS, max_size=12))
def test_after_any_orders_a_loser_gets_nothing_until_somebody_starts_or_promotes_it(
    configured: dict[str, float], orders: list[tuple[str, str, str]]
) -> None:
    workers, last, losers = [worker(version) for version in "1234"], None, set[str]()
    had, has = Counter[str](), shares(None, configured)
    for order, version, beside in orders:
        if order == "start":
            if last is not None and last.running:
                continue
            last = begun(replace(PLAN, version=version, beside=beside), workers, last)
            losers, had = losers - {version, beside}, has
        elif last is None or (order in ("step", "roll back") and not last.running):
            continue
        elif order == "step":
            last = watched(last, 60.0, VersionCounts(1), VersionCounts(1))
        elif order == "roll back":
            last = replace(last, state=RolloutState.ROLLED_BACK)
        else:
            last = decided(last, RolloutState.PROMOTED if order == "promote" else RolloutState.ABORTED, "m", workers)
        if not last.running:
            won, lost = last.version, last.beside
            won, lost = (won, lost) if last.state is RolloutState.PROMOTED else (lost, won)
            losers = (losers | {lost}) - {won}
        has = shares(last, configured)
        assert sum(has.values()) == 1000, "all are given to somebody"
        assert not losers & has.keys()
        assert not any(Versions({}, "1234", weights_of(last, configured, "1234")).takes(one) for one in losers)
        if last.state is RolloutState.PROMOTED:
            assert has == {last.version: 1000}
        elif last.running:
            assert has[last.version] == pytest.approx(10.0 * last.percent)
            assert has.keys() <= {last.version, last.beside}
        elif had == {last.beside: 1000}:
            assert has == had, "it has what it had"


def shares(rollout: Rollout | None, configured: dict[str, float]) -> Counter[str]:
    """Draw versions for 1,000 requests that name none, when all four are available."""
    return drawn(Versions(dict.fromkeys("1234", 1), "1234", weights_of(rollout, configured, "1234")), 1000)


def test_the_version_beside_is_the_only_other_one_that_takes_requests() -> None:
    plan = replace(PLAN, beside="")
    assert begun(plan, WORKERS, None) == PLAN
    gone = [*WORKERS, worker("2", WorkerStatus.OFFLINE), worker("1", WorkerStatus.FAILED)]
    assert begun(plan, gone, None).beside == "3"
    last = replace(PLAN, version="2", state=RolloutState.ROLLED_BACK, revision=7)
    after = begun(plan, [*WORKERS, worker("2")], last)
    assert (after.beside, after.revision) == ("3", 8)
    assert begun(replace(plan, beside="2"), [*WORKERS, worker("2")], None).beside == "2"


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        ({"model": "n"}, Unknown, "model 'n' has no worker"),
        ({"version": "9"}, Unknown, "no worker serves version '9' of 'm'; those that serve are 3, 4"),
        ({"beside": "9"}, Unknown, "no worker serves version '9' of 'm'; those that serve are 3, 4"),
        ({"beside": "4"}, NoRollout, "versions 4 are served beside version 4"),
        ({"steps": ()}, NoRollout, "steps '' must be increasing percentages"),
        ({"steps": (10.0, 10.0)}, NoRollout, "steps '10,10' must be increasing percentages"),
        ({"steps": (0.0, 10.0)}, NoRollout, "above 0 and at most 100"),
        ({"steps": (10.0, 101.0)}, NoRollout, "above 0 and at most 100"),
        ({"steps": (math.nan,)}, NoRollout, "above 0 and at most 100"),
        ({"steps": tuple(map(float, range(1, 30)))}, NoRollout, "29 steps are more than 20"),
        ({"every": 0.5}, NoRollout, "a step of 0.5 s is not between 1 s and 7 days"),
        ({"rollback_on": ("p99",)}, NoRollout, "rollback_on 'p99' is not one or both of failures, p95"),
        ({"slower": -0.1}, NoRollout, "slower -0.1 is not between 0 and 10"),
    ],
)
def test_what_can_be_no_rollout_is_said(change: dict[str, object], kind: type[NoRollout], why: str) -> None:
    with pytest.raises(NoRollout, match=why) as caught:
        begun(replace(PLAN, **change), WORKERS, None)
    assert type(caught.value) is kind


def test_a_rollout_under_way_or_several_versions_beside_stand_in_the_way() -> None:
    with pytest.raises(NoRollout, match="a rollout of version 4 of 'm' is under way; promote or abort it first"):
        begun(PLAN, WORKERS, PLAN)
    with pytest.raises(NoRollout, match="versions 2, 3 are served beside version 4 of 'm'; name the one"):
        begun(replace(PLAN, beside=""), [*WORKERS, worker("2")], None)
    with pytest.raises(NoRollout, match="no other version is served"):
        begun(replace(PLAN, beside=""), [worker("4")], None)
    with pytest.raises(Unknown, match="its workers have no versions of their own"):
        begun(PLAN, [worker("", id="any")], None)


def test_an_operator_ends_a_rollout_whatever_has_become_of_it() -> None:
    for state, other in itertools.permutations((RolloutState.PROMOTED, RolloutState.ABORTED)):
        for before in (PLAN, replace(PLAN, state=other), replace(PLAN, state=RolloutState.ROLLED_BACK)):
            after = decided(before, state, "m", WORKERS)
            assert (after.state, after.reason, after.revision) == (state, "by an operator", 2)
    with pytest.raises(Unknown, match="model 'm' has had no rollout"):
        decided(None, RolloutState.ABORTED, "m", WORKERS)
    with pytest.raises(Unknown, match="no worker serves version '4'"):
        decided(PLAN, RolloutState.PROMOTED, "m", [worker("3")])
