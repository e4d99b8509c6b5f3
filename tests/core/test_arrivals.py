import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.arrivals import instants, poisson, replay, uniform
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
        f"trace = '{len(record)} arrivals in 0 s': has no rate. Use one with arrivals at two or more times."
    )


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("stream", [uniform, partial(poisson, rng=random.Random(1)), partial(replay, [0.0, 1.0])])
def test_a_rate_that_is_none_is_refused_at_once(stream: Callable[..., Iterator[float]], rate: float) -> None:
    with pytest.raises(SettingError) as caught:
        stream(rate=rate)
    assert str(caught.value) == f"rate = {rate!r}: must be a positive number of requests per second. For example 1000."


def read(text: str) -> list[float]:
    return list(instants(text.splitlines(keepends=True), "t.csv"))


@pytest.mark.parametrize(
    "text",
    [
        "5\n5.25\n7\n",
        "timestamp\n5\n5.25\n7",
        "\ufeffTIMESTAMP\r\n5\r\n5.25\r\n\r\n7\r\n",
        "id, Timestamp \na, 5\nb, 5.25\nc, 7\n",
        '"2024-01-01T00:00:00+00:00"\n"2024-01-01T00:00:00.25Z"\n"2024-01-01T02:00:02+02:00"\n',
    ],
)
def test_every_shape_of_trace_is_read(text: str) -> None:
    assert read(text) == pytest.approx([0.0, 0.25, 2.0])


def test_nothing_is_read_before_it_is_asked_for() -> None:
    stream = instants(iter(["1\n", "2\n", "broken\n"]), "t.csv")
    assert [next(stream), next(stream)] == [0.0, 1.0]
    with pytest.raises(SettingError):
        next(stream)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("when,tokens\n1,2\n", r"t\.csv.*no column TIMESTAMP.*'when,tokens'"),
        ("1,2\n3,4\n", "no column TIMESTAMP"),
        ("seconds\n1\n", "no column TIMESTAMP"),
        ("XTIMESTAMP\n1\n", "no column TIMESTAMP"),
        ("TIMESTAMP\n1\n2\nthree\n", "line 4: 'three' is not a time like the others"),
        ("TIMESTAMP\nyesterday\n", "line 2: 'yesterday' is not a time"),
        ("a,TIMESTAMP\n1,1\n2\n", "line 3: '' is not a time"),
        ("1\nnan\n", "line 2: 'nan' is not a time"),
        ("1\ninf\n", "line 2: 'inf' is not a time"),
        ("TIMESTAMP\n1\n2023-11-16 18:17:03\n", "line 3: '2023-11-16 18:17:03' is not a time like the others"),
        ("TIMESTAMP\n2023-11-16 18:17:03\n1\n", "line 3: '1' is not a time like the others"),
        ("TIMESTAMP\n2023-11-16 18:17:03\n2023-11-16 18:17:04Z\n", "line 3"),
        ("1\n\n3\n2.5\n", "line 4: '2.5' is earlier than the line before it"),
        ("1\n" + "9" * 200_000 + "\n", "line 2 is not CSV: field larger"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        read(text)


@given(st.lists(st.floats(0, 1e9), min_size=1).map(sorted))
def test_seconds_survive_the_round_trip(recorded: list[float]) -> None:
    text = "TIMESTAMP\n" + "".join(f"{instant!r}\n" for instant in recorded)
    assert read(text) == [instant - recorded[0] for instant in recorded]


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = read(text)
    except SettingError:
        return
    assert found == sorted(found)
