"""The queue of one model: everything between an entry's offer and its end."""

import math

import pytest

from headway.core.admission import Refused
from headway.core.departure import DEADLINE, FULL, HEADWAY, RETRY, Departure, Hold, Load, Policy, Rule
from headway.core.fair_queue import GONE, RETRYING, RUNNING, QueuedEntry, entries_of
from headway.core.queue import MIN_AVOIDANCE, RULE_AGE, ModelQueue
from headway.core.queue_limits import QueueLimits
from headway.model import Cause
from tests.core.entries import entry


class Fixed:
    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def rule(self, load: Load) -> Rule:
        return self._rule


class Curious:
    """Lets batches leave immediately, and records the loads it is given."""

    def __init__(self) -> None:
        self.loads: list[Load] = []

    def rule(self, load: Load) -> Rule:
        self.loads.append(load)
        return Rule(size=1)


AT_ONCE = Fixed(Rule(size=1))
PATIENT = Fixed(Rule(size=1000, headway=math.inf))


def make(tiers: int = 3, max_batch: int = 8, reserved_share: float = 0.1, slots: int = 1) -> ModelQueue:
    queue = ModelQueue(QueueLimits(tiers, max_batch, reserved_share))
    queue.set_slots(slots)
    return queue


def offer(queue: ModelQueue, *ids: str, now: float = 0.0, tier: int = 0, tenant: str = "t") -> list[QueuedEntry]:
    admitted = [queue.offer(entry(id, tier=tier, tenant=tenant), now) for id in ids]
    assert not any(isinstance(one, Refused) for one in admitted)
    return [one for one in admitted if isinstance(one, QueuedEntry)]


def leave(
    queue: ModelQueue, now: float = 0.0, worker: str = "gpu-0", limit: int = 8, policy: Policy | None = None
) -> Departure:
    departed = queue.depart(worker, limit, policy or AT_ONCE, now)
    assert isinstance(departed, Departure)
    return departed


def held_until(queue: ModelQueue, policy: Policy, now: float, worker: str = "gpu-0") -> float:
    held = queue.depart(worker, 8, policy, now)
    assert isinstance(held, Hold)
    return held.until


def ids(departure: Departure) -> list[str]:
    return [rider.id for rider in entries_of(departure.members)]


def rng() -> float:
    return 0.0


@pytest.fixture
def queue() -> ModelQueue:
    return make()


