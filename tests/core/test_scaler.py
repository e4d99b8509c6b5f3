"""A model's scaler and its rules: it answers a shortage once, keeps within bounds and doesn't flap."""

import itertools
import math
import random
import statistics

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.scaling.rules import (
    QUEUE_ABOVE,
    USUAL,
    UTILISATION_ABOVE,
    UTILISATION_BELOW,
    NoRules,
    ScaleRule,
    read,
    write,
)
from headway.core.scaling.scaler import (
    AGAIN,
    DOWN,
    FIRST_START,
    MOST_REMOVED,
    PLAN,
    PLAN_KEEPS,
    RULES,
    SAMPLE_SECONDS,
    UP,
    ArrivalForecast,
    ModelState,
    ScaleDecision,
    ScaleLimits,
    Scaler,
)
from headway.core.scaling.sizing import BatchCost

PACE = 100.0
COST = BatchCost(0.1, 0.0, 10.0)


class Fleet:
    """A fleet of one model. Workers take `start` seconds to start; `broken` ones never do."""

    def __init__(self, limits: ScaleLimits, workers: int, start: float = 60.0) -> None:
        self.scaler = Scaler(limits, workers, 0.0)
        self.start = start
        self.ready = workers
        self.now = 0.0
        self.decisions: list[tuple[float, ScaleDecision]] = []
        self.comes_at: list[float] = []
        self.broken = 0

    def run(self, seconds: float, rate: float, queue: float = 0.0, step: float = 1.0) -> list[ScaleDecision]:
        before = len(self.decisions)
        end = self.now + seconds
        while self.now < end:
            self.now += step
            arrived = [at for at in self.comes_at if at <= self.now]
            self.comes_at = [at for at in self.comes_at if at > self.now]
            self.ready += len(arrived)
            state = ModelState(self.ready, queue, rate, self.ready * PACE, COST)
            decision = self.scaler.decide(state, self.now)
            if decision is not None:
                self.decisions.append((self.now, decision))
                more = max(0, decision.desired - decision.before)
                lost = min(self.broken, more)
                self.broken -= lost
                self.comes_at += [self.now + self.start] * (more - lost)
                self.ready = min(self.ready, decision.desired)
        return [one for _, one in self.decisions[before:]]


def changes(decisions: list[ScaleDecision]) -> list[int]:
    return [one.desired - one.before for one in decisions]


@pytest.mark.parametrize(
    ("seconds", "rate", "queue", "change"), [(30, 200, 501, 3), (60, 200, 101, 1), (300, 350, 0, 1), (900, 100, 0, -1)]
)
def test_each_usual_rule_changes_the_number_once_its_condition_has_held(
    seconds: float, rate: float, queue: float, change: int
) -> None:
    fleet = Fleet(ScaleLimits(), 4)
    assert fleet.run(seconds, rate, queue) == []
    assert changes(fleet.run(1, rate, queue)) == [change]


def test_one_shortage_is_answered_once_while_workers_start_and_a_larger_one_further() -> None:
    fleet = Fleet(ScaleLimits(), 4, start=300)
    assert changes(fleet.run(290, 560, queue=5000)) == [3]
    assert fleet.scaler.coming == 3
    assert fleet.run(60, 560, queue=0) == []
    assert changes(Fleet(ScaleLimits(), 4, start=300).run(100, 1200, queue=5000)) == [3, 3, 3]


def test_workers_that_never_come_are_asked_for_again_and_not_counted() -> None:
    fleet = Fleet(ScaleLimits(start_within=120), 4, start=60)
    fleet.broken = 3
    assert changes(fleet.run(120, 600, queue=5000)) == [3]
    assert fleet.scaler.foreseen == pytest.approx(600 / 700, abs=0.02)
    assert fleet.scaler.utilisation == pytest.approx(600 / 400, abs=0.02), "of those that are there"
    told = fleet.run(100, 600, queue=5000)
    assert told[0].direction == AGAIN
    assert "3 of 7 workers did not start within 120 s" in told[0].reason
    assert told[1].direction == UP
    assert told[1].desired == 10
    fleet.run(100, 600)
    assert fleet.ready == 7


def test_a_plan_asks_for_all_that_is_missing_at_once() -> None:
    fleet = Fleet(ScaleLimits(policy=PLAN), 4)
    assert fleet.run(300, 280) == []
    told = fleet.run(60, 900)
    assert fleet.scaler.desired >= 12
    assert fleet.now - 60 < fleet.decisions[0][0] <= fleet.now - 40
    assert all(one.direction == UP for one in told)


def test_a_promise_that_needs_more_than_the_room_is_kept_by_more() -> None:
    loose, tight = (Fleet(ScaleLimits(policy=PLAN, promise=promise), 4) for promise in (0.2, 0.11))
    for fleet in (loose, tight):
        fleet.run(100, 280)
    assert tight.scaler.desired > loose.scaler.desired
    assert "keep 110 ms" in tight.scaler.reason


