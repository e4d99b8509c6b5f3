"""Look-ahead: another rule holds where what has come of late shows that it does better, and only there."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from headway.core import rehearsal
from headway.core.batch import RunningBatches
from headway.core.departure import Load, Rule
from headway.core.look_ahead import EVENTS, LOOKS, LookAhead
from headway.core.past import Past
from headway.core.policies.paced import Paced
from headway.core.slot_factors import FACTORS, USUAL

ALIKE = Load(rate=400.0, alpha=0.05, beta=0.0, slots=4, max_batch=32, departures=100)
PACES = tuple({USUAL: 1, USUAL + 2: 1}.get(position, 0) for position in range(len(FACTORS)))
UNLIKE = Load(rate=330.0, alpha=0.05, beta=0.0, slots=2, max_batch=32, paces=PACES, departures=100)


NOTHING = RunningBatches()


class Stream:
    """Poisson arrivals that leave in batches, and the policy that is asked at each of them."""

    def __init__(self, policy: Paced, load: Load) -> None:
        self.policy, self.load, self.past = policy, load, Past()
        self.rng, self.now, self.departures = random.Random(3), 0.0, load.departures
        self.rules: list[Rule] = []

    def pass_by(self, batches: int, size: int = 10) -> list[Rule]:
        """Let batches leave; returns the rules that held."""
        begin = len(self.rules)
        for _ in range(batches):
            arrived = []
            for _ in range(size):
                self.now += self.rng.expovariate(self.load.rate)
                arrived.append(self.now)
            self.departures += 1
            self.past.left(arrived, self.now)
            self.rules.append(self.policy.rule(replace(self.load, past=self.past, departures=self.departures)))
        return self.rules[begin:]


def test_without_a_past_gaps_are_even() -> None:
    policy = Paced()
    assert policy.rule(ALIKE) == policy.spaced(ALIKE)


def test_alike_gpus_under_poisson_arrivals_keep_even_gaps() -> None:
    policy = Paced()
    assert set(Stream(policy, ALIKE).pass_by(1500)) == {policy.spaced(ALIKE)}


def test_two_gpus_of_which_one_is_slower_leave_at_once() -> None:
    policy = Paced()
    rules = Stream(policy, UNLIKE).pass_by(1500)
    assert rules[0] == policy.spaced(UNLIKE)
    assert rules[-1].headway == 0.0


def test_a_bound_on_the_wait_bounds_the_window_that_is_tried() -> None:
    assert Paced(0.01)._ahead._rules["window"](ALIKE).window == 0.01


def test_nothing_is_chosen_after_few_looks() -> None:
    stream = Stream(policy := Paced(), UNLIKE)
    assert set(stream.pass_by(100 * (LOOKS - 1))) == {policy.spaced(UNLIKE)}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of events that were rehearsed, as the one element."""
    calls, served = [0], rehearsal.Rehearsal._serve

    def counted(self: rehearsal.Rehearsal, freed: int | None, now: float) -> None:
        calls[0] += 1
        served(self, freed, now)

    monkeypatch.setattr(rehearsal.Rehearsal, "_serve", counted)
    return calls


def test_looks_take_no_more_than_their_share(events: list[int]) -> None:
    """Of many arrivals only a part is rehearsed, and what a rule that is asked for takes is bounded."""
    stream = Stream(Paced(), replace(ALIKE, rate=2000.0, slots=8, max_batch=100))
    most = 0
    for _ in range(2000):
        before = events[0]
        stream.pass_by(1, size=20)
        most = max(most, events[0] - before)
    assert 0 < most <= rehearsal.STEP_EVENTS
    assert events[0] <= EVENTS * (stream.now + 10.0)


def test_looks_become_rare_while_even_gaps_stay_best_and_come_back_with_another_rate(events: list[int]) -> None:
    stream = Stream(Paced(), replace(ALIKE, rate=2000.0, slots=8, max_batch=100))

    def per_second(batches: int) -> float:
        before, now = events[0], stream.now
        stream.pass_by(batches, size=20)
        return (events[0] - before) / (stream.now - now)

    first = per_second(1000)
    per_second(5000)
    assert per_second(20_000) < first / 8
    stream.load = replace(stream.load, rate=1000.0)
    assert per_second(2000) > first / 8
    assert stream.policy._ahead.chosen == "paced"


def chosen_after(stream: Stream, batches: int) -> list[str]:
    found = []
    for _ in range(batches):
        stream.pass_by(1)
        found.append(stream.policy._ahead.chosen)
    return found


def test_a_choice_does_not_outlive_the_rate_that_it_was_made_at() -> None:
    stream = Stream(Paced(), UNLIKE)
    assert chosen_after(stream, 1500)[-1] == "eager"
    stream.load = replace(UNLIKE, rate=1.25 * UNLIKE.rate)
    assert "paced" in chosen_after(stream, 100 * LOOKS)


def test_a_choice_outlives_rates_that_are_never_the_same() -> None:
    """Records of bursts differ from one to the next, which is no step."""
    stream = Stream(Paced(), UNLIKE)
    chosen_after(stream, 1500)
    kept = []
    for number in range(200):
        stream.load = replace(UNLIKE, rate=UNLIKE.rate * (0.25 if number // 10 % 2 else 1.25))
        kept += chosen_after(stream, 3 + number % 7)
    assert set(kept) == {"eager"}


def hold(load: Load) -> Rule:
    return Rule(64, headway=1.0)


def leave(load: Load) -> Rule:
    return Rule(64, headway=0.0)


def clients(past: Past, count: int, begin: float) -> float:
    now = begin
    for _ in range(40):
        now += 0.05
        past.ended(count, NOTHING, now - 0.049, now)
    return now


def test_clients_that_wait_are_looked_at_by_their_answers() -> None:
    load = Load(rate=100.0, alpha=0.1, beta=0.0, slots=2, max_batch=64, departures=100)
    look, past = LookAhead({"hold": hold, "leave": leave}), Past()
    clients(past, 16, 0.0)
    assert past.clients == 16
    for number in range(400):
        look.rule(replace(load, departures=100 + number), past)
    assert look.chosen == "leave"
    for number in range(60):
        past.ended(number % 7, NOTHING, 100.0 + number - 0.01, 100.0 + number)
    look.rule(load, past)
    assert look.chosen == "hold"


def test_clients_have_rules_of_their_own() -> None:
    load = Load(rate=100.0, alpha=0.1, beta=0.0, slots=2, max_batch=64, departures=100)
    look, past = LookAhead({"hold": hold}, {"hold": hold, "leave": leave}), Past()
    clients(past, 16, 0.0)
    for number in range(400):
        look.rule(replace(load, departures=100 + number), past)
    assert look.chosen == "leave"
    for number in range(60):
        past.ended(number % 7, NOTHING, 100.0 + number - 0.01, 100.0 + number)
    assert look.rule(load, past) == hold(load)


def test_clients_no_more_than_slots_are_looked_at_too() -> None:
    load = Load(rate=40.0, alpha=0.1, beta=0.0, slots=4, max_batch=64, departures=100)
    look, past = LookAhead({"hold": hold}, {"hold": hold, "leave": leave}), Past()
    clients(past, 4, 0.0)
    for number in range(400):
        look.rule(replace(load, departures=100 + number), past)
    assert look.chosen == "leave"