class TestLeaving:
    def test_what_waits_leaves_together(self, queue: ModelQueue) -> None:
        members = offer(queue, "a", "b", "c", now=1.0)
        departure = leave(queue, now=1.5)
        assert (departure.worker, departure.left_at, departure.reason) == ("gpu-0", 1.5, FULL)
        assert departure.members == members
        assert [(one.state, one.attempts) for one in members] == [(RUNNING, 1)] * 3
        assert (queue.depth, queue.last_departure) == (0, 1.5)
        assert queue.finish(departure, 1.75) == members
        assert [one.state for one in members] == [GONE] * 3
        assert queue.service.seconds(3) == pytest.approx(0.25), "from the departure to the return"

    @pytest.mark.parametrize(("limit", "size"), [(3, 3), (8, 8), (100, 8)])
    def test_a_batch_is_no_larger_than_the_slot_and_the_model_take(self, limit: int, size: int) -> None:
        queue = make(max_batch=8)
        offer(queue, *"abcdefghijklmno")
        assert len(leave(queue, limit=limit).members) == size

    def test_the_policy_is_told_what_the_slot_takes(self) -> None:
        queue, policy = make(max_batch=8, slots=3), Curious()
        offer(queue, *"abcd")
        leave(queue, limit=4, policy=policy)
        [load] = policy.loads
        assert (load.max_batch, load.depth, load.slots) == (4, 4, 3)

    def test_a_batch_takes_its_even_share(self) -> None:
        queue = make(slots=3)
        shared = Fixed(Rule(size=8, headway=0.1, split=9.0))
        offer(queue, *"abcdefg")
        sizes = [len(leave(queue, 0.1 * number, f"gpu-{number}", policy=shared).members) for number in range(3)]
        assert sizes == [3, 3, 1]  # Each gets a third of 7.

    def test_the_most_urgent_member_is_not_held_until_it_is_too_late(self, queue: ModelQueue) -> None:
        queue.last_departure = 0.0
        queue.offer(entry("calm"), 0.0)
        queue.offer(entry("urgent", timeout=0.3), 0.0)
        until = held_until(queue, PATIENT, 0.0)
        assert until < 0.3
        assert leave(queue, until, policy=PATIENT).reason == DEADLINE

    def test_the_fleet_shares_one_last_departure(self) -> None:
        queue, spaced = make(slots=2), Fixed(Rule(size=8, headway=0.5))
        offer(queue, "a")
        assert leave(queue, policy=spaced).reason == HEADWAY
        offer(queue, "b", now=0.1)
        assert queue.depart("gpu-1", 8, spaced, 0.1) == Hold(0.5)

    def test_under_contention_the_reserved_places_go_by_the_longest_wait(self) -> None:
        queue = make(reserved_share=0.2, max_batch=10)
        offer(queue, "f0", now=0.0, tier=2)
        offer(queue, "p0", "p1", now=0.1, tier=1)
        offer(queue, "f1", now=0.2, tier=2)
        offer(queue, *(f"e{number}" for number in range(20)), now=0.3, tier=0)
        assert ids(leave(queue, now=0.4, limit=10))[-2:] == ["f0", "p0"]
        assert ids(leave(queue, now=0.4, limit=10))[-2:] == ["p1", "f1"]

    @pytest.mark.parametrize("tier", [0, 1, None])
    def test_what_cannot_be_answered_in_time_gets_a_place_only_where_nobody_else_wants_it(
        self, tier: int | None
    ) -> None:
        queue = make(max_batch=2)
        queue.service.observe(1, 0.1)
        hopeless = queue.offer(entry("hopeless", timeout=0.15), 0.0)
        if tier is not None:
            offer(queue, "a", "b", "c", tier=tier)
        departure = leave(queue, now=0.1, limit=2)
        assert ids(departure) == (["hopeless"] if tier is None else ["a", "b"])
        assert departure.late == ([] if tier is None else [hopeless])
        assert isinstance(hopeless, QueuedEntry)
        assert hopeless.attempts == (tier is None), "it never ran, and is not told that it did"
        assert queue.depth == (tier is not None)

    def test_reports_what_it_knows(self) -> None:
        queue = make(slots=2)
        for number in range(100):
            offer(queue, str(number), now=number / 100)
        departure = leave(queue, now=1.0)
        load = queue.load(1.0)
        assert (load.slots, load.depth, load.departures) == (2, 92, 1)
        assert load.rate == pytest.approx(100.0, rel=0.2)
        assert load.wait > 0.0
        queue.finish(departure, 11.0)
        load = queue.load(11.0)
        assert load.utilisation == pytest.approx(0.5 * (1 - math.exp(-2.0)), abs=0.01)
        assert load.alpha == pytest.approx(10.0)


class TestForgetting:
    def test_what_was_removed_once_or_twice_never_rides(self, queue: ModelQueue) -> None:
        first, _ = offer(queue, "a", "b")
        for _ in range(2):
            queue.remove(first)
            assert queue.depth == 1
        assert ids(leave(queue)) == ["b"]

    @pytest.mark.parametrize("fails", [False, True])
    def test_what_was_removed_while_it_ran_is_not_wanted_nor_run_again(self, queue: ModelQueue, fails: bool) -> None:
        first, second = offer(queue, "a", "b")
        departure = leave(queue)
        queue.remove(first)
        if fails:
            assert queue.fail(departure, Cause.RAISED, 0.1, rng).again == 1
            assert leave(queue, now=1.0).members == [second]
        else:
            assert queue.finish(departure, 0.1) == [second]

    def test_what_waits_to_run_again_can_be_removed(self, queue: ModelQueue) -> None:
        first, second = offer(queue, "a", "b")
        queue.fail(leave(queue), Cause.RAISED, 0.1, rng)
        assert first.state == RETRYING
        queue.remove(first)
        assert queue.depth == 1
        queue.remove(second)
        assert queue.depth == 0
        assert queue.wake(("gpu-0",), 5.0) == math.inf
        assert queue.depart("gpu-0", 8, AT_ONCE, 5.0) == Hold(math.inf)


