"""Callers that are kept apart for a while, and inputs known to fail."""

import math

import pytest

from headway.core.suspects import (
    APART_SECONDS,
    ERROR_BYTES,
    KNOWN_SECONDS,
    MEMORY,
    MOST_APART,
    MOST_KNOWN,
    MOST_TENANTS,
    Culprits,
    best_group,
)
from headway.model import Entry
from tests.core.entries import entry


def of(caller: str, input: str = "poison", tenant: str = "t", parameters: bytes = b"") -> Entry:
    return entry(input=input, tenant=tenant, caller=caller, parameters=parameters)


@pytest.fixture
def culprits() -> Culprits:
    return Culprits()


def test_is_active_from_the_first_culprit_until_all_are_forgotten(culprits: Culprits) -> None:
    active = [culprits.active]
    culprits.found(of("ann"), 0.0)
    culprits.found(of("ann", "more"), 100.0)
    assert not culprits.rides_apart(("t", "ann"), KNOWN_SECONDS)
    active.append(culprits.active)
    assert culprits.knows(of("ann"), KNOWN_SECONDS) is None
    assert culprits.knows(of("ann", "more"), KNOWN_SECONDS) is not None
    active.append(culprits.active)
    assert culprits.knows(of("ann", "more"), 100.0 + KNOWN_SECONDS) is None
    assert [*active, culprits.active] == [False, True, True, False]


class TestRidingApart:
    def test_only_the_caller_does_and_only_for_a_while(self, culprits: Culprits) -> None:
        culprits.found(of("ann"), 0.0)
        assert culprits.rides_apart(("t", "ann"), APART_SECONDS - 0.1)
        assert not culprits.rides_apart(("t", "bob"), 0.0)
        assert not culprits.rides_apart(("u", "ann"), 0.0)
        assert not culprits.rides_apart(("t", "ann"), APART_SECONDS)
        culprits.found(of("ann"), 100.0)
        culprits.found(of("ann", "more"), 120.0)
        assert culprits.rides_apart(("t", "ann"), 120.0 + APART_SECONDS - 0.1), "each culprit makes it longer"

    def test_batches_get_smaller_the_more_often_they_fail_and_larger_again(self) -> None:
        culprits, key = Culprits(), ("t", "ann")
        assert culprits.group_size(key, 32) == 32
        culprits.found(of("ann"), 0.0)
        assert culprits.group_size(key, 32, math.inf) == 1, "inputs that take all the time run alone"
        for _ in range(60):
            culprits.ran(key, 1, clean=False)
        assert culprits.group_size(key, 32) == 1
        for _ in range(400):
            culprits.ran(key, 32, clean=True)
        assert culprits.group_size(key, 32) == 32

    @pytest.mark.parametrize("share", [0.01, 0.02, 0.05, 0.2])
    @pytest.mark.parametrize("each", [0.0, 0.02, 0.2, 1.0])
    def test_a_group_of_the_best_size_costs_least(self, share: float, each: float) -> None:
        """The cost of an input is in multiples of α. A failed batch is halved until its culprit is alone."""

        def cost(size: float) -> float:
            return 1 / size + each + share * (1 + math.log2(size) + 2 * each * size)

        best = best_group(share, each)
        assert cost(best) <= min(cost(best * 0.9), cost(best * 1.1))

    def test_what_ran_and_failed_is_remembered_from_one_culprit_to_the_next(self) -> None:
        culprits, key = Culprits(), ("t", "ann")
        culprits.found(of("ann"), 0.0)
        culprits.ran(key, 32, clean=False)
        culprits.ran(key, 36, clean=False)
        assert culprits.group_size(key, 64) == 35
        culprits.found(of("ann", "more"), APART_SECONDS - 0.1)
        assert culprits.group_size(key, 64) == 35
        culprits.found(of("ann", "more"), 9 * APART_SECONDS)
        assert culprits.group_size(key, 32) == 22

    def test_the_one_whose_last_culprit_is_longest_ago_rides_with_others_again(self, culprits: Culprits) -> None:
        for number in [*range(MOST_APART), 0, MOST_APART]:
            culprits.found(of(f"caller {number}"), 0.0)
        apart = [number for number in range(MOST_APART + 1) if culprits.rides_apart(("t", f"caller {number}"), 1.0)]
        assert apart == [0, *range(2, MOST_APART + 1)]

    def test_counts_are_halved_when_they_are_large(self) -> None:
        culprits, key = Culprits(), ("t", "ann")
        culprits.found(of("ann"), 0.0)
        for _ in range(8):
            culprits.ran(key, 124, clean=False)
        assert culprits._callers[key].ran == MEMORY
        culprits.ran(key, 4, clean=True)
        assert (culprits._callers[key].ran, culprits._callers[key].bad) == ((MEMORY + 4) / 2, 4.0)


