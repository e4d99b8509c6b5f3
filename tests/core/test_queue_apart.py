"""Entries outside the tier queues: which are admitted, which go first, and what a search leaves behind."""

import math

import pytest

from headway.core.admission import Refused
from headway.core.departure import APART, Hold
from headway.core.fair_queue import GONE, RETRYING, QueuedEntry
from headway.core.queue import QUARANTINE_ALONE, QUARANTINE_BATCHES, UNKNOWN_WAIT, ModelQueue
from headway.core.suspects import QUARANTINE
from headway.model import Cause, Entry
from tests.core.entries import entry
from tests.core.test_queue import AT_ONCE, held_until, ids, leave, make, offer, rng

EVIL = ("t", "evil")


@pytest.fixture
def queue() -> ModelQueue:
    return make()


def of(caller: str, id: str = "1", *, queue_timeout: float = 1e6, tier: int = 0, count: int = 1) -> Entry:
    return entry(id, queue_timeout=queue_timeout, timeout=1e6, tier=tier, caller=caller, count=count)


def measured(seconds: float | None, max_batch: int = 8, slots: int = 1) -> ModelQueue:
    """Return a queue with a caller that is kept apart. A full batch takes `seconds`; None if that isn't known."""
    queue = make(max_batch=max_batch, slots=slots)
    if seconds is not None:
        for number in range(max_batch):
            queue.offer(of("good", f"warm {number}"), 0.0)
        queue.finish(leave(queue, limit=max_batch), seconds)
    queue.culprits.found(of("evil", "bad"), 1.0)
    return queue


class TestGettingIn:
    def test_a_pool_has_room_for_some_batches_of_each_gpu(self) -> None:
        queue = measured(None, max_batch=2, slots=3)
        most = QUARANTINE_BATCHES * 2 * 3
        offer(queue, "waits", tenant="other")
        apart(queue, most)
        assert queue.offer(of("evil"), 1.0) == Refused(UNKNOWN_WAIT, tier_only=False, apart=True)
        assert isinstance(queue.offer(of("good"), 1.0), QueuedEntry)

    def test_who_is_alone_may_wait_as_long_as_its_deadline_allows(self) -> None:
        """Two runs are assumed for each entry. At 40 a second, about 200 entries fit into 10 s."""
        queue = measured(0.2, max_batch=8)
        for number, count in enumerate([150] + [0] * 149):
            offered = queue.offer(of("evil", f"part {number}", queue_timeout=10.0, count=count), 1.0)
            assert isinstance(offered, QueuedEntry)
        refused = queue.offer(of("evil", "again", queue_timeout=10.0, count=150), 1.0)
        assert isinstance(refused, Refused)
        assert (refused.most, refused.apart) == (0, True)
        assert refused.wait == pytest.approx((2 * 299 - 40 * 9.8) / 40, rel=0.05)

    def test_nobody_fills_the_queue_with_what_waits_apart(self) -> None:
        queue = measured(None)
        admitted = [isinstance(queue.offer(of("evil", str(number)), 1.0), QueuedEntry) for number in range(3000)]
        assert sum(admitted) == QUARANTINE_ALONE

    @pytest.mark.parametrize(("beside", "most"), [(False, 196), (True, QUARANTINE_BATCHES * 8)])
    def test_a_list_that_never_fits_is_told_how_many_do(self, beside: bool, most: int) -> None:
        queue = measured(0.2, max_batch=8)
        if beside:
            offer(queue, "waits", tenant="other")
        for count, fits in ((most, True), (most + 1, False)):
            offered = queue.offer(of("evil", str(count), queue_timeout=10.0, count=count), 1.0)
            assert isinstance(offered, QueuedEntry) is fits, offered
            if isinstance(offered, QueuedEntry):
                queue.remove(offered)
        assert isinstance(offered, Refused)
        assert (offered.most, offered.apart) == (most, True)

    def test_nobody_gets_in_who_would_wait_too_long(self) -> None:
        """Two runs are assumed for each waiting entry, with turns of the other waiting tenants in between."""
        admitted = []
        for beside in ([], [of("good")]):
            queue, count = measured(0.8, max_batch=8), 0
            for other in beside:
                queue.offer(other, 1.0)
            while isinstance(queue.offer(of("evil", str(count), queue_timeout=4.0), 1.0), QueuedEntry):
                count += 1
            admitted.append(count)
        assert 0 < admitted[1] < admitted[0] < 4.0 / 0.8 * 8
        assert admitted[1] == pytest.approx(admitted[0] / 2, abs=1)


