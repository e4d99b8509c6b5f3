"""Look-ahead: the past it uses, what it rehearses, and when it switches to another rule."""

import random
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.core import look_ahead
from headway.core.departure import ENOUGH, EVERY, FEWEST, Load, Past, Policy, Rule, RunningBatches
from headway.core.look_ahead import EVENTS, LOOKS, RETURN_GAP, STEP_EVENTS, LookAhead, Rehearsal
from headway.core.policies.paced import Paced, Window
from headway.core.slot_factors import FACTORS, USUAL
from headway.simulator.engine import simulate
from headway.simulator.report import percentile
from headway.simulator.scenario import Eager, Scenario

ALIKE = Load(rate=400.0, alpha=0.05, beta=0.0, slots=4, max_batch=32, departures=100)
PACES = tuple({USUAL: 1, USUAL + 2: 1}.get(position, 0) for position in range(len(FACTORS)))
UNLIKE = Load(rate=330.0, alpha=0.05, beta=0.0, slots=2, max_batch=32, paces=PACES, departures=100)


NOTHING = RunningBatches()


class Stream:
    """Poisson arrivals that leave in batches. After each batch, the policy is asked for a rule."""

    def __init__(self, policy: Paced, load: Load) -> None:
        self.policy, self.load, self.past = policy, load, Past()
        self.rng, self.now, self.departures = random.Random(3), 0.0, load.departures
        self.rules: list[Rule] = []

    def pass_by(self, batches: int, size: int = 10) -> list[Rule]:
        """Let batches leave. Returns the rule after each."""
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


def test_gaps_are_even_without_a_past_and_for_alike_gpus_under_poisson_arrivals() -> None:
    policy = Paced()
    assert policy.rule(ALIKE) == policy.spaced(ALIKE)
    policy = Paced()
    assert set(Stream(policy, ALIKE).pass_by(1500)) == {policy.spaced(ALIKE)}


def test_two_gpus_of_which_one_is_slower_leave_at_once() -> None:
    policy = Paced()
    rules = Stream(policy, UNLIKE).pass_by(1500)
    assert set(rules[: 100 * (LOOKS - 1)]) == {policy.spaced(UNLIKE)}, "nothing is chosen after few looks"
    assert rules[-1].headway == 0.0


def test_a_bound_on_the_wait_bounds_the_window_that_is_tried() -> None:
    assert Paced(0.01)._ahead._rules["window"](ALIKE).window == 0.01


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls, served = [0], look_ahead.Rehearsal._serve

    def counted(self: look_ahead.Rehearsal, freed: int | None, now: float) -> None:
        calls[0] += 1
        served(self, freed, now)

    monkeypatch.setattr(look_ahead.Rehearsal, "_serve", counted)
    return calls


def test_looks_take_no_more_than_their_share(events: list[int]) -> None:
    """If there are many arrivals, only some are rehearsed, and each call for a rule does bounded work."""
    stream = Stream(Paced(), replace(ALIKE, rate=2000.0, slots=8, max_batch=100))
    most = 0
    for _ in range(2000):
        before = events[0]
        stream.pass_by(1, size=20)
        most = max(most, events[0] - before)
    assert 0 < most <= look_ahead.STEP_EVENTS
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
    """Records of bursts vary, but that isn't a step in the rate."""
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


@pytest.mark.parametrize(
    ("rules", "count", "slots", "rate"),
    [
        (({"hold": hold, "leave": leave},), 16, 2, 100.0),
        (({"hold": hold}, {"hold": hold, "leave": leave}), 16, 2, 100.0),
        (({"hold": hold}, {"hold": hold, "leave": leave}), 4, 4, 40.0),
    ],
    ids=["rules of all", "rules of their own", "no more than slots"],
)
def test_clients_that_wait_are_looked_at_by_their_answers(
    rules: tuple[dict[str, Callable[[Load], Rule]], ...], count: int, slots: int, rate: float
) -> None:
    load = Load(rate=rate, alpha=0.1, beta=0.0, slots=slots, max_batch=64, departures=100)
    look, past = LookAhead(*rules), Past()
    clients(past, count, 0.0)
    assert past.clients == count
    for number in range(400):
        look.rule(replace(load, departures=100 + number), past)
    assert look.chosen == "leave"
    for number in range(60):
        past.ended(number % 7, NOTHING, 100.0 + number - 0.01, 100.0 + number)
    assert look.rule(load, past) == hold(load)


def ends(past: Past, count: int, together: list[int], newest: float) -> None:
    """End batches 0.1 s apart. In the gap before each, the latest arrival is at the fraction `newest`."""
    for number in range(count):
        now = number / 10
        past.ended(together[number % len(together)], NOTHING, now - 0.1 + newest * 0.1, now)


