"""Groups of entries that wait apart: what each is made of, who may take it, and what it costs."""

from __future__ import annotations

import math

import msgspec
import pytest

from headway.core.fair_queue import RETRYING, QueuedEntry, queued_at
from headway.core.suspects import (
    FIRST,
    HALF,
    LEAST_COST,
    MOST_CREDIT,
    QUARANTINE,
    QUARANTINED_ATTEMPTS,
    REST,
    SEARCH_PRICE,
    Group,
    Suspects,
    _cut,
    last_moment,
)
from tests.core.entries import entry

ANN, BOB = ("t", "ann"), ("t", "bob")


def some(*callers: str) -> list[QueuedEntry]:
    """An entry of each caller, named by its place."""
    return [
        queued_at(msgspec.structs.replace(entry(str(place)), caller=caller), 0.0)
        for place, caller in enumerate(callers)
    ]


class TestCutting:
    @pytest.mark.parametrize(
        ("callers", "order", "cut"),
        [
            ("aaaa", "aaaa", 2),
            ("aaaaa", "aaaaa", 2),
            ("abab", "aabb", 2),
            ("abbb", "bbba", 3),
            ("aaabbc", "aaabbc", 3),
            ("aabbccd", "aabbccd", 4),
            ("aabbcc", "aabbcc", 2),
            ("abcaaaaa", "aaaaaabc", 6),
            ("ab", "ab", 1),
        ],
    )
    def test_is_between_two_callers_as_near_to_the_middle_as_can_be(self, callers: str, order: str, cut: int) -> None:
        members, at = _cut(some(*callers))
        assert ("".join(member.entry.caller for member in members), at) == (order, cut)


class TestHalving:
    def test_a_probe_runs_one_half_and_the_other_waits_for_it(self) -> None:
        suspects, members = Suspects(), some(*"aaaa")
        like = Group([], 5.0, FIRST, 3, 2, 1)
        like.avoid, like.avoid_until = "gpu-0", 6.0
        suspects.halve(members, like)
        rest, half = suspects.groups
        assert (half.members, half.ready_at, half.kind) == (members[:2], 5.0, HALF)
        assert (half.failures, half.attempts, half.alone, half.rest) == (3, 2, 0, rest)
        assert (half.avoid, half.avoid_until) == ("gpu-0", 6.0)
        assert (rest.members, rest.ready_at, rest.kind) == (members[2:], math.inf, REST)
        assert (rest.failures, rest.attempts, rest.alone, rest.rest) == (3, 2, 0, None)
        assert {(member.state, member.attempts) for member in members} == {(RETRYING, 2)}

    def test_the_only_one_runs_again_and_how_often_it_was_alone_is_remembered(self) -> None:
        suspects, members = Suspects(), some("a")
        suspects.halve(members, Group([], 5.0, FIRST, 3, 2, 1))
        [half] = suspects.groups
        assert (half.members, half.kind, half.alone, half.rest) == (members, HALF, 1, None)


