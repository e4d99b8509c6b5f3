"""How a queue decides to admit, refuse or note an entry, and how busy it reports its GPUs to be."""

import math
import weakref
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import packing
from headway.core.admission import Refused
from headway.core.departure import Departure, Hold, Rule
from headway.core.fair_queue import STALE, QueuedEntry
from headway.core.queue import GATE_AGE, MOST_KINDS, ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.model import Cause, Entry
from tests.core.entries import WatchedText, entry
from tests.core.test_queue import AT_ONCE, Fixed, leave, make, offer
from tests.core.test_queue_apart import measured, of


def refused(queue: ModelQueue, asked: Entry, now: float = 0.0) -> Refused:
    offered = queue.offer(asked, now)
    assert isinstance(offered, Refused)
    return offered


def ten_a_second(limits: QueueLimits) -> ModelQueue:
    queue = ModelQueue(limits)
    queue.set_slots(1)
    queue.service.observe(limits.max_batch, limits.max_batch / 10)
    return queue


class TestDepths:
    def test_a_full_queue_says_when_there_is_room_for_one_more(self) -> None:
        queue = ten_a_second(QueueLimits(2, 8, max_queue=10))
        for number in range(10):
            offer(queue, str(number), tenant=str(number))
        verdict = refused(queue, entry("one more"))
        assert verdict.wait == pytest.approx(1 / 10)
        assert not verdict.tier_only

    def test_a_tier_beyond_its_depth_is_told_how_long_all_gpus_take_for_what_is_too_much(self) -> None:
        queue = ten_a_second(QueueLimits(3, 8, shed_at=(10, 20)))
        offer(queue, *map(str, range(12)))
        assert refused(queue, entry("low", tier=2)).wait == pytest.approx(3 / 10)