class TestHandingBack:
    def test_when_all_of_a_probe_have_left_the_rest_of_its_batch_is_free(self, queue: ModelQueue) -> None:
        members = offer(queue, "a", "b", "c", "d")
        queue.fail(leave(queue), Cause.RAISED, 0.0, rng)
        half = leave(queue, now=1.0)
        for member in half.members:
            queue.remove(member)
        left = {member.entry.id for member in members} - set(ids(half))
        queue.hand_back(half, 1.0)
        rest = leave(queue, now=1.0)
        assert (set(ids(rest)), rest.attempts) == (left, 2)
        assert queue.depth == 0

    def test_one_that_was_alone_is_over_as_if_it_had_not_been_handed_back(self, queue: ModelQueue) -> None:
        [first] = offer(queue, "a")
        queue.fail(leave(queue), Cause.RAISED, 0.0, rng)
        queue.hand_back(leave(queue, now=1.0), 1.0)
        assert queue.fail(leave(queue, now=1.0), Cause.RAISED, 1.0, rng).dead == [first]

    def test_goes_ahead_of_a_search(self, queue: ModelQueue) -> None:
        offer(queue, "first")
        first = leave(queue)
        offer(queue, "a", "b")
        queue.fail(leave(queue), Cause.RAISED, 0.0, rng)
        queue.hand_back(first, 0.0)
        assert ids(leave(queue)) == ["first"]

    def test_keeps_how_often_it_died_alone(self, queue: ModelQueue) -> None:
        [only] = offer(queue, "a")
        queue.fail(leave(queue), Cause.CRASHED, 0.0, rng)
        queue.fail(leave(queue, now=1.0), Cause.CRASHED, 1.0, rng)
        queue.hand_back(leave(queue, now=2.0), 2.0)
        assert queue.fail(leave(queue, now=2.0), Cause.CRASHED, 2.0, rng).dead == [only]


def test_a_tenant_without_retries_left_gets_none_and_others_theirs(queue: ModelQueue) -> None:
    while queue._budgets.spend("poor", 1, 0.0):
        pass
    [poor] = offer(queue, "p", tenant="poor")
    [rich] = offer(queue, "r", tenant="rich")
    after = queue.fail(leave(queue), Cause.CRASHED, 0.0, rng)
    assert (after.spent, after.again, poor.state, rich.state) == ([poor], 1, GONE, RETRYING)


def apart(queue: ModelQueue, count: int) -> None:
    for number in range(count):
        assert isinstance(queue.offer(of("evil", str(number)), 1.0), QueuedEntry)


class TestPools:
    def test_a_batch_of_one_is_as_large_as_its_culprits_allow_and_leaves_when_it_is_full(self) -> None:
        queue = measured(None, max_batch=32)
        size = queue._group_size(EVIL)
        assert 1 < size < 32
        apart(queue, size + 1)
        quarantine = queue._suspects.quarantine(EVIL)
        assert quarantine is not None and quarantine.ready_at == -math.inf
        departure = leave(queue, now=1.0, worker="gpu-7", limit=32)
        assert (departure.worker, len(departure.members), departure.quarantine) == ("gpu-7", size, EVIL)
        assert departure.reason == APART

    @pytest.mark.parametrize(("cause", "bad"), [(Cause.RAISED, 1.0), (Cause.CRASHED, 0.0)])
    def test_one_that_fails_of_an_input_counts_against_its_caller(self, cause: Cause, bad: float) -> None:
        queue = measured(None)
        apart(queue, 4)
        before = queue.culprits._callers[EVIL].ran
        queue.fail(leave(queue, now=1.0), cause, 1.0, rng)
        found = queue.culprits._callers[EVIL]
        assert (found.ran - before, found.bad) == (4.0 * bad, bad)


