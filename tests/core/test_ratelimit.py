"""Rate limits: each behaves like a token bucket, and several are charged together."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import ratelimit
from headway.core.ratelimit import ROUNDING, CallPace, Over, RateDebts, charge, interval, part, tolerance, wait
from headway.model import Limit

QUOTAS = st.builds(
    Limit,
    id=st.just("u"),
    name=st.just("user"),
    rate=st.sampled_from([1.0, 6.0, 60.0, 240.0, 1000.0]),
    burst=st.integers(1, 20).map(float),
)
GAPS = st.lists(st.integers(0, 4000), max_size=80)


class Bucket:
    """A token bucket in exact fractions. It holds `burst` tokens and gains rate / 60 a second; a request takes one."""

    def __init__(self, quota: Limit) -> None:
        self.size = Fraction(quota.burst)
        self.pace = Fraction(quota.rate) / 60
        self.tokens = self.size
        self.at = Fraction(0)

    def take(self, cost: int, at: Fraction) -> bool:
        self.tokens = min(self.size, self.tokens + (at - self.at) * self.pace)
        self.at = at
        if self.tokens < cost:
            return False
        self.tokens -= cost
        return True


def check(limit: Limit, tat: float, now: float) -> tuple[float, float]:
    """Return a limit's state after one request, and the seconds until the request fits (0 if it was admitted)."""
    charged = charge([limit], {limit.id: tat}, now)
    if isinstance(charged, Over):
        assert charged.limit is limit
        assert charged.retry_after == wait(limit, max(0.0, tat - now)) > 0.0
        return tat, charged.retry_after
    assert wait(limit, max(0.0, tat - now)) == 0.0
    return charged[0], 0.0


@given(QUOTAS, GAPS)
def test_agrees_with_a_token_bucket_to_the_request(quota: Limit, gaps: list[int]) -> None:
    bucket, tat, milliseconds = Bucket(quota), 0.0, 0
    for gap in gaps:
        milliseconds += gap
        tat, retry_after = check(quota, tat, milliseconds / 1000)
        assert (retry_after == 0.0) == bucket.take(1, Fraction(milliseconds, 1000))
        owed = max(0.0, tat - milliseconds / 1000)
        assert int((tolerance(quota) - owed) / interval(quota) + ROUNDING) == int(bucket.tokens)
        assert owed == pytest.approx(float((bucket.size - bucket.tokens) / bucket.pace), abs=1e-6)


@given(QUOTAS, GAPS)
def test_a_refusal_says_when_the_same_request_fits(quota: Limit, gaps: list[int]) -> None:
    tat, now = 0.0, 0.0
    for gap in gaps:
        now += gap / 1000
        tat, retry_after = check(quota, tat, now)
        if retry_after:
            assert check(quota, tat, now + retry_after)[1] == 0.0
            assert check(quota, tat, now + retry_after - 0.001)[1] > 0.0


@given(st.lists(QUOTAS, min_size=1, max_size=3), GAPS)
def test_several_limits_are_charged_all_or_none(quotas: list[Limit], gaps: list[int]) -> None:
    """Several limits decide as each would alone. If some are exceeded, the one with the longest wait is named."""
    limits = [Limit(f"u{place}", quota.name, quota.rate, quota.burst) for place, quota in enumerate(quotas)]
    tats: dict[str, float] = {}
    now = 100.0
    for gap in gaps:
        now += gap / 1000
        each = [check(limit, tats.get(limit.id, 0.0), now) for limit in limits]
        charged = charge(limits, dict(tats), now)
        if isinstance(charged, Over):
            assert charged.retry_after == max(retry_after for _, retry_after in each)
            assert each[limits.index(charged.limit)][1] == charged.retry_after
        else:
            assert each == [(tat, 0.0) for tat in charged]
            tats.update(zip((limit.id for limit in limits), charged, strict=True))


LIMIT = Limit("a", "user", 60.0, 2.0)
"""One a second, two at once."""
NOW = 1000.0


def take(book: RateDebts, now: float, limit: Limit) -> None:
    judged = charge([limit], book.tats, now)
    assert not isinstance(judged, Over)
    [book.tats[limit.id]] = judged
    book.tidy(now)


def test_of_several_limits_the_one_that_takes_longest_is_told() -> None:
    quick, slow = Limit("b", "key", 240.0, 1.0), Limit("c", "tier", 6.0, 1.0)
    tats = {"b": NOW + 0.25, "c": NOW + 10.0}
    assert charge([quick, slow], tats, NOW) == charge([slow, quick], tats, NOW) == Over(slow, 10.0)


def test_when_there_are_many_those_are_dropped_of_which_nothing_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratelimit, "LEAST_TATS", 4)
    book = RateDebts()
    limits = [Limit(str(number), "user", 60.0, 1.0) for number in range(6)]
    for limit in limits[:4]:
        take(book, NOW, limit)
    assert len(book.tats) == 4
    take(book, NOW + 1.0, limits[4])
    assert book.tats == pytest.approx({"4": NOW + 2.0})
    assert book._most == 4


def test_as_long_as_all_of_them_are_owed_to_the_bound_is_twice_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratelimit, "LEAST_TATS", 2)
    book = RateDebts()
    for number in range(3):
        take(book, NOW, Limit(str(number), "user", 60.0, 1.0))
    assert (len(book.tats), book._most) == (3, 6)


def test_the_parts_of_a_limit_make_up_the_whole_and_let_at_least_one_in() -> None:
    limit = Limit("a", "user", 60.0, 10.0)
    assert part(limit, 4) == Limit("a", "user", 15.0, 2.5)
    assert part(limit, 20) == Limit("a", "user", 3.0, 1.0)
    assert part(limit, 10) == Limit("a", "user", 6.0, 1.0)


def test_a_burst_below_one_lets_one_in() -> None:
    small = Limit("a", "user", 30.0, 0.5)
    assert (interval(small), tolerance(small), tolerance(Limit("a", "user", 30.0, 3.0))) == (2.0, 2.0, 6.0)
    assert tolerance(Limit("a", "user", 30.0, 1.5)) == 3.0
    assert wait(small, 0.0) == 0.0
    assert wait(small, 0.5) == pytest.approx(0.5)
    assert wait(Limit("a", "user", 30.0, 1.5), 1.0) == 0.0
    assert wait(Limit("a", "user", 30.0, 1.5), 1.5) == pytest.approx(0.5)


def test_what_arithmetic_alone_makes_late_is_in_time() -> None:
    assert wait(LIMIT, 1.0 + ratelimit.ROUNDING / 2) == 0.0
    assert wait(LIMIT, 1.0 + ratelimit.ROUNDING * 2) > 0.0


def test_calls_at_once_wait_for_their_turns_rest_saves_none_up_and_without_a_rate_nobody_waits() -> None:
    pace = CallPace(8.0)
    assert [pace.take(0.0) for _ in range(3)] == pytest.approx([0.0, 0.125, 0.25])
    assert pace.take(0.3) == pytest.approx(0.075)
    assert [pace.take(9.0), pace.take(9.0)] == pytest.approx([0.0, 0.125])
    pace = CallPace(0.0)
    assert [pace.take(0.0) for _ in range(1000)] == [0.0] * 1000
