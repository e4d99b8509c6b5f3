"""Batches of a model that pads: entries of similar weight ride together, and nobody pays or waits for it."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import policies
from headway.core.departure import Departure, Hold
from headway.core.queue import ModelQueue
from headway.core.queue_limits import Padding, QueueLimits
from headway.model import Entry

ALPHA, BETA = 0.008, 1.2e-6
GPUS, LIMIT = 2, 32


def entry(weight: int, tenant: str = "t", tier: int = 0) -> Entry:
    return Entry("", "", "", tier, tenant, "g", 1e9, 1e9, weight=weight)


def queue_of(longest: float, *, tiers: int = 1, limit: int = LIMIT, max_weight: int = 0) -> ModelQueue:
    padding = Padding(longest, ALPHA / BETA / limit)
    queue = ModelQueue(QueueLimits(tiers, limit, padding=padding, max_queue=10**9, max_weight=max_weight))
    queue.set_slots(GPUS)
    return queue


def departs(queue: ModelQueue, limit: int = LIMIT, now: float = 1.0) -> Departure:
    departure = queue.depart("w", limit, policies.build("paced", 0.0), now)
    assert isinstance(departure, Departure)
    return departure


def weights_of(departure: Departure) -> list[int]:
    return [member.entry.weight for member in departure.members]


def test_the_first_rides_with_its_nearest_lighter_ones_first_and_heavier_ones_fill_up() -> None:
    queue = queue_of(10_000.0, limit=4)
    for weight in (10_000, 90_000, 1_000, 7_500, 13_000, 8_700, 6_000):
        queue.offer(entry(weight, f"tenant {weight}"), 0.0)
    assert weights_of(departs(queue, 4)) == [10_000, 8_700, 7_500, 6_000]
    queue = queue_of(10_000.0, limit=4)
    for weight in (10_000, 90_000, 50_000, 9_000, 13_000):
        queue.offer(entry(weight, f"tenant {weight}"), 0.0)
    assert weights_of(departs(queue, 4)) == [10_000, 9_000, 13_000, 50_000]


@pytest.mark.parametrize(("first", "batches"), [(10, [[10] * 40, [900] * 4]), (900, [[900] * 4, [10] * 40])])
def test_light_and_heavy_ones_ride_apart_where_that_saves_time(first: int, batches: list[list[int]]) -> None:
    queue = queue_of(900.0, tiers=2, limit=64)
    queue.offer(entry(first, tier=1), 0.0)
    for weight in sorted([10] * 40 + [900] * 4, key=first.__eq__)[:-1]:
        queue.offer(entry(weight), 1.0)
    assert [weights_of(departs(queue, 64, 2.0 + number)) for number in range(2)] == batches
    assert queue.depth == 0


@pytest.mark.parametrize("weights", [[90, 100] * 4, [10, 10, 900]])
def test_all_ride_where_parting_them_saves_little(weights: list[int]) -> None:
    queue = queue_of(100.0)
    for weight in weights:
        queue.offer(entry(weight), 0.0)
    assert weights_of(departs(queue)) == weights


def test_a_light_batch_tells_nothing_of_its_slot() -> None:
    queue = queue_of(900.0, limit=64)
    queue.set_slots(GPUS, ("w",))
    for weight in (*[10] * 40, *[900] * 4):
        queue.offer(entry(weight), 0.0)
    departure = departs(queue, 64)
    queue.finish(departure, 2.0)
    assert (set(weights_of(departure)), queue.factors.standing("w", 1)) == ({10}, (1.0, 1))
    assert queue.service.alpha > 0.0


@pytest.mark.parametrize("count", [3, 12])
def test_only_entries_of_one_shape_ride_where_these_count(count: int) -> None:
    limits = queue_of(100.0, limit=4).limits.counting_rows()
    queue = ModelQueue(limits)
    queue.set_slots(GPUS)
    for number in range(count):
        queue.offer(msgspec.structs.replace(entry(100 + number, f"tenant {number}"), shape=number % 2), 0.0)
    ridden = []
    while queue.depth:
        departure = departs(queue, 4)
        assert len({member.entry.shape for member in departure.members}) == 1
        ridden += weights_of(departure)
    assert sorted(ridden) == [100 + number for number in range(count)]


def test_those_that_ride_past_another_shape_cost_their_tenant_nothing() -> None:
    """Their seats would have been empty. The first entry pays, and so does its neighbour ahead of the other shape."""
    queue = ModelQueue(queue_of(100.0, limit=4).limits.counting_rows())
    queue.set_slots(GPUS)
    for tenant, shape in (("a", 1), ("b", 1), ("other", 2), ("c", 1), ("d", 1), ("e", 1)):
        queue.offer(msgspec.structs.replace(entry(100, tenant), shape=shape), 0.0)
    assert [member.entry.tenant for member in departs(queue, 4).members] == ["a", "b", "c", "d"]
    for tenant in "bc":
        queue.offer(msgspec.structs.replace(entry(100, tenant), shape=3), 0.0)
    order = [departs(queue, 4).members for _ in range(3)]
    assert [[member.entry.tenant for member in members] for members in order] == [["other"], ["e"], ["c", "b"]]


def test_a_heavier_entry_of_a_higher_tier_waits_for_its_turn_only() -> None:
    queue = queue_of(100.0, tiers=2, limit=4)
    for weight, tier in ((50, 0), (800, 0), (40, 1), (45, 1), (30, 1), (35, 1)):
        queue.offer(entry(weight, f"tenant {weight}", tier), 0.0)
    assert weights_of(departs(queue, 4)) == [50, 40, 45, 30]


def test_a_batch_keeps_within_its_weight() -> None:
    queue = queue_of(100.0, limit=4, max_weight=400)
    for weight in (200, 190, 150, 10, 5):
        queue.offer(entry(weight, f"tenant {weight}"), 0.0)
    assert weights_of(departs(queue, 4)) == [200, 190, 10]


def test_bulk_lines_make_no_batch_longer_in_weight() -> None:
    """The lines nearest to its longest entry ride, but none that the others would have to be padded to."""
    queue = queue_of(100.0, limit=8)
    queue.service.alpha, queue.service.largest = 0.01, 8.0
    queue.limits = replace(queue.limits, padding=Padding(100.0, 1e9))
    for weight in (100, 60):
        queue.offer(entry(weight), 0.0)
    for number, weight in enumerate((10, 900, 90, 101, 80, 100, 70)):
        queue.offer_bulk(entry(weight, f"bulk {number}", tier=1), 0.0)
    assert weights_of(departs(queue, 8)) == [100, 60, 100, 90, 80, 70, 10]


def test_bulk_lines_ride_as_far_as_the_promise_goes_for_the_longest_of_the_batch() -> None:
    """Full batches alone wouldn't show that, as a flat line fits their run times."""
    queue = queue_of(100.0, limit=8)
    queue.limits = replace(queue.limits, padding=Padding(100.0), promise=0.1)
    queue.service.alpha, queue.service.largest = 0.08, 8.0
    for number in range(30):
        queue.offer_bulk(entry(50, f"bulk {number}", tier=1), 0.0)
    riders = {}
    for weight in (50, 200, 400):
        queue.offer(entry(weight), 1.0)
        riders[weight] = departs(queue, 8).bulk
    assert riders == {50: 7, 200: 3, 400: 1}