@pytest.mark.parametrize("span", [0.02, 0.1, 0.3])
def test_the_first_burst_is_let_in_whole_where_it_can_be_served_in_time(span: float) -> None:
    """After a moment, the rate of the higher tiers isn't known: their share of a burst isn't a lasting load."""
    queue = make(max_batch=32)
    queue.service.warm_up([(1, 0.1), (32, 0.1)])
    for number in range(300):
        offered = queue.offer(entry(str(number), tier=number % 10 // 3 % 3), span * number / 300)
        assert isinstance(offered, QueuedEntry), f"number {number} of 300, where 600 are served within 2 s"


@pytest.mark.parametrize("withdrawn", [True, False])
def test_the_input_of_what_has_left_is_let_go_of(withdrawn: bool) -> None:
    queue = make()
    offer(queue, *(f"flood {number}" for number in range(200)), tenant="flood")
    inputs = []
    for number in range(1500):
        text = WatchedText(f"input {number}")
        offered = queue.offer(entry(str(number), tenant=f"t{number % 7}", input=text), 0.0)
        assert isinstance(offered, QueuedEntry)
        inputs.append(weakref.ref(text))
        if withdrawn:
            queue.remove(offered)
        elif number % 2:
            queue.finish(leave(queue), 0.0)
        del text, offered
    assert sum(text() is not None for text in inputs) <= 2 * queue.depth + 2 * STALE


class TestDeadlines:
    @pytest.mark.parametrize("tier", [0, 1])
    def test_who_has_others_in_its_rounds_is_refused_for_those_alone(self, tier: int) -> None:
        """Seven tenants share the first round. 19.4 entries may be ahead, and a third round ends at the 21st of 27."""
        queue = ten_a_second(QueueLimits(2, 10))
        offer(queue, *(f"a{number}" for number in range(20)), tier=tier, tenant="a")
        offer(queue, "b1", "b2", tier=tier, tenant="b")
        for number in range(5):
            offer(queue, f"c{number}", tier=tier, tenant=f"c{number}")
        verdict = refused(queue, entry("b3", tier=tier, tenant="b"))
        assert verdict.wait == pytest.approx((21 - 19.4) / 10)
        assert verdict.tier_only is (tier > 0)
        offer(queue, "d", tier=tier, tenant="d")

    def test_batches_that_may_be_slow_leave_less_time_to_wait(self) -> None:
        admitted = []
        for seconds in ((1.0, 1.0), (0.5, 1.5)):
            queue = make(max_batch=10)
            for each in seconds:
                queue.service.observe(10, each)
            offer(queue, "runs")
            leave(queue)
            offers = [queue.offer(entry(str(number), timeout=2.0), 0.0) for number in range(30)]
            admitted.append(sum(isinstance(one, QueuedEntry) for one in offers))
        assert 0 < admitted[1] < admitted[0] < 30

    def test_what_higher_tiers_ask_for_is_looked_at_again_while_a_batch_runs(self) -> None:
        queue = ten_a_second(QueueLimits(2, 10))
        offer(queue, "first", "second", tier=1)
        leave(queue)
        for number in range(100):
            asked = queue.offer(entry(f"high {number}"), 1.0 + number / 100)
            if isinstance(asked, QueuedEntry):
                queue.remove(asked)
        low = [queue.offer(entry(f"low {number}", tier=1), 2.0) for number in range(3)]
        assert [isinstance(one, Refused) for one in low] == [False, False, True]


def several(count: int, timeout: float, tier: int = 0) -> Entry:
    return entry(f"first of {count}", tier=tier, queue_timeout=timeout, timeout=timeout, count=count)


class TestLists:
    @pytest.mark.parametrize(("timeout", "over", "most"), [(10.0, 91, 88), (0.5, 9, -8)], ids=["in time", "tried"])
    def test_one_that_never_fits_hears_how_many_would_get_in(self, timeout: float, over: int, most: int) -> None:
        queue = ten_a_second(QueueLimits(3, 8))
        assert refused(queue, several(over, timeout, tier=2)).most == most
        assert isinstance(queue.offer(several(abs(most), timeout, tier=2), 0.0), QueuedEntry)

    def test_one_that_fits_alone_is_told_to_wait_for_what_is_ahead_of_it(self) -> None:
        queue = ten_a_second(QueueLimits(3, 8))
        offer(queue, *map(str, range(15)))
        assert refused(queue, several(80, 10.0)).most == 0


class TestApart:
    def test_the_first_may_try_however_little_time_it_has_and_the_next_is_refused(self) -> None:
        queue = measured(0.8)
        assert isinstance(queue.offer(of("evil", "1", queue_timeout=0.001, tier=1), 1.0), QueuedEntry)
        assert refused(queue, of("evil", "2", queue_timeout=0.001, tier=1), 1.0).apart

    def test_one_waits_for_others_as_long_as_a_run_of_one_takes(self) -> None:
        queue = make()
        queue.service.observe(1, 0.1)
        queue.service.observe(8, 0.1)
        queue.culprits.found(of("evil", "bad"), 1.0)
        queue.offer(of("evil"), 1.0)
        assert queue.wake(("gpu-0",), 1.0) == pytest.approx(1.1)


class TestReports:
    def test_gpus_that_are_always_busy_are_used_in_full_and_no_more(self) -> None:
        queue = make(slots=1)
        for run in range(3):
            offer(queue, str(run), now=run * 100.0)
            queue.finish(leave(queue, now=run * 100.0), (run + 1) * 100.0)
        assert queue.load(300.0).utilisation == pytest.approx(1.0)

    def test_batches_on_gpus_that_have_left_are_no_use_of_the_others(self) -> None:
        queue = make(slots=2)
        offer(queue, "a", "b")
        first, second = leave(queue, limit=1), leave(queue, limit=1)
        queue.set_slots(1)
        queue.finish(first, 100.0)
        assert queue.load(100.0).utilisation == pytest.approx(1.0)
        queue.set_slots(0)
        queue.finish(second, 200.0)
        assert queue.load(200.0).utilisation == pytest.approx(0.0, abs=1e-6)


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


def played(
    steps: Sequence[Step],
    tiers: int,
    offers: Callable[[ModelQueue], Callable[[Entry, float], object]],
    most_rows: int = 0,
) -> list[object]:
    """Return what can be observed of a queue during the steps. With `most_rows`, entries have up to that many rows."""
    limits = QueueLimits(3, 4, max_queue=30)
    queue, now, seen = ten_a_second(limits.counting_rows() if most_rows else limits), 0.0, list[object]()
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
    def offer(one: Entry, now: float) -> QueuedEntry | Refused:
        small = one.weight == 1 and not one.shape
        return (queue.offer_small(one, now) if small else None) or queue.offer(one, now)

    return offer


@given(STEPS, st.integers(0, 3))
def test_what_is_noted_is_served_and_refused_like_what_has_its_place_at_once(steps: list[Step], most_rows: int) -> None:
    noted = played(steps, 1, offered_small, most_rows)
    assert noted == played(steps, 1, lambda queue: queue.offer, most_rows)


@given(STEPS, st.integers(1, 3), st.integers(1, 3))
def test_entries_of_one_row_are_packed_like_any_others(steps: list[Step], most_rows: int, tiers: int) -> None:
    found = played(steps, tiers, offered_small, most_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_are_ones", lambda *_: False)
        assert found == played(steps, tiers, offered_small, most_rows)


def one_noted() -> tuple[ModelQueue, QueuedEntry]:
    """Return a queue where one entry has its place and another is noted behind it, and the noted entry."""
    queue = ten_a_second(QueueLimits(2, 8))
    for number, seconds in enumerate((5.0, 3.0)):
        offered_small(queue)(entry(str(number), timeout=2 * seconds, queue_timeout=seconds), 0.0)
    (noted,) = queue._coming
    return queue, noted


def test_what_is_noted_is_late_in_time_and_let_go_of() -> None:
    queue, noted = one_noted()
    assert sum(depth for depth, _ in queue.depths(0.0)) == 2
    queue, noted = one_noted()
    assert queue.next_due() == 3.0
    queue, noted = one_noted()
    assert queue.expire(3.5) == [noted]
    queue, noted = one_noted()
    queue.remove(noted)
    assert queue.depth == 1
    assert [member.entry.id for member in leave(queue).members] == ["0"]


def test_what_is_noted_wakes_a_worker_that_waits_for_company() -> None:
    company = Fixed(Rule(size=2, headway=math.inf))
    queue = ten_a_second(QueueLimits(2, 8))
    offered_small(queue)(entry("0"), 0.0)
    assert isinstance(queue.depart("gpu-0", 8, company, 0.0), Hold)
    offered_small(queue)(entry("1"), 0.0)
    assert len(queue._coming) == 1
    assert queue.wake(["gpu-0"], 0.0) == "gpu-0"
    assert isinstance(queue.depart("gpu-0", 8, company, 0.0), Departure)


def test_no_more_are_noted_than_are_sure_to_be_let_in() -> None:
    queue = ten_a_second(QueueLimits(2, 8, max_queue=1000))
    found = [offered_small(queue)(entry(str(number), timeout=10.0, queue_timeout=10.0), 0.0) for number in range(200)]
    refused = [one for one in found if isinstance(one, Refused)]
    assert refused
    assert len(found) - len(refused) < 100, "ten a second for less than ten seconds"
    assert isinstance(offered_small(queue)(entry("late", timeout=10.0, queue_timeout=10.0), GATE_AGE * 2), Refused)


def test_kinds_without_end_are_not_all_remembered() -> None:
    queue = ten_a_second(QueueLimits(2, 8, max_queue=1000))
    for number in range(500):
        offered_small(queue)(entry(str(number), timeout=600.0 + number, queue_timeout=600.0), 0.0)
    assert len(queue._sure) <= MOST_KINDS
    assert queue.depth == 500
