"""Dedup keys of a request, and the outcomes that are kept for later."""

from __future__ import annotations

import pytest

from headway import errors
from headway.config import Settings
from headway.core.dedup import Dedup, dedup_keys_of, is_task, unkept
from headway.core.fair_queue import queued_at
from headway.core.retention import KeptLimits
from headway.model import DedupKey, DedupKind, Entry, Failure, Reply, RequestOptions

ASKED = b"digest"
TASK = DedupKey(DedupKind.TASK, "id", ASKED, 60.0)
KEY = DedupKey(DedupKind.KEY, "key", ASKED, 60.0)
SAME = DedupKey(DedupKind.SAME, f"{ASKED.hex()}@1", b"", 60.0)
LIMITS = KeptLimits.of(8000, 8000)
"""One outcome of at most 2,000 bytes."""


def entry(*dedup_keys: DedupKey, id: str = "id") -> Entry:
    return Entry(id, "m", "asked", 1, "t", "g", 2.0, 4.0, b"", (), dedup_keys, digest=ASKED)


class TestShares:
    def test_a_plain_request_has_none(self) -> None:
        assert dedup_keys_of(Settings(), "id", ASKED, RequestOptions(1.0), "1") == ()

    def test_of_a_task_with_a_key_come_in_the_order_in_which_they_decide(self) -> None:
        settings = Settings(result_ttl_s=30.0, cache=True, cache_ttl_s=20.0, collapse=True)
        assert dedup_keys_of(settings, "id", ASKED, RequestOptions(1.0, key="key", task=True), "1") == (
            DedupKey(DedupKind.TASK, "id", ASKED, 30.0),
            DedupKey(DedupKind.KEY, "key", ASKED, 30.0),
            DedupKey(DedupKind.SAME, f"{ASKED.hex()}@1", b"", 20.0, True),
        )

    @pytest.mark.parametrize(("cache", "keep"), [(False, 0.0), (True, 20.0)])
    @pytest.mark.parametrize("collapse", [False, True])
    def test_identical_requests_join_and_are_kept_as_the_settings_say(
        self, cache: bool, keep: float, collapse: bool
    ) -> None:
        settings = Settings(cache=cache, cache_ttl_s=20.0, collapse=collapse)
        same = (DedupKey(DedupKind.SAME, f"{ASKED.hex()}@1", b"", keep, collapse),) if cache or collapse else ()
        assert dedup_keys_of(settings, "id", ASKED, RequestOptions(1.0), "1") == same
        assert dedup_keys_of(settings, "id", ASKED, RequestOptions(1.0, fresh=True), "1") == ()


class TestTasks:
    @pytest.mark.parametrize(
        ("dedup_keys", "is_"), [((), False), ((SAME,), False), ((KEY,), False), ((SAME, TASK), True)]
    )
    def test_are_asked_for_by_their_ids(self, dedup_keys: tuple[DedupKey, ...], is_: bool) -> None:
        assert is_task(entry(*dedup_keys)) is is_

    def test_are_not_those_that_only_wait_for_one(self) -> None:
        assert not is_task(entry(TASK, id="other"))


class TestUnkept:
    LARGE = Reply("id", "t", "x" * 1000)

    @pytest.mark.parametrize(("share", "told"), [(TASK, True), (KEY, True), (SAME, False)])
    def test_is_told_of_what_a_client_may_ask_for(self, share: DedupKey, told: bool) -> None:
        assert unkept(entry(share), self.LARGE, LIMITS) is told

    def test_not_when_it_is_small_or_kept_for_no_time(self) -> None:
        assert not unkept(entry(TASK), Reply("id", "t", "x"), LIMITS)
        assert not unkept(entry(DedupKey(DedupKind.KEY, "key", ASKED, 0.0)), self.LARGE, LIMITS)


class TestIdsOfTasks:
    def finished(self) -> Dedup:
        sharing = Dedup(LIMITS)
        queued = queued_at(entry(TASK), 0.0)
        sharing.begin(queued, 0.0)
        assert sharing.with_id(entry(), 0.0) == entry(), "it still runs: that is a conflict elsewhere"
        sharing.end(queued, Reply("id", "t", None, Failure(errors.SHED, "full")), 0.0)
        return sharing

    def test_an_id_whose_task_is_kept_stands_for_its_outcome(self) -> None:
        assert self.finished().with_id(entry(SAME), 59.9) == entry(DedupKey(DedupKind.TASK, "id", ASKED), SAME)

    def test_and_is_free_again_when_that_is_over(self) -> None:
        assert self.finished().with_id(entry(SAME), 60.0) == entry(SAME)

    def test_ids_of_others_are_no_concern(self) -> None:
        assert self.finished().with_id(entry(id="other"), 1.0) == entry(id="other")
