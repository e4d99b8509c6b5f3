"""Weight of an input, estimated from its length."""

from __future__ import annotations

import random
import statistics

import pytest

from headway.core.weight_estimate import MOST_WEIGHT, UNKNOWN, WeightEstimate, estimated, mean_line, octets
from headway.model import Value, WeightLine


def learnt(batches: list[list[tuple[int, int]]], most: int = 1000, max_batch: int = 32) -> WeightLine | None:
    """Line after batches of (length, weight)."""
    estimate = WeightEstimate("tokens", most, max_batch)
    for batch in batches:
        estimate.observe([length for length, _ in batch], [weight for _, weight in batch])
    return estimate.line


@pytest.mark.parametrize(
    ("value", "length"), [("", 0), ("abc", 3), ("é", 2), ("日本", 6), (b'{"a":1}', 7), ("\ud800", 3)]
)
def test_a_length_is_counted_in_octets(value: Value, length: int) -> None:
    assert octets(value) == length


def test_an_estimate_is_a_whole_number_from_1_on() -> None:
    assert estimated(UNKNOWN, "日本") == 6
    assert estimated(WeightLine(2.0, 0.25), "a" * 10) == 4
    assert estimated(WeightLine(-5.0, 0.25), "a") == 1
    assert estimated(WeightLine(0.0, 1e12), "a") == MOST_WEIGHT


def test_nothing_is_known_before_the_first_batch() -> None:
    assert learnt([]) is None
    assert WeightEstimate("tokens", 1, 1).mean == 0.0


def test_one_length_makes_a_line_through_the_origin() -> None:
    assert learnt([[(8, 4)]]) == WeightLine(0.0, 0.5)
    assert learnt([[(0, 3), (0, 3)]]) == WeightLine(3.0, 0.0)


def test_a_straight_relation_is_found_exactly() -> None:
    line = learnt([[(length, 2 + 3 * length) for length in (5, 10, 40)]])
    assert line is not None
    assert line.fixed == pytest.approx(2.0, abs=1e-3)
    assert line.by_octet == pytest.approx(3.0)


def test_what_falls_with_the_length_weighs_the_same_at_any_length() -> None:
    line = learnt([[(1, 30), (2, 20), (3, 10)]], most=0)
    assert line == WeightLine(20.0, 0.0)


def test_a_new_kind_of_inputs_is_learnt_within_some_batches() -> None:
    old, new = [(100, 25), (50, 13)], [(100, 100), (50, 50)]
    line = learnt([old] * 200 + [new] * 200, most=0)
    assert line is not None
    assert 97 <= estimated(line, "a" * 100) <= 100


def test_few_batches_that_are_full_by_the_estimate_are_heavier_than_the_bound() -> None:
    rng, most, sums = random.Random(1), 4000, []

    def drawn() -> tuple[int, int]:
        length = rng.randrange(20, 1500)
        return length, round(length * rng.uniform(0.15, 0.35)) + 2

    line = learnt([[drawn() for _ in range(32)] for _ in range(100)], most=most, max_batch=64)
    assert line is not None
    for _ in range(500):
        together = weight = 0
        while True:
            length, exact = drawn()
            together += estimated(line, "a" * length)
            if together > most:
                break
            weight += exact
        sums.append(weight)
    assert sum(weight > most for weight in sums) < 25
    assert statistics.mean(sums) > 0.75 * most


def test_the_lines_of_several_processes_are_averaged() -> None:
    assert mean_line([]) is None
    assert mean_line([WeightLine(1.0, 0.25), WeightLine(3.0, 0.5)]) == WeightLine(2.0, 0.375)
