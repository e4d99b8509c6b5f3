"""Fair queueing: fair tier queues, ordered deadline queues, and turns between tiers."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import fair_queue
from headway.core.fair_queue import (
    FORGET_ABOVE,
    GONE,
    LOOKED_AT,
    QUEUED,
    RUNNING,
    STALE,
    DeadlineQueue,
    QueuedEntry,
    TierQueue,
    queued_at,
)
from headway.core.packing import BatchRoom, reserved_places, turns
from tests.core.entries import entry

TENANTS = st.sampled_from(["a", "b", "c", "d"])


def queued(id: str = "1", tenant: str = "t", now: float = 0.0, timeout: float = 4.0) -> QueuedEntry:
    return queued_at(entry(id, tenant=tenant, timeout=timeout, queue_timeout=timeout), now)


def drain(tier_queue: TierQueue) -> list[str]:
    order = []
    while (taken := tier_queue.pop()) is not None:
        order.append(taken.entry.id)
    return order


STEPS = st.one_of(
    st.tuples(st.just("push"), st.lists(st.tuples(TENANTS, st.sampled_from([1, 1, 1, 0.25, 0.5, 2, 7])), min_size=1)),
    st.tuples(st.sampled_from(["take", "small", "pop"]), st.integers(1, 12)),
    st.tuples(st.just("drop"), st.lists(st.integers(0, 1000), max_size=12)),
)


def costly(tier_queue: TierQueue, id: str, tenant: str, cost: float = 1) -> QueuedEntry:
    """Push an entry that costs `cost` rounds, and has as many pages if that is more than one."""
    one = queued(id, tenant)
    one.cost, one.pages = cost, max(1, int(cost))
    tier_queue.push(one)
    assert one.round % 1 == 0, "what is in no round that begins is never served"
    return one


@given(st.lists(STEPS, max_size=40))
def test_what_is_taken_is_what_is_popped_one_by_one(steps: list[tuple[str, Any]]) -> None:
    one, other = TierQueue(), TierQueue()
    waiting: list[tuple[QueuedEntry, QueuedEntry]] = []
    number = 0
    for what, asked in steps:
        if what == "push":
            for tenant, cost in asked:
                number += 1
                name = str(number)
                waiting.append((costly(one, name, tenant, cost), costly(other, name, tenant, cost)))
        elif what == "drop":
            for place in asked:
                waiting = [pair for pair in waiting if pair[0].state == QUEUED]
                if waiting:
                    left, right = waiting[place % len(waiting)]
                    one.drop(left)
                    other.drop(right)
        else:
            small = what == "small"
            popped: list[QueuedEntry] = []
            while len(popped) < asked and (found := other.pop(1 if small else None)) is not None:
                popped.append(found)
            pops = what == "pop"
            taken = list(filter(None, [one.pop() for _ in range(asked)])) if pops else one.take(asked, small=small)
            assert [found.entry.id for found in taken] == [found.entry.id for found in popped]
        assert (one.depth, one.weight) == (other.depth, other.weight)
        assert [one.ahead(tenant) for tenant in "abcde"] == [other.ahead(tenant) for tenant in "abcde"]


def test_a_round_that_is_half_used_up_and_has_begun_is_not_gone_on_with() -> None:
    tier_queue = TierQueue()
    costly(tier_queue, "half", "a", 0.5)
    costly(tier_queue, "one", "a")
    assert [found.entry.id for found in tier_queue.take(1, small=False)] == ["half"]
    costly(tier_queue, "next", "a")
    assert drain(tier_queue) == ["one", "next"]


def test_the_place_of_what_is_dropped_leaves_no_part_of_a_round() -> None:
    tier_queue = TierQueue()
    costly(tier_queue, "b", "b")
    half = costly(tier_queue, "half", "a", 0.5)
    tier_queue.take(1, small=False)
    costly(tier_queue, "one", "a")
    tier_queue.drop(half)
    costly(tier_queue, "next", "a")
    assert drain(tier_queue) == ["one", "next"]


class TestLane:
    @given(st.lists(TENANTS | st.none(), max_size=120))
    def test_an_entry_waits_for_at_most_two_turns_of_each_other_tenant(self, steps: list[str | None]) -> None:
        """Push for a tenant, or pop (None). Others get at most two more turns each than the entry's own tenant."""
        tier_queue, rides = TierQueue(), Counter[str]()
        waiting: Counter[str] = Counter()
        promised: dict[str, tuple[int, Counter[str]]] = {}
        for number, tenant in enumerate([*steps, *[None] * len(steps)]):
            if tenant is not None:
                promised[str(number)] = (waiting[tenant], rides.copy())
                waiting[tenant] += 1
                tier_queue.push(queued(str(number), tenant))
            elif (taken := tier_queue.pop()) is not None:
                mine, (own_ahead, before) = taken.entry.tenant, promised[taken.entry.id]
                assert all(rides[other] - before[other] <= own_ahead + 2 for other in rides if other != mine)
                rides[mine] += 1
                waiting[mine] -= 1
        assert tier_queue.depth == 0

    @given(st.lists(st.tuples(st.sampled_from(["push", "pop", "drop"]), TENANTS, st.integers(0, 50)), max_size=150))
    def test_each_is_taken_once_and_tenants_keep_order(self, steps: list[tuple[str, str, int]]) -> None:
        tier_queue, waiting = TierQueue(), list[QueuedEntry]()
        for number, (step, tenant, pick) in enumerate(steps):
            if step == "push":
                waiting.append(queued(str(number), tenant, now=float(number)))
                tier_queue.push(waiting[-1])
            elif step == "drop" and waiting:
                dropped = waiting.pop(pick % len(waiting))
                tier_queue.drop(dropped)
                assert dropped.state == GONE
            elif step == "pop":
                taken = tier_queue.pop()
                assert (taken is None) == (not waiting)
                if taken is not None:
                    assert taken.state == RUNNING
                    assert taken is next(one for one in waiting if one.entry.tenant == taken.entry.tenant)
                    waiting.remove(taken)
            assert tier_queue.depth == len(waiting)
            oldest = tier_queue.oldest()
            assert oldest is (min(waiting, key=lambda one: one.arrived) if waiting else None)
        assert sorted(drain(tier_queue)) == sorted(one.entry.id for one in waiting)

    def test_what_was_dropped_is_ahead_of_nobody(self) -> None:
        tier_queue = TierQueue()
        waiting = [costly(tier_queue, tenant, tenant) for tenant in "abcdaaaaa"]
        assert tier_queue.ahead("d") == 8
        tier_queue.drop(waiting[1])
        assert (tier_queue.depth, tier_queue.ahead("d"), tier_queue.ahead("stranger")) == (8, 6, 3)

    def test_a_tenant_that_is_forgotten_may_leave(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fair_queue, "FORGET_ABOVE", -9)
        tier_queue = TierQueue()
        waiting = [costly(tier_queue, tenant, tenant) for tenant in "abc"]
        assert tier_queue.pop() is waiting[0]
        tier_queue.drop(waiting[1])
        assert drain(tier_queue) == ["c"]

    def test_a_stream_of_strangers_does_not_starve_a_tenant_who_waits(self) -> None:
        """Each newcomer is owed a turn, but not ahead of turns that were already owed."""
        tier_queue = TierQueue()
        for _ in range(20):
            tier_queue.push(queued(tenant="regular"))
        regulars = 0
        for number in range(400):
            for place in range(2):
                tier_queue.push(queued(tenant=f"stranger-{number}-{place}"))
            taken = tier_queue.pop()
            assert taken is not None
            regulars += taken.entry.tenant == "regular"
        assert regulars >= 5

    @pytest.mark.parametrize("backlog", [0, 1, 50])
    def test_forgets_tenants_who_are_gone(self, backlog: int) -> None:
        tier_queue = TierQueue()
        for number in range(backlog):
            tier_queue.push(queued(f"waits-{number}", "a"))
        for number in range(5 * FORGET_ABOVE):
            tier_queue.push(queued(str(number), f"tenant-{number}"))
            tier_queue.pop()
            tier_queue.oldest()
        kept = [getattr(tier_queue, name) for name in tier_queue.__slots__]
        assert max(len(thing) for thing in kept if hasattr(thing, "__len__")) <= 2 * FORGET_ABOVE

    def test_rounds_that_were_dropped_whole_are_passed_over_when_several_are_taken(self) -> None:
        tier_queue = TierQueue()
        waiting = [costly(tier_queue, str(number), "t") for number in range(4 * STALE)]
        for one in waiting[:-2]:
            tier_queue.drop(one)
        assert tier_queue.take(9, small=False) == waiting[-2:]


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "leave", "overdue"]), st.integers(0, 10), st.integers(0, 100)), max_size=100
    )
)
def test_a_deadline_queue_agrees_with_a_sorted_list(steps: list[tuple[str, float, int]]) -> None:
    line, model, now = DeadlineQueue(), list[QueuedEntry](), 0.0
    for number, (step, seconds, pick) in enumerate(steps):
        if step == "push":
            model.append(queued(str(number), now=now, timeout=seconds))
            line.push(model[-1])
        elif step == "leave" and model:
            model.pop(pick % len(model)).state = RUNNING
        elif step == "overdue":
            now += seconds / 3
            late = list(line.overdue(now))
            assert [one.queue_due for one in late] == sorted(one.queue_due for one in model if one.queue_due <= now)
            for one in late:
                one.state = GONE
            model = [one for one in model if one.queue_due > now]
        assert line.earliest() == min((one.queue_due for one in model), default=math.inf)


