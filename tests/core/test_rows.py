"""Tensor rows: an entry of k rows counts as k wherever batches are calculated."""

import heapq
import itertools
import math
import random
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import rows
from headway.core.admission import Refused
from headway.core.departure import Departure, Load, Rule
from headway.core.fair_queue import LOOK_AHEAD
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.core.ratelimit import all_counting_as, charge
from headway.core.suspects import QUARANTINE, Group
from headway.core.tensors import Tensor, TensorHead, pack
from headway.model import Limit, RowsTogether, Tensors, TensorSpec, ValueKind, WorkerInfo, WorkerStatus
from tests.core.entries import entry
from tests.core.test_queue import Curious, Fixed, ids, leave

B = 8


def tensors(count: int) -> Tensors:
    return pack([Tensor(TensorHead("x", "UINT8", (count, 2)), bytes(2 * count))])


def worker(takes: str, model: str = "m", status: WorkerStatus = WorkerStatus.HEALTHY) -> WorkerInfo:
    return WorkerInfo(worker_id=f"{model}-{takes}-{status}", model=model, status=status, takes=takes)


def make(tiers: int = 3, reserved_share: float = 0.25, slots: int = 1) -> ModelQueue:
    """Return a model's queue that existed before it was known that the model takes tensors."""
    queue = ModelQueue(QueueLimits(tiers, B, reserved_share))
    queue.set_slots(slots)
    queue.bound(queue.limits.counting_rows())
    return queue


def offer(queue: ModelQueue, *counts: int, tenant: str = "t", tier: int = 0, now: float = 0.0) -> list[bool]:
    entries = [entry(f"{count}", weight=count, tenant=tenant, tier=tier) for count in counts]
    return [not isinstance(queue.offer(one, now), Refused) for one in entries]


class TestModels:
    def test_rows_count_while_any_healthy_worker_takes_tensors_and_others_decide_nothing(self) -> None:
        text, arrays = ValueKind.TEXT.value, ValueKind.TENSORS.value
        assert rows.counted([worker(arrays), worker(text), worker(text, "n")]) == {"m": True, "n": False}
        assert rows.counted([worker(text)]) == {"m": False}
        gone = [worker(arrays, status=status) for status in WorkerStatus if status is not WorkerStatus.HEALTHY]
        assert rows.counted([worker(""), *gone]) == {}

    def test_a_text_is_one_row_and_tensors_are_theirs_up_to_those_of_a_batch(self) -> None:
        values = ("a" * 99, b"[1,2]", tensors(1), tensors(5), tensors(99))
        assert [rows.weight(value, B, 0) for value in values] == [1, 1, 1, 5, B]
        assert rows.weight(tensors(99), B, 100) == 100

    def test_bounds_by_weight_stay_as_they_are(self) -> None:
        by_weight = QueueLimits(3, B, max_weight=100)
        assert replace(by_weight.counting_rows(), rows=False) == by_weight
        limits = QueueLimits(3, B, 0.25, 99, (1, 2)).counting_rows()
        assert (limits.max_weight, limits.unit, limits.reserved_share, limits.shed_at) == (B, 1.0, 0.25, (1, 2))


@pytest.fixture
def queue() -> ModelQueue:
    return make()


class TestBatches:
    def test_what_waited_before_rides_with_what_comes(self) -> None:
        queue = ModelQueue(QueueLimits(1, B))
        queue.set_slots(1)
        queue.offer(entry("small 0"), 0.0)
        for number in (1, 2):
            assert queue.offer_small(entry(f"small {number}"), 0.0) is not None
        queue.bound(queue.limits.counting_rows())
        offer(queue, 6, 5)
        assert queue.offer_small(entry("small 3"), 0.0) is not None
        assert [ids(leave(queue)) for _ in range(2)] == [["small 0", "small 1", "small 2"], ["6"]]
        assert ids(leave(queue)) == ["5", "small 3"]

    @given(
        st.lists(st.tuples(st.integers(1, 2 * B), st.integers(0, 2), st.sampled_from("ab")), max_size=40),
        st.lists(st.booleans(), max_size=6),
    )
    def test_each_rides_once_as_the_kind_changes(self, asked: list[tuple[int, int, str]], changes: list[bool]) -> None:
        plain = QueueLimits(3, B, 0.25)
        queue, rode = ModelQueue(plain), Counter[str]()
        queue.set_slots(1)
        for number, (count, tier, tenant) in enumerate(asked):
            queue.offer(entry(str(number), weight=count, tier=tier, tenant=tenant), 0.0)
            if number % 7 == 6 and changes:
                queue.bound(plain.counting_rows() if changes.pop() else plain)
            if number % 5 == 4:
                rode.update(ids(leave(queue)))
        queue.bound(plain.counting_rows())
        while queue.depth:
            departure = leave(queue)
            together = sum(member.entry.weight for member in departure.members)
            assert together <= B or len(departure.members) == 1
            rode.update(ids(departure))
        assert rode == Counter(map(str, range(len(asked))))
        assert all(tier_queue.weight == 0 for tier_queue in queue._tier_queues)