class TestPools:
    def test_what_is_not_known_of_one_caller_goes_to_its_pool_and_of_several_waits_together(self) -> None:
        suspects, like = Suspects(), Group([], 5.0, FIRST, 3, 2)
        suspects.unknown([], like, lambda _: 8)
        assert suspects.groups == {}
        suspects.unknown(some("ann", "ann"), like, {ANN: 8}.__getitem__)
        quarantine = suspects.quarantine(ANN)
        assert quarantine is not None
        assert (len(quarantine.members), quarantine.ready_at, quarantine.kind, quarantine.failures) == (
            2,
            5.0,
            QUARANTINE,
            3,
        )
        assert (quarantine.caller, suspects.quarantine(BOB), suspects.callers) == (ANN, None, 1)
        suspects.unknown(some("ann", "bob"), like, dict[tuple[str, str], int]().__getitem__)
        together = list(suspects.groups)[1]
        assert (len(together.members), together.ready_at, together.kind) == (2, 5.0, QUARANTINE)
        assert (together.failures, together.attempts, together.caller) == (3, 2, None)

    def test_a_pool_is_ready_when_its_first_is_and_at_once_when_it_is_full(self) -> None:
        suspects = Suspects()
        suspects.join(ANN, some("ann"), Group([], 5.0, QUARANTINE), 3)
        quarantine = suspects.quarantine(ANN)
        assert quarantine is not None
        ready = [quarantine.ready_at]
        for at in (4.0, 6.0):
            suspects.join(ANN, some("ann"), Group([], at, QUARANTINE), 3)
            ready.append(quarantine.ready_at)
        assert ready == [5.0, 4.0, -math.inf]

    def test_those_of_a_pool_count_as_run_once_as_soon_as_one_of_them_has(self) -> None:
        suspects, fresh, again = Suspects(), some("ann"), some("ann")
        suspects.join(ANN, fresh, Group([], 5.0, QUARANTINE), 9)
        assert fresh[0].attempts == 0
        suspects.join(ANN, again, Group([], 5.0, QUARANTINE, 2, 3), 9)
        assert [member.attempts for member in fresh + again] == [QUARANTINED_ATTEMPTS] * 2
        quarantine = suspects.quarantine(ANN)
        assert quarantine is not None and (quarantine.failures, quarantine.attempts) == (2, QUARANTINED_ATTEMPTS)
        late = some("ann")
        suspects.join(ANN, late, Group([], 5.0, QUARANTINE, 1, 0), 9)
        assert (quarantine.failures, late[0].attempts) == (2, QUARANTINED_ATTEMPTS)

    def test_each_caller_with_a_pool_counts(self) -> None:
        suspects = Suspects()
        assert suspects.callers == 1
        suspects.join(ANN, some("ann"), Group([], 5.0, QUARANTINE), 9)
        suspects.join(BOB, some("bob"), Group([], 5.0, QUARANTINE), 9)
        assert suspects.callers == 2


class TestTaking:
    def test_a_pool_that_is_too_large_has_its_next_turn_after_others(self) -> None:
        suspects = Suspects()
        suspects.join(ANN, some("ann", "ann", "ann"), Group([], 5.0, QUARANTINE), 9)
        suspects.join(BOB, some("bob"), Group([], 5.0, QUARANTINE), 9)
        first, second = suspects.groups
        taken = suspects.take(first, 2)
        assert [member.entry.id for member in taken] == ["0", "1"]
        assert list(suspects.groups) == [second, first]
        assert [member.entry.id for member in suspects.of] == ["2", "0"]
        suspects.take(first, 2)
        assert (list(suspects.groups), suspects.quarantine(ANN)) == ([second], None)

    def test_what_a_small_slot_leaves_of_a_probe_waits_with_the_rest(self) -> None:
        suspects, members = Suspects(), some(*"aaaa")
        suspects.halve(members, Group([], 5.0, FIRST))
        rest, half = suspects.groups
        assert suspects.take(half, 1) == members[:1]
        assert rest.members == members[1:]
        assert {suspects.of[member] is rest for member in members[1:]} == {True}
        assert list(suspects.groups) == [rest]

    def test_what_it_leaves_of_a_group_without_a_rest_stays_first(self) -> None:
        suspects, members = Suspects(), some(*"aaa")
        group = Group(members, 0.0, FIRST)
        other = Group(some("b"), 0.0, FIRST)
        suspects.add(group)
        suspects.add(other)
        assert suspects.take(group, 2) == members[:2]
        assert (list(suspects.groups), group.members) == ([group, other], members[2:])

    def test_what_it_leaves_of_a_probe_whose_rest_has_left_stays_in_it(self) -> None:
        suspects, members = Suspects(), some(*"aaaa")
        suspects.halve(members, Group([], 5.0, FIRST))
        rest, half = suspects.groups
        for member in members[2:]:
            suspects.remove(member, lambda _: 8)
        assert rest not in suspects.groups
        assert suspects.take(half, 1) == members[:1]
        assert (half.members, list(suspects.groups)) == (members[1:2], [half])

    def test_a_rest_is_let_go_of_once(self) -> None:
        suspects, members = Suspects(), some(*"aa")
        suspects.halve(members, Group([], 5.0, FIRST))
        rest, _ = suspects.groups
        assert suspects.let_go(None) == []
        assert suspects.let_go(rest) == members[1:]
        assert (suspects.let_go(rest), members[1] in suspects.of) == ([], False)


