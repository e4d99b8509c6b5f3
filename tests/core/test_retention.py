"""Budgets for kept outcomes, for waiting entries, and for anything that owners share."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.budget import GREED, Budget
from headway.core.queue_limits import OVERHEAD as ENTRY_OVERHEAD
from headway.core.queue_limits import Reservation, Room
from headway.core.retention import OVERHEAD, KeptLimits, Retention, weight
from headway.model import Failure, Reply
from tests.core.entries import entry

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
    """Items in order, each with its tenant, its size, its end, and whether it is spare."""

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


def test_greedy_owners_get_the_same_and_something_stays_free() -> None:
    budget = Budget(10_000)
    for _ in range(10_000):
        for owner in ("a", "b", "c", "d"):
            budget.take(owner, 1)
    assert len({budget.used(owner) for owner in ("a", "b", "c", "d")}) <= 2
    assert budget.free >= 10_000 // (1 + 4 * GREED)
    assert budget.take("newcomer", 1)


def test_who_holds_nothing_may_take_the_last() -> None:
    budget = Budget(100)
    assert budget.take("a", 100)
    assert not budget.take("b", 1)


def test_each_owner_may_have_a_fixed_bound_and_without_greed_all_may_be_one_owners() -> None:
    budget = Budget(100)
    asked = [("a", 2), ("a", 2), ("a", 1), ("b", 4)]
    assert [budget.take(owner, amount, most=3) for owner, amount in asked] == [True, False, True, False]
    budget = Budget(10, greed=0)
    assert [budget.take("a", 1) for _ in range(11)] == [True] * 10 + [False]


@given(st.integers(1, 1000), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-2, 300))))
def test_what_is_held_and_what_is_free_are_always_all(total: int, steps: list[tuple[str, int]]) -> None:
    budget, used = Budget(total), dict.fromkeys("abcd", 0)
    for owner, amount in steps:
        if amount < 0:
            if back := used[owner] if amount == -1 else used[owner] // 2:
                budget.give(owner, back)
                used[owner] -= back
        elif budget.take(owner, amount):
            used[owner] += amount
        assert budget.free == total - sum(used.values()) >= 0
        assert all(budget.used(owner) == amount for owner, amount in used.items())


MOST = 1_000_000


def fill(room: Room, tenant: str) -> list[Reservation]:
    reservations = []
    while (reservation := room.take(entry(tenant=tenant, input="x" * 9_000))) is not None:
        reservations.append(reservation)
    return reservations


@pytest.mark.parametrize("tenants", [2, 3, 9])
def test_however_many_take_all_they_can_there_is_room_for_one_more(tenants: int) -> None:
    room = Room(MOST)
    used = {tenant: fill(room, str(tenant)) for tenant in range(tenants)}
    for _ in range(30):  # Until nobody gets more: each tenant gives back what it has and takes what it can get.
        for tenant in range(tenants):
            used[tenant].clear()
            used[tenant] = fill(room, str(tenant))
    assert min(map(len, used.values())) >= 100 // (tenants + 1) - 1
    assert room.take(entry(tenant="another", input="x" * 9_000)) is not None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300_000), st.booleans()), max_size=50))
def test_all_that_was_taken_comes_back(steps: list[tuple[str, int, bool]]) -> None:
    room, reservations = Room(MOST), list[Reservation]()
    for tenant, length, leaves in steps:
        if leaves:
            del reservations[:1]
        reservations += filter(None, [room.take(entry(tenant=tenant, input="x" * length))])
        assert 0 <= room.free <= MOST
    reservations.clear()
    assert (room.free, room._used) == (MOST, {})


def test_an_entry_counts_with_all_that_it_holds_and_a_tenant_may_hold_all_that_is_free() -> None:
    room = Room(MOST)
    held = [room.take(entry(input="x" * 3000, parameters=b"y" * 50)), room.take(entry(input="☃" * 3000))]
    assert None not in held
    assert room.free == MOST - 2 * ENTRY_OVERHEAD - 3050 - 12_000
    assert Room(ENTRY_OVERHEAD + 9_000).take(entry(input="x" * 9_000)) is not None
    assert Room(ENTRY_OVERHEAD + 8_999).take(entry(input="x" * 9_000)) is None
