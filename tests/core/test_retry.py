"""What becomes of a batch that failed: isolation by halves, backoff, and the budget."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.retry import (
    BACKOFF_BASE,
    BACKOFF_CAP,
    MAX_ATTEMPTS,
    Again,
    Dead,
    RetryBudget,
    backoff,
    plan,
)
from headway.model import Cause


def isolate(size: int, culprits: set[int]) -> tuple[set[int], set[int], int, int]:
    """Run a batch of `size` in which the culprits make any batch fail, by the plan, to its end.

    Returns those that succeeded, those that died, the number of runs, and the most attempts of any.
    """
    answered, dead, runs = set[int](), set[int](), 0
    attempts = [0] * size
    waiting = [(list(range(size)), 0)]
    while waiting:
        members, failures = waiting.pop(0)
        runs += 1
        for member in members:
            attempts[member] += 1
        if not culprits & set(members):
            answered |= set(members)
            continue
        verdict = plan(len(members), failures + 1, max(attempts[member] for member in members), Cause.RAISED)
        if isinstance(verdict, Dead):
            assert len(members) == 1
            dead |= set(members)
        else:
            assert [place for start, end in verdict.parts for place in range(start, end)] == list(range(len(members)))
            waiting += [(members[start:end], failures + 1) for start, end in verdict.parts]
    return answered, dead, runs, max(attempts)


class TestPlan:
    @given(st.integers(1, 100).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))))
    def test_every_culprit_ends_alone_and_every_innocent_succeeds(self, case: tuple[int, set[int]]) -> None:
        size, culprits = case
        answered, dead, runs, attempts = isolate(size, culprits)
        assert dead == culprits
        assert answered == set(range(size)) - culprits
        depth = math.ceil(math.log2(size))
        assert attempts <= max(MAX_ATTEMPTS, 2 + depth)
        assert runs <= 2 + max(2 * depth, 1) * max(len(culprits), 1)

    @pytest.mark.parametrize(("size", "runs"), [(1, 3), (2, 4), (32, 12), (100, 16)])
    def test_one_culprit_costs_about_two_runs_a_halving(self, size: int, runs: int) -> None:
        assert max(isolate(size, {culprit})[2] for culprit in range(size)) <= runs

    def test_a_batch_runs_whole_once_more_before_it_is_halved(self) -> None:
        assert plan(8, 1, 1, Cause.RAISED) == Again(((0, 8),))
        assert plan(8, 2, 2, Cause.RAISED) == Again(((0, 4), (4, 8)))
        assert plan(7, 3, 3, Cause.RAISED) == Again(((0, 3), (3, 7)))

    def test_a_lone_entry_gets_three_runs(self) -> None:
        assert plan(1, 1, 1, Cause.RAISED) == Again(((0, 1),))
        assert plan(1, 2, 2, Cause.RAISED) == Again(((0, 1),))
        assert plan(1, 3, 3, Cause.RAISED) == Dead()

    def test_who_stands_alone_after_halving_had_its_runs(self) -> None:
        assert plan(1, 3, 3, Cause.RAISED) == plan(1, 9, 9, Cause.RAISED) == Dead()

    @pytest.mark.parametrize("size", [1, 2, 100])
    def test_a_fault_of_the_remote_api_splits_no_batch_and_ends_after_three_runs(self, size: int) -> None:
        runs = [plan(size, run, run, Cause.REMOTE) for run in (1, 2, 3)]
        assert runs == [Again(((0, size),)), Again(((0, size),)), Dead()]


class TestBackoff:
    @given(st.integers(1, 10_000), st.floats(0.0, 1.0, exclude_max=True))
    def test_doubles_up_to_the_cap_with_half_of_it_by_chance(self, failures: int, dice: float) -> None:
        whole = min(BACKOFF_BASE * 2 ** min(failures - 1, 30), BACKOFF_CAP)
        assert whole / 2 <= backoff(failures, dice) <= whole

    def test_first_steps(self) -> None:
        assert [backoff(failures, 1.0) for failures in (1, 2, 3)] == pytest.approx([0.01, 0.02, 0.04])


class TestBudget:
    def test_starts_full(self) -> None:
        budget = RetryBudget(reserve=3.0)
        assert [budget.spend(1, 0.0) for _ in range(4)] == [True, True, True, False]

    def test_what_is_not_there_is_not_taken(self) -> None:
        budget = RetryBudget(reserve=3.0)
        assert not budget.spend(4, 0.0)
        assert budget.spend(3, 0.0)

    def test_first_runs_earn_and_seconds_trickle(self) -> None:
        budget = RetryBudget(ratio=0.5, reserve=3.0, trickle=0.1)
        assert budget.spend(3, 0.0)
        budget.earn(1)
        assert not budget.spend(1, 0.0)
        budget.earn(1)
        assert budget.spend(1, 0.0)
        assert not budget.spend(1, 9.9)
        assert budget.spend(1, 10.0)

    def test_saves_up_no_more_than_the_reserve(self) -> None:
        budget = RetryBudget(ratio=1.0, reserve=3.0, trickle=1.0)
        assert budget.spend(1, 0.0)
        for _ in range(100):
            budget.earn(1)
        assert not budget.spend(4, 1000.0)
        assert budget.spend(3, 1000.0)

    @given(st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.floats(0.0, 2.0)), max_size=200))
    def test_retries_stay_within_reserve_ratio_and_trickle(self, steps: list[tuple[bool, int, float]]) -> None:
        budget, now, first, retried = RetryBudget(ratio=0.2, reserve=8.0, trickle=1.0), 0.0, 0, 0
        for is_first, count, pause in steps:
            now += pause
            if is_first:
                budget.earn(1)
                first += 1
            elif budget.spend(count, now):
                retried += count
            assert retried <= 8.0 + 0.2 * first + 1.0 * now + 1e-6


def test_a_fresh_budget_finds_a_culprit_in_the_largest_batch() -> None:
    for largest in (1, 2, 32, 100):
        budget, groups = RetryBudget.for_batches(largest), [(largest, 1)]
        while groups:
            size, failures = groups.pop()
            verdict = plan(size, failures, failures, Cause.RAISED)
            if isinstance(verdict, Dead):
                break
            assert budget.spend(size, 0.0)
            groups.append((verdict.parts[0][1] - verdict.parts[0][0], failures + 1))