def wait(queue: ModelQueue, *shapes: int, tenant: str = "t", tier: int = 0) -> None:
    """Queue entries of one row each. Their ids are "shape-number"."""
    for number, shape in enumerate(shapes):
        one = entry(f"{shape}-{number}", tenant=tenant, tier=tier, shape=shape)
        assert not isinstance(queue.offer(one, 0.0), Refused)


def ride(queue: ModelQueue) -> str:
    return " ".join(ids(leave(queue)))


SECONDS = 10.0


def arrivals(tenant: str, rate: float) -> list[tuple[float, str, int]]:
    """Return (time, tenant, shape) of random arrivals. The tenant "many" sends a thousand shapes, others send one."""
    rng, now, found = random.Random(tenant), 0.0, list[tuple[float, str, int]]()
    while (now := now + rng.expovariate(rate)) < SECONDS:
        found.append((now, tenant, 2 + len(found) % 1000 if tenant == "many" else 1))
    return found


def served(asked: list[tuple[float, str, int]]) -> dict[str, list[float]]:
    """Return the waits by tenant on two GPUs that take 20 ms a batch. Ends shortly after the last arrival."""
    queue, waits, order = make(slots=2), defaultdict[str, list[float]](list), itertools.count()
    policy = Fixed(Rule(size=1))
    events: list[tuple[float, int, Any]] = [(at, next(order), (tenant, shape)) for at, tenant, shape in asked]
    heapq.heapify(events)
    idle = 2
    while events and events[0][0] < SECONDS + 0.2:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Departure):
            idle += 1
            for member in queue.finish(event, now):
                waits[member.entry.tenant].append(now - member.arrived)
        else:
            queue.offer(entry(tenant=event[0], shape=event[1]), now)
        while idle and isinstance(left := queue.depart(f"gpu-{idle}", B, policy, now), Departure):
            idle -= 1
            heapq.heappush(events, (now + 0.020, next(order), left))
    return waits


