"""Debts of limits, and which of them are remembered."""

from __future__ import annotations

import pytest

from headway.core import ratelimit
from headway.core.ratelimit import Over, RateDebts, charge, interval, part, tolerance, wait
from headway.model import Limit

LIMIT = Limit("a", "user", 60.0, 2.0)
"""One a second, two at once."""
OTHER = Limit("b", "key", 240.0, 1.0)
NOW = 1000.0


def owed(book: RateDebts, limit: Limit, now: float) -> float:
    return max(book.tats.get(limit.id, now) - now, 0.0)


def take(book: RateDebts, now: float, *limits: Limit) -> Over | None:
    judged = charge(limits, book.tats, now)
    if isinstance(judged, Over):
        return judged
    book.tats.update(zip((limit.id for limit in limits), judged, strict=True))
    book.tidy(now)
    return None


def test_a_book_counts_what_was_written_and_forgets_it_with_time() -> None:
    book = RateDebts()
    assert owed(book, LIMIT, NOW) == 0.0
    assert take(book, NOW, LIMIT) is None
    assert owed(book, LIMIT, NOW) == pytest.approx(1.0)
    assert take(book, NOW, LIMIT) is None
    assert take(book, NOW, LIMIT) == Over(LIMIT, 1.0)
    assert owed(book, LIMIT, NOW + 0.5) == pytest.approx(1.5)
    assert owed(book, LIMIT, NOW + 9.0) == 0.0
    assert owed(book, OTHER, NOW) == 0.0


def test_a_request_that_one_limit_refuses_is_charged_to_none() -> None:
    book = RateDebts()
    assert take(book, NOW, LIMIT, OTHER) is None
    assert take(book, NOW, LIMIT, OTHER) == Over(OTHER, 0.25)
    assert owed(book, LIMIT, NOW) == pytest.approx(1.0)


def test_of_several_limits_the_one_that_takes_longest_is_told() -> None:
    book = RateDebts()
    slow = Limit("c", "tier", 6.0, 1.0)
    assert take(book, NOW, OTHER, slow) is None
    assert take(book, NOW, OTHER, slow) == Over(slow, 10.0)
    assert take(book, NOW, slow, OTHER) == Over(slow, 10.0)


def test_a_new_one_is_judged_from_now_on() -> None:
    assert charge([LIMIT], RateDebts().tats, NOW) == [NOW + 1.0]


def test_when_there_are_many_those_are_dropped_of_which_nothing_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratelimit, "LEAST_TATS", 4)
    book = RateDebts()
    limits = [Limit(str(number), "user", 60.0, 1.0) for number in range(6)]
    for limit in limits[:4]:
        assert take(book, NOW, limit) is None
    assert len(book.tats) == 4
    assert take(book, NOW + 1.0, limits[4]) is None
    assert list(book.tats) == ["4"]
    assert owed(book, limits[4], NOW + 1.0) == pytest.approx(1.0)
    assert book._most == 4


def test_as_long_as_all_of_them_are_owed_to_the_bound_is_twice_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratelimit, "LEAST_TATS", 2)
    book = RateDebts()
    for number in range(3):
        assert take(book, NOW, Limit(str(number), "user", 60.0, 1.0)) is None
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
