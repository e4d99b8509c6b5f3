"""Deduplication: which requests are the same, what is kept for how long, and what followers get at the end."""

import tracemalloc
import weakref

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import errors
from headway.config import Settings
from headway.core import failures
from headway.core.dedup import Consequences, Dedup, digest, is_task, keeps, unkept
from headway.core.fair_queue import QueuedEntry, queued_at
from headway.core.retention import KeptLimits, weight
from headway.gateway.served_model import dedup_keys_of
from headway.model import BatchRun, DedupKey, DedupKind, Entry, Failure, Reply, RequestOptions
from tests.core.entries import WatchedText
from tests.core.flights import NOW, PLENTY, answer, begin, left_over, make, same


def task(id: str) -> DedupKey:
    return DedupKey(DedupKind.TASK, id, b"", 60.0)


@pytest.fixture
def sharing() -> Dedup:
    return Dedup(PLENTY)


def test_an_input_is_let_go_of_when_its_outcome_is_there(sharing: Dedup) -> None:
    inputs = []

    def entry(id: str) -> Entry:
        text = WatchedText("asked")
        inputs.append(weakref.ref(text))
        return make(id, task(id), same(), input=text)

    original = begin(sharing, entry("original"))
    for number in range(1000):
        assert sharing.join(queued_at(entry(f"follower {number}"), NOW), NOW) == Consequences()
    answer(sharing, original, "fine")
    for number in range(1000):
        sharing.join(queued_at(entry(f"later {number}"), NOW), NOW)
    del original
    assert sum(input() is not None for input in inputs) == 0
    assert sharing.outcome("t", "follower 7", NOW) is not None


@pytest.mark.parametrize("text", ["x" * 400, "", "☃" * 400])
def test_what_is_kept_stays_within_its_bound(text: str) -> None:
    bound = 1 << 19
    sharing = Dedup(KeptLimits.of(bound, bound))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(2000):
            id = f"{number:036}"
            answer(sharing, begin(sharing, make(id, task(id), same(f"{number:064}"))), str(number) + text)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < bound
    assert isinstance(sharing.outcome("t", f"{1999:036}", NOW), Reply)


def test_of_what_is_kept_identical_requests_are_forgotten_first_and_the_oldest_of_each() -> None:
    sharing = Dedup(KeptLimits.of(11_000, 11_000))
    for number in range(4):
        id = f"task {number}"
        answer(sharing, begin(sharing, make(id, task(id))), "x" * 1000)
        answer(sharing, begin(sharing, make(f"same {number}", same(f"{number}"))), "x" * 1000)

    def tasks() -> list[int]:
        return [number for number in range(8) if sharing.outcome("t", f"task {number}", NOW) is not None]

    assert tasks() == [0, 1, 2, 3]
    assert sharing.join(queued_at(make("again", same("0")), NOW), NOW) is None
    answer(sharing, begin(sharing, make("task 4", task("task 4"))), "x" * 1000)
    assert tasks() == [1, 2, 3, 4]


TEXTS = st.text(st.characters(exclude_categories=[]), max_size=4)


