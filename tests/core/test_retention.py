"""Budgets of kept outcomes, against a naive model that looks through all of them."""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from headway.core.retention import OVERHEAD, KeptLimits, Retention, weight
from headway.model import Failure, Reply

LIMITS = KeptLimits.of(total=100, tenant=40)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("aab"), st.integers(1, 25), st.integers(1, 30), st.booleans()),
        st.tuples(st.just("add"), st.sampled_from("cdefg"), st.integers(1, 25), st.integers(1, 30), st.booleans()),
        st.tuples(st.just("remove"), st.integers(0, 40)),
        st.tuples(st.just("pass"), st.integers(0, 5)),
    ),
    max_size=60,
)


class Naive:
    """Items in order, each with tenant, size, end and whether it is spare."""

    def __init__(self) -> None:
        self.items: dict[int, tuple[str, int, int, bool]] = {}

    def bytes(self) -> dict[str, int]:
        found: dict[str, int] = defaultdict(int)
        for tenant, size, _, _ in self.items.values():
            found[tenant] += size
        return found

    def drop(self, tenant: str) -> int:
        own = [number for number, item in self.items.items() if item[0] == tenant]
        first = min(own, key=lambda number: (not self.items[number][3], number))
        del self.items[first]
        return first

    def add(self, number: int, item: tuple[str, int, int, bool]) -> list[int]:
        self.items[number] = item
        gone = []
        while self.bytes()[item[0]] > LIMITS.tenant:
            gone.append(self.drop(item[0]))
        while sum(self.bytes().values()) > LIMITS.total:
            gone.append(self.drop(min(self.bytes(), key=lambda tenant: (-self.bytes()[tenant], tenant))))
        return gone

    def overdue(self, now: int) -> set[int]:
        gone = {number for number, item in self.items.items() if item[2] <= now}
        for number in gone:
            del self.items[number]
        return gone


@given(STEPS)
def test_retention_lets_go_of_the_items_that_a_naive_model_lets_go_of(steps: list[tuple[object, ...]]) -> None:
    retention: Retention[int] = Retention(LIMITS)
    naive, numbers, now = Naive(), itertools.count(), 0
    for step in steps:
        match step:
            case ("add", str(tenant), int(size), int(keep), bool(spare)):
                number = next(numbers)
                gone = retention.add(number, tenant, size, now + keep, spare=spare)
                assert gone == naive.add(number, (tenant, size, now + keep, spare))
            case ("remove", int(number)):
                retention.remove(number)
                naive.items.pop(number, None)
            case ("pass", int(seconds)):
                now += seconds
                assert set(retention.overdue(now)) == naive.overdue(now)
        assert retention.bytes == sum(naive.bytes().values()) <= LIMITS.total
        assert len(retention) == len(naive.items)


def test_who_keeps_no_more_than_an_equal_part_loses_nothing_to_others() -> None:
    retention: Retention[tuple[str, int]] = Retention(KeptLimits.of(total=1000, tenant=1000))
    for tenant in ("modest", "small"):
        for number in range(10):
            assert retention.add((tenant, number), tenant, 33, 1e9, spare=number % 2 == 0) == []
    for number in range(500):
        gone = retention.add(("greedy", number), "greedy", 7, 1e9, spare=False)
        assert all(tenant == "greedy" for tenant, _ in gone)


def test_nothing_is_remembered_of_what_went() -> None:
    retention: Retention[int] = Retention(KeptLimits.of(total=100, tenant=100))
    for number in range(10_000):
        retention.add(number, f"tenant {number}", 10, 1e9, spare=False)
    assert len(retention) == 10
    for name, value in vars(retention).items():
        assert name in ("limits", "bytes", "_numbers") or len(value) < 100


def test_the_last_one_of_all_may_go() -> None:
    retention: Retention[int] = Retention(KeptLimits.of(total=100, tenant=100))
    for number in range(3):
        assert retention.add(number, "only", 10, 5.0, spare=False) == []
        assert retention.overdue(4.9) == []
        assert retention.overdue(5.0) == [number]
        assert (len(retention), retention.bytes) == (0, 0)


def test_text_that_may_take_four_bytes_a_character_counts_so() -> None:
    assert weight("x" * 100) == OVERHEAD + 100
    assert weight("x" * 99 + "\U0001f600") == OVERHEAD + 400
    assert weight(None) > OVERHEAD


def test_an_outcome_of_the_largest_size_is_kept_and_a_larger_one_is_not() -> None:
    limits = KeptLimits.of(10_000, 10_000)
    room = limits.largest - OVERHEAD
    assert limits.keeps(Reply("id", "t", "x" * room))
    assert not limits.keeps(Reply("id", "t", "x" * (room + 1)))
    assert limits.keeps(Reply("id", "t", None, Failure("SHED", "busy")))


def test_budgets_shrink_with_the_memory_there_is_and_are_split_between_shards() -> None:
    limits = KeptLimits.of(256, 64)
    assert (limits.tenant, limits.largest) == (64, 16)
    assert repr(KeptLimits.of(100, 31).largest) == "7"
    assert KeptLimits.of(64, 256) == KeptLimits.of(64, 64)
    assert limits.within(1000) == limits
    assert limits.within(128) == KeptLimits.of(128, 32)
    assert limits.within(256) is limits
    assert repr(limits.within(127)) == repr(KeptLimits.of(127, 31))
    assert repr(limits.split(3)) == repr(KeptLimits.of(85, 64))
    assert limits.split(1) == limits
    assert limits.split(2) == KeptLimits.of(128, 64)
    assert limits.split(16) == KeptLimits.of(16, 16)
