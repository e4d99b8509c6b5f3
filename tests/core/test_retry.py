"""Retries of a failed batch and restarts of a worker: further runs, backoff and budgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import retry
from headway.core.retry import (
    BACKOFF_BASE,
    BACKOFF_CAP,
    BUDGET_RATIO,
    BUDGET_RESERVE,
    BUDGET_TRICKLE,
    DEATHS_ALONE,
    KILLED_CAP,
    MAX_ATTEMPTS,
    NEVER_SPLIT,
    PAUSE_CAP,
    SEARCHED,
    STEADY_LIFE,
    RestartPauses,
    RetryBudgets,
    backoff,
    is_over,
    stays_whole,
)
from headway.model import Cause

MAYBE_NOBODYS = [cause for cause in Cause if cause not in SEARCHED | NEVER_SPLIT]


class TestEnding:
    @pytest.mark.parametrize("cause", sorted(SEARCHED, key=str))
    def test_who_raises_alone_after_another_run_is_over(self, cause: Cause) -> None:
        assert is_over(cause, 1, 2, 1)
        assert not is_over(cause, 1, 1, 1), "once may be an accident"
        assert not is_over(cause, 1, 5, 0), "it may have been one that left meanwhile"

    @pytest.mark.parametrize("cause", MAYBE_NOBODYS)
    def test_who_died_beside_others_is_not_over_before_it_has_died_alone_twice(self, cause: Cause) -> None:
        assert not is_over(cause, 1, MAX_ATTEMPTS, 1)
        assert is_over(cause, 1, MAX_ATTEMPTS, DEATHS_ALONE)

    @pytest.mark.parametrize("cause", MAYBE_NOBODYS)
    def test_who_was_alone_from_the_start_gets_three_runs(self, cause: Cause) -> None:
        assert [is_over(cause, 1, runs, runs) for runs in (1, 2, 3)] == [False, False, True]

    @pytest.mark.parametrize("cause", [cause for cause in Cause if cause not in NEVER_SPLIT])
    def test_several_are_never_over(self, cause: Cause) -> None:
        assert not any(is_over(cause, 2, 99, alone) for alone in (0, 1, 9))

    def test_a_remote_fault_ends_all_together(self) -> None:
        assert [is_over(Cause.REMOTE, 8, runs, 0) for runs in (1, 2, 3)] == [False, False, True]


class TestStayingWhole:
    @pytest.mark.parametrize("cause", MAYBE_NOBODYS)
    def test_once_when_it_may_be_nobodys_fault(self, cause: Cause) -> None:
        assert [stays_whole(cause, 8, failures) for failures in (1, 2)] == [True, False]

    def test_never_when_an_input_is_at_fault_and_always_when_the_remote_is(self) -> None:
        assert not any(stays_whole(cause, 8, 1) for cause in SEARCHED)
        assert stays_whole(Cause.REMOTE, 8, 9)


class TestBackoff:
    @given(st.integers(1, 10_000), st.floats(0.0, 1.0, exclude_max=True))
    def test_doubles_up_to_the_cap_with_half_of_it_by_chance(self, failures: int, rng: float) -> None:
        whole = min(BACKOFF_BASE * 2 ** min(failures - 1, 30), BACKOFF_CAP)
        assert whole / 2 <= backoff(failures, rng) <= whole


class TestBudgets:
    def test_first_runs_earn_and_seconds_trickle(self) -> None:
        budgets = RetryBudgets(1)
        assert budgets.spend("a", int(BUDGET_RESERVE), 0.0)
        budgets.earn(["a"] * 4, 0.0)
        assert not budgets.spend("a", 1, 0.0)
        budgets.earn(["a"], 0.0)
        assert budgets.spend("a", 1, 0.0)
        assert not budgets.spend("a", 10, 9.9)
        assert budgets.spend("a", 10, 10.0)

    def test_saves_up_no_more_than_the_reserve(self) -> None:
        budgets = RetryBudgets(1)
        assert budgets.spend("a", 1, 0.0)
        budgets.earn(["a"] * 100, 0.0)
        assert not budgets.spend("a", int(BUDGET_RESERVE) + 1, 1000.0)
        assert budgets.spend("a", int(BUDGET_RESERVE), 1000.0)

    @given(st.lists(st.tuples(st.booleans(), st.integers(1, 20), st.floats(0.0, 2.0)), max_size=200))
    def test_retries_stay_within_reserve_ratio_and_trickle(self, steps: list[tuple[bool, int, float]]) -> None:
        budgets, now, first, retried = RetryBudgets(1), 0.0, 0, 0
        for is_first, count, pause in steps:
            now += pause
            if is_first:
                budgets.earn(["a"], now)
                first += 1
            elif budgets.spend("a", count, now):
                retried += count
            assert retried <= BUDGET_RESERVE + BUDGET_RATIO * first + BUDGET_TRICKLE * now + 1e-6

    def test_one_tenant_spends_and_earns_nothing_for_another(self) -> None:
        budgets = RetryBudgets(1)
        assert budgets.spend("bad", int(BUDGET_RESERVE), 0.0)
        budgets.earn(["good"] * 100, 0.0)
        assert not budgets.spend("bad", 1, 0.0)
        assert budgets.spend("good", int(BUDGET_RESERVE), 0.0)
        budgets.earn(["bad"] * 5, 0.0)
        assert budgets.spend("bad", 1, 0.0)

    def test_grow_with_the_largest_batch(self) -> None:
        budgets = RetryBudgets(100)
        assert not budgets.spend("a", 1001, 0.0)
        assert budgets.spend("a", 1000, 0.0)
        assert not budgets.spend("a", 101, 10.0)
        assert budgets.spend("a", 100, 10.0)

    def test_of_many_tenants_the_one_that_failed_first_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(retry, "MOST_BUDGETS", 2)
        budgets = RetryBudgets(1)
        for tenant in ("a", "b", "c"):
            assert budgets.spend(tenant, 1, 0.0)
        assert list(budgets._paid_at) == ["b", "c"]


def test_starts_that_fail_come_at_ever_longer_intervals_and_those_that_others_kill_soon() -> None:
    pauses = RestartPauses()
    assert [pauses.start_failed(False) for _ in range(9)] == [0.25, 0.5, 1, 2, 4, 8, 16, PAUSE_CAP, PAUSE_CAP]
    pauses.well()
    assert pauses.start_failed(False) == 0.25
    pauses = RestartPauses()
    assert [pauses.start_failed(True) for _ in range(6)] == [0.25, 0.5, 1, KILLED_CAP, KILLED_CAP, KILLED_CAP]


def test_a_first_death_costs_no_pause_and_the_next_ones_do() -> None:
    pauses = RestartPauses()
    assert [pauses.died_idle(0.1) for _ in range(4)] == [0.0, 0.25, 0.5, 1.0]
    assert pauses.start_failed(False) == 4.0


@pytest.mark.parametrize("life", [STEADY_LIFE, 1e6])
def test_some_seconds_of_life_end_the_pauses(life: float) -> None:
    pauses = RestartPauses()
    for _ in range(20):
        pauses.died_idle(0.1)
    assert pauses.died_idle(life) == 0.0
    assert [pauses.died_idle(0.1) for _ in range(2)] == [0.0, 0.25]
