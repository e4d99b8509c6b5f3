"""Lines fitted to the cost of batches and the weight of inputs, and how batches are cut."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.batch_cost import KNOWN_CALLS, LEAST_SAVED, MOST_CALLS, BatchCost, cut
from headway.core.queue_limits import QueueLimits
from headway.core.weight_estimate import MOST_WEIGHT, UNKNOWN, WeightEstimate, estimated, mean_line, octets
from headway.model import CostLine, CostShape, Value, WeightLine

ALPHA, BETA = 0.008, 1e-6
PADDED = CostLine(CostShape.PADDED, ALPHA, BETA)

Seconds = Callable[[Sequence[int]], float]


def by_number(weights: Sequence[int]) -> float:
    return ALPHA + 0.001 * len(weights)


def by_weight(weights: Sequence[int]) -> float:
    return ALPHA + BETA * sum(weights)


def padded(weights: Sequence[int]) -> float:
    return ALPHA + BETA * len(weights) * max(weights)


def constant(weights: Sequence[int]) -> float:
    return 0.1


def learnt(seconds: Seconds, batches: int = 60, noise: float = 0.0, seed: int = 1) -> BatchCost:
    rng, cost = random.Random(seed), BatchCost()
    for _ in range(batches):
        weights = [rng.randint(10, 2_000) for _ in range(rng.randint(1, 32))]
        cost.observe(weights, seconds(weights) * rng.uniform(1.0 - noise, 1.0 + noise))
    return cost


@pytest.mark.parametrize(
    ("seconds", "shape"),
    [
        (constant, CostShape.NUMBER),
        (by_number, CostShape.NUMBER),
        (by_weight, CostShape.WEIGHT),
        (padded, CostShape.PADDED),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_line_holds_that_tells_run_times_best(seconds: Seconds, shape: CostShape, noise: float) -> None:
    assert learnt(seconds, noise=noise).shape is shape


def in_calls(seconds: Seconds, lengths: Sequence[int], batches: int) -> tuple[BatchCost, int]:
    """Run full batches as they are cut. Returns what was learnt, and how many batches were cut."""
    cost, cuts = BatchCost(), 0
    for _ in range(batches):
        calls = cost.calls(lengths)
        cuts += len(calls) > 1
        cost.note_batch(lengths)
        for call in calls:
            cost.observe(weights := [lengths[place] for place in call], seconds(weights))
    return cost, cuts


MIXED = [2_000, *[100] * 31]


def test_that_a_model_pads_is_found_though_all_batches_are_alike() -> None:
    """All three lines fit full batches that each have one of the longest inputs. Trials tell them apart."""
    cost, _ = in_calls(padded, MIXED, 40)
    assert cost.shape is CostShape.PADDED
    assert (cost.line.alpha, cost.line.beta) == pytest.approx((ALPHA, BETA), rel=0.05)


@pytest.mark.parametrize("seconds", [constant, by_number])
def test_few_batches_of_a_model_that_does_not_pad_run_in_two_calls_on_trial(seconds: Seconds) -> None:
    cost, cuts = in_calls(seconds, MIXED, 10_000)
    assert cost.shape is CostShape.NUMBER
    assert cuts <= 7


@pytest.mark.parametrize("long", [1, 20])
def test_that_a_model_pads_is_found_where_batches_differ_in_size_alone(long: int) -> None:
    """From the first batch on, each has some of the longest inputs, and none is full."""
    cost, rng = BatchCost(), random.Random(1)
    for _ in range(2 * KNOWN_CALLS):
        weights = [*[2_000] * long, *[100] * rng.randint(10, 20)]
        calls = cost.calls(weights)
        cost.note_batch(weights)
        for call in calls:
            cost.observe(lengths := [weights[place] for place in call], padded(lengths))
    assert cost.shape is CostShape.PADDED


def test_batches_of_many_sizes_are_no_trial_where_their_number_says_nothing() -> None:
    cost, rng = BatchCost(), random.Random(1)
    for _ in range(1_000):
        weights = [2_000, *[100] * rng.randint(10, 20)]
        assert len(cost.calls(weights)) == 1
        cost.note_batch(weights)
        cost.observe(weights, 0.1)


def test_inputs_of_like_length_are_no_trial() -> None:
    assert in_calls(constant, [100] * 32, 1_000)[1] == 0
    assert in_calls(padded, [100], 1_000)[1] == 0
    assert in_calls(constant, [0] * 32, 1_000)[1] == 0


def test_the_coefficients_are_those_of_the_model_once_they_are_known() -> None:
    assert learnt(padded, batches=8).shape is CostShape.NUMBER
    line = learnt(padded).line
    assert (line.alpha, line.beta) == pytest.approx((ALPHA, BETA))
    assert line.error < 0.01


def test_a_model_that_changes_is_learnt_anew() -> None:
    cost, rng = learnt(padded), random.Random(3)
    for _ in range(250):
        cost.observe([rng.randint(10, 2_000) for _ in range(rng.randint(1, 32))], 0.1)
    assert cost.shape is CostShape.NUMBER


def test_two_lines_that_are_alike_do_not_take_turns() -> None:
    cost, rng, shapes = learnt(padded), random.Random(4), list[CostShape]()
    for _ in range(300):  # Well-cut calls: their weight is nearly the same with and without padding.
        weights = [rng.randint(990, 1_010) for _ in range(rng.randint(1, 32))]
        cost.observe(weights, padded(weights) * rng.uniform(0.9, 1.1))
        shapes.append(cost.shape)
    assert len([pair for pair in itertools.pairwise(shapes) if pair[0] is not pair[1]]) <= 1


@pytest.mark.parametrize(
    ("seconds", "shape", "most"), [(by_weight, CostShape.WEIGHT, 3), (padded, CostShape.PADDED, 2)]
)
def test_calls_count_by_weight_until_lengths_differ(seconds: Seconds, shape: CostShape, most: int) -> None:
    """Both lines fit until then. By weight, batches stay whole, and the first mixed ones show which line is right."""
    cost, rng = BatchCost(), random.Random(5)
    for _ in range(100):
        weights = [rng.randint(10, 2_000)] * rng.randint(1, 32)
        cost.observe(weights, seconds(weights) * rng.uniform(0.95, 1.05))
    assert cost.shape is CostShape.WEIGHT
    assert cost.errors[CostShape.WEIGHT] == cost.errors[CostShape.PADDED]
    whole = 0
    for _ in range(3):
        weights = [rng.randint(10, 2_000) for _ in range(32)]
        calls = cost.calls(weights)
        whole += len(calls) == 1
        for call in calls:
            cost.observe(lengths := [weights[place] for place in call], seconds(lengths) * rng.uniform(0.95, 1.05))
    assert cost.shape is shape
    assert 1 <= whole <= most


@pytest.mark.parametrize(("weights", "longest"), [([10, 100], 100.0), ([0, 0], 1.0)])
def test_the_mean_filled_up_length_counts_every_input_and_turns_are_finite(weights: list[int], longest: float) -> None:
    cost = BatchCost()
    cost.note_batch(weights)
    assert cost.line.longest == pytest.approx(longest)
    for beta in (0.0, 5e-324):
        limits = QueueLimits(1, 32).filling_up(CostLine(CostShape.PADDED, 1.0, beta, cost.line.longest))
        assert 0.0 < limits.padded_cost(1) <= limits.padded_cost(2_000_000_000) < math.inf


def seconds_of(calls: Sequence[Sequence[int]], weights: Sequence[int], line: CostLine = PADDED) -> float:
    return sum(line.alpha + line.beta * len(call) * max(weights[place] for place in call) for call in calls)


def least(weights: Sequence[int]) -> float:
    """Return the shortest time of any cut of the sorted batch. Tries them all."""
    line, count = sorted(weights), len(weights)
    bounds = itertools.chain.from_iterable(
        itertools.combinations(range(1, count), calls - 1) for calls in range(1, min(MOST_CALLS, count) + 1)
    )
    cuts = ([0, *inner, count] for inner in bounds)
    return min(sum(ALPHA + BETA * (to - at) * line[to - 1] for at, to in itertools.pairwise(ends)) for ends in cuts)


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=9))
def test_a_cut_is_the_best_there_is_or_saves_too_little(weights: list[int]) -> None:
    calls = cut(weights, PADDED)
    assert sorted(itertools.chain.from_iterable(calls)) == list(range(len(weights)))
    if (best := least(weights)) <= (1.0 - LEAST_SAVED) * padded(weights):
        assert seconds_of(calls, weights) == pytest.approx(best)
    else:
        assert calls == [list(range(len(weights)))]


@given(st.lists(st.integers(1, 100_000), min_size=65, max_size=400))
def test_a_large_batch_is_cut_well_too(weights: list[int]) -> None:
    calls = cut(weights, PADDED)
    assert sorted(itertools.chain.from_iterable(calls)) == list(range(len(weights)))
    assert len(calls) == 1 or seconds_of(calls, weights) <= (1.0 - LEAST_SAVED) * padded(weights)
    assert len(calls) <= MOST_CALLS


def line_of(batches: list[list[tuple[int, int]]], most: int = 1000, max_batch: int = 32) -> WeightLine | None:
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


def test_of_nothing_no_line_is_known_and_one_length_makes_one_through_the_origin() -> None:
    assert line_of([]) is None
    assert WeightEstimate("tokens", 1, 1).mean == 0.0
    assert line_of([[(8, 4)]]) == WeightLine(0.0, 0.5)
    assert line_of([[(0, 3), (0, 3)]]) == WeightLine(3.0, 0.0)


def test_a_straight_relation_is_found_exactly() -> None:
    line = line_of([[(length, 2 + 3 * length) for length in (5, 10, 40)]])
    assert line is not None
    assert line.fixed == pytest.approx(2.0, abs=1e-3)
    assert line.by_octet == pytest.approx(3.0)


def test_what_falls_with_the_length_weighs_the_same_at_any_length() -> None:
    assert line_of([[(1, 30), (2, 20), (3, 10)]], most=0) == WeightLine(20.0, 0.0)


def test_the_lines_of_several_processes_are_averaged() -> None:
    assert mean_line([]) is None
    assert mean_line([WeightLine(1.0, 0.25), WeightLine(3.0, 0.5)]) == WeightLine(2.0, 0.375)
