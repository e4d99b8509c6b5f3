"""Admission: refuses what can't be served in time, from the lowest tier up, whatever the shapes."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import policies
from headway.core.admission import MARGIN_SHARE, MIN_MARGIN, AdmissionLimits, Refused
from headway.core.queue import ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.model import Entry
from tests.core.entries import entry
from tests.core.fleet import drive
from tests.core.test_queue import leave

DEPTHS = st.lists(st.integers(0, 5000), min_size=3, max_size=3)
RATES = st.lists(st.floats(0.0, 5000.0), min_size=3, max_size=3)
GATES = st.builds(
    AdmissionLimits.of, max_batch=st.integers(1, 100), slots=st.floats(0.5, 64.0), seconds=st.floats(0.001, 2.0),
    deviation=st.floats(0.0, 1.0), rates=RATES, reserved=st.floats(0, 0.5),
)  # fmt: skip
ENTRIES = st.builds(entry, tier=st.integers(0, 2), queue_timeout=st.floats(0.001, 5.0), timeout=st.floats(0.001, 10.0))


def judge(gate: AdmissionLimits, depths: list[int], asked: Entry, tier: int | None = None) -> Refused | None:
    tier = asked.tier if tier is None else tier
    return gate.judge(sum(depths[: tier + 1]), depths[0], tier, asked)


@given(GATES, DEPTHS, ENTRIES)
def test_whoever_gets_in_is_in_time_by_its_figures(gate: AdmissionLimits, depths: list[int], asked: Entry) -> None:
    ahead = sum(depths[: asked.tier + 1])
    if judge(gate, depths, asked) is None and ahead > 0:
        waits = ahead / gate.drains[asked.tier]
        assert waits <= asked.queue_timeout + 1e-9
        assert waits + gate.batch_seconds + MIN_MARGIN <= asked.timeout + 1e-9
        assert waits + gate.batch_seconds <= asked.timeout * (1 - MARGIN_SHARE) + 1e-9


@given(GATES, DEPTHS, ENTRIES)
def test_the_lowest_tier_is_refused_first(gate: AdmissionLimits, depths: list[int], asked: Entry) -> None:
    refused = [judge(gate, depths, asked, tier) is not None for tier in range(3)]
    assert refused == sorted(refused)


@given(GATES, DEPTHS, ENTRIES)
def test_a_refusal_says_when_and_names_the_tier(gate: AdmissionLimits, depths: list[int], asked: Entry) -> None:
    verdict = judge(gate, depths, asked)
    if verdict is not None:
        assert 0.0 < verdict.wait < 1e9
        assert verdict.tier_only == (asked.tier > 0 and judge(gate, depths, asked, tier=0) is None)


@given(GATES, ENTRIES)
def test_who_has_nothing_ahead_is_admitted_whatever_the_figures(gate: AdmissionLimits, asked: Entry) -> None:
    assert judge(gate, [0, 0, 0], asked) is None


def test_before_a_batch_was_measured_everybody_is_admitted() -> None:
    gate = AdmissionLimits.unknown(3)
    assert judge(gate, [10_000, 10_000, 10_000], entry(tier=2)) is None
    assert gate.pace(2) == 0.0


def test_the_bound_is_drain_times_what_the_deadline_leaves() -> None:
    """Two GPUs do 2,000 items/s. Of the 200 ms, 100 are run time and 5 are a margin, so 190 items may be ahead."""
    gate = AdmissionLimits.of(100, 2.0, 0.1, 0.0, [0.0, 0.0, 0.0], 0.1)
    asked = entry(queue_timeout=2.0, timeout=0.2)
    assert judge(gate, [189, 0, 0], asked) is None
    assert judge(gate, [190, 0, 0], asked) is not None
    verdict = judge(gate, [210, 0, 0], asked)
    assert verdict is not None
    assert verdict.wait == pytest.approx((210 - 190) / 2000)


def test_where_run_times_vary_two_deviations_of_the_wait_are_kept() -> None:
    """18 batches leave in 0.9 s. Each is off by 30 ms, so that the two GPUs are 64 ms early or late in total."""
    gate = AdmissionLimits.of(100, 2.0, 0.1, 0.03, [0.0, 0.0, 0.0], 0.1)
    asked = entry(queue_timeout=0.9, timeout=2.0)
    wait = 0.9 - 2 * 0.03 * math.sqrt(18) / 2
    assert gate.allowed(0, asked) == pytest.approx(2000 * wait)


@pytest.mark.parametrize(("first", "tier_only"), [(189, True), (190, False)])
def test_a_refusal_is_because_of_the_tier_up_to_the_bound_of_the_highest_one(first: int, tier_only: bool) -> None:
    gate = AdmissionLimits.of(100, 2.0, 0.1, 0.0, [0.0, 0.0, 0.0], 0.1)
    verdict = judge(gate, [first, 100, 0], entry(tier=1, timeout=0.2))
    assert verdict is not None
    assert verdict.tier_only is tier_only


def test_a_tier_gets_the_drain_that_higher_tiers_leave_and_never_less_than_the_reserve() -> None:
    assert AdmissionLimits.of(100, 1.0, 0.1, 0.0, [300.0, 400.0, 100.0], 0.1).drains == (1000.0, 700.0, 300.0)
    assert AdmissionLimits.of(100, 1.0, 0.1, 0.0, [900.0, 4000.0, 100.0], 0.1).drains == (1000.0, 100.0, 100.0)


def test_a_tier_to_which_nothing_drains_is_closed_not_open() -> None:
    """Higher tiers take everything and nothing is reserved, so other entries would only expire."""
    gate = AdmissionLimits.of(100, 1.0, 0.1, 0.0, [2000.0, 0.0, 0.0], 0.0)
    verdict = judge(gate, [50, 1, 0], entry(tier=1))
    assert verdict is not None
    assert verdict.tier_only
    assert 0.0 < verdict.wait < 60.0


def crowd(rate: float, seconds: float, timeout: float, tiers: int = 1) -> list[tuple[float, Entry]]:
    return [
        (number / rate, entry(str(number), tier=number % tiers, queue_timeout=timeout, timeout=timeout))
        for number in range(int(rate * seconds))
    ]


class TestInAQueue:
    def test_overload_does_not_reduce_goodput(self) -> None:
        """3,000/s at a capacity of 2,000/s, with a promise of 200 ms: admitted requests are on time, at full rate."""
        queue = ModelQueue(QueueLimits(tiers=1, max_batch=100))
        seen = drive(queue, policies.build("paced", None), crowd(3000, 4, 0.2), 2, lambda size: 0.1, until=4.3)
        steady = [(came, back) for came, back, _ in seen.answered if came >= 1.0]
        in_time = [back for came, back in steady if back <= came + 0.2]
        assert len(in_time) >= 0.95 * 2000 * 3
        assert len(in_time) >= 0.99 * len(steady)
        assert not [asked for now, asked in seen.expired if now >= 1.0]

    def test_one_slow_small_batch_does_not_lock_the_door(self) -> None:
        """A wrong slope would refuse all but one entry at a time, and batches of one would never correct it."""
        runs = iter([0.3])
        queue = ModelQueue(QueueLimits(tiers=1, max_batch=100))
        trickle = [(number * 0.2, entry(f"early-{number}", timeout=0.5)) for number in range(1, 20)]
        start = [(0.0, entry(f"first-{number}", timeout=0.5)) for number in range(3)]
        rush = [(5.0 + number / 500, entry(f"rush-{number}", timeout=0.5)) for number in range(1000)]
        seen = drive(queue, policies.build("paced", None), start + trickle + rush, 2, lambda _: next(runs, 0.1), 8.0)
        assert sum(asked.id.startswith("rush") for _, _, asked in seen.answered) >= 900

    def test_after_the_last_worker_left_the_door_goes_by_what_was_there(self) -> None:
        queue = ModelQueue(QueueLimits(tiers=1, max_batch=10))
        drive(queue, policies.build("paced", None), crowd(50, 1, 1.0), 2, lambda size: 0.1, until=1.2)
        queue.set_slots(0)
        admitted = [not isinstance(queue.offer(entry(f"late-{n}", timeout=1.0), 2.0), Refused) for n in range(1000)]
        assert 100 <= sum(admitted) <= 200
        assert admitted == sorted(admitted, reverse=True)

    def test_who_floods_is_refused_for_its_own_backlog_and_nobody_else_is(self) -> None:
        """One tenant alone sends 1.5 times the capacity. Ten others together send 40 % of it."""
        queue = ModelQueue(QueueLimits(tiers=1, max_batch=20))
        flood = [(number / 1200, entry(f"flood-{number}", tenant="flood")) for number in range(7200)]
        others = [(number / 320, entry(f"other-{number}", tenant=f"t-{number % 10}")) for number in range(1920)]
        coming = sorted(flood + others, key=lambda arrival: arrival[0])
        seen = drive(queue, policies.build("paced", None), coming, 4, lambda size: 0.1, until=9.0)
        assert {asked.tenant for _, asked, _ in seen.refused} == {"flood"}
        assert {asked.tenant for _, asked in seen.expired} <= {"flood"}
        waits = sorted(back - came for came, back, asked in seen.answered if asked.tenant != "flood")
        assert len(waits) == len(others)
        assert waits[int(0.95 * len(waits))] < 0.15

    def test_depths_that_are_set_bound_the_lowest_tier_first_and_the_highest_never(self) -> None:
        queue = ModelQueue(QueueLimits(tiers=3, max_batch=8, shed_at=(10, 20)))
        admitted = [0, 0, 0]
        for number in range(90):
            tier = 2 - number // 30
            verdict = queue.offer(entry(str(number), tier=tier), 0.0)
            if isinstance(verdict, Refused):
                assert verdict.tier_only
                assert verdict.wait > 0.0
            else:
                admitted[tier] += 1
        assert admitted == [30, 10, 10]


SECONDS = 0.1
BATCH = 32
IN_TIME = round(2.0 / SECONDS)


def make() -> ModelQueue:
    queue = ModelQueue(QueueLimits(3, BATCH).counting_rows())
    queue.set_slots(1)
    for at in range(8):
        queue.offer(entry(f"first {at}"), at * 1.0)
        queue.finish(leave(queue, now=at * 1.0, limit=BATCH), at + SECONDS)
    return queue


def admitted(queue: ModelQueue, shapes: list[int], tenant: str = "t", now: float = 10.0) -> int:
    offered = [queue.offer(entry(f"{tenant} {at}", tenant=tenant, shape=shape), now) for at, shape in enumerate(shapes)]
    return sum(not isinstance(one, Refused) for one in offered)


def test_entries_of_unlike_shapes_are_let_in_as_batches_of_one_and_others_told_when_to_come_again() -> None:
    queue = make()
    assert IN_TIME - 2 <= admitted(queue, list(range(1, 200))) <= IN_TIME + 1
    refused = queue.offer(entry("late", shape=500), 10.0)
    assert isinstance(refused, Refused)
    assert 0.0 < refused.wait < 2 * SECONDS


@pytest.mark.parametrize("shapes", [1, 2])
def test_entries_that_ride_together_are_let_in_as_before(shapes: int) -> None:
    assert admitted(make(), [1 + at % shapes for at in range(500)]) == 500


def test_a_common_shape_and_a_new_tenant_are_let_in_beside_others() -> None:
    queue = make()
    admitted(queue, list(range(1, 200)), "hostile")
    assert admitted(queue, [999] * 64, "calm") == 64
    queue = make()
    for tenant in range(100):
        assert admitted(queue, [1, 1, 1], f"t{tenant}") == 3
    assert admitted(queue, [2, 3], "new") == 2


@pytest.mark.parametrize("calm", [0, 2])
def test_under_a_flood_what_is_let_in_is_answered_in_time(calm: int) -> None:
    """One tenant floods, alone or beside another tenant. The other's requests are never refused or late."""
    queue, now, shape = make(), 10.0, 10
    late = Counter[str]()
    for turn in range(200):
        for _ in range(8):
            shape += 1
            queue.offer(entry(f"flood {shape}", tenant="hostile", shape=shape), now)
        assert admitted(queue, [1] * calm, "calm", now) == calm, turn
        late.update(member.entry.tenant for member in queue.expire(now))
        departure = leave(queue, now=now, limit=BATCH)
        late.update(member.entry.tenant for member in departure.late)
        now += SECONDS
        queue.finish(departure, now)
    assert late["calm"] == 0
    assert late["hostile"] == 0 or calm