class TestExpiring:
    @pytest.mark.parametrize("handed_back", [False, True])
    def test_what_has_not_left_by_the_queue_deadline_is_late(self, queue: ModelQueue, handed_back: bool) -> None:
        [first] = offer(queue, "a")
        if handed_back:
            queue.hand_back(leave(queue), 0.1)
        assert queue.next_due() == 2.0
        assert queue.expire(1.99) == []
        assert queue.expire(2.0) == [first]
        assert (queue.depth, first.state, queue.next_due()) == (0, GONE, math.inf)

    def test_what_waits_to_run_again_is_late_by_the_total_deadline(self, queue: ModelQueue) -> None:
        [first] = offer(queue, "a")
        departure = leave(queue, now=1.9)
        assert (queue.expire(100.0), queue.next_due()) == ([], math.inf), "what runs is not expired"
        queue.fail(departure, Cause.RAISED, 1.95, rng)
        assert queue.next_due() <= 4.0
        assert queue.expire(3.99) == []
        assert queue.expire(4.0) == [first]
        assert (queue.depth, queue.next_due()) == (0, math.inf)

    def test_depths_by_tier(self) -> None:
        queue = make(tiers=3)
        offer(queue, "again", now=0.0, tier=1)
        queue.fail(leave(queue), Cause.RAISED, 0.0, rng)
        offer(queue, "e", now=1.0, tier=0)
        offer(queue, "p", now=2.0, tier=1)
        assert queue.depths(3.0) == [(1, 2.0), (2, 3.0), (0, 0.0)]


class TestHandingBack:
    def test_charges_nothing_and_goes_ahead_of_all_others(self, queue: ModelQueue) -> None:
        [first] = offer(queue, "a")
        departure = leave(queue)
        offer(queue, "b", now=0.1)
        queue.hand_back(departure, 0.1)
        assert (first.attempts, queue.depth) == (0, 2)
        again = leave(queue, now=0.1)
        assert (ids(again), again.reason, first.attempts) == (["a"], RETRY, 1)

    def test_keeps_what_it_failed_before(self, queue: ModelQueue) -> None:
        offer(queue, "a", "b")
        queue.fail(leave(queue), Cause.CRASHED, 0.0, rng)
        queue.hand_back(leave(queue, now=1.0), 1.0)
        queue.fail(leave(queue, now=1.0), Cause.CRASHED, 1.0, rng)
        assert (len(leave(queue, now=2.0).members), queue.depth) == (1, 1)


