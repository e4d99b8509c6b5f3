"""Small entries that are noted, and get their places together: a queue does with them what it does with any others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import packing
from headway.core.admission import Refused
from headway.core.batch import Departure
from headway.core.departure import Hold, Rule
from headway.core.fair_queue import QueuedEntry
from headway.core.queue import GATE_AGE, MOST_KINDS, ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.model import Cause, Entry
from tests.core.entries import entry
from tests.core.test_queue import AT_ONCE, Fixed, leave

Step = tuple[str, int, int, float]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["offer"] * 6 + ["depart", "finish", "fail", "remove", "expire", "slots", "wake"]),
        st.integers(0, 2),
        st.integers(0, 3),
        st.sampled_from([0.0, 0.001, 0.02, 0.3]),
    ),
    max_size=120,
)


def slow(limits: QueueLimits) -> ModelQueue:
    """A queue of one GPU that answers ten entries a second."""
    queue = ModelQueue(limits)
    queue.set_slots(1)
    queue.service.observe(limits.max_batch, limits.max_batch / 10)
    return queue


def played(
    steps: Sequence[Step],
    tiers: int,
    offers: Callable[[ModelQueue], Callable[[Entry, float], object]],
    most_rows: int = 0,
) -> list[object]:
    """What one can see of a queue in the course of these steps; of one whose entries have rows, so many at most, if that is given."""
    limits = QueueLimits(3, 4, max_queue=30)
    queue, now, seen = slow(limits.counting_rows() if most_rows else limits), 0.0, list[object]()
    running, known = list[Departure](), list[QueuedEntry]()
    for number, (step, tier, tenant, pause) in enumerate(steps):
        now += pause
        if step == "offer":
            asked = entry(
                str(number), tier=min(tier, tiers - 1), tenant=f"t{tenant}", timeout=3.0 + tenant, queue_timeout=2.0,
                weight=1 + number % most_rows if most_rows else 1, shape=number % 2 if most_rows > 2 else 0,
                count=1 + number % 3,
            )  # fmt: skip
            found = offers(queue)(asked, now)
            if isinstance(found, QueuedEntry):
                known.append(found)
            seen.append(found if isinstance(found, Refused) else number)
        elif step == "depart":
            found = queue.depart("gpu-0", 4, AT_ONCE, now)
            if isinstance(found, Departure):
                running.append(found)
                seen.append([member.entry.id for member in found.members])
        elif step == "finish" and running:
            seen.append([member.entry.id for member in queue.finish(running.pop(), now)])
        elif step == "fail" and running:
            seen.append(queue.fail(running.pop(), Cause.RAISED, now, lambda: 0.5).again)
        elif step == "remove" and known:
            queue.remove(known.pop(tenant % len(known)))
        elif step == "expire":
            seen.append([member.entry.id for member in queue.expire(now)])
        elif step == "slots":
            queue.set_slots(1 + tenant)
        elif step == "wake":
            seen.append(queue.wake(["gpu-0"], now))
        seen.append(queue.depth)
    load = queue.load(now)
    seen += [queue.depths(now), queue.next_due(), pytest.approx(load.rate), pytest.approx(load.entry_size)]
    return seen


def offered_small(queue: ModelQueue) -> Callable[[Entry, float], QueuedEntry | Refused]:
    """Offer that notes what is sure to be let in."""

    def offer(one: Entry, now: float) -> QueuedEntry | Refused:
        small = one.weight == 1 and not one.shape
        return (queue.offer_small(one, now) if small else None) or queue.offer(one, now)

    return offer


@given(STEPS)
def test_what_is_noted_is_served_and_refused_like_what_has_its_place_at_once(steps: list[Step]) -> None:
    noted = played(steps, 1, offered_small)
    assert noted == played(steps, 1, lambda queue: queue.offer)


@given(STEPS, st.integers(1, 3))
def test_one_row_that_is_noted_is_served_and_refused_like_any_other(steps: list[Step], most_rows: int) -> None:
    noted = played(steps, 1, offered_small, most_rows)
    assert noted == played(steps, 1, lambda queue: queue.offer, most_rows)


@given(STEPS, st.integers(1, 3), st.integers(1, 3))
def test_entries_of_one_row_are_packed_like_any_others(steps: list[Step], most_rows: int, tiers: int) -> None:
    found = played(steps, tiers, offered_small, most_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_are_ones", lambda *_: False)
        assert found == played(steps, tiers, offered_small, most_rows)


@given(STEPS)
def test_no_look_at_the_queue_misses_what_is_noted(steps: list[Step]) -> None:
    queue, now, offered = slow(QueueLimits(3, 4, max_queue=30)), 0.0, 0
    for number, (_, tier, tenant, pause) in enumerate(steps):
        now += pause / 100
        found = offered_small(queue)(
            entry(str(number), tier=tier, tenant=f"t{tenant}", timeout=60.0, queue_timeout=50.0), now
        )
        offered += isinstance(found, QueuedEntry)
        assert queue.depth == offered
    assert sum(depth for depth, _ in queue.depths(now)) == offered
    served = list[str]()
    while isinstance(left := queue.depart("gpu-0", 4, AT_ONCE, now), Departure):
        served += [member.entry.id for member in left.members]
        queue.finish(left, now)
    assert len(served) == len(set(served)) == offered


def one_noted(timeout: float = 3.0) -> tuple[ModelQueue, QueuedEntry]:
    """A queue in which one entry has its place, and one is noted behind it."""
    queue = slow(QueueLimits(2, 8))
    for number, seconds in enumerate((5.0, timeout)):
        offered_small(queue)(entry(str(number), timeout=2 * seconds, queue_timeout=seconds), 0.0)
    (noted,) = queue._coming
    return queue, noted


def test_what_is_noted_is_late_in_time() -> None:
    queue, noted = one_noted()
    assert queue.next_due() == 3.0
    queue, noted = one_noted()
    assert queue.expire(3.5) == [noted]


def test_what_is_noted_is_let_go_of() -> None:
    queue, noted = one_noted()
    queue.remove(noted)
    assert queue.depth == 1
    assert [member.entry.id for member in leave(queue).members] == ["0"]


def test_what_is_noted_wakes_a_worker_that_waits_for_company() -> None:
    company = Fixed(Rule(size=2, headway=math.inf))
    queue = slow(QueueLimits(2, 8))
    offered_small(queue)(entry("0"), 0.0)
    assert isinstance(queue.depart("gpu-0", 8, company, 0.0), Hold)
    offered_small(queue)(entry("1"), 0.0)
    assert len(queue._coming) == 1
    assert queue.wake(["gpu-0"], 0.0) == "gpu-0"
    queue, _ = one_noted()
    assert isinstance(queue.depart("gpu-0", 8, company, 0.0), Departure)


def test_what_is_noted_counts_as_load() -> None:
    queue, _ = one_noted()
    assert queue.load(0.0).depth == 2


def test_no_more_are_noted_than_are_sure_to_be_let_in() -> None:
    queue = slow(QueueLimits(2, 8, max_queue=1000))
    found = [offered_small(queue)(entry(str(number), timeout=10.0, queue_timeout=10.0), 0.0) for number in range(200)]
    refused = [one for one in found if isinstance(one, Refused)]
    assert refused
    assert len(found) - len(refused) < 100, "ten a second for less than ten seconds"
    assert isinstance(offered_small(queue)(entry("late", timeout=10.0, queue_timeout=10.0), GATE_AGE * 2), Refused)


def test_kinds_without_end_are_not_all_remembered() -> None:
    queue = slow(QueueLimits(2, 8, max_queue=1000))
    for number in range(500):
        offered_small(queue)(entry(str(number), timeout=600.0 + number, queue_timeout=600.0), 0.0)
    assert len(queue._sure) <= MOST_KINDS
    assert queue.depth == 500