@pytest.mark.parametrize(("cause", "runs", "known"), [(Cause.RAISED, 2, False), (Cause.CRASHED, 3, True)])
def test_a_killer_of_workers_stays_known_to_all(queue: ModelQueue, cause: Cause, runs: int, known: bool) -> None:
    queue.offer(of("evil", "bad"), 0.0)
    for run in range(runs):
        after = queue.fail(leave(queue, now=float(run)), cause, float(run), rng)
    assert len(after.dead) == 1
    assert queue.culprits.knows(of("evil", "bad"), 3.0) is not None
    queue.set_slots(2)
    assert (queue.culprits.knows(of("evil", "bad"), 3.0) is not None) is known


class TestRunningAgain:
    def test_one_alone_waits_for_its_pause_and_several_are_searched_at_once(self, queue: ModelQueue) -> None:
        offer(queue, "a")
        queue.fail(leave(queue), Cause.RAISED, 0.0, rng)
        assert held_until(queue, AT_ONCE, 0.0) > 0.0
        offer(queue, "b", "c")
        queue.fail(leave(queue), Cause.RAISED, 0.0, rng)
        assert ids(leave(queue)) == ["b"]

    @pytest.mark.parametrize("crashes", [1, 2])
    def test_what_runs_again_whole_goes_ahead_of_a_search(self, queue: ModelQueue, crashes: int) -> None:
        offer(queue, "first")
        for number in range(crashes):
            queue.fail(leave(queue, now=float(number)), Cause.CRASHED, float(number), rng)
        now = crashes - 0.999
        offer(queue, "a", "b", now=now)
        queue.fail(leave(queue, now=now), Cause.RAISED, now, rng)
        assert ids(leave(queue, now=9.0)) == ["first"]

    def test_a_probe_that_fails_of_the_remote_keeps_its_rest(self, queue: ModelQueue) -> None:
        offer(queue, "a", "b", "c", "d")
        queue.fail(leave(queue), Cause.RAISED, 0.0, rng)
        queue.fail(leave(queue, now=1.0), Cause.REMOTE, 1.0, rng)
        again = leave(queue, now=2.0)
        assert ids(again) == ["a", "b"]
        assert isinstance(queue.depart("gpu-0", 8, AT_ONCE, 2.0), Hold)
        queue.finish(again, 2.0)
        assert ids(leave(queue, now=2.0)) == ["c"]

    def test_of_one_that_crashes_alone_the_rest_is_let_go(self, queue: ModelQueue) -> None:
        members = offer(queue, "a", "b")
        queue.fail(leave(queue), Cause.RAISED, 0.0, rng)
        queue.fail(leave(queue, now=1.0), Cause.CRASHED, 1.0, rng)
        quarantine = queue._suspects.quarantine(("t", ""))
        assert quarantine is not None
        assert (quarantine.members, quarantine.ready_at) == (members[1:], 1.0)
        assert quarantine.failures == quarantine.attempts == members[1].attempts == 1

    def test_of_one_that_is_searched_on_the_rest_is_let_go_as_it_was(self, queue: ModelQueue) -> None:
        for number, caller in enumerate("xxxxyz"):
            queue.offer(of(caller, str(number)), 0.0)
        queue.fail(leave(queue), Cause.RAISED, 0.0, rng)
        half = leave(queue, now=1.0)
        assert ids(half) == ["0", "1", "2", "3"]
        queue.fail(half, Cause.RAISED, 1.5, rng)
        [rest] = [group for group in queue._suspects.groups if group.kind == QUARANTINE]
        assert (len(rest.members), rest.ready_at, rest.failures, rest.attempts) == (2, 1.0, 1, 1)