def test_a_plan_sits_out_what_is_over_before_a_worker_could_come_unless_all_cannot_carry_it() -> None:
    fleet = Fleet(ScaleLimits(policy=PLAN), 6)
    assert fleet.run(3000, 410) == []
    assert fleet.run(9, 560) == []
    assert fleet.run(600, 410) == []
    assert fleet.run(60, 560) != []
    fleet = Fleet(ScaleLimits(policy=PLAN), 6)
    fleet.run(3000, 410)
    [decision] = fleet.run(12, 1200)
    assert decision.direction == UP
    assert decision.desired >= 12


def test_a_plan_for_quick_starts_answers_at_once() -> None:
    fleet = Fleet(ScaleLimits(policy=PLAN), 6, start=1.0)
    for rate in (*(100.0, 2000.0) * 12, 410):  # It learns that starts are short.
        fleet.run(900, rate)
    assert fleet.run(9, 560) != []


@pytest.mark.parametrize("dispersion", [1.0, 50.0, 300.0])
def test_the_unevenness_of_arrivals_is_learnt(dispersion: float) -> None:
    rng, forecast = random.Random(0), ArrivalForecast()
    found = []
    for second in range(6000):
        forecast.observe(rng.gauss(5000.0, math.sqrt(dispersion * 5000.0 / SAMPLE_SECONDS)), second, 60.0)
        found.append(forecast.dispersion)
    assert dispersion * 0.6 <= statistics.fmean(found[1000:]) <= dispersion * 1.2


def test_a_plan_without_any_measurement_goes_by_the_queue() -> None:
    scaler = Scaler(ScaleLimits(policy=PLAN), 1, 0.0)
    told = [scaler.decide(ModelState(1, 600, 50, 0.0), float(now)) for now in range(60)]
    assert [one.desired for one in told if one is not None] == [4]


@pytest.mark.parametrize("policy", [RULES, PLAN])
def test_a_large_fleet_shrinks_by_a_fifth_at_most_and_waits_between_two_removals(policy: str) -> None:
    rules = (ScaleRule(UTILISATION_BELOW, 0.4, PLAN_KEEPS, -50), ScaleRule(UTILISATION_ABOVE, 0.85, 300.0, 1))
    fleet = Fleet(ScaleLimits(policy=policy, rules=rules, least=2), 40)
    fleet.run(4 * 3600, 50)
    assert fleet.scaler.desired == 2
    for (at, one), (then, _) in itertools.pairwise(fleet.decisions):
        assert one.direction == DOWN
        assert one.before - one.desired <= max(1, MOST_REMOVED * one.before)
        assert then - at >= PLAN_KEEPS


def test_no_removal_makes_a_rule_add_again() -> None:
    rules = (ScaleRule(UTILISATION_BELOW, 0.8, 1.0, -1), ScaleRule(UTILISATION_ABOVE, 0.85, 1.0, 1))
    fleet = Fleet(ScaleLimits(rules=rules), 3, start=2)
    fleet.run(3000, 200)
    assert fleet.decisions == []
    assert fleet.scaler.desired == 3


@pytest.mark.parametrize(("policy", "period"), [(RULES, 7.0), (RULES, 60.0), (PLAN, 7.0), (PLAN, 20.0)])
def test_flapping_load_does_not_flap_the_fleet(policy: str, period: float) -> None:
    fleet = Fleet(ScaleLimits(policy=policy), 6, start=30)
    fleet.run(2000, 360)
    settled = len(fleet.decisions)
    while fleet.now < 6000:
        fleet.run(period, 200)
        fleet.run(period, 520, queue=300)
    turns = [one.direction for _, one in fleet.decisions[settled:]]
    assert sum(one != other for one, other in itertools.pairwise(turns)) <= 1
    assert len(turns) <= 10


def test_bounds_that_change_are_kept_at_once() -> None:
    fleet = Fleet(ScaleLimits(least=2, most=8), 4)
    fleet.scaler.limits = ScaleLimits(least=6, most=8)
    assert [one.desired for one in fleet.run(1, 400)] == [6]
    fleet.scaler.limits = ScaleLimits(least=1, most=3)
    assert [one.desired for one in fleet.run(1, 400)] == [3]


def test_the_first_start_that_is_seen_takes_the_place_of_the_guess_and_later_ones_are_smoothed() -> None:
    fleet = Fleet(ScaleLimits(policy=PLAN), 2, start=2)
    assert fleet.scaler.start_seconds == FIRST_START
    for start, seconds, rate, least, most in ((2, 60, 300, 1, 3), (30, 120, 700, 29, 31), (2, 60, 900, 10, 30)):
        fleet.start = start
        fleet.run(seconds, rate)
        assert least < fleet.scaler.start_seconds < most


PIECES = st.lists(st.tuples(st.floats(1, 900), st.floats(0, 5000), st.floats(0, 2000)), min_size=1, max_size=8)


