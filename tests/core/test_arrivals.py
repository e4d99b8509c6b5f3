from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise, takewhile
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.arrivals import poisson, replay, uniform
from headway.errors import SettingError

RATES = st.floats(0.01, 1e5)
RECORDS = st.lists(st.floats(0, 1e3), min_size=2, max_size=40).map(sorted).filter(lambda r: r[-1] - r[0] > 1e-3)


def variation(instants: list[float]) -> float:
    gaps = [after - before for before, after in pairwise(instants)]
    return pstdev(gaps) / fmean(gaps)


@given(RATES, st.integers(0, 2**32))
def test_poisson_never_goes_back_and_repeats_by_seed(rate: float, seed: int) -> None:
    instants = list(islice(poisson(rate, random.Random(seed)), 50))
    assert instants[0] >= 0
    assert all(before <= after for before, after in pairwise(instants))
    assert instants == list(islice(poisson(rate, random.Random(seed)), 50))


@pytest.mark.parametrize("rate", [0.5, 100.0, 10_000.0])
def test_poisson_has_the_rate_and_the_spread_asked_for(rate: float) -> None:
    instants = list(islice(poisson(rate, random.Random(7)), 20_000))
    assert len(instants) / instants[-1] == pytest.approx(rate, rel=0.03)
    assert variation(instants) == pytest.approx(1.0, abs=0.03)


def test_poisson_counts_per_window_spread_as_much_as_they_count() -> None:
    counts = [0] * 1000
    for instant in takewhile(lambda t: t < 1000, poisson(20.0, random.Random(3))):
        counts[int(instant)] += 1
    assert pstdev(counts) ** 2 == pytest.approx(20.0, rel=0.15)


def test_poisson_arrivals_differ_by_seed() -> None:
    assert next(poisson(1.0, random.Random(1))) != next(poisson(1.0, random.Random(2)))


@given(RATES)
def test_uniform_arrivals_are_evenly_spaced(rate: float) -> None:
    instants = list(islice(uniform(rate), 100))
    assert instants[0] == 0
    assert instants[-1] == pytest.approx(99 / rate)
    assert variation(instants) == pytest.approx(0.0, abs=1e-6)


@given(RECORDS, RATES, st.floats(-1e6, 1e6))
def test_replay_keeps_the_shape_and_takes_the_rate(record: list[float], rate: float, origin: float) -> None:
    shifted = [origin + instant for instant in record]
    laps = list(islice(replay(shifted, rate), 3 * len(record)))
    assert laps[0] == 0
    assert all(before <= after + 1e-9 for before, after in pairwise(laps))
    own = (len(shifted) - 1) / (shifted[-1] - shifted[0])
    for again, recorded in zip(laps, shifted, strict=False):
        assert again == pytest.approx((recorded - shifted[0]) * own / rate)


@given(RECORDS, RATES)
def test_replay_has_the_rate_over_any_number_of_whole_laps(record: list[float], rate: float) -> None:
    start_of_fourth_lap = next(islice(replay(record, rate), 3 * len(record), None))
    assert 3 * len(record) / start_of_fourth_lap == pytest.approx(rate)


@pytest.mark.parametrize("record", [[], [1.0], [2.0, 2.0, 2.0]])
def test_a_record_without_a_span_is_refused(record: list[float]) -> None:
    with pytest.raises(SettingError) as caught:
        replay(record, 10.0)
    assert str(caught.value) == (
        f"trace = '{len(record)} arrivals in 0 s': has no rate. Use one with arrivals at two instants or more."
    )


def test_a_record_may_be_short_and_begin_anywhere() -> None:
    assert list(islice(replay([7.0, 7.5], 1.0), 3)) == pytest.approx([0.0, 1.0, 2.0])


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("stream", [uniform, partial(poisson, rng=random.Random(1)), partial(replay, [0.0, 1.0])])
def test_a_rate_that_is_none_is_refused_at_once(stream: Callable[..., Iterator[float]], rate: float) -> None:
    with pytest.raises(SettingError) as caught:
        stream(rate=rate)
    assert str(caught.value) == (
        f"rate = {rate!r}: must be a positive number of requests per second. For example 1000."
    )