class TestShapes:
    def test_rows_of_one_shape_have_one_number_whatever_the_sole_input_is_called(self) -> None:
        def number(name: str, *shape: int) -> int:
            value = pack([Tensor(TensorHead(name, "UINT8", shape), bytes(math.prod(shape)))])
            return rows.shape_number(value, RowsTogether.SHAPE, (TensorSpec("x", "UINT8", (-1,)),), B)

        assert number("x", 1, 9) == number("y", 3, 9) != 0
        assert len({number("x", 1, size) for size in range(1000)}) == 1000
        assert rows.shape_number(tensors(1), RowsTogether.ANY, (), B) == 0
        assert rows.shape_number("a", RowsTogether.SHAPE, (), B) == 0
        unfit = (TensorSpec("x", "UINT8", (3, -1)),)
        assert rows.shape_number(tensors(1), RowsTogether.PADDED, unfit, B) > 0

    def test_a_batch_is_of_one_shape_and_takes_those_of_it_that_come_later(self, queue: ModelQueue) -> None:
        wait(queue, 1, 2, 1, 3, 2, 1)
        assert [ride(queue) for _ in range(3)] == ["1-0 1-2 1-5", "2-1 2-4", "3-3"]
        assert queue.depth == 0

    def test_none_rides_before_a_heavier_one_of_its_shape(self, queue: ModelQueue) -> None:
        for weight, shape in ((5, 1), (1, 2), (4, 1), (1, 1)):
            queue.offer(entry(f"{weight}", weight=weight, shape=shape), 0.0)
        assert [ride(queue) for _ in range(3)] == ["5", "1", "4 1"]

    def test_as_many_are_looked_at_as_fill_a_large_batch(self, queue: ModelQueue) -> None:
        wait(queue, 1, *range(2, LOOK_AHEAD + 1), 1, 1)
        assert [ride(queue) for _ in range(3)] == [f"1-0 1-{LOOK_AHEAD} 1-{LOOK_AHEAD + 1}", "2-1", "3-2"]
        queue = make()
        wait(queue, 1, *range(2, LOOK_AHEAD + 2), 1)
        assert ride(queue) == "1-0"

    def test_every_second_batch_begins_with_the_tenant_of_fewest_batches(self, queue: ModelQueue) -> None:
        wait(queue, 2, 3, 4, 5, 6, 7, tenant="many")
        wait(queue, *[1] * 12, tenant="one")
        assert [ride(queue) for _ in range(4)] == ["2-0", "1-0 1-1 1-2 1-3 1-4 1-5 1-6 1-7", "3-1", "1-8 1-9 1-10 1-11"]

    def test_it_counts_batches_by_rows_and_by_turn_where_they_are_as_many(self, queue: ModelQueue) -> None:
        wait(queue, 0)
        ride(queue)
        for number in range(3):
            queue.offer(entry(f"first-{number}", tenant="first", shape=2 + number), 0.0)
            queue.offer(entry(f"full-{number}", tenant="full", shape=1, weight=B), 0.0)
        assert ride(queue) == "first-0"

    def test_a_neighbour_of_a_thousand_shapes_is_answered_in_time(self) -> None:
        """Two GPUs run 100 batches a second. Hostile inputs fill a batch each, but get only every second one."""
        asked = [*arrivals("calm", 300.0), *arrivals("many", 200.0)]
        waits = served(asked)
        assert len(waits["calm"]) == sum(tenant == "calm" for _, tenant, _ in asked)
        assert sorted(waits["calm"])[int(0.95 * len(waits["calm"]))] < 0.060
        assert len(waits["many"]) >= 0.25 * 100 * SECONDS

    def test_light_tenants_of_a_shape_each_wait_for_no_flood(self) -> None:
        """A flood of one shape gets what they leave, not every second batch."""
        asked = [(at, f"light {number % 10}", 2 + number % 10) for number, (at, _, _) in enumerate(arrivals("", 80.0))]
        waits = served([*asked, *arrivals("flood", 1500.0)])
        light = sorted(itertools.chain(*(found for tenant, found in waits.items() if tenant != "flood")))
        assert len(light) == len(asked)
        assert light[int(0.95 * len(light))] < 0.080

    def test_shapes_of_two_tiers_share_batches_as_rows_do(self) -> None:
        """Everything that waits would fit into one batch if it had one shape."""
        queue, batches, firsts = make(), 60, Counter[int]()
        numbers = iter(range(100, 900))
        wait(queue, *[next(numbers) for _ in range(4)])
        wait(queue, *[next(numbers) for _ in range(9)], tier=2)
        for _ in range(batches):
            [rider] = leave(queue).members
            firsts[rider.entry.tier] += 1
            wait(queue, next(numbers), tier=rider.entry.tier)
        assert batches / 8 <= firsts[2] <= batches / 4

    def test_a_quarantine_runs_one_shape_after_another(self, queue: ModelQueue) -> None:
        wait(queue, 1, 2, 1, 2, 2)
        members = [queue._tier_queues[0].pop() for _ in range(5)]
        queue._suspects.add(Group([one for one in members if one is not None], -math.inf, QUARANTINE))
        assert [ride(queue) for _ in range(2)] == ["1-0 1-2", "2-1 2-3 2-4"]


class TestReckoning:
    def test_a_load_in_entries_takes_as_long(self) -> None:
        load = Load(rate=10.0, alpha=0.01, beta=0.001, slots=2, max_batch=32, largest=24.0, entry_size=4.0)
        entries = load.in_entries()
        assert (entries.max_batch, entries.entry_size, entries.largest) == (8, 1.0, 6.0)
        assert entries.batch_seconds(8) == load.batch_seconds(32)
        assert entries.in_entries() is entries

    def test_what_has_come_of_late_is_kept_of_rows_and_not_of_other_weights(self) -> None:
        """Most models get a fixed number of rows per request, often one. String lengths always vary."""
        policy = Curious()
        for limits, kept in ((QueueLimits(1, B).counting_rows(), True), (QueueLimits(1, B, max_weight=99), False)):
            queue = ModelQueue(limits)
            queue.set_slots(1)
            for now in range(4):
                queue.offer(entry(str(now), weight=4), float(now))
                queue.depart("gpu-0", B, policy, float(now))
            past = policy.loads[-1].past
            assert (past is not None) is kept
            if past is not None:
                assert (past.each, policy.loads[-1].entry_size) == (4.0, 4.0)

    def test_a_limit_is_charged_with_each_row(self) -> None:
        limit, tats = Limit("k", "key", 60.0, 8.0), dict[str, float]()
        for number in range(4):
            [tats["k"]] = charge(all_counting_as((limit,), 2), tats, 0.0)  # type: ignore[misc]
            assert tats["k"] == pytest.approx(2.0 * (number + 1))
        assert not isinstance(charge((limit,), tats, 0.0), list)
