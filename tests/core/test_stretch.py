"""Admission where only entries of one shape ride together: what waits takes as many batches as it has shapes."""

from __future__ import annotations

from collections import Counter

import pytest

from headway.core.admission import Refused
from headway.core.batch import Departure
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from tests.core.entries import entry
from tests.core.test_queue import AT_ONCE

SECONDS = 0.1
"""Run time of every batch."""
BATCH = 32
IN_TIME = round(2.0 / SECONDS)
"""Batches that leave before an entry is due in its queue."""


def make() -> ModelQueue:
    """A queue of rows that knows how long its batches take."""
    queue = ModelQueue(QueueLimits(3, BATCH).counting_rows())
    queue.set_slots(1)
    for at in range(8):
        queue.offer(entry(f"first {at}"), at * 1.0)
        departure = queue.depart("gpu-0", BATCH, AT_ONCE, at * 1.0)
        assert isinstance(departure, Departure)
        queue.finish(departure, at + SECONDS)
    return queue


def admitted(queue: ModelQueue, shapes: list[int], tenant: str = "t", now: float = 10.0) -> int:
    """Number of these that get in."""
    offered = [queue.offer(entry(f"{tenant} {at}", tenant=tenant, shape=shape), now) for at, shape in enumerate(shapes)]
    return sum(not isinstance(one, Refused) for one in offered)


def test_entries_of_unlike_shapes_are_let_in_as_batches_of_one() -> None:
    assert IN_TIME - 2 <= admitted(make(), list(range(1, 200))) <= IN_TIME + 1


@pytest.mark.parametrize("shapes", [1, 2])
def test_entries_that_ride_together_are_let_in_as_before(shapes: int) -> None:
    assert admitted(make(), [1 + at % shapes for at in range(500)]) == 500


def test_a_refused_one_is_told_the_seconds_until_it_would_be_let_in() -> None:
    queue = make()
    admitted(queue, list(range(1, 200)))
    refused = queue.offer(entry("late", tenant="t", shape=500), 10.0)
    assert isinstance(refused, Refused)
    assert 0.0 < refused.wait < 2 * SECONDS


def test_another_tenant_s_common_shape_is_let_in_beside_them() -> None:
    queue = make()
    admitted(queue, list(range(1, 200)), "hostile")
    assert admitted(queue, [999] * 64, "calm") == 64


def test_a_new_tenant_is_let_in_where_others_ride_together() -> None:
    queue = make()
    for tenant in range(100):
        assert admitted(queue, [1, 1, 1], f"t{tenant}") == 3
    assert admitted(queue, [2, 3], "new") == 2


def test_many_tenants_of_one_shape_each_are_let_in_as_batches_of_one() -> None:
    queue = make()
    found = Counter(admitted(queue, [1 + tenant], f"t{tenant}") for tenant in range(200))
    assert IN_TIME - 2 <= found[1] <= IN_TIME + 1


@pytest.mark.parametrize("calm", [0, 2])
def test_under_a_flood_what_is_let_in_is_answered_in_time(calm: int) -> None:
    """A flood of one tenant alone, or beside another's requests of one shape, none of which is refused or late."""
    queue, now, shape = make(), 10.0, 10
    late = Counter[str]()
    for turn in range(200):
        for _ in range(8):
            shape += 1
            queue.offer(entry(f"flood {shape}", tenant="hostile", shape=shape), now)
        assert admitted(queue, [1] * calm, "calm", now) == calm, turn
        late.update(member.entry.tenant for member in queue.expire(now))
        departure = queue.depart("gpu-0", BATCH, AT_ONCE, now)
        assert isinstance(departure, Departure)
        late.update(member.entry.tenant for member in departure.late)
        now += SECONDS
        queue.finish(departure, now)
    assert late["calm"] == 0
    assert late["hostile"] == 0 or calm