class TestChoosing:
    def bench(self) -> tuple[Suspects, Group, Group]:
        suspects = Suspects()
        half, quarantine = Group(some("a"), 1.0, HALF), Group(some("b"), 2.0, QUARANTINE)
        suspects.add(half)
        suspects.add(quarantine)
        return suspects, half, quarantine

    def test_what_is_not_ready_waits(self) -> None:
        suspects, half, _ = self.bench()
        found = suspects.choose("gpu-0", False, 0.5)
        assert (found.first, found.turn, found.again) == (None, None, 1.0)
        found = suspects.choose("gpu-0", False, 1.0)
        assert (found.first, found.turn, found.again) == (None, half, 2.0)

    def test_what_goes_first_goes_first(self) -> None:
        suspects, _, _ = self.bench()
        first = Group(some("c"), 2.0, FIRST)
        suspects.add(first)
        assert suspects.choose("gpu-0", False, 2.0).first is first

    def test_probes_and_pools_take_turns_by_what_they_cost(self) -> None:
        suspects, half, quarantine = self.bench()
        turns = []
        for _ in range(8):
            turn = suspects.choose("gpu-0", False, 2.0).turn
            assert turn is not None
            suspects.pay(turn, 0.25, 1.0, 0.0)
            turns.append("half" if turn is half else "quarantine")
        assert turns[0] == "half"
        assert turns.count("quarantine") == round(SEARCH_PRICE * turns.count("half"))
        assert quarantine.members

    @pytest.mark.parametrize(("kind", "most"), [(HALF, True), (QUARANTINE, False)])
    def test_nobody_owes_more_turns_than_two_full_batches(self, kind: int, most: bool) -> None:
        suspects, half, quarantine = self.bench()
        for _ in range(100):
            suspects.pay(half if kind == HALF else quarantine, 0.5, 0.5, 0.0)
        assert suspects._lean == (MOST_CREDIT * 0.5 if most else -MOST_CREDIT * 0.5)

    def test_where_there_are_others_a_worker_is_avoided_for_a_while(self) -> None:
        group = Group(some("a"), 1.0, HALF)
        group.avoid, group.avoid_until = "gpu-0", 3.0
        assert [group.open_at(worker, others) for worker in ("gpu-0", "gpu-1") for others in (True, False)] == [
            3.0,
            1.0,
            1.0,
            1.0,
        ]
        suspects = Suspects()
        suspects.add(group)
        assert suspects.wake(["gpu-0", "gpu-1"], True, 1.0) == "gpu-1"
        assert suspects.wake(["gpu-0"], True, 1.0) == 3.0
        assert suspects.wake(["gpu-0"], False, 1.0) == "gpu-0"
        assert suspects.wake(["gpu-0", "gpu-1"], True, 0.5) == 1.0


class TestCredit:
    def test_is_earned_by_part_and_spent_at_its_price(self) -> None:
        suspects = Suspects()
        suspects.join(ANN, some("ann"), Group([], 5.0, QUARANTINE), 9)
        suspects.join(BOB, some("bob"), Group([], 5.0, QUARANTINE), 9)
        suspects.earn(0.3, 3, 1.0)
        assert suspects.credit == pytest.approx(0.3 * 2 / 3)
        suspects.earn(0.3, 1, 1.0)
        assert suspects.credit == pytest.approx(0.2 + 0.6)
        suspects.pay(next(iter(suspects.groups)), 0.1, 1.0, 4.0)
        assert suspects.credit == pytest.approx(0.4)

    def test_is_saved_up_for_two_full_batches_at_most(self) -> None:
        suspects = Suspects()
        for _ in range(100):
            suspects.earn(0.5, 1, 0.5)
        assert suspects.credit == pytest.approx(MOST_CREDIT * 0.5)

    def test_a_run_counts_for_something_before_any_was_measured(self) -> None:
        suspects = Suspects()
        suspects.earn(0.0, 0, 0.0)
        assert suspects.credit == LEAST_COST
        suspects.pay(Group([], 0.0, QUARANTINE), 0.0, 0.0, 1.0)
        assert (suspects.credit, suspects._lean) == (0.0, -LEAST_COST)


def test_one_that_never_ran_keeps_its_queue_deadline() -> None:
    [queued] = some("a")
    assert last_moment(queued) == 2.0
    queued.attempts = 1
    assert last_moment(queued) == 4.0


def test_those_without_time_are_told_at_their_last_moment() -> None:
    suspects, members = Suspects(), some("a", "b")
    suspects.add(Group(members[:1], 0.0, FIRST))
    suspects.add(Group(members[1:], 0.0, FIRST, 1, 1))
    assert (suspects.due, suspects.overdue(1.9)) == (2.0, [])
    assert suspects.overdue(2.0) == members[:1]
    assert suspects.due == 4.0
