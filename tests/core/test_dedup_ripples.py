"""Consequences for others when an entry that they share an answer with ends, is late or is cancelled."""

from __future__ import annotations

import msgspec
import pytest

from headway import errors
from headway.core import failures
from headway.core.dedup import Consequences, Dedup, keeps
from headway.core.fair_queue import QueuedEntry, queued_at
from headway.core.retention import KeptLimits, weight
from headway.model import BatchRun, DedupKey, DedupKind, Entry, Failure, Reply
from tests.core.flights import LATE, NOW, PLENTY, answer, begin, left_over, make, same


def key(name: str) -> DedupKey:
    return DedupKey(DedupKind.KEY, name, b"", 60.0)


def task(id: str, keep: float = 60.0) -> DedupKey:
    return DedupKey(DedupKind.TASK, id, b"", keep)


def join(sharing: Dedup, entry: Entry) -> QueuedEntry:
    """Offer an entry that is to wait for another one's outcome."""
    queued = queued_at(entry, NOW)
    assert sharing.join(queued, NOW) == Consequences()
    assert sharing.follows(queued)
    return queued


class TestAnOutcome:
    RAN = BatchRun("gpu-0", 8, 0.1, NOW)
    OWN = Reply("original", "t", "fine", None, RAN, 0.25, 3, nonce=1)

    def test_tells_a_follower_how_it_ran_under_the_followers_own_number(self) -> None:
        sharing = Dedup(PLENTY)
        original = begin(sharing, make("original", same()))
        follower = join(sharing, msgspec.structs.replace(make("follower", same()), nonce=7))
        consequences = sharing.end(original, self.OWN, NOW)
        told = Reply("follower", "t", "fine", None, self.RAN, 0.25, 3, 7, DedupKind.SAME)
        assert consequences == Consequences(replies=[(follower, told)])

    def test_that_is_kept_tells_it_too(self) -> None:
        sharing = Dedup(PLENTY)
        sharing.end(begin(sharing, make("original", same())), self.OWN, NOW)
        later = queued_at(msgspec.structs.replace(make("later", same()), nonce=7), NOW)
        told = Reply("later", "t", "fine", None, self.RAN, 0.25, 3, 7, DedupKind.SAME, kept=True)
        assert sharing.join(later, NOW) == Consequences(replies=[(later, told)])

    def test_leaves_nothing_of_its_leader_behind(self) -> None:
        sharing = Dedup(PLENTY)
        original = begin(sharing, make("original", same()), now=0.0)
        follower = queued_at(make("follower", same()), 0.0)
        assert sharing.join(follower, 0.0) == Consequences()
        original.reservation = "a room"
        assert sharing.cancel(original) == Consequences()
        consequences = sharing.end(original, self.OWN, 0.0)
        assert [queued for queued, _ in consequences.replies] == [follower]
        assert not sharing.unwanted(original)
        assert not sharing.active
        assert original.reservation is None

    def test_of_its_own_makes_a_follower_wait_for_its_leaders_no_longer(self) -> None:
        sharing = Dedup(PLENTY)
        original = begin(sharing, make("original", same()), now=0.0)
        follower = queued_at(make("follower", same()), 0.0)
        assert sharing.join(follower, 0.0) == Consequences()
        assert sharing.end(follower, Reply("follower", "t", None, LATE), 0.0, late=True) == Consequences()
        assert not sharing.follows(follower)
        assert answer(sharing, original, "fine", 0.0) == Consequences()


class TestATaskThatIsCalledOff:
    def test_is_not_found_by_those_who_wait_for_it(self) -> None:
        sharing = Dedup(PLENTY)
        original = begin(sharing, make("task", task("task")))
        polls = [join(sharing, msgspec.structs.replace(make(f"poll {n}", task("task")), nonce=n)) for n in (1, 2)]
        consequences = sharing.cancel(original)
        assert consequences.idle == [original]
        assert [queued for queued, _ in consequences.replies] == polls
        for number, (_, reply) in enumerate(consequences.replies, 1):
            assert (reply.id, reply.tenant, reply.nonce) == (f"poll {number}", "t", number)
            assert reply.output is None
            assert reply.failure is not None and reply.failure.code == errors.NOT_FOUND
        assert sharing.outcome("t", "task", NOW) is None
        assert not sharing.active
        assert not any(sharing.follows(poll) for poll in polls)


class TestALateLeader:
    def test_lets_one_go_that_only_ran_for_its_own_followers(self) -> None:
        sharing = Dedup(PLENTY)
        original = begin(sharing, make("original", same()))
        left = join(sharing, make("left", key("k"), same()))
        left.reservation = "a room"
        below = join(sharing, make("below", key("k")))
        assert sharing.cancel(left) == Consequences()
        assert sharing.unwanted(left)
        consequences = sharing.end(original, Reply("original", "t", None, LATE), NOW, late=True)
        assert consequences == Consequences(anew=[below])
        assert not sharing.unwanted(left)
        assert left.reservation is None


class TestALeaderThatNobodyWaitsFor:
    def test_gives_its_room_back(self) -> None:
        sharing = Dedup(PLENTY)
        original = begin(sharing, make("original", same()))
        original.reservation = "a room"
        assert sharing.cancel(original) == Consequences(idle=[original])
        assert original.reservation is None