class TestClients:
    def test_as_many_entries_at_each_end_that_came_with_the_answers_are_clients(self) -> None:
        past = Past()
        ends(past, ENOUGH - 1, [16], newest=0.02)
        assert past.clients == 0
        ends(past, ENOUGH, [16, 16, 16, 15], newest=0.02)
        assert past.clients == 16

    def test_clients_that_ask_again_at_the_very_end_of_a_batch_are_seen_too(self) -> None:
        past = Past()
        for number in range(2 * ENOUGH):
            past.ended(64, NOTHING, (number - 1) / 8, number / 8)
        assert past.clients == 64

    def test_clients_are_counted_where_their_requests_have_rows(self) -> None:
        """16 clients with 4 rows each: 4 clients wait, and 48 rows run."""
        past, running = Past(), RunningBatches()
        running.left(48.0, 1, 0.0)
        past.each = 4.0
        for number in range(EVERY * ENOUGH):
            now = 0.1 * (number + 1)
            past.ended(4, running, now - 0.08, now)
        assert past.clients == 16

    @pytest.mark.parametrize("seed", range(5))
    def test_entries_whose_number_varies_are_none(self, seed: int) -> None:
        past, rng = Past(), random.Random(seed)
        ends(past, 200, [rng.randint(8, 24) for _ in range(51)], newest=0.02)
        assert past.clients == 0

    def test_clients_that_were_seen_are_clients_still_while_their_answers_lie_close(self) -> None:
        """If batches of several slots end almost simultaneously, the time until the next end says little."""
        past = Past()
        for number in range(200):
            now = number / 10
            past.ended(16, NOTHING, now - (0.1 if number < 40 else 0.05), now)
            assert past.clients == (16 if number >= ENOUGH - 1 else 0)
        for number in range(200, 400):
            past.ended(16, NOTHING, number / 10 - 0.01, number / 10)
        assert past.clients == 0


class TestRecord:
    def test_a_record_is_taken_once_it_is_long_enough(self) -> None:
        past = Past()
        for number in range(FEWEST - 1):
            past.left([number * 0.01], number * 0.01)
        assert past.take(1.0) == []
        past.left([5.0], 10.0)
        assert past.take(60.0) == []
        record = past.take(1.0)
        assert len(record) == FEWEST
        assert record == sorted(record)

    def test_nothing_is_noted_while_a_record_is_looked_at(self) -> None:
        past = Past()
        past.left([0.0] * FEWEST, 0.0)
        assert past.take(0.0)
        past.left([1.0] * FEWEST, 1.0)
        assert past.take(0.0) == []
        past.resume(2.0)
        past.left([1.5] * FEWEST, 1.9)
        assert past.take(0.0) == []
        past.left([1.9] * FEWEST, 2.0)
        assert past.take(0.0)


LOAD = Load(rate=400.0, alpha=0.05, beta=0.001, slots=3, max_batch=32)
POLICIES: dict[str, Callable[[], Policy]] = {"paced": Paced, "window": lambda: Window(0.04), "eager": Eager}


def poisson(rate: float, count: int, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))


def rehearsed(name: str, load: Load, arrivals: list[float], deviation: float = 0.0, clients: bool = False) -> Rehearsal:
    rule = POLICIES[name]().rule(load)
    return Rehearsal(load, lambda now, rate: rule, arrivals, deviation, clients)


def run(rehearsal: Rehearsal, until: float = float("inf")) -> Rehearsal:
    for _ in rehearsal.steps(until):
        pass
    return rehearsal


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60)
@given(
    gaps=st.lists(st.floats(0.0, 0.3), min_size=1, max_size=120),
    slots=st.integers(1, 5),
    max_batch=st.integers(1, 16),
    deviation=st.sampled_from([0.0, 0.3]),
)
def test_every_arrival_is_answered_once_and_none_before_its_batch_can_end(
    name: str, gaps: list[float], slots: int, max_batch: int, deviation: float
) -> None:
    load = replace(LOAD, slots=slots, max_batch=max_batch)
    found = run(rehearsed(name, load, list(accumulate(gaps)), deviation))
    assert len(found.latencies) == len(gaps)
    assert min(found.latencies) >= (0.0 if deviation else load.batch_seconds(1) - 1e-9)


@pytest.mark.parametrize(
    ("name", "deviation", "load"), [("paced", 0.0, 0.7), ("paced", 0.3, 0.5), ("window", 0.0, 0.3), ("eager", 0.0, 0.7)]
)
def test_its_latencies_are_those_of_the_simulator(name: str, deviation: float, load: float) -> None:
    rate = load * 3 * 32 / LOAD.batch_seconds(32)
    scenario = Scenario(
        rate=rate, workers=3, alpha=0.05, beta=0.001, max_batch=32, jitter=deviation, overhead=0.0, policy=name,
        duration=8000 / rate, warmup=500 / rate,
    )  # fmt: skip
    simulated = percentile(sorted(simulate(scenario).latency), 0.95)
    known = replace(LOAD, rate=rate, deviation=deviation * LOAD.batch_seconds(10))
    found = run(rehearsed(name, known, poisson(rate, 8000), deviation))
    assert percentile(sorted(found.latencies[500:]), 0.95) == pytest.approx(simulated, rel=0.08)


@pytest.mark.parametrize("name", POLICIES)
def test_each_client_has_one_request_under_way(name: str) -> None:
    found = run(rehearsed(name, LOAD, [number * RETURN_GAP for number in range(10)], clients=True), 5.0)
    assert sum(size for _, size in found.answered) >= 10 * 5.0 / (0.05 + LOAD.batch_seconds(10)) / 2
    assert max(size for _, size in found.answered) <= 10
    times = [at for at, _ in found.answered]
    assert times == sorted(times)


def test_a_slow_slot_takes_as_much_longer() -> None:
    paces = [0] * 12
    paces[4], paces[9] = 1, 1
    load = replace(LOAD, slots=2, beta=0.0, paces=tuple(paces))
    found = run(rehearsed("eager", load, [0.0, 0.001]))
    assert found.latencies[1] > 2.0 * found.latencies[0]


def test_it_pauses_now_and_then() -> None:
    rehearsal = rehearsed("paced", LOAD, poisson(400.0, 4000))
    assert sum(1 for _ in rehearsal.steps()) == rehearsal.events // STEP_EVENTS > 2
