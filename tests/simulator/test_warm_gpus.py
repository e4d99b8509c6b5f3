"""Simulated GPUs that cannot hold all models: as many loads as an optimum would need, and none while nothing changes."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.simulated.warm_models import fewest
from tests.simulator.warm_gpus import Arrival, WarmScenario, simulate_warm

MODELS = tuple("abcdef")
SCENARIO = WarmScenario(MODELS, 2, 3, 5.0, 0.1, 0.01, 8, 60.0)


def arrivals(rate: float, seconds: float, turns_at: float) -> Iterator[Arrival]:
    rng = random.Random(7)
    weights, now = [1.0 / (rank + 1) for rank in range(len(MODELS))], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        yield now, rng.choices(MODELS if now < turns_at else MODELS[::-1], weights)[0]


def test_a_place_for_each_model_needs_the_first_loads_and_no_others() -> None:
    record = simulate_warm(SCENARIO, arrivals(5.0, 200.0, 100.0))
    assert [loaded.at for loaded in record.loads] == [0.0] * len(MODELS)
    assert not record.lost
    assert max(record.longest.values()) <= 8.0


def test_too_few_places_need_at_most_twice_the_loads_of_the_optimum() -> None:
    few, asked = replace(SCENARIO, room=2), list(arrivals(0.2, 1500.0, 750.0))
    record = simulate_warm(few, asked)
    assert len(record.loads) <= 2 * fewest([{model} for _, model in asked], 4)
    assert not record.lost
    assert len(record.warm) + len(record.cold) == len(asked)


def test_one_model_that_needs_more_than_a_gpu_gets_the_other_one_and_keeps_it() -> None:
    one, seconds = replace(SCENARIO, room=1, models=("a", "b")), 100.0
    record = simulate_warm(one, ((number / 60, "a") for number in range(int(60 * seconds))))
    assert [(loaded.move.model, loaded.move.reason) for loaded in record.loads[2:]] == [("a", "busy")]
    again = simulate_warm(one, ((number / 60, "a") for number in range(int(60 * seconds))))
    assert again == record, "the same arrivals, the same run"


def test_requests_that_nobody_can_serve_in_time_are_given_up() -> None:
    hasty = replace(SCENARIO, room=1, models=("a", "b", "c"), timeout=2.0)
    record = simulate_warm(hasty, [(20.0, "c"), (20.1, "b")])
    assert record.lost == {"c": 1}
    assert len(record.warm) == 1


@pytest.mark.parametrize(
    ("needs", "places", "loads"),
    [("abab", 2, 2), ("abcab", 2, 4), ("abcabc", 3, 3), ("aaaa", 1, 1), ("abacabac", 2, 5)],
)
def test_the_optimum_evicts_what_is_asked_for_last(needs: str, places: int, loads: int) -> None:
    assert fewest([{model} for model in needs], places) == loads