def test_whole_batches_of_bulk_lines_are_of_like_weight_and_no_longer_than_others() -> None:
    queue = queue_of(100.0, limit=4)
    for number, weight in enumerate((50, 900, 110, 40, 105, 300, 60, 45)):
        queue.offer_bulk(entry(weight, f"bulk {number}", tier=1), 0.0)
    queue.service.alpha, queue.service.largest = 0.01, 4.0
    batches = [weights_of(departs(queue, 4, 100.0 + number)) for number in range(4)]
    assert batches == [[50, 45, 40, 60], [900], [110, 105], [300]]


def test_bulk_lines_of_like_weight_cost_their_tenants_what_they_are_filled_up_to() -> None:
    queue = queue_of(100.0, limit=4)
    queue.service.alpha, queue.service.largest = 0.01, 4.0
    queue.limits = replace(queue.limits, padding=Padding(100.0, 10.0))
    lengths = {"short": 10, "long": 100}
    rounds, waiting = dict.fromkeys(lengths, 0.0), Counter[str]()
    for number in range(300):
        for tenant, length in lengths.items():
            while waiting[tenant] < 12:
                queue.offer_bulk(entry(length, tenant, tier=1), 0.0)
                waiting[tenant] += 1
        members = departs(queue, 4, 100.0 + number).members
        for member in members:
            rounds[member.entry.tenant] += 10.0 + max(one.weight for one in members)
            waiting[member.entry.tenant] -= 1
    assert rounds["short"] == pytest.approx(rounds["long"], rel=0.1)