class TestFailing:
    def test_a_failed_batch_runs_again_by_itself(self, queue: ModelQueue) -> None:
        offer(queue, "a", "b")
        assert queue.fail(leave(queue), Cause.CRASHED, 0.1, rng).again == 2
        offer(queue, "innocent", now=0.1)
        again = leave(queue, now=0.2)
        assert (ids(again), again.reason) == (["a", "b"], RETRY)
        assert ids(leave(queue, now=0.2)) == ["innocent"]

    def test_it_waits_for_the_backoff_and_says_until_when(self, queue: ModelQueue) -> None:
        offer(queue, "a")
        queue.fail(leave(queue), Cause.CRASHED, 1.0, rng)
        assert held_until(queue, AT_ONCE, 1.0) == pytest.approx(1.005)
        assert queue.wake(("gpu-0",), 1.0) == pytest.approx(1.005)
        assert queue.wake(("gpu-0",), 1.005) == "gpu-0"
        assert ids(leave(queue, now=1.005)) == ["a"], "it does not wait for others when there is only one"

    def test_it_goes_to_another_worker_where_there_is_one(self) -> None:
        queue = make(slots=2)
        offer(queue, "a")
        queue.fail(leave(queue, worker="bad"), Cause.CRASHED, 1.0, rng)
        opens = held_until(queue, AT_ONCE, 1.01, worker="bad")
        assert opens == queue.wake(("bad",), 1.01) == pytest.approx(1.005 + MIN_AVOIDANCE)
        assert queue.wake(("bad", "good", "better"), 1.01) == "good"
        assert ids(leave(queue, now=1.01, worker="good")) == ["a"]

    def test_a_retried_batch_is_no_larger_than_the_slot_takes(self) -> None:
        queue = make(max_batch=8, slots=2)
        offer(queue, *"abcdefgh")
        queue.fail(leave(queue, worker="large", limit=8), Cause.CRASHED, 0.0, rng)
        first, second = (leave(queue, now=1.0, worker="small", limit=4) for _ in range(2))
        assert (ids(first), ids(second)) == (list("abcd"), list("efgh"))
        assert queue.depth == 0

    def test_what_is_late_by_then_is_told_apart(self, queue: ModelQueue) -> None:
        late = queue.offer(entry("late", timeout=0.5), 0.0)
        offer(queue, "calm")
        after = queue.fail(leave(queue), Cause.CRASHED, 0.5, rng)
        assert (after.late, after.again) == ([late], 1)
        assert isinstance(late, QueuedEntry)
        assert late.state == GONE

    def test_a_batch_that_nobody_waits_for_is_not_run_again(self, queue: ModelQueue) -> None:
        for one in offer(queue, "a", "b"):
            departure = leave(queue, limit=1)
            queue.remove(one)
            after = queue.fail(departure, Cause.CRASHED, 0.0, rng)
            assert (after.again, after.dead, after.spent, after.late) == (0, [], [], [])

    def test_an_outage_is_not_amplified(self) -> None:
        """Retries stop at the reserve plus their share of first runs, even if every batch fails."""
        queue, now, retries, firsts = make(max_batch=1), 0.0, 0, 0
        spent = []
        for number in range(400):
            now += 0.01
            offer(queue, str(number), now=now)
            departure = leave(queue, now=now)
            firsts += departure.reason != RETRY
            retries += departure.reason == RETRY
            spent += queue.fail(departure, Cause.BAD_OUTPUT, now, rng).spent
        assert spent
        assert 60 + 0.2 * firsts <= retries <= 64 + 0.2 * firsts + now

    def test_jitter_spreads_retries(self) -> None:
        queue, throws = make(), iter([0.0, 0.9])
        offer(queue, "a", "b")
        queue.fail(leave(queue), Cause.CRASHED, 0.0, lambda: next(throws))
        queue.fail(leave(queue, now=1.0), Cause.CRASHED, 1.0, lambda: next(throws))
        assert held_until(queue, AT_ONCE, 1.0101) == pytest.approx(1.019)


class TestWaking:
    def test_before_anybody_claimed_the_first_is_woken(self, queue: ModelQueue) -> None:
        assert queue.wake(("gpu-0",), 0.0) == math.inf
        offer(queue, "a")
        assert queue.wake({"gpu-3": None, "gpu-1": None}, 0.0) == "gpu-3"

    def test_goes_by_the_rule_of_the_last_claim(self, queue: ModelQueue) -> None:
        queue.last_departure = 0.0
        assert queue.depart("gpu-0", 8, Fixed(Rule(size=3, headway=0.5)), 0.1) == Hold(math.inf)
        offer(queue, "a", "b", now=0.2)
        assert queue.wake(("gpu-0",), 0.2) == 0.5
        offer(queue, "c", now=0.2)
        assert queue.wake(("gpu-0",), 0.2) == "gpu-0"

    @pytest.mark.parametrize(("at", "soon"), [(0.0, RULE_AGE), (8.0, 8.0)])
    def test_asks_the_policy_again_only_when_that_rule_is_old(self, queue: ModelQueue, at: float, soon: float) -> None:
        rules = iter([Rule(size=8, window=1.5, rate=1e6), Rule(size=8, window=1.5, rate=0.0)])

        class Changing:
            def rule(self, load: Load) -> Rule:
                return next(rules)

        assert queue.depart("gpu-0", 8, Changing(), at) == Hold(math.inf)
        offer(queue, "lone", now=at)
        assert queue.wake(("gpu-0",), soon) == at + 1.5
        assert queue.wake(("gpu-0",), at + 2 * RULE_AGE) == "gpu-0"
