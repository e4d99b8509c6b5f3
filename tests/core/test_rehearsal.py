"""Rehearsals: the small model beside what must hold in it, and beside the simulator."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.core.departure import Load, Policy
from headway.core.policies.paced import Paced
from headway.core.policies.windows import Window
from headway.core.rehearsal import RETURN_GAP, STEP_EVENTS, Rehearsal
from headway.simulator.engine import simulate
from headway.simulator.report import percentile
from headway.simulator.scenario import Eager, Scenario

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


def test_it_is_the_same_each_time() -> None:
    once, again = (run(rehearsed("paced", LOAD, poisson(400.0, 2000), 0.3)).latencies for _ in range(2))
    assert once == again


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("deviation", "load"), [(0.0, 0.3), (0.0, 0.7), (0.3, 0.5)])
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
    pauses = sum(1 for _ in rehearsal.steps())
    assert pauses == rehearsal.events // STEP_EVENTS > 2