Tenants = Mapping[str, tuple[int, int]]
"""Weight of each tenant's entries, and how many of them always wait."""


def shares_of_time(tenants: Tenants, seconds: float) -> dict[str, float]:
    """Return each tenant's share of the GPU time, relative to an even share."""
    queue = queue_of(sum(weight for weight, _ in tenants.values()) / len(tenants))
    policy, spent, waiting = policies.build("paced", None), defaultdict[str, float](float), defaultdict[str, int](int)
    ends: list[tuple[float, str, Departure | None]] = [(0.0, f"w{number}", None) for number in range(GPUS)]
    while (now := ends[0][0]) < seconds:
        _, worker, departure = heapq.heappop(ends)
        if departure is not None:
            queue.finish(departure, now)
        for tenant, (weight, backlog) in tenants.items():
            for _ in range(backlog - waiting[tenant]):
                queue.offer(entry(weight, tenant), now)
            waiting[tenant] = backlog
        verdict = queue.depart(worker, LIMIT, policy, now)
        if isinstance(verdict, Hold):
            heapq.heappush(ends, (min(max(verdict.until, now + 1e-4), now + 0.01), worker, None))
            continue
        count = len(verdict.members)
        takes = ALPHA + BETA * count * max(weights_of(verdict))
        for member in verdict.members:
            spent[member.entry.tenant] += takes / count
            waiting[member.entry.tenant] -= 1
        heapq.heappush(ends, (now + takes, worker, verdict))
    even = sum(spent.values()) / len(tenants)
    return {tenant: spent[tenant] / even for tenant in tenants}


@pytest.mark.parametrize(
    "tenants",
    [
        {"short": (100, 2_000), "long": (1_000, 100)},
        {f"tenant {number}": (100 if number % 2 else 1_000, 100) for number in range(10)},
        {f"tenant {number}": (100 if number == 0 else 1_000, 100) for number in range(10)},
    ],
)
def test_tenants_of_short_and_long_inputs_get_equal_time(tenants: Tenants) -> None:
    assert list(shares_of_time(tenants, 10.0).values()) == pytest.approx([1.0] * len(tenants), abs=0.1)


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 2), st.sampled_from("abc")), max_size=60),
    st.integers(1, 8),
)
def test_every_entry_rides_once_and_the_first_by_its_turn(entries: Sequence[tuple[int, int, str]], limit: int) -> None:
    queue = queue_of(100.0, tiers=3, limit=limit)
    waiting = [queue.offer(entry(weight, tenant, tier), 0.0) for weight, tier, tenant in entries]
    ridden = []
    for number in range(len(entries)):
        if not queue.depth:
            break
        highest = min(member.entry.tier for member in waiting if member not in ridden)  # type: ignore[union-attr]
        departure = departs(queue, limit, now=float(number))
        assert 0 < len(departure.members) <= limit
        assert number % 2 or departure.members[0].entry.tier == highest
        ridden += departure.members
        queue.finish(departure, float(number))
    assert len({id(member) for member in ridden}) == len(ridden) == len(entries)