@given(st.tuples(TEXTS, TEXTS, TEXTS), st.tuples(TEXTS, TEXTS, TEXTS))
def test_what_is_asked_has_a_digest_of_its_own(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    def written(asked: tuple[str, str, str]) -> tuple[str, str, str]:
        model, version, text = asked
        return model.encode("utf-8", "replace").decode(), version.encode("utf-8", "replace").decode(), text

    assert (digest(*written(one), b"") == digest(*written(other), b"")) == (written(one) == written(other))


def test_parameters_that_mean_the_same_are_the_same() -> None:
    first = digest("m", "1", "asked", b'{"a": 1, "b": {"c": [1, 2], "d": null}}')
    assert digest("m", "1", "asked", b'{"b":{"d":null,"c":[1,2]},"a":1}') == first
    assert digest("m", "1", "asked", b'{"b":{"d":null,"c":[2,1]},"a":1}') != first
    assert digest("m", "1", "asked", b'{"a": 1, "b": {"c": [1, 2]}}') != first
    assert digest("m", "1", "asked", b"") != first
    assert digest("m", "2", "asked", b'{"a": 1, "b": {"c": [1, 2], "d": null}}') != first


def test_a_digest_is_the_same_in_every_process_and_release() -> None:
    assert digest("m", "v", "in", b'{"b":1,"a":2}').hex() == (
        "ae816caaf938e09c1b28ad4c8a51795b5d30675433e3194af37d03cf1b3c0c3e"
    )
    assert digest("m", "", "i\ud800", b"").hex() == "d5dc1cec07a5c69cb49702ed01be73aadc5d0c70359ddb292598128f0aa67219"


def join(sharing: Dedup, entry: Entry) -> QueuedEntry:
    queued = queued_at(entry, NOW)
    assert sharing.join(queued, NOW) == Consequences()
    assert queued in sharing.followers
    return queued


def test_followers_hear_how_it_ran_under_their_own_numbers_and_later_ones_that_it_was_kept(sharing: Dedup) -> None:
    ran = BatchRun("gpu-0", 8, 0.1, NOW)
    original = begin(sharing, make("original", same()))
    follower = join(sharing, msgspec.structs.replace(make("follower", same()), nonce=7))
    consequences = sharing.end(original, Reply("original", "t", "fine", None, ran, 0.25, 3, nonce=1), NOW)
    shared = Reply("follower", "t", "fine", None, ran, 0.25, 3, 7, DedupKind.SAME)
    assert consequences == Consequences(replies=[(follower, shared)])
    later = queued_at(msgspec.structs.replace(make("later", same()), nonce=8), NOW)
    kept = msgspec.structs.replace(shared, id="later", nonce=8, kept=True)
    assert sharing.join(later, NOW) == Consequences(replies=[(later, kept)])


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


class TestWhatIsKept:
    BUDGET = KeptLimits.of(8000, 8000)
    """Room for four outputs of 200 bytes; one outcome has at most 2,000."""
    LARGE = "x" * 1000

    def test_of_a_task_with_an_output_that_is_too_large_is_that_it_was_and_by_what_it_came(self) -> None:
        sharing = Dedup(self.BUDGET)
        original = begin(sharing, make("original", task("original"), same()))
        join(sharing, make("task", task("task"), same()))
        answer(sharing, original, self.LARGE)
        failure = failures.too_large(weight(self.LARGE))
        assert sharing.outcome("t", "original", NOW) == Reply("original", "t", None, failure)
        kept = sharing.outcome("t", "task", NOW)
        assert isinstance(kept, Reply)
        assert (kept.id, kept.output, kept.shared, kept.kept) == ("task", None, DedupKind.SAME, False)

    @pytest.mark.parametrize("share", [same(), DedupKey(DedupKind.KEY, "k", b"", 60.0)])
    def test_by_a_key_or_of_identical_requests_is_nothing_that_is_too_large(self, share: DedupKey) -> None:
        sharing = Dedup(self.BUDGET)
        answer(sharing, begin(sharing, make("first", share)), self.LARGE)
        assert left_over(sharing) == {}
        begin(sharing, make("second", share))

    def test_for_no_time_is_nothing_and_pushes_nothing_out(self) -> None:
        sharing = Dedup(self.BUDGET)
        answer(sharing, begin(sharing, make("other", same(keep=0.0)), now=0.0), "fine", 0.0)
        assert left_over(sharing) == {}
        for number in range(4):
            answer(sharing, begin(sharing, make(f"task {number}", task(f"task {number}"))), "x" * 200)
        answer(sharing, begin(sharing, make("other", same(keep=0.0))), "x" * 200)
        assert all(isinstance(sharing.outcome("t", f"task {number}", NOW), Reply) for number in range(4))

    def test_by_one_tenant_is_no_concern_of_another(self) -> None:
        sharing = Dedup(KeptLimits.of(16_000, 8000))
        for tenant in "tu":
            for number in range(4):
                asked = make(f"task {number}", task(f"task {number}"), tenant=tenant)
                answer(sharing, begin(sharing, asked), "x" * 200)
        assert all(isinstance(sharing.outcome("t", f"task {number}", NOW), Reply) for number in range(4))


ASKED = b"digest"
TASK = DedupKey(DedupKind.TASK, "id", ASKED, 60.0)
KEY = DedupKey(DedupKind.KEY, "key", ASKED, 60.0)
SAME = DedupKey(DedupKind.SAME, f"{ASKED.hex()}@1", b"", 60.0)
LIMITS = KeptLimits.of(8000, 8000)
"""One outcome of at most 2,000 bytes."""


def entry(*dedup_keys: DedupKey, id: str = "id") -> Entry:
    return Entry(id, "m", "asked", 1, "t", "g", 2.0, 4.0, dedup_keys=dedup_keys, digest=ASKED)


class TestShares:
    def test_of_a_task_with_a_key_come_in_the_order_in_which_they_decide(self) -> None:
        settings = Settings(result_ttl_s=30.0, cache=True, collapse=True)
        assert dedup_keys_of(settings, "id", ASKED, RequestOptions(1.0, key="key", task=True), "1") == (
            DedupKey(DedupKind.TASK, "id", ASKED, 30.0),
            DedupKey(DedupKind.KEY, "key", ASKED, 30.0),
            DedupKey(DedupKind.SAME, f"{ASKED.hex()}@1", b"", 15.0, True),
        )

    @pytest.mark.parametrize(("cache", "keep"), [(False, 0.0), (True, 20.0)])
    @pytest.mark.parametrize("collapse", [False, True])
    def test_identical_requests_join_as_the_settings_say(self, cache: bool, keep: float, collapse: bool) -> None:
        settings = Settings(cache=cache, result_ttl_s=40.0, collapse=collapse)
        same = (DedupKey(DedupKind.SAME, f"{ASKED.hex()}@1", b"", keep, collapse),) if cache or collapse else ()
        assert dedup_keys_of(settings, "id", ASKED, RequestOptions(1.0), "1") == same
        renewing = (DedupKey(DedupKind.SAME, f"{ASKED.hex()}@1", b"", keep, False, True),) if cache else ()
        assert dedup_keys_of(settings, "id", ASKED, RequestOptions(1.0, fresh=True), "1") == renewing
        assert dedup_keys_of(settings, "id", ASKED, RequestOptions(1.0, fresh=True, unkept=True), "1") == ()


@pytest.mark.parametrize(("asked", "is_"), [((), False), ((SAME,), False), ((KEY,), False), ((SAME, TASK), True)])
def test_tasks_are_asked_for_by_their_ids_and_not_by_those_that_wait(asked: tuple[DedupKey, ...], is_: bool) -> None:
    assert is_task(entry(*asked)) is is_
    assert not is_task(entry(*asked, id="other"))


@pytest.mark.parametrize(
    ("share", "size", "told"),
    [
        (TASK, 1000, True),
        (KEY, 1000, True),
        (SAME, 1000, False),
        (TASK, 1, False),
        (msgspec.structs.replace(KEY, keep=0.0), 1000, False),
    ],
)
def test_unkept_is_what_a_client_may_ask_for_and_is_too_large(share: DedupKey, size: int, told: bool) -> None:
    assert unkept(entry(share), Reply("id", "t", "x" * size), LIMITS) is told


def test_an_id_stands_for_the_outcome_of_its_task_while_that_is_kept() -> None:
    sharing = Dedup(LIMITS)
    queued = queued_at(entry(TASK), 0.0)
    sharing.begin(queued, 0.0)
    assert sharing.with_id(entry(), 0.0) == entry(), "it still runs: that is a conflict elsewhere"
    sharing.end(queued, Reply("id", "t", None, Failure(errors.SHED, "full")), 0.0)
    assert sharing.with_id(entry(id="other"), 1.0) == entry(id="other")
    assert sharing.with_id(entry(SAME), 59.9) == entry(DedupKey(DedupKind.TASK, "id", ASKED), SAME)
    assert sharing.with_id(entry(SAME), 60.0) == entry(SAME)