@settings(max_examples=60)
@given(
    policy=st.sampled_from([RULES, PLAN]),
    pieces=PIECES,
    least=st.integers(1, 5),
    more=st.integers(0, 30),
    start=st.floats(1, 400),
    held=st.floats(0, 400),
    broken=st.integers(0, 5),
)
def test_whatever_the_load_bounds_and_times_are_kept(
    policy: str, pieces: list[tuple[float, float, float]], least: int, more: int, start: float, held: float, broken: int
) -> None:
    rules = tuple(msgspec.structs.replace(rule, for_s=held) if rule.change < 0 else rule for rule in USUAL)
    limits = ScaleLimits(policy=policy, least=least, most=least + more, rules=rules)
    fleet = Fleet(limits, least, start)
    fleet.broken = broken
    last, desired = -math.inf, least
    for seconds, rate, queue in pieces:
        fleet.run(seconds, rate, queue, step=5.0)
    for at, one in fleet.decisions:
        assert one.before == desired
        assert limits.least <= one.desired <= limits.most
        assert (one.desired > one.before) is (one.direction == UP)
        assert (one.desired < one.before) is (one.direction == DOWN)
        assert one.reason
        if one.direction == DOWN:
            assert at - max(last, 0.0) >= (held if one.reason.startswith("utilisation below") else PLAN_KEEPS)
            assert one.before - one.desired <= max(1, MOST_REMOVED * one.before)
        last, desired = at if one.direction != AGAIN else last, one.desired


@pytest.mark.parametrize("policy", [RULES, PLAN])
def test_drained_workers_are_neither_coming_nor_removed_and_others_take_their_place(policy: str) -> None:
    scaler = Scaler(ScaleLimits(policy=policy, most=2, idle_after=60.0), 1, 0.0)
    drained = ModelState(0, 0.0, 1.0, 0.0, drained=1)
    decision = scaler.decide(drained, 1.0)
    assert decision is not None
    assert (decision.before, decision.desired, scaler.coming) == (1, 2, 1)
    assert scaler.starts_in(1.0) is not None
    assert scaler.decide(msgspec.structs.replace(drained, ready=1, capacity=100.0), 2.0) is None
    assert (scaler.desired, scaler.coming, scaler.foreseen) == (2, 0, scaler.utilisation)
    assert scaler.decide(msgspec.structs.replace(drained, drained=2), 3.0) is None
    assert (scaler.desired, scaler.coming, scaler.late, scaler.starts_in(3.0)) == (2, 0, 0, None)


RULE = st.one_of(
    st.builds(
        ScaleRule, st.just(QUEUE_ABOVE), st.integers(0, 10_000).map(float), st.floats(0, 86_400), st.integers(1, 1000)
    ),
    st.builds(ScaleRule, st.just(UTILISATION_ABOVE), st.floats(0.6, 10), st.floats(0, 86_400), st.integers(1, 1000)),
    st.builds(ScaleRule, st.just(UTILISATION_BELOW), st.floats(0, 0.5), st.floats(0, 86_400), st.integers(-1000, -1)),
)


def test_no_text_means_the_usual_rules() -> None:
    assert read("") == USUAL
    assert [rule.change for rule in USUAL] == [3, 1, 1, -1]


@given(st.lists(RULE, min_size=1, max_size=32))
def test_rules_are_read_as_they_were_written(rules: list[ScaleRule]) -> None:
    assert read(write(rules)) == tuple(rules)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("{}", "not a list"),
        ("[]", "0 rules"),
        ("[1]", "rule 1 is not a table"),
        ('[{"queue_above": 1, "for_s": 1}]', "lacks add or remove"),
        ('[{"for_s": 1, "add": 1}]', "lacks queue_above, .* or utilisation_below"),
        ('[{"queue_above": 1, "add": 1}]', "lacks for_s"),
        ('[{"queue_above": 1, "for_s": 1, "add": 1, "remove": 1}]', "both add and remove.*two rules"),
        ('[{"queue_above": 1, "for_s": 1, "adds": 1}]', "'adds'.* a rule may have queue_above, .*, add, remove"),
        ('[{"queue_above": 1, "for_s": 1, "add": 0}]', "whole number"),
        ('[{"queue_above": 1, "for_s": 1, "add": 1.5}]', "whole number"),
        ('[{"queue_above": 1, "for_s": 1, "add": true}]', "not a number"),
        ('[{"queue_above": -1, "for_s": 1, "add": 1}]', "queue_above = -1"),
        ('[{"queue_above": 1, "for_s": "30", "add": 1}]', "for_s = '30'"),
        ('[{"queue_above": 1, "for_s": 1, "remove": 1}]', "remove with queue_above.*write add"),
        ('[{"utilisation_below": 0.4, "for_s": 1, "add": 1}]', "add with utilisation_below.*write remove"),
        (
            '[{"utilisation_below": 0.9, "for_s": 1, "remove": 1}, {"utilisation_above": 0.8, "for_s": 1, "add": 1}]',
            "it would flap",
        ),
    ],
)
def test_what_is_no_list_of_rules_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(NoRules, match=reason):
        read(text)
