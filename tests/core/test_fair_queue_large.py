"""Large entries: what they cost their tenant, and how few of them ride with others."""

import pytest

from headway.core.admission import Refused
from headway.core.budget import GREED
from headway.core.fair_queue import BATCH_PAGES, PAGE, QueuedEntry, TierQueue, queued_at
from headway.core.queue import MIXED_SECONDS, ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.model import Entry
from tests.core.entries import entry
from tests.core.test_fair_queue import drain
from tests.core.test_queue import ids, leave


def paged(id: str, tenant: str, pages: int = 1, tier: int = 0) -> Entry:
    return entry(id, input="x" * PAGE * pages, tenant=tenant, tier=tier)


def push(tier_queue: TierQueue, id: str, tenant: str, pages: int = 1) -> QueuedEntry:
    queued = queued_at(paged(id, tenant, pages), 0.0)
    tier_queue.push(queued)
    return queued


@pytest.mark.parametrize(
    ("length", "parameters", "cost"),
    [(0, 0, 1), (PAGE, 0, 1), (PAGE, 1, 2), (PAGE + 1, 0, 2), (0, 3 * PAGE, 3), (900_000, 0, 14)],
)
def test_an_entry_costs_a_round_for_each_page(length: int, parameters: int, cost: int) -> None:
    large = Entry("1", "m", "x" * length, 0, "t", "g", 1.0, 1.0, b"1" * parameters)
    assert queued_at(large, 0.0).cost == cost


class TestLane:
    def test_rounds_go_by_pages(self) -> None:
        tier_queue = TierQueue()
        for number in range(3):
            push(tier_queue, f"large-{number}", "a", 3)
        for number in range(8):
            push(tier_queue, f"b{number}", "b")
        expected = ["large-0", "b0", "b1", "b2", "large-1", "b3", "b4", "b5", "large-2", "b6", "b7"]
        assert drain(tier_queue) == expected

    def test_the_first_large_entry_of_a_tenant_waits_no_longer_than_a_small_one(self) -> None:
        tier_queue = TierQueue()
        for number in range(20):
            push(tier_queue, f"b{number}", "b")
        push(tier_queue, "large", "a", 100)
        assert drain(tier_queue).index("large") == 1

    def test_a_large_one_that_leaves_costs_nothing(self) -> None:
        tier_queue = TierQueue()
        push(tier_queue, "first", "a")
        gone = push(tier_queue, "large", "a", 10)
        for number in range(4):
            push(tier_queue, f"b{number}", "b")
        tier_queue.drop(gone)
        push(tier_queue, "second", "a")
        assert drain(tier_queue) == ["first", "b0", "b1", "second", "b2", "b3"]

    def test_what_costs_more_than_there_is_room_for_stays_first(self) -> None:
        tier_queue = TierQueue()
        push(tier_queue, "large", "a", 10)
        push(tier_queue, "b", "b")
        assert tier_queue.pop(9) is None
        assert tier_queue.depth == 2
        assert drain(tier_queue) == ["large", "b"]

    def test_what_does_not_fit_yet_stays_behind_who_comes_before_its_turn(self) -> None:
        tier_queue = TierQueue()
        for number in range(2):
            push(tier_queue, f"large-{number}", "a", 10)
        gone = push(tier_queue, "gone", "c", 10)
        assert tier_queue.pop(10) is not None
        tier_queue.drop(gone)
        assert tier_queue.pop(9) is None
        push(tier_queue, "b", "b")
        taken = tier_queue.pop(9)
        assert taken is not None
        assert taken.entry.id == "b"


def make(max_queue: int = 1000, tiers: int = 1) -> ModelQueue:
    return ModelQueue(QueueLimits(tiers=tiers, max_batch=8, max_queue=max_queue))


def offer(queue: ModelQueue, *entries: Entry, now: float = 0.0) -> list[bool]:
    return [not isinstance(queue.offer(one, now), Refused) for one in entries]


class TestBatches:
    def test_one_tenant_alone_has_its_batches_full_however_large(self) -> None:
        queue = make()
        offer(queue, *(paged(f"a{number}", "a", BATCH_PAGES) for number in range(8)))
        assert len(leave(queue).members) == 8

    def test_of_large_entries_others_ride_with_one_or_with_as_many_as_have_the_pages_together(self) -> None:
        queue = make()
        offer(queue, *(paged(f"a{number}", "a", 2 * BATCH_PAGES) for number in range(3)))
        offer(queue, *(paged(f"b{number}", "b") for number in range(4)))
        assert ids(leave(queue)) == ["a0", "b0", "b1", "b2", "b3"]
        assert ids(leave(queue)) == ["a1"]
        assert ids(leave(queue, now=MIXED_SECONDS)) == ["a2"]
        queue = make()
        offer(queue, paged("b", "b"), *(paged(f"a{number}", "a", BATCH_PAGES // 3) for number in range(6)))
        assert ids(leave(queue)) == ["b", "a0", "a1", "a2"]

    def test_batches_are_full_again_when_the_others_have_gone(self) -> None:
        queue = make()
        offer(queue, paged("b", "b"), *(paged(f"a{number}", "a", BATCH_PAGES) for number in range(9)))
        assert ids(leave(queue)) == ["b", "a0"]
        offer(queue, paged("last", "a", BATCH_PAGES), now=MIXED_SECONDS - 0.1)
        assert len(leave(queue, now=MIXED_SECONDS).members) == 8

    def test_a_tier_whose_next_one_does_not_fit_leaves_its_places_to_the_others(self) -> None:
        queue = make(tiers=2)
        offer(queue, *(paged(f"a{number}", "a", BATCH_PAGES) for number in range(3)))
        offer(queue, *(paged(f"b{number}", "b", tier=1) for number in range(9)))
        assert ids(leave(queue)) == ["a0", *(f"b{number}" for number in range(7))]


class TestPlaces:
    def test_one_tenant_leaves_a_tenth_of_the_places(self) -> None:
        queue = make(max_queue=100)
        admitted = offer(queue, *(paged(str(number), "a") for number in range(100)))
        assert admitted.count(True) == 100 * GREED // (GREED + 1)
        assert all(offer(queue, *(paged(f"b{number}", "b") for number in range(9))))
        assert offer(queue, paged("again", "a")) == [False]

    def test_places_of_who_has_left_are_free(self) -> None:
        queue = make(max_queue=10)
        waiting = [queue.offer(paged(str(number), "a"), 0.0) for number in range(9)]
        assert offer(queue, paged("more", "a")) == [False]
        assert isinstance(waiting[0], QueuedEntry)
        queue.remove(waiting[0])
        assert offer(queue, paged("more", "a"), paged("most", "a")) == [True, False]
        leave(queue, limit=3)
        assert offer(queue, *(paged(f"again-{number}", "a") for number in range(4))) == [True, True, True, False]
