"""Budgets: nothing is lost or made of what they hold, and no owner leaves the others without."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.core.budget import GREED, Budget


def test_one_owner_gets_nine_tenths() -> None:
    budget = Budget(100)
    taken = sum(budget.take("a", 1) for _ in range(200))
    assert (taken, budget.used("a"), budget.free) == (90, 90, 10)
    assert budget.take("b", 1)


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
    budget.give("a", 100)
    assert budget.free == 100


def test_who_gives_some_back_holds_the_rest() -> None:
    budget = Budget(100)
    assert budget.take("a", 50)
    budget.give("a", 20)
    assert (budget.used("a"), budget.free) == (30, 70)
    budget.give("a", 30)
    assert (budget.used("a"), budget.free) == (0, 100)


def test_a_fixed_bound_of_each_owner() -> None:
    budget = Budget(100)
    asked = [("a", 2), ("a", 2), ("a", 1), ("b", 4)]
    assert [budget.take(owner, amount, most=3) for owner, amount in asked] == [True, False, True, False]


def test_without_greed_all_may_be_one_owners() -> None:
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