FINE = Reply("1", "t", "fine")
REJECTED = Reply("1", "t", None, Failure(errors.REJECTED_BY_MODEL, "no such word"))
BROKEN = Reply("1", "t", None, Failure(errors.BACKEND_ERROR, "it raised"))


@pytest.mark.parametrize(
    ("kind", "kept"),
    [(DedupKind.TASK, (FINE, REJECTED, BROKEN)), (DedupKind.KEY, (FINE, REJECTED)), (DedupKind.SAME, (FINE,))],
)
def test_which_outcomes_are_of_use_later(kind: DedupKind, kept: tuple[Reply, ...]) -> None:
    assert tuple(reply for reply in (FINE, REJECTED, BROKEN) if keeps(DedupKey(kind, "k"), reply)) == kept


@pytest.mark.parametrize(
    ("asked", "ran", "kept"),
    [("3", "3", True), ("3", "4", False), ("3,4", "4", True), ("34", "4", False), ("3", "", True), ("", "4", False)],
)
def test_identical_requests_are_answered_by_a_version_that_they_ask_for(asked: str, ran: str, kept: bool) -> None:
    reply = Reply("1", "t", "fine", ran=BatchRun("gpu-0", 1, 0.1, NOW, ran))
    assert keeps(DedupKey(DedupKind.SAME, f"digest@{asked}"), reply) is kept
    assert keeps(DedupKey(DedupKind.KEY, f"digest@{asked}"), reply)


class TestATask:
    def test_is_there_for_as_long_as_it_is_kept(self) -> None:
        sharing = Dedup(PLENTY)
        original = begin(sharing, make("task", task("task", keep=0.5)), now=0.0)
        assert sharing.outcome("t", "task", 0.0) is original
        answer(sharing, original, "fine", 0.0)
        assert sharing.outcome("t", "task", 0.4) == Reply("task", "t", "fine")
        assert sharing.outcome("t", "task", 0.5) is None

    def test_that_is_kept_for_no_time_is_none(self) -> None:
        sharing = Dedup(PLENTY)
        begin(sharing, make("task", task("task", keep=0.0)), now=0.0)
        assert sharing.outcome("t", "task", 0.0) is None
        assert not sharing.active

    def test_is_not_led_by_one_that_only_waits_for_it(self) -> None:
        sharing = Dedup(PLENTY)
        sharing.begin(queued_at(make("poll", task("task")), 0.0), 0.0)
        assert sharing.outcome("t", "task", 0.0) is None


class TestWhatIsKept:
    BUDGET = KeptLimits.of(8000, 8000)
    """Room for four outputs of 200 bytes; one outcome has at most 2,000."""
    LARGE = "x" * 1000

    def test_of_a_task_with_an_output_that_is_too_large_is_that_it_was(self) -> None:
        sharing = Dedup(self.BUDGET)
        answer(sharing, begin(sharing, make("task", task("task"))), self.LARGE)
        failure = failures.too_large(weight(self.LARGE))
        assert sharing.outcome("t", "task", NOW) == Reply("task", "t", None, failure)

    def test_of_a_task_that_followed_says_by_what_it_came(self) -> None:
        sharing = Dedup(self.BUDGET)
        original = begin(sharing, make("original", same()))
        join(sharing, make("task", task("task"), same()))
        answer(sharing, original, self.LARGE)
        kept = sharing.outcome("t", "task", NOW)
        assert isinstance(kept, Reply)
        assert (kept.id, kept.output, kept.shared, kept.kept) == ("task", None, DedupKind.SAME, False)

    def test_by_an_idempotency_key_is_nothing_that_is_too_large(self) -> None:
        sharing = Dedup(self.BUDGET)
        answer(sharing, begin(sharing, make("first", key("k"))), self.LARGE)
        begin(sharing, make("second", key("k")))

    def test_for_no_time_pushes_nothing_out(self) -> None:
        sharing = Dedup(self.BUDGET)
        for number in range(4):
            answer(sharing, begin(sharing, make(f"task {number}", task(f"task {number}"))), "x" * 200)
        answer(sharing, begin(sharing, make("other", same(keep=0.0))), "x" * 200)
        assert all(isinstance(sharing.outcome("t", f"task {number}", NOW), Reply) for number in range(4))

    def test_for_no_time_is_nothing(self) -> None:
        sharing = Dedup(self.BUDGET)
        answer(sharing, begin(sharing, make("other", same(keep=0.0)), now=0.0), "fine", 0.0)
        assert left_over(sharing) == {}

    def test_for_less_than_a_second_is_there_until_then(self) -> None:
        sharing = Dedup(self.BUDGET)
        answer(sharing, begin(sharing, make("first", same(keep=0.5))), "fine")
        later = queued_at(make("later", same(keep=0.5)), NOW + 0.4)
        consequences = sharing.join(later, NOW + 0.4)
        assert isinstance(consequences, Consequences)
        assert [reply.output for _, reply in consequences.replies] == ["fine"]
        begin(sharing, make("last", same(keep=0.5)), NOW + 0.5)

    def test_by_one_tenant_is_no_concern_of_another(self) -> None:
        sharing = Dedup(KeptLimits.of(16_000, 8000))
        for tenant in "tu":
            for number in range(4):
                asked = make(f"task {number}", task(f"task {number}"), tenant=tenant)
                answer(sharing, begin(sharing, asked), "x" * 200)
        assert all(isinstance(sharing.outcome("t", f"task {number}", NOW), Reply) for number in range(4))
