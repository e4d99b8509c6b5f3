"""The last answered requests are known by id and tenant, however they ended together."""

from __future__ import annotations

import pytest

from headway.gateway import request_log
from headway.gateway.pending import NOBODY, Ending, PendingRequest
from headway.gateway.request_log import RecentRequests
from headway.model import Entry, EntryState, Failure, Principal, Reply, RequestStatus

NOW = 10.0


def ended(id: str, tenant: str = "t", model: str = "m", seconds: float = 1.0, failed: bool = False) -> PendingRequest:
    entry = Entry(id, model, "input", 0, tenant, "gateway", 1.0, 4.0)
    reply = Reply(id, tenant, None, Failure("CODE", "why")) if failed else Reply(id, tenant, "output")
    since = NOW - seconds
    return PendingRequest(NOBODY, Principal("u", tenant, 0), entry, since, since + 4.0, None, reply=reply)


def found(recent: RecentRequests, id: str, tenant: str | None = "t") -> RequestStatus:
    status = recent.find(id, tenant)
    assert status is not None
    return status


def test_each_of_those_that_ended_together_has_its_own() -> None:
    recent = RecentRequests(lambda: NOW + 5.0)
    together = [
        ended("a", seconds=1.0),
        ended("ab", seconds=2.0),
        ended("b", "other", seconds=3.0),
        ended("c", model="n"),
    ]
    recent.finished([*together, ended("d", failed=True)], Ending.REPLIED, NOW)
    assert [found(recent, id, None).seconds for id in ("a", "ab", "b", "c")] == [1.0, 2.0, 3.0, 1.0]
    assert [found(recent, id, None).model for id in ("a", "c")] == ["m", "n"]
    assert found(recent, "a").state == EntryState.COMPLETED and found(recent, "a").since == 5.0
    assert found(recent, "d").state == EntryState.FAILED and found(recent, "d").failure == Failure("CODE", "why")
    assert found(recent, "b", "other").tenant == "other"


@pytest.mark.parametrize("id", ["", "b", "a\nab", "ab\n", "no"])
def test_no_other_text_finds_one(id: str) -> None:
    recent = RecentRequests(lambda: NOW)
    recent.finished([ended("a"), ended("ab")], Ending.REPLIED, NOW)
    assert recent.find(id, None) is None
    assert recent.find("a", "other") is None


def test_the_newest_of_an_id_is_told_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "REMEMBERED", 4)
    recent = RecentRequests(lambda: NOW)
    recent.finished([ended("a", seconds=1.0), ended("a", seconds=2.0)], Ending.REPLIED, NOW)
    assert found(recent, "a").seconds == 2.0
    recent.finished([ended("a", seconds=3.0), ended("b")], Ending.REPLIED, NOW)
    assert found(recent, "a").seconds == 3.0
    recent.finished([ended("c")], Ending.REPLIED, NOW)
    assert found(recent, "a").seconds == 3.0
    recent.finished([ended("d"), ended("e"), ended("f")], Ending.REPLIED, NOW)
    assert recent.find("a", None) is None and recent.find("b", None) is None
    assert found(recent, "c").seconds == 1.0


def test_who_left_is_not_remembered() -> None:
    recent = RecentRequests(lambda: NOW)
    recent.finished([ended("a")], Ending.LEFT, NOW)
    assert recent.find("a", None) is None