class TestKnowing:
    def test_the_same_input_of_the_same_tenant_is_known_for_a_while(self, culprits: Culprits) -> None:
        culprits.found(of("ann"), 0.0)
        assert culprits.knows(of("ann"), KNOWN_SECONDS - 0.1) is not None
        assert culprits.knows(of("bob"), 1.0) is not None, "the input is at fault, whoever sends it"
        assert culprits.knows(of("ann", "other"), 1.0) is None
        assert culprits.knows(of("ann", parameters=b"{}"), 1.0) is None
        assert culprits.knows(of("ann", tenant="u"), 1.0) is None, "tenants know nothing of each other"
        assert culprits.knows(of(""), 1.0) is None, "a replay without a caller runs"
        assert culprits.knows(of("ann"), KNOWN_SECONDS) is None

    def test_another_worker_gets_to_try_what_raised_but_not_what_kills(self, culprits: Culprits) -> None:
        culprits.found(of("ann", "raises"), 0.0)
        culprits.found(of("ann", "kills"), 0.0, killed=True)
        culprits.renew()
        assert culprits.knows(of("ann", "raises"), 1.0) is None
        assert culprits.knows(of("ann", "kills"), 1.0) is not None

    @pytest.mark.parametrize(("left_at", "known"), [(9.9995, True), (9.99, False)])
    def test_what_older_workers_raised_says_nothing_of_newer_ones(
        self, culprits: Culprits, left_at: float, known: bool
    ) -> None:
        culprits.renew(10.0)
        culprits.found(of("ann"), 11.0, left_at=left_at)
        assert (culprits.knows(of("ann"), 11.0) is not None) is known

    def test_the_first_bytes_of_its_error_are_told(self, culprits: Culprits) -> None:
        culprits.found(of("ann"), 0.0, error="x" + "é" * ERROR_BYTES)
        assert culprits.knows(of("ann"), 1.0) == "x" + "é" * ((ERROR_BYTES - 1) // 2)

    def test_an_input_that_fails_again_is_among_the_newest(self, culprits: Culprits) -> None:
        for number in [*range(MOST_KNOWN), 0, MOST_KNOWN]:
            culprits.found(of("ann", f"input {number}"), 0.0)
        known = [culprits.knows(of("ann", f"input {number}"), 1.0) is not None for number in (0, 1, 2)]
        assert known == [True, False, True]

    def test_memory_is_bounded(self, culprits: Culprits) -> None:
        for number in range(2 * MOST_KNOWN):
            culprits.found(of("ann", f"input {number}"), 0.0)
        known = [culprits.knows(of("ann", f"input {number}"), 1.0) for number in range(2 * MOST_KNOWN)]
        assert len(known) - known.count(None) == MOST_KNOWN
        for number in range(2 * MOST_TENANTS):
            culprits.found(of("ann", tenant=f"tenant {number}"), 0.0)
        assert len(culprits._known) == MOST_TENANTS

    def test_a_lone_surrogate_is_an_input_too(self, culprits: Culprits) -> None:
        culprits.found(of("ann", "\udc80"), 0.0)
        assert culprits.knows(of("ann", "\udc80"), 1.0) is not None