class TestTurns:
    @staticmethod
    def ride(depths: list[int], limit: int, share: float, arrived: Callable[[int, int], float]) -> list[int]:
        """Return how many entries of each tier ride. Entry `n` of tier `t` arrived at `arrived(t, n)`."""
        tier_queues = [TierQueue() for _ in depths]
        for tier, depth in enumerate(depths):
            for number in range(depth):
                tier_queues[tier].push(queued(f"{tier}-{number}", now=arrived(tier, number)))
        counts = [0] * len(depths)
        for tier_queue in turns(tier_queues, BatchRoom(limit), share):
            assert tier_queue.pop() is not None
            counts[tier_queues.index(tier_queue)] += 1
        assert [tier_queue.depth for tier_queue in tier_queues] == [
            depth - count for depth, count in zip(depths, counts, strict=True)
        ]
        return counts

    @pytest.mark.parametrize(
        ("depths", "limit", "share", "counts"),
        [
            ([3, 3, 3], 9, 0.0, [3, 3, 3]),
            ([3, 3, 3], 20, 0.0, [3, 3, 3]),
            ([0, 0, 5], 3, 0.0, [0, 0, 3]),
            ([20, 5, 5], 10, 0.0, [10, 0, 0]),
            ([4, 20, 5], 10, 0.0, [4, 6, 0]),
            ([0, 0, 0], 10, 0.0, [0, 0, 0]),
            ([100, 0, 100], 20, 0.1, [18, 0, 2]),
            ([18, 0, 2], 20, 0.5, [18, 0, 2]),
        ],
    )
    def test_tiers_go_in_order_but_for_a_share_that_is_kept_under_contention(
        self, depths: list[int], limit: int, share: float, counts: list[int]
    ) -> None:
        assert self.ride(depths, limit, share, lambda tier, number: 0.0) == counts

    def test_what_is_kept_goes_to_whoever_of_the_lower_tiers_has_waited_longest(self) -> None:
        """Places are given one by one: the tier whose oldest entry got the first place doesn't get the second too."""
        came = {1: [1.0, 5.0, 5.0], 2: [2.0, 3.0, 4.0]}
        counts = self.ride([100, 3, 3], 30, 0.1, lambda tier, number: came[tier][number] if tier else 0.0)
        assert counts == [27, 1, 2]

    @given(
        depths=st.lists(st.integers(0, 30), min_size=1, max_size=4),
        limit=st.integers(1, 40),
        share=st.floats(0.0, 0.5),
        arrivals=st.randoms(use_true_random=False),
    )
    def test_batches_fill_without_starving(self, depths: list[int], limit: int, share: float, arrivals: object) -> None:
        counts = self.ride(depths, limit, share, lambda tier, number: hash((tier, number)) % 97)
        assert sum(counts) == min(limit, sum(depths))
        lower = [tier for tier, depth in enumerate(depths) if depth][1:]
        if sum(depths) > limit and lower:
            owed = min(reserved_places(limit, share), sum(depths[tier] for tier in lower))
            assert sum(counts[tier] for tier in lower) >= owed

    @pytest.mark.parametrize(
        ("limit", "share", "places"),
        [(100, 0.1, 10), (32, 0.1, 3), (4, 0.1, 1), (2, 0.1, 1), (1, 0.1, 0), (32, 0.0, 0)],
    )
    def test_reserved_places(self, limit: int, share: float, places: int) -> None:
        assert reserved_places(limit, share) == places


COSTS = st.sampled_from([0, 0.025, 0.25, 0.5, 1, 1, 2, 5, LOOKED_AT + 9])
"""Rounds that an entry costs; 0: one is popped."""


@given(st.lists(st.tuples(st.sampled_from("abc"), COSTS), max_size=40), st.sampled_from("abcd"))
def test_no_more_are_served_before_an_entry_than_was_said(steps: list[tuple[str, float]], tenant: str) -> None:
    tier_queue = TierQueue()
    for number, (other, cost) in enumerate(steps):
        if cost:
            costly(tier_queue, str(number), other, cost)
        else:
            tier_queue.pop()
    said = tier_queue.ahead(tenant)
    tier_queue.push(queued("mine", tenant))
    assert drain(tier_queue).index("mine") <= said
