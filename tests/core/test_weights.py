"""Batches by weight, and entries with many pages: what rides, what tenants pay, and what depends on the weight."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from headway.core.admission import Refused
from headway.core.budget import GREED
from headway.core.capacity import pace
from headway.core.departure import FULL, Hold, Load, Rule
from headway.core.fair_queue import BATCH_PAGES, LOOKED_AT, PAGE, QueuedEntry, TierQueue, queued_at
from headway.core.packing import Terms, pack
from headway.core.policies.paced import headway
from headway.core.queue import MIXED_SECONDS, ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.model import Cause, Entry, Lease, Slot
from headway.worker.slot_figures import SlotFigures
from tests.core.entries import entry
from tests.core.test_fair_queue import drain
from tests.core.test_queue import Fixed, ids, leave, rng

B, N = 8, 80


def make(max_weight: int = N, tiers: int = 3, reserved_share: float = 0.125) -> ModelQueue:
    queue = ModelQueue(QueueLimits(tiers, B, reserved_share, max_weight=max_weight))
    queue.set_slots(1)
    return queue


def offered(queue: ModelQueue, *entries: Entry, now: float = 0.0) -> list[bool]:
    return [not isinstance(queue.offer(one, now), Refused) for one in entries]


def offer(queue: ModelQueue, *weights: int, tier: int = 0, tenant: str = "t", now: float = 0.0) -> list[bool]:
    entries = (entry(f"{weight}", weight=weight, tier=tier, tenant=tenant) for weight in weights)
    return offered(queue, *entries, now=now)


def weights(queue: ModelQueue, limit: int = B, now: float = 0.0) -> list[int]:
    return [int(id) for id in ids(leave(queue, limit=limit, now=now))]


@pytest.fixture
def queue() -> ModelQueue:
    return make()


class TestBatches:
    @pytest.mark.parametrize(
        ("offered", "rides"),
        [
            ((30, 30, 20, 1), [[30, 30, 20], [1]]),
            ([1] * (B + 1), [[1] * B, [1]]),
            ((50, 40, 1), [[50], [40, 1]]),
            ((1, 5 * N, 2), [[1], [5 * N], [2]]),
        ],
        ids=["too heavy", "too many", "nobody goes before a heavy one", "heavier than a batch"],
    )
    def test_a_batch_is_full_when_the_next_would_be(self, offered: Sequence[int], rides: list[list[int]]) -> None:
        queue = make()
        offer(queue, *offered)
        assert [weights(queue) for _ in rides] == rides

    def test_a_tier_whose_next_one_is_too_heavy_leaves_what_is_left_to_the_others(self, queue: ModelQueue) -> None:
        offer(queue, 60, 70)
        offer(queue, 15, 15, tier=1)
        assert weights(queue) == [60, 15]

    def test_without_a_bound_on_weight_it_means_nothing(self) -> None:
        queue = make(max_weight=0)
        offer(queue, *[1000] * (B + 1))
        assert weights(queue) == [1000] * B
        assert queue.load(0.0).entry_size == 1.0

    def test_a_failed_batch_runs_again_within_its_weight(self, queue: ModelQueue) -> None:
        offer(queue, 40, 40)
        offer(queue, 40, 40, tenant="u")
        for _ in range(2):
            queue.fail(leave(queue), Cause.CRASHED, 0.0, rng)
        for now in (10.0, 10.1):
            assert weights(queue, now=now) == [40, 40]

    def test_full_goes_by_weight(self) -> None:
        queue, when_full = make(), Fixed(Rule(size=B, headway=math.inf))
        offer(queue, 40, 39)
        assert isinstance(queue.depart("gpu-0", B, when_full, 0.0), Hold)
        offer(queue, 1)
        departure = queue.depart("gpu-0", B, when_full, 0.0)
        assert not isinstance(departure, Hold)
        assert (departure.reason, departure.size) == (FULL, B)

    def test_of_several_that_would_all_be_too_late_the_last_rides(self) -> None:
        tier_queue = TierQueue()
        for number in range(3):
            tier_queue.push(queued_at(entry(str(number), weight=2 * N, timeout=4.0), 0.0))
        packed = pack([tier_queue], Terms(B, N, N / B, hopeless=10.0))
        assert (len(packed.members), len(packed.late)) == (1, 2)


class TestTurns:
    def test_what_is_kept_for_lower_tiers_is_weight(self) -> None:
        queue = make(reserved_share=0.25)
        offer(queue, *[10] * 20)
        offer(queue, *[5] * 20, tier=2)
        assert weights(queue) == [10] * 6 + [5, 5]
        assert weights(queue) == [10] * 6 + [5, 5]

    def test_a_heavy_one_of_a_lower_tier_gets_what_it_is_owed(self, queue: ModelQueue) -> None:
        offer(queue, 45, tier=2)
        rode = []
        while 45 not in rode:
            offer(queue, *[10] * 10)
            rode = weights(queue)
        assert rode == [10, 10, 10, 45]

    @pytest.mark.parametrize(
        ("weight", "others", "most"), [(11, 10, 2), (N, 10, B), (3 * N, 10, 3 * B), (N - 5, 1, 12), (N - 5, N, 12)]
    )
    def test_no_tier_starves_however_heavy_its_next_one_and_whatever_the_others(
        self, queue: ModelQueue, weight: int, others: int, most: int
    ) -> None:
        offer(queue, weight, tier=2)
        batches = list[list[int]]()
        while weight not in itertools.chain(*batches):
            offer(queue, *[others] * 10)
            batches.append(weights(queue))
        assert len(batches) <= most

    def test_what_is_owed_is_not_more_than_waits(self) -> None:
        tier_queues = [TierQueue(), TierQueue()]
        for number in range(20):
            tier_queues[0].push(queued_at(entry(str(number), weight=10), 0.0))
        tier_queues[1].push(queued_at(entry("low", tier=1, weight=30), 0.0))
        packed = pack(tier_queues, Terms(B, N, N / B, 0.125, owed=500.0))
        assert sorted(one.entry.weight for one in packed.members) == [10] * 5 + [30]
        assert packed.owed == 0.0


class TestTenants:
    def test_take_turns_by_weight(self) -> None:
        """A tenant whose entries are five times as heavy gets a fifth as many."""
        queue = make()
        offer(queue, *[50] * 40, tenant="heavy")
        offer(queue, *[10] * 200, tenant="light")
        rode = Counter[int]()
        for _ in range(20):
            rode.update(weights(queue))
        assert 0.8 < rode[50] * 50 / (rode[10] * 10) < 1.25

    def test_light_entries_share_a_round(self) -> None:
        tier_queue = TierQueue()
        for number in range(8):
            tier_queue.push(queued_at(entry(f"light-{number}", tenant="light", weight=5), 0.0, 0.5))
        for number in range(4):
            tier_queue.push(queued_at(entry(f"heavy-{number}", tenant="heavy", weight=10), 0.0))
        order = [one.entry.id for _ in range(12) if (one := tier_queue.pop())]
        expected = [id for n in range(4) for id in (f"light-{2 * n}", f"light-{2 * n + 1}", f"heavy-{n}")]
        assert order == expected

    def test_a_cost_is_bounded(self) -> None:
        limits = QueueLimits(1, 100, max_weight=3200)
        assert limits.cost(entry(weight=50)) == 0.5
        assert limits.cost(entry(weight=1)) == 0.32
        assert limits.cost(entry(weight=10**9)) == LOOKED_AT


class TestReckoning:
    @pytest.mark.parametrize(("count", "weight", "size"), [(3, 3, 3), (3, 30, 3), (3, 60, 6), (1, 2 * N, 2 * B)])
    def test_size_goes_by_number_or_weight(self, count: int, weight: int, size: float) -> None:
        assert QueueLimits(1, B, max_weight=N).size(count, weight) == size
        assert QueueLimits(1, B).size(count, weight) == count

    def test_run_times_are_learnt_by_weight(self) -> None:
        """A batch takes 20 ms, plus 1 ms per unit of weight."""
        queue, dice = make(), random.Random(1)
        now = 0.0
        for _ in range(100):
            offer(queue, *[dice.randrange(10, N) for _ in range(dice.randrange(1, 4))], now=now)
            while queue.depth:
                departure = leave(queue, now=now)
                now += 0.020 + 0.001 * sum(member.entry.weight for member in departure.members)
                queue.finish(departure, now)
        assert queue.service.alpha == pytest.approx(0.020, rel=0.01)
        assert queue.service.seconds(B) == pytest.approx(0.020 + 0.001 * N, rel=0.01)

    def test_the_load_tells_the_mean_size_of_an_entry(self, queue: ModelQueue) -> None:
        for number in range(400):
            offer(queue, 30, now=number * 0.01, tenant=str(number))
        load = queue.load(4.0)
        assert load.entry_size == pytest.approx(3.0)
        assert load.size_rate == pytest.approx(3.0 * load.rate)

    def test_the_pace_of_policies_and_capacity_goes_by_size(self) -> None:
        counted = Load(rate=60.0, alpha=0.1, beta=0.02, slots=2, max_batch=B, largest=B)
        weighed = Load(rate=30.0, alpha=0.1, beta=0.02, slots=2, max_batch=B, largest=B, entry_size=2.0)
        assert headway(weighed) == pytest.approx(headway(counted))
        assert pace(weighed) == pytest.approx(pace(counted) / 2)

    def test_admission_goes_by_weight_and_by_tenant(self) -> None:
        """At one batch a second, an entry with two seconds in the queue lets fewer than two batches go first."""
        admitted = {}
        for weight in (10, 40):
            queue = make(tiers=1)
            for number in range(3):
                offer(queue, N, now=float(number))
                queue.finish(leave(queue, now=float(number)), number + 1.0)
            admitted[weight] = sum(offer(queue, *[weight] * 100, now=4.0))
        assert 14 <= admitted[10] <= 17
        assert 3 <= admitted[40] <= 5
        assert offer(queue, 40, now=4.0) == [False]
        assert offer(queue, 40, tenant="other", now=4.0) == [True]

    def test_what_is_heavier_than_a_batch_counts_as_a_full_one(self) -> None:
        """It runs alone: a slot does one in the time of a batch, so it counts as one."""
        slot = Slot("gpu-0", "m", B, N)
        lease = Lease(1, slot, [entry(weight=1000 * N)], FULL, 0.0, 1.0, 1.0)
        assert (lease.fill, lease.size) == (1.0, B)
        figures, queue = SlotFigures(slot, lambda: 0.0), make()
        for number in range(20):
            figures.succeeded(lease, 0.02)
            offer(queue, 1000 * N, now=float(number))
            queue.finish(leave(queue, now=float(number)), number + 0.02)
        assert figures.items_per_second == pytest.approx(50.0)
        load = queue.load(20.0)
        assert load.entry_size == pytest.approx(B)
        assert load.batch_seconds(B) == pytest.approx(0.02)


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
    assert queued_at(entry(input="x" * length, parameters=b"1" * parameters), 0.0).cost == cost


class TestPages:
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


class TestBatchesOfPages:
    def test_one_tenant_alone_has_its_batches_full_however_large(self) -> None:
        queue = make(max_weight=0)
        offered(queue, *(paged(f"a{number}", "a", BATCH_PAGES) for number in range(8)))
        assert len(leave(queue).members) == 8

    def test_of_large_entries_others_ride_with_one_or_with_as_many_as_have_the_pages_together(self) -> None:
        queue = make(max_weight=0)
        offered(queue, *(paged(f"a{number}", "a", 2 * BATCH_PAGES) for number in range(3)))
        offered(queue, *(paged(f"b{number}", "b") for number in range(4)))
        assert ids(leave(queue)) == ["a0", "b0", "b1", "b2", "b3"]
        assert ids(leave(queue)) == ["a1"]
        assert ids(leave(queue, now=MIXED_SECONDS)) == ["a2"]
        queue = make(max_weight=0)
        offered(queue, paged("b", "b"), *(paged(f"a{number}", "a", BATCH_PAGES // 3) for number in range(6)))
        assert ids(leave(queue)) == ["b", "a0", "a1", "a2"]

    def test_batches_are_full_again_when_the_others_have_gone(self) -> None:
        queue = make(max_weight=0)
        offered(queue, paged("b", "b"), *(paged(f"a{number}", "a", BATCH_PAGES) for number in range(9)))
        assert ids(leave(queue)) == ["b", "a0"]
        offered(queue, paged("last", "a", BATCH_PAGES), now=MIXED_SECONDS - 0.1)
        assert len(leave(queue, now=MIXED_SECONDS).members) == 8

    def test_a_tier_whose_next_one_does_not_fit_leaves_its_places_to_the_others(self) -> None:
        queue = make(max_weight=0, tiers=2)
        offered(queue, *(paged(f"a{number}", "a", BATCH_PAGES) for number in range(3)))
        offered(queue, *(paged(f"b{number}", "b", tier=1) for number in range(9)))
        assert ids(leave(queue)) == ["a0", *(f"b{number}" for number in range(7))]


class TestPlaces:
    def test_one_tenant_leaves_a_tenth_of_the_places(self) -> None:
        queue = ModelQueue(QueueLimits(1, B, max_queue=100))
        admitted = offered(queue, *(paged(str(number), "a") for number in range(100)))
        assert admitted.count(True) == 100 * GREED // (GREED + 1)
        assert all(offered(queue, *(paged(f"b{number}", "b") for number in range(9))))
        assert offered(queue, paged("again", "a")) == [False]

    def test_places_of_who_has_left_are_free(self) -> None:
        queue = ModelQueue(QueueLimits(1, B, max_queue=10))
        waiting = [queue.offer(paged(str(number), "a"), 0.0) for number in range(9)]
        assert offered(queue, paged("more", "a")) == [False]
        assert isinstance(waiting[0], QueuedEntry)
        queue.remove(waiting[0])
        assert offered(queue, paged("more", "a"), paged("most", "a")) == [True, False]
        leave(queue, limit=3)
        assert offered(queue, *(paged(f"again-{number}", "a") for number in range(4))) == [True, True, True, False]
